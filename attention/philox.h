// The random numbers of dropout and of random projections, by Philox4x32-10: a backend can generate
// the number of any weight in any order.
#ifndef RAPT_ATTENTION_PHILOX_H_
#define RAPT_ATTENTION_PHILOX_H_

#include <cstdint>

#include "absl/types/span.h"

namespace rapt {

// Sets keep[n] for n in [0, count) to whether the weight of key begin + n survives dropout with
// probability p in [0, 1): draw >= p * 2^32.
void DropoutKeeps(double p, uint64_t seed, int64_t b, int64_t h, int64_t i, int64_t begin,
                  int64_t count, bool* keep);

// What normal numbers are drawn for; different purposes have independent numbers.
enum class DrawPurpose : uint32_t { kRotations = 1, kDirections = 2, kNorms = 3 };

// Writes standard normal numbers [begin, begin + out.size()) of a head: number t comes from lane t
// % 4 of the draw with counter (t / 4, head, purpose, 0), by Box-Muller on pairs of uniform numbers
// (draw + 1/2) / 2^32, the cosine first. REQUIRES: begin + out.size() <= 2^34.
void DrawNormals(uint64_t seed, uint32_t head, DrawPurpose purpose, int64_t begin,
                 absl::Span<double> out);

}  // namespace rapt

#endif  // RAPT_ATTENTION_PHILOX_H_
