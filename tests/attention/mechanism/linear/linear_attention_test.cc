#include "attention/mechanism/linear/linear_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/aligned_buffer.h"
#include "tests/support/run_attention.h"
#include "tests/support/run_operator.h"
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// The tensors of a call, as the operator has them, in [1, B, T, H * d] or [1, B, Hkv, ...].
struct Case {
  LinearAttentionCall call;
  InputMap<std::optional<Tensor>> inputs;
  std::vector<int64_t> lengths;
  int64_t batch = 2, tokens = 70, query_heads = 4, kv_heads = 2, key_size = 8, value_size = 12;
  int64_t features = 8;

  int64_t TokensOf(int64_t b) const { return lengths.empty() ? tokens : lengths[b]; }
  int64_t Group() const { return query_heads / kv_heads; }
  bool normalizes() const { return call.normalize || call.feature_map == FeatureMap::kFavor; }
};

struct Answers {
  OutputMap<std::optional<Tensor>> tensors;
  const Tensor& operator[](Slot slot) const { return *tensors[slot]; }
};

Dims DimsOf(const Shape& shape) {
  Dims dims = {1, 1, 1, 1};
  std::copy(shape.begin(), shape.end(), dims.end() - static_cast<int64_t>(shape.size()));
  return dims;
}

void Add(Case& c, Slot slot, DType dtype, const Shape& shape, Rng& rng, double low, double high) {
  c.call.inputs[slot] = TensorSpec{dtype, shape};
  c.inputs[slot] = Tensor(dtype, DimsOf(shape));
  c.inputs[slot]->FillUniform(rng, low, high);
}

// What a random case may have.
struct Options {
  UpdateRule rule = UpdateRule::kLinear;
  DType dtype = DType::kFloat32;
  FeatureMap map = FeatureMap::kNone;
  bool normalize = false;
  bool decay_per_key = false;
  double least_decay = -0.5, most_decay = 0;
  double most_beta = 1;
  bool past = false;
  bool one_beta = false;
  bool is_causal = true;
  int64_t chunk = 64;
};

bool HasDecay(UpdateRule rule) {
  return rule == UpdateRule::kGated || rule == UpdateRule::kGatedDelta;
}
bool HasBeta(UpdateRule rule) {
  return rule == UpdateRule::kDelta || rule == UpdateRule::kGatedDelta;
}

// Fills a case whose sizes are set. Keys have norms of at most 1.
void Fill(Case& c, const Options& o, Rng& rng) {
  LinearAttentionCall& call = c.call;
  call.q_num_heads = c.query_heads;
  call.kv_num_heads = c.kv_heads;
  call.update_rule = o.rule;
  call.feature_map = o.map;
  call.normalize = o.normalize;
  call.is_causal = o.is_causal;
  call.chunk_size = o.chunk;
  call.wants_present_state = true;
  call.wants_present_normalizer = c.normalizes();
  c.features = o.map == FeatureMap::kFavor ? c.features : c.key_size;
  const double key = 1 / std::sqrt(static_cast<double>(c.key_size));
  Add(c, Role::kQ, o.dtype, {c.batch, c.tokens, c.query_heads * c.key_size}, rng, -1, 1);
  Add(c, Role::kK, o.dtype, {c.batch, c.tokens, c.kv_heads * c.key_size}, rng, -key, key);
  Add(c, Role::kV, o.dtype, {c.batch, c.tokens, c.kv_heads * c.value_size}, rng, -1, 1);
  if (HasDecay(o.rule)) {
    const int64_t size = o.decay_per_key ? c.key_size : 1;
    Add(c, linear::kDecay, o.dtype, {c.batch, c.tokens, c.kv_heads * size}, rng, o.least_decay,
        o.most_decay);
  }
  if (HasBeta(o.rule)) {
    Add(c, linear::kBeta, o.dtype, {c.batch, c.tokens, o.one_beta ? 1 : c.kv_heads}, rng, 0,
        o.most_beta);
  }
  if (o.map == FeatureMap::kFavor) {
    Add(c, linear::kProjection, DType::kFloat32, {c.features, c.key_size}, rng, -2, 2);
  }
  if (!o.past) return;
  Add(c, linear::kPastState, DType::kFloat32, {c.batch, c.kv_heads, c.features, c.value_size}, rng,
      0, 1);
  if (!c.normalizes()) return;
  Add(c, linear::kPastNormalizer, DType::kFloat32, {c.batch, c.kv_heads, c.features}, rng, 1, 2);
}

Arguments ArgumentsOf(const Case& c) {
  Arguments arguments;
  for (Slot slot : kInputs) {
    if (c.inputs[slot]) arguments.inputs[slot] = c.inputs[slot]->View();
  }
  arguments.key_lengths = c.lengths;
  return arguments;
}

LinearAttentionCall CallOf(const Case& c) {
  LinearAttentionCall call = c.call;
  if (!c.lengths.empty()) call.inputs[Role::kKeyLengths] = TensorSpec{DType::kInt64, {c.batch}};
  return call;
}

Answers Compute(const Case& c, const PlanOptions& options) {
  const auto op = MakeLinearAttention(CallOf(c));
  EXPECT_TRUE(op.ok()) << op.status();
  Arguments arguments = ArgumentsOf(c);
  EXPECT_TRUE((*op)->CheckData(arguments).ok());
  Answers answers;
  for (Slot slot : kOutputs) {
    const std::optional<TensorSpec>& spec = (*op)->outputs()[slot];
    if (!spec) continue;
    answers.tensors[slot] = Tensor(spec->dtype, DimsOf(spec->shape), Storage::kRowMajor, 64);
    answers.tensors[slot]->Fill(kNan);
    arguments.outputs[slot] = answers.tensors[slot]->MutableView();
  }
  RunOperator(**op, arguments, options);
  for (Slot slot : kOutputs) {
    EXPECT_TRUE(!answers.tensors[slot] || answers[slot].GapsIntact());
  }
  return answers;
}

