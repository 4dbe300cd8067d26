// Tokens and caches that the tests of caches in the client library share.
#ifndef RAPT_TESTS_CLIENT_CPP_CACHE_TOKENS_H_
#define RAPT_TESTS_CLIENT_CPP_CACHE_TOKENS_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "rapt/cache.h"

namespace rapt::test {

inline constexpr int64_t kKvHeads = 2, kQueryHeads = 4, kSize = 8, kValueSize = 6;

// Rows [rows, heads, size] with numbers of their own.
struct Rows {
  std::vector<float> values;
  client::Shape shape;

  client::TensorView view() const { return client::View<float>(shape, values); }
  // Rows [begin, end).
  client::TensorView view(int64_t begin, int64_t end) const {
    const int64_t row = shape[1] * shape[2];
    return client::View<float>(
        {end - begin, shape[1], shape[2]},
        absl::MakeConstSpan(values).subspan(static_cast<size_t>(begin * row),
                                            static_cast<size_t>((end - begin) * row)));
  }
};

inline Rows Draw(int seed, int64_t rows, int64_t heads, int64_t size) {
  Rows drawn{{}, {rows, heads, size}};
  for (int64_t n = 0; n < rows * heads * size; ++n) {
    drawn.values.push_back(std::sin(static_cast<float>(1000 * seed + 7 * n)));
  }
  return drawn;
}

struct Tokens {
  Rows q, k, v;
};

inline Tokens DrawTokens(int seed, int64_t count) {
  return {Draw(3 * seed, count, kQueryHeads, kSize), Draw(3 * seed + 1, count, kKvHeads, kSize),
          Draw(3 * seed + 2, count, kKvHeads, kValueSize)};
}

inline client::CacheOptions TwoLayers() {
  return {
      .shapes = {
          {.layers = 2, .kv_heads = kKvHeads, .head_size = kSize, .value_head_size = kValueSize}}};
}

inline std::vector<float> ValuesOf(const client::Tensor& tensor) {
  const absl::Span<const float> values = tensor.values<float>();
  return {values.begin(), values.end()};
}

template <typename T>
void ExpectFails(const absl::StatusOr<T>& result, absl::StatusCode code, const char* reason) {
  EXPECT_EQ(result.status().code(), code) << result.status();
  EXPECT_EQ(client::ReasonOf(result.status()), reason) << result.status();
}

}  // namespace rapt::test

#endif  // RAPT_TESTS_CLIENT_CPP_CACHE_TOKENS_H_
