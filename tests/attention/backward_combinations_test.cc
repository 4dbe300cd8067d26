// Gradients of random combinations of features: every instruction set of the CPU against the
// reference backend, which backward_test.cc compares with finite differences.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "base/aligned_buffer.h"
#include "tests/support/features.h"
#include "tests/support/padding.h"
#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct BackwardInputs {
  Inputs forward;
  Tensor output_gradient;
  std::optional<Tensor> output;
  std::optional<Tensor> lse;
  std::optional<Tensor> lse_gradient;
};

using Gradients = OutputMap<std::optional<Tensor>>;

// All gradients that the problem has.
RoleSet GradientsOf(const Problem& p) {
  RoleSet gradients;
  for (Role role : kGradients) {
    const Role input = InfoOf(role).gradient_of;
    const bool is_bool = input == Role::kMask && p.mask && p.mask->dtype == DType::kBool;
    gradients.Add(role, InfoOf(input).wanted(p) && !is_bool);
  }
  return gradients;
}

BackwardInputs RandomBackwardInputs(const Problem& p, Inputs forward, Rng& rng) {
  BackwardInputs inputs{.forward = std::move(forward)};
  const Dims rows = {p.batch, p.query_heads, p.query_length, 1};
  inputs.output_gradient =
      Tensor(p.dtype, {p.batch, p.query_heads, p.query_length, p.value_head_size},
             Storage::kPaddedRows)
          .FillUniform(rng, -1, 1);
  if (p.backward->has_lse_gradient) {
    inputs.lse_gradient = Tensor(p.lse_dtype(), rows).FillUniform(rng, -1, 1);
  }
  if (!p.backward->has_forward) return inputs;
  Problem problem = p;
  problem.backward.reset();
  problem.wants_lse = true;
  Outputs outputs = RunAttention(problem, inputs.forward, {.backend = "cpu"}).value();
  inputs.output = std::move(outputs.output);
  inputs.lse = std::move(outputs.lse);
  return inputs;
}

absl::StatusOr<Gradients> RunBackward(const Problem& p, const BackwardInputs& inputs,
                                      const PlanOptions& options,
                                      Storage storage = Storage::kRowMajor) {
  Gradients gradients;
  for (Role role : p.backward->gradients) {
    const RoleInfo& info = InfoOf(role);
    gradients[role] = Tensor(info.dtype(p), info.dims(p),
                             info.broadcasts ? Storage::kRowMajor : storage, /*guard_bytes=*/256);
  }
  const absl::Status status =
      RunAttention(p, inputs.forward, options, Storage::kRowMajor, std::nullopt,
                   [&](Arguments& arguments) {
                     arguments.inputs[Role::kOutputGradient] = inputs.output_gradient.View();
                     if (inputs.output) {
                       arguments.inputs[Role::kForwardOutput] = inputs.output->View();
                       arguments.inputs[Role::kForwardLse] = inputs.lse->View();
                     }
                     if (inputs.lse_gradient) {
                       arguments.inputs[Role::kLseGradient] = inputs.lse_gradient->View();
                     }
                     for (Role role : p.backward->gradients) {
                       arguments.outputs[role] = gradients[role]->MutableView();
                     }
                   })
          .status();
  if (!status.ok()) return status;
  for (Role role : p.backward->gradients) {
    EXPECT_TRUE(gradients[role]->GapsIntact()) << "write outside of " << InfoOf(role).onnx;
  }
  return gradients;
}

double MaxOf(const std::vector<double>& values) {
  double max = 0;
  for (const double value : values) max = std::max(max, std::fabs(value));
  return max;
}

double LargestOf(const std::optional<Tensor>& tensor) {
  return tensor ? MaxOf(tensor->ToVector()) : 0;
}

// The size of the terms of dX that cancel: of dY V.
double TermsOf(const Problem& p, const BackwardInputs& inputs) {
  const double values = p.values_in_keys ? LargestOf(inputs.forward.key) : 1;
  return std::sqrt(static_cast<double>(p.value_head_size)) * std::max(values, 1.0);
}

double BackwardToleranceOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 1e-12;
    case DType::kFloat16:
      return 4e-3;
    case DType::kBFloat16:
      return 3e-2;
    default:
      return 1e-5;
  }
}

// Of numbers of a type that a gradient has and Q may not.
double RoundingOf(DType dtype) {
  if (dtype == DType::kFloat16) return 0x1p-10;
  return dtype == DType::kBFloat16 ? 0x1p-7 : 0;
}

void ExpectClose(const Problem& p, const BackwardInputs& inputs, const Gradients& got,
                 const Gradients& want) {
  // Rounding of rotated Q and K to their type changes scores.
  const double rotation = p.has_rotary() ? 2 : 1;
  // Scores of up to 100, and the weights of dropout.
  const double scores = p.dtype == DType::kFloat64 ? 1e-13 : 5e-6;
  const double tolerance = rotation * (BackwardToleranceOf(p.dtype) + scores) *
                           (p.dropout ? 1 / (1 - p.dropout->probability) : 1);
  for (Role role : p.backward->gradients) {
    SCOPED_TRACE(std::string(InfoOf(role).onnx));
    const std::vector<double> a = got[role]->ToVector();
    const std::vector<double> b = want[role]->ToVector();
    // Those of slopes are multiplied by the distance.
    const double terms = TermsOf(p, inputs) * (role == Role::kDAlibiSlopes ? p.total_keys() : 1);
    const double most =
        tolerance * std::max(MaxOf(b), 0.05 * terms) + RoundingOf(InfoOf(role).dtype(p)) * MaxOf(b);
    for (size_t n = 0; n < b.size(); ++n) {
      ASSERT_LE(std::fabs(a[n] - b[n]), most) << "at " << n << ": " << a[n] << ", not " << b[n];
    }
  }
}

Problem DrawProblem(Rng& rng) {
  const std::vector<FeaturePair>& pairs = AllowedPairs();
  Problem p = ProblemWith(pairs[UniformInt(rng, 0, static_cast<int64_t>(pairs.size()) - 1)], rng);
  p.score_output.reset();
  p.wants_lse = false;
  p.wants_present = false;
  const bool has_lse = p.normalizer == Normalizer::kSoftmax;
  p.backward = Backward{.gradients = GradientsOf(p),
                        .has_forward = has_lse && OneIn(rng, 2),
                        .has_lse_gradient = has_lse && OneIn(rng, 2)};
  return p;
}

constexpr uint64_t kProblems = 300;
constexpr uint64_t kProblemsInARange = 30;

class BackwardCombinationsTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(BackwardCombinationsTest, MatchTheReference) {
  for (uint64_t n = GetParam(); n < GetParam() + kProblemsInARange; ++n) {
    Rng rng(n);
    const Problem p = DrawProblem(rng);
    SCOPED_TRACE("problem " + std::to_string(n) + ": " + FeaturesOf(p) + " " + ToText(p));
    const BackwardInputs inputs =
        RandomBackwardInputs(p, InputsFor(p, RandomArrangement(rng), rng), rng);
    const absl::StatusOr<Gradients> want = RunBackward(p, inputs, {.backend = "reference"});
    ASSERT_TRUE(want.ok()) << want.status();
    for (const Target& target : Targets()) {
      if (target.backend == "reference") continue;
      SCOPED_TRACE(target.Name());
      const Storage storage = Pick(rng, {Storage::kRowMajor, Storage::kBshd, Storage::kPaddedRows});
      const absl::StatusOr<Gradients> got =
          RunBackward(p, inputs, target.Options(Pick(rng, {1, 2, 5})), storage);
      if (absl::IsUnimplemented(got.status())) continue;
      ASSERT_TRUE(got.ok()) << got.status();
      ExpectClose(p, inputs, *got, *want);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Problems, BackwardCombinationsTest,
                         ::testing::Range<uint64_t>(0, kProblems, kProblemsInARange));

// The tensor of an input that has a gradient.
Tensor& TensorOf(Inputs& inputs, Role role) {
  switch (role) {
    case Role::kQ:
      return inputs.query;
    case Role::kK:
      return inputs.key;
    case Role::kV:
      return inputs.value;
    case Role::kMask:
      return *inputs.mask;
    case Role::kPastKey:
      return *inputs.past_key;
    case Role::kPastValue:
      return *inputs.past_value;
    case Role::kBias:
      return *inputs.bias;
    case Role::kHeadSink:
      return *inputs.head_sink;
    case Role::kAlibiSlopes:
      return *inputs.alibi_slopes;
    case Role::kBiasTable:
      return *inputs.bias_table;
    case Role::kRelativeBias:
      return *inputs.relative_bias;
    case Role::kRelativeKeys:
      return *inputs.relative_keys;
    case Role::kRelativeValues:
      return *inputs.relative_values;
    case Role::kRelativeQuery:
      return *inputs.relative_query;
    default:
      return *inputs.additive_weight;
  }
}

// Calls body(role, gradient, b, h, s, e) for each element of the inputs that have gradients.
template <typename Body>
void ForElements(const Problem& p, Body body) {
  for (Role gradient : p.backward->gradients) {
    const Role role = InfoOf(gradient).gradient_of;
    const Dims dims = InfoOf(role).dims(p);
    for (int64_t b = 0; b < dims[0]; ++b) {
      for (int64_t h = 0; h < dims[1]; ++h) {
        for (int64_t s = 0; s < dims[2]; ++s) {
          for (int64_t e = 0; e < dims[3]; ++e) body(role, gradient, b, h, s, e);
        }
      }
    }
  }
}

// The sum of dY Y and dlse lse.
double LossOf(Problem p, const BackwardInputs& inputs) {
  p.backward.reset();
  p.wants_lse = p.normalizer == Normalizer::kSoftmax;
  const Outputs outputs = RunAttention(p, inputs.forward, {.backend = "reference"}).value();
  const std::vector<double> y = outputs.output.ToVector();
  const std::vector<double> dy = inputs.output_gradient.ToVector();
  double loss = 0;
  for (size_t n = 0; n < y.size(); ++n) loss += y[n] * dy[n];
  if (!inputs.lse_gradient) return loss;
  const std::vector<double> lse = outputs.lse->ToVector();
  const std::vector<double> dlse = inputs.lse_gradient->ToVector();
  for (size_t n = 0; n < lse.size(); ++n) {
    if (std::isfinite(lse[n])) loss += lse[n] * dlse[n];
  }
  return loss;
}

// Tensors whose type is FP64 for all, so that differences are exact enough.
void Widen(Problem& p) {
  p.dtype = DType::kFloat64;
  for (std::optional<MaskShape>* mask : {&p.mask, &p.bias}) {
    if (*mask && (*mask)->dtype != DType::kBool) (*mask)->dtype = DType::kFloat64;
  }
  if (p.head_sink) p.head_sink = DType::kFloat64;
  if (p.rotary_cache) p.rotary_cache->dtype = DType::kFloat64;
  if (p.head_alpha) p.head_alpha = DType::kFloat64;
  if (p.alibi_slopes) p.alibi_slopes->dtype = DType::kFloat64;
  if (p.bias_table) p.bias_table->dtype = DType::kFloat64;
  if (p.relative_bias) p.relative_bias->dtype = DType::kFloat64;
  if (p.relative_keys) p.relative_keys->dtype = DType::kFloat64;
  if (p.relative_values) p.relative_values->dtype = DType::kFloat64;
  if (p.additive_weight) p.additive_weight->dtype = DType::kFloat64;
}

TEST_P(BackwardCombinationsTest, AreTheSlopesOfTheForwardPass) {
  for (uint64_t n = GetParam(); n < GetParam() + kProblemsInARange; ++n) {
    Rng rng(n);
    Problem p = DrawProblem(rng);
    Widen(p);
    SCOPED_TRACE("problem " + std::to_string(n) + ": " + FeaturesOf(p) + " " + ToText(p));
    const BackwardInputs inputs = RandomBackwardInputs(p, InputsFor(p, {}, rng), rng);
    std::vector<double> direction;
    ForElements(p, [&](auto...) { direction.push_back(Uniform(rng, -1, 1)); });
    constexpr double kStep = 1e-5;
    double loss[2];
    for (const int side : {0, 1}) {
      BackwardInputs moved = inputs;
      size_t element = 0;
      ForElements(p, [&](Role role, Role, int64_t b, int64_t h, int64_t s, int64_t e) {
        Tensor& tensor = TensorOf(moved.forward, role);
        const double step = (side == 0 ? -kStep : kStep) * direction[element++];
        tensor.Set(b, h, s, e, tensor.At(b, h, s, e) + step);
      });
      loss[side] = LossOf(p, moved);
    }
    const double slope = (loss[1] - loss[0]) / (2 * kStep);
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name());
      const absl::StatusOr<Gradients> gradients = RunBackward(p, inputs, target.Options());
      if (absl::IsUnimplemented(gradients.status())) continue;
      ASSERT_TRUE(gradients.ok()) << gradients.status();
      double sum = 0;
      size_t element = 0;
      ForElements(p, [&](Role, Role gradient, int64_t b, int64_t h, int64_t s, int64_t e) {
        sum += (*gradients)[gradient]->At(b, h, s, e) * direction[element++];
      });
      // Other normalizers have kinks where a weight becomes 0.
      const double tolerance = p.normalizer == Normalizer::kSoftmax ? 1e-6 : 1e-3;
      EXPECT_NEAR(sum, slope, tolerance * std::max(1.0, std::fabs(slope)));
    }
  }
}