// The recurrence, by the letter, without stabilizers.
class Oracle {
 public:
  explicit Oracle(const Case& c) : c_(c) {
    output.resize(c.batch * c.tokens * c.query_heads * c.value_size);
    state.resize(c.batch * c.kv_heads * c.features * c.value_size);
    normalizer.resize(c.batch * c.kv_heads * c.features);
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t h = 0; h < c.kv_heads; ++h) RunHead(b, h);
    }
  }

  std::vector<double> output, state, normalizer;

 private:
  double In(Slot slot, int64_t a, int64_t b, int64_t n) const {
    return c_.inputs[slot]->At(0, a, b, n);
  }
  double ScaleOf() const {
    return c_.call.scale > 0 ? c_.call.scale : 1 / std::sqrt(static_cast<double>(c_.key_size));
  }

  std::vector<double> FeaturesOf(Slot slot, int64_t b, int64_t t, int64_t first) const {
    std::vector<double> x(c_.key_size);
    for (int64_t d = 0; d < c_.key_size; ++d) x[d] = In(slot, b, t, first + d);
    switch (c_.call.feature_map) {
      case FeatureMap::kNone:
        return x;
      case FeatureMap::kElu1:
        for (double& v : x) v = v > 0 ? v + 1 : std::exp(v);
        return x;
      case FeatureMap::kRelu:
        for (double& v : x) v = std::max(v, 0.0);
        return x;
      case FeatureMap::kFavor:
        break;
    }
    double squares = 0;
    for (double& v : x) {
      v *= std::sqrt(ScaleOf());
      squares += v * v;
    }
    std::vector<double> features(c_.features);
    for (int64_t f = 0; f < c_.features; ++f) {
      double sum = -squares / 2;
      for (int64_t d = 0; d < c_.key_size; ++d) sum += In(linear::kProjection, 0, f, d) * x[d];
      features[f] = std::exp(sum) / std::sqrt(static_cast<double>(c_.features));
    }
    return features;
  }

  void RunHead(int64_t b, int64_t h) {
    double* const s = &state[(b * c_.kv_heads + h) * c_.features * c_.value_size];
    double* const z = &normalizer[(b * c_.kv_heads + h) * c_.features];
    for (int64_t n = 0; c_.inputs[linear::kPastState] && n < c_.features * c_.value_size; ++n) {
      s[n] = c_.inputs[linear::kPastState]->At(b, h, n / c_.value_size, n % c_.value_size);
    }
    for (int64_t f = 0; c_.inputs[linear::kPastNormalizer] && f < c_.features; ++f) {
      z[f] = In(linear::kPastNormalizer, b, h, f);
    }
    for (int64_t t = 0; t < c_.TokensOf(b); ++t) {
      Write(b, h, t, s, z);
      if (c_.call.is_causal) Read(b, h, t, s, z);
    }
    for (int64_t t = 0; t < c_.TokensOf(b) && !c_.call.is_causal; ++t) Read(b, h, t, s, z);
  }

  void Write(int64_t b, int64_t h, int64_t t, double* s, double* z) {
    const std::vector<double> k = FeaturesOf(Role::kK, b, t, h * c_.key_size);
    if (c_.inputs[linear::kDecay]) {
      const bool per_key = c_.call.inputs[linear::kDecay]->shape[2] != c_.kv_heads;
      for (int64_t n = 0; n < c_.features * c_.value_size; ++n) {
        const int64_t at = per_key ? h * c_.key_size + n / c_.value_size : h;
        const double g = In(linear::kDecay, b, t, at);
        s[n] = g == -kInf ? 0 : s[n] * std::exp(g);
      }
    }
    for (int64_t v = 0; v < c_.value_size; ++v) {
      double u = In(Role::kV, b, t, h * c_.value_size + v);
      if (c_.inputs[linear::kBeta]) {
        const bool one = c_.call.inputs[linear::kBeta]->shape[2] == 1;
        for (int64_t f = 0; f < c_.features; ++f) u -= s[f * c_.value_size + v] * k[f];
        u *= In(linear::kBeta, b, t, one ? 0 : h);
      }
      for (int64_t f = 0; f < c_.features; ++f) s[f * c_.value_size + v] += k[f] * u;
    }
    for (int64_t f = 0; f < c_.features; ++f) z[f] += k[f];
  }

  void Read(int64_t b, int64_t kv_head, int64_t t, const double* s, const double* z) {
    for (int64_t h = kv_head * c_.Group(); h < (kv_head + 1) * c_.Group(); ++h) {
      const std::vector<double> q = FeaturesOf(Role::kQ, b, t, h * c_.key_size);
      double divisor = 0;
      for (int64_t f = 0; f < c_.features; ++f) divisor += q[f] * z[f];
      for (int64_t v = 0; v < c_.value_size; ++v) {
        double sum = 0;
        for (int64_t f = 0; f < c_.features; ++f) sum += q[f] * s[f * c_.value_size + v];
        double& o = output[((b * c_.tokens + t) * c_.query_heads + h) * c_.value_size + v];
        o = !c_.normalizes() ? ScaleOf() * sum : divisor == 0 ? 0 : sum / divisor;
      }
    }
  }

  const Case& c_;
};

double ToleranceOfTensor(DType dtype) {
  return dtype == DType::kFloat64   ? 1e-12
         : dtype == DType::kFloat32 ? 1e-5
         : dtype == DType::kFloat16 ? 4e-3
                                    : 3e-2;
}

