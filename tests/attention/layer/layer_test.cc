#include "attention/layer/layer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "tests/attention/layer/layer_oracle.h"
#include "tests/support/run_attention.h"
#include "tests/support/run_operator.h"
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64};

struct Got {
  Tensor y, weights, averaged;
};

Got OutputsOf(const LayerCase& c) {
  return {Tensor(c.dtype, {1, c.batch, c.queries, c.y_size()}, Storage::kMisaligned, 64),
          Tensor(c.dtype, {c.batch, c.heads(), c.queries, c.keys()}, Storage::kMisaligned, 64),
          Tensor(c.dtype, {1, c.batch, c.queries, c.keys()}, Storage::kMisaligned, 64)};
}

Arguments ArgumentsOf(const LayerCase& c, const LayerTensors& t, Got& got) {
  Arguments a;
  a.inputs[Role::kQ] = t.query.View();
  if (c.tokens) a.inputs[Role::kK] = t.key.View();
  if (c.has_value) a.inputs[Role::kV] = t.value.View();
  if (c.mask) a.inputs[Role::kMask] = t.mask.View();
  if (c.has_ids) a.inputs[kInputIds] = t.ids.View();
  a.key_lengths = c.lengths;
  a.outputs[Role::kY] = got.y.MutableView();
  if (c.wants_weights) a.outputs[kLayerWeights] = got.weights.MutableView();
  if (c.wants_averaged_weights) a.outputs[kAveragedWeights] = got.averaged.MutableView();
  return a;
}

std::shared_ptr<const Layer> MakeLayerOf(const LayerCase& c, const LayerTensors& t) {
  ThreadPool pool(2);
  absl::StatusOr<std::shared_ptr<const Layer>> layer = MakeLayer(c.config, WeightsOf(c, t), pool);
  EXPECT_TRUE(layer.ok()) << layer.status();
  return *layer;
}

std::shared_ptr<const TensorOperator> OperatorOf(const LayerCase& c, const LayerTensors& t) {
  auto op = MakeLayerCall(MakeLayerOf(c, t), CallOf(c));
  EXPECT_TRUE(op.ok()) << op.status();
  return *op;
}

Got RunLayer(const LayerCase& c, const LayerTensors& t, const PlanOptions& options) {
  const auto op = OperatorOf(c, t);
  Got got = OutputsOf(c);
  const Arguments arguments = ArgumentsOf(c, t, got);
  EXPECT_TRUE(op->CheckData(arguments).ok());
  RunOperator(*op, arguments, options);
  for (const Tensor* tensor : {&got.y, &got.weights, &got.averaged}) {
    EXPECT_TRUE(tensor->GapsIntact());
  }
  return got;
}

void ExpectDefinition(const LayerCase& c, uint64_t seed = 1, int threads = 1) {
  const LayerTensors tensors = RandomLayer(c, seed);
  const LayerWant want = WantOf(c, tensors);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(absl::StrCat(NameOf(c.dtype), " by ", NameOf(c.weight), " on ", target.Name()));
    const Got got = RunLayer(c, tensors, target.Options(threads));
    EXPECT_TRUE(IsClose(c.dtype, got.y, want.y, want.most_score));
    if (c.wants_weights) {
      EXPECT_TRUE(IsClose(c.dtype, got.weights, want.weights, want.most_score));
    }
    if (c.wants_averaged_weights) {
      EXPECT_TRUE(IsClose(c.dtype, got.averaged, want.averaged, want.most_score));
    }
  }
}

// Slow pairs are divided, fast ones kept, and one is in between.
constexpr RopeScaling kYarn{.type = RopeScaling::Type::kYarn,
                            .factor = 8,
                            .original_length = 64,
                            .slow = 0.5,
                            .fast = 8,
                            .truncate = false,
                            .attention_factor = 1.25};

// Each with the features of a model.
std::vector<LayerCase> Models() {
  LayerCase torch{.has_extra_key = true, .mask = DType::kBool, .mask_shape = {5, 5}};
  LayerCase cross{.tokens = 7, .has_value = true, .is_causal = true, .lengths = {7, 2}};
  cross.config.key_embed_size = 17;
  cross.config.value_embed_size = 9;
  cross.config.value_head_size = 3;
  LayerCase llama{.has_biases = false, .has_norms = true, .has_sinks = true, .is_causal = true};
  llama.config = {.embed_size = 40, .query_heads = 6, .kv_heads = 2, .head_size = 10};
  llama.config.rope_theta = 10000;
  LayerCase gpt_oss = llama;
  gpt_oss.config.is_causal = true;
  gpt_oss.config.sliding_window = 2;
  gpt_oss.config.rope_scaling = kYarn;
  gpt_oss.lengths = {5, 2};  // the last query of a batch row sees nothing
  LayerCase mistral = gpt_oss;
  mistral.has_norms = mistral.has_sinks = false;
  LayerCase gpt2{.transposed = true, .is_causal = true, .lengths = {3, 5}};
  LayerCase bert{.has_ids = true};
  bert.config.pad_token_id = 0;
  LayerCase t5{.has_biases = false, .buckets = 8};
  t5.config.scale = 1;
  t5.config.max_distance = 16;
  LayerCase bahdanau{.tokens = 6, .has_v = false, .has_o = false, .has_biases = false};
  bahdanau.config = {.embed_size = 12, .query_heads = 1, .head_size = 7, .value_head_size = 10};
  bahdanau.config.key_embed_size = 10;
  bahdanau.config.score_function = ScoreFunction::kAdditive;
  LayerCase luong{.tokens = 6, .has_q = false, .has_k = false, .has_v = false, .has_o = false};
  luong.config = {.embed_size = 12, .query_heads = 1, .scale = 1};
  luong.has_biases = false;
  LayerCase encoded{.tokens = 6};
  encoded.config.positional_base = 10000;
  return {torch, cross, llama, gpt_oss, mistral, gpt2, bert, t5, bahdanau, luong, encoded};
}

