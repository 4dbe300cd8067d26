#include "server/cache/cache_spec.h"

#include "base/invalid.h"
#include "base/range.h"
#include "base/status_macros.h"
#include "server/cache/limits.h"

namespace rapt::cache {
namespace {

absl::Status ValidateShape(const LayerShape& shape) {
  absl::Status status = CheckRange("shapes.layers", shape.layers, {1, kMaxLayers});
  status.Update(CheckRange("shapes.kv_heads", shape.token.kv_heads, {1, kMaxHeads}));
  status.Update(CheckRange("shapes.head_size", shape.token.head_size, {1, kMaxHeadSize}));
  status.Update(
      CheckRange("shapes.value_head_size", shape.token.value_head_size, {1, kMaxHeadSize}));
  status.Update(CheckRange("shapes.keep_first", shape.keep_first, kCounts));
  status.Update(CheckRange("shapes.keep_last", shape.keep_last, kCounts));
  if (!status.ok()) return status;
  if (shape.token.q8_0 && shape.token.dtype == DType::kFloat64) {
    return Invalid("storage is INT8 and dtype is FP64; INT8 stores FP32, FP16 or BF16");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateName(absl::string_view name) {
  if (name.size() <= kMaxNameBytes) return absl::OkStatus();
  return Invalid("name has ", name.size(), " bytes; at most ", kMaxNameBytes, " are allowed");
}

absl::Status ValidateReservation(int64_t reserve_tokens) {
  return CheckRange("reserve_tokens", reserve_tokens, kCounts);
}

absl::Status Validate(const CacheSpec& spec) {
  RAPT_RETURN_IF_ERROR(ValidateName(spec.name));
  if (spec.shapes.empty()) return Invalid("shapes is empty; a cache has at least one layer");
  int64_t layers = 0;
  for (const LayerShape& shape : spec.shapes) {
    RAPT_RETURN_IF_ERROR(ValidateShape(shape));
    layers += shape.layers;
    if (layers > kMaxLayers) {
      return Invalid("shapes have more than ", kMaxLayers, " layers");
    }
  }
  absl::Status status = CheckRange("first_position", spec.first_position, kCounts);
  status.Update(ValidateReservation(spec.reserve_tokens));
  return status;
}

}  // namespace rapt::cache
