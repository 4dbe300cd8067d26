#include "server/cache/cached_layer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_pool.h"
#include "tests/attention/layer/layer_oracle.h"
#include "tests/support/fake_clock.h"
#include "tests/support/run_attention.h"
#include "tests/support/run_operator.h"

namespace rapt::cache {
namespace {

using test::LayerCase;
using test::LayerTensors;
using ::testing::HasSubstr;

constexpr char kOwner[] = "a";
constexpr TokenShape kToken = {.kv_heads = 2, .head_size = 6, .value_head_size = 6};

LayerCase Causal(int64_t tokens, std::optional<int64_t> window) {
  LayerCase c{.batch = 1, .queries = tokens, .has_sinks = true, .is_causal = true};
  c.config = {.embed_size = 24, .query_heads = 4, .kv_heads = 2, .rope_theta = 100};
  c.config.is_causal = true;
  c.config.sliding_window = window;
  c.wants_weights = c.wants_averaged_weights = false;
  return c;
}

class CachedLayerTest : public ::testing::Test {
 protected:
  // `most_bytes` of pages; 0: no limit.
  explicit CachedLayerTest(int64_t most_bytes = 0, std::optional<int64_t> window = {})
      : c_(Causal(9, window)),
        store_({.instance = "test", .max_bytes_per_caller = most_bytes}, arena_, clock_) {
    ThreadPool pool(1);
    layer_ = MakeLayer(c_.config, test::WeightsOf(c_, tensors_), pool).value();
    id_ = store_.Create(kOwner, {.shapes = {{.token = kToken}}}).value().id;
  }

  LayerStep StepOf(int64_t rows) const {
    LayerStep step{.layer = layer_};
    step.call.inputs[Role::kQ] = TensorSpec{DType::kFloat32, {1, rows, 24}};
    step.call.is_causal = true;
    return step;
  }

  // Starts a call of tokens [at, at + rows).
  absl::StatusOr<Request> Start(CachedLayer& call, int64_t at, int64_t rows) {
    const LayerStep step = StepOf(rows);
    AttendCall attend = AttendCallOf(step).value();
    attend.items.front().call.cache = id_;
    attend.items.front().call.generation = 1;
    attend.items.front().call.at = at;
    return call.Start(store_, kOwner, step, attend);
  }

  // Computes it, into y_.
  void Run(const Request& request, int64_t at) {
    Arguments arguments;
    arguments.inputs[Role::kQ].data = tensors_.query.View().Row(0, 0, at);
    arguments.outputs[Role::kY].data = y_.MutableView().Row(0, 0, at);
    test::RunOperator(*request.tensor_operator, arguments);
  }
  absl::Status Step(int64_t at, int64_t rows) {
    CachedLayer call;
    const absl::StatusOr<Request> request = Start(call, at, rows);
    if (!request.ok()) return request.status();
    Run(*request, at);
    return call.status();
  }

  const LayerCase c_;
  const LayerTensors tensors_ = test::RandomLayer(c_, 5);
  const test::LayerWant want_ = test::WantOf(c_, tensors_);
  test::Tensor y_{DType::kFloat32, {1, 1, 9, c_.y_size()}};
  std::shared_ptr<const Layer> layer_;
  Arena arena_{4 * Arena::kSlabBytes};
  test::FakeClock clock_;
  CacheStore store_;
  std::string id_;
};

TEST_F(CachedLayerTest, StepsAreTheDefinition) {
  for (const auto& [at, rows] : {std::pair{0, 4}, {4, 1}, {5, 1}, {6, 3}}) {
    EXPECT_EQ(Step(at, rows), absl::OkStatus());
  }
  EXPECT_TRUE(test::IsClose(DType::kFloat32, y_, want_.y, want_.most_score));
}

class CachedLayerWithWindowTest : public CachedLayerTest {
 protected:
  CachedLayerWithWindowTest() : CachedLayerTest(/*most_bytes=*/0, /*window=*/3) {}
};

TEST_F(CachedLayerWithWindowTest, StepsAreTheDefinition) {
  for (const auto& [at, rows] : {std::pair{0, 4}, {4, 1}, {5, 1}, {6, 3}}) {
    EXPECT_EQ(Step(at, rows), absl::OkStatus());
  }
  EXPECT_TRUE(test::IsClose(DType::kFloat32, y_, want_.y, want_.most_score));
}

TEST_F(CachedLayerTest, AStepSentAgainGivesTheSameBitsAndAnotherOneIsAborted) {
  ASSERT_EQ(Step(0, 4), absl::OkStatus());
  ASSERT_TRUE(Step(4, 1).ok());
  ASSERT_TRUE(Step(5, 1).ok());
  const test::Tensor before = y_;
  EXPECT_TRUE(Step(4, 1).ok());
  EXPECT_TRUE(test::SameBits("Y", y_, before));
  CachedLayer call;
  const absl::StatusOr<Request> request = Start(call, 4, 1);
  Run(*request, 7);  // with another token
  EXPECT_EQ(call.status().code(), absl::StatusCode::kAborted);
}

TEST_F(CachedLayerTest, NothingIsAppendedBeforeTheRun) {
  CachedLayer call;
  EXPECT_TRUE(Start(call, 0, 4).ok());
  EXPECT_TRUE(call.status().ok());
  EXPECT_EQ(store_.Get(kOwner, {&id_, 1})->caches.front().lengths, std::vector<int64_t>{0});
  EXPECT_EQ(Step(2, 1).code(), absl::StatusCode::kOutOfRange);
}

TEST_F(CachedLayerTest, AnEndedCacheIsNotFound) {
  ASSERT_TRUE(store_.Close(kOwner, {&id_, 1}).ok());
  EXPECT_EQ(Step(0, 1).code(), absl::StatusCode::kNotFound);
}

class CachedLayerWithoutPagesTest : public CachedLayerTest {
 protected:
  CachedLayerWithoutPagesTest() : CachedLayerTest(kToken.page_bytes() - 1) {}
};

TEST_F(CachedLayerWithoutPagesTest, AnAppendThatFailsIsTheStatusOfTheCall) {
  CachedLayer call;
  const absl::StatusOr<Request> request = Start(call, 0, 4);
  ASSERT_TRUE(request.ok()) << request.status();
  Run(*request, 0);
  EXPECT_EQ(call.status().code(), absl::StatusCode::kResourceExhausted);
  for (int64_t n = 0; n < 4 * c_.y_size(); ++n) {
    EXPECT_TRUE(std::isfinite(y_.ToVector()[n]));  // of no key
  }
}

TEST_F(CachedLayerTest, RefusesWhatALayerDoesNotKeep) {
  LayerStep step = StepOf(2);
  step.call.is_causal = false;
  const absl::Status status = AttendCallOf(step).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("is_causal is false"));
}

}  // namespace
}  // namespace rapt::cache
