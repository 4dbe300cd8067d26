#include "server/attention/operator.h"

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/checked_math.h"

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

absl::StatusOr<Layout> ResolveLayout(const OperatorCall& call) {
  const size_t rank = call.q.shape.size();
  Layout layout = call.layout;
  if (layout == Layout::kByRank) {
    if (rank != 3 && rank != 4) return WrongRank("Q", call.q.shape, "of rank 3 or 4");
    layout = rank == 4 ? Layout::kBhsd : Layout::kBse;
  }
  const size_t wanted = layout == Layout::kBse ? 3 : 4;
  for (const auto& [name, spec] : {std::pair<absl::string_view, const TensorSpec*>{"Q", &call.q},
                                   {"K", &call.k},
                                   {"V", &call.v}}) {
    if (spec->shape.size() != wanted) {
      return WrongRank(name, spec->shape,
                       absl::StrCat(NameOf(layout), ", rank ", wanted, ", as Q, K and V all are"));
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

absl::Status CheckType(absl::string_view name, const TensorSpec& spec, DType wanted) {
  if (spec.dtype == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      name, " has type ", NameOf(spec.dtype), "; it must be ", NameOf(wanted), ", the type of Q"));
}

absl::Status CheckQkv(const OperatorCall& call, const Axes& q, const Axes& k, const Axes& v) {
  absl::Status status = CheckType("K", call.k, call.q.dtype);
  if (status.ok()) status = CheckType("V", call.v, call.q.dtype);
  if (status.ok()) status = CheckSame("batch", "K", k.batch, "Q", q.batch);
  if (status.ok()) status = CheckSame("batch", "V", v.batch, "Q", q.batch);
  if (status.ok()) status = CheckSame("head size", "K", k.size, "Q", q.size);
  if (status.ok()) status = CheckSame("number of heads", "V", v.heads, "K", k.heads);
  if (status.ok()) status = CheckSame("length", "V", v.length, "K", k.length);
  return status;
}

absl::Status CheckPastTensor(absl::string_view name, const TensorSpec& past, const Axes& now,
                             absl::string_view now_name, DType dtype) {
  if (past.shape.size() != 4) {
    return WrongRank(name, past.shape, "[batch, key/value heads, past length, head size], rank 4");
  }
  absl::Status status = CheckType(name, past, dtype);
  if (status.ok()) status = CheckSame("batch", name, past.shape[0], now_name, now.batch);
  if (status.ok()) status = CheckSame("number of heads", name, past.shape[1], now_name, now.heads);
  if (status.ok()) status = CheckSame("head size", name, past.shape[3], now_name, now.size);
  return status;
}

// The length of the past; 0 when there is none.
absl::StatusOr<int64_t> ResolvePast(const OperatorCall& call, const Axes& k, const Axes& v) {
  if (call.past_key.has_value() != call.past_value.has_value()) {
    const bool has_key = call.past_key.has_value();
    return absl::InvalidArgumentError(
        absl::StrCat(has_key ? "past_key" : "past_value", " came without ",
                     has_key ? "past_value" : "past_key", "; they must come together"));
  }
  if (!call.past_key) return 0;
  absl::Status status = CheckPastTensor("past_key", *call.past_key, k, "K", call.q.dtype);
  if (!status.ok()) return status;
  status = CheckPastTensor("past_value", *call.past_value, v, "V", call.q.dtype);
  if (!status.ok()) return status;
  status = CheckSame("length", "past_key", call.past_key->shape[2], "past_value",
                     call.past_value->shape[2]);
  if (!status.ok()) return status;
  return call.past_key->shape[2];
}

absl::StatusOr<MaskShape> ResolveMask(const TensorSpec& mask, bool rank3_is_batch) {
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
      return WrongRank("attn_mask", s, "of rank 1 to 4");
  }
}

absl::Status CheckKeyLengths(const TensorSpec& lengths, int64_t batch) {
  if (lengths.dtype != DType::kInt64) {
    return absl::InvalidArgumentError(
        absl::StrCat("nonpad_kv_seqlen has type ", NameOf(lengths.dtype), "; it must be INT64"));
  }
  if (lengths.shape.size() != 1 || lengths.shape[0] != batch) {
    return absl::InvalidArgumentError(absl::StrCat("nonpad_kv_seqlen has shape ",
                                                   ToString(lengths.shape), "; it must be [", batch,
                                                   "], the batch of Q"));
  }
  return absl::OkStatus();
}

absl::Status CheckHeadCounts(const OperatorCall& call, Layout layout) {
  if (layout != Layout::kBse || call.q_num_heads.has_value() == call.kv_num_heads.has_value()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      call.q_num_heads ? "q_num_heads came without kv_num_heads; 3-D inputs need both or neither"
                       : "kv_num_heads came without q_num_heads; 3-D inputs need both or neither");
}

absl::Status CheckSizes(const OperatorCall& call) {
  const std::pair<absl::string_view, const TensorSpec*> tensors[] = {
      {"Q", &call.q},
      {"K", &call.k},
      {"V", &call.v},
      {"attn_mask", call.attn_mask ? &*call.attn_mask : nullptr},
      {"past_key", call.past_key ? &*call.past_key : nullptr},
      {"past_value", call.past_value ? &*call.past_value : nullptr},
      {"nonpad_kv_seqlen", call.nonpad_kv_seqlen ? &*call.nonpad_kv_seqlen : nullptr},
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
  int64_t bytes = SizeOf(spec.dtype);
  bool has_zero = false;
  std::optional<int64_t> product = bytes;
  for (int64_t axis : spec.shape) {
    if (axis < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " has shape ", ToString(spec.shape), "; no axis may be negative"));
    }
    has_zero = has_zero || axis == 0;
    if (product) product = CheckedMul(*product, axis);
  }
  if (has_zero) return 0;
  if (!product) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has shape ", ToString(spec.shape), "; its size overflows 64 bits"));
  }
  return *product;
}

absl::StatusOr<ResolvedCall> Resolve(const OperatorCall& call) {
  absl::Status status = CheckSizes(call);
  if (!status.ok()) return status;
  const absl::StatusOr<Layout> layout = ResolveLayout(call);
  if (!layout.ok()) return layout.status();
  status = CheckHeadCounts(call, *layout);
  if (!status.ok()) return status;

  const auto q = AxesOf("Q", call.q.shape, *layout, "q_num_heads", call.q_num_heads);
  if (!q.ok()) return q.status();
  const auto k = AxesOf("K", call.k.shape, *layout, "kv_num_heads", call.kv_num_heads);
  if (!k.ok()) return k.status();
  const auto v = AxesOf("V", call.v.shape, *layout, "kv_num_heads", call.kv_num_heads);
  if (!v.ok()) return v.status();
  status = CheckQkv(call, *q, *k, *v);
  if (!status.ok()) return status;
  const absl::StatusOr<int64_t> past_length = ResolvePast(call, *k, *v);
  if (!past_length.ok()) return past_length.status();

  ResolvedCall resolved;
  resolved.layout = *layout;
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
    absl::StatusOr<MaskShape> mask = ResolveMask(*call.attn_mask, rank3_is_batch);
    if (!mask.ok()) return mask.status();
    resolved.problem.mask = *mask;
  }
  if (call.nonpad_kv_seqlen) {
    status = CheckKeyLengths(*call.nonpad_kv_seqlen, q->batch);
    if (!status.ok()) return status;
  }
  status = Validate(resolved.problem);
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
