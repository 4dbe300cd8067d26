#include "attention/operator.h"

#include <algorithm>
#include <array>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/checked_math.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

// The axes of Q, K or V in any layout.
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
  return Invalid(name, " has shape ", ToString(shape), ", rank ", shape.size(), "; it must be ",
                 allowed);
}

absl::StatusOr<Layout> ResolveLayout(const OperatorCall& call, const FieldNames& names) {
  const Shape& q = call.inputs[Role::kQ]->shape;
  Layout layout = call.layout;
  if (layout == Layout::kByRank) {
    if (q.size() != 3 && q.size() != 4) return WrongRank(names[Role::kQ], q, "of rank 3 or 4");
    layout = q.size() == 4 ? Layout::kBhsd : Layout::kBse;
  }
  const size_t wanted = layout == Layout::kBse ? 3 : 4;
  for (Role role : {Role::kQ, Role::kK, Role::kV}) {
    if (!call.inputs[role]) continue;  // V in K
    const Shape& shape = call.inputs[role]->shape;
    if (shape.size() != wanted) {
      return WrongRank(
          names[role], shape,
          absl::StrCat(NameOf(layout), ", rank ", wanted, ", for all of ", names[Role::kQ], ", ",
                       names[Role::kK], " and ", names[Role::kV]));
    }
  }
  return layout;
}

// Splits a 3-D tensor's last axis into heads.
absl::StatusOr<Axes> SplitHeads(absl::string_view name, const Shape& shape,
                                absl::string_view heads_name, int64_t heads) {
  if (heads < 1) {
    return Invalid(heads_name, " is ", heads, "; it must be at least 1");
  }
  if (shape[2] % heads != 0) {
    return Invalid(name, " has a last axis of ", shape[2], "; it must be a multiple of ",
                   heads_name, " = ", heads);
  }
  return Axes{shape[0], heads, shape[1], shape[2] / heads};
}

absl::StatusOr<Axes> AxesOf(const OperatorCall& call, Role role, Layout layout,
                            const FieldNames& names) {
  const Shape& shape = call.inputs[role]->shape;
  const bool is_query = role == Role::kQ;
  const std::optional<int64_t> heads = is_query ? call.q_num_heads : call.kv_num_heads;
  const absl::string_view heads_name =
      names[is_query ? Attribute::kQueryHeads : Attribute::kKvHeads];
  if (layout == Layout::kBse) return SplitHeads(names[role], shape, heads_name, heads.value_or(1));
  const Axes axes = layout == Layout::kBhsd ? Axes{shape[0], shape[1], shape[2], shape[3]}
                                            : Axes{shape[0], shape[2], shape[1], shape[3]};
  if (heads && *heads != axes.heads) {
    return Invalid(heads_name, " is ", *heads, ", but ", names[role], " ", ToString(shape), " has ",
                   axes.heads, " heads; they must be equal");
  }
  return axes;
}

// The axes of V, which may be a part of K.
absl::StatusOr<Axes> ValueAxesOf(const OperatorCall& call, Layout layout, const Axes& k,
                                 const FieldNames& names) {
  if (!call.v_head_size) return AxesOf(call, Role::kV, layout, names);
  const int64_t size = *call.v_head_size;
  if (size < 1 || size > k.size) {
    return Invalid(names[Attribute::kValueHeadSize], " is ", size, "; it must be from 1 to ",
                   k.size, ", the head size of ", names[Role::kK]);
  }
  return Axes{k.batch, k.heads, k.length, size};
}

absl::Status CheckSame(absl::string_view what, absl::string_view name_a, int64_t a,
                       absl::string_view name_b, int64_t b) {
  if (a == b) return absl::OkStatus();
  return Invalid(name_a, " has ", what, " ", a, ", ", name_b, " has ", b, "; they must be equal");
}