// Enough rows and keys that several tasks add to the same gradients.
Problem LongProblem() {
  Problem p{.batch = 2,
            .query_heads = 4,
            .kv_heads = 2,
            .query_length = 150,
            .key_length = 170,
            .head_size = 40,
            .value_head_size = 24};
  p.causal = true;
  p.mask = MaskShape{DType::kFloat32, {1, 1, 150, 170}};
  p.head_sink = DType::kFloat32;
  p.relative_bias = RelativeBias{DType::kFloat32, 1, 21};
  p.backward = Backward{.gradients = GradientsOf(p)};
  return p;
}

class BackwardOfNormalizerTest : public ::testing::TestWithParam<Normalizer> {
 protected:
  static Problem LongProblem() {
    Problem p = test::LongProblem();
    p.normalizer = GetParam();
    if (p.normalizer == Normalizer::kEntmax) p.alpha = 1.25;
    if (p.normalizer != Normalizer::kSoftmax) p.head_sink.reset();
    p.backward->gradients = GradientsOf(p);
    return p;
  }
};

INSTANTIATE_TEST_SUITE_P(, BackwardOfNormalizerTest,
                         ::testing::Values(Normalizer::kSoftmax, Normalizer::kSparsemax,
                                           Normalizer::kEntmax15, Normalizer::kEntmax));

TEST_P(BackwardOfNormalizerTest, ThreadsDoNotChangeBits) {
  Rng rng(1);
  const Problem p = LongProblem();
  const BackwardInputs inputs = RandomBackwardInputs(p, RandomInputs(p, rng), rng);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Gradients one = RunBackward(p, inputs, target.Options(1)).value();
    for (const int threads : {2, 3, 8}) {
      const Gradients more = RunBackward(p, inputs, target.Options(threads)).value();
      for (Role role : p.backward->gradients) {
        EXPECT_TRUE(SameBits(std::string(InfoOf(role).onnx), *one[role], *more[role]));
      }
    }
  }
}

