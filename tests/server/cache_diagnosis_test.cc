// Diagnose of rapt.v1.CacheService, compared with Diagnose of the same tensors sent whole.
#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/rapt/v1/attention.grpc.pb.h"
#include "tests/support/cache_caller.h"
#include "tests/support/cache_model.h"
#include "tests/support/metrics_page.h"
#include "tests/support/server_process.h"
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using google::protobuf::util::MessageDifferencer;
using grpc::StatusCode;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CacheDiagnosisTest : public ::testing::Test, protected CacheCaller {
 protected:
  static void SetUpTestSuite() {
    server_ = new ServerProcess({"--threads=2", "--kv_cache_bytes=67108864", "--grace_period=0s"});
  }
  static void TearDownTestSuite() { delete server_; }

  void SetUp() override { stub_ = StubOf(*server_); }

  grpc::Status Diagnose(const v1::AttendCachedRequest& request, v1::DiagnoseResponse& response) {
    return Call(&v1::CacheService::Stub::Diagnose, request, response);
  }

  // Fills layer 0.
  void Fill(const v1::Cache& cache, const Tokens& tokens) {
    v1::AppendResponse response;
    const grpc::Status status = Append(AppendOf(cache, 0, 0, tokens), response);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }

  static ServerProcess* server_;
};

ServerProcess* CacheDiagnosisTest::server_ = nullptr;

// The tensors of a call on a cache as a batch of one: [1, rows, heads, size].
v1::DiagnoseRequest WholeOf(const v1::AttendCachedRequest& cached, const Tokens& tokens) {
  v1::DiagnoseRequest request;
  v1::AttendRequest& call = *request.mutable_call();
  const auto with_batch = [](const v1::Tensor& tensor) {
    v1::Tensor whole = tensor;
    whole.clear_shape();
    whole.add_shape(1);
    whole.mutable_shape()->MergeFrom(tensor.shape());
    return whole;
  };
  *call.mutable_q() = with_batch(cached.q());
  *call.mutable_k() = with_batch(tokens.k());
  *call.mutable_v() = with_batch(tokens.v());
  if (cached.has_head_sink()) *call.mutable_head_sink() = cached.head_sink();
  v1::Attention& attention = *call.mutable_attention();
  attention.set_layout(v1::BSHD);
  attention.set_causal(true);
  attention.set_alignment(v1::BOTTOM_RIGHT);
  attention.set_softcap(cached.softcap());
  if (cached.has_scale()) attention.set_scale(cached.scale());
  if (cached.has_window()) *attention.mutable_window() = cached.window();
  return request;
}

// A mean is a sum in any order.
double Rounded(double mean) { return std::isnan(mean) ? -1 : std::round(mean * 1e9); }

// What a report says about the numbers, not about the form in which they came.
v1::DiagnoseResponse NumbersOf(v1::DiagnoseResponse report) {
  report.clear_problem();
  report.clear_backends();
  for (v1::TensorReport& input : *report.mutable_inputs()) {
    input.clear_shape();
    input.set_mean(Rounded(input.mean()));
  }
  if (report.has_favor_squared_norm()) {
    report.set_favor_squared_norm(Rounded(report.favor_squared_norm()));
  }
  if (report.has_lsh_reachable_weight()) {
    report.set_lsh_reachable_weight(Rounded(report.lsh_reachable_weight()));
  }
  return report;
}

struct Case {
  const char* name;
  int64_t tokens;
  int rows;
  std::function<void(v1::CreateRequest&)> create = [](v1::CreateRequest&) {};
  std::function<void(v1::AttendCachedRequest&)> call = [](v1::AttendCachedRequest&) {};
  std::function<void(v1::Attention&)> whole = [](v1::Attention&) {};
};