absl::Status CheckType(const OperatorCall& call, Role role, const FieldNames& names) {
  const DType dtype = call.inputs[role]->dtype;
  const DType wanted = call.inputs[Role::kQ]->dtype;
  if (dtype == wanted) return absl::OkStatus();
  return Invalid(names[role], " has type ", NameOf(dtype), "; it must be ", NameOf(wanted),
                 ", the type of ", names[Role::kQ]);
}

absl::Status CheckQkv(const OperatorCall& call, const FieldNames& names, const Axes& q,
                      const Axes& k, const Axes& v) {
  const absl::string_view q_name = names[Role::kQ];
  const absl::string_view k_name = names[Role::kK];
  const absl::string_view v_name = names[Role::kV];
  const DType dtype = call.inputs[Role::kQ]->dtype;
  if (!IsFloat(dtype)) {
    return Invalid(q_name, " has type ", NameOf(dtype), "; it must be FP32, FP16, BF16 or FP64");
  }
  RAPT_RETURN_IF_ERROR(CheckType(call, Role::kK, names));
  if (call.inputs[Role::kV]) RAPT_RETURN_IF_ERROR(CheckType(call, Role::kV, names));
  RAPT_RETURN_IF_ERROR(CheckSame("batch", k_name, k.batch, q_name, q.batch));
  RAPT_RETURN_IF_ERROR(CheckSame("batch", v_name, v.batch, q_name, q.batch));
  RAPT_RETURN_IF_ERROR(CheckSame("head size", k_name, k.size, q_name, q.size));
  RAPT_RETURN_IF_ERROR(CheckSame("number of heads", v_name, v.heads, k_name, k.heads));
  return CheckSame("length", v_name, v.length, k_name, k.length);
}

// `now` are the axes of K or V, whose name is `now_name`.
absl::Status CheckPastTensor(const OperatorCall& call, Role role, const FieldNames& names,
                             const Axes& now, absl::string_view now_name) {
  RAPT_RETURN_IF_ERROR(CheckType(call, role, names));
  const absl::string_view name = names[role];
  const Shape& past = call.inputs[role]->shape;
  if (past.size() != 4) {
    return WrongRank(name, past, "[batch, key/value heads, past length, head size], rank 4");
  }
  RAPT_RETURN_IF_ERROR(CheckSame("batch", name, past[0], now_name, now.batch));
  RAPT_RETURN_IF_ERROR(CheckSame("number of heads", name, past[1], now_name, now.heads));
  return CheckSame("head size", name, past[3], now_name, now.size);
}

// Returns the length of the past; 0 without one.
absl::StatusOr<int64_t> ResolvePast(const OperatorCall& call, const FieldNames& names,
                                    const Axes& k, const Axes& v) {
  const std::optional<TensorSpec>& key = call.inputs[Role::kPastKey];
  const std::optional<TensorSpec>& value = call.inputs[Role::kPastValue];
  if (call.v_head_size) {
    if (!key) return 0;
    RAPT_RETURN_IF_ERROR(CheckPastTensor(call, Role::kPastKey, names, k, names[Role::kK]));
    return key->shape[2];
  }
  if (key.has_value() != value.has_value()) {
    const Role given = key ? Role::kPastKey : Role::kPastValue;
    const Role missing = key ? Role::kPastValue : Role::kPastKey;
    return Invalid(names[given], " is set but ", names[missing], " is not; set both or neither");
  }
  if (!key) return 0;
  RAPT_RETURN_IF_ERROR(CheckPastTensor(call, Role::kPastKey, names, k, names[Role::kK]));
  RAPT_RETURN_IF_ERROR(CheckPastTensor(call, Role::kPastValue, names, v, names[Role::kV]));
  RAPT_RETURN_IF_ERROR(CheckSame("length", names[Role::kPastKey], key->shape[2],
                                 names[Role::kPastValue], value->shape[2]));
  return key->shape[2];
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
    return Invalid(names[Role::kKeyLengths], " has type ", NameOf(lengths.dtype),
                   "; it must be INT64");
  }
  if (lengths.shape.size() != 1 || lengths.shape[0] != batch) {
    return Invalid(names[Role::kKeyLengths], " has shape ", ToString(lengths.shape),
                   "; it must be [", batch, "], the batch of ", names[Role::kQ]);
  }
  return absl::OkStatus();
}

