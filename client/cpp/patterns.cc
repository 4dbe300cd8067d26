#include "rapt/patterns.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/checked_math.h"
#include "base/invalid.h"
#include "base/philox.h"
#include "base/status_macros.h"

namespace rapt::client {
namespace {

constexpr size_t kMostAxes = 3;

absl::Status CheckRange(absl::string_view name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return Invalid(name, " is ", value, "; it must be from ", least, " to ", most);
}

// What a message of protobuf holds.
constexpr int64_t kMostValues = (int64_t{1} << 31) - 1;
constexpr int64_t kMostLength = 46340;  // whose square is at most kMostValues

absl::Status CheckLength(int64_t length) { return CheckRange("length", length, 1, kMostLength); }

// [length, length], with visible(query, key).
template <typename Visible>
Tensor MakeMask(int64_t length, Visible visible) {
  std::string flags(length * length, '\0');
  for (int64_t i = 0; i < length; ++i) {
    for (int64_t j = 0; j < length; ++j) flags[i * length + j] = visible(i, j) ? 1 : 0;
  }
  return Tensor(DType::kBool, {length, length}, std::move(flags));
}

// Whether a row of BigBird sees a block without chance.
bool IsFixed(int64_t row, int64_t column, int64_t blocks) {
  const auto is_edge = [&](int64_t n) { return n == 0 || n == blocks - 1; };
  return is_edge(row) || is_edge(column) || std::abs(row - column) <= 1;
}

void DrawBlocks(const BigBird& pattern, int64_t blocks, int64_t head, int64_t row, char* flags) {
  std::vector<int64_t> left;
  for (int64_t column = 0; column < blocks; ++column) {
    if (IsFixed(row, column, blocks)) {
      flags[column] = 1;
    } else {
      left.push_back(column);
    }
  }
  std::array<uint32_t, 4> draws = {};
  for (int64_t t = 0; t < pattern.random && !left.empty(); ++t) {
    if (t % 4 == 0) {
      draws = Philox4x32({static_cast<uint32_t>(t / 4), static_cast<uint32_t>(row),
                          static_cast<uint32_t>(head), 0},
                         pattern.seed);
    }
    const auto taken = left.begin() + static_cast<int64_t>(draws[t % 4] * left.size() >> 32);
    flags[*taken] = 1;
    left.erase(taken);
  }
}

// Whether query i sees key j along an axis of size n.
bool AreNeighbours(int64_t i, int64_t j, int64_t n, int64_t kernel, int64_t dilation) {
  const int64_t remainder = i % dilation;
  if (j % dilation != remainder) return false;
  const int64_t count = (n - remainder + dilation - 1) / dilation;  // with this remainder
  const int64_t start = std::clamp<int64_t>(i / dilation - kernel / 2, 0, count - kernel);
  return j / dilation >= start && j / dilation < start + kernel;
}

}  // namespace

absl::StatusOr<Tensor> LongformerMask(int64_t length, int64_t window,
                                      absl::Span<const int64_t> global) {
  RAPT_RETURN_IF_ERROR(CheckLength(length));
  if (window < 0) return Invalid("window is ", window, "; it must be at least 0");
  for (const int64_t position : global) {
    RAPT_RETURN_IF_ERROR(CheckRange("a global position", position, 0, length - 1));
  }
  std::vector<bool> is_global(length, false);
  for (const int64_t position : global) is_global[position] = true;
  return MakeMask(length, [&](int64_t i, int64_t j) {
    return std::abs(i - j) <= window || is_global[i] || is_global[j];
  });
}

absl::StatusOr<Tensor> StridedMask(int64_t length, int64_t stride) {
  RAPT_RETURN_IF_ERROR(CheckLength(length));
  if (stride < 1) return Invalid("stride is ", stride, "; it must be at least 1");
  return MakeMask(length, [&](int64_t i, int64_t j) {
    return j <= i && (i - j < stride || (i - j) % stride == 0);
  });
}

absl::StatusOr<Tensor> BigBirdBlockMask(const BigBird& pattern) {
  RAPT_RETURN_IF_ERROR(CheckRange("length", pattern.length, 1, int64_t{1} << 40));
  RAPT_RETURN_IF_ERROR(CheckRange("block", pattern.block, 1, int64_t{1} << 40));
  RAPT_RETURN_IF_ERROR(CheckRange("random", pattern.random, 0, int64_t{1} << 31));
  const int64_t blocks = (pattern.length + pattern.block - 1) / pattern.block;
  RAPT_RETURN_IF_ERROR(CheckRange("the number of blocks", blocks, 1, kMostLength));
  RAPT_RETURN_IF_ERROR(CheckRange("heads", pattern.heads, 1, kMostValues / (blocks * blocks)));
  std::string flags(pattern.heads * blocks * blocks, '\0');
  for (int64_t head = 0; head < pattern.heads; ++head) {
    for (int64_t row = 0; row < blocks; ++row) {
      DrawBlocks(pattern, blocks, head, row, flags.data() + (head * blocks + row) * blocks);
    }
  }
  return Tensor(DType::kBool, {1, pattern.heads, blocks, blocks}, std::move(flags));
}

absl::StatusOr<Tensor> NeighbourhoodMask(absl::Span<const int64_t> shape, int64_t kernel,
                                         int64_t dilation) {
  if (shape.empty() || shape.size() > kMostAxes) {
    return Invalid("shape has ", shape.size(), " axes; it must have 1 to 3");
  }
  std::optional<int64_t> length = 1;
  for (const int64_t size : shape) {
    RAPT_RETURN_IF_ERROR(CheckRange("an axis of shape", size, 1, kMostLength));
    RAPT_RETURN_IF_ERROR(CheckRange("kernel", kernel, 1, size));
    RAPT_RETURN_IF_ERROR(CheckRange("dilation", dilation, 1, size / kernel));
    length = CheckedMul(*length, size);
  }
  RAPT_RETURN_IF_ERROR(CheckLength(*length));
  return MakeMask(*length, [&](int64_t i, int64_t j) {
    for (size_t axis = shape.size(); axis-- > 0;) {
      const int64_t n = shape[axis];
      if (!AreNeighbours(i % n, j % n, n, kernel, dilation)) return false;
      i /= n;
      j /= n;
    }
    return true;
  });
}

}  // namespace rapt::client
