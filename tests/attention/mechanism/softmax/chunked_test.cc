// Attention in chunks equals attention in one call, for all chunk boundaries.
#include "attention/mechanism/softmax/chunked.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "attention/half.h"
#include "attention/mechanism/softmax/softmax_state.h"
#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

constexpr uint64_t kSeed = 20261121;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr DType kFloatTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                 DType::kFloat64};

// Returns rows [begin, begin + count) of the axis. An axis of 1, which broadcasts, is unchanged.
template <typename View>
View SliceOf(View view, int axis, RowRange rows) {
  if (view.dims[axis] == 1 && view.strides[axis] == 0) return view;
  view.data += rows.begin * view.strides[axis] * SizeOf(view.dtype);
  view.dims[axis] = rows.count;
  return view;
}

TensorView MaskView(const Tensor& mask) {
  TensorView view = mask.View();
  for (int axis = 0; axis < 4; ++axis) {
    if (view.dims[axis] == 1) view.strides[axis] = 0;
  }
  return view;
}

// Returns exactly `bytes` bytes that read as NaN.
AlignedBuffer NanFilled(int64_t bytes) {
  AlignedBuffer buffer(bytes);
  std::fill_n(buffer.data(), bytes, std::byte{0xFF});
  return buffer;
}

class ChunkedRun {
 public:
  ChunkedRun(const ChunkedPlan& plan, const Inputs& inputs, int threads)
      : plan_(plan),
        problem_(plan.problem),
        inputs_(inputs),
        key_(JoinRows(inputs.past_key, inputs.key)),
        value_(JoinRows(inputs.past_value, inputs.value)),
        workspace_(NanFilled(plan.workspace_bytes)),
        pool_(threads) {
    const Problem& p = problem_;
    outputs_.output = Tensor(p.dtype, {p.batch, p.query_heads, p.query_length, p.value_head_size});
    if (p.wants_lse) {
      outputs_.lse = Tensor(p.lse_dtype(), {p.batch, p.query_heads, p.query_length, 1});
    }
    if (p.score_output) {
      outputs_.scores = Tensor(p.dtype, {p.batch, p.query_heads, p.query_length, p.total_keys()});
    }
    outputs_.plan = plan.full.Describe();
  }

  Outputs Run() {
    plan_.keys_stream() ? StreamKeys() : StreamQueries();
    return std::move(outputs_);
  }

 private:
  void RunChunk(int64_t n, const Arguments& arguments) {
    const absl::Status status = rapt::Run(plan_.PlanOf(n), arguments, workspace_.span(), pool_);
    ASSERT_TRUE(status.ok()) << status << " at chunk " << n;
  }

  void StreamKeys() {
    AlignedBuffer memory = NanFilled(plan_.state_bytes);
    const Arguments::State state = StateIn(problem_, plan_.full.state_dtype, memory.data());
    ClearState(state);
    for (int64_t n = 0; n < plan_.chunks(); ++n) {
      const RowRange keys = plan_.Chunk(n);
      Arguments arguments;
      arguments.inputs[Role::kQ] = inputs_.query.View();
      arguments.inputs[Role::kK] = SliceOf(key_.View(), 2, keys);
      arguments.inputs[Role::kV] = SliceOf(value_.View(), 2, keys);
      if (problem_.mask) arguments.inputs[Role::kMask] = SliceOf(MaskView(*inputs_.mask), 3, keys);
      if (problem_.bias) arguments.inputs[Role::kBias] = SliceOf(MaskView(*inputs_.bias), 3, keys);
      SetTables(arguments);
      if (inputs_.relative_query) {
        arguments.inputs[Role::kRelativeQuery] = inputs_.relative_query->View();
      }
      arguments.key_lengths = inputs_.key_lengths;
      arguments.state = state;
      if (outputs_.scores) {
        arguments.outputs[Role::kScores] = SliceOf(outputs_.scores->MutableView(), 3, keys);
      }
      RunChunk(n, arguments);
    }
    Arguments finish;
    finish.state = state;
    if (inputs_.head_sink) finish.inputs[Role::kHeadSink] = inputs_.head_sink->View();
    const int64_t piece = plan_.chunking.query_chunk;
    for (int64_t n = 0; n < CountChunks(problem_.query_length, piece); ++n) {
      const RowRange rows = ChunkOf(problem_.query_length, piece, n);
      const MutableTensorView output = SliceOf(outputs_.output.MutableView(), 2, rows);
      const MutableTensorView lse =
          outputs_.lse ? SliceOf(outputs_.lse->MutableView(), 2, rows) : MutableTensorView();
      for (int64_t task = 0; task < problem_.batch * problem_.query_heads; ++task) {
        FinishRows(problem_, finish, rows.begin, output, lse, task);
      }
    }
  }