TEST_F(CacheDiagnosisTest, SaysWhatDiagnoseOfTheSameTensorsSays) {
  Rng rng(1);
  const Case cases[] = {
      {"one row", 200, 1},
      {"within a page", 3, 3},
      {"rows from the start", 130, 130},
      {"softcap and scale", 200, 2, {}, [](auto& r) { r.set_softcap(3), r.set_scale(0.7); }},
      {"window", 200, 4, {}, [](auto& r) { r.mutable_window()->set_left(70); }},
      {"head sink",
       100,
       2,
       {},
       [](auto& r) {
         *r.mutable_head_sink() = ToMessage({0, 1, 2, 3}, {4});
       }},
      {"first position", 100, 2, [](auto& c) { c.set_first_position(5000); }},
      // The layer keeps all tokens, as keep_first covers those that the window would free.
      {"kept first and last",
       130,
       3,
       [](auto& c) {
         c.mutable_shapes(0)->set_keep_first(64);
         c.mutable_shapes(0)->set_keep_last(50);
       },
       {},
       [](auto& a) { a.set_prefix_keys(64), a.mutable_window()->set_left(49); }},
      // With a softcap, as estimates are of plain calls on unrounded keys.
      {"8 bits", 100, 2, [](auto& c) { c.set_storage(v1::STORAGE_INT8); },
       [](auto& r) { r.set_softcap(5); }},
      {"NaN",
       70,
       1,
       {},
       [](auto& r) {
         const float nan = std::numeric_limits<float>::quiet_NaN();
         r.mutable_q()->mutable_data()->replace(0, sizeof nan, reinterpret_cast<const char*>(&nan),
                                                sizeof nan);
       }},
  };
  const auto whole_stub = v1::AttentionService::NewStub(
      grpc::CreateChannel(server_->grpc_address(), grpc::InsecureChannelCredentials()));
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    v1::CreateRequest create = CreateOf(1);
    if (c.create) c.create(create);
    const v1::Cache cache = CreateCache(create);
    const Tokens tokens = RandomTokens(c.tokens, rng);
    Fill(cache, tokens);
    v1::AttendCachedRequest request = AttendOf(cache, 0, c.tokens, {}, c.rows, rng);
    if (c.call) c.call(request);
    v1::DiagnoseResponse cached, whole;
    const grpc::Status status = Diagnose(request, cached);
    ASSERT_TRUE(status.ok()) << status.error_message();
    v1::DiagnoseRequest whole_request = WholeOf(request, Stored(tokens, create.storage()));
    if (c.whole) c.whole(*whole_request.mutable_call()->mutable_attention());
    grpc::ClientContext context;
    const grpc::Status whole_status = whole_stub->Diagnose(&context, whole_request, &whole);
    ASSERT_TRUE(whole_status.ok()) << whole_status.error_message();
    std::string difference;
    MessageDifferencer differencer;
    differencer.ReportDifferencesToString(&difference);
    EXPECT_TRUE(differencer.Compare(NumbersOf(whole), NumbersOf(cached))) << difference;
    EXPECT_GT(cached.pairs(), 0);
  }
}

TEST_F(CacheDiagnosisTest, DescribesTheCallAndItsBackends) {
  Rng rng(2);
  v1::CreateRequest create = CreateOf(1);
  create.set_first_position(1000);
  const v1::Cache cache = CreateCache(create);
  const Tokens tokens = RandomTokens(100, rng);
  Fill(cache, tokens);
  v1::AttendCachedRequest request = AttendOf(cache, 0, 100, {}, 2, rng);
  v1::DiagnoseResponse report;
  ASSERT_TRUE(Diagnose(request, report).ok());
  EXPECT_THAT(report.problem(), HasSubstr("B=1 Hq=4 Hkv=2 Sq=2 Sk=100 P=0 D=8 Dv=6 FP32"));
  EXPECT_THAT(report.problem(), HasSubstr("first_query=98"));
  ASSERT_EQ(report.inputs_size(), 3);
  EXPECT_EQ(report.inputs(0).name(), "q");
  EXPECT_THAT(report.inputs(0).shape(), ElementsAre(2, 4, 8));
  EXPECT_EQ(report.inputs(1).name(), "k");
  EXPECT_THAT(report.inputs(1).shape(), ElementsAre(100, 2, 8));
  EXPECT_EQ(report.inputs(2).name(), "v");
  EXPECT_THAT(report.inputs(2).shape(), ElementsAre(100, 2, 6));
  // The plan is that of Attend.
  v1::AttendCachedResponse attended;
  ASSERT_TRUE(Attend(request, attended).ok());
  int chosen = 0;
  for (const v1::BackendChoice& choice : report.backends()) {
    if (!choice.chosen()) continue;
    ++chosen;
    EXPECT_EQ(choice.plan(), attended.plan());
  }
  EXPECT_EQ(chosen, 1);
  // Row 0 at position 1010 sees 11 tokens, row 1 sees 12.
  request.mutable_items(0)->set_position(1010);
  ASSERT_TRUE(Diagnose(request, report).ok());
  EXPECT_EQ(report.masked_by_position(), kQueryHeads * (200 - 23));
  // Positions in front of the tokens see none; beyond them, all.
  request.mutable_items(0)->set_position(10);
  ASSERT_TRUE(Diagnose(request, report).ok());
  EXPECT_EQ(report.empty_rows().count(), 2 * kQueryHeads);
  request.mutable_items(0)->set_position(int64_t{1} << 61);
  ASSERT_TRUE(Diagnose(request, report).ok());
  EXPECT_EQ(report.masked_by_position(), 0);
  // A step before: the first 40 tokens.
  request.mutable_items(0)->clear_position();
  request.mutable_items(0)->set_at(40);
  ASSERT_TRUE(Diagnose(request, report).ok());
  EXPECT_EQ(report.pairs(), kQueryHeads * 2 * 40);
}

