#include "server/protocols/integer_mask.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

struct IntegerMask {
  std::string name;
  TensorSpec spec;
  InputBytes data;

  template <typename Int>
  absl::Status Convert(absl::Span<std::byte> bools) const {
    constexpr int64_t kBlock = 1024;
    Int values[kBlock];
    for (int64_t begin = 0; begin < static_cast<int64_t>(bools.size()); begin += kBlock) {
      const int64_t count = std::min<int64_t>(kBlock, bools.size() - begin);
      RAPT_RETURN_IF_ERROR(data.Fetch(begin * sizeof(Int), count * sizeof(Int),
                                      reinterpret_cast<std::byte*>(values)));
      for (int64_t n = 0; n < count; ++n) {
        if (values[n] != 0 && values[n] != 1) return NotABool(begin + n, values[n]);
        bools[begin + n] = static_cast<std::byte>(values[n]);
      }
    }
    return absl::OkStatus();
  }

  absl::Status NotABool(int64_t index, int64_t value) const {
    return Invalid(name, PositionIn(spec.shape, index), " is ", value, "; ", NameOf(spec.dtype),
                   " masks hold only 0 (hidden) and 1 (visible)");
  }

  absl::Status WriteTo(absl::Span<std::byte> bools) const {
    switch (spec.dtype) {
      case DType::kInt8:
        return Convert<int8_t>(bools);
      case DType::kUint8:
        return Convert<uint8_t>(bools);
      case DType::kInt32:
        return Convert<int32_t>(bools);
      default:
        return Convert<int64_t>(bools);
    }
  }
};

}  // namespace

void ConvertIntegerMask(const std::string& name, const TensorSpec& given, Request& request) {
  InputBytes& mask = request.inputs[Role::kMask];
  request.write_mask = [integers = IntegerMask{name, given, mask}](absl::Span<std::byte> bools) {
    return integers.WriteTo(bools);
  };
  mask = InputBytes(nullptr, mask.size / SizeOf(given.dtype));
}

}  // namespace rapt
