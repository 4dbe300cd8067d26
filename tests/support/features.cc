#include "tests/support/features.h"

#include <algorithm>
#include <iterator>

#include "base/round_up.h"

namespace rapt::test {
namespace {

DType Fp32OrOwn(const Problem& p, Rng& rng) { return Pick(rng, {DType::kFloat32, p.dtype}); }

int64_t OneOr(int64_t full, Rng& rng) { return Pick(rng, {int64_t{1}, full}); }

// The shape of a mask or bias: it may broadcast on every axis, and have fewer keys.
MaskShape RandomShape(const Problem& p, Rng& rng, DType dtype) {
  const int64_t total = p.total_keys();
  return {dtype,
          {OneOr(p.batch, rng), OneOr(p.query_heads, rng), OneOr(p.query_length, rng),
           Pick(rng, {int64_t{1}, total, total, total, std::max<int64_t>(1, total - 2)})}};
}

DType FloatType(Rng& rng) {
  return Pick(rng, {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64});
}

RelativeVectors RandomVectors(const Problem& p, Rng& rng) {
  return {Fp32OrOwn(p, rng), OneOr(p.query_heads, rng), Pick<int64_t>(rng, {1, 5, 33, 201, 999})};
}

// A problem that is about to be rotated.
void PrepareRotation(Problem& p) {
  p.head_size += p.head_size % 2;
  if (p.values_in_keys) p.rotary_keys = false;
}

void RotateByAngles(Problem& p, Rng& rng) {
  PrepareRotation(p);
  p.rope_theta = Pick(rng, {3.5, 10000.0});
}

// For features of a rotation, which may not have a source of angles yet.
void EnsureRotation(Problem& p, Rng& rng) {
  if (!p.has_rotary()) RotateByAngles(p, rng);
}

void RotateByCache(Problem& p, Rng& rng) {
  PrepareRotation(p);
  // As many keys as queries, so that no query is before the first key or behind the last.
  p.key_length = std::max(p.key_length, p.query_length);
  p.rotary_cache =
      RotaryCache{.dtype = Fp32OrOwn(p, rng), .rows = p.total_keys() + 3, .pairs = p.head_size / 2};
}

void RotateByToken(Problem& p, Rng& rng) {
  PrepareRotation(p);
  p.key_length = p.query_length;
  p.rotary_cache = RotaryCache{.dtype = Fp32OrOwn(p, rng),
                               .batch = p.batch,
                               .rows = p.query_length,
                               .pairs = p.head_size / 2};
}

void RotatePart(Problem& p, Rng& rng) {
  EnsureRotation(p, rng);
  p.head_size = std::max<int64_t>(p.head_size, 4);
  p.rotary_embedding_dim = 2 * UniformInt(rng, 1, p.head_size / 2 - 1);
  if (p.rotary_cache) p.rotary_cache->pairs = p.rotary_embedding_dim / 2;
}

// For features that exempt keys from the window.
void EnsureWindow(Problem& p, Rng& rng) {
  if (!p.has_window()) p.left_window = UniformInt(rng, 0, 10);
}

void AddBlockMask(Problem& p, Rng& rng) {
  p.block_q = Pick<int64_t>(rng, {1, 5, 16, 64});
  p.block_k = Pick<int64_t>(rng, {1, 7, 16, 64, int64_t{1} << 62});
  p.block_mask = Dims{OneOr(p.batch, rng), OneOr(p.query_heads, rng),
                      CeilDiv(p.query_length, *p.block_q), CeilDiv(p.total_keys(), *p.block_k)};
}

void AddBiasTable(Problem& p, Rng& rng) {
  p.bias_table = BiasTable{Fp32OrOwn(p, rng), Pick<int64_t>(rng, {4, 8, 32})};
  p.is_bidirectional = OneIn(rng, 2);
  if (OneIn(rng, 2)) p.max_distance = 50;
}

template <DType kType>
bool IsOf(const Problem& p) {
  return p.dtype == kType;
}
template <DType kType>
void SetType(Problem& p, Rng&) {
  p.dtype = kType;
}

template <Normalizer kNormalizer>
bool IsNormalizedBy(const Problem& p) {
  return p.normalizer == kNormalizer;
}
template <Normalizer kNormalizer>
void NormalizeBy(Problem& p, Rng&) {
  p.normalizer = kNormalizer;
}

void EnsureEntmax(Problem& p) {
  if (p.normalizer == Normalizer::kSoftmax) p.normalizer = Normalizer::kEntmax;
}

template <ScoreOutput kOutput>
bool Returns(const Problem& p) {
  return p.score_output == kOutput;
}
template <ScoreOutput kOutput>
void Return(Problem& p, Rng&) {
  p.score_output = kOutput;
}

constexpr Feature kFeatures[] = {
    {"FP32", "type", IsOf<DType::kFloat32>, SetType<DType::kFloat32>},
    {"FP16", "type", IsOf<DType::kFloat16>, SetType<DType::kFloat16>},
    {"BF16", "type", IsOf<DType::kBFloat16>, SetType<DType::kBFloat16>},
    {"FP64", "type", IsOf<DType::kFloat64>, SetType<DType::kFloat64>},
    {"one query", "", [](const Problem& p) { return p.query_length == 1; },
     [](Problem& p, Rng&) { p.query_length = 1; }},
    {"grouped heads", "", [](const Problem& p) { return p.query_heads > p.kv_heads; },
     [](Problem& p, Rng& rng) {
       p.query_heads = p.kv_heads * Pick<int64_t>(rng, {2, 3, 4});
     }},
    {"past", "", [](const Problem& p) { return p.past_length > 0; },
     [](Problem& p, Rng& rng) {
       p.past_length = Pick<int64_t>(rng, {1, 3, 64, 65, 100});
     }},
    {"values in keys", "", [](const Problem& p) { return p.values_in_keys; },
     [](Problem& p, Rng&) {
       p.values_in_keys = true;
       p.value_head_size = std::min(p.value_head_size, p.head_size);
     }},

    {"rope_theta", "", [](const Problem& p) { return p.rope_theta.has_value(); }, RotateByAngles},
    {"cache by position", "cos_cache",
     [](const Problem& p) { return p.rotary_cache && p.rotary_cache->by_position(); },
     RotateByCache},
    {"cache by token", "cos_cache",
     [](const Problem& p) { return p.rotary_cache && !p.rotary_cache->by_position(); },
     RotateByToken},
    {"rotary_keys true", "rotary_keys",
     [](const Problem& p) { return p.has_rotary() && p.rotary_keys == true; },
     [](Problem& p, Rng& rng) {
       EnsureRotation(p, rng);
       p.rotary_keys = true;
     }},
    {"rotary_keys false", "rotary_keys",
     [](const Problem& p) { return p.has_rotary() && p.rotary_keys == false; },
     [](Problem& p, Rng& rng) {
       EnsureRotation(p, rng);
       p.rotary_keys = false;
     }},
    {"rotary_embedding_dim", "",
     [](const Problem& p) { return p.has_rotary() && p.rotary_embedding_dim > 0; }, RotatePart},
    {"interleaved", "", [](const Problem& p) { return p.has_rotary() && p.interleaved; },
     [](Problem& p, Rng& rng) {
       EnsureRotation(p, rng);
       p.interleaved = true;
     }},
    {"position_ids", "", [](const Problem& p) { return p.has_position_ids; },
     [](Problem& p, Rng& rng) {
       EnsureRotation(p, rng);
       p.has_position_ids = true;
     }},
    {"key_position_ids", "", [](const Problem& p) { return p.has_key_position_ids; },
     [](Problem& p, Rng& rng) {
       EnsureRotation(p, rng);
       p.has_key_position_ids = true;
     }},

    {"additive scores", "", [](const Problem& p) { return p.is_additive(); },
     [](Problem& p, Rng& rng) {
       p.score_function = ScoreFunction::kAdditive;
       p.additive_weight = AdditiveWeight{Fp32OrOwn(p, rng), OneOr(p.query_heads, rng)};
     }},
    {"relative_keys", "", [](const Problem& p) { return p.relative_keys.has_value(); },
     [](Problem& p, Rng& rng) { p.relative_keys = RandomVectors(p, rng); }},
    {"relative_query", "", [](const Problem& p) { return p.has_relative_query; },
     [](Problem& p, Rng& rng) {
       if (!p.relative_keys) p.relative_keys = RandomVectors(p, rng);
       p.has_relative_query = true;
     }},
    {"relative_values", "", [](const Problem& p) { return p.relative_values.has_value(); },
     [](Problem& p, Rng& rng) { p.relative_values = RandomVectors(p, rng); }},
    {"scale", "", [](const Problem& p) { return p.scale.has_value(); },
     [](Problem& p, Rng& rng) { p.scale = Uniform(rng, -0.5, 0.5); }},
    {"softcap", "", [](const Problem& p) { return p.softcap > 0; },
     [](Problem& p, Rng& rng) { p.softcap = Uniform(rng, 0.5, 20); }},

    {"causal", "", [](const Problem& p) { return p.causal; },
     [](Problem& p, Rng&) { p.causal = true; }},
    {"bottom right", "alignment",
     [](const Problem& p) { return p.alignment == Alignment::kBottomRight; },
     [](Problem& p, Rng&) { p.alignment = Alignment::kBottomRight; }},
    {"alignment of ONNX", "alignment",
     [](const Problem& p) { return p.alignment == Alignment::kOnnx; },
     [](Problem& p, Rng&) { p.alignment = Alignment::kOnnx; }},
    {"left window", "", [](const Problem& p) { return p.left_window >= 0; },
     [](Problem& p, Rng& rng) { p.left_window = UniformInt(rng, 0, 40); }},
    {"right window", "", [](const Problem& p) { return p.right_window >= 0; },
     [](Problem& p, Rng& rng) { p.right_window = UniformInt(rng, 0, 40); }},
    {"prefix_keys", "", [](const Problem& p) { return p.has_window() && p.prefix_keys > 0; },
     [](Problem& p, Rng& rng) {
       EnsureWindow(p, rng);
       p.prefix_keys = Pick<int64_t>(rng, {1, 4, 30, 1000});
     }},
    {"global_mask", "", [](const Problem& p) { return p.has_window() && p.has_global_mask; },
     [](Problem& p, Rng& rng) {
       EnsureWindow(p, rng);
       p.has_global_mask = true;
     }},
    {"block_mask", "", [](const Problem& p) { return p.block_mask.has_value(); }, AddBlockMask},
    {"selected_indices", "", [](const Problem& p) { return p.selected.has_value(); },
     [](Problem& p, Rng& rng) {
       p.selected = SelectedIndices{OneOr(p.kv_heads, rng),
                                    Pick(rng, {int64_t{20}, int64_t{90}, p.total_keys() + 3})};
     }},
    {"key lengths", "", [](const Problem& p) { return p.has_key_lengths; },
     [](Problem& p, Rng&) { p.has_key_lengths = true; }},
    {"mask of BOOL", "mask",
     [](const Problem& p) { return p.mask && p.mask->dtype == DType::kBool; },
     [](Problem& p, Rng& rng) { p.mask = RandomShape(p, rng, DType::kBool); }},
    {"mask of floats", "mask",
     [](const Problem& p) { return p.mask && p.mask->dtype != DType::kBool; },
     [](Problem& p, Rng& rng) { p.mask = RandomShape(p, rng, FloatType(rng)); }},
    {"bias", "", [](const Problem& p) { return p.bias.has_value(); },
     [](Problem& p, Rng& rng) { p.bias = RandomShape(p, rng, FloatType(rng)); }},
    {"alibi", "", [](const Problem& p) { return p.alibi; },
     [](Problem& p, Rng&) { p.alibi = true; }},
    {"alibi_slopes", "", [](const Problem& p) { return p.alibi_slopes.has_value(); },
     [](Problem& p, Rng& rng) {
       p.alibi_slopes = AlibiSlopes{Fp32OrOwn(p, rng), OneOr(p.batch, rng)};
     }},
    {"bias_table", "", [](const Problem& p) { return p.bias_table.has_value(); }, AddBiasTable},
    {"relative_bias", "", [](const Problem& p) { return p.relative_bias.has_value(); },
     [](Problem& p, Rng& rng) {
       const RelativeVectors shape = RandomVectors(p, rng);
       p.relative_bias = RelativeBias{shape.dtype, shape.heads, shape.length};
     }},

    {"sparsemax", "normalizer", IsNormalizedBy<Normalizer::kSparsemax>,
     NormalizeBy<Normalizer::kSparsemax>},
    {"entmax15", "normalizer", IsNormalizedBy<Normalizer::kEntmax15>,
     NormalizeBy<Normalizer::kEntmax15>},
    {"alpha", "", [](const Problem& p) { return p.alpha.has_value(); },
     [](Problem& p, Rng& rng) {
       EnsureEntmax(p);
       p.alpha = Uniform(rng, 1, 2);
     }},
    {"alpha of each head", "", [](const Problem& p) { return p.head_alpha.has_value(); },
     [](Problem& p, Rng& rng) {
       EnsureEntmax(p);
       p.head_alpha = Fp32OrOwn(p, rng);
     }},
    {"head_sink", "", [](const Problem& p) { return p.head_sink.has_value(); },
     [](Problem& p, Rng& rng) { p.head_sink = Fp32OrOwn(p, rng); }},
    {"softmax in FP64", "", [](const Problem& p) { return p.softmax_in_fp64; },
     [](Problem& p, Rng&) { p.softmax_in_fp64 = true; }},
    {"dropout", "", [](const Problem& p) { return p.dropout.has_value(); },
     [](Problem& p, Rng& rng) {
       p.dropout = Dropout{Uniform(rng, 0, 0.9), rng()};
     }},

    {"scores", "qk_matmul_output", Returns<ScoreOutput::kScores>, Return<ScoreOutput::kScores>},
    {"softcapped scores", "qk_matmul_output", Returns<ScoreOutput::kSoftcapped>,
     Return<ScoreOutput::kSoftcapped>},
    {"biased scores", "qk_matmul_output", Returns<ScoreOutput::kBiased>,
     Return<ScoreOutput::kBiased>},
    {"weights", "qk_matmul_output", Returns<ScoreOutput::kWeights>, Return<ScoreOutput::kWeights>},
    {"lse", "", [](const Problem& p) { return p.wants_lse; },
     [](Problem& p, Rng&) { p.wants_lse = true; }},
    {"present", "", [](const Problem& p) { return p.wants_present; },
     [](Problem& p, Rng&) { p.wants_present = true; }},
};

constexpr Refusal kRefusals[] = {
    {"alibi", "alibi_slopes", "at most one bias by distance"},
    {"alibi", "bias_table", "at most one bias by distance"},
    {"alibi", "relative_bias", "at most one bias by distance"},
    {"alibi_slopes", "bias_table", "at most one bias by distance"},
    {"alibi_slopes", "relative_bias", "at most one bias by distance"},
    {"bias_table", "relative_bias", "at most one bias by distance"},
    {"additive scores", "relative_keys", "need scores that are dot products"},
    {"additive scores", "relative_query", "need scores that are dot products"},
    {"rope_theta", "cache by position", "cos_cache and rope_theta are both set"},
    {"rope_theta", "cache by token", "cos_cache and rope_theta are both set"},
    {"cache by token", "position_ids", "ids are for a cache by position"},
    {"cache by token", "key_position_ids", "ids are for a cache by position"},
    {"rotary_keys false", "key_position_ids", "rotary_keys is false"},
    {"values in keys", "key_position_ids", "rotary_keys is false"},
    {"values in keys", "rotary_keys true", "rotary_keys must be false"},
    {"sparsemax", "alpha", "it must be entmax"},
    {"sparsemax", "alpha of each head", "it must be entmax"},
    {"entmax15", "alpha", "it must be entmax"},
    {"entmax15", "alpha of each head", "it must be entmax"},
    {"alpha", "alpha of each head", "alpha is given twice"},
    {"sparsemax", "head_sink", "which has no head_sink"},
    {"entmax15", "head_sink", "which has no head_sink"},
    {"alpha", "head_sink", "which has no head_sink"},
    {"alpha of each head", "head_sink", "which has no head_sink"},
    {"sparsemax", "lse", "which has no lse"},
    {"entmax15", "lse", "which has no lse"},
    {"alpha", "lse", "which has no lse"},
    {"alpha of each head", "lse", "which has no lse"},
};

bool IsAllowed(const Feature& a, const Feature& b) {
  const FeaturePair pair = {std::min(&a, &b), std::max(&a, &b)};
  return std::binary_search(AllowedPairs().begin(), AllowedPairs().end(), pair);
}

bool IsAllowedIn(const Problem& problem, const Feature& feature) {
  return std::all_of(std::begin(kFeatures), std::end(kFeatures), [&](const Feature& other) {
    return !other.has(problem) || IsAllowed(feature, other);
  });
}

// Of Q and K.
double RandomMagnitude(const Problem& problem, Rng& rng) {
  // Angles are rounded, and so are rotated Q and K, perhaps to the other neighbour. This changes
  // scores in proportion to both.
  if (problem.has_rotary() && SizeOf(problem.dtype) == 2) return 0.5;
  // Tolerances are those of values from -1 to 1.
  if (problem.values_in_keys) return Pick(rng, {0.5, 1.0});
  return problem.has_rotary() ? 2 : Pick(rng, {0.5, 2.0, 6.0});
}

}  // namespace

absl::Span<const Feature> Features() { return kFeatures; }
absl::Span<const Refusal> Refusals() { return kRefusals; }

std::vector<FeaturePair> AllPairs() {
  std::vector<FeaturePair> pairs;
  for (const Feature& first : kFeatures) {
    for (const Feature* second = &first + 1; second != std::end(kFeatures); ++second) {
      if (first.field.empty() || first.field != second->field) pairs.push_back({&first, second});
    }
  }
  return pairs;
}

const Refusal* RefusalOf(const FeaturePair& pair) {
  const auto* const found =
      std::find_if(std::begin(kRefusals), std::end(kRefusals), [&](const Refusal& refusal) {
        return refusal.first == pair.first->name && refusal.second == pair.second->name;
      });
  return found == std::end(kRefusals) ? nullptr : found;
}

const std::vector<FeaturePair>& AllowedPairs() {
  static const std::vector<FeaturePair> pairs = [] {
    std::vector<FeaturePair> allowed = AllPairs();
    std::erase_if(allowed, RefusalOf);
    return allowed;
  }();
  return pairs;
}

bool Has(const Problem& problem, const FeaturePair& pair) {
  return pair.first->has(problem) && pair.second->has(problem);
}

Problem RandomShapes(Rng& rng) {
  Problem p;
  p.dtype = FloatType(rng);
  p.batch = UniformInt(rng, 1, 2);
  p.kv_heads = UniformInt(rng, 1, 3);
  p.query_heads = p.kv_heads * Pick<int64_t>(rng, {1, 1, 2, 3, 4});
  p.query_length = Pick<int64_t>(rng, {1, 1, 2, 3, 17, 33, 63, 65});
  p.key_length = Pick<int64_t>(rng, {1, 3, 17, 63, 64, 65, 127, 129, 200});
  p.head_size = Pick<int64_t>(rng, {1, 3, 8, 16, 17, 32, 33, 64, 65, 80});
  p.value_head_size = OneIn(rng, 2) ? p.head_size : Pick<int64_t>(rng, {1, 3, 15, 16, 31, 64, 72});
  return p;
}

Problem ProblemWith(const FeaturePair& pair, Rng& rng) {
  Problem problem = RandomShapes(rng);
  for (const Feature& feature : kFeatures) {
    if (feature.has(problem)) continue;
    const bool is_wanted = &feature == pair.first || &feature == pair.second;
    const bool is_drawn = OneIn(rng, 7) && IsAllowed(feature, *pair.first) &&
                          IsAllowed(feature, *pair.second) && IsAllowedIn(problem, feature);
    if (is_wanted || is_drawn) feature.add(problem, rng);
  }
  return problem;
}

std::string FeaturesOf(const Problem& problem) {
  std::string names;
  for (const Feature& feature : kFeatures) {
    if (feature.has(problem)) names.append(names.empty() ? "" : ", ").append(feature.name);
  }
  return names;
}

Arrangement RandomArrangement(Rng& rng) {
  using enum Storage;
  return {.query = Pick(
              rng, {kRowMajor, kBshd, kPositionFirst, kPaddedRows, kMisaligned, kBroadcastHeads}),
          .key_value = Pick(
              rng, {kRowMajor, kBshd, kPositionFirst, kPaddedRows, kMisaligned, kBroadcastBatch}),
          .past = Pick(rng, {kRowMajor, kBshd, kPositionFirst, kPaddedRows, kMisaligned}),
          .mask = Pick(rng, {kRowMajor, kTransposed, kElementsApart, kMisaligned, kPositionFirst}),
          .output = Pick(rng, {kRowMajor, kBshd, kPositionFirst, kPaddedRows, kMisaligned})};
}

Inputs InputsFor(const Problem& problem, const Arrangement& arrangement, Rng& rng) {
  Inputs inputs = RandomInputs(problem, rng, arrangement, RandomMagnitude(problem, rng));
  if (problem.alignment == Alignment::kOnnx && problem.rotary_cache &&
      problem.rotary_cache->by_position() && !problem.has_position_ids) {
    // No query is before the first row of the cache.
    for (int64_t& length : inputs.key_lengths) length = std::max(length, problem.query_length);
  }
  return inputs;
}

}  // namespace rapt::test
