#include "server/attention/cudnn/staging.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "server/attention/half.h"
#include "server/attention/softmax_state.h"

namespace rapt::cudnn {
namespace {

constexpr int64_t kAlignment = 256;
constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
// Beyond this the device's products with log2(e) leave FP32.
constexpr double kLargestBias = 1e30;
constexpr int64_t kLargestHeadSize = 256;

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Whether none of the numbers is NaN or infinite: no exponent is all ones.
template <typename Bits>
bool AllFinite(const std::byte* data, int64_t count, Bits exponent) {
  Bits found = 0;
  for (int64_t n = 0; n < count; ++n) {
    Bits bits;
    std::memcpy(&bits, data + n * static_cast<int64_t>(sizeof(bits)), sizeof(bits));
    found |= static_cast<Bits>((bits & exponent) == exponent);
  }
  return found == 0;
}

bool AllFinite(const std::byte* data, DType dtype, int64_t count) {
  switch (dtype) {
    case DType::kFloat16:
      return AllFinite<uint16_t>(data, count, 0x7c00);
    case DType::kBFloat16:
      return AllFinite<uint16_t>(data, count, 0x7f80);
    default:
      return AllFinite<uint32_t>(data, count, 0x7f800000);
  }
}

// Rows [first, first + count) of head (b, h) into packed rows of `padded` elements at `target`.
// False where a number is not finite.
bool PackRows(const TensorView& view, int64_t b, int64_t h, int64_t first, int64_t count,
              int64_t padded, std::byte* target) {
  const int64_t row_bytes = view.dims[3] * SizeOf(view.dtype);
  const int64_t padded_bytes = padded * SizeOf(view.dtype);
  if (view.slices == nullptr && row_bytes == padded_bytes && view.strides[2] == padded) {
    if (count > 0) std::memcpy(target, view.Row(b, h, first), count * row_bytes);
  } else {
    for (int64_t s = 0; s < count; ++s) {
      std::byte* row = target + s * padded_bytes;
      view.CopyRow(b, h, first + s, row);
      std::memset(row + row_bytes, 0, padded_bytes - row_bytes);
    }
  }
  return AllFinite(target, view.dtype, count * padded);
}

// Keys or values of the run, which may begin in the past, and zeros up to the graph's length.
bool PackRun(const TensorView& past, const TensorView& now, int64_t past_length, KeyRun run,
             int64_t b, int64_t h, int64_t length, int64_t padded, std::byte* target) {
  const int64_t row_bytes = padded * SizeOf(now.dtype);
  const int64_t old = std::clamp<int64_t>(past_length - run.first, 0, run.count);
  bool finite = true;
  if (old > 0) finite = PackRows(past, b, h, run.first, old, padded, target);
  const int64_t first_new = run.first + old - past_length;
  finite &= PackRows(now, b, h, first_new, run.count - old, padded, target + old * row_bytes);
  std::memset(target + run.count * row_bytes, 0, (length - run.count) * row_bytes);
  return finite;
}

// What the mask adds to the score of key j in its row; -inf hides it.
double BiasAt(const Problem& p, const TensorView& mask, int64_t b, int64_t h, int64_t i,
              int64_t j) {
  if (p.mask->dims[3] != 1 && j >= p.mask->dims[3]) return kMinusInfinity;
  const std::byte* row = mask.Row(b, h, i);
  if (p.mask->dtype != DType::kBool) {
    return LoadElement(row, p.mask->dtype, j * mask.strides[3]);
  }
  return row[j * mask.strides[3]] == std::byte{0} ? kMinusInfinity : 0;
}

// Whether the row has a weight at all by what it sees, and yet none that the device would find.
bool IsFaint(const Problem& p, const Arguments& a, int64_t b, int64_t h, int64_t i) {
  const KeyRange visible = VisibleKeys(p, a.key_lengths, b, i);
  bool sees = false;
  for (int64_t j = visible.begin; j < visible.end; ++j) {
    const double bias = BiasAt(p, a.mask, b, h, i, j);
    if (bias > -kLargestBias) return false;
    sees |= bias != kMinusInfinity;
  }
  return sees;
}

bool HasFaintRow(const Problem& p, const Arguments& a) {
  if (p.mask->dtype == DType::kBool) return false;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.mask->dims[1]; ++h) {
      for (int64_t i = 0; i < p.query_length; ++i) {
        if (IsFaint(p, a, b, h, i)) return true;
      }
    }
  }
  return false;
}