// max |got - want| <= tolerance * max |want|; NaN and infinities in the same places.
::testing::AssertionResult IsClose(const char* name, const Tensor& got,
                                   const std::vector<double>& want, double tolerance) {
  const std::vector<double> numbers = got.ToVector();
  EXPECT_EQ(numbers.size(), want.size());
  double most = 0;
  for (const double w : want) most = std::isfinite(w) ? std::max(most, std::abs(w)) : most;
  for (size_t n = 0; n < want.size(); ++n) {
    const bool same = numbers[n] == want[n] || (std::isnan(numbers[n]) && std::isnan(want[n])) ||
                      std::abs(numbers[n] - want[n]) <= tolerance * most;
    if (same) continue;
    return ::testing::AssertionFailure() << name << "[" << n << "] is " << numbers[n] << ", wanted "
                                         << want[n] << " of at most " << most;
  }
  return ::testing::AssertionSuccess();
}

void ExpectOracle(const Case& c, const Target& target, int threads = 1) {
  SCOPED_TRACE(target.Name());
  const Oracle oracle(c);
  const Answers answers = Compute(c, target.Options(threads));
  const double tolerance = ToleranceOfTensor(answers[Role::kY].dtype());
  EXPECT_TRUE(IsClose("output", answers[Role::kY], oracle.output, tolerance));
  const Tensor& state = answers[linear::kPresentState];
  const double of_state = std::max(tolerance, ToleranceOfTensor(state.dtype()));
  EXPECT_TRUE(IsClose("present_state", state, oracle.state, of_state));
  if (!c.call.wants_present_normalizer) return;
  EXPECT_TRUE(IsClose("present_normalizer", answers[linear::kPresentNormalizer], oracle.normalizer,
                      of_state));
}

Options RandomOptions(Rng& rng) {
  const auto flip = [&] { return UniformInt(rng, 0, 1) == 1; };
  Options o;
  o.rule = static_cast<UpdateRule>(UniformInt(rng, 0, 3));
  constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                              DType::kFloat64};
  o.dtype = kTypes[UniformInt(rng, 0, 4)];
  o.map = static_cast<FeatureMap>(UniformInt(rng, 0, o.rule == UpdateRule::kLinear ? 3 : 0));
  // Only positive features have sums that are far from 0.
  o.normalize = o.map == FeatureMap::kElu1;
  o.decay_per_key = flip();
  o.least_decay = -std::exp(Uniform(rng, -5, 3));
  o.most_decay = flip() ? 0.05 : 0;  // the state may grow e^7.5 times in 150 tokens
  o.most_beta = flip() ? 2 : 1;
  o.past = flip();
  o.one_beta = flip();
  o.is_causal = o.rule != UpdateRule::kLinear || flip();
  o.chunk = UniformInt(rng, 1, 80);
  return o;
}

Case RandomCase(Rng& rng) {
  Case c;
  c.batch = UniformInt(rng, 1, 2);
  c.tokens = UniformInt(rng, 0, 150);
  c.kv_heads = UniformInt(rng, 1, 3);
  c.query_heads = c.kv_heads * UniformInt(rng, 1, 3);
  c.key_size = UniformInt(rng, 2, 40);
  c.value_size = UniformInt(rng, 1, 70);
  c.features = UniformInt(rng, 1, 50);
  const Options options = RandomOptions(rng);
  Fill(c, options, rng);
  for (int64_t b = 0; UniformInt(rng, 0, 2) == 0 && b < c.batch; ++b) {
    c.lengths.resize(c.batch);
    c.lengths[b] = UniformInt(rng, 0, c.tokens);
  }
  return c;
}

TEST(LinearAttentionTest, IsTheRecurrence) {
  Rng rng(1);
  for (int n = 0; n < 300; ++n) {
    const Case c = RandomCase(rng);
    SCOPED_TRACE(absl::StrCat("case ", n, " rule ", static_cast<int>(c.call.update_rule), " map ",
                              static_cast<int>(c.call.feature_map), " T ", c.tokens, " chunk ",
                              c.call.chunk_size));
    for (const Target& target : Targets()) ExpectOracle(c, target, 1 + n % 3);
    if (HasFailure()) return;
  }
}

Case CaseWith(const Options& options, uint64_t seed = 2) {
  Case c;
  Rng rng(seed);
  Fill(c, options, rng);
  return c;
}

constexpr UpdateRule kRules[] = {UpdateRule::kLinear, UpdateRule::kGated, UpdateRule::kDelta,
                                 UpdateRule::kGatedDelta};

// Tokens [begin, begin + count) of a case, after a past.
Case Part(const Case& whole, int64_t begin, int64_t count, const Answers* before) {
  Case part = whole;
  part.tokens = count;
  for (Slot slot :
       {Slot(Role::kQ), Slot(Role::kK), Slot(Role::kV), linear::kDecay, linear::kBeta}) {
    if (!whole.inputs[slot]) continue;
    part.inputs[slot] = SliceAxis(*whole.inputs[slot], 2, begin, count);
    part.call.inputs[slot]->shape[1] = count;
  }
  if (before == nullptr) return part;
  for (const auto& [past, present] :
       {std::pair(linear::kPastState, linear::kPresentState),
        std::pair(linear::kPastNormalizer, linear::kPresentNormalizer)}) {
    if (!before->tensors[present]) continue;
    const Tensor& state = (*before)[present];
    part.inputs[past] = state;
    const Dims& d = state.dims();
    part.call.inputs[past] =
        TensorSpec{state.dtype(), past == linear::kPastState ? Shape{d[0], d[1], d[2], d[3]}
                                                             : Shape{d[1], d[2], d[3]}};
  }
  return part;
}

