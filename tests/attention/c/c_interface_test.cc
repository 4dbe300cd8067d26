// The C interface against the oracle, from C++.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "rapt/attention.h"
#include "tests/attention/c/c_type.h"
#include "tests/support/oracle.h"
#include "tests/support/run_attention.h"
#include "tests/support/table_values.h"
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;

struct ContextDeleter {
  void operator()(rapt_context* context) const { rapt_context_destroy(context); }
};
struct PlanDeleter {
  void operator()(rapt_plan* plan) const { rapt_plan_destroy(plan); }
};
using ContextPtr = std::unique_ptr<rapt_context, ContextDeleter>;
using PlanPtr = std::unique_ptr<rapt_plan, PlanDeleter>;

// A code and its message.
struct Result {
  rapt_code code = RAPT_OK;
  std::string message;
};

template <typename Function, typename... Arguments>
Result Call(Function function, Arguments... arguments) {
  char message[RAPT_MESSAGE_BYTES] = "";
  const rapt_code code = function(arguments..., message, sizeof(message));
  return {code, message};
}

std::pair<ContextPtr, Result> MakeContext(const Target& target, int threads) {
  const rapt_context_options options = {.struct_size = sizeof(options),
                                        .threads = threads,
                                        .backend = target.backend.c_str(),
                                        .isa = target.isa.c_str()};
  rapt_context* context = nullptr;
  Result result = Call(rapt_context_create, &options, &context);
  return {ContextPtr(context), result};
}

ContextPtr MakeContext(int threads = 1) { return MakeContext({"auto", "auto"}, threads).first; }

PlanPtr MakePlan(const rapt_context* context, const rapt_problem& problem) {
  rapt_plan* plan = nullptr;
  const Result result = Call(rapt_plan_create, context, &problem, &plan);
  EXPECT_EQ(result.code, RAPT_OK) << result.message;
  return PlanPtr(plan);
}

// A gradient in both interfaces.
struct GradientRow {
  Role role;
  rapt_gradient bit;
  rapt_output rapt_arguments::*output;
};
constexpr GradientRow kGradientRows[] = {
    {Role::kDQ, RAPT_D_QUERY, &rapt_arguments::d_query},
    {Role::kDK, RAPT_D_KEY, &rapt_arguments::d_key},
    {Role::kDV, RAPT_D_VALUE, &rapt_arguments::d_value},
    {Role::kDMask, RAPT_D_MASK, &rapt_arguments::d_mask},
    {Role::kDPastKey, RAPT_D_PAST_KEY, &rapt_arguments::d_past_key},
    {Role::kDPastValue, RAPT_D_PAST_VALUE, &rapt_arguments::d_past_value},
    {Role::kDBias, RAPT_D_BIAS, &rapt_arguments::d_bias},
    {Role::kDHeadSink, RAPT_D_HEAD_SINK, &rapt_arguments::d_head_sink},
    {Role::kDAlibiSlopes, RAPT_D_ALIBI_SLOPES, &rapt_arguments::d_alibi_slopes},
    {Role::kDBiasTable, RAPT_D_BIAS_TABLE, &rapt_arguments::d_bias_table},
    {Role::kDRelativeBias, RAPT_D_RELATIVE_BIAS, &rapt_arguments::d_relative_bias},
    {Role::kDRelativeKeys, RAPT_D_RELATIVE_KEYS, &rapt_arguments::d_relative_keys},
    {Role::kDRelativeValues, RAPT_D_RELATIVE_VALUES, &rapt_arguments::d_relative_values},
    {Role::kDRelativeQuery, RAPT_D_RELATIVE_QUERY, &rapt_arguments::d_relative_query},
    {Role::kDAdditiveWeight, RAPT_D_ADDITIVE_WEIGHT, &rapt_arguments::d_additive_weight},
};

