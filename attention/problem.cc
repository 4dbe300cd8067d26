#include "attention/problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "attention/half.h"
#include "attention/rotary/checks.h"
#include "base/checked_math.h"
#include "base/invalid.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

absl::Status CheckAxes(const Problem& p, const FieldNames& names) {
  const struct {
    std::array<absl::string_view, 4> name;  // in parts
    int64_t size;
    int64_t least;
  } axes[] = {
      {{"batch"}, p.batch, 0},
      {{"number of query heads"}, p.query_heads, 0},
      {{"number of key/value heads"}, p.kv_heads, p.query_heads == 0 ? 0 : 1},
      {{"query length"}, p.query_length, 0},
      {{"key length"}, p.key_length, 0},
      {{"past length"}, p.past_length, 0},
      {{"head size of ", names[Role::kQ], " and ", names[Role::kK]}, p.head_size, 1},
      {{"head size of ", names[Role::kV]}, p.value_head_size, 1},
  };
  for (const auto& [name, size, least] : axes) {
    if (size >= least && size <= kMaxAxis) continue;
    return Invalid(name[0], name[1], name[2], name[3], " is ", size, "; it must be from ", least,
                   " to 2^40");
  }
  if (p.values_in_keys && p.value_head_size > p.head_size) {
    return Invalid(names[Attribute::kValueHeadSize], " is set, but the value head size is ",
                   p.value_head_size, "; it must be at most ", p.head_size, ", the head size of ",
                   names[Role::kK]);
  }
  if (p.query_heads != 0 && p.query_heads % p.kv_heads != 0) {
    return Invalid(names[Role::kQ], " has ", p.query_heads, " heads, ", names[Role::kK], " and ",
                   names[Role::kV], " have ", p.kv_heads,
                   "; the number of query heads must be a multiple of ", p.kv_heads);
  }
  return absl::OkStatus();
}

// Neither the size of a tensor in fp64, the widest type, nor the sum of a few sizes may overflow.
// An axis of 0 counts as 1, so that the strides of empty tensors do not overflow either.
absl::Status CheckVolume(absl::string_view name, const std::array<int64_t, 4>& axes) {
  std::optional<int64_t> bytes = 8 * 8;
  for (int64_t axis : axes) {
    if (bytes) bytes = CheckedMul(*bytes, std::max<int64_t>(axis, 1));
  }
  if (bytes) return absl::OkStatus();
  return Invalid("the size of ", name, " overflows 64 bits");
}

absl::Status CheckVolumes(const Problem& p, const FieldNames& names) {
  const int64_t t = p.total_keys();
  const struct {
    absl::string_view name;
    std::array<int64_t, 4> axes;
  } volumes[] = {
      {names[Role::kQ], {p.batch, p.query_heads, p.query_length, p.head_size}},
      {names[Role::kK], {p.batch, p.kv_heads, t, p.head_size}},
      {names[Role::kV], {p.batch, p.kv_heads, t, p.value_head_size}},
      {names[Role::kY], {p.batch, p.query_heads, p.query_length, p.value_head_size}},
      {"the score matrix", {p.batch, p.query_heads, p.query_length, t}},
  };
  for (const auto& [name, axes] : volumes) {
    RAPT_RETURN_IF_ERROR(CheckVolume(name, axes));
  }
  return absl::OkStatus();
}

template <typename Number>
absl::Status CheckRange(const AttributeInfo& info, Number value, absl::string_view name) {
  if constexpr (std::is_enum_v<Number>) {
    return CheckRange(info, static_cast<int64_t>(value), name);
  } else {
    const auto number = static_cast<double>(value);
    if (number >= info.least && number <= info.most) return absl::OkStatus();  // false for NaN
    return Invalid(name, " is ", value, "; it must be ", info.allowed);
  }
}

absl::Status CheckRange(const AttributeInfo&, bool, absl::string_view) { return absl::OkStatus(); }

absl::Status CheckRange(const AttributeInfo& info, const Problem& p, absl::string_view name) {
  if (info.allowed.empty()) return absl::OkStatus();
  return std::visit(
      [&](const auto& field) {
        const auto& value = p.*field.problem;
        if constexpr (requires { value.has_value(); }) {
          return value ? CheckRange(info, *value, name) : absl::OkStatus();
        } else {
          return CheckRange(info, value, name);
        }
      },
      info.field);
}

