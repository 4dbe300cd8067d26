// The client library against the real server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "rapt/client.h"
#include "tests/support/metrics_page.h"
#include "tests/support/raw_call.h"
#include "tests/support/server_process.h"

namespace rapt::client {
namespace {

using test::ServerProcess;
using testing::Contains;
using testing::Each;
using testing::ElementsAre;
using testing::FieldsAre;
using testing::FloatNear;
using testing::HasSubstr;
using testing::Pointwise;

// Two heads, three tokens, head size 4.
constexpr int64_t kHeads = 2;
constexpr int64_t kLength = 3;
constexpr int64_t kSize = 4;

// The values of [1, kHeads, kLength, kSize] in the order that each layout stores them.
float ValueAt(int64_t head, int64_t position, int64_t element) {
  return std::sin(static_cast<float>(100 * head + 10 * position + element));
}

std::vector<float> HeadsOutside() {
  std::vector<float> values;
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t s = 0; s < kLength; ++s) {
      for (int64_t d = 0; d < kSize; ++d) values.push_back(ValueAt(h, s, d));
    }
  }
  return values;
}

std::vector<float> ToFloats(const Tensor& tensor) {
  const absl::Span<const float> values = tensor.values<float>();
  return {values.begin(), values.end()};
}

class ServedClientTest : public testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = new ServerProcess({"--threads=2"}); }
  static void TearDownTestSuite() {
    delete server_;
    server_ = nullptr;
  }

  void SetUp() override {
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(server_->grpc_address());
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
  }

  // Self-attention over x_.
  AttendCall SelfAttention() const {
    const TensorView x = View<float>({1, kHeads, kLength, kSize}, x_);
    return {.q = x, .k = x, .v = x};
  }

  AttendResult Attend(const AttendCall& call) {
    absl::StatusOr<AttendResult> result = client_->Attend(call);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *std::move(result) : AttendResult();
  }

  // [kHeads, kLength, T], rows of weights.
  std::vector<float> WeightsOf(AttendCall call) {
    call.score_output = ScoreOutput::kWeights;
    const AttendResult result = Attend(call);
    return result.scores ? ToFloats(*result.scores) : std::vector<float>();
  }

  static ServerProcess* server_;
  std::unique_ptr<Client> client_;
  const std::vector<float> x_ = HeadsOutside();
};

ServerProcess* ServedClientTest::server_ = nullptr;

TEST_F(ServedClientTest, ComputesTheHandComputedExample) {
  const std::vector<float> x = {1, 0, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0};
  const TensorView tokens = View<float>({1, 1, 3, 4}, x);
  const AttendResult result = Attend({.q = tokens,
                                      .k = tokens,
                                      .v = tokens,
                                      .score_output = ScoreOutput::kWeights,
                                      .wants_lse = true});
  EXPECT_EQ(result.y.shape(), (Shape{1, 1, 3, 4}));
  EXPECT_THAT(result.y.values<float>(),
              Pointwise(FloatNear(5e-5f), {.8137f, .4935f, .5065f, .1863f, .4935f, .8137f, .1863f,
                                           .5065f, .7259f, .7259f, .2741f, .2741f}));
  ASSERT_TRUE(result.scores.has_value());
  EXPECT_EQ(result.scores->shape(), (Shape{1, 1, 3, 3}));
  EXPECT_THAT(result.scores->values<float>(),
              Pointwise(FloatNear(5e-5f),
                        {.5065f, .1863f, .3072f, .1863f, .5065f, .3072f, .2741f, .2741f, .4519f}));
  ASSERT_TRUE(result.lse.has_value());
  EXPECT_EQ(result.lse->shape(), (Shape{1, 1, 3}));
  const double first = std::log(std::exp(1.0) + std::exp(0.0) + std::exp(0.5));
  EXPECT_NEAR(result.lse->values<float>()[0], first, 1e-5);
  EXPECT_EQ(result.backend, "cpu");
  EXPECT_THAT(result.plan, HasSubstr("cpu/"));
  EXPECT_FALSE(result.present_key.has_value());
}