TEST_P(BackwardOfNormalizerTest, WhatIsHiddenDoesNotMatter) {
  Rng rng(2);
  struct Case {
    DType dtype;
    bool has_forward;
  };
  for (const auto& [dtype, has_forward] :
       {Case{DType::kFloat32, false}, Case{DType::kFloat16, false}, Case{DType::kBFloat16, true},
        Case{DType::kFloat64, true}}) {
    Problem p = LongProblem();
    p.dtype = dtype;
    if (has_forward) p.head_sink.reset();  // a device computes the rest
    p.backward->has_forward = has_forward && p.normalizer == Normalizer::kSoftmax;
    p.has_key_lengths = true;
    p.alignment = Alignment::kBottomRight;
    p.mask = MaskShape{DType::kBool, {1, 1, 150, 170}};
    p.relative_bias.reset();
    p.backward->gradients = GradientsOf(p);
    Inputs forward = RandomInputs(p, rng);
    forward.key_lengths = {100, 60};
    forward.mask->Fill(1);
    // Query 7 sees no key; keys 40 to 49 are hidden from all.
    for (int64_t i = 0; i < p.query_length; ++i) {
      for (int64_t j = 0; j < p.key_length; ++j) {
        if (i == 7 || (j >= 40 && j < 50)) forward.mask->Set(0, 0, i, j, 0);
      }
    }
    const BackwardInputs finite = RandomBackwardInputs(p, forward, rng);
    BackwardInputs hostile = finite;
    for (int64_t h = 0; h < p.query_heads; ++h) {
      for (int64_t d = 0; d < p.head_size; ++d) hostile.forward.query.Set(0, h, 7, d, kNan);
      for (int64_t d = 0; d < p.value_head_size; ++d) hostile.output_gradient.Set(0, h, 7, d, kNan);
    }
    for (int64_t b = 0; b < p.batch; ++b) {
      for (const int64_t j : {int64_t{43}, int64_t{100}, int64_t{169}}) {
        for (int64_t d = 0; d < p.head_size; ++d) hostile.forward.key.Set(b, 1, j, d, kNan);
        for (int64_t d = 0; d < p.value_head_size; ++d) hostile.forward.value.Set(b, 1, j, d, kNan);
      }
    }
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name());
      const Gradients want = RunBackward(p, finite, target.Options()).value();
      const Gradients got = RunBackward(p, hostile, target.Options()).value();
      ExpectClose(p, finite, got, want);
      for (int64_t d = 0; d < p.head_size; ++d) {
        EXPECT_EQ(got[Role::kDQ]->At(0, 0, 7, d), 0);
        EXPECT_EQ(got[Role::kDK]->At(0, 1, 43, d), 0);
      }
      for (int64_t d = 0; d < p.value_head_size; ++d) {
        EXPECT_EQ(got[Role::kDV]->At(1, 1, 100, d), 0);
      }
    }
  }
}

TEST_P(BackwardOfNormalizerTest, ANanReachesTheRowsThatSeeIt) {
  Rng rng(5);
  Problem p = LongProblem();
  p.mask.reset();
  p.backward->gradients = GradientsOf(p);
  Inputs forward = RandomInputs(p, rng);
  constexpr int64_t kKey = 100;
  forward.key.Set(0, 0, kKey, 3, kNan);
  const BackwardInputs inputs = RandomBackwardInputs(p, forward, rng);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Gradients gradients = RunBackward(p, inputs, target.Options()).value();
    for (int64_t i = 0; i < p.query_length; ++i) {
      EXPECT_EQ(std::isnan(gradients[Role::kDQ]->At(0, 1, i, 3)), i >= kKey) << "query " << i;
      EXPECT_TRUE(std::isfinite(gradients[Role::kDQ]->At(0, 2, i, 3))) << "of another head";
    }
    EXPECT_TRUE(std::isnan(gradients[Role::kDV]->At(0, 0, 0, 0)));
    EXPECT_TRUE(std::isfinite(gradients[Role::kDV]->At(0, 0, 160, 0))) << "a key that none sees";
  }
}

struct Variant {
  const char* name;
  void (*change)(Problem&);
};