TEST(LinearAttentionTest, StepsEqualThePrefill) {
  std::vector<Options> all;
  for (UpdateRule rule : kRules) {
    for (bool per_key : {false, true}) all.push_back({.rule = rule, .decay_per_key = per_key});
  }
  all.push_back({.map = FeatureMap::kElu1, .normalize = true});
  all.push_back({.map = FeatureMap::kFavor});
  for (const Options& options : all) {
    const Case whole = CaseWith(options);
    const Oracle oracle(whole);
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name());
      std::optional<Answers> last;
      std::vector<double> output(oracle.output.size());
      const int64_t width = whole.query_heads * whole.value_size;
      for (int64_t t = 0, count = 1; t < whole.tokens; t += count) {
        count = t == 5 ? 30 : 1;  // a message of several tokens among single ones
        last = Compute(Part(whole, t, count, last ? &*last : nullptr), target.Options());
        for (int64_t b = 0; b < whole.batch; ++b) {
          for (int64_t n = 0; n < count * width; ++n) {
            output[(b * whole.tokens + t) * width + n] =
                (*last)[Role::kY].At(0, b, n / width, n % width);
          }
        }
      }
      Tensor joined(DType::kFloat64, {1, whole.batch, whole.tokens, width});
      for (size_t n = 0; n < output.size(); ++n) {
        const auto at = static_cast<int64_t>(n);
        joined.Set(0, at / width / whole.tokens, at / width % whole.tokens, at % width, output[n]);
      }
      EXPECT_TRUE(IsClose("output", joined, oracle.output, 1e-5));
      EXPECT_TRUE(IsClose("present_state", (*last)[linear::kPresentState], oracle.state, 1e-5));
    }
  }
}

TEST(LinearAttentionTest, DecaysOfAnySizeAreExact) {
  for (bool per_key : {false, true}) {
    for (const double g : {-kInf, -1e30, -700.0, -90.0, -30.0, -1.0, 0.0}) {
      Case c = CaseWith({.rule = UpdateRule::kGatedDelta, .decay_per_key = per_key});
      Tensor& decay = *c.inputs[linear::kDecay];
      for (int64_t t = 0; t < c.tokens; t += 1 + t % 5) {
        for (int64_t h = 0; h < decay.dims()[3]; h += 3) decay.Set(0, 0, t, h, g);
      }
      for (const Target& target : Targets()) ExpectOracle(c, target);
    }
  }
}

TEST(LinearAttentionTest, PositiveDecaysGrow) {
  for (bool per_key : {false, true}) {
    Case c = CaseWith({.rule = UpdateRule::kGated, .decay_per_key = per_key});
    c.inputs[linear::kDecay]->Set(0, 0, 3, 0, 2.5);
    c.inputs[linear::kDecay]->Set(0, 1, 40, 0, 0.25);
    for (const Target& target : Targets()) ExpectOracle(c, target);
  }
}

// Whatever the state was, it is forgotten.
TEST(LinearAttentionTest, ADecayOfMinusInfinityForgetsNaN) {
  for (bool per_key : {false, true}) {
    Case c = CaseWith({.rule = UpdateRule::kGatedDelta, .decay_per_key = per_key, .past = true});
    c.inputs[linear::kPastState]->Fill(kNan);
    Tensor& decay = *c.inputs[linear::kDecay];
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t h = 0; h < decay.dims()[3]; ++h) decay.Set(0, b, 10, h, -kInf);
    }
    for (const Target& target : Targets()) ExpectOracle(c, target);
  }
}

TEST(LinearAttentionTest, ADecodeStepForgetsNaN) {
  for (bool per_key : {false, true}) {
    Case c;
    c.tokens = 1;
    Rng rng(4);
    Fill(c, {.rule = UpdateRule::kGatedDelta, .decay_per_key = per_key, .past = true}, rng);
    c.inputs[linear::kPastState]->Fill(kNan);
    c.inputs[linear::kDecay]->Fill(-kInf);
    for (const Target& target : Targets()) ExpectOracle(c, target);
  }
}

// A token must not change the outputs of those before it, not even by 0 * NaN.
TEST(LinearAttentionTest, LaterTokensDoNotMatter) {
  std::vector<Options> all;
  for (UpdateRule rule : kRules) {
    for (bool per_key : {false, true}) all.push_back({.rule = rule, .decay_per_key = per_key});
  }
  all.push_back({.map = FeatureMap::kElu1, .normalize = true});
  all.push_back({.map = FeatureMap::kFavor});
  for (const Options& options : all) {
    for (const Slot slot : {Slot(Role::kK), Slot(Role::kV), linear::kDecay, linear::kBeta}) {
      for (const double hostile : {kNan, kInf, -kInf, 3e38}) {
        Case c = CaseWith(options);
        if (!c.inputs[slot]) continue;
        c.inputs[slot]->Set(0, 0, 20, 0, hostile);
        const Oracle oracle(c);
        for (const Target& target : Targets()) {
          SCOPED_TRACE(target.Name());
          const Answers answers = Compute(c, target.Options());
          for (int64_t t = 0; t < 20; ++t) {
            for (int64_t n = 0; n < c.query_heads * c.value_size; ++n) {
              const double want = oracle.output[t * c.query_heads * c.value_size + n];
              ASSERT_NEAR(answers[Role::kY].At(0, 0, t, n), want, 1e-4)
                  << t << " " << n << " " << linear::NameOf(slot) << " " << hostile;
            }
          }
        }
      }
    }
  }
}

