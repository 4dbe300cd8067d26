#include "server/protocols/json_numbers.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/half.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

// Returns the real number, which may be "NaN", "Infinity" or "-Infinity", as in ProtoJSON.
std::optional<double> RealOf(const JsonScalar& value) {
  if (const auto* const real = std::get_if<double>(&value)) return *real;
  if (const auto* const integer = std::get_if<int64_t>(&value)) {
    return static_cast<double>(*integer);
  }
  if (const auto* const natural = std::get_if<uint64_t>(&value)) {
    return static_cast<double>(*natural);
  }
  const auto* const text = std::get_if<absl::string_view>(&value);
  if (text == nullptr) return std::nullopt;
  if (*text == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (*text == "Infinity") return std::numeric_limits<double>::infinity();
  if (*text == "-Infinity") return -std::numeric_limits<double>::infinity();
  return std::nullopt;
}

template <typename T>
bool Put(T value, std::byte* place) {
  std::memcpy(place, &value, sizeof(value));
  return true;
}

template <typename Bits, Bits (*convert)(double), double (*back)(Bits)>
bool StoreReal(const JsonScalar& value, std::byte* place) {
  const std::optional<double> real = RealOf(value);
  if (!real) return false;
  const Bits bits = convert(*real);
  return std::isinf(back(bits)) == std::isinf(*real) && Put(bits, place);
}

float ToFloat(double value) {
  // A conversion of what no float rounds to is undefined.
  constexpr double kLargest = 0x1.ffffffp127;
  if (std::isfinite(value) && std::abs(value) >= kLargest) {
    return std::copysign(std::numeric_limits<float>::infinity(),
                         static_cast<float>(value > 0) - 0.5F);
  }
  return static_cast<float>(value);
}
double FromFloat(float value) { return value; }
double Same(double value) { return value; }

template <typename T>
bool StoreInteger(const JsonScalar& value, std::byte* place) {
  const std::optional<int64_t> integer = IntegerOf(value);
  if (!integer || *integer < std::numeric_limits<T>::min() ||
      *integer > std::numeric_limits<T>::max()) {
    return false;
  }
  return Put(static_cast<T>(*integer), place);
}

bool StoreBool(const JsonScalar& value, std::byte* place) {
  if (const bool* const flag = std::get_if<bool>(&value)) return Put<uint8_t>(*flag ? 1 : 0, place);
  const std::optional<int64_t> integer = IntegerOf(value);
  if (!integer || *integer < 0 || *integer > 1) return false;
  return Put(static_cast<uint8_t>(*integer), place);
}

// How an element of the type is stored, and what is allowed.
std::pair<bool (*)(const JsonScalar&, std::byte*), absl::string_view> StorageOf(DType dtype) {
  constexpr absl::string_view kReal =
      R"(it must be a number within the type, "NaN", "Infinity" or "-Infinity")";
  constexpr absl::string_view kInteger = "it must be an integer within the type";
  switch (dtype) {
    case DType::kFloat32:
      return {StoreReal<float, ToFloat, FromFloat>, kReal};
    case DType::kFloat16:
      return {StoreReal<uint16_t, DoubleToHalf, HalfToDouble>, kReal};
    case DType::kBFloat16:
      return {StoreReal<uint16_t, DoubleToBFloat16, BFloat16ToDouble>, kReal};
    case DType::kFloat64:
      return {StoreReal<double, Same, Same>, kReal};
    case DType::kBool:
      return {StoreBool, "it must be true, false, 0 or 1"};
    case DType::kInt64:
      return {StoreInteger<int64_t>, kInteger};
    case DType::kInt32:
      return {StoreInteger<int32_t>, kInteger};
    case DType::kInt8:
      return {StoreInteger<int8_t>, kInteger};
    case DType::kUint8:
      return {StoreInteger<uint8_t>, kInteger};
  }
  return {};
}

}  // namespace

std::string TextOf(const JsonScalar& value) {
  if (const bool* const flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* const text = std::get_if<absl::string_view>(&value)) {
    return absl::StrCat("'", text->substr(0, 64), "'");
  }
  if (const auto* const real = std::get_if<double>(&value)) return absl::StrCat(*real);
  if (const auto* const integer = std::get_if<int64_t>(&value)) return absl::StrCat(*integer);
  return absl::StrCat(std::get<uint64_t>(value));
}

std::optional<int64_t> IntegerOf(const JsonScalar& value) {
  if (const auto* const integer = std::get_if<int64_t>(&value)) return *integer;
  const auto* const natural = std::get_if<uint64_t>(&value);
  if (natural == nullptr || *natural > std::numeric_limits<int64_t>::max()) return std::nullopt;
  return static_cast<int64_t>(*natural);
}

absl::Status JsonNumbers::Begin(absl::string_view name, const TensorSpec& spec, BufferPool& pool,
                                int64_t& left) {
  RAPT_ASSIGN_OR_RETURN(const int64_t bytes, ByteSize(name, spec));
  std::tie(store_, allowed) = StorageOf(spec.dtype);
  size_ = SizeOf(spec.dtype);
  wanted = bytes / size_;
  if (wanted > left) return absl::OkStatus();
  left -= wanted;
  place = pool.Take(bytes);
  return absl::OkStatus();
}

bool JsonNumbers::Add(const JsonScalar& value) {
  ++count;
  if (place.data() == nullptr || count > wanted) return true;
  return store_(value, place.data() + (count - 1) * size_);
}

}  // namespace rapt