rapt_problem ToC(const Problem& p) {
  rapt_problem c = {.struct_size = sizeof(rapt_problem)};
  c.dtype = CTypeOf(p.dtype);
  c.causal = p.causal;
  c.batch = p.batch;
  c.query_heads = p.query_heads;
  c.kv_heads = p.kv_heads;
  c.query_length = p.query_length;
  c.key_length = p.key_length;
  c.past_length = p.past_length;
  c.head_size = p.head_size;
  c.value_head_size = p.value_head_size;
  c.has_scale = p.scale.has_value();
  c.scale = p.scale.value_or(std::numeric_limits<double>::quiet_NaN());  // not to be read
  c.alignment = static_cast<int32_t>(p.alignment);
  c.softcap = p.softcap;
  c.has_left_window = p.left_window >= 0;
  c.has_right_window = p.right_window >= 0;
  c.left_window = p.left_window;
  c.right_window = p.right_window;
  if (p.mask) {
    c.mask_dtype = CTypeOf(p.mask->dtype);
    std::copy(p.mask->dims.begin(), p.mask->dims.end(), c.mask_shape);
  }
  if (p.bias) {
    c.bias_dtype = CTypeOf(p.bias->dtype);
    std::copy(p.bias->dims.begin(), p.bias->dims.end(), c.bias_shape);
  }
  if (p.head_sink) c.head_sink_dtype = CTypeOf(*p.head_sink);
  c.values_in_keys = p.values_in_keys;
  c.alibi = p.alibi;
  if (p.alibi_slopes) {
    c.alibi_slopes_dtype = CTypeOf(p.alibi_slopes->dtype);
    c.alibi_slopes_batch = p.alibi_slopes->batch;
  }
  if (p.bias_table) {
    c.bias_table_dtype = CTypeOf(p.bias_table->dtype);
    c.bias_table_buckets = p.bias_table->buckets;
  }
  c.is_bidirectional = p.is_bidirectional;
  c.has_max_distance = p.max_distance.has_value();
  c.max_distance = p.max_distance.value_or(-1);  // not to be read
  if (p.relative_bias) {
    c.relative_bias_dtype = CTypeOf(p.relative_bias->dtype);
    c.relative_bias_heads = p.relative_bias->heads;
    c.relative_bias_length = p.relative_bias->length;
  }
  if (p.relative_keys) {
    c.relative_keys_dtype = CTypeOf(p.relative_keys->dtype);
    c.relative_keys_heads = p.relative_keys->heads;
    c.relative_keys_length = p.relative_keys->length;
  }
  if (p.relative_values) {
    c.relative_values_dtype = CTypeOf(p.relative_values->dtype);
    c.relative_values_heads = p.relative_values->heads;
    c.relative_values_length = p.relative_values->length;
  }
  c.has_relative_query = p.has_relative_query;
  if (p.rotary_cache) {
    c.rotary_cache_dtype = CTypeOf(p.rotary_cache->dtype);
    c.rotary_cache_batch = p.rotary_cache->batch.value_or(0);
    c.rotary_cache_rows = p.rotary_cache->rows;
    c.rotary_cache_pairs = p.rotary_cache->pairs;
  }
  c.has_position_ids = p.has_position_ids;
  c.has_key_position_ids = p.has_key_position_ids;
  c.interleaved = p.interleaved;
  c.rotary_embedding_dim = p.rotary_embedding_dim;
  c.has_rope_theta = p.rope_theta.has_value();
  c.rope_theta = p.rope_theta.value_or(-1);  // not to be read
  c.has_rotary_keys = p.rotary_keys.has_value();
  c.rotary_keys = p.rotary_keys.value_or(false);
  c.score_function = p.is_additive() ? RAPT_ADDITIVE : RAPT_DOT_PRODUCT;
  if (p.additive_weight) {
    c.additive_weight_dtype = CTypeOf(p.additive_weight->dtype);
    c.additive_weight_heads = p.additive_weight->heads;
  }
  c.normalizer = static_cast<int32_t>(p.normalizer);
  c.has_alpha = p.alpha.has_value();
  c.alpha = p.alpha.value_or(std::numeric_limits<double>::quiet_NaN());  // not to be read
  if (p.head_alpha) c.head_alpha_dtype = CTypeOf(*p.head_alpha);
  if (p.block_mask) {
    c.has_block_mask = 1;
    c.block_mask_batch = p.block_mask->at(0);
    c.block_mask_heads = p.block_mask->at(1);
  }
  c.block_q = p.block_q.value_or(-7);  // not to be read without a block mask
  c.block_k = p.block_k.value_or(-7);
  if (p.selected) {
    c.has_selected_indices = 1;
    c.selected_heads = p.selected->heads;
    c.selected_count = p.selected->count;
  }
  c.has_global_mask = p.has_global_mask;
  c.prefix_keys = p.prefix_keys;
  c.has_key_lengths = p.has_key_lengths;
  if (p.dropout) {
    c.dropout_probability = p.dropout->probability;
    c.dropout_seed = p.dropout->seed;
  }
  c.softmax_in_fp64 = p.softmax_in_fp64;
  if (p.score_output) c.score_output = RAPT_SCORES + static_cast<int>(*p.score_output);
  c.wants_lse = p.wants_lse;
  c.wants_present = p.wants_present;
  if (!p.backward) return c;
  for (const GradientRow& row : kGradientRows) {
    if (p.backward->gradients.contains(row.role)) c.gradients |= row.bit;
  }
  c.has_forward = p.backward->has_forward;
  c.has_lse_gradient = p.backward->has_lse_gradient;
  return c;
}

template <typename CTensor, typename View>
CTensor ToC(const View& view) {
  CTensor c = {};
  c.data = view.data;
  std::copy(view.strides.begin(), view.strides.end(), c.strides);
  return c;
}

