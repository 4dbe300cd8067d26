#include "tests/support/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numbers>
#include <utility>

namespace rapt::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// [B, Hkv, P + fresh rows, E]: the past rows before the new ones.
std::vector<double> Concatenate(const std::optional<Tensor>& past, const Tensor& fresh,
                                int64_t past_length) {
  const auto& [batch, heads, fresh_length, size] = fresh.dims();
  std::vector<double> rows;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t j = 0; j < past_length + fresh_length; ++j) {
        for (int64_t e = 0; e < size; ++e) {
          rows.push_back(j < past_length ? past->At(b, h, j, e)
                                         : fresh.At(b, h, j - past_length, e));
        }
      }
    }
  }
  return rows;
}

// The first `count` numbers of each row of `size`.
std::vector<double> FirstOfRows(const std::vector<double>& rows, int64_t size, int64_t count) {
  std::vector<double> first;
  for (size_t row = 0; row < rows.size(); row += size) {
    first.insert(first.end(), rows.begin() + row, rows.begin() + row + count);
  }
  return first;
}

// The intermediate values of one query row, one per key.
struct Row {
  explicit Row(int64_t total)
      : raw(total), capped(total), biased(total), weights(total), masked(total) {}

  std::vector<double> raw, capped, biased, weights;
  std::vector<bool> masked;
  double lse = -kInf;
  double largest_term = 0;  // of the two terms of a score with relative_keys, which may cancel
};

// The offset of causality: query i is at position i + offset among the keys.
int64_t Offset(const Problem& problem, const std::vector<int64_t>& key_lengths, int64_t b) {
  const int64_t past = problem.past_length;
  const int64_t length = problem.has_key_lengths ? key_lengths[b] : problem.key_length;
  if (problem.alignment == Alignment::kOnnx) {
    return past == 0 && problem.has_key_lengths ? length - problem.query_length : past;
  }
  if (problem.alignment == Alignment::kTopLeft) return past;
  // The last query is at the last key. If that is before the first new key although there would be
  // enough keys without padding, the queries are padded, too.
  const int64_t without_padding = problem.key_length - problem.query_length;
  const int64_t first = length - problem.query_length;
  return past + (first < 0 ? std::min<int64_t>(without_padding, 0) : first);
}

// The angle of pair t of r / 2 at position 1, by the rules of Hugging Face's rope_type.
double FrequencyOf(const Problem& problem, double t, double r) {
  const double theta = *problem.rope_theta;
  const double frequency = 1 / std::pow(theta, 2 * t / r);
  if (!problem.rope_scaling) return frequency;
  const RopeScaling& s = *problem.rope_scaling;
  const double divided = frequency / s.factor;
  if (s.type == RopeScaling::Type::kLinear) return divided;
  if (s.type == RopeScaling::Type::kLlama3) {
    const double wavelength = 2 * std::numbers::pi / frequency;
    if (wavelength < s.original_length / s.fast) return frequency;
    if (wavelength > s.original_length / s.slow) return divided;
    const double smooth = (s.original_length / wavelength - s.slow) / (s.fast - s.slow);
    return (1 - smooth) * divided + smooth * frequency;
  }
  const auto correction = [&](double rotations) {
    return r * std::log(s.original_length / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(theta));
  };
  double low = correction(s.fast), high = correction(s.slow);
  if (s.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, r - 1);
  const double ramp = std::clamp((t - low) / (high - low + (low == high ? 0.001 : 0)), 0.0, 1.0);
  return divided * ramp + frequency * (1 - ramp);
}

// The cosine and the sine of pair t for row s of the queries or the new keys.
std::pair<double, double> AngleOf(const Problem& problem, const Inputs& inputs, bool is_key,
                                  int64_t b, int64_t s, int64_t t) {
  const std::optional<Tensor>& ids = is_key ? inputs.key_position_ids : inputs.position_ids;
  int64_t position = is_key ? problem.past_length + s : s + Offset(problem, inputs.key_lengths, b);
  if (ids) position = static_cast<int64_t>(ids->At(b, s, 0, 0));
  if (!problem.rope_theta) {
    const bool by_position = !problem.rotary_cache->batch.has_value();
    const auto at = [&](const Tensor& cache) {
      return by_position ? cache.At(position, t, 0, 0) : cache.At(b, s, t, 0);
    };
    return {at(*inputs.cos_cache), at(*inputs.sin_cache)};
  }
  const int64_t r =
      problem.rotary_embedding_dim != 0 ? problem.rotary_embedding_dim : problem.head_size;
  const double angle = static_cast<double>(position) *
                       FrequencyOf(problem, static_cast<double>(t), static_cast<double>(r));
  const double size = problem.rope_scaling ? problem.rope_scaling->attention_factor : 1;
  // Stored as a cache would be.
  const DType type = problem.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  return {RoundTo(type, size * std::cos(angle)), RoundTo(type, size * std::sin(angle))};
}