TEST(LayerTest, IsTheDefinitionInEveryType) {
  for (const DType dtype : kTypes) {
    for (LayerCase c : Models()) {
      c.dtype = dtype;
      c.weight = dtype;
      ExpectDefinition(c);
    }
  }
}

TEST(LayerTest, WidensWeightsOfOtherTypes) {
  for (const DType dtype : kTypes) {
    for (const DType weight : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      LayerCase c{.dtype = dtype, .weight = weight, .queries = 11};
      c.has_sinks = true;
      ExpectDefinition(c);
      c.transposed = true;
      c.queries = 1;
      ExpectDefinition(c);
    }
  }
}

// Sizes around those of registers, panels, depth blocks and tasks.
TEST(LayerTest, ComputesEverySize) {
  const struct {
    int64_t queries, embed, heads, head_size, output;
  } sizes[] = {{1, 1, 1, 1, 1},     {1, 33, 3, 5, 65},    {2, 64, 1, 64, 64},
               {3, 63, 2, 80, 129}, {8, 300, 2, 16, 7},   {9, 257, 5, 13, 130},
               {17, 31, 1, 100, 1}, {49, 512, 4, 16, 70}, {97, 40, 3, 24, 200}};
  for (const DType dtype : kTypes) {
    for (const auto& [queries, embed, heads, head_size, output] : sizes) {
      LayerCase c{.dtype = dtype, .weight = dtype, .batch = 1, .queries = queries};
      c.config = {.embed_size = embed, .query_heads = heads, .head_size = head_size};
      c.output_size = output;
      c.wants_averaged_weights = false;
      SCOPED_TRACE(absl::StrCat(queries, " x ", embed));
      ExpectDefinition(c);
    }
  }
}

// The sums of few rows, of many, and of copied ones are divided at different depths.
TEST(LayerTest, ComputesDeepProducts) {
  for (const DType dtype : kTypes) {
    LayerCase c{.dtype = dtype, .weight = dtype, .batch = 1, .queries = 3};
    c.config = {.embed_size = 2100, .query_heads = 1, .head_size = 4};
    c.output_size = 3;
    ExpectDefinition(c);
    c.queries = 13;
    ExpectDefinition(c);
    c.config.embed_size = 1111;  // half a pair
    ExpectDefinition(c);
  }
}

