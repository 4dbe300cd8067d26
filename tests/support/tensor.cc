#include "tests/support/tensor.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <sstream>

namespace rapt::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr std::byte kGap{0xFF};  // a NaN in every float type
constexpr int64_t kRowPadding = 3;
constexpr int kMismatchesShown = 5;

// A binary floating-point format with subnormals and infinities.
struct Format {
  int fraction_bits;
  int min_exponent;  // of the smallest normal number
  double max;
};
constexpr Format kHalf = {10, -14, 65504};
constexpr Format kBFloat16 = {7, -126, 0x1.FEp127};

// Rounds to nearest even. Only nearbyint() rounds: the other steps multiply by powers of two.
double RoundToFormat(double value, const Format& format) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), format.min_exponent);
  const int quantum = exponent - format.fraction_bits;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -quantum)), quantum);
  return std::abs(rounded) > format.max ? std::copysign(kInf, value) : rounded;
}

template <typename T>
double Read(const std::byte* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return static_cast<double>(value);
}

template <typename T>
void Write(std::byte* bytes, T value) {
  std::memcpy(bytes, &value, sizeof(T));
}

double Decode(DType dtype, const std::byte* bytes) {
  uint16_t half;
  switch (dtype) {
    case DType::kFloat32:
      return Read<float>(bytes);
    case DType::kFloat64:
      return Read<double>(bytes);
    case DType::kFloat16:
      std::memcpy(&half, bytes, 2);
      return DecodeHalf(half);
    case DType::kBFloat16:
      std::memcpy(&half, bytes, 2);
      return DecodeBFloat16(half);
    case DType::kBool:
      return Read<uint8_t>(bytes);
    case DType::kInt64:
      return Read<int64_t>(bytes);
    case DType::kInt32:
      return Read<int32_t>(bytes);
    case DType::kInt8:
      return Read<int8_t>(bytes);
    case DType::kUint8:
      return Read<uint8_t>(bytes);
  }
  std::abort();
}

void Encode(DType dtype, std::byte* bytes, double value) {
  switch (dtype) {
    case DType::kFloat32:
      return Write(bytes, static_cast<float>(value));
    case DType::kFloat64:
      return Write(bytes, value);
    case DType::kFloat16:
      return Write(bytes, EncodeHalf(value));
    case DType::kBFloat16:
      return Write(bytes, EncodeBFloat16(value));
    case DType::kBool:
      return Write(bytes, static_cast<uint8_t>(value != 0));
    case DType::kInt64:
      return Write(bytes, static_cast<int64_t>(value));
    case DType::kInt32:
      return Write(bytes, static_cast<int32_t>(value));
    case DType::kInt8:
      return Write(bytes, static_cast<int8_t>(value));
    case DType::kUint8:
      return Write(bytes, static_cast<uint8_t>(value));
  }
  std::abort();
}

// The axes from the slowest to the fastest.
std::array<int, 4> AxisOrder(Storage storage) {
  switch (storage) {
    case Storage::kBshd:
      return {0, 2, 1, 3};
    case Storage::kPositionFirst:
      return {2, 0, 1, 3};
    case Storage::kTransposed:
      return {0, 1, 3, 2};
    default:
      return {0, 1, 2, 3};
  }
}

Dims StridesOf(const Dims& dims, Storage storage) {
  Dims extents = dims;  // of the elements in memory
  if (storage == Storage::kBroadcastBatch) extents[0] = 1;
  if (storage == Storage::kBroadcastHeads) extents[1] = 1;
  Dims strides;
  int64_t stride = storage == Storage::kElementsApart ? 2 : 1;
  const std::array<int, 4> order = AxisOrder(storage);
  for (int n = 3; n >= 0; --n) {
    const int axis = order[n];
    strides[axis] = extents[axis] == 1 && axis != 3 ? 0 : stride;
    stride *= extents[axis];
    if (n == 3 && storage == Storage::kPaddedRows) stride += kRowPadding;
  }
  return strides;
}

template <typename Body>
void ForEach(const Dims& dims, Body body) {
  for (int64_t b = 0; b < dims[0]; ++b) {
    for (int64_t h = 0; h < dims[1]; ++h) {
      for (int64_t s = 0; s < dims[2]; ++s) {
        for (int64_t e = 0; e < dims[3]; ++e) body(b, h, s, e);
      }
    }
  }
}

std::string ShapeOf(const Tensor& tensor) {
  std::ostringstream text;
  const Dims& d = tensor.dims();
  text << NameOf(tensor.dtype()) << " [" << d[0] << ", " << d[1] << ", " << d[2] << ", " << d[3]
       << "]";
  return text.str();
}