Tensor Rotated(const Problem& problem, const Inputs& inputs, bool is_key) {
  const Tensor& rows = is_key ? inputs.key : inputs.query;
  Tensor rotated(rows.dtype(), rows.dims());
  const auto& [batch, heads, length, size] = rows.dims();
  const int64_t r =
      problem.rotary_embedding_dim != 0 ? problem.rotary_embedding_dim : problem.head_size;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t s = 0; s < length; ++s) {
        for (int64_t e = r; e < size; ++e) rotated.Set(b, h, s, e, rows.At(b, h, s, e));
        for (int64_t t = 0; t < r / 2; ++t) {
          const auto [cos, sin] = AngleOf(problem, inputs, is_key, b, s, t);
          const int64_t first = problem.interleaved ? 2 * t : t;
          const int64_t second = problem.interleaved ? 2 * t + 1 : t + r / 2;
          const double real = rows.At(b, h, s, first);
          const double imaginary = rows.At(b, h, s, second);
          rotated.Set(b, h, s, first, cos * real - sin * imaginary);
          rotated.Set(b, h, s, second, sin * real + cos * imaginary);
        }
      }
    }
  }
  return rotated;
}

// The value that a mask of this shape adds to score (b, h, i, j): 0, -inf or its float.
double Added(const std::optional<MaskShape>& shape, const std::optional<Tensor>& mask, int64_t b,
             int64_t h, int64_t i, int64_t j) {
  if (!shape) return 0;
  const int64_t last = shape->dims[3];
  if (last != 1 && j >= last) return -kInf;
  const double value = mask->At(b, h, i, j);
  if (shape->dtype == DType::kBool) return value != 0 ? 0 : -kInf;
  return value;
}

// ALiBi's default slope of head h: for 2^n heads the powers of 2^(-8 / 2^n); for other numbers
// those of the next smaller 2^n, followed by the odd powers of 2^(-8 / 2^(n + 1)).
double AlibiSlope(int64_t heads, int64_t h) {
  int64_t below = 1;
  while (below * 2 <= heads) below *= 2;
  if (h < below) return std::pow(2, -8.0 * static_cast<double>(h + 1) / static_cast<double>(below));
  return std::pow(2,
                  -8.0 * static_cast<double>(2 * (h - below) + 1) / static_cast<double>(2 * below));
}

// T5's bucket, by the powers of (max_distance / m) instead of logarithms: the largest k with
// (d / m)^(N - m) >= (max_distance / m)^k.
int64_t T5Bucket(const Problem& problem, int64_t distance) {
  int64_t buckets = problem.bias_table->buckets;
  int64_t first = 0;
  if (problem.is_bidirectional) {
    buckets /= 2;
    if (distance > 0) first = buckets;
  }
  const int64_t d = problem.is_bidirectional ? std::abs(distance) : -std::min<int64_t>(distance, 0);
  const int64_t exact = buckets / 2;
  if (d < exact) return first + d;
  const auto m = static_cast<long double>(exact);
  const long double most = static_cast<long double>(problem.max_distance.value_or(128)) / m;
  const auto steps = static_cast<long double>(buckets - exact);
  int64_t k = 0;
  // The epsilon counts exact powers, which the rounding of powl may miss.
  while (k + 1 < buckets - exact &&
         std::pow(static_cast<long double>(d) / m, steps) * (1 + 1e-12L) >=
             std::pow(most, static_cast<long double>(k + 1))) {
    ++k;
  }
  return first + exact + k;
}

// The bias of the distance from query i to key j.
double BiasOfDistance(const Problem& problem, const Inputs& inputs, int64_t b, int64_t h, int64_t i,
                      int64_t j) {
  const int64_t distance = j - (i + Offset(problem, inputs.key_lengths, b));
  const auto magnitude = static_cast<double>(std::abs(distance));
  if (problem.alibi) return -AlibiSlope(problem.query_heads, h) * magnitude;
  if (problem.alibi_slopes) return -inputs.alibi_slopes->At(b, h, 0, 0) * magnitude;
  if (problem.bias_table) return inputs.bias_table->At(T5Bucket(problem, distance), h, 0, 0);
  if (!problem.relative_bias) return 0;
  const int64_t clip = problem.relative_bias->length / 2;
  return inputs.relative_bias->At(h, clip + std::clamp(distance, -clip, clip), 0, 0);
}