TEST(LinearAttentionTest, PaddingDoesNotMatter) {
  for (UpdateRule rule : kRules) {
    Case c = CaseWith({.rule = rule});
    c.lengths = {0, 33};
    for (Slot slot :
         {Slot(Role::kQ), Slot(Role::kK), Slot(Role::kV), linear::kDecay, linear::kBeta}) {
      if (!c.inputs[slot]) continue;
      Tensor& tensor = *c.inputs[slot];
      for (int64_t b = 0; b < c.batch; ++b) {
        for (int64_t t = c.lengths[b]; t < c.tokens; ++t) {
          for (int64_t n = 0; n < tensor.dims()[3]; ++n) tensor.Set(0, b, t, n, kNan);
        }
      }
    }
    for (const Target& target : Targets()) ExpectOracle(c, target);
  }
}

// Keys whose features span hundreds of nats, which FP32 could not hold.
TEST(LinearAttentionTest, FavorIsStableForLargeNorms) {
  for (bool is_causal : {true, false}) {
    Case c = CaseWith({.map = FeatureMap::kFavor, .is_causal = is_causal});
    c.call.wants_present_state = c.call.wants_present_normalizer = false;
    Rng rng(5);
    c.inputs[Role::kK]->FillUniform(rng, -12, 12);
    c.inputs[Role::kQ]->FillUniform(rng, -12, 12);
    const Oracle oracle(c);
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name());
      // The exponents are of the order of 100, of which FP32 has 5 digits.
      EXPECT_TRUE(IsClose("output", Compute(c, target.Options())[Role::kY], oracle.output, 2e-3));
    }
  }
}

// Later keys of the same chunk have features e^250 times as large as those that a query sees.
TEST(LinearAttentionTest, FavorSeesSmallKeysBeforeLargeOnes) {
  Case c;
  c.batch = c.query_heads = c.kv_heads = c.key_size = c.value_size = c.features = 1;
  c.tokens = 8;
  Rng rng(6);
  Fill(c, {.map = FeatureMap::kFavor}, rng);
  c.inputs[linear::kProjection]->Fill(30);
  for (int64_t t = 0; t < c.tokens; ++t) c.inputs[Role::kK]->Set(0, 0, t, 0, t < 4 ? 0 : 10);
  c.call.wants_present_state = c.call.wants_present_normalizer = false;
  const Oracle oracle(c);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    EXPECT_TRUE(IsClose("output", Compute(c, target.Options())[Role::kY], oracle.output, 1e-4));
  }
}

TEST(LinearAttentionTest, ThreadsDoNotChangeBits) {
  for (UpdateRule rule : kRules) {
    Case c = CaseWith({.rule = rule});
    c = CaseWith({.rule = rule, .past = true});
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name());
      const Answers one = Compute(c, target.Options(1));
      for (int threads : {2, 5, 64}) {
        const Answers many = Compute(c, target.Options(threads));
        EXPECT_TRUE(SameBits("output", one[Role::kY], many[Role::kY]));
        EXPECT_TRUE(
            SameBits("present_state", one[linear::kPresentState], many[linear::kPresentState]));
      }
    }
  }
}

TEST(LinearAttentionTest, StatesHaveTheTypeAskedFor) {
  Case c = CaseWith({.dtype = DType::kBFloat16, .past = true});
  EXPECT_EQ(Compute(c, {})[linear::kPresentState].dtype(), DType::kFloat32);  // as the past's
  c = CaseWith({.dtype = DType::kBFloat16});
  EXPECT_EQ(Compute(c, {})[linear::kPresentState].dtype(), DType::kBFloat16);  // as the query's
  c.call.state_type = DType::kFloat16;
  EXPECT_EQ(Compute(c, {})[linear::kPresentState].dtype(), DType::kFloat16);
}

TEST(LinearAttentionTest, CheckpointsAbandonTasks) {
  Case c;
  c.tokens = 4000;
  c.key_size = c.value_size = 64;
  Rng rng(3);
  Fill(c, {.rule = UpdateRule::kGatedDelta}, rng);
  const auto op = MakeLinearAttention(c.call).value();
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Plan plan = MakePlan(*op, target.Options()).value();
    AlignedBuffer workspace(plan.workspace_bytes());
    Arguments arguments = ArgumentsOf(c);
    Tensor y(DType::kFloat32, {1, c.batch, c.tokens, c.query_heads * c.value_size});
    Tensor state(DType::kFloat32, {c.batch, c.kv_heads, c.key_size, c.value_size});
    y.Fill(7);
    arguments.outputs[Role::kY] = y.MutableView();
    arguments.outputs[linear::kPresentState] = state.MutableView();
    int calls = 0;
    const Checkpoint checkpoint = {
        .go_on = [](void* context) { return ++*static_cast<int*>(context) < 3; },
        .context = &calls};
    op->RunTask(plan, arguments, workspace.data(), 0, 0, 0, checkpoint);
    EXPECT_EQ(calls, 3);
    EXPECT_EQ(y.At(0, 0, c.tokens - 1, 0), 7);
  }
}

// ---- FAVOR+ -------------------------------------------------------------------------------------

Case FavorCase(double size, std::optional<uint64_t> seed, int64_t features) {
  Case c;
  c.batch = 1;
  c.tokens = 48;
  c.query_heads = c.kv_heads = 1;
  c.key_size = c.value_size = 16;
  Rng rng(9);
  Fill(c, {.dtype = DType::kFloat64, .map = FeatureMap::kFavor}, rng);
  c.inputs[Role::kQ]->FillUniform(rng, -size, size);
  c.inputs[Role::kK]->FillUniform(rng, -size, size);
  c.inputs[linear::kProjection].reset();
  c.call.inputs[linear::kProjection].reset();
  c.call.wants_present_state = c.call.wants_present_normalizer = false;
  c.call.num_features = features;
  c.call.seed = seed;
  c.call.error_rows = 1000;
  return c;
}