absl::Status CheckFp32OrQueryType(Role role, DType dtype, const Problem& p,
                                  const FieldNames& names) {
  return CheckTableType(names[role], dtype, p.dtype, names[Role::kQ]);
}

absl::Status CheckAttributes(const Problem& p, const FieldNames& names) {
  if (!IsFloat(p.dtype)) {
    return Invalid(names[Role::kQ], " has type ", NameOf(p.dtype),
                   "; it must be FP32, FP16, BF16 or FP64");
  }
  for (const AttributeInfo& info : Attributes()) {
    RAPT_RETURN_IF_ERROR(CheckRange(info, p, names[info.attribute]));
  }
  if (p.section && (p.past_length > 0 || p.wants_present)) {
    return Invalid("a section of a problem cannot have a past or present outputs");
  }
  if (p.folds && p.score_output == ScoreOutput::kWeights) {
    return Invalid("weights cannot be computed from a section of the keys; they need all keys");
  }
  if (p.folds && p.head_sink) {
    return Invalid(names[Role::kHeadSink], " is merged once, after all sections of the keys");
  }
  if (p.head_sink) {
    RAPT_RETURN_IF_ERROR(CheckFp32OrQueryType(Role::kHeadSink, *p.head_sink, p, names));
  }
  if (p.dropout && !(p.dropout->probability >= 0 && p.dropout->probability < 1)) {
    return Invalid(names[Attribute::kDropoutProbability], " is ", p.dropout->probability,
                   "; it must be at least 0 and less than 1");
  }
  return absl::OkStatus();
}

// Normalizers other than softmax, and alpha.
absl::Status CheckNormalizer(const Problem& p, const FieldNames& names) {
  const std::string normalizer =
      absl::StrCat(names[Attribute::kNormalizer], " is ", NameOf(p.normalizer));
  if (p.normalizer != Normalizer::kEntmax && (p.alpha || p.head_alpha)) {
    return Invalid(p.alpha ? names[Attribute::kAlpha] : names[Role::kHeadAlpha], " is set, but ",
                   normalizer, "; it must be ", NameOf(Normalizer::kEntmax));
  }
  if (p.normalizer == Normalizer::kSoftmax) return absl::OkStatus();
  if (p.normalizer == Normalizer::kEntmax && p.alpha.has_value() == p.head_alpha.has_value()) {
    return Invalid(normalizer, ", and ", names[Attribute::kAlpha],
                   p.alpha ? " is given twice" : " is missing", "; set either ",
                   names[Attribute::kAlpha], " or ", names[Role::kHeadAlpha],
                   ", one for each head");
  }
  const std::pair<absl::string_view, bool> excluded[] = {
      {names[Role::kHeadSink], p.head_sink.has_value()}, {names[Role::kLse], p.wants_lse}};
  for (const auto& [name, is_set] : excluded) {
    if (!is_set) continue;
    return Invalid(normalizer, ", which has no ", name, "; it must be ",
                   NameOf(Normalizer::kSoftmax));
  }
  if (p.folds) {
    return Invalid(normalizer,
                   ", which needs all keys at once; sections of the keys cannot be "
                   "merged");
  }
  return p.head_alpha ? CheckFp32OrQueryType(Role::kHeadAlpha, *p.head_alpha, p, names)
                      : absl::OkStatus();
}

// Checks the mask or the bias, which must not be BOOL.
absl::Status CheckMask(Role role, const MaskShape& mask, const Problem& p,
                       const FieldNames& names) {
  const bool is_mask = role == Role::kMask;
  if (!IsFloat(mask.dtype) && !(is_mask && mask.dtype == DType::kBool)) {
    return Invalid(names[role], " has type ", NameOf(mask.dtype), "; it must be ",
                   is_mask ? "BOOL or " : "", "a float type");
  }
  const std::array<int64_t, 4> full = {p.batch, p.query_heads, p.query_length, p.total_keys()};
  bool fits = mask.dims[3] == 1 || (mask.dims[3] >= 0 && mask.dims[3] <= full[3]);
  for (int axis = 0; axis < 3; ++axis) {
    fits = fits && (mask.dims[axis] == 1 || mask.dims[axis] == full[axis]);
  }
  if (fits) return absl::OkStatus();
  return Invalid(names[role], " [", absl::StrJoin(mask.dims, ", "), "] does not broadcast to [",
                 absl::StrJoin(full, ", "),
                 "] = [batch, query heads, query length, past + key length]; ",
                 "only the last axis may be shorter");
}