// Whether global_mask has the position; false for one that does not exist.
bool IsGlobal(const Problem& problem, const Inputs& inputs, int64_t b, int64_t position) {
  if (!inputs.global_mask || !problem.has_global_mask) return false;
  if (position < 0 || position >= problem.past_length + problem.key_length) return false;
  return inputs.global_mask->At(b, position, 0, 0) != 0;
}

// Visibility by causality, lengths, window and its exemptions, block mask and selection.
bool IsShown(const Problem& problem, const Inputs& inputs, int64_t b, int64_t h, int64_t i,
             int64_t j) {
  const int64_t position = i + Offset(problem, inputs.key_lengths, b);
  const bool exempt = j < problem.prefix_keys || IsGlobal(problem, inputs, b, j) ||
                      IsGlobal(problem, inputs, b, position);
  Problem ungated = problem;
  if (exempt) ungated.left_window = ungated.right_window = -1;
  if (!IsVisible(ungated, inputs.key_lengths, b, i, j)) return false;
  if (problem.block_mask &&
      inputs.block_mask->At(b, h, i / *problem.block_q, j / *problem.block_k) == 0) {
    return false;
  }
  if (!problem.selected) return true;
  for (int64_t n = 0; n < problem.selected->count; ++n) {
    const auto kv_head = h / (problem.query_heads / problem.kv_heads);
    if (inputs.selected->At(b, kv_head, i, n) == static_cast<double>(j)) return true;
  }
  return false;
}

// The sum of what position, mask and biases add to score (b, h, i, j).
double Bias(const Problem& problem, const Inputs& inputs, int64_t b, int64_t h, int64_t i,
            int64_t j) {
  if (!IsShown(problem, inputs, b, h, i, j)) return -kInf;
  const double mask = Added(problem.mask, inputs.mask, b, h, i, j);
  const double bias = Added(problem.bias, inputs.bias, b, h, i, j);
  const double relative = BiasOfDistance(problem, inputs, b, h, i, j);
  return mask == -kInf || bias == -kInf || relative == -kInf ? -kInf : mask + bias + relative;
}

// Where a query is: batch row, head, index and position among the keys.
struct Place {
  int64_t b, h, i, position;
};

// Element d of the vector that relative_keys or relative_values has for key j.
double VectorElement(const std::optional<Tensor>& table, const Place& query, int64_t j, int64_t d) {
  if (!table) return 0;
  const int64_t middle = (table->dims()[1] - 1) / 2;
  int64_t entry = middle + j - query.position;
  if (entry < 0) entry = 0;
  if (entry > 2 * middle) entry = 2 * middle;
  return table->At(query.h, entry, d, 0);
}

// The weights of additive scores, times the scale; empty for dot products.
std::vector<double> AdditiveWeights(const Problem& problem, const Inputs& inputs, int64_t h) {
  std::vector<double> weights;
  if (problem.score_function != ScoreFunction::kAdditive) return weights;
  for (int64_t d = 0; d < problem.head_size; ++d) {
    weights.push_back(problem.scale.value_or(1) * inputs.additive_weight->At(h, d, 0, 0));
  }
  return weights;
}

double SumOfMagnitudes(const std::vector<double>& numbers) {
  double sum = 0;
  for (double x : numbers) sum += std::abs(x);
  return sum;
}

// The product of a query with the relative_keys of key j.
double RelativeScore(const Problem& problem, const Inputs& inputs, const Place& place,
                     const double* query, int64_t j) {
  double sum = 0;
  for (int64_t d = 0; d < problem.head_size; ++d) {
    const double q = problem.has_relative_query
                         ? inputs.relative_query->At(place.b, place.h, place.i, d)
                         : query[d];
    sum += q * VectorElement(inputs.relative_keys, place, j, d);
  }
  return sum;
}

void ScoreKeys(const Problem& problem, const Inputs& inputs, const Place& place,
               const double* query, const double* keys, const std::vector<double>& additive_weights,
               Row& row) {
  const double scale =
      problem.scale.value_or(1 / std::sqrt(static_cast<double>(problem.head_size)));
  for (size_t j = 0; j < row.raw.size(); ++j) {
    row.raw[j] = 0;
    for (int64_t d = 0; d < problem.head_size; ++d, ++keys) {
      row.raw[j] += additive_weights.empty() ? scale * query[d] * *keys
                                             : additive_weights[d] * std::tanh(query[d] + *keys);
    }
    if (problem.relative_keys) {
      const double relative =
          scale * RelativeScore(problem, inputs, place, query, static_cast<int64_t>(j));
      for (const double term : {row.raw[j], relative}) {
        if (std::isfinite(term)) row.largest_term = std::max(row.largest_term, std::abs(term));
      }
      row.raw[j] += relative;
    }
    row.capped[j] = problem.softcap > 0 ? problem.softcap * std::tanh(row.raw[j] / problem.softcap)
                                        : row.raw[j];
  }
}

