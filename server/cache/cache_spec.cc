#include "server/cache/cache_spec.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "attention/q8_0.h"
#include "base/checked_math.h"
#include "server/cache/limits.h"

namespace rapt::cache {
namespace {

absl::Status Invalid(absl::string_view text) { return absl::InvalidArgumentError(text); }

absl::Status AtLeast(absl::string_view name, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return Invalid(absl::StrCat(name, " is ", value, "; it must be at least ", least));
}

absl::Status ValidateShape(const LayerShape& shape) {
  absl::Status status = AtLeast("shapes.layers", shape.layers, 1);
  status.Update(AtLeast("shapes.kv_heads", shape.token.kv_heads, 1));
  status.Update(AtLeast("shapes.head_size", shape.token.head_size, 1));
  status.Update(AtLeast("shapes.value_head_size", shape.token.value_head_size, 1));
  status.Update(AtLeast("shapes.keep_first", shape.keep_first, 0));
  status.Update(AtLeast("shapes.keep_last", shape.keep_last, 0));
  if (!status.ok()) return status;
  if (shape.token.q8_0 && shape.token.dtype == DType::kFloat64) {
    return Invalid("storage is INT8 and dtype is FP64; INT8 stores FP32, FP16 or BF16");
  }
  // At most; in 8 bits a row of one number has the most bytes for each.
  const int64_t number_bytes = shape.token.q8_0 ? q8_0::RowBytes(1) : SizeOf(shape.token.dtype);
  const auto sizes = CheckedAdd(shape.token.head_size, shape.token.value_head_size);
  const int64_t factors[] = {kPageTokens, shape.token.kv_heads, sizes.value_or(0), number_bytes};
  if (!sizes || !CheckedProduct(factors)) {
    return Invalid("shapes: the bytes of 64 tokens overflow 64 bits");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateName(absl::string_view name) {
  if (name.size() <= kMaxNameBytes) return absl::OkStatus();
  return Invalid(
      absl::StrCat("name has ", name.size(), " bytes; at most ", kMaxNameBytes, " are allowed"));
}

absl::Status ValidateReservation(int64_t reserve_tokens) {
  return AtLeast("reserve_tokens", reserve_tokens, 0);
}

absl::Status Validate(const CacheSpec& spec) {
  if (absl::Status status = ValidateName(spec.name); !status.ok()) return status;
  if (spec.shapes.empty()) return Invalid("shapes is empty; a cache has at least one layer");
  int64_t layers = 0;
  for (const LayerShape& shape : spec.shapes) {
    if (absl::Status status = ValidateShape(shape); !status.ok()) return status;
    layers += std::min(shape.layers, kMaxLayers + 1);
    if (layers > kMaxLayers) {
      return Invalid(absl::StrCat("shapes have more than ", kMaxLayers, " layers"));
    }
  }
  if (spec.first_position < 0 || spec.first_position > std::numeric_limits<int64_t>::max() / 2) {
    return Invalid(
        absl::StrCat("first_position is ", spec.first_position, "; it must be in [0, 2^62)"));
  }
  return ValidateReservation(spec.reserve_tokens);
}

}  // namespace rapt::cache
