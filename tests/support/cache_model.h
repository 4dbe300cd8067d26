// A model in float64 of the layers of caches, and the messages of CacheService with their tokens.
#ifndef RAPT_TESTS_SUPPORT_CACHE_MODEL_H_
#define RAPT_TESTS_SUPPORT_CACHE_MODEL_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "proto/rapt/v1/cache.pb.h"
#include "tests/support/tensor.h"

namespace rapt::test {

inline constexpr int64_t kKvHeads = 2, kQueryHeads = 4, kHeadSize = 8, kValueSize = 6;

v1::Tensor ToMessage(const std::vector<float>& values, const std::vector<int64_t>& shape);
std::vector<float> Values(const v1::Tensor& tensor);

// New tokens: keys [n, Hkv, D] and values [n, Hkv, Dv].
struct Tokens {
  std::vector<float> keys, values;

  int64_t count() const { return static_cast<int64_t>(keys.size()) / (kKvHeads * kHeadSize); }
  v1::Tensor k() const { return ToMessage(keys, {count(), kKvHeads, kHeadSize}); }
  v1::Tensor v() const { return ToMessage(values, {count(), kKvHeads, kValueSize}); }
  void Add(const Tokens& more);
  Tokens Slice(int64_t begin, int64_t count) const;
  void Resize(int64_t count);
};

std::vector<float> Random(int64_t count, Rng& rng);
Tokens RandomTokens(int64_t count, Rng& rng);
// Returns rows of `size` numbers as they are after they were stored in 8 bits.
std::vector<float> Rounded(const std::vector<float>& numbers, int64_t size);
// Returns tokens as a cache has them.
Tokens Stored(const Tokens& tokens, v1::Storage storage);

// What a layer of a cache holds.
struct LayerModel {
  Tokens tokens;
  int64_t keep_first = 0, keep_last = 0;
};

// One item's rows of y and lse by the definition. `q`: [rows, Hq, D].
struct Answer {
  std::vector<double> y, lse;
};
Answer Define(const LayerModel& layer, int64_t keys, int64_t first_position, int64_t position,
              int64_t rows, const float* q, std::optional<int64_t> left);

// Fails the test unless a tensor of FP32 is near the definition; infinities are equal.
void ExpectClose(const v1::Tensor& got, const std::vector<double>& want, const char* name);

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_CACHE_MODEL_H_