// `sink` is the score of one more key, -inf without one.
void Softmax(Row& row, double sink) {
  double largest = sink;
  for (double s : row.biased) {
    if (s > largest || std::isnan(s)) largest = s;
    if (std::isnan(largest)) break;
  }
  if (largest == -kInf) return;
  double sum = std::exp(sink - largest);
  for (double s : row.biased) sum += std::exp(s - largest);
  for (size_t j = 0; j < row.weights.size(); ++j) {
    row.weights[j] = std::exp(row.biased[j] - largest) / sum;
  }
  row.lse = largest + std::log(sum);
}

double AlphaOf(const Problem& problem, const Inputs& inputs, int64_t h) {
  if (problem.normalizer == Normalizer::kSoftmax) return 1;
  if (problem.normalizer == Normalizer::kSparsemax) return 2;
  if (problem.normalizer == Normalizer::kEntmax15) return 1.5;
  return problem.alpha ? *problem.alpha : inputs.head_alpha->At(h, 0, 0, 0);
}

// The weights max((alpha - 1) s - tau, 0)^(1 / (alpha - 1)), with tau by bisection: at the largest
// score it gives a sum of 0, and 1 below that a sum of at least 1.
void Entmax(Row& row, long double alpha) {
  double largest = -kInf;
  for (double s : row.biased) {
    if (s > largest || std::isnan(s)) largest = s;
    if (std::isnan(largest)) break;
  }
  row.lse = largest;
  if (largest == -kInf) return;
  if (!std::isfinite(largest)) {
    std::fill(row.weights.begin(), row.weights.end(), std::nan(""));
    return;
  }
  const auto weight = [&](double s, long double tau) -> long double {
    const long double x = (alpha - 1) * (static_cast<long double>(s) - largest) - tau;
    if (x <= 0 || alpha == 2) return std::max(x, 0.0L);
    return alpha == 1.5 ? x * x : std::pow(x, 1 / (alpha - 1));
  };
  long double low = -1, high = 0;
  for (int n = 0; n < 70; ++n) {
    const long double tau = (low + high) / 2;
    long double sum = 0;
    for (double s : row.biased) sum += weight(s, tau);
    (sum >= 1 ? low : high) = tau;
  }
  for (size_t j = 0; j < row.weights.size(); ++j) {
    row.weights[j] = static_cast<double>(weight(row.biased[j], low));
  }
}

void Drop(const Dropout& dropout, int64_t b, int64_t h, int64_t i, Row& row) {
  for (size_t j = 0; j < row.weights.size(); ++j) {
    row.weights[j] = IsKept(dropout, b, h, i, static_cast<int64_t>(j))
                         ? row.weights[j] / (1 - dropout.probability)
                         : 0;
  }
}

void AppendOutput(const Row& row, bool skips_zeros, const double* values, int64_t size,
                  const Inputs& inputs, const Place& place, std::vector<double>& output) {
  for (int64_t d = 0; d < size; ++d) {
    double sum = 0;
    for (size_t j = 0; j < row.weights.size(); ++j) {
      // Skips masked keys, as 0 * NaN is NaN. A row without a finite score is zeros.
      if (row.masked[j] || row.lse == -kInf || (skips_zeros && row.weights[j] == 0)) continue;
      sum += row.weights[j] * (values[j * size + d] + VectorElement(inputs.relative_values, place,
                                                                    static_cast<int64_t>(j), d));
    }
    output.push_back(sum);
  }
}

double LargestScore(const Row& row) {
  constexpr double kWorthAnError = 1e-18;
  double largest = row.largest_term;
  const auto count = [&](double score) {
    if (std::isfinite(score)) largest = std::max(largest, std::abs(score));
  };
  for (size_t j = 0; j < row.raw.size(); ++j) {
    count(row.raw[j]);
    count(row.capped[j]);
    if (std::exp(row.biased[j] - row.lse) > kWorthAnError) count(row.biased[j]);
  }
  return largest;
}

const std::vector<double>& Stage(const Row& row, ScoreOutput output) {
  switch (output) {
    case ScoreOutput::kScores:
      return row.raw;
    case ScoreOutput::kSoftcapped:
      return row.capped;
    case ScoreOutput::kBiased:
      return row.biased;
    case ScoreOutput::kWeights:
      return row.weights;
  }
  std::abort();
}

}  // namespace