std::vector<double> SoftmaxOf(const Case& c) {
  std::vector<double> output;
  for (int64_t i = 0; i < c.tokens; ++i) {
    std::vector<double> sums(c.value_size);
    double sum = 0;
    for (int64_t j = 0; j <= i; ++j) {
      double score = 0;
      for (int64_t d = 0; d < c.key_size; ++d) {
        score += c.inputs[Role::kQ]->At(0, 0, i, d) * c.inputs[Role::kK]->At(0, 0, j, d);
      }
      const double weight = std::exp(score / std::sqrt(static_cast<double>(c.key_size)));
      sum += weight;
      for (int64_t v = 0; v < c.value_size; ++v) {
        sums[v] += weight * c.inputs[Role::kV]->At(0, 0, j, v);
      }
    }
    for (const double s : sums) output.push_back(s / sum);
  }
  return output;
}

double RelativeError(const std::vector<double>& got, const std::vector<double>& want) {
  double difference = 0, norm = 0;
  for (size_t n = 0; n < want.size(); ++n) {
    difference += (got[n] - want[n]) * (got[n] - want[n]);
    norm += want[n] * want[n];
  }
  return std::sqrt(difference / norm);
}

TEST(FavorTest, ErrorFallsWithTheRootOfTheFeatures) {
  double few = 0, many = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const Case c = FavorCase(0.5, seed, 64);
    few += RelativeError(Compute(c, {})[Role::kY].ToVector(), SoftmaxOf(c)) / 20;
    const Case four_times = FavorCase(0.5, seed, 256);
    many += RelativeError(Compute(four_times, {})[Role::kY].ToVector(), SoftmaxOf(c)) / 20;
  }
  EXPECT_GT(few / many, 1.6);
  EXPECT_LT(few / many, 2.5);
  EXPECT_LT(many, 0.06);
}

TEST(FavorTest, RelativeErrorIsThatOfAllRows) {
  for (const Target& target : Targets()) {
    const Case c = FavorCase(1, 3, 64);
    const Answers answers = Compute(c, target.Options());
    EXPECT_NEAR(answers[linear::kRelativeError].At(0, 0, 0, 0),
                RelativeError(answers[Role::kY].ToVector(), SoftmaxOf(c)), 1e-6);
  }
}

TEST(FavorTest, SampledRowsEstimateTheError) {
  Case c = FavorCase(1, 3, 64);
  const double all = Compute(c, {})[linear::kRelativeError].At(0, 0, 0, 0);
  c.call.error_rows = 20;
  EXPECT_NEAR(Compute(c, {})[linear::kRelativeError].At(0, 0, 0, 0), all, all / 2);
}

// The mean over many seeds of the unnormalized estimate is e^(a . b): the present state of one key
// read by one query.
TEST(FavorTest, FeaturesAreUnbiased) {
  Case c;
  c.batch = c.tokens = c.query_heads = c.kv_heads = c.value_size = 1;
  c.key_size = 6;
  Rng rng(2);
  Fill(c, {.dtype = DType::kFloat64, .map = FeatureMap::kFavor}, rng);
  c.inputs[linear::kProjection].reset();
  c.call.inputs[linear::kProjection].reset();
  c.call.num_features = 8;
  c.inputs[Role::kV]->Fill(1);
  Case query = c;  // whose key is the query of c
  query.inputs[Role::kK] = c.inputs[Role::kQ];
  double dot = 0;
  for (int64_t d = 0; d < 6; ++d) {
    dot += c.inputs[Role::kQ]->At(0, 0, 0, d) * c.inputs[Role::kK]->At(0, 0, 0, d);
  }
  const double want = std::exp(dot / std::sqrt(6.0));
  double sum = 0, squares = 0;
  constexpr int kSeeds = 400;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    c.call.seed = query.call.seed = seed;
    const Tensor k = Compute(c, {})[linear::kPresentNormalizer];
    const Tensor q = Compute(query, {})[linear::kPresentNormalizer];
    double product = 0;
    for (int64_t f = 0; f < 8; ++f) product += q.At(0, 0, 0, f) * k.At(0, 0, 0, f);
    sum += product;
    squares += product * product;
  }
  const double mean = sum / kSeeds;
  const double sigma = std::sqrt((squares / kSeeds - mean * mean) / kSeeds);
  EXPECT_NEAR(mean, want, 4 * sigma);
  EXPECT_LT(sigma, want / 20);
}

// Each batch row has a unit vector as its only key, so the features are e^(omega_d - 1/2) /
// sqrt(m).
TEST(FavorTest, DrawnDirectionsAreOrthogonalWithNormsOfGaussianVectors) {
  constexpr int64_t kSize = 8, kFeatures = 2048;
  Case c;
  c.batch = c.key_size = kSize;
  c.tokens = c.query_heads = c.kv_heads = c.value_size = 1;
  Rng rng(3);
  Fill(c, {.dtype = DType::kFloat64, .map = FeatureMap::kFavor}, rng);
  c.inputs[linear::kProjection].reset();
  c.call.inputs[linear::kProjection].reset();
  c.call.num_features = kFeatures;
  c.call.scale = 1;
  for (int64_t b = 0; b < kSize; ++b) {
    for (int64_t d = 0; d < kSize; ++d) c.inputs[Role::kK]->Set(0, b, 0, d, b == d ? 1 : 0);
  }
  const Tensor z = Compute(c, {})[linear::kPresentNormalizer];
  const auto omega = [&](int64_t f, int64_t d) {
    return std::log(z.At(0, d, 0, f) * std::sqrt(double{kFeatures})) + 0.5;
  };
  const auto product = [&](int64_t f, int64_t g) {
    double sum = 0;
    for (int64_t d = 0; d < kSize; ++d) sum += omega(f, d) * omega(g, d);
    return sum;
  };
  double sum = 0, squares = 0;
  for (int64_t f = 0; f < kFeatures; ++f) {
    for (int64_t g = f - f % kSize; g < f; ++g) EXPECT_NEAR(product(f, g), 0, 1e-9);
    const double norm = product(f, f);
    sum += norm / kFeatures;
    squares += norm * norm / kFeatures;
  }
  // Chi-squared with kSize degrees of freedom: variance 2 kSize, of which the samples have 15 %.
  EXPECT_NEAR(sum, kSize, 4 * std::sqrt(2.0 * kSize / kFeatures));
  EXPECT_NEAR(squares - sum * sum, 2 * kSize, 0.3 * 2 * kSize);
}