// A device computes gradients of these, given Y and lse.
const std::vector<Variant>& Variants() {
  static const std::vector<Variant>& variants = *new std::vector<Variant>{
      {"plain", [](Problem&) {}},
      {"causal", [](Problem& p) { p.causal = true; }},
      {"bottom right", [](Problem& p) { p.causal = true, p.alignment = Alignment::kBottomRight; }},
      {"window", [](Problem& p) { p.left_window = 9, p.right_window = 5; }},
      {"queries that see nothing", [](Problem& p) { p.query_length = 150, p.left_window = 5; }},
      {"keys that none sees", [](Problem& p) { p.causal = true, p.key_length = 150; }},
      {"past", [](Problem& p) { p.causal = true, p.past_length = 21; }},
      {"lengths", [](Problem& p) { p.has_key_lengths = true; }},
      {"causal, lengths", [](Problem& p) { p.causal = true, p.has_key_lengths = true; }},
      {"causal of lengths",
       [](Problem& p) {
         p.causal = true, p.has_key_lengths = true, p.alignment = Alignment::kOnnx;
       }},
      {"bool mask",
       [](Problem& p) {
         p.mask = MaskShape{DType::kBool, {p.batch, 1, p.query_length, p.total_keys()}};
       }},
      {"float mask",
       [](Problem& p) {
         p.mask = MaskShape{DType::kFloat32, {1, p.query_heads, p.query_length, p.total_keys()}};
       }},
      {"mask of keys",
       [](Problem& p) {
         p.mask = MaskShape{DType::kBool, {p.batch, 1, 1, p.total_keys()}};
       }},
      {"one query", [](Problem& p) { p.query_length = 1; }},
      {"nothing visible", [](Problem& p) { p.causal = true, p.past_length = 0, p.key_length = 0; }},
      {"scale", [](Problem& p) { p.scale = 0.3; }},
  };
  return variants;
}

TEST(BackwardTest, HalfTypesWithTheForwardsOutputs) {
  Rng rng(4);
  for (const Variant& variant : Variants()) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      SCOPED_TRACE(std::string(variant.name) + " " + std::string(NameOf(dtype)));
      Problem p{.dtype = dtype,
                .batch = 3,
                .query_heads = 4,
                .kv_heads = 2,
                .query_length = 37,
                .key_length = 53,
                .head_size = 41,
                .value_head_size = 24};
      variant.change(p);
      p.backward = Backward{.has_forward = true};
      for (Role role : {Role::kDQ, Role::kDK, Role::kDV, Role::kDPastKey, Role::kDPastValue}) {
        p.backward->gradients.Add(role, InfoOf(InfoOf(role).gradient_of).wanted(p));
      }
      const BackwardInputs inputs =
          RandomBackwardInputs(p, RandomInputs(p, rng, RandomArrangement(rng)), rng);
      const Gradients want = RunBackward(p, inputs, {.backend = "reference"}).value();
      for (const Target& target : Targets()) {
        SCOPED_TRACE(target.Name());
        const absl::StatusOr<Gradients> got =
            RunBackward(p, inputs, target.Options(2), Storage::kBshd);
        ASSERT_TRUE(got.ok()) << got.status();
        ExpectClose(p, inputs, *got, want);
      }
    }
  }
}

// The inputs of batch row b alone.
BackwardInputs AloneOf(const BackwardInputs& inputs, const RowAlone& alone, int64_t b) {
  BackwardInputs row{.forward = alone.inputs};
  row.output_gradient = RowsOf(inputs.output_gradient, b, alone.problem.query_length);
  return row;
}