// A copy of a tensor between two pages that can't be read: at the end of its memory, or at the
// beginning.
class Guarded {
 public:
  Guarded(const TensorView& tensor, int64_t bytes, bool at_end) : view_(tensor) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t inner = (static_cast<size_t>(bytes) + page - 1) / page * page;
    bytes_ = inner + 2 * page;
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(memory_, MAP_FAILED);
    auto* const first = static_cast<std::byte*>(memory_);
    std::byte* const data =
        first + page + (at_end ? inner - static_cast<size_t>(bytes) : size_t{0});
    std::memcpy(data, tensor.data, static_cast<size_t>(bytes));
    EXPECT_EQ(mprotect(first, page, PROT_NONE), 0);
    EXPECT_EQ(mprotect(first + page + inner, page, PROT_NONE), 0);
    view_.data = data;
  }
  ~Guarded() { munmap(memory_, bytes_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  const TensorView& view() const { return view_; }

 private:
  TensorView view_;
  size_t bytes_ = 0;
  void* memory_ = nullptr;
};

// Rows are read where they lie, so a vector too many would be beyond the request's memory.
TEST(LayerTest, ReadsNothingBesideItsInput) {
  for (const DType dtype : kTypes) {
    for (const int64_t embed : {1, 31, 66, 2050}) {
      for (const int64_t queries : {1, 9, 31, 97}) {
        LayerCase c{.dtype = dtype, .weight = dtype, .batch = 1, .queries = queries};
        c.config = {.embed_size = embed, .query_heads = 1, .head_size = 4};
        c.wants_weights = c.wants_averaged_weights = false;
        const LayerTensors t = RandomLayer(c, 1);
        const int64_t bytes = queries * embed * SizeOf(dtype);
        for (const bool at_end : {true, false}) {
          const Guarded query(t.query.View(), bytes, at_end);
          for (const Target& target : Targets()) {
            SCOPED_TRACE(absl::StrCat(NameOf(dtype), " ", queries, " x ", embed, target.Name()));
            const Got want = RunLayer(c, t, target.Options(1));
            Got got = OutputsOf(c);
            Arguments arguments = ArgumentsOf(c, t, got);
            arguments.inputs[Role::kQ] = query.view();
            RunOperator(*OperatorOf(c, t), arguments, target.Options(1));
            EXPECT_EQ(got.y.ToVector(), want.y.ToVector());
          }
        }
      }
    }
  }
}

TEST(LayerTest, CombinesMasks) {
  const Shape shapes[] = {{5, 7},       {7},          {1},    {4, 1, 7},
                          {2, 1, 5, 7}, {2, 4, 5, 1}, {5, 3}, {2, 1, 1, 7}};
  for (const DType mask : {DType::kBool, DType::kFloat32}) {
    for (const Shape& shape : shapes) {
      for (const bool has_extra_key : {false, true}) {
        for (const bool pads : {false, true}) {
          LayerCase c{
              .tokens = 7, .has_extra_key = has_extra_key, .mask = mask, .mask_shape = shape};
          c.is_causal = pads != has_extra_key;
          c.config.pad_token_id = 1;
          c.has_ids = pads;
          if (pads) c.lengths = {4, 6};
          SCOPED_TRACE(absl::StrCat(ToString(shape), " ", NameOf(mask), has_extra_key, pads));
          ExpectDefinition(c);
        }
      }
    }
  }
}

// The extra key of bias_k is seen by queries that see nothing else.
TEST(LayerTest, SeesTheExtraKeyWhateverHidesOthers) {
  for (const bool is_causal : {false, true}) {
    LayerCase c{.tokens = 4, .has_extra_key = true, .is_causal = is_causal, .lengths = {0, 2}};
    ExpectDefinition(c);
    c.lengths = {};
    ExpectDefinition(c);
  }
}

TEST(LayerTest, HidesKeysWithoutMovingPositions) {
  LayerCase c{
      .queries = 6, .has_biases = false, .buckets = 6, .is_causal = true, .lengths = {2, 5}};
  ExpectDefinition(c);
  c.buckets = 0;
  c.config.rope_theta = 100;
  c.config.interleaved = true;
  c.config.rotary_embedding_dim = 4;
  ExpectDefinition(c);
}

TEST(LayerTest, DropsWeightsByTheSeed) {
  for (const DType dtype : kTypes) {
    LayerCase c{.dtype = dtype, .weight = dtype, .queries = 9, .dropout = Dropout{0.4, 17}};
    ExpectDefinition(c);
  }
}

TEST(LayerTest, AnswersAveragedWeightsAlone) {
  LayerCase c{.queries = 300, .wants_weights = false};
  ExpectDefinition(c);
  c.wants_averaged_weights = false;
  ExpectDefinition(c);
}

TEST(LayerTest, HasNoKeys) {
  for (const bool has_extra_key : {false, true}) {
    LayerCase c{.tokens = 0, .has_extra_key = has_extra_key};
    ExpectDefinition(c);
  }
}

TEST(LayerTest, HasNoTasksWithoutQueries) {
  for (const auto& [batch, queries] : {std::pair<int64_t, int64_t>{0, 3}, {2, 0}}) {
    LayerCase c{.batch = batch, .queries = queries, .tokens = 4};
    const auto op = OperatorOf(c, RandomLayer(c, 1));
    const Plan plan = MakePlan(*op, {}).value();
    EXPECT_EQ(std::accumulate(plan.stages.begin(), plan.stages.end(), int64_t{0}), 0);
  }
}

// Keys that are hidden may contain anything.
TEST(LayerTest, HiddenKeysDoNotMatter) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : kTypes) {
    LayerCase c{.dtype = dtype, .weight = dtype, .batch = 1, .tokens = 70, .lengths = {40}};
    c.config.pad_token_id = 5;
    c.has_ids = true;
    LayerTensors t = RandomLayer(c, 3);
    for (int64_t j = 0; j < 10; ++j) t.ids.Set(0, 0, 0, j, 5);
    LayerTensors other = t;
    for (int64_t j = 0; j < c.sk(); ++j) {
      if (j >= 10 && j < 40) continue;
      for (int64_t n = 0; n < c.key_embed(); ++n) {
        t.key.Set(0, 0, j, n, 0);
        other.key.Set(0, 0, j, n, n % 2 == 0 ? kNan : std::numeric_limits<double>::infinity());
      }
    }
    for (const Target& target : Targets()) {
      SCOPED_TRACE(absl::StrCat(NameOf(dtype), " on ", target.Name()));
      const Got want = RunLayer(c, t, target.Options());
      const Got got = RunLayer(c, other, target.Options());
      EXPECT_TRUE(SameBits("Y", got.y, want.y));
      EXPECT_TRUE(SameBits("weights", got.weights, want.weights));
      for (const double value : got.y.ToVector()) ASSERT_TRUE(std::isfinite(value));
    }
  }
}

TEST(LayerTest, HasTheSameBitsInEveryOrderOfTasks) {
  for (const DType dtype : kTypes) {
    LayerCase c{.dtype = dtype, .weight = dtype, .queries = 150, .has_norms = true};
    c.config = {.embed_size = 130, .query_heads = 5, .head_size = 26, .rope_theta = 500};
    const LayerTensors t = RandomLayer(c, 6);
    const auto op = OperatorOf(c, t);
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name());
      const Got want = RunLayer(c, t, target.Options(/*threads=*/3));
      for (const int workers : {1, 3}) {
        const Plan plan = MakePlan(*op, target.Options(/*threads=*/3)).value();
        AlignedBuffer workspace(plan.workspace_bytes());
        ThreadPool pool(workers);
        Got got = OutputsOf(c);
        ASSERT_TRUE(rapt::Run(*op, plan, ArgumentsOf(c, t, got), workspace.span(), pool).ok());
        EXPECT_TRUE(SameBits("Y", got.y, want.y));
        EXPECT_TRUE(SameBits("weights", got.weights, want.weights));
        EXPECT_TRUE(SameBits("averaged", got.averaged, want.averaged));
      }
    }
  }
}