bool IsClose(double got, double want, DType dtype, double relative, double slack) {
  if (std::isnan(want)) return std::isnan(got);
  if (std::isinf(want)) return got == want;
  const double allowed = relative * (1 + std::abs(want)) + slack;
  if (std::isinf(got)) return std::abs(want) + allowed >= MaxOf(dtype) && got * want > 0;
  return std::abs(got - want) <= allowed;  // false for NaN
}

}  // namespace

double Uniform(Rng& rng, double low, double high) {
  return low + (high - low) * std::ldexp(static_cast<double>(rng() >> 11), -53);
}

int64_t UniformInt(Rng& rng, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(rng() % static_cast<uint64_t>(high - low + 1));
}

uint16_t EncodeHalf(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7E00;
  const double magnitude = std::abs(RoundToFormat(value, kHalf));
  if (std::isinf(magnitude)) return sign | 0x7C00;
  if (magnitude < 0x1p-14) return sign | static_cast<uint16_t>(std::ldexp(magnitude, 24));
  const int exponent = std::ilogb(magnitude);
  const int fraction = static_cast<int>(std::ldexp(magnitude, 10 - exponent)) - 1024;
  return static_cast<uint16_t>(sign | (exponent + 15) << 10 | fraction);
}

double DecodeHalf(uint16_t bits) {
  const double sign = bits & 0x8000 ? -1 : 1;
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  if (exponent == 31) return fraction ? std::numeric_limits<double>::quiet_NaN() : sign * kInf;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

uint16_t EncodeBFloat16(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7FC0;
  const auto rounded = static_cast<float>(RoundToFormat(value, kBFloat16));
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(rounded) >> 16);
}

double DecodeBFloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

double RoundTo(DType dtype, double value) {
  std::byte bytes[8];
  Encode(dtype, bytes, value);
  return Decode(dtype, bytes);
}

double MaxOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return kHalf.max;
    case DType::kBFloat16:
      return kBFloat16.max;
    case DType::kFloat32:
      return std::numeric_limits<float>::max();
    default:
      return std::numeric_limits<double>::max();
  }
}

Tensor::Tensor(DType dtype, Dims dims, Storage storage, size_t guard_bytes)
    : dtype_(dtype),
      dims_(dims),
      strides_(StridesOf(dims, storage)),
      first_byte_(guard_bytes + (storage == Storage::kMisaligned ? 1 : 0)) {
  int64_t last_element = 0;
  for (int axis = 0; axis < 4; ++axis) last_element += (dims[axis] - 1) * strides_[axis];
  // A tensor without elements still has an address: a null view would mean that it is absent.
  const int64_t element_bytes = size() == 0 ? 1 : (last_element + 1) * SizeOf(dtype);
  bytes_.assign(first_byte_ + element_bytes + guard_bytes, kGap);
}

int64_t Tensor::ByteOffset(int64_t b, int64_t h, int64_t s, int64_t e) const {
  const int64_t last = dims_[3] == 1 ? 0 : e * strides_[3];
  return static_cast<int64_t>(first_byte_) +
         (b * strides_[0] + h * strides_[1] + s * strides_[2] + last) * SizeOf(dtype_);
}

double Tensor::At(int64_t b, int64_t h, int64_t s, int64_t e) const {
  return Decode(dtype_, bytes_.data() + ByteOffset(b, h, s, e));
}

void Tensor::Set(int64_t b, int64_t h, int64_t s, int64_t e, double value) {
  Encode(dtype_, bytes_.data() + ByteOffset(b, h, s, e), value);
}

Tensor& Tensor::Fill(double value) {
  ForEach(dims_, [&](auto... at) { Set(at..., value); });
  return *this;
}

Tensor& Tensor::FillUniform(Rng& rng, double low, double high) {
  ForEach(dims_, [&](auto... at) { Set(at..., Uniform(rng, low, high)); });
  return *this;
}

Tensor& Tensor::FillBool(Rng& rng, double share_of_true) {
  ForEach(dims_, [&](auto... at) { Set(at..., Uniform(rng, 0, 1) < share_of_true); });
  return *this;
}

std::vector<double> Tensor::ToVector() const {
  std::vector<double> values;
  values.reserve(size());
  ForEach(dims_, [&](auto... at) { values.push_back(At(at...)); });
  return values;
}

TensorView Tensor::View() const { return {bytes_.data() + first_byte_, dtype_, dims_, strides_}; }

MutableTensorView Tensor::MutableView() {
  return {bytes_.data() + first_byte_, dtype_, dims_, strides_};
}