absl::Status CheckAxis(Role role, absl::string_view axis, int64_t size, int64_t full,
                       const FieldNames& names) {
  if (size == 1 || size == full) return absl::OkStatus();
  return Invalid(names[role], " has ", axis, " ", size, "; it must be 1 or ", full, ", that of ",
                 names[Role::kQ]);
}

absl::Status CheckBiasTable(const Problem& p, const FieldNames& names) {
  const absl::string_view name = names[Role::kBiasTable];
  const int64_t buckets = p.bias_table->buckets;
  const int64_t least = p.is_bidirectional ? 4 : 2;
  if (buckets < least || buckets > kMaxAxis) {
    return Invalid(
        name, " has ", buckets, " buckets; it must have from ", least, " to 2^40",
        p.is_bidirectional ? absl::StrCat(" if ", names[Attribute::kBidirectional]) : "");
  }
  const int64_t exact = p.is_bidirectional ? buckets / 4 : buckets / 2;
  const int64_t max_distance = p.max_distance.value_or(kDefaultMaxDistance);
  if (max_distance > exact) return absl::OkStatus();
  return Invalid(names[Attribute::kMaxDistance], " is ", max_distance, "; it must be more than ",
                 exact, ", the number of exact buckets of ", name);
}

// A table with an entry for each distance, clipped.
absl::Status CheckClipped(Role role, DType dtype, int64_t heads, int64_t length, const Problem& p,
                          const FieldNames& names) {
  RAPT_RETURN_IF_ERROR(CheckFp32OrQueryType(role, dtype, p, names));
  RAPT_RETURN_IF_ERROR(CheckAxis(role, "heads", heads, p.query_heads, names));
  if (length % 2 == 1 && length >= 1 && length <= kMaxAxis) return absl::OkStatus();
  return Invalid(names[role], " has ", length, " distances; their number must be 2c + 1, odd");
}

// The biases by distance.
absl::Status CheckRelative(const Problem& p, const FieldNames& names) {
  const std::pair<absl::string_view, bool> given[] = {
      {names[Attribute::kAlibi], p.alibi},
      {names[Role::kAlibiSlopes], p.alibi_slopes.has_value()},
      {names[Role::kBiasTable], p.bias_table.has_value()},
      {names[Role::kRelativeBias], p.relative_bias.has_value()}};
  absl::string_view first;
  for (const auto& [name, is_given] : given) {
    if (!is_given) continue;
    if (!first.empty()) {
      return Invalid(first, " and ", name, " are both set; at most one bias by distance may be");
    }
    first = name;
  }
  if (p.alibi_slopes) {
    RAPT_RETURN_IF_ERROR(CheckFp32OrQueryType(Role::kAlibiSlopes, p.alibi_slopes->dtype, p, names));
    return CheckAxis(Role::kAlibiSlopes, "batch", p.alibi_slopes->batch, p.batch, names);
  }
  if (p.bias_table) {
    RAPT_RETURN_IF_ERROR(CheckFp32OrQueryType(Role::kBiasTable, p.bias_table->dtype, p, names));
    RAPT_RETURN_IF_ERROR(CheckBiasTable(p, names));
    return CheckVolume(names[Role::kBiasTable], {p.bias_table->buckets, p.query_heads, 1, 1});
  }
  if (p.relative_bias) {
    const RelativeBias& bias = *p.relative_bias;
    RAPT_RETURN_IF_ERROR(
        CheckClipped(Role::kRelativeBias, bias.dtype, bias.heads, bias.length, p, names));
    return CheckVolume(names[Role::kRelativeBias], {bias.heads, bias.length, 1, 1});
  }
  return absl::OkStatus();
}