// The mask as a bias. Keys beyond the run are not looked at. False for a NaN, +inf or more than the
// device computes with.
bool PackBias(const Problem& p, const SdpaGraph& g, const Arguments& a, std::byte* target) {
  const std::array<int64_t, 4>& dims = g.bias->dims;
  const Crop crop = CropOf(p);
  const int64_t row_bytes = dims[3] * SizeOf(g.bias->dtype);
  std::memset(target, 0, dims[0] * dims[1] * dims[2] * row_bytes);
  const int64_t rows = dims[2] == 1 && p.mask->dims[2] == 1 ? 1 : crop.queries;
  for (int64_t b = 0; b < dims[0]; ++b) {
    // One row for the whole batch has one run: that is as long as the longest.
    const KeyRun run =
        dims[0] == 1 ? KeyRun{crop.first_key, crop.keys} : KeysOf(p, a.key_lengths, b);
    for (int64_t h = 0; h < dims[1]; ++h) {
      for (int64_t row = 0; row < rows; ++row) {
        std::byte* out = target + ((b * dims[1] + h) * dims[2] + row) * row_bytes;
        for (int64_t n = 0; n < run.count; ++n) {
          const double bias = BiasAt(p, a.mask, b, h, crop.first_query + row, run.first + n);
          if (!(bias <= kLargestBias)) return false;
          // A weight of 0 beside any other key.
          const bool masked = bias == kMinusInfinity;
          StoreElement(out, g.bias->dtype, n, masked ? bias : std::max(bias, -kLargestBias));
        }
      }
    }
  }
  return true;
}

void PackLengths(const Problem& p, const SdpaGraph& g, const Arguments& a,
                 const ArenaLayout& layout, std::byte* arena) {
  const Crop crop = CropOf(p);
  for (int64_t b = 0; b < g.batch; ++b) {
    const auto queries = static_cast<int32_t>(crop.queries);
    // cuDNN makes NaN of no keys at all: it gets one, which is zeros.
    const auto keys = static_cast<int32_t>(std::max<int64_t>(1, KeysOf(p, a.key_lengths, b).count));
    std::memcpy(arena + layout.query_lengths + b * sizeof(queries), &queries, sizeof(queries));
    std::memcpy(arena + layout.key_lengths + b * sizeof(keys), &keys, sizeof(keys));
  }
}

// Whether query row i sees a key, by position and by mask.
bool SeesAKey(const Problem& p, const Arguments& a, int64_t b, int64_t h, int64_t i) {
  const KeyRange visible = VisibleKeys(p, a.key_lengths, b, i);
  if (!p.mask) return visible.begin < visible.end;
  for (int64_t j = visible.begin; j < visible.end; ++j) {
    if (BiasAt(p, a.mask, b, h, i, j) != kMinusInfinity) return true;
  }
  return false;
}

void FoldRow(const SdpaGraph& g, const Arguments::State& state, int64_t b, int64_t h, int64_t i,
             const std::byte* row, float lse) {
  std::array<float, kLargestHeadSize> part;
  const int64_t size = state.output.dims[3];
  for (int64_t d = 0; d < size; ++d) part[d] = static_cast<float>(LoadElement(row, g.dtype, d));
  const auto at = [&](const MutableTensorView& view) {
    return reinterpret_cast<float*>(view.Row(b, h, i));
  };
  FoldInto(absl::Span<float>(at(state.output), size), *at(state.max), *at(state.sum),
           absl::Span<const float>(part.data(), size), lse);
}

}  // namespace