rapt_input ToC(const std::optional<Tensor>& tensor) {
  return tensor ? ToC<rapt_input>(tensor->View()) : rapt_input{};
}

rapt_output ToC(std::optional<Tensor>& tensor) {
  return tensor ? ToC<rapt_output>(tensor->MutableView()) : rapt_output{};
}

rapt_arguments ToC(const Inputs& inputs, Outputs& outputs) {
  rapt_arguments c = {.struct_size = sizeof(rapt_arguments)};
  c.query = ToC<rapt_input>(inputs.query.View());
  c.key = ToC<rapt_input>(inputs.key.View());
  c.value = ToC<rapt_input>(inputs.value.View());
  c.mask = ToC(inputs.mask);
  c.past_key = ToC(inputs.past_key);
  c.past_value = ToC(inputs.past_value);
  c.key_lengths = inputs.key_lengths.data();
  c.bias = ToC(inputs.bias);
  c.head_sink = ToC(inputs.head_sink);
  c.alibi_slopes = ToC(inputs.alibi_slopes);
  c.bias_table = ToC(inputs.bias_table);
  c.relative_bias = ToC(inputs.relative_bias);
  c.relative_keys = ToC(inputs.relative_keys);
  c.relative_values = ToC(inputs.relative_values);
  c.relative_query = ToC(inputs.relative_query);
  c.cos_cache = ToC(inputs.cos_cache);
  c.sin_cache = ToC(inputs.sin_cache);
  c.position_ids = ToC(inputs.position_ids);
  c.key_position_ids = ToC(inputs.key_position_ids);
  c.additive_weight = ToC(inputs.additive_weight);
  c.head_alpha = ToC(inputs.head_alpha);
  c.block_mask = ToC(inputs.block_mask);
  c.selected_indices = ToC(inputs.selected);
  c.global_mask = ToC(inputs.global_mask);
  c.output = ToC<rapt_output>(outputs.output.MutableView());
  c.lse = ToC(outputs.lse);
  c.scores = ToC(outputs.scores);
  c.present_key = ToC(outputs.present_key);
  c.present_value = ToC(outputs.present_value);
  return c;
}

// Runs with a workspace of exactly the planned size, or with the context's own.
Result PlanAndRun(rapt_context* context, const rapt_problem& problem,
                  const rapt_arguments& arguments, bool own_workspace, std::string* plan_text) {
  rapt_plan* made = nullptr;
  Result result = Call(rapt_plan_create, context, &problem, &made);
  if (result.code != RAPT_OK) return result;
  const PlanPtr plan(made);
  *plan_text = rapt_plan_description(plan.get());
  if (!own_workspace) return Call(rapt_run, context, plan.get(), &arguments, nullptr, size_t{0});
  const size_t bytes = rapt_plan_workspace_bytes(plan.get());
  AlignedBuffer workspace(bytes + RAPT_WORKSPACE_ALIGNMENT);  // never null
  return Call(rapt_run, context, plan.get(), &arguments, static_cast<void*>(workspace.data()),
              bytes);
}

const Problem kSmall{.batch = 2,
                     .query_heads = 4,
                     .kv_heads = 2,
                     .query_length = 5,
                     .key_length = 7,
                     .head_size = 8,
                     .value_head_size = 6};

Problem With(void (*change)(Problem&)) {
  Problem problem = kSmall;
  change(problem);
  return problem;
}

// Sets every field of rapt_problem to a value other than its default at least once.
std::vector<Problem> Problems() {
  std::vector<Problem> problems = {
      kSmall,
      With([](Problem& p) { p.causal = true; }),
      With([](Problem& p) {
        p.causal = true;
        p.alignment = Alignment::kBottomRight;
      }),
      With([](Problem& p) { p.scale = 0; }),
      With([](Problem& p) { p.softcap = 1.5; }),
      With([](Problem& p) { p.left_window = 0; }),
      With([](Problem& p) { p.right_window = 2; }),
      With([](Problem& p) {
        p.mask = MaskShape{DType::kBool, {1, 4, 5, 7}};
      }),
      With([](Problem& p) {
        p.mask = MaskShape{DType::kFloat32, {2, 1, 1, 6}};
        p.head_sink = DType::kFloat32;
      }),
      With([](Problem& p) { p.has_key_lengths = true; }),
      With([](Problem& p) {
        p.causal = true;
        p.alignment = Alignment::kOnnx;
        p.has_key_lengths = true;
      }),
      With([](Problem& p) { p.past_length = 3; }),
      With([](Problem& p) { p.normalizer = Normalizer::kSparsemax; }),
      With([](Problem& p) { p.normalizer = Normalizer::kEntmax15; }),
      With([](Problem& p) {
        p.normalizer = Normalizer::kEntmax;
        p.alpha = 1.3;
      }),
      With([](Problem& p) {
        p.normalizer = Normalizer::kEntmax;
        p.head_alpha = DType::kFloat32;
      }),
      With([](Problem& p) { p.softmax_in_fp64 = true; }),
      With([](Problem& p) {
        p.dropout = Dropout{0.3, 0x123456789abcdef0};
      }),
      With([](Problem& p) {
        p.past_length = 3;
        p.wants_present = true;
        p.wants_lse = true;
      }),
  };
  for (int mode = 0; mode < 4; ++mode) {
    Problem problem = kSmall;
    problem.causal = true;
    problem.softcap = 2;
    problem.score_output = static_cast<ScoreOutput>(mode);
    problems.push_back(problem);
  }
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
    Problem problem = kSmall;
    problem.dtype = dtype;
    problem.wants_lse = true;
    problems.push_back(problem);
  }
  return problems;
}