  void StreamQueries() {
    for (int64_t n = 0; n < plan_.chunks(); ++n) {
      const RowRange queries = plan_.Chunk(n);
      Arguments arguments;
      arguments.inputs[Role::kQ] = SliceOf(inputs_.query.View(), 2, queries);
      arguments.inputs[Role::kK] = key_.View();
      arguments.inputs[Role::kV] = value_.View();
      if (problem_.mask)
        arguments.inputs[Role::kMask] = SliceOf(MaskView(*inputs_.mask), 2, queries);
      if (problem_.bias)
        arguments.inputs[Role::kBias] = SliceOf(MaskView(*inputs_.bias), 2, queries);
      if (inputs_.head_sink) arguments.inputs[Role::kHeadSink] = inputs_.head_sink->View();
      SetTables(arguments);
      if (inputs_.relative_query) {
        arguments.inputs[Role::kRelativeQuery] =
            SliceOf(inputs_.relative_query->View(), 2, queries);
      }
      arguments.key_lengths = inputs_.key_lengths;
      arguments.outputs[Role::kY] = SliceOf(outputs_.output.MutableView(), 2, queries);
      if (outputs_.lse) {
        arguments.outputs[Role::kLse] = SliceOf(outputs_.lse->MutableView(), 2, queries);
      }
      if (outputs_.scores) {
        arguments.outputs[Role::kScores] = SliceOf(outputs_.scores->MutableView(), 2, queries);
      }
      RunChunk(n, arguments);
    }
  }

  // Whole in every chunk.
  void SetTables(Arguments& arguments) const {
    const Inputs& in = inputs_;
    if (in.alibi_slopes) arguments.inputs[Role::kAlibiSlopes] = in.alibi_slopes->View();
    if (in.bias_table) arguments.inputs[Role::kBiasTable] = in.bias_table->View();
    if (in.relative_bias) arguments.inputs[Role::kRelativeBias] = in.relative_bias->View();
    if (in.relative_keys) arguments.inputs[Role::kRelativeKeys] = MaskView(*in.relative_keys);
    if (in.relative_values) arguments.inputs[Role::kRelativeValues] = MaskView(*in.relative_values);
    if (in.additive_weight) {
      arguments.inputs[Role::kAdditiveWeight] = MaskView(*in.additive_weight);
    }
  }

  const ChunkedPlan& plan_;
  const Problem& problem_;
  const Inputs& inputs_;
  const Tensor key_, value_;
  AlignedBuffer workspace_;
  ThreadPool pool_;
  Outputs outputs_;
};

void ExpectChunkedConforms(const Problem& problem, const Inputs& inputs, const Chunking& chunking,
                           int threads = 1) {
  const Expected expected = Attend(problem, inputs);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name() + " " + ToText(problem) + " query_chunk " +
                 std::to_string(chunking.query_chunk) + " key_chunk " +
                 std::to_string(chunking.key_chunk) + " seed " + std::to_string(kSeed));
    PlanOptions options = target.Options(threads);
    options.has_lanes = true;
    const absl::StatusOr<ChunkedPlan> plan = MakeChunkedPlan(problem, chunking, options);
    // A device may decline a problem or its chunks.
    if (absl::IsUnimplemented(plan.status()) && target.backend == "cudnn") continue;
    ASSERT_TRUE(plan.ok()) << plan.status();
    const Outputs outputs = ChunkedRun(*plan, inputs, plan->full.threads).Run();
    EXPECT_TRUE(Matches(problem, outputs, expected)) << "plan " << outputs.plan;
  }
}