// Checks an input with a number for each head, and copies its type.
absl::Status ResolveHeads(Role role, const OperatorCall& call, const FieldNames& names,
                          int64_t heads, std::optional<DType>& dtype) {
  const std::optional<TensorSpec>& spec = call.inputs[role];
  if (!spec) return absl::OkStatus();
  dtype = spec->dtype;
  if (spec->shape.size() == 1 && spec->shape[0] == heads) return absl::OkStatus();
  return Invalid(names[role], " has shape ", ToString(spec->shape), "; it must be [", heads,
                 "], the number of heads of ", names[Role::kQ]);
}

// Checks the shape of alibi_slopes, bias_table and relative_bias as far as Validate() cannot.
absl::Status ResolveRelative(const OperatorCall& call, const FieldNames& names, Problem& p) {
  const auto wrong_shape = [&](Role role, absl::string_view allowed) {
    return Invalid(names[role], " has shape ", ToString(call.inputs[role]->shape), "; it must be ",
                   allowed);
  };
  if (const std::optional<TensorSpec>& slopes = call.inputs[Role::kAlibiSlopes]) {
    const Shape& s = slopes->shape;
    if (s.empty() || s.size() > 2 || s.back() != p.query_heads) {
      return wrong_shape(Role::kAlibiSlopes,
                         absl::StrCat("[", p.query_heads, "] or [", p.batch, ", ", p.query_heads,
                                      "], the heads and batch of ", names[Role::kQ]));
    }
    p.alibi_slopes = AlibiSlopes{slopes->dtype, s.size() == 2 ? s[0] : 1};
  }
  if (const std::optional<TensorSpec>& table = call.inputs[Role::kBiasTable]) {
    const Shape& s = table->shape;
    if (s.size() != 2 || s[1] != p.query_heads) {
      return wrong_shape(Role::kBiasTable, absl::StrCat("[buckets, ", p.query_heads,
                                                        "], the heads of ", names[Role::kQ]));
    }
    p.bias_table = BiasTable{table->dtype, s[0]};
  }
  if (const std::optional<TensorSpec>& bias = call.inputs[Role::kRelativeBias]) {
    const Shape& s = bias->shape;
    if (s.size() != 2) return wrong_shape(Role::kRelativeBias, "[1 or heads, 2c + 1], rank 2");
    p.relative_bias = RelativeBias{bias->dtype, s[0], s[1]};
  }
  return absl::OkStatus();
}

// Checks the shape of relative_keys, relative_values and relative_query as far as Validate()
// cannot.
absl::Status ResolveRelativeVectors(const OperatorCall& call, const FieldNames& names, Problem& p) {
  const struct {
    Role role;
    std::optional<RelativeVectors>& vectors;
    int64_t size;
    Role other;
  } tables[] = {{Role::kRelativeKeys, p.relative_keys, p.head_size, Role::kQ},
                {Role::kRelativeValues, p.relative_values, p.value_head_size, Role::kV}};
  for (const auto& [role, vectors, size, other] : tables) {
    if (!call.inputs[role]) continue;
    const Shape& s = call.inputs[role]->shape;
    if (s.size() != 3 || s[2] != size) {
      return Invalid(names[role], " has shape ", ToString(s), "; it must be [1 or heads, 2c + 1, ",
                     size, "], where ", size, " is the head size of ", names[other]);
    }
    vectors = RelativeVectors{call.inputs[role]->dtype, s[0], s[1]};
  }
  const std::optional<TensorSpec>& query = call.inputs[Role::kRelativeQuery];
  if (!query) return absl::OkStatus();
  const Shape& shape = call.inputs[Role::kQ]->shape;
  if (query->shape != shape) {
    return Invalid(names[Role::kRelativeQuery], " has shape ", ToString(query->shape),
                   "; it must be ", ToString(shape), ", the shape of ", names[Role::kQ]);
  }
  p.has_relative_query = true;
  return CheckType(call, Role::kRelativeQuery, names);
}