absl::Status CheckRelativeVectors(const Problem& p, const FieldNames& names) {
  if (p.relative_keys && p.is_additive()) {
    return Invalid(names[Role::kRelativeKeys], " and ", names[Role::kAdditiveWeight],
                   " are both set; ", names[Role::kRelativeKeys],
                   " need scores that are dot products");
  }
  if (p.has_relative_query && !p.relative_keys) {
    return Invalid(names[Role::kRelativeQuery], " is set but ", names[Role::kRelativeKeys],
                   " is not; set both, because the one multiplies the other");
  }
  // The most distances by which a backend may pad a table.
  constexpr int64_t kPadding = 64;
  const struct {
    Role role;
    const std::optional<RelativeVectors>& vectors;
    int64_t size;
  } tables[] = {{Role::kRelativeKeys, p.relative_keys, p.head_size},
                {Role::kRelativeValues, p.relative_values, p.value_head_size}};
  for (const auto& [role, vectors, size] : tables) {
    if (!vectors) continue;
    const auto& [dtype, heads, length] = *vectors;
    RAPT_RETURN_IF_ERROR(CheckClipped(role, dtype, heads, length, p, names));
    RAPT_RETURN_IF_ERROR(CheckVolume(names[role], {heads, length + kPadding, size, 1}));
  }
  return absl::OkStatus();
}

absl::Status CheckAdditive(const Problem& p, const FieldNames& names) {
  const absl::string_view function = names[Attribute::kScoreFunction];
  const absl::string_view weight = names[Role::kAdditiveWeight];
  if (p.is_additive() != p.additive_weight.has_value()) {
    return absl::InvalidArgumentError(
        p.is_additive() ? absl::StrCat(function, " is additive, but ", weight, " is missing")
                        : absl::StrCat(weight, " is set, but ", function,
                                       " is dot_product; it must be additive"));
  }
  if (!p.additive_weight) return absl::OkStatus();
  RAPT_RETURN_IF_ERROR(
      CheckFp32OrQueryType(Role::kAdditiveWeight, p.additive_weight->dtype, p, names));
  return CheckAxis(Role::kAdditiveWeight, "heads", p.additive_weight->heads, p.query_heads, names);
}

absl::Status CheckBlockMask(const Problem& p, const FieldNames& names) {
  if (!p.block_mask) return absl::OkStatus();
  for (const auto& [size, attribute] :
       {std::pair{p.block_q, Attribute::kBlockQ}, {p.block_k, Attribute::kBlockK}}) {
    if (size) continue;
    return Invalid(names[Role::kBlockMask], " is set but ", names[attribute],
                   " is not; set the size of its blocks");
  }
  const std::array<int64_t, 4>& dims = *p.block_mask;
  const int64_t rows = CeilDiv(p.query_length, *p.block_q);
  const int64_t columns = CeilDiv(p.total_keys(), *p.block_k);
  if ((dims[0] == 1 || dims[0] == p.batch) && (dims[1] == 1 || dims[1] == p.query_heads) &&
      dims[2] == rows && dims[3] == columns) {
    return absl::OkStatus();
  }
  return Invalid(names[Role::kBlockMask], " is [", absl::StrJoin(dims, ", "),
                 "]; it must be [1 or ", p.batch, ", 1 or ", p.query_heads, ", ", rows, ", ",
                 columns, "], for ", p.query_length, " queries in blocks of ", *p.block_q, " and ",
                 p.total_keys(), " keys in blocks of ", *p.block_k);
}

absl::Status CheckSelected(const Problem& p, const FieldNames& names) {
  const SelectedIndices& selected = *p.selected;
  const absl::string_view name = names[Role::kSelectedIndices];
  if (selected.heads != 1 && selected.heads != p.kv_heads) {
    return Invalid(name, " has ", selected.heads, " heads; it must have 1 or ", p.kv_heads,
                   ", the number of heads of ", names[Role::kK]);
  }
  if (selected.count < 0 || selected.count > kMaxAxis) {
    return Invalid(name, " has a last axis of ", selected.count, "; it must be from 0 to 2^40");
  }
  // Of INT32, and not more than T positions can be used.
  constexpr int64_t kMostKeys = int64_t{1} << 31;
  if (p.total_keys() > kMostKeys) {
    return Invalid(name, " is set, but there are ", p.total_keys(), " keys; INT32 numbers at most ",
                   kMostKeys);
  }
  std::optional<int64_t> bytes = CheckedMul(p.batch, selected.heads);
  for (const int64_t axis : {p.query_length, selected.count, int64_t{32}}) {
    if (bytes) bytes = CheckedMul(*bytes, std::max<int64_t>(axis, 1));
  }
  if (bytes) return absl::OkStatus();
  return Invalid("the size of ", name, " overflows 64 bits");
}

