// The semantics of attention, computed by plain loops in float64. Independent of every backend,
// including the reference backend, which is under test too.
#ifndef RAPT_TESTS_SUPPORT_ORACLE_H_
#define RAPT_TESTS_SUPPORT_ORACLE_H_

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "attention/problem.h"
#include "tests/support/tensor.h"

namespace rapt::test {

// The tensors of Arguments, owned. The mask has the dims of Problem::mask.
struct Inputs {
  Tensor query;
  Tensor key;
  Tensor value;  // not read if the values are in the keys
  std::optional<Tensor> mask = std::nullopt;
  std::optional<Tensor> past_key = std::nullopt;
  std::optional<Tensor> past_value = std::nullopt;
  std::vector<int64_t> key_lengths = {};
  std::optional<Tensor> bias = std::nullopt;
  std::optional<Tensor> head_sink = std::nullopt;        // [Hq, 1, 1, 1]
  std::optional<Tensor> alibi_slopes = std::nullopt;     // [1 or B, Hq, 1, 1]
  std::optional<Tensor> bias_table = std::nullopt;       // [N, Hq, 1, 1]
  std::optional<Tensor> relative_bias = std::nullopt;    // [1 or Hq, 2c + 1, 1, 1]
  std::optional<Tensor> relative_keys = std::nullopt;    // [1 or Hq, 2c + 1, D, 1]
  std::optional<Tensor> relative_values = std::nullopt;  // [1 or Hq, 2c + 1, Dv, 1]
  std::optional<Tensor> relative_query = std::nullopt;   // [B, Hq, Sq, D]
  // [M, r/2, 1, 1] or [B, S, r/2, 1]
  std::optional<Tensor> cos_cache = std::nullopt;
  std::optional<Tensor> sin_cache = std::nullopt;
  std::optional<Tensor> position_ids = std::nullopt;      // [B, Sq, 1, 1], kInt64
  std::optional<Tensor> key_position_ids = std::nullopt;  // [B, Sk, 1, 1], kInt64
  std::optional<Tensor> additive_weight = std::nullopt;   // [1 or Hq, D, 1, 1]
  std::optional<Tensor> head_alpha = std::nullopt;        // [Hq, 1, 1, 1]
  std::optional<Tensor> block_mask = std::nullopt;        // Problem::block_mask
  std::optional<Tensor> selected = std::nullopt;          // INT32 [B, 1 or Hkv, Sq, N]
  std::optional<Tensor> global_mask = std::nullopt;       // BOOL [B, T, 1, 1]
};

// Row-major, not rounded to any type.
struct Expected {
  std::vector<double> output;         // [B, Hq, Sq, Dv]
  std::vector<double> lse;            // [B, Hq, Sq]; without a meaning unless softmax
  std::vector<double> scores;         // [B, Hq, Sq, T], what Problem::score_output names
  std::vector<double> present_key;    // [B, Hkv, T, D]
  std::vector<double> present_value;  // [B, Hkv, T, Dv]

  // The largest magnitude of a finite score in each row, [B, Hq, Sq]: over all keys before bias,
  // and after it over keys whose weight exceeds a rounding error. Keys masked by -1e9 do not count.
  // The terms of a score with relative_keys count as scores, because they may cancel.
  std::vector<double> row_max_score;
  // The sum of the magnitudes of scale * additive_weight, [B, Hq, Sq]; 0 for dot products.
  std::vector<double> row_weight_sum;
};

// REQUIRES: `problem` is valid and `inputs` match it.
Expected Attend(const Problem& problem, const Inputs& inputs);

// Q and K after rotary embedding, rounded to their type; unchanged if the problem has none.
Tensor RotatedQueries(const Problem& problem, const Inputs& inputs);
Tensor RotatedKeys(const Problem& problem, const Inputs& inputs);

// Returns whether query i of batch row b sees key j, given causality, window and lengths. Ignores
// the masks and what is exempt from the window.
bool IsVisible(const Problem& problem, const std::vector<int64_t>& key_lengths, int64_t b,
               int64_t i, int64_t j);

// Philox4x32-10 of Salmon et al. 2011.
std::array<uint32_t, 4> PhiloxDraws(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// Returns whether dropout keeps the weight of key j.
bool IsKept(const Dropout& dropout, int64_t b, int64_t h, int64_t i, int64_t j);

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_ORACLE_H_
