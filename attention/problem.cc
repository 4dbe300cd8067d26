#include "attention/problem.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/checked_math.h"

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
      {{"head size of ", names.q, " and ", names.k}, p.head_size, 1},
      {{"head size of ", names.v}, p.value_head_size, 1},
  };
  for (const auto& [name, size, least] : axes) {
    if (size >= least && size <= kMaxAxis) continue;
    return absl::InvalidArgumentError(absl::StrCat(name[0], name[1], name[2], name[3], " is ", size,
                                                   "; it must be from ", least, " to 2^40"));
  }
  if (p.query_heads != 0 && p.query_heads % p.kv_heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(names.q, " has ", p.query_heads, " heads, ", names.k, " and ", names.v,
                     " have ", p.kv_heads, "; the number of query heads must be a multiple"));
  }
  return absl::OkStatus();
}

// No tensor's size in the widest type, fp64, may overflow, nor the sum of a few such, nor a stride
// of an empty one: an axis of 0 counts as 1.
absl::Status CheckVolumes(const Problem& p, const FieldNames& names) {
  const int64_t t = p.total_keys();
  const auto overflows = [](const std::array<int64_t, 4>& axes) {
    std::optional<int64_t> bytes = 8 * 8;
    for (int64_t axis : axes) {
      if (bytes) bytes = CheckedMul(*bytes, std::max<int64_t>(axis, 1));
    }
    return !bytes;
  };
  const struct {
    absl::string_view name;
    std::array<int64_t, 4> axes;
  } volumes[] = {
      {names.q, {p.batch, p.query_heads, p.query_length, p.head_size}},
      {names.k, {p.batch, p.kv_heads, t, p.head_size}},
      {names.v, {p.batch, p.kv_heads, t, p.value_head_size}},
      {names.y, {p.batch, p.query_heads, p.query_length, p.value_head_size}},
      {"the score matrix", {p.batch, p.query_heads, p.query_length, t}},
  };
  for (const auto& volume : volumes) {
    if (overflows(volume.axes)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the size of ", volume.name, " overflows 64 bits"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckAttributes(const Problem& p, const FieldNames& names) {
  if (!IsFloat(p.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(names.q, " has type ", NameOf(p.dtype),
                                                   "; it must be FP32, FP16, BF16 or FP64"));
  }
  if (p.scale && !std::isfinite(*p.scale)) {
    return absl::InvalidArgumentError(
        absl::StrCat(names.scale, " is ", *p.scale, "; it must be finite"));
  }
  if (!std::isfinite(p.softcap) || p.softcap < 0) {
    return absl::InvalidArgumentError(absl::StrCat(names.softcap, " is ", p.softcap,
                                                   "; it must be 0 (none) or positive and finite"));
  }
  for (const auto& [name, size] :
       {std::pair<absl::string_view, int64_t>{names.left_window, p.left_window},
        {names.right_window, p.right_window}}) {
    if (size < -1) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " is ", size, "; it must be -1 (unbounded) or at least 0"));
    }
  }
  if (p.section && (p.past_length > 0 || p.wants_present)) {
    return absl::InvalidArgumentError("a section of a problem has no past or present of its own");
  }
  if (p.folds && p.score_output == ScoreOutput::kWeights) {
    return absl::InvalidArgumentError("weights need all keys at once; a part of them has none");
  }
  if (p.dropout && !(p.dropout->probability >= 0 && p.dropout->probability < 1)) {
    return absl::InvalidArgumentError(absl::StrCat(names.dropout_probability, " is ",
                                                   p.dropout->probability,
                                                   "; it must be at least 0 and less than 1"));
  }
  return absl::OkStatus();
}