Outputs MakeOutputs(const Problem& p, Storage storage) {
  Outputs o;
  o.output = Tensor(p.dtype, {p.batch, p.query_heads, p.query_length, p.value_head_size}, storage);
  if (p.wants_lse) o.lse = Tensor(p.lse_dtype(), {p.batch, p.query_heads, p.query_length, 1});
  if (p.score_output) {
    o.scores = Tensor(p.dtype, {p.batch, p.query_heads, p.query_length, p.total_keys()}, storage);
  }
  if (p.wants_present) {
    o.present_key = Tensor(p.dtype, {p.batch, p.kv_heads, p.total_keys(), p.head_size}, storage);
    if (p.values_in_keys) return o;
    o.present_value =
        Tensor(p.dtype, {p.batch, p.kv_heads, p.total_keys(), p.value_head_size}, storage);
  }
  return o;
}

TEST(CInterfaceTest, MatchesTheOracleOnEveryInstructionSet) {
  constexpr uint64_t kSeed = 20221205;
  Rng rng(kSeed);
  for (const Problem& problem : Problems()) {
    for (Storage storage : {Storage::kRowMajor, Storage::kBshd, Storage::kMisaligned}) {
      const Inputs inputs = RandomInputs(problem, rng, {storage, storage, storage});
      const Expected expected = Attend(problem, inputs);
      for (const Target& target : Targets()) {
        SCOPED_TRACE("seed " + std::to_string(kSeed) + " " + target.Name() + " " + ToText(problem));
        const auto [context, made] = MakeContext(target, 2);
        ASSERT_EQ(made.code, RAPT_OK) << made.message;
        Outputs outputs = MakeOutputs(problem, storage);
        const Result result = PlanAndRun(context.get(), ToC(problem), ToC(inputs, outputs),
                                         storage == Storage::kRowMajor, &outputs.plan);
        ASSERT_EQ(result.code, RAPT_OK) << result.message;
        EXPECT_THAT(outputs.plan, HasSubstr(target.Name()));
        EXPECT_TRUE(Matches(problem, outputs, expected));
      }
    }
  }
}

// The bytes of every output.
std::vector<std::vector<double>> Compute(const Problem& problem, const Inputs& inputs) {
  Outputs outputs = MakeOutputs(problem, Storage::kRowMajor);
  const ContextPtr context = MakeContext();
  const Result result =
      PlanAndRun(context.get(), ToC(problem), ToC(inputs, outputs), false, &outputs.plan);
  EXPECT_EQ(result.code, RAPT_OK) << result.message;
  std::vector<std::vector<double>> all = {outputs.output.ToVector()};
  if (outputs.lse) all.push_back(outputs.lse->ToVector());
  if (outputs.scores) all.push_back(outputs.scores->ToVector());
  return all;
}

