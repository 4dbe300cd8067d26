#include "attention/operator.h"

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/checked_math.h"

namespace rapt {
namespace {

// The axes of Q, K or V, whatever their layout.
struct Axes {
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t length = 0;
  int64_t size = 0;
};

constexpr absl::string_view NameOf(Layout layout) {
  switch (layout) {
    case Layout::kBhsd:
      return "[batch, heads, length, head size]";
    case Layout::kBshd:
      return "[batch, length, heads, head size]";
    default:
      return "[batch, length, heads * head size]";
  }
}

absl::Status WrongRank(absl::string_view name, const Shape& shape, absl::string_view allowed) {
  return absl::InvalidArgumentError(absl::StrCat(name, " has shape ", ToString(shape), ", rank ",
                                                 shape.size(), "; it must be ", allowed));
}

absl::StatusOr<Layout> ResolveLayout(const OperatorCall& call, const FieldNames& names) {
  const size_t rank = call.q.shape.size();
  Layout layout = call.layout;
  if (layout == Layout::kByRank) {
    if (rank != 3 && rank != 4) return WrongRank(names.q, call.q.shape, "of rank 3 or 4");
    layout = rank == 4 ? Layout::kBhsd : Layout::kBse;
  }
  const size_t wanted = layout == Layout::kBse ? 3 : 4;
  for (const auto& [name, spec] :
       {std::pair<absl::string_view, const TensorSpec*>{names.q, &call.q},
        {names.k, &call.k},
        {names.v, &call.v}}) {
    if (spec->shape.size() != wanted) {
      return WrongRank(name, spec->shape,
                       absl::StrCat(NameOf(layout), ", rank ", wanted, ", as ", names.q, ", ",
                                    names.k, " and ", names.v, " all are"));
    }
  }
  return layout;
}

// Splits a 3-D tensor's last axis into heads.
absl::StatusOr<Axes> SplitHeads(absl::string_view name, const Shape& shape,
                                absl::string_view heads_name, int64_t heads) {
  if (heads < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(heads_name, " is ", heads, "; it must be at least 1"));
  }
  if (shape[2] % heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(name, " has a last axis of ", shape[2],
                                                   "; it must be a multiple of ", heads_name, " = ",
                                                   heads));
  }
  return Axes{shape[0], heads, shape[1], shape[2] / heads};
}

absl::StatusOr<Axes> AxesOf(absl::string_view name, const Shape& shape, Layout layout,
                            absl::string_view heads_name, std::optional<int64_t> heads) {
  if (layout == Layout::kBse) return SplitHeads(name, shape, heads_name, heads.value_or(1));
  const Axes axes = layout == Layout::kBhsd ? Axes{shape[0], shape[1], shape[2], shape[3]}
                                            : Axes{shape[0], shape[2], shape[1], shape[3]};
  if (heads && *heads != axes.heads) {
    return absl::InvalidArgumentError(absl::StrCat(heads_name, " is ", *heads, ", but ", name, " ",
                                                   ToString(shape), " has ", axes.heads,
                                                   " heads; they must be equal"));
  }
  return axes;
}

absl::Status CheckSame(absl::string_view what, absl::string_view name_a, int64_t a,
                       absl::string_view name_b, int64_t b) {
  if (a == b) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name_a, " has ", what, " ", a, ", ", name_b,
                                                 " has ", b, "; they must be equal"));
}

// `q` is the query, `q_name` its name.
absl::Status CheckType(absl::string_view name, const TensorSpec& spec, absl::string_view q_name,
                       const TensorSpec& q) {
  if (spec.dtype == q.dtype) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " has type ", NameOf(spec.dtype),
                                                 "; it must be ", NameOf(q.dtype), ", the type of ",
                                                 q_name));
}