TEST(LayerTest, UsesNoMoreThanItsWorkspace) {
  constexpr size_t kGuard = 4096;
  for (const DType dtype : kTypes) {
    for (LayerCase c : Models()) {
      c.dtype = dtype;
      c.weight = dtype;
      const LayerTensors t = RandomLayer(c, 2);
      const auto op = OperatorOf(c, t);
      for (const Target& target : Targets()) {
        const Plan plan = MakePlan(*op, target.Options(/*threads=*/2)).value();
        const auto bytes = static_cast<size_t>(plan.workspace_bytes());
        AlignedBuffer workspace(bytes + kGuard);
        std::fill(workspace.span().begin(), workspace.span().end(), std::byte{0xA5});
        Got got = OutputsOf(c);
        const Arguments arguments = ArgumentsOf(c, t, got);
        for (int stage = 0; stage < static_cast<int>(plan.stages.size()); ++stage) {
          for (int64_t task = 0; task < plan.stages[stage]; ++task) {
            op->RunTask(plan, arguments, workspace.data(), stage, task, static_cast<int>(task % 2),
                        {});
          }
        }
        const auto guard = workspace.span().subspan(bytes);
        EXPECT_TRUE(std::all_of(guard.begin(), guard.end(), [](std::byte b) {
          return b == std::byte{0xA5};
        })) << target.Name();
      }
    }
  }
}

// Projections are abandoned at checkpoints; attention's tests show that attention is.
TEST(LayerTest, AbandonsProjectionsAtCheckpoints) {
  for (const DType dtype : kTypes) {
    for (const int64_t queries : {4, 96}) {
      LayerCase c{.dtype = dtype, .weight = dtype, .batch = 1, .queries = queries};
      c.config = {.embed_size = 6144, .query_heads = 1, .head_size = 512};
      c.output_size = 64;
      const LayerTensors t = RandomLayer(c, 7);
      const auto op = OperatorOf(c, t);
      for (const Target& target : Targets()) {
        if (target.backend == "reference") continue;  // the portable kernel
        SCOPED_TRACE(absl::StrCat(NameOf(dtype), " on ", target.Name()));
        const Plan plan = MakePlan(*op, target.Options()).value();
        AlignedBuffer workspace(plan.workspace_bytes());
        Got got = OutputsOf(c);
        const Arguments arguments = ArgumentsOf(c, t, got);
        const auto count_calls = [&](bool (*go_on)(void*)) {
          int calls = 0;
          op->RunTask(plan, arguments, workspace.data(), /*stage=*/0, /*task=*/0, /*worker=*/0,
                      {go_on, &calls});
          return calls;
        };
        const auto proceed = [](void* context) { return ++*static_cast<int*>(context) > 0; };
        const auto stop = [](void* context) { return ++*static_cast<int*>(context) < 2; };
        EXPECT_GT(count_calls(proceed), 2);
        EXPECT_EQ(count_calls(stop), 2);
      }
    }
  }
}

TEST(LayerTest, StatesItsBytes) {
  LayerCase c{.has_extra_key = true, .has_sinks = true};
  const LayerTensors t = RandomLayer(c, 1);
  const int64_t bytes = LayerBytes(c.config, WeightsOf(c, t)).value();
  const auto layer = MakeLayerOf(c, t);
  EXPECT_EQ(layer->bytes(), bytes);
  // Four matrices of one panel, and vectors.
  EXPECT_GE(bytes, 4 * 24 * 64 * 4);
  EXPECT_LE(bytes, 4 * 24 * 64 * 4 + 16 * 128);
  EXPECT_EQ(layer->output_size(), 20);
  EXPECT_EQ(layer->config().head_size, 6);
  EXPECT_EQ(layer->config().kv_heads, 4);
  EXPECT_EQ(layer->dtype(), DType::kFloat32);
  EXPECT_FALSE(layer->is_fp64());
}

// The weights may be a part of a larger tensor.
TEST(LayerTest, ReadsRowsThatAreApart) {
  for (const bool transposed : {false, true}) {
    LayerCase c{.transposed = transposed};
    const LayerTensors t = RandomLayer(c, 4);
    LayerWeights weights = WeightsOf(c, t);
    Tensor wide(DType::kFloat32, {1, 1, 24, 72});
    wide.Fill(1e9);
    for (int64_t r = 0; r < 24; ++r) {
      for (int64_t n = 0; n < 24; ++n) wide.Set(0, 0, r, 24 + n, t.wk.At(0, 0, r, n));
    }
    weights.k.matrix->data = wide.View().data + 24 * sizeof(float);
    weights.k.matrix->row_stride = 72;
    ThreadPool pool(1);
    const auto op = MakeLayerCall(MakeLayer(c.config, weights, pool).value(), CallOf(c)).value();
    Got got = OutputsOf(c);
    RunOperator(*op, ArgumentsOf(c, t, got), {});
    EXPECT_TRUE(SameBits("Y", got.y, RunLayer(c, t, {}).y));
  }
}

// A cache in plain memory.
class MemoryCache final : public LayerCache, private RaggedSource {
 public:
  MemoryCache(const LayerCase& c)
      : keys_(c.dtype, {1, c.queries, c.kv_heads(), c.head_size()}),
        values_(c.dtype, {1, c.queries, c.kv_heads(), c.value_head_size()}) {}

  // Begins a call of `rows` tokens.
  void Begin(RaggedCall call) {
    position_ = length_;
    call.items[0].position = position_;
    call.items[0].keys = position_ + call.items[0].rows;
    rows_ = call.items[0].rows;
    attention_ = MakeRaggedAttention(call, *this).value();
  }