TEST(CInterfaceTest, EveryAttributeOfTheTableChangesTheResult) {
  Problem with_scores = kSmall;
  with_scores.score_output = ScoreOutput::kBiased;
  // Without scores and masks, kernels skip the policies that change nothing.
  Problem many_keys = kSmall;
  many_keys.key_length = 200;
  for (Problem usual : {with_scores, many_keys}) {
    usual.wants_lse = true;
    Problem with_table = usual;  // for the attributes of bias_table
    with_table.bias_table = BiasTable{.buckets = 4};
    Problem with_weight = with_table;  // for the score function
    with_weight.additive_weight = AdditiveWeight{};
    Problem with_blocks = usual;
    with_blocks.block_q = with_blocks.block_k = 1;
    with_blocks.block_mask = Dims{1, 1, usual.query_length, usual.total_keys()};
    Problem with_window = usual;  // for the exemptions from it
    with_window.left_window = 0;
    Rng rng(4);
    Inputs inputs = RandomInputs(with_weight, rng);
    inputs.block_mask = Tensor(DType::kBool, *with_blocks.block_mask).FillBool(rng, 0.5);
    for (const AttributeInfo& info : Attributes()) {
      if (!IsInProblem(info)) continue;
      const bool has_table =
          info.attribute == Attribute::kBidirectional || info.attribute == Attribute::kMaxDistance;
      const bool is_rotated = info.attribute == Attribute::kInterleaved ||
                              info.attribute == Attribute::kRotaryDim ||
                              info.attribute == Attribute::kRotaryKeys;
      const bool has_blocks =
          info.attribute == Attribute::kBlockQ || info.attribute == Attribute::kBlockK;
      Problem before = has_table                                  ? with_table
                       : has_blocks                               ? with_blocks
                       : info.attribute == Attribute::kPrefixKeys ? with_window
                                                                  : usual;
      if (is_rotated) before.rope_theta = 10;
      const auto result = Compute(before, inputs);
      ASSERT_EQ(result, result) << "a NaN differs from itself";
      EXPECT_NE(Compute(test::With(info, before), inputs), result) << info.c;
    }
  }
}

TEST(CInterfaceTest, EveryTensorOfTheTableArrives) {
  for (Role table : kRelativeTables) {
    const Problem problem = EveryTensorWith(table);
    Rng rng(5);
    const Inputs inputs = RandomInputs(problem, rng);
    Outputs outputs = MakeOutputs(problem, Storage::kRowMajor);
    const ContextPtr context = MakeContext();
    const Result result =
        PlanAndRun(context.get(), ToC(problem), ToC(inputs, outputs), false, &outputs.plan);
    ASSERT_EQ(result.code, RAPT_OK) << result.message;
    EXPECT_TRUE(Matches(problem, outputs, Attend(problem, inputs)));
  }
}

// --- The backward pass -------------------------------------------------------------------------

// The problem's gradients by all inputs that have one.
Problem BackwardOf(Problem problem) {
  problem.score_output = std::nullopt;
  problem.wants_lse = problem.wants_present = false;
  if (problem.mask) problem.mask->dtype = DType::kFloat32;
  const bool has_lse = problem.normalizer == Normalizer::kSoftmax;
  problem.backward.emplace();
  problem.backward->has_forward = problem.backward->has_lse_gradient = has_lse;
  const RoleSet inputs = InputTensorsOf(problem);
  for (Role role : kGradients) {
    if (inputs.contains(InfoOf(role).gradient_of)) problem.backward->gradients.Add(role);
  }
  return problem;
}

// What a backward problem has besides the inputs of the forward pass. Y and lse need not be those
// of the forward pass, because both interfaces get the same.
struct BackwardTensors {
  InputMap<Tensor> inputs;
  OutputMap<Tensor> gradients;

  BackwardTensors(const Problem& problem, Rng& rng) {
    const RoleSet given = InputTensorsOf(problem);
    for (Role role : kBackwardInputs) {
      if (!given.contains(role)) continue;
      inputs[role] = TensorOf(role, problem).FillUniform(rng, 1, 2);
    }
    for (Role role : problem.backward->gradients) gradients[role] = TensorOf(role, problem);
  }

  static Tensor TensorOf(Role role, const Problem& problem) {
    return {InfoOf(role).dtype(problem), InfoOf(role).dims(problem)};
  }

  void AddTo(rapt_arguments& arguments) {
    arguments.output_gradient = ToC<rapt_input>(inputs[Role::kOutputGradient].View());
    arguments.forward_output = ToC<rapt_input>(inputs[Role::kForwardOutput].View());
    arguments.forward_lse = ToC<rapt_input>(inputs[Role::kForwardLse].View());
    arguments.lse_gradient = ToC<rapt_input>(inputs[Role::kLseGradient].View());
    for (const GradientRow& row : kGradientRows) {
      arguments.*row.output = ToC<rapt_output>(gradients[row.role].MutableView());
    }
  }

  void AddTo(const Problem& problem, Arguments& arguments) {
    const RoleSet given = InputTensorsOf(problem);
    for (Role role : kBackwardInputs) {
      if (given.contains(role)) arguments.inputs[role] = inputs[role].View();
    }
    for (Role role : problem.backward->gradients) {
      arguments.outputs[role] = gradients[role].MutableView();
    }
  }
};