absl::Status CheckQkv(const OperatorCall& call, const FieldNames& names, const Axes& q,
                      const Axes& k, const Axes& v) {
  absl::Status status = CheckType(names.k, call.k, names.q, call.q);
  if (status.ok()) status = CheckType(names.v, call.v, names.q, call.q);
  if (status.ok()) status = CheckSame("batch", names.k, k.batch, names.q, q.batch);
  if (status.ok()) status = CheckSame("batch", names.v, v.batch, names.q, q.batch);
  if (status.ok()) status = CheckSame("head size", names.k, k.size, names.q, q.size);
  if (status.ok()) status = CheckSame("number of heads", names.v, v.heads, names.k, k.heads);
  if (status.ok()) status = CheckSame("length", names.v, v.length, names.k, k.length);
  return status;
}

absl::Status CheckPastTensor(absl::string_view name, const TensorSpec& past, const Axes& now,
                             absl::string_view now_name) {
  if (past.shape.size() != 4) {
    return WrongRank(name, past.shape, "[batch, key/value heads, past length, head size], rank 4");
  }
  absl::Status status = CheckSame("batch", name, past.shape[0], now_name, now.batch);
  if (status.ok()) status = CheckSame("number of heads", name, past.shape[1], now_name, now.heads);
  if (status.ok()) status = CheckSame("head size", name, past.shape[3], now_name, now.size);
  return status;
}

// The length of the past; 0 when there is none.
absl::StatusOr<int64_t> ResolvePast(const OperatorCall& call, const FieldNames& names,
                                    const Axes& k, const Axes& v) {
  if (call.past_key.has_value() != call.past_value.has_value()) {
    const bool has_key = call.past_key.has_value();
    return absl::InvalidArgumentError(
        absl::StrCat(has_key ? names.past_key : names.past_value, " came without ",
                     has_key ? names.past_value : names.past_key, "; they must come together"));
  }
  if (!call.past_key) return 0;
  absl::Status status = CheckType(names.past_key, *call.past_key, names.q, call.q);
  if (status.ok()) status = CheckPastTensor(names.past_key, *call.past_key, k, names.k);
  if (status.ok()) status = CheckType(names.past_value, *call.past_value, names.q, call.q);
  if (status.ok()) status = CheckPastTensor(names.past_value, *call.past_value, v, names.v);
  if (status.ok()) {
    status = CheckSame("length", names.past_key, call.past_key->shape[2], names.past_value,
                       call.past_value->shape[2]);
  }
  if (!status.ok()) return status;
  return call.past_key->shape[2];
}

absl::StatusOr<MaskShape> ResolveMask(absl::string_view name, const TensorSpec& mask,
                                      bool rank3_is_batch) {
  const Shape& s = mask.shape;
  switch (s.size()) {
    case 1:
      return MaskShape{mask.dtype, {1, 1, 1, s[0]}};
    case 2:
      return MaskShape{mask.dtype, {1, 1, s[0], s[1]}};
    case 3:
      if (rank3_is_batch) return MaskShape{mask.dtype, {s[0], 1, s[1], s[2]}};
      return MaskShape{mask.dtype, {1, s[0], s[1], s[2]}};
    case 4:
      return MaskShape{mask.dtype, {s[0], s[1], s[2], s[3]}};
    default:
      return WrongRank(name, s, "of rank 1 to 4");
  }
}

absl::Status CheckKeyLengths(const TensorSpec& lengths, const FieldNames& names, int64_t batch) {
  if (lengths.dtype != DType::kInt64) {
    return absl::InvalidArgumentError(
        absl::StrCat(names.key_lengths, " has type ", NameOf(lengths.dtype), "; it must be INT64"));
  }
  if (lengths.shape.size() != 1 || lengths.shape[0] != batch) {
    return absl::InvalidArgumentError(absl::StrCat(names.key_lengths, " has shape ",
                                                   ToString(lengths.shape), "; it must be [", batch,
                                                   "], the batch of ", names.q));
  }
  return absl::OkStatus();
}

absl::Status CheckHeadCounts(const OperatorCall& call, const FieldNames& names, Layout layout) {
  if (layout != Layout::kBse || call.q_num_heads.has_value() == call.kv_num_heads.has_value()) {
    return absl::OkStatus();
  }
  const bool has_query_heads = call.q_num_heads.has_value();
  return absl::InvalidArgumentError(absl::StrCat(
      has_query_heads ? names.query_heads : names.kv_heads, " came without ",
      has_query_heads ? names.kv_heads : names.query_heads, "; 3-D inputs need both or neither"));
}