absl::Status CheckPositionIds(const OperatorCall& call, Role role, const FieldNames& names,
                              int64_t batch, int64_t length) {
  const TensorSpec& ids = *call.inputs[role];
  if (ids.dtype != DType::kInt64) {
    return Invalid(names[role], " has type ", NameOf(ids.dtype), "; it must be INT64");
  }
  if (ids.shape == Shape{batch, length}) return absl::OkStatus();
  return Invalid(names[role], " has shape ", ToString(ids.shape), "; it must be [", batch, ", ",
                 length, "], the batch and length of ",
                 names[role == Role::kPositionIds ? Role::kQ : Role::kK]);
}

// Checks the shapes of the caches of angles and of position ids as far as Validate() cannot.
absl::Status ResolveRotary(const OperatorCall& call, const FieldNames& names, Problem& p) {
  const std::optional<TensorSpec>& cos = call.inputs[Role::kCosCache];
  const std::optional<TensorSpec>& sin = call.inputs[Role::kSinCache];
  if (cos.has_value() != sin.has_value()) {
    const Role given = cos ? Role::kCosCache : Role::kSinCache;
    const Role missing = cos ? Role::kSinCache : Role::kCosCache;
    return Invalid(names[given], " is set but ", names[missing], " is not; set both or neither");
  }
  if (cos) {
    const Shape& s = cos->shape;
    if (s.size() != 2 && s.size() != 3) {
      return WrongRank(names[Role::kCosCache], s, "[M, r/2] or [B, S, r/2]");
    }
    if (sin->shape != s || sin->dtype != cos->dtype) {
      return Invalid(names[Role::kSinCache], " is ", NameOf(sin->dtype), " ", ToString(sin->shape),
                     ", ", names[Role::kCosCache], " is ", NameOf(cos->dtype), " ", ToString(s),
                     "; they must be equal");
    }
    p.rotary_cache = RotaryCache{.dtype = cos->dtype, .rows = s[s.size() - 2], .pairs = s.back()};
    if (s.size() == 3) p.rotary_cache->batch = s[0];
  }
  p.has_position_ids = call.inputs[Role::kPositionIds].has_value();
  p.has_key_position_ids = call.inputs[Role::kKeyPositionIds].has_value();
  if (p.has_position_ids) {
    RAPT_RETURN_IF_ERROR(
        CheckPositionIds(call, Role::kPositionIds, names, p.batch, p.query_length));
  }
  if (!p.has_key_position_ids) return absl::OkStatus();
  return CheckPositionIds(call, Role::kKeyPositionIds, names, p.batch, p.key_length);
}

absl::Status ResolveAdditive(const OperatorCall& call, const FieldNames& names, Problem& p) {
  const std::optional<TensorSpec>& weight = call.inputs[Role::kAdditiveWeight];
  if (!weight) return absl::OkStatus();
  const Shape& s = weight->shape;
  if (s.size() != 2 || s[1] != p.head_size) {
    return Invalid(names[Role::kAdditiveWeight], " has shape ", ToString(s),
                   "; it must be [1 or heads, ", p.head_size, "], the head size of ",
                   names[Role::kQ], " and ", names[Role::kK]);
  }
  p.additive_weight = AdditiveWeight{weight->dtype, s[0]};
  return absl::OkStatus();
}