TEST(CInterfaceTest, GradientsAreThoseOfTheLibrary) {
  Rng rng(6);
  for (Role table : kRelativeTables) {
    const Problem problem = BackwardOf(EveryTensorWith(table));
    SCOPED_TRACE(ToText(problem));
    const Inputs inputs = RandomInputs(problem, rng);
    BackwardTensors from_c(problem, rng);
    BackwardTensors wanted = from_c;
    const auto ran = RunAttention(problem, inputs, {.threads = 1}, Storage::kRowMajor, std::nullopt,
                                  [&](Arguments& arguments) { wanted.AddTo(problem, arguments); });
    ASSERT_TRUE(ran.ok()) << ran.status();
    Outputs outputs = MakeOutputs(problem, Storage::kRowMajor);
    rapt_arguments arguments = ToC(inputs, outputs);
    from_c.AddTo(arguments);
    const ContextPtr context = MakeContext();
    const Result result = PlanAndRun(context.get(), ToC(problem), arguments, false, &outputs.plan);
    ASSERT_EQ(result.code, RAPT_OK) << result.message;
    for (Role role : problem.backward->gradients) {
      EXPECT_EQ(from_c.gradients[role].ToVector(), wanted.gradients[role].ToVector())
          << InfoOf(role).c;
    }
  }
}

TEST(CInterfaceTest, NamesTheInvalidFieldOfABackwardPass) {
  struct {
    const char* message;
    void (*change)(rapt_problem&);
  } const kCases[] = {
      {"gradients is 32768; it must be bits of rapt_gradient, up to 32767",
       [](rapt_problem& p) { p.gradients = 1 << 15; }},
      {"has_forward is set, but gradients is 0",
       [](rapt_problem& p) {
         p.gradients = 0;
         p.has_forward = 1;
       }},
      {"has_lse_gradient is set, but gradients is 0",
       [](rapt_problem& p) {
         p.gradients = 0;
         p.has_lse_gradient = 1;
       }},
      {"d_head_sink is wanted, but head_sink is not given",
       [](rapt_problem& p) { p.gradients = RAPT_D_HEAD_SINK; }},
      {"d_mask is wanted, but mask has type BOOL",
       [](rapt_problem& p) {
         p.gradients = RAPT_D_MASK;
         p.mask_dtype = RAPT_BOOL;
         std::fill_n(p.mask_shape, 4, 1);
       }},
      {"lse_gradient is set, but normalizer is sparsemax",
       [](rapt_problem& p) {
         p.normalizer = RAPT_SPARSEMAX;
         p.has_lse_gradient = 1;
       }},
      {"neither scores, lse nor present", [](rapt_problem& p) { p.wants_lse = 1; }},
  };
  const ContextPtr context = MakeContext();
  for (const auto& c : kCases) {
    rapt_problem problem = ToC(kSmall);
    problem.gradients = RAPT_D_QUERY;
    c.change(problem);
    rapt_plan* plan = nullptr;
    const Result result = Call(rapt_plan_create, context.get(), &problem, &plan);
    EXPECT_EQ(result.code, RAPT_INVALID_ARGUMENT) << c.message;
    EXPECT_THAT(result.message, HasSubstr(c.message));
  }
}

// --- Invalid calls -----------------------------------------------------------------------------

struct SmallCall {
  rapt_problem problem = ToC(kSmall);
  Inputs inputs;
  Outputs outputs = MakeOutputs(kSmall, Storage::kRowMajor);
  rapt_arguments arguments;

  SmallCall() {
    Rng rng(1);
    inputs = RandomInputs(kSmall, rng);
    arguments = ToC(inputs, outputs);
  }
};

TEST(CInterfaceTest, ZeroStridesMeanRowMajor) {
  SmallCall call;
  for (rapt_input* input : {&call.arguments.query, &call.arguments.key, &call.arguments.value}) {
    std::fill_n(input->strides, 4, 0);
  }
  std::fill_n(call.arguments.output.strides, 4, 0);
  const ContextPtr context = MakeContext();
  const Result result =
      PlanAndRun(context.get(), call.problem, call.arguments, false, &call.outputs.plan);
  ASSERT_EQ(result.code, RAPT_OK) << result.message;
  EXPECT_TRUE(Matches(kSmall, call.outputs, Attend(kSmall, call.inputs)));
}