absl::Status CheckVisibility(const Problem& p, const FieldNames& names) {
  const std::pair<Role, bool> whole[] = {{Role::kBlockMask, p.block_mask.has_value()},
                                         {Role::kSelectedIndices, p.selected.has_value()},
                                         {Role::kGlobalMask, p.has_global_mask}};
  for (const auto& [role, is_given] : whole) {
    if (!is_given || !p.section) continue;
    return Invalid(names[role], " is not available for a part of a problem, as in a stream");
  }
  absl::Status status = CheckBlockMask(p, names);
  return status.ok() && p.selected ? CheckSelected(p, names) : status;
}

absl::Status CheckBackward(const Problem& p, const FieldNames& names) {
  if (!p.backward) return absl::OkStatus();
  const Backward& backward = *p.backward;
  if (p.score_output || p.wants_lse || p.wants_present || p.section || p.folds) {
    return Invalid(
        "the backward pass returns gradients only, of a whole problem: neither scores, lse nor "
        "present keys and values");
  }
  // Backends may keep this many partial sums of gradients, whose rows they pad.
  constexpr int64_t kParts = 32;
  constexpr int64_t kPadding = 64;
  const int64_t t = p.total_keys();
  RAPT_RETURN_IF_ERROR(CheckVolume("the sums of gradients by distance",
                                   {p.batch, p.query_heads, p.query_length + t, kParts}));
  RAPT_RETURN_IF_ERROR(CheckVolume(
      "the sums of gradients by key",
      {p.batch, p.kv_heads, t, kParts * (std::max(p.head_size, p.value_head_size) + kPadding)}));
  if (backward.gradients.empty()) {
    return Invalid("no gradient is wanted; at least one must be");
  }
  const std::pair<Role, bool> excluded[] = {{Role::kForwardLse, backward.has_forward},
                                            {Role::kLseGradient, backward.has_lse_gradient}};
  for (const auto& [role, is_given] : excluded) {
    if (!is_given || p.normalizer == Normalizer::kSoftmax) continue;
    return Invalid(names[role], " is set, but ", names[Attribute::kNormalizer], " is ",
                   NameOf(p.normalizer), ", which has no lse");
  }
  const RoleSet inputs = InputTensorsOf(p);
  for (Role gradient : backward.gradients) {
    const Role input = InfoOf(gradient).gradient_of;
    if (!inputs.contains(input)) {
      return Invalid(names[gradient], " is wanted, but ", names[input], " is not given");
    }
    if (input != Role::kMask || IsFloat(p.mask->dtype)) continue;
    return Invalid(names[gradient], " is wanted, but ", names[input], " has type ",
                   NameOf(p.mask->dtype), "; only a float type has a gradient");
  }
  return absl::OkStatus();
}

// The bytes from a page's start to the end of its last row that the view reads; nullopt if they
// overflow or a stride is negative.
std::optional<int64_t> BytesOfPage(const TensorView& view) {
  const PagedRows& pages = *view.pages;
  const int64_t rows = std::min(pages.page_rows, pages.first_row + view.dims[2]);
  std::optional<int64_t> elements = view.dims[3];
  for (const auto& [last, stride] :
       {std::pair{view.dims[1] - 1, view.strides[1]}, {rows - 1, view.strides[2]}}) {
    const std::optional<int64_t> step = stride < 0 ? std::nullopt : CheckedMul(last, stride);
    elements = elements && step ? CheckedAdd(*elements, *step) : std::nullopt;
  }
  const std::optional<int64_t> bytes =
      elements ? CheckedMul(*elements, SizeOf(view.dtype)) : std::nullopt;
  return bytes ? CheckedAdd(*bytes, pages.offset) : std::nullopt;
}