// The block mask, the selection and the global mask.
absl::Status ResolveVisibility(const OperatorCall& call, const FieldNames& names, Problem& p) {
  const auto check = [&](Role role, DType dtype, size_t rank, absl::string_view shape) {
    const TensorSpec& spec = *call.inputs[role];
    if (spec.dtype != dtype) {
      return Invalid(names[role], " has type ", NameOf(spec.dtype), "; it must be ", NameOf(dtype));
    }
    if (spec.shape.size() == rank) return absl::OkStatus();
    return WrongRank(names[role], spec.shape, absl::StrCat(shape, ", rank ", rank));
  };
  if (const std::optional<TensorSpec>& mask = call.inputs[Role::kBlockMask]) {
    RAPT_RETURN_IF_ERROR(check(Role::kBlockMask, DType::kBool, 4,
                               "[1 or batch, 1 or heads, blocks of queries, blocks of keys]"));
    p.block_mask.emplace();
    std::copy(mask->shape.begin(), mask->shape.end(), p.block_mask->begin());
  }
  if (const std::optional<TensorSpec>& selected = call.inputs[Role::kSelectedIndices]) {
    RAPT_RETURN_IF_ERROR(check(Role::kSelectedIndices, DType::kInt32, 4,
                               "[batch, 1 or key/value heads, query length, N]"));
    const Shape& s = selected->shape;
    if (s[0] != p.batch || s[2] != p.query_length) {
      return Invalid(names[Role::kSelectedIndices], " has shape ", ToString(s), "; it must be [",
                     p.batch, ", 1 or ", p.kv_heads, ", ", p.query_length, ", N]");
    }
    p.selected = SelectedIndices{s[1], s[3]};
  }
  if (const std::optional<TensorSpec>& global = call.inputs[Role::kGlobalMask]) {
    RAPT_RETURN_IF_ERROR(check(Role::kGlobalMask, DType::kBool, 2, "[batch, past + key length]"));
    const Shape& s = global->shape;
    if (s[0] != p.batch || s[1] != p.total_keys()) {
      return Invalid(names[Role::kGlobalMask], " has shape ", ToString(s), "; it must be [",
                     p.batch, ", ", p.total_keys(), "], [batch, past + key length]");
    }
    p.has_global_mask = true;
  }
  return absl::OkStatus();
}

absl::Status CheckHeadCounts(const OperatorCall& call, const FieldNames& names, Layout layout) {
  if (layout != Layout::kBse || call.q_num_heads.has_value() == call.kv_num_heads.has_value()) {
    return absl::OkStatus();
  }
  const bool has_query_heads = call.q_num_heads.has_value();
  return Invalid(has_query_heads ? names[Attribute::kQueryHeads] : names[Attribute::kKvHeads],
                 " is set but ",
                 has_query_heads ? names[Attribute::kKvHeads] : names[Attribute::kQueryHeads],
                 " is not; with 3-D inputs, set both or neither");
}

absl::Status CheckPresenceAndSizes(const OperatorCall& call, const FieldNames& names) {
  for (Role role : kAllInputs) {
    const std::optional<TensorSpec>& spec = call.inputs[role];
    if (spec) {
      RAPT_RETURN_IF_ERROR(ByteSize(names[role], *spec).status());
    } else if (InfoOf(role).required && !(role == Role::kV && call.v_head_size)) {
      return Invalid(names[role], " is missing");
    }
  }
  for (Role role : {Role::kV, Role::kPastValue}) {
    if (!call.v_head_size || !call.inputs[role]) continue;
    return Invalid(names[role], " and ", names[Attribute::kValueHeadSize], " are both set; with ",
                   names[Attribute::kValueHeadSize], " the values are in ", names[Role::kK]);
  }
  return absl::OkStatus();
}

// The shape of an output as the caller sees it.
Shape OutputShape(const RoleInfo& info, const Problem& p, Layout layout) {
  const auto [b, h, s, d] = info.dims(p);
  if (info.has_layout && layout == Layout::kBshd) return {b, s, h, d};
  if (info.has_layout && layout == Layout::kBse) return {b, s, h * d};
  Shape shape = {b, h, s, d};
  shape.resize(static_cast<size_t>(info.rank));
  return shape;
}