TEST(CInterfaceTest, NamesTheInvalidField) {
  struct {
    const char* message;
    void (*change)(rapt_problem&);
  } const kCases[] = {
      {"dtype is 9", [](rapt_problem& p) { p.dtype = 9; }},
      {"dtype is 5", [](rapt_problem& p) { p.dtype = RAPT_BOOL; }},
      {"alignment is -1", [](rapt_problem& p) { p.alignment = -1; }},
      {"score_output is 5", [](rapt_problem& p) { p.score_output = 5; }},
      {"mask_dtype is 6", [](rapt_problem& p) { p.mask_dtype = 6; }},
      {"normalizer is 4; it must be from 0 to 3", [](rapt_problem& p) { p.normalizer = 4; }},
      {"head_alpha_dtype is 5", [](rapt_problem& p) { p.head_alpha_dtype = RAPT_BOOL; }},
      {"alpha is 2.5",
       [](rapt_problem& p) {
         p.normalizer = RAPT_ENTMAX;
         p.has_alpha = 1;
         p.alpha = 2.5;
       }},
      {"head_sink_dtype is 5", [](rapt_problem& p) { p.head_sink_dtype = RAPT_BOOL; }},
      {"head_sink has type FP16", [](rapt_problem& p) { p.head_sink_dtype = RAPT_FP16; }},
      {"score_function is 2; it must be from 0 to 1, dot_product or additive",
       [](rapt_problem& p) { p.score_function = 2; }},
      {"score_function is 256", [](rapt_problem& p) { p.score_function = 256; }},
      {"score_function is -1", [](rapt_problem& p) { p.score_function = -1; }},
      {"additive_weight is missing", [](rapt_problem& p) { p.score_function = RAPT_ADDITIVE; }},
      {"score_function is dot_product",
       [](rapt_problem& p) {
         p.additive_weight_dtype = RAPT_FP32;
         p.additive_weight_heads = 1;
       }},
      {"additive_weight has heads 3; it must be 1 or",
       [](rapt_problem& p) {
         p.score_function = RAPT_ADDITIVE;
         p.additive_weight_dtype = RAPT_FP32;
         p.additive_weight_heads = 3;
       }},
      {"left_window is -2",
       [](rapt_problem& p) {
         p.has_left_window = 1;
         p.left_window = -2;
       }},
      {"head size of query and key is 0", [](rapt_problem& p) { p.head_size = 0; }},
      {"batch is -1", [](rapt_problem& p) { p.batch = -1; }},
      {"query has 3 heads", [](rapt_problem& p) { p.query_heads = 3; }},
      {"softcap is -1", [](rapt_problem& p) { p.softcap = -1; }},
      {"dropout_probability is 1", [](rapt_problem& p) { p.dropout_probability = 1; }},
      {"mask [0, 0, 0, 0]", [](rapt_problem& p) { p.mask_dtype = RAPT_BOOL; }},
      {"struct_size is 0", [](rapt_problem& p) { p.struct_size = 0; }},
  };
  const ContextPtr context = MakeContext();
  for (const auto& c : kCases) {
    rapt_problem problem = ToC(kSmall);
    c.change(problem);
    rapt_plan* plan = nullptr;
    const Result result = Call(rapt_plan_create, context.get(), &problem, &plan);
    EXPECT_EQ(result.code, RAPT_INVALID_ARGUMENT) << c.message;
    EXPECT_THAT(result.message, HasSubstr(c.message));
    EXPECT_EQ(plan, nullptr) << c.message;
  }
}

TEST(CInterfaceTest, NamesTheInvalidArgument) {
  struct {
    const char* message;
    void (*change)(rapt_arguments&);
  } const kCases[] = {
      {"query has no data", [](rapt_arguments& a) { a.query.data = nullptr; }},
      {"key has stride 2", [](rapt_arguments& a) { a.key.strides[3] = 2; }},
      {"output has no data", [](rapt_arguments& a) { a.output.data = nullptr; }},
      {"key_lengths is null", [](rapt_arguments& a) { a.key_lengths = nullptr; }},
      {"struct_size is 7", [](rapt_arguments& a) { a.struct_size = 7; }},
  };
  const ContextPtr context = MakeContext();
  for (const auto& c : kCases) {
    SmallCall call;
    call.problem.has_key_lengths = 1;
    const int64_t lengths[] = {7, 3};
    call.arguments.key_lengths = lengths;
    c.change(call.arguments);
    std::string plan;
    const Result result = PlanAndRun(context.get(), call.problem, call.arguments, false, &plan);
    EXPECT_EQ(result.code, RAPT_INVALID_ARGUMENT) << c.message;
    EXPECT_THAT(result.message, HasSubstr(c.message));
  }
}

TEST(CInterfaceTest, RejectsAKeyLengthBeyondTheKeys) {
  SmallCall call;
  call.problem.has_key_lengths = 1;
  const int64_t lengths[] = {7, 8};
  call.arguments.key_lengths = lengths;
  const ContextPtr context = MakeContext();
  const Result result =
      PlanAndRun(context.get(), call.problem, call.arguments, false, &call.outputs.plan);
  EXPECT_EQ(result.code, RAPT_INVALID_ARGUMENT);
  EXPECT_THAT(result.message, HasSubstr("key_lengths[1] is 8"));
}