// REQUIRES: the view has elements.
absl::Status CheckPages(absl::string_view name, const TensorView& view) {
  const PagedRows& paged = *view.pages;
  const auto count = static_cast<int64_t>(paged.pages.size());
  const struct {
    absl::string_view name;
    int64_t value, least, most;
  } fields[] = {
      {"page_rows", paged.page_rows, 1, kMaxAxis},
      {"first_row", paged.first_row, 0, paged.page_rows - 1},
      {"batch_pages", paged.batch_pages, 0, count},
      {"offset", paged.offset, 0, std::numeric_limits<int64_t>::max()},
  };
  for (const auto& field : fields) {
    if (field.value >= field.least && field.value <= field.most) continue;
    return Invalid(name, " has pages with ", field.name, " ", field.value, "; it must be from ",
                   field.least, " to ", field.most);
  }
  const int64_t last_row = paged.first_row + view.dims[2] - 1;
  const int64_t needed = last_row / paged.page_rows + 1;
  const std::optional<int64_t> before = CheckedMul(view.dims[0] - 1, paged.batch_pages);
  if (!before || *before > count - needed) {
    return Invalid(name, " has ", count, " pages; each of its ", view.dims[0], " batch rows needs ",
                   needed, ", with a distance of ", paged.batch_pages, " to those of the next");
  }
  const auto null = std::find(paged.pages.begin(), paged.pages.end(), nullptr);
  if (null != paged.pages.end()) {
    return Invalid(name, " has a null page, number ", null - paged.pages.begin());
  }
  if (!BytesOfPage(view)) {
    return Invalid(name, " has strides ", view.strides[1], " and ", view.strides[2],
                   " in a page; they must not be negative, and the "
                   "bytes of a page must not overflow 64 bits");
  }
  return absl::OkStatus();
}

absl::Status CheckSource(absl::string_view name, const TensorView& view, Source most) {
  if (view.source() > most) {
    return Invalid(name, " is ", NameOf(view.source()), "; it must be strided",
                   most == Source::kSliced ? " or sliced" : "");
  }
  return view.source() == Source::kPaged ? CheckPages(name, view) : absl::OkStatus();
}

absl::Status CheckView(absl::string_view name, const TensorView& view, DType dtype,
                       const std::array<int64_t, 4>& dims, bool contiguous_rows,
                       Source source = Source::kStrided) {
  if (view.dtype != dtype) {
    return Invalid(name, " has type ", NameOf(view.dtype), "; it must be ", NameOf(dtype));
  }
  if (view.dims != dims) {
    return Invalid(name, " is [", absl::StrJoin(view.dims, ", "), "]; it must be [",
                   absl::StrJoin(dims, ", "), "]");
  }
  if (view.has_elements() && !view.present()) {
    return Invalid(name, " has no data");
  }
  if (contiguous_rows && dims[3] > 1 && view.strides[3] != 1) {
    return Invalid(name, " has stride ", view.strides[3], " on its last axis; it must be 1");
  }
  return view.has_elements() ? CheckSource(name, view, source) : absl::OkStatus();
}

TensorView AsConst(const MutableTensorView& view) {
  return {view.data, view.dtype, view.dims, view.strides, view.slices, view.pages};
}

// REQUIRES: the problem has this role.
absl::Status CheckRole(Role role, const Problem& p, const TensorView& view,
                       const FieldNames& names) {
  const RoleInfo& info = InfoOf(role);
  return CheckView(names[role], view, info.dtype(p), info.dims(p), !info.broadcasts, info.source);
}

// Returns the offset from a query to the key on its diagonal, both as positions in the full
// problem.
int64_t DiagonalOffset(const Problem& p, const Section& section,
                       absl::Span<const int64_t> key_lengths, int64_t b) {
  const int64_t past = section.past_length;
  const int64_t queries = section.query_length;
  const bool varies = PositionVaries(p);
  if (p.alignment == Alignment::kBottomRight) {
    return past + (varies ? std::max(key_lengths[b], queries) : section.key_length) - queries;
  }
  return varies ? key_lengths[b] - queries : past;
}

absl::Status CheckState(const Problem& p, const Arguments::State& state) {
  const DType dtype = state.output.dtype;  // Plan::state_dtype
  const std::array<int64_t, 4> rows = {p.batch, p.query_heads, p.query_length, 1};
  std::array<int64_t, 4> values = rows;
  values[3] = p.value_head_size;
  RAPT_RETURN_IF_ERROR(CheckView("state.output", AsConst(state.output), dtype, values, true));
  RAPT_RETURN_IF_ERROR(CheckView("state.max", AsConst(state.max), dtype, rows, true));
  return CheckView("state.sum", AsConst(state.sum), dtype, rows, true);
}

}  // namespace

