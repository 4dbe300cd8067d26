// The metrics of calls on /metrics, checked by Prometheus and against docs/metrics.md.
#include "server/metrics/metrics.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "attention/backend.h"
#include "attention/variants.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "server/rejection.h"
#include "tests/support/metrics_page.h"
#include "tests/support/raw_call.h"
#include "tests/support/server_process.h"

namespace rapt {
namespace {

using inference::GRPCInferenceService;
using inference::ModelInferRequest;
using inference::ModelInferResponse;
using test::ReadMetric;
using test::ReadMetricsPage;
using test::ServerProcess;
using test::SumOnPage;
using test::WaitForMetric;

constexpr char kMethod[] = "inference.GRPCInferenceService/ModelInfer";
constexpr char kPath[] = "/inference.GRPCInferenceService/ModelInfer";

// --- The instruments alone -----------------------------------------------------------------------

CallReport Answered(const Problem& problem) {
  CallReport report;
  report.ended_in = Stage::kSend;
  report.total = std::chrono::microseconds(70);
  report.problem = &problem;
  report.routing.backend = BuiltInBackends()[0];
  return report;
}

TEST(MetricsTest, CountsACallByAllItsLabels) {
  Metrics metrics(BuiltInBackends());
  const Problem problem{.dtype = DType::kBFloat16, .batch = 3};
  const auto count = metrics.ForMethod("service/Method");
  count(Answered(problem));
  count(Answered(problem));
  CallReport failed;
  failed.status = absl::InvalidArgumentError("no");
  count(failed);
  const std::string page = metrics.Serialize();
  EXPECT_EQ(
      SumOnPage(
          page, "rapt_requests_total",
          {{"method", "service/Method"}, {"backend", "cpu"}, {"dtype", "BF16"}, {"code", "OK"}}),
      2);
  EXPECT_EQ(SumOnPage(page, "rapt_requests_total",
                      {{"backend", "none"}, {"dtype", "none"}, {"code", "INVALID_ARGUMENT"}}),
            1);
  EXPECT_EQ(SumOnPage(page, "rapt_requests_total"), 3);
  EXPECT_EQ(SumOnPage(page, "rapt_batch_size_sum"), 6);
  EXPECT_EQ(SumOnPage(page, "rapt_rejected_total"), 0) << "an error is not a rejection";
}

// Series of the page that have this name and these labels.
int64_t SeriesOnPage(const std::string& page, const std::string& name, const std::string& labels) {
  int64_t count = 0;
  for (const absl::string_view line : absl::StrSplit(page, '\n')) {
    if (absl::StartsWith(line, name + "{") && absl::StrContains(line, labels)) ++count;
  }
  return count;
}

TEST(MetricsTest, AMethodHasTheSeriesOfWhatOccurredAndOneZero) {
  Metrics metrics(BuiltInBackends());
  const auto count = metrics.ForMethod("service/Called");
  metrics.ForMethod("service/Idle");
  CallReport failed;
  failed.status = absl::InternalError("no");
  count(failed);
  const std::string page = metrics.Serialize();
  EXPECT_EQ(SumOnPage(page, "rapt_requests_total", {{"method", "service/Idle"}, {"code", "OK"}}),
            0);
  EXPECT_EQ(SeriesOnPage(page, "rapt_requests_total", "service/Idle"), 1);
  EXPECT_EQ(SeriesOnPage(page, "rapt_requests_total", "service/Called"), 2);
  EXPECT_EQ(SeriesOnPage(page, "rapt_request_duration_seconds_bucket", "service/Idle"), 0);
  EXPECT_EQ(SeriesOnPage(page, "rapt_request_duration_seconds_count", "service/Called"), 1);
}

// A rate of a series that begins with its first call misses that call.
TEST(MetricsTest, EveryCodeIsThereBeforeItOccurs) {
  Metrics metrics(BuiltInBackends());
  const auto count = metrics.ForMethod("service/Method");
  metrics.ForMethod("service/Other");
  const char* name = "rapt_finished_calls_total";
  EXPECT_EQ(SeriesOnPage(metrics.Serialize(), name, "code="), 17);
  for (const char* code : {"OK", "INTERNAL", "RESOURCE_EXHAUSTED"}) {
    EXPECT_EQ(SumOnPage(metrics.Serialize(), name, {{"code", code}}), 0) << code;
  }
  CallReport failed;
  failed.status = absl::InternalError("no");
  count(failed);
  EXPECT_EQ(SumOnPage(metrics.Serialize(), name, {{"code", "INTERNAL"}}), 1);
  EXPECT_EQ(SumOnPage(metrics.Serialize(), name), 1);
}

TEST(MetricsTest, ADurationIsInEveryBucketThatHoldsIt) {
  Metrics metrics(BuiltInBackends());
  const Problem problem{.batch = 1};
  metrics.ForMethod("service/Method")(Answered(problem));  // 70 us
  const std::string page = metrics.Serialize();
  const char* bucket = "rapt_request_duration_seconds_bucket";
  EXPECT_EQ(SumOnPage(page, bucket, {{"le", "5e-05"}}), 0) << page;
  EXPECT_EQ(SumOnPage(page, bucket, {{"le", "0.0001"}}), 1);
  EXPECT_EQ(SumOnPage(page, bucket, {{"le", "30"}}), 1);
  EXPECT_EQ(SumOnPage(page, bucket, {{"le", "+Inf"}}), 1);
  EXPECT_DOUBLE_EQ(SumOnPage(page, "rapt_request_duration_seconds_sum"), 70e-6);
}

TEST(MetricsTest, UnreachedStagesAreNotCounted) {
  Metrics metrics(BuiltInBackends());
  CallReport report;
  report.status = absl::DeadlineExceededError("late");
  report.ended_in = Stage::kReceive;
  report.time_of(Stage::kQueue) = std::chrono::milliseconds(2);
  report.time_of(Stage::kReceive) = std::chrono::seconds(3);
  metrics.ForMethod("service/Method")(report);
  const std::string page = metrics.Serialize();
  const char* name = "rapt_stage_duration_seconds_count";
  EXPECT_EQ(SumOnPage(page, name, {{"stage", "queue"}}), 1);
  EXPECT_EQ(SumOnPage(page, name, {{"stage", "receive"}}), 1);
  EXPECT_EQ(SumOnPage(page, name, {{"stage", "compute"}}), 0);
  EXPECT_EQ(SumOnPage(page, name, {{"stage", "send"}}), 0);
  EXPECT_EQ(SumOnPage(page, "rapt_deadline_exceeded_total", {{"phase", "receive"}}), 1);
  EXPECT_EQ(SumOnPage(page, "rapt_deadline_exceeded_total"), 1);
}

TEST(MetricsTest, CountsFallbacks) {
  Metrics metrics(BuiltInBackends());
  const Problem problem{.batch = 1};
  CallReport report = Answered(problem);
  report.routing.declined = BuiltInBackends()[0];
  report.routing.backend = BuiltInBackends()[1];
  metrics.ForMethod("service/Method")(report);
  const std::map<std::string, std::string> labels = {
      {"from", "cpu"}, {"to", "reference"}, {"reason", "unsupported"}};
  EXPECT_EQ(SumOnPage(metrics.Serialize(), "rapt_backend_fallback_total", labels), 1);
}

TEST(MetricsTest, ObservesTheSizeOfARun) {
  Metrics metrics(BuiltInBackends());
  const Problem problem{.batch = 1};
  const auto count = metrics.ForMethod("service/Method");
  CallReport report = Answered(problem);
  count(report);  // it did not reach a run
  report.batch_size = 1;
  count(report);
  report.batch_size = 3;
  for (int n = 0; n < 3; ++n) count(report);
  const std::string page = metrics.Serialize();
  EXPECT_EQ(SumOnPage(page, "rapt_run_requests_bucket", {{"le", "1"}}), 1);
  EXPECT_EQ(SumOnPage(page, "rapt_run_requests_bucket", {{"le", "4"}}), 4);
  EXPECT_EQ(SumOnPage(page, "rapt_run_requests_sum"), 10);
}

TEST(MetricsTest, CountsEachVariantOfAnAttentionRequest) {
  Metrics metrics(BuiltInBackends());
  const auto count = metrics.ForMethod("service/Method");
  const Problem plain{.batch = 1};
  const Problem both{.batch = 1, .head_sink = DType::kFloat32, .alibi = true};
  count(Answered(plain));
  count(Answered(both));
  count(Answered(both));
  count(CallReport());  // without a valid message
  CallReport other = Answered(plain);
  other.model = ModelId(*FindOperator("rotary_embedding"));
  count(other);
  const std::string page = metrics.Serialize();
  const char* name = "rapt_variant_requests_total";
  EXPECT_EQ(SumOnPage(page, name, {{"variant", "plain"}}), 1);
  EXPECT_EQ(SumOnPage(page, name, {{"variant", "head_sink"}}), 2);
  EXPECT_EQ(SumOnPage(page, name, {{"variant", "alibi"}}), 2);
  EXPECT_EQ(SumOnPage(page, name), 5);
}

TEST(MetricsTest, CountsEachLayerByItsNameUpToALimit) {
  Metrics metrics(BuiltInBackends());
  const auto count = metrics.ForMethod("service/Method");
  const Problem problem{.batch = 1};
  CallReport report = Answered(problem);
  count(report);
  constexpr int kMore = 5;
  for (size_t n = 0; n < PerModel<int>::kMaxLayers + kMore; ++n) {
    report.model = ModelId(std::make_shared<const std::string>(absl::StrCat("layer", n)));
    count(report);
    if (n == 0) count(report);
  }
  const std::string page = metrics.Serialize();
  const char* name = "rapt_model_requests_total";
  EXPECT_EQ(SumOnPage(page, name, {{"model", "attention"}}), 1);
  EXPECT_EQ(SumOnPage(page, name, {{"model", "layer0"}}), 2);
  EXPECT_EQ(SumOnPage(page, name, {{"model", "layer999"}}), 1);
  EXPECT_EQ(SumOnPage(page, name, {{"model", "others"}}), kMore);
}

TEST(MetricsTest, ALayerAddsALineToThePage) {
  Metrics metrics(BuiltInBackends());
  const auto count = metrics.ForMethod("service/Method");
  const Problem problem{.batch = 1};
  CallReport report = Answered(problem);
  count(report);
  const size_t before = metrics.Serialize().size();
  constexpr size_t kLayers = 500;
  for (size_t n = 0; n < kLayers; ++n) {
    report.model = ModelId(std::make_shared<const std::string>(absl::StrCat("layer", 100 + n)));
    count(report);
  }
  const size_t of_layers = metrics.Serialize().size() - before;
  EXPECT_LT(of_layers, kLayers * (60 + absl::string_view("layer100").size()))
      << "docs/metrics.md says so";
}

TEST(MetricsTest, CountsPartialFallbacks) {
  Metrics metrics(BuiltInBackends());
  const Problem problem{.batch = 1};
  CallReport report = Answered(problem);
  report.routing.backend = BuiltInBackends()[0];
  report.routing.piece_fallback = BuiltInBackends()[1];
  metrics.ForMethod("service/Method")(report);
  const std::map<std::string, std::string> labels = {
      {"from", "cpu"}, {"to", "reference"}, {"reason", "stand_in"}};
  EXPECT_EQ(SumOnPage(metrics.Serialize(), "rapt_backend_fallback_total", labels), 1);
  EXPECT_EQ(SumOnPage(metrics.Serialize(), "rapt_backend_fallback_total"), 1);
}

TEST(RejectionTest, AStatusCarriesTheReason) {
  const absl::Status status =
      Reject(Rejection::kQueueFull, absl::StatusCode::kResourceExhausted, "full");
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "full");
  EXPECT_EQ(RejectionOf(status), Rejection::kQueueFull);
  EXPECT_EQ(RejectionOf(absl::ResourceExhaustedError("full")), Rejection::kNone);
  EXPECT_EQ(RejectionOf(absl::OkStatus()), Rejection::kNone);
}

// --- A server's page -----------------------------------------------------------------------------

// Self-attention over ones, one head.
ModelInferRequest Call(int64_t batch, int64_t length) {
  ModelInferRequest request;
  request.set_model_name("attention");
  for (const char* name : {"Q", "K", "V"}) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype("FP32");
    for (const int64_t axis : {batch, int64_t{1}, length, int64_t{64}}) input.add_shape(axis);
    const std::vector<float> ones(static_cast<size_t>(batch * length * 64), 1);
    request.add_raw_input_contents(ones.data(), ones.size() * sizeof(float));
  }
  return request;
}

