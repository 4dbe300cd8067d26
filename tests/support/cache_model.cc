#include "tests/support/cache_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

#include "attention/q8_0.h"

namespace rapt::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

v1::Tensor ToMessage(const std::vector<float>& values, const std::vector<int64_t>& shape) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::FP32);
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  tensor.set_data(values.data(), values.size() * sizeof(float));
  return tensor;
}

std::vector<float> Values(const v1::Tensor& tensor) {
  std::vector<float> values(tensor.data().size() / sizeof(float));
  std::copy_n(tensor.data().data(), tensor.data().size(), reinterpret_cast<char*>(values.data()));
  return values;
}

void Tokens::Add(const Tokens& more) {
  keys.insert(keys.end(), more.keys.begin(), more.keys.end());
  values.insert(values.end(), more.values.begin(), more.values.end());
}

Tokens Tokens::Slice(int64_t begin, int64_t count) const {
  const auto part = [&](const std::vector<float>& of, int64_t size) {
    const auto first = of.begin() + begin * kKvHeads * size;
    return std::vector<float>(first, first + count * kKvHeads * size);
  };
  return {part(keys, kHeadSize), part(values, kValueSize)};
}

void Tokens::Resize(int64_t count) {
  keys.resize(static_cast<size_t>(count * kKvHeads * kHeadSize));
  values.resize(static_cast<size_t>(count * kKvHeads * kValueSize));
}

std::vector<float> Random(int64_t count, Rng& rng) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(Uniform(rng, -2, 2));
  return values;
}

Tokens RandomTokens(int64_t count, Rng& rng) {
  return {Random(count * kKvHeads * kHeadSize, rng), Random(count * kKvHeads * kValueSize, rng)};
}

std::vector<float> Rounded(const std::vector<float>& numbers, int64_t size) {
  std::vector<float> rounded;
  std::vector<std::byte> row(static_cast<size_t>(q8_0::RowBytes(size)));
  for (size_t n = 0; n < numbers.size(); n += static_cast<size_t>(size)) {
    const auto* from = reinterpret_cast<const std::byte*>(numbers.data() + n);
    q8_0::StoreRow(from, DType::kFloat32, size, row.data());
    for (int64_t e = 0; e < size; ++e) rounded.push_back(q8_0::LoadNumber(row.data(), e));
  }
  return rounded;
}

Tokens Stored(const Tokens& tokens, v1::Storage storage) {
  if (storage == v1::STORAGE_PLAIN) return tokens;
  return {Rounded(tokens.keys, kHeadSize), Rounded(tokens.values, kValueSize)};
}

Answer Define(const LayerModel& layer, int64_t keys, int64_t first_position, int64_t position,
              int64_t rows, const float* q, std::optional<int64_t> left) {
  Answer answer;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < kQueryHeads; ++h) {
      const int64_t kv = h / (kQueryHeads / kKvHeads);
      std::vector<std::pair<int64_t, double>> scores;
      double max = -kInfinity;
      for (int64_t t = 0; t < keys; ++t) {
        const int64_t distance = position + r - (first_position + t);
        if (distance < 0) continue;
        const bool is_first = first_position + t < layer.keep_first;
        const bool is_kept = layer.keep_last == 0 || distance < layer.keep_last;
        if (!is_first && !(is_kept && (!left || distance <= *left))) continue;
        double score = 0;
        for (int64_t e = 0; e < kHeadSize; ++e) {
          score += static_cast<double>(q[(r * kQueryHeads + h) * kHeadSize + e]) *
                   layer.tokens.keys[(t * kKvHeads + kv) * kHeadSize + e];
        }
        score /= std::sqrt(static_cast<double>(kHeadSize));
        scores.emplace_back(t, score);
        max = std::max(max, score);
      }
      double sum = 0;
      std::vector<double> y(kValueSize, 0);
      for (const auto& [t, score] : scores) {
        const double weight = std::exp(score - max);
        sum += weight;
        for (int64_t e = 0; e < kValueSize; ++e) {
          y[e] += weight * layer.tokens.values[(t * kKvHeads + kv) * kValueSize + e];
        }
      }
      for (double value : y) answer.y.push_back(scores.empty() ? 0 : value / sum);
      answer.lse.push_back(scores.empty() ? -kInfinity : max + std::log(sum));
    }
  }
  return answer;
}

void ExpectClose(const v1::Tensor& got, const std::vector<double>& want, const char* name) {
  const std::vector<float> values = Values(got);
  ASSERT_EQ(values.size(), want.size()) << name;
  for (size_t n = 0; n < want.size(); ++n) {
    if (values[n] == want[n]) continue;  // infinities
    ASSERT_NEAR(values[n], want[n], 2e-5 * (1 + std::abs(want[n]))) << name << " " << n;
  }
}

}  // namespace rapt::test