// The inputs of the backward pass.
absl::Status ResolveBackward(const OperatorCall& call, const FieldNames& names, Layout layout,
                             Problem& p) {
  if (!call.gradients) return absl::OkStatus();
  if (!call.inputs[Role::kOutputGradient]) {
    return Invalid(names[Role::kOutputGradient], " is missing");
  }
  const bool has_output = call.inputs[Role::kForwardOutput].has_value();
  if (has_output != call.inputs[Role::kForwardLse].has_value()) {
    const Role given = has_output ? Role::kForwardOutput : Role::kForwardLse;
    const Role missing = has_output ? Role::kForwardLse : Role::kForwardOutput;
    return Invalid(names[given], " of the forward pass is set but ", names[missing],
                   " is not; set both, or neither to compute them again");
  }
  p.backward = Backward{.gradients = *call.gradients,
                        .has_forward = has_output,
                        .has_lse_gradient = call.inputs[Role::kLseGradient].has_value()};
  for (Role role : kBackwardInputs) {
    const std::optional<TensorSpec>& spec = call.inputs[role];
    if (!spec) continue;
    const RoleInfo& info = InfoOf(role);
    const DType dtype = info.dtype(p);
    const Shape shape = OutputShape(info, p, layout);
    if (spec->dtype == dtype && spec->shape == shape) continue;
    return Invalid(names[role], " is ", NameOf(spec->dtype), " ", ToString(spec->shape),
                   "; it must be ", NameOf(dtype), " ", ToString(shape));
  }
  return absl::OkStatus();
}

void CopyAttributes(const OperatorCall& call, Problem& problem) {
  const auto copy = [&](const auto& field) {
    if (field.problem != nullptr) problem.*field.problem = call.*field.call;
  };
  for (const AttributeInfo& info : Attributes()) std::visit(copy, info.field);
  problem.alignment = call.alignment;
  problem.softmax_in_fp64 = call.softmax_in_fp64;
  problem.dropout = call.dropout;
  problem.score_output = call.score_output;
  problem.wants_lse = call.wants_lse;
  problem.wants_present = call.wants_present;
}

template <typename Byte>
BasicTensorView<Byte> ViewOf(Role role, const ResolvedCall& call, Byte* data) {
  const RoleInfo& info = InfoOf(role);
  BasicTensorView<Byte> view{data, info.dtype(call.problem), info.dims(call.problem)};
  const auto [b, h, s, d] = view.dims;
  view.strides = RowMajorStrides(view.dims);
  if (info.has_layout && call.layout != Layout::kBhsd) view.strides = {s * h * d, d, h * d, 1};
  for (int axis = 0; info.broadcasts && axis < 4; ++axis) {
    if (view.dims[axis] == 1) view.strides[axis] = 0;
  }
  return view;
}

}  // namespace