// ---- No tokens ----------------------------------------------------------------------------------

LinearAttentionCall CallOf(int64_t batch, int64_t tokens) {
  LinearAttentionCall call;
  for (Slot slot : {Role::kQ, Role::kK, Role::kV}) {
    call.inputs[slot] = TensorSpec{DType::kFloat32, {batch, tokens, 8}};
  }
  call.q_num_heads = call.kv_num_heads = 2;
  call.update_rule = UpdateRule::kLinear;
  return call;
}

TEST(LinearAttentionWithoutTokensTest, TheErrorIs0) {
  for (const auto& [batch, tokens] : {std::pair(0, 9), {3, 0}}) {
    LinearAttentionCall call = CallOf(batch, tokens);
    call.feature_map = FeatureMap::kFavor;
    call.error_rows = 4;
    float error = NAN;
    Arguments arguments;
    arguments.outputs[linear::kRelativeError].data = reinterpret_cast<std::byte*>(&error);
    RunOperator(*MakeLinearAttention(call).value(), arguments);
    EXPECT_EQ(error, 0) << batch << ", " << tokens;
  }
}

TEST(LinearAttentionWithoutTokensTest, BatchRowsTakeNoTasks) {
  const auto op = MakeLinearAttention(CallOf(int64_t{1} << 50, 0)).value();
  EXPECT_TRUE(MakePlan(*op, {}).value().stages.empty());
}

// ---- Errors -------------------------------------------------------------------------------------

std::string ErrorOf(const Options& options,
                    const std::function<void(LinearAttentionCall&)>& change) {
  LinearAttentionCall call = CaseWith(options).call;
  change(call);
  return std::string(MakeLinearAttention(call).status().message());
}

using Call = LinearAttentionCall;

TEST(LinearAttentionErrorsTest, NameShapes) {
  const auto error = [](auto change) { return ErrorOf({.rule = UpdateRule::kGatedDelta}, change); };
  EXPECT_EQ(error([](Call& c) { c.inputs[Role::kQ].reset(); }), "query is missing");
  EXPECT_EQ(error([](Call& c) {
              c.inputs[Role::kV]->shape = {2, 24};
            }),
            "value has shape [2, 24]; it must be [B, T, H * d]");
  EXPECT_EQ(error([](Call& c) { c.inputs[Role::kK]->shape[1] = 71; }),
            "key has shape [2, 71, 16]; its first axes must be [2, 70], as query's");
  EXPECT_EQ(
      error([](Call& c) { c.q_num_heads = 5; }),
      "q_num_heads is 5; with query [2, 70, 32] it must be from 1 to 65536 and divide 32 into "
      "heads of 1 to 65536");
  EXPECT_THAT(error([](Call& c) {
                for (Slot slot : {Role::kQ, Role::kK}) {
                  c.inputs[slot]->shape = {1, 0, int64_t{1} << 61};
                }
                c.inputs[Role::kV]->shape = {1, 0, 1};
                c.q_num_heads = int64_t{1} << 61;
                c.kv_num_heads = 1;
              }),
              HasSubstr("it must be from 1 to 65536 and divide"));
  EXPECT_THAT(error([](Call& c) { c.kv_num_heads = 0; }), HasSubstr("kv_num_heads is 0; with key"));
  EXPECT_THAT(error([](Call& c) { c.kv_num_heads = 4; }),
              HasSubstr("key has heads of 4; they must be as query's, 8"));
  EXPECT_THAT(error([](Call& c) { c.inputs[linear::kDecay]->shape[2] = 3; }),
              HasSubstr("decay has shape [2, 70, 3]; it must be [2, 70, 2] or [2, 70, 16]"));
  EXPECT_THAT(error([](Call& c) { c.inputs[linear::kBeta]->shape[2] = 3; }),
              HasSubstr("beta has shape [2, 70, 3]; it must be [2, 70, 2] or [2, 70, 1]"));
  EXPECT_EQ(error([](Call& c) {
              c.inputs[linear::kPastState] = TensorSpec{DType::kFloat32, {2, 2, 8, 13}};
            }),
            "past_state has shape [2, 2, 8, 13]; it must be [2, 2, 8, 12]");
  EXPECT_EQ(error([](Call& c) {
              c.inputs[Role::kKeyLengths] = TensorSpec{DType::kInt64, {3}};
            }),
            "nonpad_kv_seqlen has shape [3]; it must be [2]");
  EXPECT_THAT(error([](Call& c) {
                c.inputs[Role::kQ]->shape = {int64_t{1} << 40, 0, int64_t{1} << 26};
                c.inputs[Role::kK] = c.inputs[Role::kV] = c.inputs[Role::kQ];
                c.q_num_heads = c.kv_num_heads = 65536;
                c.update_rule = UpdateRule::kLinear;
                c.inputs[linear::kDecay].reset(), c.inputs[linear::kBeta].reset();
              }),
              HasSubstr("present_state has shape"));
}