  int64_t position() const override { return position_; }
  int64_t append_bytes() const override { return 100; }
  void Append(const std::byte* keys, const std::byte* values,
              absl::Span<std::byte> workspace) override {
    EXPECT_EQ(length_, position_) << "appended twice";
    EXPECT_EQ(workspace.size(), 100u);
    std::fill(workspace.begin(), workspace.end(), std::byte{0xFF});
    Add(keys, keys_);
    Add(values, values_);
    length_ += rows_;
  }
  const TensorOperator& attention() const override { return *attention_; }

 private:
  TensorView keys(int64_t) const override { return HeadsOf(keys_); }
  TensorView values(int64_t) const override { return HeadsOf(values_); }
  bool has_failed(int64_t) const override { return false; }

  void Add(const std::byte* rows, Tensor& to) const {
    const int64_t bytes = to.dims()[2] * to.dims()[3] * SizeOf(to.dtype());
    std::memcpy(to.MutableView().data + length_ * bytes, rows, rows_ * bytes);
  }
  // [1, Hkv, tokens, size] of [1, tokens, Hkv, size].
  TensorView HeadsOf(const Tensor& tensor) const {
    TensorView view = tensor.View();
    std::swap(view.dims[1], view.dims[2]);
    std::swap(view.strides[1], view.strides[2]);
    view.dims[2] = length_;
    return view;
  }

  Tensor keys_, values_;
  std::shared_ptr<const TensorOperator> attention_;
  int64_t rows_ = 0, position_ = 0, length_ = 0;
};

// A call for each of the lengths, which sum to the queries, gives what one call gives.
void ExpectSteps(LayerCase c, const std::vector<int64_t>& lengths) {
  c.batch = 1;
  c.is_causal = true;
  c.wants_weights = c.wants_averaged_weights = false;
  c.queries = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  const LayerTensors t = RandomLayer(c, 8);
  const LayerWant want = WantOf(c, t);
  const auto layer = MakeLayerOf(c, t);
  ASSERT_TRUE(CheckCache(*layer).ok());
  for (const Target& target : Targets()) {
    SCOPED_TRACE(absl::StrCat(NameOf(c.dtype), " on ", target.Name()));
    MemoryCache cache(c);
    Got got = OutputsOf(c);
    Arguments arguments = ArgumentsOf(c, t, got);
    for (const int64_t rows : lengths) {
      LayerCase step = c;
      step.queries = rows;
      LayerCall call = CallOf(step);
      const auto attention = CachedAttentionOf(layer, call);
      ASSERT_TRUE(attention.ok()) << attention.status();
      cache.Begin(*attention);
      call.cache = &cache;
      const auto op = MakeLayerCall(layer, call);
      ASSERT_TRUE(op.ok()) << op.status();
      RunOperator(**op, arguments, target.Options(/*threads=*/2));
      arguments.inputs[Role::kQ].data += rows * c.config.embed_size * SizeOf(c.dtype);
      arguments.outputs[Role::kY].data += rows * c.y_size() * SizeOf(c.dtype);
    }
    EXPECT_TRUE(IsClose(c.dtype, got.y, want.y, want.most_score));
    EXPECT_TRUE(got.y.GapsIntact());
  }
}

TEST(LayerCacheTest, StepsAreTheDefinitionInEveryType) {
  LayerCase llama{.has_biases = false, .has_norms = true, .has_sinks = true};
  llama.config = {.embed_size = 40, .query_heads = 6, .kv_heads = 2, .head_size = 10};
  llama.config.rope_theta = 10000;
  LayerCase partial = llama;
  partial.config.interleaved = true;
  partial.config.rotary_embedding_dim = 4;
  LayerCase gpt_oss = llama;
  gpt_oss.config.is_causal = true;
  gpt_oss.config.sliding_window = 4;
  gpt_oss.config.rope_scaling = kYarn;
  const LayerCase gpt2{.transposed = true};
  LayerCase t5{.has_biases = false, .buckets = 8};
  t5.config.scale = 1;
  t5.config.max_distance = 16;
  LayerCase encoded;
  encoded.config.positional_base = 100;
  encoded.config.value_head_size = 3;
  LayerCase bare{.has_q = false, .has_k = false, .has_v = false, .has_o = false};
  bare.has_biases = false;
  bare.config.rope_theta = 50;
  for (const DType dtype : kTypes) {
    for (LayerCase c : {llama, partial, gpt_oss, gpt2, t5, encoded, bare}) {
      c.dtype = dtype;
      c.weight = dtype;
      ExpectSteps(c, {5, 1, 1, 3, 1});
      ExpectSteps(c, {1, 1, 9});
    }
  }
}

// Keys beyond the chunks that a row's keys are divided into.
TEST(LayerCacheTest, BiasesByDistanceReachFarTokens) {
  LayerCase c{.has_biases = false, .buckets = 8};
  c.config = {.embed_size = 2, .query_heads = 1, .max_distance = 1500};
  ExpectSteps(c, {kRaggedChunk - 3, 1, 3, 2});
}