bool Tensor::GapsIntact() const {
  std::vector<bool> is_element(bytes_.size());
  ForEach(dims_, [&](auto... at) {
    std::fill_n(is_element.begin() + ByteOffset(at...), SizeOf(dtype_), true);
  });
  for (size_t n = 0; n < bytes_.size(); ++n) {
    if (!is_element[n] && bytes_[n] != kGap) return false;
  }
  return true;
}

namespace {

// Calls `body` for each element of a part with its index there and in the whole.
template <typename Body>
void ForEachOfPart(const Dims& part, int axis, int64_t begin, Body body) {
  ForEach(part, [&](auto... at) {
    Dims place = {at...};
    place[axis] += begin;
    body(Dims{at...}, place);
  });
}

double At(const Tensor& tensor, const Dims& at) { return tensor.At(at[0], at[1], at[2], at[3]); }

void Set(Tensor& tensor, const Dims& at, double value) {
  tensor.Set(at[0], at[1], at[2], at[3], value);
}

}  // namespace

void PasteAxis(Tensor& whole, int axis, int64_t begin, const Tensor& part) {
  ForEachOfPart(part.dims(), axis, begin,
                [&](const Dims& from, const Dims& to) { Set(whole, to, At(part, from)); });
}

Tensor JoinRows(const std::optional<Tensor>& first, const Tensor& second) {
  const int64_t first_rows = first ? first->dims()[2] : 0;
  Dims dims = second.dims();
  dims[2] += first_rows;
  Tensor joined(second.dtype(), dims);
  if (first) PasteAxis(joined, 2, 0, *first);
  PasteAxis(joined, 2, first_rows, second);
  return joined;
}

Tensor SliceAxis(const Tensor& tensor, int axis, int64_t begin, int64_t count) {
  Dims dims = tensor.dims();
  if (dims[axis] == 1) begin = 0, count = 1;
  dims[axis] = count;
  Tensor part(tensor.dtype(), dims);
  ForEachOfPart(dims, axis, begin,
                [&](const Dims& to, const Dims& from) { Set(part, to, At(tensor, from)); });
  return part;
}

double ToleranceOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 1e-12;
    case DType::kFloat16:
      return 2e-3;
    case DType::kBFloat16:
      return 1.6e-2;
    default:
      return 2e-6;
  }
}

::testing::AssertionResult AllClose(const std::string& name, const Tensor& got,
                                    const std::vector<double>& want, const Tolerance& tolerance) {
  if (static_cast<int64_t>(want.size()) != got.size()) {
    return ::testing::AssertionFailure()
           << name << " is " << ShapeOf(got) << ", expected " << want.size() << " elements";
  }
  std::ostringstream shown;
  shown.precision(9);
  int64_t mismatches = 0;
  size_t n = 0;
  ForEach(got.dims(), [&](int64_t b, int64_t h, int64_t s, int64_t e) {
    const size_t row = n / got.dims()[3];
    const double slack = tolerance.row_slack.empty() ? 0 : tolerance.row_slack[row];
    const double have = got.At(b, h, s, e);
    if (!IsClose(have, want[n], got.dtype(), tolerance.relative, slack) &&
        ++mismatches <= kMismatchesShown) {
      shown << "\n  [" << b << ", " << h << ", " << s << ", " << e << "] got " << have << ", want "
            << want[n] << ", difference " << std::abs(have - want[n]) << ", allowed "
            << tolerance.relative * (1 + std::abs(want[n])) + slack;
    }
    ++n;
  });
  if (mismatches == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << name << " " << ShapeOf(got) << ": " << mismatches << " of " << want.size()
         << " elements differ" << shown.str();
}

::testing::AssertionResult SameBits(const std::string& name, const Tensor& a, const Tensor& b) {
  if (a.dims() != b.dims() || a.dtype() != b.dtype()) {
    return ::testing::AssertionFailure()
           << name << " is " << ShapeOf(a) << " here and " << ShapeOf(b) << " there";
  }
  ::testing::AssertionResult result = ::testing::AssertionSuccess();
  ForEach(a.dims(), [&](int64_t i, int64_t h, int64_t s, int64_t e) {
    const auto bits_a = std::bit_cast<uint64_t>(a.At(i, h, s, e));
    const auto bits_b = std::bit_cast<uint64_t>(b.At(i, h, s, e));
    if (bits_a == bits_b || !result) return;
    result = ::testing::AssertionFailure()
             << name << " " << ShapeOf(a) << " differs first at [" << i << ", " << h << ", " << s
             << ", " << e << "]: " << a.At(i, h, s, e) << " and " << b.At(i, h, s, e);
  });
  return result;
}

}  // namespace rapt::test