std::string ToString(const Shape& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

std::string PositionIn(const Shape& shape, int64_t element) {
  Shape position(shape.size());
  for (size_t axis = shape.size(); axis-- > 0;) {
    position[axis] = element % shape[axis];
    element /= shape[axis];
  }
  return ToString(position);
}

RoleSet UsualGradients(const OperatorCall& call) {
  RoleSet gradients;
  gradients.Add(Role::kDQ);
  gradients.Add(Role::kDK);
  gradients.Add(Role::kDV, !call.v_head_size);
  return gradients;
}

absl::StatusOr<int64_t> ByteSize(absl::string_view name, const TensorSpec& spec) {
  for (int64_t axis : spec.shape) {
    if (axis >= 0) continue;
    return Invalid(name, " has shape ", ToString(spec.shape), "; no axis may be negative");
  }
  std::optional<int64_t> bytes = CheckedProduct(spec.shape);
  if (bytes) bytes = CheckedMul(*bytes, SizeOf(spec.dtype));
  if (bytes) return *bytes;
  return Invalid(name, " has shape ", ToString(spec.shape), "; its size overflows 64 bits");
}

absl::StatusOr<ResolvedCall> Resolve(const OperatorCall& call, const FieldNames& names) {
  RAPT_RETURN_IF_ERROR(CheckPresenceAndSizes(call, names));
  RAPT_ASSIGN_OR_RETURN(const Layout layout, ResolveLayout(call, names));
  RAPT_RETURN_IF_ERROR(CheckHeadCounts(call, names, layout));

  RAPT_ASSIGN_OR_RETURN(const auto q, AxesOf(call, Role::kQ, layout, names));
  RAPT_ASSIGN_OR_RETURN(const auto k, AxesOf(call, Role::kK, layout, names));
  RAPT_ASSIGN_OR_RETURN(const auto v, ValueAxesOf(call, layout, k, names));
  RAPT_RETURN_IF_ERROR(CheckQkv(call, names, q, k, v));
  RAPT_ASSIGN_OR_RETURN(const int64_t past_length, ResolvePast(call, names, k, v));

  ResolvedCall resolved;
  resolved.layout = layout;
  resolved.names = &names;
  Problem& problem = resolved.problem;
  problem.dtype = call.inputs[Role::kQ]->dtype;
  problem.batch = q.batch;
  problem.query_heads = q.heads;
  problem.kv_heads = k.heads;
  problem.query_length = q.length;
  problem.key_length = k.length;
  problem.past_length = past_length;
  problem.head_size = q.size;
  problem.value_head_size = v.size;
  problem.values_in_keys = call.v_head_size.has_value();
  CopyAttributes(call, problem);
  const bool rank3_is_batch = layout == Layout::kBse && !call.q_num_heads;
  for (const auto& [role, shape] :
       {std::pair{Role::kMask, &problem.mask}, {Role::kBias, &problem.bias}}) {
    if (!call.inputs[role]) continue;
    RAPT_ASSIGN_OR_RETURN(*shape, ResolveMask(names[role], *call.inputs[role], rank3_is_batch));
  }
  if (const std::optional<TensorSpec>& lengths = call.inputs[Role::kKeyLengths]) {
    RAPT_RETURN_IF_ERROR(CheckKeyLengths(*lengths, names, q.batch));
    problem.has_key_lengths = true;
  }
  for (const auto& [role, dtype] :
       {std::pair{Role::kHeadSink, &problem.head_sink}, {Role::kHeadAlpha, &problem.head_alpha}}) {
    RAPT_RETURN_IF_ERROR(ResolveHeads(role, call, names, q.heads, *dtype));
  }
  RAPT_RETURN_IF_ERROR(ResolveRelative(call, names, problem));
  RAPT_RETURN_IF_ERROR(ResolveRelativeVectors(call, names, problem));
  RAPT_RETURN_IF_ERROR(ResolveRotary(call, names, problem));
  RAPT_RETURN_IF_ERROR(ResolveAdditive(call, names, problem));
  RAPT_RETURN_IF_ERROR(ResolveVisibility(call, names, problem));
  RAPT_RETURN_IF_ERROR(ResolveBackward(call, names, layout, problem));
  RAPT_RETURN_IF_ERROR(Validate(problem, names));
  for (Role role : kOutputs) {
    const RoleInfo& info = InfoOf(role);
    resolved.outputs[role] = {info.dtype(problem), OutputShape(info, problem, layout)};
  }
  if (!problem.backward) return resolved;
  for (Role role : problem.backward->gradients) {
    resolved.outputs[role] = *call.inputs[InfoOf(role).gradient_of];
  }
  return resolved;
}

TensorView ResolvedCall::Input(Role role, const std::byte* data) const {
  return ViewOf(role, *this, data);
}

MutableTensorView ResolvedCall::Output(Role role, std::byte* data) const {
  return ViewOf(role, *this, data);
}

}  // namespace rapt