TEST(LayerCacheTest, ErrorsNameWhatACacheDoesNotAllow) {
  const auto error = [](const LayerCase& c, const std::function<void(LayerCall&)>& change) {
    const auto layer = MakeLayerOf(c, RandomLayer(c, 1));
    LayerCall call;
    call.inputs[Role::kQ] = TensorSpec{c.dtype, {1, 3, c.config.embed_size}};
    call.is_causal = true;
    change(call);
    const auto attention = CachedAttentionOf(layer, call);
    EXPECT_EQ(attention.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(attention.status().message());
  };
  const auto given = [](Slot slot, DType dtype, Shape shape) {
    return [=](LayerCall& call) { call.inputs[slot] = TensorSpec{dtype, shape}; };
  };
  LayerCase c;
  c.config.pad_token_id = 0;
  const std::pair<std::string, std::function<void(LayerCall&)>> calls[] = {
      {"key is given", given(Role::kK, DType::kFloat32, {1, 3, 24})},
      {"value is given", given(Role::kV, DType::kFloat32, {1, 3, 24})},
      {"attn_mask is given", given(Role::kMask, DType::kBool, {3, 3})},
      {"nonpad_kv_seqlen is given", given(Role::kKeyLengths, DType::kInt64, {1})},
      {"input_ids is given", given(kInputIds, DType::kInt64, {1, 3})},
      {"dropout_probability is given",
       [](LayerCall& call) {
         call.dropout = Dropout{0.5, 1};
       }},
      {"output weights is requested", [](LayerCall& call) { call.wants_weights = true; }},
      {"output weights is requested", [](LayerCall& call) { call.wants_averaged_weights = true; }},
      {"is_causal is false", [](LayerCall& call) { call.is_causal.reset(); }},
      {"query has shape [2, 3, 24]; with a cache it must be [1, Sq, 24] with a token",
       given(Role::kQ, DType::kFloat32, {2, 3, 24})},
      {"query has shape [1, 0, 24]", given(Role::kQ, DType::kFloat32, {1, 0, 24})}};
  for (const auto& [message, change] : calls) EXPECT_THAT(error(c, change), HasSubstr(message));

  LayerCase additive = c, cross = c, extra = c;
  additive.config.score_function = ScoreFunction::kAdditive;
  cross.config.key_embed_size = 17;
  extra.has_extra_key = true;
  const auto none = [](LayerCall&) {};
  EXPECT_THAT(error(additive, none), HasSubstr("additive scores"));
  EXPECT_EQ(error(cross, none),
            "the layer has key_embed_size 17 and embed_size 24; with a cache the layer is "
            "self-attention");
  EXPECT_THAT(error(extra, none), HasSubstr("bias_k"));
}

std::string ErrorOf(const LayerConfig& config, const LayerWeights& weights) {
  ThreadPool pool(1);
  const auto layer = MakeLayer(config, weights, pool);
  EXPECT_EQ(layer.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LayerBytes(config, weights).status(), layer.status());
  return std::string(layer.status().message());
}

TEST(LayerErrorsTest, NameTensors) {
  const LayerCase c{.has_extra_key = true, .has_norms = false, .has_sinks = true};
  const LayerTensors t = RandomLayer(c, 1);
  const LayerWeights good = WeightsOf(c, t);
  const auto error = [&](const std::function<void(LayerWeights&)>& change) {
    LayerWeights weights = good;
    change(weights);
    return ErrorOf(c.config, weights);
  };
  EXPECT_EQ(error([](LayerWeights& w) {
              w.q.matrix->shape = {24, 23};
            }),
            "wq has shape [24, 23]; it must be [24, 24]");
  EXPECT_EQ(error([](LayerWeights& w) { w.o.matrix->shape = {24}; }),
            "wo has shape [24]; it must be [0, 24]");
  EXPECT_EQ(error([](LayerWeights& w) { w.v.matrix->dtype = DType::kInt32; }),
            "wv has type INT32; it must be FP32, FP16, BF16 or FP64");
  EXPECT_EQ(error([](LayerWeights& w) { w.k.matrix->row_stride = 23; }),
            "wk has rows 23 numbers apart; they have 24");
  EXPECT_EQ(error([](LayerWeights& w) {
              w.k.bias->shape = {1, 24};
            }),
            "bk has shape [1, 24]; it must be [24]");
  EXPECT_EQ(error([](LayerWeights& w) { w.bias_v.reset(); }),
            "bias_k is given alone; bias_k and bias_v must be given together");
  EXPECT_EQ(error([](LayerWeights& w) {
              w.bias_k->shape = {1, 1, 25};
            }),
            "bias_k has shape [1, 1, 25]; it must have 24 numbers");
  EXPECT_EQ(error([](LayerWeights& w) {
              w.bias_k->shape = {-1, -24};
            }),
            "bias_k has shape [-1, -24]; it must have 24 numbers");
  EXPECT_EQ(error([](LayerWeights& w) { w.sinks->shape = {3}; }),
            "sinks has shape [3]; it must be [4]");
  EXPECT_EQ(error([](LayerWeights& w) { w.k = {}; }),
            "bias_k is given; it needs the matrices of k and v");
  EXPECT_EQ(error([](LayerWeights& w) { w.v.matrix.reset(); }),
            "bv is given, but the matrix of v is not");
}

TEST(LayerErrorsTest, NameSizes) {
  const LayerCase c;
  const LayerTensors t = RandomLayer(c, 1);
  const auto error = [&](const std::function<void(LayerConfig&)>& change) {
    LayerConfig config = c.config;
    change(config);
    return ErrorOf(config, WeightsOf(c, t));
  };
  EXPECT_EQ(error([](LayerConfig& x) { x.embed_size = 0; }),
            "embed_size is 0; it must be from 1 to 2^40");
  EXPECT_EQ(error([](LayerConfig& x) { x.query_heads = 5; }),
            "head_size is missing, and embed_size 24 is not a multiple of query_heads 5");
  EXPECT_EQ(error([](LayerConfig& x) { x.kv_heads = 3; }),
            "kv_heads is 3; it must divide query_heads 4");
  EXPECT_EQ(error([](LayerConfig& x) { x.norm_epsilon = -1; }),
            "norm_epsilon is -1; it must be finite and at least 0");
  EXPECT_EQ(error([](LayerConfig& x) { x.positional_base = 0; }),
            "positional_base is 0; it must be finite and positive");
  EXPECT_EQ(error([](LayerConfig& x) { x.sliding_window = 0; }),
            "sliding_window is 0; it must be from 1 to 2^40");
  EXPECT_EQ(error([](LayerConfig& x) { x.sliding_window = 3; }),
            "sliding_window is 3, but is_causal is false; it must be true");
  EXPECT_EQ(error([](LayerConfig& x) { x.head_size = int64_t{1} << 40; }),
            absl::StrCat("wq has shape [24, 24]; it must be [", int64_t{1} << 42, ", 24]"));
}

TEST(LayerErrorsTest, NameSettingsWithWhichNoCallWorks) {
  LayerCase c;
  const auto error = [&](const LayerConfig& config) {
    return ErrorOf(config, WeightsOf(c, RandomLayer(c, 1)));
  };
  LayerConfig config = c.config;
  config.rope_theta = 0;
  EXPECT_THAT(error(config), HasSubstr("rope_theta is 0; it must be positive"));
  config.rope_theta = 10000;
  config.rotary_embedding_dim = 3;
  EXPECT_THAT(error(config), HasSubstr("rotary_embedding_dim is 3; it must be even"));
  config.rotary_embedding_dim = 8;
  EXPECT_THAT(error(config), HasSubstr("rotary_embedding_dim is 8; it must be even and at most 6"));
  LayerCase odd{.batch = 1, .queries = 2};
  odd.config = {.embed_size = 20, .query_heads = 4, .rope_theta = 100};
  EXPECT_EQ(ErrorOf(odd.config, WeightsOf(odd, RandomLayer(odd, 1))),
            "the head size of query is 5; with rotary embedding of all of it, it must be even");
}

TEST(LayerErrorsTest, NameTheNumbersOfRopeScaling) {
  LayerCase c;
  const LayerTensors t = RandomLayer(c, 1);
  const auto error = [&](double theta, const std::function<void(RopeScaling&)>& change) {
    LayerConfig config = c.config;
    config.rope_theta = theta;
    config.rope_scaling = kYarn;
    change(*config.rope_scaling);
    return ErrorOf(config, WeightsOf(c, t));
  };
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(error(100, [](RopeScaling& s) { s.factor = -2; }),
            "rope_scaling's factor is -2; it must be finite and at least 1");
  EXPECT_EQ(error(100, [](RopeScaling& s) { s.factor = kNan; }),
            "rope_scaling's factor is nan; it must be finite and at least 1");
  EXPECT_EQ(error(100, [](RopeScaling& s) { s.original_length = 0; }),
            "rope_scaling's original_max_position_embeddings is 0; it must be finite and at least "
            "1");
  EXPECT_EQ(error(100, [](RopeScaling& s) { s.slow = 0; }),
            "rope_scaling's beta_slow is 0; it must be finite and positive");
  EXPECT_EQ(error(100, [](RopeScaling& s) { s.fast = std::numeric_limits<double>::infinity(); }),
            "rope_scaling's beta_fast is inf; it must be finite and positive");
  EXPECT_EQ(error(100, [](RopeScaling& s) { s.attention_factor = 0; }),
            "rope_scaling's attention_factor is 0; it must be finite and positive");
  EXPECT_EQ(error(100, [](RopeScaling& s) { s.slow = 9; }),
            "rope_scaling's beta_slow is 9; it must be at most beta_fast, 8");
  EXPECT_EQ(error(1, [](RopeScaling&) {}), "rope_theta is 1; with YaRN it must be more than 1");
  EXPECT_EQ(error(100,
                  [](RopeScaling& s) {
                    s.type = RopeScaling::Type::kLlama3;
                    s.slow = s.fast;
                  }),
            "rope_scaling's low_freq_factor is 8; it must be less than high_freq_factor, 8");
  c.config.rope_scaling = kYarn;
  EXPECT_EQ(ErrorOf(c.config, WeightsOf(c, t)), "rope_scaling is set, but rope_theta is not");
}

TEST(LayerErrorsTest, AWindowNeedsCausalCallsAndNoKeyAfterAllOthers) {
  LayerCase c{.is_causal = true};
  c.config.is_causal = true;
  c.config.sliding_window = 2;
  LayerCall call = CallOf(c);
  call.is_causal = false;
  const auto op = MakeLayerCall(MakeLayerOf(c, RandomLayer(c, 1)), call);
  EXPECT_EQ(op.status().message(),
            "is_causal is false; it must be true, because the layer has sliding_window 2");
  c.has_extra_key = true;
  EXPECT_EQ(ErrorOf(c.config, WeightsOf(c, RandomLayer(c, 1))),
            "bias_k is given; sliding_window does not say whether it hides its key");
}

// Of a table that has too few buckets, or too small a distance, for the calls of one kind.
TEST(LayerErrorsTest, ATableMustFitTheCallsThatDoNotSayWhetherTheyAreCausal) {
  const struct {
    int64_t buckets, max_distance;
    bool fits_causal;
    const char* message;
  } tables[] = {{2, 128, true, "relative_attention_bias has 2 buckets; it must have from 4"},
                {32, 16, false, "relative_attention_max_distance is 16; it must be more"}};
  for (const auto& [buckets, max_distance, fits_causal, message] : tables) {
    LayerCase c{.has_biases = false, .buckets = buckets};
    c.config.max_distance = max_distance;
    c.config.is_causal = !fits_causal;
    const LayerTensors t = RandomLayer(c, 1);
    EXPECT_THAT(ErrorOf(c.config, WeightsOf(c, t)), HasSubstr(message));
    c.config.is_causal = c.is_causal = fits_causal;
    ExpectDefinition(c);
    c.is_causal = !fits_causal;
    const auto op = MakeLayerCall(MakeLayerOf(c, t), CallOf(c));
    EXPECT_EQ(op.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(op.status().message()), HasSubstr(message));
  }
}

TEST(LayerErrorsTest, NameMissingMatrices) {
  LayerCase c{.has_q = false, .has_biases = false};
  c.config.head_size = 5;
  EXPECT_EQ(ErrorOf(c.config, WeightsOf(c, RandomLayer(c, 1))),
            "the matrix of q is missing; without it the input's size, 24, must be that of the "
            "heads, 20");
}

TEST(LayerErrorsTest, NameInputs) {
  LayerCase c{.tokens = 7, .has_value = true, .lengths = {1, 2}, .has_ids = true};
  c.config.key_embed_size = 10;
  c.config.pad_token_id = 0;
  c.mask = DType::kBool;
  c.mask_shape = {5, 7};
  const auto layer = MakeLayerOf(c, RandomLayer(c, 1));
  const auto error = [&](const std::function<void(LayerCall&)>& change) {
    LayerCall call = CallOf(c);
    change(call);
    const auto op = MakeLayerCall(layer, call);
    EXPECT_EQ(op.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(op.status().message());
  };
  const auto shape = [&](Slot slot, Shape wrong) {
    return error([&](LayerCall& call) { call.inputs[slot]->shape = std::move(wrong); });
  };
  const auto type = [&](Slot slot, DType wrong) {
    return error([&](LayerCall& call) { call.inputs[slot]->dtype = wrong; });
  };
  const auto missing = [&](Slot slot) {
    return error([&](LayerCall& call) { call.inputs[slot].reset(); });
  };
  EXPECT_EQ(shape(Role::kQ, {2, 5, 23}), "query has shape [2, 5, 23]; it must be [B, Sq, 24]");
  EXPECT_EQ(shape(Role::kQ, {5, 24}), "query has shape [5, 24]; it must be [B, Sq, 24]");
  EXPECT_EQ(shape(Role::kK, {2, 7, 24}), "key has shape [2, 7, 24]; it must be [2, 7, 10]");
  EXPECT_EQ(shape(Role::kV, {2, 6, 10}), "value has shape [2, 6, 10]; it must be [2, 7, 10]");
  EXPECT_EQ(type(Role::kQ, DType::kInt32),
            "query has type INT32; it must be FP32, FP16, BF16 or FP64");
  EXPECT_EQ(type(Role::kK, DType::kFloat16), "key has type FP16; it must have that of query, FP32");
  EXPECT_EQ(missing(Role::kQ), "query is missing");
  EXPECT_EQ(error([](LayerCall& call) {
              call.inputs[Role::kK].reset();
              call.inputs[Role::kV].reset();
            }),
            "key is missing; query can't replace it, because it has 24 numbers a token, not 10");
  EXPECT_THAT(shape(Role::kMask, {4, 7}), AllOf(HasSubstr("attn_mask"), HasSubstr("broadcast")));
  EXPECT_EQ(shape(Role::kMask, {5, 8}),
            "attn_mask has a last axis of 8; it must be at most 7, the number of keys");
  EXPECT_EQ(shape(Role::kMask, {}), "attn_mask has shape []; it must have from 1 to 4 axes");
  EXPECT_EQ(shape(Role::kKeyLengths, {3}), "nonpad_kv_seqlen is INT64 [3]; it must be INT64 [2]");
  EXPECT_EQ(type(kInputIds, DType::kInt32), "input_ids is INT32 [2, 7]; it must be INT64 [2, 7]");
  EXPECT_THAT(error([](LayerCall& call) { call.dropout = Dropout{1, 1}; }), HasSubstr("dropout"));
  EXPECT_THAT(shape(Role::kQ, {int64_t{1} << 40, int64_t{1} << 40, 24}), HasSubstr("query"));
}

TEST(LayerErrorsTest, NameIdsWithoutAPadToken) {
  LayerCase c{.has_ids = true};
  const auto op = MakeLayerCall(MakeLayerOf(c, RandomLayer(c, 1)), CallOf(c));
  EXPECT_EQ(op.status().message(),
            "input_ids is given, but the layer's configuration has no pad_token_id");
}

TEST(LayerErrorsTest, NameFp64Weights) {
  LayerCase c{.weight = DType::kFloat64};
  const auto op = MakeLayerCall(MakeLayerOf(c, RandomLayer(c, 1)), CallOf(c));
  EXPECT_EQ(op.status().message(),
            "query has type FP32; it must be FP64, because the layer has weights of FP64");
}

TEST(LayerErrorsTest, NameALength) {
  LayerCase c{.lengths = {5, 6}};
  const LayerTensors t = RandomLayer(c, 1);
  Got got = OutputsOf(c);
  EXPECT_THAT(OperatorOf(c, t)->CheckData(ArgumentsOf(c, t, got)).message(),
              AllOf(HasSubstr("nonpad_kv_seqlen"), HasSubstr("6")));
}

TEST(LayerTest, MaskAndIdsAreCopiedOutOfSharedMemory) {
  const LayerCase c;
  const SlotSet copied = OperatorOf(c, RandomLayer(c, 1))->copied_inputs();
  EXPECT_TRUE(copied.contains(Role::kMask));
  EXPECT_TRUE(copied.contains(kInputIds));
}

}  // namespace
}  // namespace rapt::test
