#include "attention/cpu/vector_tables.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/cpu/flash_tasks.h"
#include "attention/half.h"
#include "base/round_up.h"

namespace rapt::cpu {
namespace {

template <typename Real>
constexpr int64_t kLanes = kVectorBytes / static_cast<int64_t>(sizeof(Real));

int64_t Heads(const std::optional<RelativeVectors>& vectors) {
  return vectors ? vectors->heads : 0;
}

// Distances [first, last].
struct Distances {
  int64_t first, last;

  int64_t count() const { return last - first + 1; }
};

// The distances between the problem's queries and keys, over all batch rows, clipped to the table.
Distances DistancesOf(const Problem& p, const RelativeVectors& vectors) {
  const int64_t most = SectionOrFull(p).key_length;
  const int64_t least = PositionVaries(p) ? 0 : most;
  const int64_t clip = vectors.length / 2;
  const int64_t first = -DiagonalKey(p, {&most, 1}, 0, p.query_length - 1);
  const int64_t last = p.total_keys() - 1 - DiagonalKey(p, {&least, 1}, 0, 0);
  return {std::clamp(first, -clip, clip), std::clamp(std::max(first, last), -clip, clip)};
}

// At least DistancesOf().count(), whatever the position of a section.
int64_t MostDistances(const Problem& p, const RelativeVectors& vectors) {
  const int64_t shift = PositionVaries(p) ? SectionOrFull(p).key_length : 0;
  return std::clamp<int64_t>(p.query_length + p.total_keys() - 1 + shift, 1, vectors.length);
}

// The elements from one row of transposed keys to the next. Kernels read whole vectors from any
// distance on. An odd number of vectors spreads the rows over the sets of a cache.
template <typename Real>
int64_t KeyStep(const Problem& p) {
  const int64_t step = RoundUp(MostDistances(p, *p.relative_keys), kLanes<Real>) + kLanes<Real>;
  return step / kLanes<Real> % 2 == 1 ? step : step + kLanes<Real>;
}

template <typename Real>
int64_t ValueStep(const Problem& p) {
  return RoundUp(p.value_head_size, kLanes<Real>);
}

// The elements of a table of one head.
template <typename Real>
int64_t KeySize(const Problem& p) {
  return p.relative_keys ? p.head_size * KeyStep<Real>(p) : 0;
}

template <typename Real>
int64_t ValueSize(const Problem& p) {
  return p.relative_values ? MostDistances(p, *p.relative_values) * ValueStep<Real>(p) : 0;
}

// Loads elements [begin, begin + count) of the vector of a distance within the table.
template <typename Real>
void LoadElements(const TensorView& table, int64_t h, int64_t distance, int64_t begin,
                  int64_t count, Real* out) {
  const std::byte* row = table.Row(h, table.dims[1] / 2 + distance, begin);
  const int64_t step = table.strides[2];
  if (table.dtype == DType::kFloat32) {
    for (int64_t n = 0; n < count; ++n) {
      float element;
      std::memcpy(&element, row + n * step * SizeOf(DType::kFloat32), sizeof(element));
      out[n] = element;
    }
    return;
  }
  for (int64_t n = 0; n < count; ++n) {
    out[n] = static_cast<Real>(LoadElement(row, table.dtype, n * step));
  }
}

}  // namespace

template <typename Real>
VectorTables<Real>::VectorTables(const Problem& p, std::byte* memory)
    : problem_(p),
      keys_(reinterpret_cast<Real*>(memory)),
      values_(keys_ + Heads(p.relative_keys) * KeySize<Real>(p)),
      finite_(reinterpret_cast<int64_t*>(values_ + Heads(p.relative_values) * ValueSize<Real>(p))) {
}

template <typename Real>
int64_t VectorTables<Real>::Bytes(const Problem& p) {
  const int64_t elements =
      Heads(p.relative_keys) * KeySize<Real>(p) + Heads(p.relative_values) * ValueSize<Real>(p);
  return elements * int64_t{sizeof(Real)} + Heads(p.relative_values) * int64_t{sizeof(int64_t)};
}

template <typename Real>
int64_t VectorTables<Real>::Count(const Problem& p) {
  return Heads(p.relative_keys) + Heads(p.relative_values);
}

template <typename Real>
void VectorTables<Real>::Fill(const Arguments& a, int64_t n) const {
  const int64_t key_heads = Heads(problem_.relative_keys);
  if (n < key_heads) return FillKeys(a.inputs[Role::kRelativeKeys], n);
  FillValues(a.inputs[Role::kRelativeValues], n - key_heads);
}

template <typename Real>
void VectorTables<Real>::FillKeys(const TensorView& table, int64_t h) const {
  const int64_t size = problem_.head_size;
  const int64_t step = KeyStep<Real>(problem_);
  const Distances distances = DistancesOf(problem_, *problem_.relative_keys);
  Real* out = keys_ + h * KeySize<Real>(problem_);
  // In blocks, so that neither reading nor writing leaves the cache lines of a block.
  constexpr int64_t kElements = 32;
  for (int64_t n = 0; n < step; n += kLanes<Real>) {
    for (int64_t d = 0; d < size; d += kElements) {
      Real block[kLanes<Real>][kElements] = {};
      const int64_t elements = std::min(kElements, size - d);
      const int64_t rows = std::clamp<int64_t>(distances.count() - n, 0, kLanes<Real>);
      for (int64_t r = 0; r < rows; ++r) {
        LoadElements(table, h, distances.first + n + r, d, elements, block[r]);
      }
      for (int64_t e = 0; e < elements; ++e) {
        for (int64_t r = 0; r < kLanes<Real>; ++r) out[(d + e) * step + n + r] = block[r][e];
      }
    }
  }
}

template <typename Real>
void VectorTables<Real>::FillValues(const TensorView& table, int64_t h) const {
  const int64_t size = problem_.value_head_size;
  const int64_t step = ValueStep<Real>(problem_);
  const Distances distances = DistancesOf(problem_, *problem_.relative_values);
  Real* out = values_ + h * ValueSize<Real>(problem_);
  Real zeros = 0;
  for (int64_t n = 0; n < distances.count(); ++n, out += step) {
    LoadElements(table, h, distances.first + n, 0, size, out);
    std::fill(out + size, out + step, Real{0});
    for (int64_t d = 0; d < size; ++d) zeros += out[d] * Real{0};  // Inf * 0 and NaN * 0 are NaN.
  }
  finite_[h] = zeros == 0 ? 1 : 0;
}

template <typename Real>
FlashVectors VectorTables<Real>::For(const Arguments& a, int64_t b) const {
  const Problem& p = problem_;
  const auto table = [&](const std::optional<RelativeVectors>& vectors, const Real* data,
                         int64_t size, int64_t step) {
    const Distances distances = DistancesOf(p, *vectors);
    return FlashVectorTable{.data = reinterpret_cast<const std::byte*>(data),
                            .head_step = vectors->heads == 1 ? 0 : size,
                            .step = step,
                            .first = distances.first,
                            .last = distances.last};
  };
  FlashVectors vectors = {};
  if (p.relative_keys) {
    vectors.keys = table(p.relative_keys, keys_, KeySize<Real>(p), KeyStep<Real>(p));
  }
  if (p.relative_values) {
    vectors.values = table(p.relative_values, values_, ValueSize<Real>(p), ValueStep<Real>(p));
    vectors.values_finite = finite_;
  }
  vectors.exist = true;
  vectors.has_queries = p.has_relative_query;
  if (p.has_relative_query) vectors.queries = BytesOf(a.inputs[Role::kRelativeQuery], 0);
  vectors.first_position = DiagonalKey(p, a.key_lengths, b, 0) - SectionOrFull(p).first_query;
  return vectors;
}

template class VectorTables<float>;
template class VectorTables<double>;

}  // namespace rapt::cpu