absl::Status CheckMask(const Problem& p, const FieldNames& names) {
  const MaskShape& mask = *p.mask;
  if (mask.dtype == DType::kInt64) {
    return absl::InvalidArgumentError(
        absl::StrCat(names.mask, " has type INT64; it must be BOOL or a float type"));
  }
  const std::array<int64_t, 4> full = {p.batch, p.query_heads, p.query_length, p.total_keys()};
  bool fits = mask.dims[3] == 1 || (mask.dims[3] >= 0 && mask.dims[3] <= full[3]);
  for (int axis = 0; axis < 3; ++axis) {
    fits = fits && (mask.dims[axis] == 1 || mask.dims[axis] == full[axis]);
  }
  if (fits) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      names.mask, " [", absl::StrJoin(mask.dims, ", "), "] does not broadcast to [",
      absl::StrJoin(full, ", "), "] = [batch, query heads, query length, past + key length]; ",
      "only the last axis may be shorter"));
}

absl::Status CheckView(absl::string_view name, const TensorView& view, DType dtype,
                       const std::array<int64_t, 4>& dims, bool contiguous_rows = true) {
  if (view.dtype != dtype) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has type ", NameOf(view.dtype), "; it must be ", NameOf(dtype)));
  }
  if (view.dims != dims) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is [", absl::StrJoin(view.dims, ", "),
                                                   "]; it must be [", absl::StrJoin(dims, ", "),
                                                   "]"));
  }
  const bool has_elements = std::find(dims.begin(), dims.end(), 0) == dims.end();
  if (has_elements && !view.present()) {
    return absl::InvalidArgumentError(absl::StrCat(name, " has no data"));
  }
  if (contiguous_rows && dims[3] > 1 && view.strides[3] != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has stride ", view.strides[3], " on its last axis; it must be 1"));
  }
  return absl::OkStatus();
}

struct WantedTensor {
  absl::string_view name;
  TensorView view;
  DType dtype;
  std::array<int64_t, 4> dims;
  bool wanted = true;
};

