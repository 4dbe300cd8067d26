// Values for tests that go through the rows of attention/roles.h and attention/attributes.h: a row
// that some interface forgot fails them.
#ifndef RAPT_TESTS_SUPPORT_TABLE_VALUES_H_
#define RAPT_TESTS_SUPPORT_TABLE_VALUES_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>

#include "attention/attributes.h"
#include "attention/problem.h"
#include "attention/roles.h"

namespace rapt::test {

// Sets `value`, which may be optional, to one that no attribute has by default, within the range of
// the attribute.
template <typename T>
void SetUnusual(const AttributeInfo& info, T& value) {
  if constexpr (std::is_same_v<T, std::optional<bool>>) {
    value = false;
  } else if constexpr (requires { value.emplace(); }) {
    SetUnusual(info, value.emplace());
  } else if constexpr (std::is_same_v<T, bool>) {
    value = true;
  } else if constexpr (std::is_same_v<T, int64_t>) {
    value = info.attribute == Attribute::kRotaryDim ? 2 : 3;  // even
  } else if constexpr (std::is_enum_v<T>) {
    value = static_cast<T>(1);
  } else {
    value = std::clamp(info.attribute == Attribute::kAlpha ? 1.75 : 0.75, info.least, info.most);
  }
}

// The same as text; empty for a bool that is not optional.
template <typename T>
constexpr const char* UnusualTextOf(const AttributeField<T>& /*field*/) {
  return std::is_same_v<T, bool> ? "" : std::is_same_v<T, double> ? "0.75" : "3";
}
template <typename T>
constexpr const char* UnusualTextOf(const AttributeField<std::optional<T>>& /*field*/) {
  return std::is_same_v<T, bool> ? "0" : UnusualTextOf(AttributeField<T>{});
}
inline std::string UnusualText(const AttributeInfo& info) {
  if (info.attribute == Attribute::kRotaryDim) return "2";
  if (!info.choices.empty()) return std::string(info.choices[1]);
  if (info.attribute == Attribute::kAlpha) return "1.75";
  return std::visit([](const auto& field) { return UnusualTextOf(field); }, info.field);
}

// Removes what this normalizer excludes.
inline void UseNormalizer(Normalizer normalizer, Problem& problem) {
  problem.normalizer = normalizer;
  problem.head_sink = std::nullopt;
  problem.wants_lse = false;
}

// The problem with that attribute changed. REQUIRES: the attribute is a member of Problem.
inline Problem With(const AttributeInfo& info, Problem problem) {
  std::visit([&](const auto& field) { SetUnusual(info, problem.*field.problem); }, info.field);
  if (problem.is_additive()) problem.additive_weight = AdditiveWeight{};
  if (problem.alpha) problem.normalizer = Normalizer::kEntmax;
  if (problem.normalizer != Normalizer::kSoftmax) UseNormalizer(problem.normalizer, problem);
  return problem;
}

inline bool IsInProblem(const AttributeInfo& info) {
  return std::visit([](const auto& field) { return field.problem != nullptr; }, info.field);
}

// The biases by distance, of which a valid problem has at most one, and what else is not in
// MostTensors().
inline constexpr Role kRelativeTables[] = {Role::kAlibiSlopes,    Role::kBiasTable,
                                           Role::kRelativeBias,   Role::kCosCache,
                                           Role::kAdditiveWeight, Role::kHeadAlpha};

// A small problem that wants every output, and every input except kRelativeTables.
inline Problem MostTensors() {
  return {.batch = 1,
          .query_heads = 2,
          .kv_heads = 1,
          .query_length = 2,
          .key_length = 3,
          .past_length = 1,
          .head_size = 4,
          .value_head_size = 4,
          .mask = MaskShape{DType::kBool, {1, 1, 2, 4}},
          .bias = MaskShape{DType::kFloat32, {1, 2, 2, 4}},
          .has_key_lengths = true,
          .head_sink = DType::kFloat32,
          .relative_keys = RelativeVectors{.heads = 2, .length = 3},
          .relative_values = RelativeVectors{.length = 5},
          .has_relative_query = true,
          .block_mask = std::array<int64_t, 4>{1, 2, 1, 2},
          .block_q = 2,
          .block_k = 2,
          .selected = SelectedIndices{1, 2},
          .has_global_mask = true,
          .score_output = ScoreOutput::kBiased,
          .wants_lse = true,
          .wants_present = true};
}

// The same with one of kRelativeTables. RolesTest checks that they want every input.
inline Problem EveryTensorWith(Role table) {
  Problem problem = MostTensors();
  if (table == Role::kHeadAlpha) {
    UseNormalizer(Normalizer::kEntmax, problem);
    problem.head_alpha = DType::kFloat32;
  }
  if (table == Role::kAlibiSlopes) problem.alibi_slopes = AlibiSlopes{};
  if (table == Role::kBiasTable) problem.bias_table = BiasTable{.buckets = 4};
  if (table == Role::kRelativeBias) problem.relative_bias = RelativeBias{.heads = 2, .length = 5};
  if (table == Role::kCosCache) {
    problem.rotary_cache = RotaryCache{.rows = 9, .pairs = 2};
    problem.has_position_ids = problem.has_key_position_ids = true;
  }
  if (table == Role::kAdditiveWeight) {
    problem.score_function = ScoreFunction::kAdditive;
    problem.additive_weight = AdditiveWeight{.heads = 2};
    problem.relative_keys.reset();  // only of dot products
    problem.has_relative_query = false;
  }
  return problem;
}

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_TABLE_VALUES_H_