grpc::Status Infer(const ServerProcess& server, const ModelInferRequest& request,
                   std::chrono::milliseconds timeout = std::chrono::hours(1)) {
  const auto stub = GRPCInferenceService::NewStub(
      grpc::CreateChannel(server.grpc_address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  ModelInferResponse response;
  return stub->ModelInfer(&context, request, &response);
}

TEST(MetricsPageTest, ShowsEveryMetricOfACall) {
  const ServerProcess server({"--threads=1"});
  const ModelInferRequest request = Call(2, 8);
  ASSERT_TRUE(Infer(server, request).ok());
  WaitForMetric(server, "rapt_requests_total", 1,
                {{"method", kMethod}, {"backend", "cpu"}, {"dtype", "FP32"}, {"code", "OK"}});
  const std::string page = ReadMetricsPage(server);
  for (const char* stage : {"receive", "queue", "compute", "send"}) {
    EXPECT_EQ(SumOnPage(page, "rapt_stage_duration_seconds_count", {{"stage", stage}}), 1);
  }
  EXPECT_EQ(SumOnPage(page, "rapt_request_duration_seconds_count", {{"method", kMethod}}), 1);
  EXPECT_EQ(SumOnPage(page, "rapt_payload_bytes_total", {{"direction", "received"}}),
            static_cast<double>(request.ByteSizeLong()));
  EXPECT_GT(SumOnPage(page, "rapt_payload_bytes_total", {{"direction", "sent"}}), 2 * 8 * 64 * 4);
  EXPECT_EQ(SumOnPage(page, "rapt_flops_total"), 2 * 8 * 8 * 64 * 4.0);
  EXPECT_EQ(SumOnPage(page, "rapt_batch_size_sum"), 2);
  EXPECT_EQ(SumOnPage(page, "rapt_run_requests_bucket", {{"le", "1"}}), 1)
      << "computed by its own run";
  for (const char* queue : {"memory", "threads", "lanes"}) {
    EXPECT_EQ(SumOnPage(page, "rapt_queue_depth", {{"queue", queue}}), 0) << queue;
    EXPECT_EQ(SumOnPage(page, "rapt_queue_oldest_age_seconds", {{"queue", queue}}), 0) << queue;
  }
  EXPECT_EQ(SumOnPage(page, "rapt_ready"), 1);
  EXPECT_EQ(SumOnPage(page, "rapt_compute_threads"), 1);
  EXPECT_EQ(SumOnPage(page, "rapt_build_info", {{"version", RAPT_VERSION}}), 1);
  EXPECT_GT(SumOnPage(page, "process_resident_memory_bytes"), 1e6);
  EXPECT_GT(SumOnPage(page, "process_open_fds"), 3);
  EXPECT_GT(SumOnPage(page, "process_start_time_seconds"), 1.6e9);
}

TEST(MetricsPageTest, ShowsTheVariantsOfCalls) {
  const ServerProcess server;
  const char* name = "rapt_variant_requests_total";
  EXPECT_EQ(ReadMetric(server, name, {{"variant", "entmax15"}}), 0) << "from the start";
  ASSERT_TRUE(Infer(server, Call(1, 8)).ok());
  ModelInferRequest request = Call(1, 8);
  (*request.mutable_parameters())["rope_theta"].set_double_param(10000);
  (*request.mutable_parameters())["normalizer"].set_string_param("sparsemax");
  const grpc::Status status = Infer(server, request);
  ASSERT_TRUE(status.ok()) << status.error_message();
  (*request.mutable_parameters())["normalizer"].set_string_param("none");
  ASSERT_FALSE(Infer(server, request).ok());
  WaitForMetric(server, "rapt_requests_total", 3, {{"method", kMethod}});
  const std::string page = ReadMetricsPage(server);
  for (const char* variant : {"plain", "rotary", "sparsemax"}) {
    EXPECT_EQ(SumOnPage(page, name, {{"variant", variant}}), 1) << variant;
  }
  EXPECT_EQ(SumOnPage(page, name), 3);
}

TEST(MetricsPageTest, ShowsReservationsDuringACall) {
  ServerProcess server({"--threads=1", "--backend=reference"});
  std::vector<std::thread> callers;
  for (int n = 0; n < 3; ++n) {
    callers.emplace_back([&] { EXPECT_FALSE(Infer(server, Call(1, 8192)).ok()); });
  }
  WaitForMetric(server, "rapt_open_calls", 3);
  WaitForMetric(server, "rapt_compute_threads_busy", 1);
  EXPECT_GT(ReadMetric(server, "rapt_memory_reserved_bytes", {{"kind", "receive"}}), 0);
  EXPECT_GT(ReadMetric(server, "rapt_memory_reserved_bytes", {{"kind", "compute"}}), 0);
  server.Signal(SIGKILL);  // the computation would take long
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(server.Wait(), -SIGKILL);
}

TEST(MetricsPageTest, ADeadlineIsCountedByStage) {
  const ServerProcess server({"--threads=1", "--backend=reference"});
  EXPECT_EQ(Infer(server, Call(1, 16384), std::chrono::milliseconds(500)).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  WaitForMetric(server, "rapt_open_calls", 0);
  // gRPC also cancels a call whose deadline passed; either may reach the executor first.
  const std::string page = ReadMetricsPage(server);
  EXPECT_EQ(SumOnPage(page, "rapt_deadline_exceeded_total", {{"phase", "compute"}}) +
                SumOnPage(page, "rapt_cancelled_total", {{"phase", "compute"}}),
            1)
      << page;
}

TEST(MetricsPageTest, ARejectionIsCountedByReason) {
  const ServerProcess server(
      {"--memory_budget_bytes=67108864", "--max_open_calls=1", "--max_message_bytes=8388608"});
  {
    test::RawCall too_large(server.grpc_address(), kPath);
    too_large.SendPart(99'999'999, 0);
    EXPECT_EQ(too_large.WaitForStatus(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    WaitForMetric(server, "rapt_rejected_total", 1, {{"reason", "too_large"}});
    const test::RawCall first(server.grpc_address(), kPath);
    WaitForMetric(server, "rapt_open_calls", 1);
    test::RawCall second(server.grpc_address(), kPath);
    EXPECT_EQ(second.WaitForStatus(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    WaitForMetric(server, "rapt_rejected_total", 1, {{"reason", "open_calls"}});
  }
  WaitForMetric(server, "rapt_open_calls", 0);
}

// Its size is known only when it is complete; gRPC could reject it too.
TEST(MetricsPageTest, AnOversizedMessageIsARejection) {
  const ServerProcess server({"--max_message_bytes=100000"});
  const grpc::Status status = Infer(server, Call(1, 1024));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), ::testing::HasSubstr("at most 100000 are allowed"));
  WaitForMetric(server, "rapt_rejected_total", 1, {{"reason", "too_large"}});
  EXPECT_EQ(ReadMetric(server, "rapt_cancelled_total"), 0);
}

TEST(MetricsPageTest, ThePageOfAnIdleServerIsSmall) {
  const ServerProcess server;
  EXPECT_LT(ReadMetricsPage(server).size(), 28u << 10) << "docs/metrics.md says so";
}

TEST(MetricsPageTest, PromtoolAcceptsThePage) {
  const ServerProcess server;
  ASSERT_TRUE(Infer(server, Call(1, 8)).ok());
  const std::string response = ReadMetricsPage(server);
  const std::string page = response.substr(response.find("\r\n\r\n") + 4);
  FILE* const promtool = popen("promtool check metrics", "w");
  ASSERT_NE(promtool, nullptr);
  EXPECT_EQ(fwrite(page.data(), 1, page.size(), promtool), page.size());
  EXPECT_EQ(pclose(promtool), 0);  // promtool returns 3 for lint findings
}

// The help text of each family on the page, by name.
std::map<std::string, std::string> HelpOnPage(const std::string& page) {
  std::map<std::string, std::string> help;
  for (absl::string_view line : absl::StrSplit(page, '\n')) {
    if (!absl::ConsumePrefix(&line, "# HELP ")) continue;
    const std::pair<std::string, std::string> entry = absl::StrSplit(line, absl::MaxSplits(' ', 1));
    help.insert(entry);
  }
  return help;
}

// The meaning of each metric in the reference, the last cell of "| `rapt_ready` | gauge | ... |".
std::map<std::string, std::string> MeaningsInReference() {
  std::ifstream file(RAPT_SOURCE_DIR "/docs/metrics.md");
  std::map<std::string, std::string> meanings;
  for (std::string line; std::getline(file, line);) {
    if (!absl::StartsWith(line, "| `rapt_") && !absl::StartsWith(line, "| `process_")) continue;
    const std::vector<std::string> quoted = absl::StrSplit(line, '`');
    const std::vector<std::string> cells = absl::StrSplit(absl::StripSuffix(line, " |"), "| ");
    meanings[quoted[1]] = cells.back();
  }
  return meanings;
}

TEST(MetricsPageTest, TheReferenceMatchesThePage) {
  const ServerProcess server;
  const std::map<std::string, std::string> help = HelpOnPage(ReadMetricsPage(server));
  EXPECT_GT(help.size(), 20u);
  std::map<std::string, std::string> meanings = MeaningsInReference();
  for (const auto& [name, text] : help) {
    EXPECT_THAT(meanings[name], ::testing::StartsWith(text)) << name;
    meanings.erase(name);
  }
  EXPECT_THAT(meanings, ::testing::IsEmpty()) << "not on the page";
}

TEST(MetricsPageTest, TheReferenceListsEveryVariant) {
  std::ifstream file(RAPT_SOURCE_DIR "/docs/metrics.md");
  std::string row;
  while (std::getline(file, row) && !absl::StartsWith(row, "| variant |")) continue;
  for (const VariantInfo& variant : Variants()) {
    EXPECT_THAT(row, ::testing::HasSubstr(absl::StrCat("`", variant.name, "`")));
  }
}

}  // namespace
}  // namespace rapt