// A query of 0 sees two keys equally: P = 1/2, dY V^T = (1, 0), delta = 1/2, dS = (1/4, -1/4).
TEST_F(ServedClientTest, ReturnsTheGradientsOfTheHandComputedExample) {
  const std::vector<float> q = {0, 0}, k = {1, 2, 3, 4}, v = {1, 0, 0, 1}, dy = {1, 0};
  const Shape keys = {1, 1, 2, 2};
  BackwardCall call = {.call = {.q = View<float>({1, 1, 1, 2}, q),
                                .k = View<float>(keys, k),
                                .v = View<float>(keys, v),
                                .scale = 1},
                       .dy = View<float>({1, 1, 1, 2}, dy)};
  std::promise<absl::StatusOr<BackwardResult>> promise;
  client_->AttendBackwardAsync(call, {}, [&promise](absl::StatusOr<BackwardResult> result) {
    promise.set_value(std::move(result));
  });
  for (const auto& result : {client_->AttendBackward(call), promise.get_future().get()}) {
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_THAT(ToFloats(*result->dq), Pointwise(FloatNear(1e-6F), {-0.5F, -0.5F}));
    EXPECT_THAT(ToFloats(*result->dk), Each(FloatNear(0, 1e-6F)));
    EXPECT_THAT(ToFloats(*result->dv), Pointwise(FloatNear(1e-6F), {0.5F, 0.0F, 0.5F, 0.0F}));
    EXPECT_EQ(result->dv->shape(), keys);
    EXPECT_THAT(result->plan, HasSubstr("cpu/"));
  }

  call.gradients = {"d_head_sink"};
  const absl::Status refused = client_->AttendBackward(call).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("head_sink is not given"));
}

// operator_calls_test has the calls that are valid.
TEST_F(ServedClientTest, ModelCallsNameWhatIsWrong) {
  const std::vector<float> x = {1, 0, 1, 0};
  ModelCall call{.model = "rotary_embedding",
                 .inputs = {{"X", View<float>({1, 1, 2, 2}, x)}},
                 .parameters = {{"rope_theta", 10000.0}}};
  call.inputs[0].second.shape = {1, 1, 2, 4};
  EXPECT_THAT(
      std::string(client_->Infer(call).status().message()),
      HasSubstr("X has shape [1, 1, 2, 4] of FP32, which is 32 bytes, but its data has 16"));
  call.model = "none";
  call.inputs.clear();
  EXPECT_EQ(client_->Infer(call).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ServedClientTest, KeepsAStateInsteadOfKeys) {
  const std::vector<float> q = {1, 2}, k = {3, 4}, v = {5, 6}, past = {10};
  ModelCall call{.model = "linear_attention",
                 .inputs = {{"query", View<float>({1, 2, 1}, q)},
                            {"key", View<float>({1, 2, 1}, k)},
                            {"value", View<float>({1, 2, 1}, v)},
                            {"past_state", View<float>({1, 1, 1, 1}, past)}},
                 .parameters = {{"q_num_heads", 1},
                                {"kv_num_heads", 1},
                                {"update_rule", "linear"},
                                {"scale", 0.5}},
                 .outputs = {"output", "present_state"}};
  const absl::StatusOr<ModelResult> result = client_->Infer(call);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->outputs.at("output").values<float>(), ElementsAre(12.5, 49));
  EXPECT_THAT(result->outputs.at("present_state").values<float>(), ElementsAre(49));
}