struct Feature {
  const char* name;
  void (*change)(Problem& p);
};

constexpr Feature kFeatures[] = {
    {"plain", [](Problem&) {}},
    {"grouped_heads", [](Problem& p) { p.kv_heads = 2; }},
    {"softcap_and_scale", [](Problem& p) { p.softcap = 1.5, p.scale = 0.7; }},
    {"causal", [](Problem& p) { p.causal = true; }},
    {"causal_bottom_right",
     [](Problem& p) { p.causal = true, p.alignment = Alignment::kBottomRight; }},
    {"causal_bottom_right_more_queries",
     [](Problem& p) {
       p.causal = true, p.alignment = Alignment::kBottomRight;
       p.query_length = 23, p.key_length = 17;  // rows without a key
     }},
    {"sink", [](Problem& p) { p.head_sink = DType::kFloat32; }},
    {"sink_of_rows_without_keys",
     [](Problem& p) {
       p.head_sink = p.dtype;
       p.causal = true, p.alignment = Alignment::kBottomRight;
       p.query_length = 23, p.key_length = 17;
     }},
    {"alibi", [](Problem& p) { p.alibi = true; }},
    {"alibi_slopes_key_lengths",
     [](Problem& p) {
       p.alibi_slopes = AlibiSlopes{p.dtype, p.batch}, p.has_key_lengths = true;
       p.alignment = Alignment::kOnnx;
     }},
    {"bias_table_causal_past",
     [](Problem& p) {
       p.bias_table = BiasTable{DType::kFloat32, 8};
       p.max_distance = 30, p.causal = true, p.past_length = 20;
     }},
    {"relative_bias_bottom_right",
     [](Problem& p) {
       p.relative_bias = RelativeBias{p.dtype, 4, 9};
       p.alignment = Alignment::kBottomRight, p.causal = true;
     }},
    {"relative_vectors",
     [](Problem& p) {
       p.relative_keys = RelativeVectors{p.dtype, 4, 21};
       p.relative_values = RelativeVectors{DType::kFloat32, 1, 201};
       p.causal = true, p.past_length = 20;
     }},
    {"relative_query_key_lengths",
     [](Problem& p) {
       p.relative_keys = RelativeVectors{DType::kFloat32, 1, 41};
       p.relative_values = RelativeVectors{p.dtype, 4, 5};
       p.has_relative_query = true, p.has_key_lengths = true;
       p.alignment = Alignment::kBottomRight;
     }},
    {"additive_causal",
     [](Problem& p) {
       p.score_function = ScoreFunction::kAdditive;
       p.additive_weight = AdditiveWeight{p.dtype, 1};
       p.causal = true;
     }},
    {"window", [](Problem& p) { p.left_window = 5, p.right_window = 3; }},
    {"window_bottom_right",
     [](Problem& p) { p.left_window = 9, p.alignment = Alignment::kBottomRight; }},
    {"past_causal", [](Problem& p) { p.causal = true, p.past_length = 20; }},
    {"key_lengths", [](Problem& p) { p.has_key_lengths = true; }},
    {"key_lengths_causal", [](Problem& p) { p.has_key_lengths = true, p.causal = true; }},
    {"key_lengths_causal_bottom_right",
     [](Problem& p) {
       p.has_key_lengths = true, p.causal = true, p.alignment = Alignment::kBottomRight;
     }},
    {"key_lengths_causal_onnx",
     [](Problem& p) { p.has_key_lengths = true, p.causal = true, p.alignment = Alignment::kOnnx; }},
    {"past_and_key_lengths", [](Problem& p) { p.has_key_lengths = true, p.past_length = 11; }},
    {"bool_mask",
     [](Problem& p) {
       p.mask = MaskShape{DType::kBool, {p.batch, p.query_heads, p.query_length, p.key_length}};
     }},
    {"float_mask",
     [](Problem& p) {
       p.mask = MaskShape{DType::kFloat32, {1, 1, p.query_length, p.key_length}};
     }},
    {"half_mask",
     [](Problem& p) {
       p.mask = MaskShape{DType::kFloat16, {1, p.query_heads, 1, p.key_length}};
     }},
    {"fp64_mask",
     [](Problem& p) {
       p.mask = MaskShape{DType::kFloat64, {p.batch, 1, 1, p.key_length}};
     }},
    {"mask_of_one_key",
     [](Problem& p) {
       p.mask = MaskShape{DType::kBool, {1, 1, 9, 1}};
     }},
    {"bias",
     [](Problem& p) {
       p.bias = MaskShape{p.dtype, {p.batch, p.query_heads, p.query_length, p.key_length}};
     }},
    {"bias_of_a_row_and_bool_mask",
     [](Problem& p) {
       p.bias = MaskShape{DType::kFloat32, {1, p.query_heads, 1, p.key_length}};
       p.mask = MaskShape{DType::kBool, {p.batch, 1, p.query_length, p.key_length}};
     }},
    {"softmax_in_fp64", [](Problem& p) { p.softmax_in_fp64 = true; }},
    {"dropout",
     [](Problem& p) {
       p.dropout = Dropout{0.3, 77};
     }},
    {"scores", [](Problem& p) { p.score_output = ScoreOutput::kScores; }},
    {"biased_scores",
     [](Problem& p) { p.score_output = ScoreOutput::kBiased, p.causal = true, p.softcap = 2; }},
};