TEST(CInterfaceTest, RejectsAWorkspaceThatIsTooSmallOrUnaligned) {
  SmallCall call;
  const ContextPtr context = MakeContext();
  const PlanPtr plan = MakePlan(context.get(), call.problem);
  const size_t bytes = rapt_plan_workspace_bytes(plan.get());
  ASSERT_GT(bytes, 0u);
  AlignedBuffer workspace(bytes + 1);
  const auto run = [&](void* at, size_t size) {
    return Call(rapt_run, context.get(), plan.get(), &call.arguments, at, size);
  };
  EXPECT_THAT(run(workspace.data(), bytes - 1).message, HasSubstr("the plan needs"));
  EXPECT_THAT(run(workspace.data() + 1, bytes).message, HasSubstr("aligned to 64"));
  EXPECT_EQ(run(workspace.data(), bytes).code, RAPT_OK);
}

TEST(CInterfaceTest, RejectsInvalidContextOptions) {
  const auto create = [](int64_t threads, const char* backend, const char* isa) {
    const rapt_context_options options = {sizeof(options), threads, backend, isa};
    rapt_context* context = nullptr;
    Result result = Call(rapt_context_create, &options, &context);
    EXPECT_EQ(context, nullptr);
    return result;
  };
  EXPECT_THAT(create(0, nullptr, nullptr).message, HasSubstr("threads is 0"));
  EXPECT_THAT(create(int64_t{1} << 32 | 1, nullptr, nullptr).message, HasSubstr("from 1 to 1024"));
  EXPECT_THAT(create(1, "gpu", nullptr).message, HasSubstr("backend is 'gpu'"));
  EXPECT_THAT(create(1, nullptr, "mmx").message, HasSubstr("isa is 'mmx'"));
  EXPECT_EQ(create(1, nullptr, "mmx").code, RAPT_INVALID_ARGUMENT);
}

TEST(CInterfaceTest, RejectsAPlanForFewerThreads) {
  SmallCall call;
  const ContextPtr one = MakeContext(1), two = MakeContext(2);
  const PlanPtr plan = MakePlan(one.get(), call.problem);
  const Result result = Call(rapt_run, two.get(), plan.get(), &call.arguments, nullptr, size_t{0});
  EXPECT_EQ(result.code, RAPT_INVALID_ARGUMENT);
  EXPECT_THAT(result.message, HasSubstr("the plan allows 1"));
}

// --- Messages and versions ----------------------------------------------------------------------

TEST(CInterfaceTest, TruncatesTheMessageToItsBuffer) {
  rapt_problem problem = ToC(kSmall);
  problem.batch = -1;
  const ContextPtr context = MakeContext();
  rapt_plan* plan = nullptr;
  char message[9] = "????????";
  EXPECT_EQ(rapt_plan_create(context.get(), &problem, &plan, message, 6), RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message, "batch");
  EXPECT_EQ(message[6], '?');
  EXPECT_EQ(rapt_plan_create(context.get(), &problem, &plan, nullptr, 6), RAPT_INVALID_ARGUMENT);
}

TEST(CInterfaceTest, AcceptsTheStructOfAnOlderCaller) {
  rapt_problem problem = ToC(kSmall);
  problem.struct_size = offsetof(rapt_problem, scale);
  problem.softcap = -1;  // Beyond the size that the caller states.
  const ContextPtr context = MakeContext();
  EXPECT_NE(MakePlan(context.get(), problem), nullptr);
}

TEST(CInterfaceTest, RejectsFieldsOfANewerCallerUnlessTheyAreZero) {
  struct {
    rapt_problem known;
    int64_t unknown;
  } newer = {ToC(kSmall), 0};
  newer.known.struct_size = sizeof(newer);
  const ContextPtr context = MakeContext();
  EXPECT_NE(MakePlan(context.get(), newer.known), nullptr);
  newer.unknown = 1;
  rapt_plan* plan = nullptr;
  const Result result = Call(rapt_plan_create, context.get(), &newer.known, &plan);
  EXPECT_EQ(result.code, RAPT_UNIMPLEMENTED);
  EXPECT_THAT(result.message, HasSubstr("does not know"));
}

// --- Threads ------------------------------------------------------------------------------------

TEST(CInterfaceTest, ManyThreadsShareOneContextAndOnePlan) {
  const ContextPtr context = MakeContext(2);
  SmallCall first;
  const PlanPtr plan = MakePlan(context.get(), first.problem);
  const Expected expected = Attend(kSmall, first.inputs);
  std::vector<std::thread> callers;
  callers.reserve(4);
  for (int n = 0; n < 4; ++n) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        SmallCall call;
        const Result result =
            Call(rapt_run, context.get(), plan.get(), &call.arguments, nullptr, size_t{0});
        EXPECT_EQ(result.code, RAPT_OK) << result.message;
        EXPECT_TRUE(Matches(kSmall, call.outputs, expected));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(CInterfaceTest, DestroyingNullIsANoOp) {
  rapt_context_destroy(nullptr);
  rapt_plan_destroy(nullptr);
}

}  // namespace
}  // namespace rapt::test