ArenaLayout LayOut(const SdpaGraph& g) {
  ArenaLayout layout;
  int64_t end = 0;
  const auto place = [&end](int64_t& begin, int64_t bytes) {
    begin = end;
    end = Aligned(end + bytes);
  };
  const int64_t element = SizeOf(g.dtype);
  const int64_t query_rows = g.batch * g.query_heads * g.query_length;
  const int64_t key_rows = g.batch * g.kv_heads * g.key_length;
  place(layout.query, query_rows * g.head_size * element);
  place(layout.key, key_rows * g.head_size * element);
  place(layout.value, key_rows * g.value_head_size * element);
  if (g.bias) {
    const std::array<int64_t, 4>& dims = g.bias->dims;
    place(layout.bias, dims[0] * dims[1] * dims[2] * dims[3] * SizeOf(g.bias->dtype));
  }
  if (g.has_lengths) {
    place(layout.query_lengths, g.batch * static_cast<int64_t>(sizeof(int32_t)));
    place(layout.key_lengths, g.batch * static_cast<int64_t>(sizeof(int32_t)));
  }
  place(layout.output, query_rows * g.value_head_size * element);
  place(layout.lse, query_rows * static_cast<int64_t>(sizeof(float)));
  layout.end = end;
  return layout;
}

bool StageInputs(const Problem& p, const SdpaGraph& g, const ArenaLayout& layout,
                 const Arguments& a, std::byte* arena) {
  const Crop crop = CropOf(p);
  const int64_t element = SizeOf(g.dtype);
  bool finite = true;
  for (int64_t b = 0; b < g.batch && finite; ++b) {
    for (int64_t h = 0; h < g.query_heads; ++h) {
      std::byte* rows =
          arena + layout.query + (b * g.query_heads + h) * g.query_length * g.head_size * element;
      finite &= PackRows(a.query, b, h, crop.first_query, crop.queries, g.head_size, rows);
      std::memset(rows + crop.queries * g.head_size * element, 0,
                  (g.query_length - crop.queries) * g.head_size * element);
    }
    const KeyRun run = KeysOf(p, a.key_lengths, b);
    for (int64_t h = 0; h < g.kv_heads; ++h) {
      const int64_t row = (b * g.kv_heads + h) * g.key_length * element;
      finite &= PackRun(a.past_key, a.key, p.past_length, run, b, h, g.key_length, g.head_size,
                        arena + layout.key + row * g.head_size);
      finite &= PackRun(a.past_value, a.value, p.past_length, run, b, h, g.key_length,
                        g.value_head_size, arena + layout.value + row * g.value_head_size);
    }
  }
  if (g.has_lengths) PackLengths(p, g, a, layout, arena);
  if (!finite || !g.bias) return finite;
  return PackBias(p, g, a, arena + layout.bias) && !HasFaintRow(p, a);
}

void TakeOutputs(const Problem& p, const SdpaGraph& g, const ArenaLayout& layout,
                 const Arguments& a, const std::byte* arena) {
  const Crop crop = CropOf(p);
  const int64_t row_bytes = p.value_head_size * SizeOf(p.dtype);
  const int64_t packed_bytes = g.value_head_size * SizeOf(g.dtype);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.query_heads; ++h) {
      for (int64_t i = 0; i < p.query_length; ++i) {
        const int64_t index = (b * g.query_heads + h) * g.query_length + i - crop.first_query;
        if (!SeesAKey(p, a, b, h, i)) {
          if (p.folds) continue;
          std::memset(a.output.Row(b, h, i), 0, row_bytes);
          if (p.wants_lse) StoreElement(a.lse.Row(b, h, i), a.lse.dtype, 0, kMinusInfinity);
          continue;
        }
        const std::byte* row = arena + layout.output + index * packed_bytes;
        float lse;
        std::memcpy(&lse, arena + layout.lse + index * sizeof(lse), sizeof(lse));
        if (p.folds) {
          FoldRow(g, a.state, b, h, i, row, lse);
          continue;
        }
        std::memcpy(a.output.Row(b, h, i), row, row_bytes);
        if (p.wants_lse) StoreElement(a.lse.Row(b, h, i), a.lse.dtype, 0, lse);
      }
    }
  }
}

}  // namespace rapt::cudnn