class ChunkedTest : public ::testing::TestWithParam<Feature> {
 protected:
  static Problem Make(DType dtype) {
    Problem problem{.dtype = dtype,
                    .batch = 2,
                    .query_heads = 4,
                    .kv_heads = 4,
                    .query_length = 9,
                    .key_length = 67,
                    .head_size = 8,
                    .value_head_size = 11,
                    .wants_lse = true};
    GetParam().change(problem);
    return problem;
  }
};

TEST_P(ChunkedTest, KeyChunksEqualOneCall) {
  for (const DType dtype : kFloatTypes) {
    const Problem problem = Make(dtype);
    Rng rng(kSeed);
    const Inputs inputs = RandomInputs(problem, rng);
    for (const int64_t chunk : {1, 13, 64, 66, 67, 1000}) {
      ExpectChunkedConforms(problem, inputs, {Streaming::kKeys, 4, chunk});
    }
  }
}

TEST_P(ChunkedTest, QueryChunksEqualOneCall) {
  for (const DType dtype : kFloatTypes) {
    const Problem problem = Make(dtype);
    Rng rng(kSeed);
    const Inputs inputs = RandomInputs(problem, rng);
    for (const int64_t chunk : {1, 5, 9, 1000}) {
      ExpectChunkedConforms(problem, inputs, {Streaming::kQueries, chunk, 7});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, ChunkedTest, ::testing::ValuesIn(kFeatures),
                         [](const auto& info) { return std::string(info.param.name); });

Problem Small() {
  return {.batch = 1,
          .query_heads = 2,
          .kv_heads = 1,
          .query_length = 5,
          .key_length = 40,
          .head_size = 16,
          .value_head_size = 16,
          .wants_lse = true};
}

TEST(ChunkedEdgeTest, WeightsAreAvailableIfQueriesStream) {
  Problem problem = Small();
  problem.causal = true;
  problem.score_output = ScoreOutput::kWeights;
  Rng rng(kSeed);
  ExpectChunkedConforms(problem, RandomInputs(problem, rng), {Streaming::kQueries, 2, 40});
}

TEST(ChunkedEdgeTest, SplitKeysAreFolded) {
  Problem problem = Small();
  problem.query_length = 1;
  problem.key_length = 5'500;
  Rng rng(kSeed);
  const Inputs inputs = RandomInputs(problem, rng);
  const Chunking chunking{Streaming::kKeys, 1, 2'500};
  const absl::StatusOr<ChunkedPlan> plan =
      MakeChunkedPlan(problem, chunking, {.backend = "cpu", .threads = 3});
  ASSERT_TRUE(plan.ok());
  ASSERT_GT(plan->full.stages.size(), 1) << "nothing is tested";
  ExpectChunkedConforms(problem, inputs, chunking, 3);
}

TEST(ChunkedEdgeTest, NoKeysGiveZeros) {
  Problem problem = Small();
  problem.key_length = 0;
  Rng rng(kSeed);
  for (const Streaming streaming : {Streaming::kKeys, Streaming::kQueries}) {
    ExpectChunkedConforms(problem, RandomInputs(problem, rng), {streaming, 2, 3});
  }
}

TEST(ChunkedEdgeTest, NoQueriesGiveNothing) {
  Problem problem = Small();
  problem.query_length = 0;
  Rng rng(kSeed);
  for (const Streaming streaming : {Streaming::kKeys, Streaming::kQueries}) {
    ExpectChunkedConforms(problem, RandomInputs(problem, rng), {streaming, 2, 3});
  }
}

// The first chunk, the last one and one between are fully masked.
TEST(ChunkedEdgeTest, MaskedKeysNeverMatter) {
  Problem problem = Small();
  problem.mask = MaskShape{DType::kBool, {1, 1, 1, 40}};
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  for (int64_t j = 0; j < 40; ++j) {
    const bool visible = (j >= 10 && j < 20) || (j >= 33 && j < 36);
    inputs.mask->Set(0, 0, 0, j, visible ? 1 : 0);
    if (visible) continue;
    inputs.key.Set(0, 0, j, 3, kNan);
    inputs.value.Set(0, 0, j, 2, j % 2 == 0 ? kInf : kNan);
  }
  for (const int64_t chunk : {1, 5, 7, 10}) {
    ExpectChunkedConforms(problem, inputs, {Streaming::kKeys, 5, chunk});
  }
}

TEST(ChunkedEdgeTest, AVisibleNanPropagates) {
  Problem problem = Small();
  problem.causal = true;
  problem.query_length = 40;
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.value.Set(0, 0, 22, 3, kNan);
  inputs.key.Set(0, 0, 31, 0, kNan);
  for (const int64_t chunk : {1, 9, 23}) {
    ExpectChunkedConforms(problem, inputs, {Streaming::kKeys, 40, chunk});
  }
}

TEST(ChunkedEdgeTest, LargeScoresDoNotOverflow) {
  for (const DType dtype : kFloatTypes) {
    Problem problem = Small();
    problem.dtype = dtype;
    problem.scale = 40;
    Rng rng(kSeed);
    const Inputs inputs = RandomInputs(problem, rng);
    ExpectChunkedConforms(problem, inputs, {Streaming::kKeys, 5, 3});
  }
}

// --- The plan ------------------------------------------------------------------------------------

absl::Status PlanStatus(const Problem& problem, const Chunking& chunking) {
  return MakeChunkedPlan(problem, chunking, {}).status();
}

TEST(ChunkedPlanTest, MemoryDoesNotDependOnTheStreamedLength) {
  Problem problem = Small();
  problem.query_length = 512;
  const auto bytes = [&](int64_t keys) {
    problem.key_length = keys;
    const auto plan = MakeChunkedPlan(problem, {Streaming::kKeys, 64, 1024}, {.threads = 2});
    EXPECT_TRUE(plan.ok()) << plan.status();
    return std::pair(plan->state_bytes, plan->workspace_bytes);
  };
  EXPECT_EQ(bytes(10'240), bytes(int64_t{1} << 36));
}

TEST(ChunkedPlanTest, IsTheSameAtEveryChunk) {
  Problem problem = Small();
  problem.causal = true;
  const auto plan = MakeChunkedPlan(problem, {Streaming::kKeys, 5, 16}, {.threads = 2});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->chunks(), 3);
  EXPECT_EQ(plan->PlanOf(0).Describe(), plan->PlanOf(1).Describe());
  EXPECT_EQ(plan->Chunk(2).begin, 32);
  EXPECT_EQ(plan->Chunk(2).count, 8);
}

TEST(ChunkedPlanTest, ChunkFlopsAddUpToThoseOfOneCall) {
  Problem problem = Small();
  problem.query_length = problem.key_length = 8192;
  problem.causal = true;
  const absl::StatusOr<Plan> whole = MakePlan(problem, {.backend = "cpu", .threads = 2});
  ASSERT_TRUE(whole.ok()) << whole.status();
  for (const Streaming streaming : {Streaming::kKeys, Streaming::kQueries}) {
    const auto plan =
        MakeChunkedPlan(problem, {streaming, 512, 512}, {.backend = "cpu", .threads = 2});
    ASSERT_TRUE(plan.ok()) << plan.status();
    double flops = 0;
    for (int64_t n = 0; n < plan->chunks(); ++n) flops += plan->PlanOf(n).flops;
    EXPECT_NEAR(flops / whole->flops, 1, 0.02) << static_cast<int>(streaming);
  }
}

TEST(ChunkedPlanTest, RejectsOtherNormalizersIfKeysStream) {
  Problem problem = Small();
  problem.normalizer = Normalizer::kEntmax15;
  problem.wants_lse = false;
  const absl::Status status = PlanStatus(problem, {Streaming::kKeys, 5, 16});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              ::testing::HasSubstr("normalizer is entmax15, which needs all keys at once"));
  EXPECT_TRUE(PlanStatus(problem, {Streaming::kQueries, 5, 16}).ok());
}

TEST(ChunkedPlanTest, RejectsWeightsIfKeysStream) {
  Problem problem = Small();
  problem.score_output = ScoreOutput::kWeights;
  const absl::Status status = PlanStatus(problem, {Streaming::kKeys, 5, 16});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("weights"));
  EXPECT_TRUE(PlanStatus(problem, {Streaming::kQueries, 5, 16}).ok());
}

TEST(ChunkedPlanTest, RejectsChunksWithoutRows) {
  for (const Chunking& chunking : {Chunking{Streaming::kKeys, 0, 16}, {Streaming::kKeys, 1, -1}}) {
    const absl::Status status = PlanStatus(Small(), chunking);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("must be at least 1"));
  }
}

TEST(ChunkedPlanTest, RejectsAMaskThatEndsBeforeTheKeys) {
  Problem problem = Small();
  problem.mask = MaskShape{DType::kBool, {1, 1, 1, 39}};
  EXPECT_EQ(PlanStatus(problem, {Streaming::kKeys, 5, 16}).code(),
            absl::StatusCode::kInvalidArgument);
}

// --- The algebra ---------------------------------------------------------------------------------

TEST(FoldIntoTest, ThousandsOfPartsCostNoPrecision) {
  std::vector<float> o = {0}, one = {1};
  float max = -std::numeric_limits<float>::infinity(), sum = 0;
  for (int n = 0; n < 20'000; ++n) {
    FoldInto<float>(absl::MakeSpan(o), max, sum, one, std::sin(static_cast<float>(n)));
  }
  EXPECT_EQ(o[0] / sum, 1) << "a mean of ones";
}

TEST(FoldIntoTest, AnEmptyPartChangesNothingAndAnEmptyRowBecomesThePart) {
  const float empty = -std::numeric_limits<float>::infinity();
  std::vector<float> o = {std::nanf("")}, part = {0.1f}, hole = {std::nanf("")};
  float max = empty, sum = 0;
  FoldInto<float>(absl::MakeSpan(o), max, sum, hole, empty);
  EXPECT_EQ(max, empty);
  FoldInto<float>(absl::MakeSpan(o), max, sum, part, 3.25f);
  FoldInto<float>(absl::MakeSpan(o), max, sum, hole, empty);
  EXPECT_EQ(o[0], 0.1f);
  EXPECT_EQ(max, 3.25f);
  EXPECT_EQ(sum, 1);
}

TEST(FloatTo16Test, RoundsLikeTheConversionsFromDouble) {
  for (uint32_t bits = 0; bits < 0xFFFFF000; bits += 0x3FF) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    if (std::isnan(value)) continue;
    ASSERT_EQ(FloatToHalf(value), DoubleToHalf(value)) << value;
    ASSERT_EQ(FloatToBFloat16(value), DoubleToBFloat16(value)) << value;
  }
  const float nan = std::nanf("");
  EXPECT_TRUE(std::isnan(HalfToDouble(FloatToHalf(nan))));
  EXPECT_TRUE(std::isnan(BFloat16ToDouble(FloatToBFloat16(nan))));
}

}  // namespace
}  // namespace rapt::test