TEST_F(CacheDiagnosisTest, WarnsOfTokensIn8Bits) {
  Rng rng(8);
  v1::CreateRequest create = CreateOf(1);
  create.set_storage(v1::STORAGE_INT8);
  const v1::Cache cache = CreateCache(create);
  Tokens tokens = RandomTokens(10, rng);
  tokens.values.assign(tokens.values.size(), 0);
  Fill(cache, tokens);
  v1::DiagnoseResponse report;
  ASSERT_TRUE(Diagnose(AttendOf(cache, 0, 10, {}, 1, rng), report).ok());
  EXPECT_THAT(report.warnings(), Contains("all values of v are 0"));
}

TEST_F(CacheDiagnosisTest, AnEmptyLayerHasRowsThatSeeNothing) {
  Rng rng(3);
  const v1::Cache cache = CreateCache(CreateOf(1));
  v1::DiagnoseResponse report;
  const grpc::Status status = Diagnose(AttendOf(cache, 0, 0, {}, 2, rng), report);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(report.empty_rows().count(), 2 * kQueryHeads);
}

TEST_F(CacheDiagnosisTest, ChangesNeitherTokensNorLease) {
  Rng rng(4);
  const v1::Cache cache = CreateCache(CreateOf(1));
  Fill(cache, RandomTokens(10, rng));
  v1::Ids ids;
  ids.add_caches(cache.id());
  v1::Caches caches;
  const auto expires_in = [&] {
    EXPECT_TRUE(Call(&v1::CacheService::Stub::Get, ids, caches).ok());
    return caches.caches(0).expires_in_ms();
  };
  const int64_t whole = cache.lease_ms();
  while (expires_in() > whole - 20) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  v1::DiagnoseResponse report;
  ASSERT_TRUE(Diagnose(AttendOf(cache, 0, 10, {}, 1, rng), report).ok());
  EXPECT_LE(expires_in(), whole - 20);
  EXPECT_EQ(caches.caches(0).lengths(0), 10);
}