absl::string_view NameOf(RopeScaling::Type type) {
  constexpr absl::string_view kNames[] = {"linear", "llama3", "yarn"};
  return kNames[static_cast<size_t>(type)];
}

double Problem::effective_scale() const {
  if (scale) return *scale;
  return is_additive() ? 1 : 1.0 / std::sqrt(static_cast<double>(head_size));
}

Section SectionOrFull(const Problem& p) {
  return p.section.value_or(Section{
      .query_length = p.query_length, .key_length = p.key_length, .past_length = p.past_length});
}

absl::Status CheckTableType(absl::string_view name, DType dtype, DType own, absl::string_view of) {
  if (dtype == DType::kFloat32 || dtype == own) return absl::OkStatus();
  const absl::string_view fp32 = own == DType::kFloat32 ? "" : "FP32 or ";
  return Invalid(name, " has type ", NameOf(dtype), "; it must be ", fp32, NameOf(own),
                 ", the type of ", of);
}

absl::Status Validate(const Problem& problem, const FieldNames& names) {
  RAPT_RETURN_IF_ERROR(CheckAxes(problem, names));
  RAPT_RETURN_IF_ERROR(CheckVolumes(problem, names));
  RAPT_RETURN_IF_ERROR(CheckAttributes(problem, names));
  if (problem.mask) RAPT_RETURN_IF_ERROR(CheckMask(Role::kMask, *problem.mask, problem, names));
  if (problem.bias) RAPT_RETURN_IF_ERROR(CheckMask(Role::kBias, *problem.bias, problem, names));
  RAPT_RETURN_IF_ERROR(CheckRelative(problem, names));
  RAPT_RETURN_IF_ERROR(CheckRelativeVectors(problem, names));
  RAPT_RETURN_IF_ERROR(CheckRotary(problem, names));
  RAPT_RETURN_IF_ERROR(CheckAdditive(problem, names));
  RAPT_RETURN_IF_ERROR(CheckNormalizer(problem, names));
  RAPT_RETURN_IF_ERROR(CheckVisibility(problem, names));
  return CheckBackward(problem, names);
}

namespace {

TensorView FirstElements(TensorView rows, int64_t count) {
  rows.dims[3] = count;
  return rows;
}

}  // namespace

TensorView PastValuesOf(const Problem& p, const Arguments& a) {
  return p.values_in_keys ? FirstElements(a.inputs[Role::kPastKey], p.value_head_size)
                          : a.inputs[Role::kPastValue];
}

TensorView ValuesOf(const Problem& p, const Arguments& a) {
  return p.values_in_keys ? FirstElements(a.inputs[Role::kK], p.value_head_size)
                          : a.inputs[Role::kV];
}

absl::Status ValidateInputs(const Problem& p, const Arguments& a, const FieldNames& names) {
  for (Role role : InputTensorsOf(p)) {
    RAPT_RETURN_IF_ERROR(CheckRole(role, p, a.inputs[role], names));
  }
  RAPT_RETURN_IF_ERROR(ValidateAlphas(p, a, names));
  return ValidateKeyLengths(p, a.key_lengths, names);
}

absl::Status ValidatePositions(const Problem& p, const Arguments& a, const FieldNames& names) {
  RAPT_RETURN_IF_ERROR(CheckPositionIds(Role::kPositionIds, p, a, names));
  return CheckPositionIds(Role::kKeyPositionIds, p, a, names);
}

absl::Status Validate(const Problem& p, const Arguments& a, const FieldNames& names) {
  RAPT_RETURN_IF_ERROR(ValidateInputs(p, a, names));
  if (p.folds) RAPT_RETURN_IF_ERROR(CheckState(p, a.state));
  for (Role role : OutputsOf(p)) {
    RAPT_RETURN_IF_ERROR(CheckRole(role, p, AsConst(a.outputs[role]), names));
  }
  return absl::OkStatus();
}

absl::Status ValidateAlphas(const Problem& p, const Arguments& a, const FieldNames& names) {
  const AttributeInfo& info = Attributes()[static_cast<size_t>(Attribute::kAlpha)];
  for (int64_t h = 0; p.head_alpha && h < p.query_heads; ++h) {
    const double alpha = LoadElement(a.inputs[Role::kHeadAlpha].Row(h, 0, 0), *p.head_alpha, 0);
    RAPT_RETURN_IF_ERROR(
        CheckRange(info, alpha, absl::StrCat(names[Role::kHeadAlpha], "[", h, "]")));
  }
  return absl::OkStatus();
}