TEST(BackwardTest, APaddedRowEqualsTheRowAlone) {
  Rng rng(6);
  const Variant variants[] = {
      {"causal", [](Problem& p) { p.causal = true; }},
      {"window", [](Problem& p) { p.left_window = 9, p.right_window = 5; }},
      {"past", [](Problem& p) { p.causal = true, p.past_length = 21; }},
      {"alibi", [](Problem& p) { p.alibi = true; }},
      {"bias_table", [](Problem& p) { p.bias_table = BiasTable{.buckets = 8}; }},
      {"relative_bias", [](Problem& p) { p.relative_bias = RelativeBias{.length = 9}; }},
      {"relative vectors",
       [](Problem& p) {
         p.relative_keys = RelativeVectors{.heads = 4, .length = 21};
         p.relative_values = RelativeVectors{.length = 7};
       }},
      {"rope_theta", [](Problem& p) { p.rope_theta = 100; }},
  };
  for (const Variant& variant : variants) {
    for (const Alignment alignment : {Alignment::kTopLeft, Alignment::kBottomRight}) {
      Problem p{.batch = 2,
                .query_heads = 4,
                .kv_heads = 2,
                .query_length = 37,
                .key_length = 53,
                .head_size = 24,
                .value_head_size = 8,
                .alignment = alignment,
                .has_key_lengths = true};
      variant.change(p);
      SCOPED_TRACE(std::string(variant.name) + " " + ToText(p));
      p.backward = Backward{};
      for (Role role : {Role::kDQ, Role::kDK, Role::kDV}) p.backward->gradients.Add(role, true);
      BackwardInputs inputs = RandomBackwardInputs(p, RandomInputs(p, rng), rng);
      inputs.forward.key_lengths = {12, 45};
      for (int64_t i = 12; i < p.query_length; ++i) {  // the padding of the first row
        for (int64_t h = 0; h < p.query_heads; ++h) {
          for (int64_t e = 0; e < p.value_head_size; ++e) inputs.output_gradient.Set(0, h, i, e, 0);
        }
      }
      for (const Target& target : Targets()) {
        SCOPED_TRACE(target.Name());
        const absl::StatusOr<Gradients> got = RunBackward(p, inputs, target.Options());
        if (absl::IsUnimplemented(got.status())) continue;
        ASSERT_TRUE(got.ok()) << got.status();
        for (int64_t b = 0; b < p.batch; ++b) {
          RowAlone alone = AloneOf(p, inputs.forward, b);
          alone.problem.backward = p.backward;
          const BackwardInputs of_row = AloneOf(inputs, alone, b);
          const Gradients want =
              RunBackward(alone.problem, of_row, {.backend = "reference"}).value();
          Gradients row;
          for (Role role : p.backward->gradients) {
            row[role] = RowsOf(*(*got)[role], b, want[role]->dims()[2]);
          }
          ExpectClose(alone.problem, of_row, row, want);
        }
      }
    }
  }
}

// A checkpoint that abandons each task stops the backward pass early.
TEST(BackwardTest, CheckpointsAbandonTasks) {
  Rng rng(3);
  Problem p = LongProblem();
  p.key_length = 4000;
  p.mask.reset();
  p.backward->gradients = GradientsOf(p);
  const BackwardInputs inputs = RandomBackwardInputs(p, RandomInputs(p, rng), rng);
  Gradients gradients;
  Arguments arguments;
  arguments.inputs[Role::kQ] = inputs.forward.query.View();
  arguments.inputs[Role::kK] = inputs.forward.key.View();
  arguments.inputs[Role::kV] = inputs.forward.value.View();
  arguments.inputs[Role::kHeadSink] = inputs.forward.head_sink->View();
  arguments.inputs[Role::kRelativeBias] = inputs.forward.relative_bias->View();
  arguments.inputs[Role::kOutputGradient] = inputs.output_gradient.View();
  for (Role role : p.backward->gradients) {
    gradients[role] = Tensor(InfoOf(role).dtype(p), InfoOf(role).dims(p));
    arguments.outputs[role] = gradients[role]->MutableView();
  }
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const absl::StatusOr<Plan> plan = MakePlan(p, target.Options());
    if (absl::IsUnimplemented(plan.status())) continue;
    ASSERT_TRUE(plan.ok()) << plan.status();
    AlignedBuffer workspace(plan->workspace_bytes());
    int calls = 0;
    const Checkpoint checkpoint = {.go_on =
                                       [](void* count) {
                                         ++*static_cast<int*>(count);
                                         return false;
                                       },
                                   .context = &calls};
    const int stages = static_cast<int>(plan->stages.size());
    for (int stage = 0; stage < stages; ++stage) {
      for (int64_t task = 0; task < plan->stages[stage]; ++task) {
        plan->routing.backend->RunTask(*plan, arguments, workspace.data(), stage, task, 0,
                                       checkpoint);
      }
    }
    EXPECT_GT(calls, 0);
    EXPECT_LE(calls, std::accumulate(plan->stages.begin(), plan->stages.end(), int64_t{0}));
  }
}

}  // namespace
}  // namespace rapt::test