TEST_F(ServedClientTest, StreamsTokensWithTheirState) {
  const std::vector<float> x = {1, 2, 3, 4}, past = {10}, decay = {-0.5F, -0.25F, 0, -1};
  const auto tokens = [&](size_t begin, int64_t count) {
    const auto part = [&](const std::vector<float>& values) {
      return TensorView{DType::kFloat32,
                        {1, count, 1},
                        absl::MakeConstSpan(reinterpret_cast<const std::byte*>(&values[begin]),
                                            static_cast<size_t>(count) * sizeof(float))};
    };
    ModelCall call{.model = "linear_attention",
                   .inputs = {{"query", part(x)},
                              {"key", part(x)},
                              {"value", part(x)},
                              {"decay", part(decay)}},
                   .outputs = {"output"}};
    if (begin > 0) return call;
    call.inputs.emplace_back("past_state", View<float>({1, 1, 1, 1}, past));
    call.parameters = {{"q_num_heads", 1},
                       {"kv_num_heads", 1},
                       {"update_rule", "gated"},
                       {"scale", 0.5},
                       {"chunk_size", 1}};
    return call;
  };
  const absl::StatusOr<ModelResult> whole = client_->Infer(tokens(0, 4));
  ASSERT_TRUE(whole.ok()) << whole.status();
  const std::unique_ptr<ModelStream> stream = client_->LinearAttendStream();
  const absl::StatusOr<ModelResult> first = stream->Infer(tokens(0, 3));
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->outputs.size(), 1U);
  EXPECT_EQ(first->backend, "cpu");
  ModelCall call = tokens(3, 1);
  call.outputs.emplace_back("present_state");
  const absl::StatusOr<ModelResult> last = stream->Infer(call);
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_EQ(last->outputs.at("present_state").shape(), (Shape{1, 1, 1, 1}));
  EXPECT_FLOAT_EQ(last->outputs.at("output").values<float>()[0],
                  whole->outputs.at("output").values<float>()[3]);
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(stream->Infer(call).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(stream->Finish().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(ServedClientTest, AnErrorEndsAStreamOfTokens) {
  const std::vector<float> x = {1, 2};
  const TensorView part = View<float>({1, 2, 1}, x);
  ModelCall tokens{.inputs = {{"query", part}, {"key", part}, {"value", part}}};
  ModelCall first = tokens;
  first.parameters = {{"q_num_heads", 1}, {"kv_num_heads", 1}, {"update_rule", "linear"}};
  std::unique_ptr<ModelStream> stream = client_->LinearAttendStream();
  ASSERT_TRUE(stream->Infer(first).ok());
  EXPECT_THAT(std::string(stream->Infer(first).status().message()),
              HasSubstr("q_num_heads is set in a later message"));
  EXPECT_EQ(stream->Finish().code(), absl::StatusCode::kFailedPrecondition);

  stream = client_->LinearAttendStream();
  ASSERT_TRUE(stream->Infer(first).ok());
  tokens.inputs[1].second.shape = {1, 1, 1};
  EXPECT_THAT(std::string(stream->Infer(tokens).status().message()),
              HasSubstr("key has shape [1, 1, 1] of FP32, which is 4 bytes"));
  EXPECT_EQ(stream->Finish().code(), absl::StatusCode::kFailedPrecondition);

  std::stop_source stop;
  stream = client_->LinearAttendStream({.stop = stop.get_token()});
  ASSERT_TRUE(stream->Infer(first).ok());
  tokens.inputs[1].second = part;
  stop.request_stop();
  EXPECT_EQ(stream->Infer(tokens).status().code(), absl::StatusCode::kCancelled);
}

TEST_F(ServedClientTest, EveryMaskTypeHidesTheSameKeys) {
  const int32_t int32s[] = {1, 0, 1};
  const int64_t int64s[] = {1, 0, 1};
  const int8_t int8s[] = {1, 0, 1};
  const uint8_t uint8s[] = {1, 0, 1};
  const bool bools[] = {true, false, true};
  const float floats[] = {0, -INFINITY, 0};
  const TensorView masks[] = {View<bool>({3}, bools),     View<int8_t>({3}, int8s),
                              View<uint8_t>({3}, uint8s), View<int32_t>({3}, int32s),
                              View<int64_t>({3}, int64s), View<float>({3}, floats)};
  AttendCall call = SelfAttention();
  call.mask = masks[0];
  const std::vector<float> expected = WeightsOf(call);
  ASSERT_EQ(expected.size(), static_cast<size_t>(kHeads * kLength * 3));
  for (size_t row = 0; row < expected.size(); row += 3) {
    EXPECT_EQ(expected[row + 1], 0) << row;
    EXPECT_NEAR(expected[row] + expected[row + 2], 1, 1e-6) << row;
  }
  for (const TensorView& mask : masks) {
    call.mask = mask;
    EXPECT_EQ(WeightsOf(call), expected) << NameOf(mask.dtype);
  }
}

TEST_F(ServedClientTest, AnEmptyBatchIsValid) {
  const TensorView empty = View<float>({0, 1, 3, 4}, {});
  EXPECT_EQ(Attend({.q = empty, .k = empty, .v = empty}).y.shape(), (Shape{0, 1, 3, 4}));
}

TEST_F(ServedClientTest, ConcurrentCallsGetTheirOwnResponses) {
  constexpr int kCalls = 32;
  std::vector<std::vector<float>> values(kCalls);
  std::vector<std::promise<absl::StatusOr<AttendResult>>> results(kCalls);
  for (int i = 0; i < kCalls; ++i) {
    values[i].assign(kLength * kSize, static_cast<float>(i));
    const TensorView x = View<float>({1, 1, kLength, kSize}, values[i]);
    client_->AttendAsync({.q = x, .k = x, .v = x}, {},
                         [&result = results[i]](absl::StatusOr<AttendResult> answer) {
                           result.set_value(std::move(answer));
                         });
  }
  for (int i = 0; i < kCalls; ++i) {
    const absl::StatusOr<AttendResult> result = results[i].get_future().get();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_THAT(result->y.values<float>(), Each(FloatNear(static_cast<float>(i), 1e-5f)));
  }
}

TEST_F(ServedClientTest, WrongCallsNameTheField) {
  AttendCall call = SelfAttention();
  call.k.shape = {1, kHeads, 6, 2};
  const absl::Status status = client_->Attend(call).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("k has head size 2, q has 4"));
}

TEST_F(ServedClientTest, DiagnosesAFloatMaskOfZeroAndOne) {
  const float mask[] = {1, 0, 1};
  AttendCall call = SelfAttention();
  call.mask = View<float>({3}, mask);
  const absl::StatusOr<Diagnosis> diagnosis = client_->Diagnose(call);
  ASSERT_TRUE(diagnosis.ok()) << diagnosis.status();
  EXPECT_THAT(diagnosis->problem, HasSubstr("Hq=2"));
  EXPECT_THAT(diagnosis->warnings, Contains(HasSubstr("mask")));
  ASSERT_EQ(diagnosis->inputs.size(), 4u);
  EXPECT_EQ(diagnosis->inputs[3].name, "mask");
  EXPECT_EQ(diagnosis->inputs[3].shape, (Shape{3}));
  EXPECT_EQ(diagnosis->inputs[3].mean, 2.0 / 3);
  EXPECT_EQ(diagnosis->pairs, kHeads * kLength * kLength);
  EXPECT_EQ(diagnosis->empty_rows, 0);
  EXPECT_NEAR(diagnosis->row_sums.min.value_or(0), 1, 1e-6);
  const auto chosen = std::find_if(diagnosis->backends.begin(), diagnosis->backends.end(),
                                   [](const BackendChoice& choice) { return choice.chosen; });
  ASSERT_NE(chosen, diagnosis->backends.end());
  EXPECT_EQ(chosen->backend, "cpu");
}

TEST_F(ServedClientTest, EstimatesTheScoreMatrixOfTheTutorial) {
  const absl::StatusOr<MemoryEstimates> memory =
      client_->EstimateMemory({.batch = 32, .query_heads = 8, .lengths = {512, 1024}});
  ASSERT_TRUE(memory.ok()) << memory.status();
  ASSERT_EQ(memory->estimates.size(), 2u);
  EXPECT_EQ(memory->estimates[0].length, 512);
  EXPECT_EQ(memory->estimates[0].standard_bytes, int64_t{256} << 20);
  EXPECT_EQ(memory->estimates[1].standard_bytes, int64_t{1024} << 20);
  EXPECT_LT(memory->estimates[1].fused_bytes, memory->estimates[1].chunked_bytes);
  EXPECT_EQ(client_->EstimateMemory({.lengths = {}}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(ServedClientTest, EstimatesWhatABlockMaskSaves) {
  const absl::StatusOr<MemoryEstimates> memory = client_->EstimateMemory(
      {.query_heads = 8,
       .lengths = {1024},
       .inputs = {.block_q = 64, .block_k = 128, .alibi = true, .per_head = true}});
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_THAT(memory->estimates[0].inputs,
              ElementsAre(FieldsAre("block_mask", 8 * 16 * 8, 8 * (1024 * 1024 - 16 * 8)),
                          FieldsAre("alibi", 0, 8 * 1024 * 1024 * 4)));
}

TEST_F(ServedClientTest, ReturnsServerInfo) {
  const absl::StatusOr<ServerInfo> info = client_->GetServerInfo();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_FALSE(info->version.empty());
  EXPECT_EQ(info->compute_threads, 2);
  EXPECT_GT(info->max_message_bytes, 0);
  EXPECT_EQ(info->admission.max_open_calls, 4096);
  EXPECT_EQ(info->admission.default_deadline, std::chrono::minutes(1));
  ASSERT_FALSE(info->backends.empty());
  EXPECT_EQ(info->backends.back().name, "reference");
  EXPECT_TRUE(info->backends.back().available);
}

TEST_F(ServedClientTest, ReturnsHealth) {
  const absl::StatusOr<HealthStatus> server = client_->CheckHealth();
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ(*server, HealthStatus::kServing);
  const absl::StatusOr<HealthStatus> service = client_->CheckHealth("rapt.v1.AttentionService");
  ASSERT_TRUE(service.ok()) << service.status();
  EXPECT_EQ(*service, HealthStatus::kServing);
  EXPECT_EQ(client_->CheckHealth("no.such.Service").status().code(), absl::StatusCode::kNotFound);
}

// Self-attention over one token, for the tests below.
class OneToken {
 public:
  operator AttendCall() const {
    const TensorView x = View<float>({1, 1, 1, 4}, x_);
    return {.q = x, .k = x, .v = x};
  }

 private:
  const std::vector<float> x_ = {1, 2, 3, 4};
};

TEST(ServerFaultsTest, ACallOverTheServersLimitThatCannotBeStreamedIsRejected) {
  ServerProcess server({"--max_message_bytes=65536"});
  const auto client = Client::Connect(server.grpc_address());
  ASSERT_TRUE(client.ok()) << client.status();
  const std::vector<float> values(1 << 16);
  const TensorView x = View<float>({1, 1, 1 << 10, 1 << 6}, values);
  EXPECT_EQ((*client)->Attend({.q = x, .k = x, .v = x, .wants_present = true}).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE((*client)->Attend(OneToken()).ok());
}

// The budget has 28 MiB for messages that are not small. Another caller, which announces the
// largest message and never sends it, holds 20 MiB of them.
TEST(ServerFaultsTest, ACallReservesOnlyItsOwnMessageWhileItIsSent) {
  ServerProcess server({"--memory_budget_bytes=67108864", "--max_message_bytes=20971520",
                        "--min_receive_bytes_per_second=1", "--max_queue_delay=100ms"});
  const auto client = Client::Connect(server.grpc_address());
  ASSERT_TRUE(client.ok()) << client.status();
  test::RawCall silent(server.grpc_address(), "/rapt.v1.AttentionService/Attend");
  silent.SendPart(20971520, 0);
  test::WaitForMetric(server, "rapt_memory_reserved_bytes", 20971520);
  const absl::Status attend = (*client)->Attend(OneToken()).status();
  EXPECT_TRUE(attend.ok()) << attend;
  std::promise<absl::Status> attend_async;
  (*client)->AttendAsync(OneToken(), {},
                         [&attend_async](const absl::StatusOr<AttendResult>& result) {
                           attend_async.set_value(result.status());
                         });
  const absl::Status async_status = attend_async.get_future().get();
  EXPECT_TRUE(async_status.ok()) << async_status;
  const absl::Status diagnose = (*client)->Diagnose(OneToken()).status();
  EXPECT_TRUE(diagnose.ok()) << diagnose;
}

TEST(ServerFaultsTest, AServerKilledDuringACallIsUnavailable) {
  ServerProcess server({"--backend=reference", "--threads=1"});
  const auto client = Client::Connect(server.grpc_address(), {.retries = {.max_attempts = 1}});
  ASSERT_TRUE(client.ok()) << client.status();
  // Seconds of work in a small message: the server cannot respond first.
  const std::vector<float> values(16384, 0.5f);
  const TensorView x = View<float>({1, 1, 16384, 1}, values);
  std::promise<absl::Status> status;
  (*client)->AttendAsync(
      {.q = x, .k = x, .v = x}, {},
      [&status](const absl::StatusOr<AttendResult>& result) { status.set_value(result.status()); });
  server.Signal(SIGKILL);
  EXPECT_EQ(server.Wait(), -SIGKILL);
  const absl::Status got = status.get_future().get();
  EXPECT_EQ(got.code(), absl::StatusCode::kUnavailable) << got;
  EXPECT_THAT(got.message(), HasSubstr(server.grpc_address()));
}

TEST(ServerFaultsTest, RetriesBridgeARestart) {
  auto server = std::make_unique<ServerProcess>();
  const std::string address = server->grpc_address();
  RetryPolicy retries{.max_attempts = 10'000, .max_backoff = std::chrono::milliseconds(100)};
  const auto client = Client::Connect(address, {.retries = retries});
  ASSERT_TRUE(client.ok()) << client.status();
  const OneToken call;
  ASSERT_TRUE((*client)->Attend(call).ok());
  server->Signal(SIGKILL);
  EXPECT_EQ(server->Wait(), -SIGKILL);
  std::promise<absl::StatusOr<AttendResult>> result;
  (*client)->AttendAsync(call, {}, [&result](absl::StatusOr<AttendResult> answer) {
    result.set_value(std::move(answer));
  });
  server = std::make_unique<ServerProcess>(std::vector<std::string>{"--grpc_address=" + address});
  const absl::StatusOr<AttendResult> got = result.get_future().get();
  EXPECT_TRUE(got.ok()) << got.status();
}

}  // namespace
}  // namespace rapt::client