absl::Status CheckLengths(absl::string_view name, absl::Span<const int64_t> lengths, int64_t batch,
                          absl::string_view length_name, int64_t length) {
  if (static_cast<int64_t>(lengths.size()) != batch) {
    return Invalid(name, " has ", lengths.size(), " elements; it must have one for each of the ",
                   batch, " batch rows");
  }
  for (size_t b = 0; b < lengths.size(); ++b) {
    if (lengths[b] >= 0 && lengths[b] <= length) continue;
    return Invalid(name, "[", b, "] is ", lengths[b], "; it must be from 0 to the ", length_name,
                   " ", length);
  }
  return absl::OkStatus();
}

absl::Status ValidateKeyLengths(const Problem& p, absl::Span<const int64_t> lengths,
                                const FieldNames& names) {
  if (!p.has_key_lengths) return absl::OkStatus();
  RAPT_RETURN_IF_ERROR(CheckLengths(names[Role::kKeyLengths], lengths, p.batch, "key length",
                                    p.section ? p.section->key_length : p.key_length));
  return CheckQueryPositions(p, lengths, names);
}

namespace {

// `exempt`: with the keys that may be exempt from the window.
KeyRange KeysOf(const Problem& p, absl::Span<const int64_t> key_lengths, int64_t b, int64_t i,
                bool exempt) {
  const Section section = SectionOrFull(p);
  const int64_t diagonal = section.first_key + DiagonalKey(p, key_lengths, b, i);
  KeyRange range{section.first_key, section.first_key + p.total_keys()};
  if (p.has_key_lengths) range.end = std::min(range.end, section.past_length + key_lengths[b]);
  if (p.causal) range.end = std::min(range.end, diagonal + 1);
  const auto in_section = [&](const KeyRange& keys) {
    if (keys.begin >= keys.end) return KeyRange{0, 0};
    return KeyRange{keys.begin - section.first_key, keys.end - section.first_key};
  };
  if (exempt && p.has_global_mask) return in_section(range);
  // A window wider than any axis is no window; clamping it keeps the sums in range.
  KeyRange window = range;
  if (p.left_window >= 0) {
    window.begin = std::max(window.begin, diagonal - std::min(p.left_window, kMaxAxis));
  }
  if (p.right_window >= 0) {
    window.end = std::min(window.end, diagonal + std::min(p.right_window, kMaxAxis) + 1);
  }
  const KeyRange prefix = {range.begin, std::min(range.end, p.prefix_keys)};
  if (!exempt || prefix.begin >= prefix.end) return in_section(window);
  if (window.begin >= window.end) return in_section(prefix);
  return in_section({prefix.begin, std::max(prefix.end, window.end)});
}

}  // namespace

KeyRange VisibleKeys(const Problem& p, absl::Span<const int64_t> key_lengths, int64_t b,
                     int64_t i) {
  return KeysOf(p, key_lengths, b, i, p.has_exemptions());
}

KeyRange WindowKeys(const Problem& p, absl::Span<const int64_t> key_lengths, int64_t b, int64_t i) {
  return KeysOf(p, key_lengths, b, i, /*exempt=*/false);
}

int64_t DiagonalKey(const Problem& p, absl::Span<const int64_t> key_lengths, int64_t b, int64_t i) {
  const Section section = SectionOrFull(p);
  return section.first_query + i + DiagonalOffset(p, section, key_lengths, b) - section.first_key;
}

int64_t QueryPosition(const Problem& p, absl::Span<const int64_t> key_lengths, int64_t b,
                      int64_t i) {
  const Section section = SectionOrFull(p);
  return section.first_query + i + DiagonalOffset(p, section, key_lengths, b);
}

int64_t KeyPosition(const Problem& p, int64_t j) {
  return SectionOrFull(p).first_key + p.past_length + j;
}

bool PositionVaries(const Problem& p) {
  if (!p.has_key_lengths || p.alignment == Alignment::kTopLeft) return false;
  const Section section = SectionOrFull(p);
  return p.alignment == Alignment::kBottomRight ? section.query_length < section.key_length
                                                : section.past_length == 0;
}

}  // namespace rapt