absl::Status CheckTensors(std::initializer_list<WantedTensor> tensors) {
  for (const WantedTensor& tensor : tensors) {
    if (!tensor.wanted) continue;
    absl::Status status = CheckView(tensor.name, tensor.view, tensor.dtype, tensor.dims);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

TensorView AsConst(const MutableTensorView& view) {
  return {view.data, view.dtype, view.dims, view.strides, view.slices};
}

// The problem that positions are counted in.
int64_t DiagonalOffset(const Problem& p, const Section& whole,
                       absl::Span<const int64_t> key_lengths, int64_t b) {
  if (p.alignment == Alignment::kBottomRight) {
    return whole.past_length + whole.key_length - whole.query_length;
  }
  if (whole.past_length > 0) return whole.past_length;
  return p.has_key_lengths ? key_lengths[b] - whole.query_length : 0;
}

absl::Status CheckState(const Problem& p, const Arguments::State& state) {
  const DType dtype = state.output.dtype;  // the plan's to say
  const std::array<int64_t, 4> rows = {p.batch, p.query_heads, p.query_length, 1};
  return CheckTensors({
      {"state.output",
       AsConst(state.output),
       dtype,
       {p.batch, p.query_heads, p.query_length, p.value_head_size}},
      {"state.max", AsConst(state.max), dtype, rows},
      {"state.sum", AsConst(state.sum), dtype, rows},
  });
}

}  // namespace

double Problem::effective_scale() const {
  return scale.value_or(1.0 / std::sqrt(static_cast<double>(head_size)));
}

Section WholeOf(const Problem& p) {
  return p.section.value_or(Section{
      .query_length = p.query_length, .key_length = p.key_length, .past_length = p.past_length});
}

absl::Status Validate(const Problem& problem, const FieldNames& names) {
  absl::Status status = CheckAxes(problem, names);
  if (status.ok()) status = CheckVolumes(problem, names);
  if (status.ok()) status = CheckAttributes(problem, names);
  if (status.ok() && problem.mask) status = CheckMask(problem, names);
  return status;
}

absl::Status ValidateInputs(const Problem& p, const Arguments& a, const FieldNames& names) {
  absl::Status status = CheckTensors({
      {names.q, a.inputs[Role::kQ], p.dtype, {p.batch, p.query_heads, p.query_length, p.head_size}},
      {names.k, a.inputs[Role::kK], p.dtype, {p.batch, p.kv_heads, p.key_length, p.head_size}},
      {names.v,
       a.inputs[Role::kV],
       p.dtype,
       {p.batch, p.kv_heads, p.key_length, p.value_head_size}},
      {names.past_key,
       a.inputs[Role::kPastKey],
       p.dtype,
       {p.batch, p.kv_heads, p.past_length, p.head_size},
       p.past_length > 0},
      {names.past_value,
       a.inputs[Role::kPastValue],
       p.dtype,
       {p.batch, p.kv_heads, p.past_length, p.value_head_size},
       p.past_length > 0},
  });
  if (status.ok() && p.mask) {
    status = CheckView(names.mask, a.inputs[Role::kMask], p.mask->dtype, p.mask->dims,
                       /*contiguous_rows=*/false);
  }
  if (status.ok()) status = ValidateKeyLengths(p, a.key_lengths, names);
  return status;
}

absl::Status Validate(const Problem& p, const Arguments& a, const FieldNames& names) {
  const int64_t t = p.total_keys();
  absl::Status status = ValidateInputs(p, a, names);
  if (status.ok() && p.folds) status = CheckState(p, a.state);
  if (!status.ok()) return status;
  return CheckTensors({
      {names.y,
       AsConst(a.outputs[Role::kY]),
       p.dtype,
       {p.batch, p.query_heads, p.query_length, p.value_head_size},
       !p.folds},
      {"lse",
       AsConst(a.outputs[Role::kLse]),
       p.lse_dtype(),
       {p.batch, p.query_heads, p.query_length, 1},
       p.wants_lse && !p.folds},
      {"qk_matmul_output",
       AsConst(a.outputs[Role::kScores]),
       p.dtype,
       {p.batch, p.query_heads, p.query_length, t},
       p.score_output.has_value()},
      {"present_key",
       AsConst(a.outputs[Role::kPresentKey]),
       p.dtype,
       {p.batch, p.kv_heads, t, p.head_size},
       p.wants_present},
      {"present_value",
       AsConst(a.outputs[Role::kPresentValue]),
       p.dtype,
       {p.batch, p.kv_heads, t, p.value_head_size},
       p.wants_present},
  });
}

absl::Status ValidateKeyLengths(const Problem& p, absl::Span<const int64_t> lengths,
                                const FieldNames& names) {
  if (!p.has_key_lengths) return absl::OkStatus();
  if (static_cast<int64_t>(lengths.size()) != p.batch) {
    return absl::InvalidArgumentError(absl::StrCat(names.key_lengths, " has ", lengths.size(),
                                                   " elements; it must have one for each of the ",
                                                   p.batch, " batch rows"));
  }
  for (size_t b = 0; b < lengths.size(); ++b) {
    const int64_t key_length = p.section ? p.section->key_length : p.key_length;
    if (lengths[b] < 0 || lengths[b] > key_length) {
      return absl::InvalidArgumentError(absl::StrCat(names.key_lengths, "[", b, "] is ", lengths[b],
                                                     "; it must be from 0 to the key length ",
                                                     key_length));
    }
  }
  return absl::OkStatus();
}

KeyRange VisibleKeys(const Problem& p, absl::Span<const int64_t> key_lengths, int64_t b,
                     int64_t i) {
  const Section whole = WholeOf(p);
  const int64_t diagonal = whole.first_query + i + DiagonalOffset(p, whole, key_lengths, b);
  KeyRange range{whole.first_key, whole.first_key + p.total_keys()};
  if (p.has_key_lengths) range.end = std::min(range.end, whole.past_length + key_lengths[b]);
  if (p.causal) range.end = std::min(range.end, diagonal + 1);
  // A window wider than any axis is no window; clamping it keeps the sums in range.
  if (p.left_window >= 0) {
    range.begin = std::max(range.begin, diagonal - std::min(p.left_window, kMaxAxis));
  }
  if (p.right_window >= 0) {
    range.end = std::min(range.end, diagonal + std::min(p.right_window, kMaxAxis) + 1);
  }
  if (range.begin >= range.end) return {0, 0};
  return {range.begin - whole.first_key, range.end - whole.first_key};
}

}  // namespace rapt