absl::Status CheckSizes(const OperatorCall& call, const FieldNames& names) {
  const std::pair<absl::string_view, const TensorSpec*> tensors[] = {
      {names.q, &call.q},
      {names.k, &call.k},
      {names.v, &call.v},
      {names.mask, call.attn_mask ? &*call.attn_mask : nullptr},
      {names.past_key, call.past_key ? &*call.past_key : nullptr},
      {names.past_value, call.past_value ? &*call.past_value : nullptr},
      {names.key_lengths, call.nonpad_kv_seqlen ? &*call.nonpad_kv_seqlen : nullptr},
  };
  for (const auto& [name, spec] : tensors) {
    if (spec == nullptr) continue;
    if (auto bytes = ByteSize(name, *spec); !bytes.ok()) return bytes.status();
  }
  return absl::OkStatus();
}

Shape OutputShape(const Problem& p, Layout layout) {
  switch (layout) {
    case Layout::kBshd:
      return {p.batch, p.query_length, p.query_heads, p.value_head_size};
    case Layout::kBse:
      return {p.batch, p.query_length, p.query_heads * p.value_head_size};
    default:
      return {p.batch, p.query_heads, p.query_length, p.value_head_size};
  }
}

void DescribeOutputs(ResolvedCall& call) {
  const Problem& p = call.problem;
  const int64_t t = p.total_keys();
  call.y = {p.dtype, OutputShape(p, call.layout)};
  call.lse = {p.lse_dtype(), {p.batch, p.query_heads, p.query_length}};
  call.scores = {p.dtype, {p.batch, p.query_heads, p.query_length, t}};
  call.present_key = {p.dtype, {p.batch, p.kv_heads, t, p.head_size}};
  call.present_value = {p.dtype, {p.batch, p.kv_heads, t, p.value_head_size}};
}

template <typename Byte>
BasicTensorView<Byte> ViewOf(Byte* data, DType dtype, const std::array<int64_t, 4>& dims,
                             Layout layout = Layout::kBhsd) {
  const auto [b, h, s, d] = dims;
  const std::array<int64_t, 4> strides = layout == Layout::kBhsd
                                             ? RowMajorStrides(dims)
                                             : std::array<int64_t, 4>{s * h * d, d, h * d, 1};
  return {data, dtype, dims, strides};
}

}  // namespace