std::array<uint32_t, 4> PhiloxDraws(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

bool IsKept(const Dropout& dropout, int64_t b, int64_t h, int64_t i, int64_t j) {
  const std::array<uint32_t, 4> draws =
      PhiloxDraws({static_cast<uint32_t>(j / 4), static_cast<uint32_t>(i), static_cast<uint32_t>(h),
                   static_cast<uint32_t>(b)},
                  {static_cast<uint32_t>(dropout.seed), static_cast<uint32_t>(dropout.seed >> 32)});
  return draws[j % 4] >= dropout.probability * 0x1p32;
}

bool IsVisible(const Problem& problem, const std::vector<int64_t>& key_lengths, int64_t b,
               int64_t i, int64_t j) {
  const int64_t total = problem.past_length + problem.key_length;
  const int64_t offset = Offset(problem, key_lengths, b);
  if (problem.has_key_lengths && j >= problem.past_length + key_lengths[b]) return false;
  if (problem.causal && j > i + offset) return false;
  // Differences, because i + offset + window may overflow.
  if (problem.left_window >= 0 && i + offset - j > problem.left_window) return false;
  if (problem.right_window >= 0 && j - (i + offset) > problem.right_window) return false;
  return j >= 0 && j < total;
}

Tensor RotatedQueries(const Problem& problem, const Inputs& inputs) {
  return problem.has_rotary() ? Rotated(problem, inputs, /*is_key=*/false) : inputs.query;
}

Tensor RotatedKeys(const Problem& problem, const Inputs& inputs) {
  const bool rotates = problem.has_rotary() && problem.rotary_keys.value_or(true);
  return rotates ? Rotated(problem, inputs, /*is_key=*/true) : inputs.key;
}

Expected Attend(const Problem& problem, const Inputs& inputs) {
  const int64_t total = problem.past_length + problem.key_length;
  const std::vector<double> queries = RotatedQueries(problem, inputs).ToVector();
  const std::vector<double> keys =
      Concatenate(inputs.past_key, RotatedKeys(problem, inputs), problem.past_length);
  const std::vector<double> values =
      problem.values_in_keys ? FirstOfRows(keys, problem.head_size, problem.value_head_size)
                             : Concatenate(inputs.past_value, inputs.value, problem.past_length);

  Expected expected;
  const double* query = queries.data();
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t h = 0; h < problem.query_heads; ++h) {
      const int64_t kv_head = h / (problem.query_heads / problem.kv_heads);
      const int64_t first_key = (b * problem.kv_heads + kv_head) * total;
      const std::vector<double> weights = AdditiveWeights(problem, inputs, h);
      for (int64_t i = 0; i < problem.query_length; ++i, query += problem.head_size) {
        Row row(total);
        const Place place = {b, h, i, i + Offset(problem, inputs.key_lengths, b)};
        ScoreKeys(problem, inputs, place, query, keys.data() + first_key * problem.head_size,
                  weights, row);
        for (int64_t j = 0; j < total; ++j) {
          const double bias = Bias(problem, inputs, b, h, i, j);
          row.masked[j] = bias == -kInf;
          row.biased[j] = row.masked[j] ? -kInf : row.capped[j] + bias;
        }
        const double alpha = AlphaOf(problem, inputs, h);
        if (alpha > 1) {
          Entmax(row, alpha);
        } else {
          Softmax(row, inputs.head_sink ? inputs.head_sink->At(h, 0, 0, 0) : -kInf);
        }
        for (int64_t j = 0; j < total; ++j) {
          if (row.masked[j]) row.weights[j] = 0;
        }
        if (problem.dropout) Drop(*problem.dropout, b, h, i, row);
        AppendOutput(row, /*skips_zeros=*/alpha > 1,
                     values.data() + first_key * problem.value_head_size, problem.value_head_size,
                     inputs, place, expected.output);
        expected.lse.push_back(row.lse);
        expected.row_max_score.push_back(LargestScore(row));
        expected.row_weight_sum.push_back(SumOfMagnitudes(weights));
        if (problem.score_output) {
          const std::vector<double>& stage = Stage(row, *problem.score_output);
          expected.scores.insert(expected.scores.end(), stage.begin(), stage.end());
        }
      }
    }
  }
  if (problem.wants_present) {
    expected.present_key = keys;
    if (!problem.values_in_keys) expected.present_value = values;
  }
  return expected;
}

}  // namespace rapt::test