TEST_F(CacheDiagnosisTest, RefusesWhatItCannotDiagnoseAndSaysWhy) {
  Rng rng(5);
  const v1::Cache cache = CreateCache(CreateOf(1));
  Fill(cache, RandomTokens(10, rng));
  const v1::AttendCachedRequest good = AttendOf(cache, 0, 10, {}, 1, rng);
  using R = v1::AttendCachedRequest;
  const auto refusal = [&](StatusCode code, const std::string& reason,
                           const std::function<void(R&)>& change) {
    R request = good;
    change(request);
    v1::DiagnoseResponse report;
    const grpc::Status status = Diagnose(request, report);
    ExpectFails(status, code, reason);
    return status.error_message();
  };
  EXPECT_EQ(refusal(StatusCode::INVALID_ARGUMENT, "", [](R& r) { r.clear_items(); }),
            "items has 0 entries; Diagnose takes one");
  EXPECT_EQ(refusal(StatusCode::INVALID_ARGUMENT, "", [](R& r) { *r.add_items() = r.items(0); }),
            "items has 2 entries; Diagnose takes one");
  EXPECT_EQ(
      refusal(StatusCode::INVALID_ARGUMENT, "",
              [](R& r) { r.mutable_items(0)->set_new_tokens(3); }),
      "items[0]: new_tokens is 3; it must be 0, as Diagnose appends nothing: `at` tokens are seen");
  EXPECT_EQ(
      refusal(StatusCode::INVALID_ARGUMENT, "", [](R& r) { r.mutable_items(0)->set_rows(0); }),
      "items[0]: rows is 0; it must be at least 1");
  EXPECT_EQ(refusal(StatusCode::INVALID_ARGUMENT, "", [](R& r) { r.clear_q(); }),
            "q is absent; the items need [1, 2, 8]");
  EXPECT_EQ(refusal(StatusCode::OUT_OF_RANGE, "", [](R& r) { r.mutable_items(0)->set_at(11); }),
            "items[0]: at is 11; the layer has 10 tokens");
  refusal(StatusCode::ABORTED, "generation", [](R& r) { r.mutable_items(0)->set_generation(2); });
  refusal(StatusCode::NOT_FOUND, "unknown", [](R& r) { r.mutable_items(0)->set_cache("nobody"); });
  // It is one call: an item that fails fails it.
  refusal(StatusCode::NOT_FOUND, "unknown", [](R& r) {
    r.mutable_items(0)->set_cache("nobody");
    r.set_return_partial_success(true);
  });
}

TEST_F(CacheDiagnosisTest, NamesTheEvictedTokens) {
  Rng rng(6);
  v1::CreateRequest create = CreateOf(1);
  create.mutable_shapes(0)->set_keep_last(100);
  const v1::Cache cache = CreateCache(create);
  // The second append frees what no row from token 300 on sees.
  const Tokens tokens = RandomTokens(300, rng);
  Fill(cache, tokens);
  v1::AppendResponse appended;
  ASSERT_TRUE(Append(AppendOf(cache, 0, 300, RandomTokens(1, rng)), appended).ok());
  const double refused = ReadMetric(*server_, "rapt_kv_refused_total", {{"reason", "evicted"}});
  v1::DiagnoseResponse report;
  const grpc::Status status = Diagnose(AttendOf(cache, 0, 301, {}, 1, rng), report);
  ExpectFails(status, StatusCode::FAILED_PRECONDITION, "evicted");
  EXPECT_EQ(status.error_message(),
            "items[0]: Diagnose reads every token that the item has; the layer has evicted 0 to "
            "192");
  EXPECT_EQ(ReadMetric(*server_, "rapt_kv_refused_total", {{"reason", "evicted"}}), refused + 1);
}

TEST_F(CacheDiagnosisTest, ItsMemoryIsAdmitted) {
  // A row of float64 scores for each thread: 2.4 MB of 200,000 tokens with 2 threads.
  const ServerProcess server({"--threads=2", "--kv_cache_bytes=67108864",
                              "--memory_budget_bytes=4194304", "--grace_period=0s"});
  stub_ = StubOf(server);
  Rng rng(7);
  const v1::Cache cache = CreateCache(CreateOf(1));
  v1::AppendResponse appended;
  constexpr int64_t kPart = 5000;
  const Tokens tokens = RandomTokens(kPart, rng);
  const auto grow = [&](int64_t from, int64_t to) {
    for (int64_t at = from; at < to; at += kPart) {
      const grpc::Status status = Append(AppendOf(cache, 0, at, tokens), appended);
      ASSERT_TRUE(status.ok()) << status.error_message();
    }
  };
  v1::DiagnoseResponse report;
  grow(0, kPart);
  EXPECT_TRUE(Diagnose(AttendOf(cache, 0, kPart, {}, 1, rng), report).ok());
  grow(kPart, 200000);
  const grpc::Status status = Diagnose(AttendOf(cache, 0, 200000, {}, 1, rng), report);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
}

}  // namespace
}  // namespace rapt::test