std::string ToString(const Shape& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<int64_t> ByteSize(absl::string_view name, const TensorSpec& spec) {
  for (int64_t axis : spec.shape) {
    if (axis >= 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has shape ", ToString(spec.shape), "; no axis may be negative"));
  }
  std::optional<int64_t> bytes = CheckedProduct(spec.shape);
  if (bytes) bytes = CheckedMul(*bytes, SizeOf(spec.dtype));
  if (bytes) return *bytes;
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has shape ", ToString(spec.shape), "; its size overflows 64 bits"));
}

absl::StatusOr<ResolvedCall> Resolve(const OperatorCall& call, const FieldNames& names) {
  absl::Status status = CheckSizes(call, names);
  if (!status.ok()) return status;
  const absl::StatusOr<Layout> layout = ResolveLayout(call, names);
  if (!layout.ok()) return layout.status();
  status = CheckHeadCounts(call, names, *layout);
  if (!status.ok()) return status;

  const auto q = AxesOf(names.q, call.q.shape, *layout, names.query_heads, call.q_num_heads);
  if (!q.ok()) return q.status();
  const auto k = AxesOf(names.k, call.k.shape, *layout, names.kv_heads, call.kv_num_heads);
  if (!k.ok()) return k.status();
  const auto v = AxesOf(names.v, call.v.shape, *layout, names.kv_heads, call.kv_num_heads);
  if (!v.ok()) return v.status();
  status = CheckQkv(call, names, *q, *k, *v);
  if (!status.ok()) return status;
  const absl::StatusOr<int64_t> past_length = ResolvePast(call, names, *k, *v);
  if (!past_length.ok()) return past_length.status();

  ResolvedCall resolved;
  resolved.layout = *layout;
  resolved.names = &names;
  resolved.problem = Problem{
      .dtype = call.q.dtype,
      .batch = q->batch,
      .query_heads = q->heads,
      .kv_heads = k->heads,
      .query_length = q->length,
      .key_length = k->length,
      .past_length = *past_length,
      .head_size = q->size,
      .value_head_size = v->size,
      .scale = call.scale,
      .softcap = call.softcap,
      .causal = call.is_causal,
      .alignment = call.alignment,
      .left_window = call.left_window_size,
      .right_window = call.right_window_size,
      .mask = std::nullopt,
      .has_key_lengths = call.nonpad_kv_seqlen.has_value(),
      .softmax_in_fp64 = call.softmax_in_fp64,
      .dropout = call.dropout,
      .score_output = call.score_output,
      .wants_lse = call.wants_lse,
      .wants_present = call.wants_present,
  };
  if (call.attn_mask) {
    const bool rank3_is_batch = *layout == Layout::kBse && !call.q_num_heads;
    absl::StatusOr<MaskShape> mask = ResolveMask(names.mask, *call.attn_mask, rank3_is_batch);
    if (!mask.ok()) return mask.status();
    resolved.problem.mask = *mask;
  }
  if (call.nonpad_kv_seqlen) {
    status = CheckKeyLengths(*call.nonpad_kv_seqlen, names, q->batch);
    if (!status.ok()) return status;
  }
  status = Validate(resolved.problem, names);
  if (!status.ok()) return status;
  DescribeOutputs(resolved);
  return resolved;
}

TensorView ResolvedCall::Query(const std::byte* data) const {
  const Problem& p = problem;
  return ViewOf(data, p.dtype, {p.batch, p.query_heads, p.query_length, p.head_size}, layout);
}

TensorView ResolvedCall::Key(const std::byte* data) const {
  const Problem& p = problem;
  return ViewOf(data, p.dtype, {p.batch, p.kv_heads, p.key_length, p.head_size}, layout);
}

TensorView ResolvedCall::Value(const std::byte* data) const {
  const Problem& p = problem;
  return ViewOf(data, p.dtype, {p.batch, p.kv_heads, p.key_length, p.value_head_size}, layout);
}

TensorView ResolvedCall::Mask(const std::byte* data) const {
  TensorView view = ViewOf(data, problem.mask->dtype, problem.mask->dims);
  for (int axis = 0; axis < 4; ++axis) {
    if (view.dims[axis] == 1) view.strides[axis] = 0;
  }
  return view;
}

TensorView ResolvedCall::PastKey(const std::byte* data) const {
  const Problem& p = problem;
  return ViewOf(data, p.dtype, {p.batch, p.kv_heads, p.past_length, p.head_size});
}

TensorView ResolvedCall::PastValue(const std::byte* data) const {
  const Problem& p = problem;
  return ViewOf(data, p.dtype, {p.batch, p.kv_heads, p.past_length, p.value_head_size});
}

MutableTensorView ResolvedCall::Output(std::byte* data) const {
  const Problem& p = problem;
  return ViewOf(data, p.dtype, {p.batch, p.query_heads, p.query_length, p.value_head_size}, layout);
}

MutableTensorView ResolvedCall::Lse(std::byte* data) const {
  const Problem& p = problem;
  return ViewOf(data, p.lse_dtype(), {p.batch, p.query_heads, p.query_length, 1});
}

MutableTensorView ResolvedCall::Scores(std::byte* data) const {
  const Problem& p = problem;
  return ViewOf(data, p.dtype, {p.batch, p.query_heads, p.query_length, p.total_keys()});
}

MutableTensorView ResolvedCall::PresentKey(std::byte* data) const {
  const Problem& p = problem;
  return ViewOf(data, p.dtype, {p.batch, p.kv_heads, p.total_keys(), p.head_size});
}

MutableTensorView ResolvedCall::PresentValue(std::byte* data) const {
  const Problem& p = problem;
  return ViewOf(data, p.dtype, {p.batch, p.kv_heads, p.total_keys(), p.value_head_size});
}

}  // namespace rapt