TEST(LinearAttentionErrorsTest, NameTypes) {
  const auto error = [](auto change) { return ErrorOf({.rule = UpdateRule::kGatedDelta}, change); };
  EXPECT_EQ(error([](Call& c) { c.inputs[Role::kK]->dtype = DType::kFloat16; }),
            "key has type FP16; it must be query's, FP32");
  EXPECT_EQ(error([](Call& c) { c.inputs[linear::kBeta]->dtype = DType::kInt64; }),
            "beta has type INT64; it must be FP16, BF16, FP32 or FP64");
  EXPECT_EQ(error([](Call& c) {
              c.inputs[Role::kKeyLengths] = TensorSpec{DType::kInt32, {2}};
            }),
            "nonpad_kv_seqlen has type INT32; it must be INT64");
  EXPECT_EQ(error([](Call& c) { c.state_type = DType::kInt64; }),
            "state_type is INT64; it must be FP16, BF16, FP32 or FP64");
}

TEST(LinearAttentionErrorsTest, NameAttributes) {
  const auto error = [](UpdateRule rule, auto change) { return ErrorOf({.rule = rule}, change); };
  constexpr UpdateRule kLinear = UpdateRule::kLinear;
  EXPECT_EQ(error(kLinear, [](Call& c) { c.update_rule = UpdateRule::kDelta; }),
            "beta is missing; update_rule is delta, which needs it");
  EXPECT_EQ(error(UpdateRule::kGated, [](Call& c) { c.update_rule = UpdateRule::kLinear; }),
            "decay is given; update_rule is linear, which does not take it");
  EXPECT_EQ(error(UpdateRule::kGated, [](Call& c) { c.is_causal = false; }),
            "is_causal is false; with it, update_rule must be linear, not gated");
  EXPECT_EQ(error(UpdateRule::kGated, [](Call& c) { c.feature_map = FeatureMap::kFavor; }),
            "feature_map is favor; with it, update_rule must be linear, not gated");
  EXPECT_EQ(error(UpdateRule::kDelta, [](Call& c) { c.normalize = true; }),
            "normalize is true; with it, update_rule must be linear, not delta");
  EXPECT_EQ(error(kLinear, [](Call& c) { c.scale = -1; }),
            "scale is -1; it must be finite and at least 0");
  EXPECT_EQ(error(kLinear, [](Call& c) { c.scale = kNan; }),
            "scale is nan; it must be finite and at least 0");
  EXPECT_EQ(error(kLinear, [](Call& c) { c.chunk_size = 0; }),
            "chunk_size is 0; it must be at least 1");
  EXPECT_EQ(error(kLinear, [](Call& c) { c.error_rows = 65537; }),
            "error_rows is 65537; it must be from 0 to 65536");
  EXPECT_EQ(error(kLinear, [](Call& c) { c.num_features = 3; }),
            "num_features is given; it needs feature_map favor");
  EXPECT_EQ(error(kLinear, [](Call& c) { c.seed = 3; }),
            "seed is given; it needs feature_map favor");
  EXPECT_EQ(error(kLinear, [](Call& c) { c.wants_present_normalizer = true; }),
            "present_normalizer is requested; it needs normalize or feature_map favor");
}

TEST(LinearAttentionErrorsTest, NameFavorsAttributes) {
  const auto error = [](auto change) { return ErrorOf({.map = FeatureMap::kFavor}, change); };
  EXPECT_EQ(error([](Call& c) { c.num_features = 7; }),
            "num_features is 7; it must be the rows of projection, 8");
  EXPECT_EQ(error([](Call& c) { c.seed = 7; }), "seed is given; it has no effect with projection");
  EXPECT_EQ(error([](Call& c) { c.inputs[linear::kProjection]->shape = {8}; }),
            "projection has shape [8]; it must be [num_features, d_k]");
  EXPECT_EQ(error([](Call& c) {
              c.inputs[linear::kProjection]->shape = {8, 9};
            }),
            "projection has shape [8, 9]; it must be [8, 8]");
  EXPECT_EQ(error([](Call& c) {
              c.inputs[linear::kProjection].reset();
              c.num_features = 0;
            }),
            "num_features is 0; it must be from 1 to 65536");
  EXPECT_EQ(error([](Call& c) {
              c.inputs[linear::kProjection]->shape = {0, 8};
            }),
            "projection has 0 rows; it must have 1 to 65536");
  EXPECT_THAT(error([](Call& c) {
                c.inputs[linear::kPastState] = TensorSpec{DType::kFloat32, {2, 2, 8, 12}};
              }),
              HasSubstr("past_state and past_normalizer must be given both or neither"));
  EXPECT_THAT(error([](Call& c) {
                c.inputs[linear::kPastState] = TensorSpec{DType::kFloat32, {2, 2, 8, 12}};
                c.error_rows = 1;
              }),
              HasSubstr("error_rows is 1; it must be 0 with past_state"));
}

TEST(LinearAttentionErrorsTest, NameALengthThatIsOutOfRange) {
  Case c = CaseWith({});
  c.lengths = {3, 71};
  const auto op = MakeLinearAttention(CallOf(c)).value();
  EXPECT_TRUE(op->checks_data());
  EXPECT_EQ(std::string(op->CheckData(ArgumentsOf(c)).message()),
            "nonpad_kv_seqlen[1] is 71; it must be from 0 to the length 70");
}

}  // namespace
}  // namespace rapt::test
