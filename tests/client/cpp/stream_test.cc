// The client library's streams against the real server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "rapt/client.h"
#include "tests/support/metrics_page.h"
#include "tests/support/server_process.h"

namespace rapt::client {
namespace {

using std::chrono::milliseconds;
using test::ReadMetric;
using test::ServerProcess;
using test::WaitForMetric;
using test::WaitUntilNothingIsHeld;
using testing::FloatNear;
using testing::HasSubstr;
using testing::Pointwise;

std::vector<float> Values(int64_t count, float seed) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = std::sin(seed + 0.37f * static_cast<float>(i));
  }
  return values;
}

// A call with its tensors: two batch rows, four query heads over two, 21 queries, 33 keys.
struct OwnedCall {
  explicit OwnedCall(Layout layout) {
    call.layout = layout;
    call.query_heads = layout == Layout::kBse ? 4 : 0;
    call.kv_heads = layout == Layout::kBse ? 2 : 0;
    call.q = View<float>(ShapeOf(4, 21, 8), q);
    call.k = View<float>(ShapeOf(2, 33, 8), k);
    call.v = View<float>(ShapeOf(2, 33, 6), v);
  }

  Shape ShapeOf(int64_t heads, int64_t length, int64_t size) const {
    if (call.layout == Layout::kBse) return {2, length, heads * size};
    if (call.layout == Layout::kBshd) return {2, length, heads, size};
    return {2, heads, length, size};
  }

  std::vector<float> q = Values(2 * 4 * 21 * 8, 1), k = Values(2 * 2 * 33 * 8, 2),
                     v = Values(2 * 2 * 33 * 6, 3), mask = Values(4 * 21 * 44, 4),
                     past_key = Values(2 * 2 * 11 * 8, 5), past_value = Values(2 * 2 * 11 * 6, 6);
  std::vector<float> sink = {0.5f, -1, 2, 0}, slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
  std::vector<float> table = Values(8 * 4, 7), clipped = Values(4 * 9, 8),
                     relative = Values(4 * 9 * 8, 9);
  std::vector<int64_t> key_lengths = {33, 20};
  AttendCall call;
};

struct Feature {
  const char* name;
  void (*change)(OwnedCall& c);
};

constexpr Feature kFeatures[] = {
    {"plain", [](OwnedCall&) {}},
    {"lse and scores",
     [](OwnedCall& c) {
       c.call.wants_lse = true;
       c.call.score_output = ScoreOutput::kScores;
     }},
    {"causal, bottom right, window",
     [](OwnedCall& c) {
       c.call.causal = true;
       c.call.alignment = Alignment::kBottomRight;
       c.call.window.left = 9;
     }},
    {"key lengths, scale, softcap",
     [](OwnedCall& c) {
       c.call.key_lengths = c.key_lengths;
       c.call.scale = 0.3;
       c.call.softcap = 2;
     }},
    {"past and mask",
     [](OwnedCall& c) {
       c.call.past_key = View<float>({2, 2, 11, 8}, c.past_key);
       c.call.past_value = View<float>({2, 2, 11, 6}, c.past_value);
       c.call.causal = true;
       c.call.mask = View<float>({1, 4, 21, 44}, c.mask);
     }},
    {"sink",
     [](OwnedCall& c) {
       c.call.head_sink = View<float>({4}, c.sink);
       c.call.wants_lse = true;
     }},
    {"alibi slopes, causal, bottom right",
     [](OwnedCall& c) {
       c.call.alibi_slopes = View<float>({4}, c.slopes);
       c.call.causal = true;
       c.call.alignment = Alignment::kBottomRight;
     }},
    {"bias table",
     [](OwnedCall& c) {
       c.call.bias_table = View<float>({8, 4}, c.table);
       c.call.is_bidirectional = true;
       c.call.max_distance = 20;
     }},
    {"relative bias and sink",
     [](OwnedCall& c) {
       c.call.relative_bias = View<float>({4, 9}, c.clipped);
       c.call.head_sink = View<float>({4}, c.sink);
     }},
    {"relative keys and values",
     [](OwnedCall& c) {
       c.call.relative_keys = View<float>({4, 9, 8}, c.relative);
       c.call.relative_values =
           View<float>({1, 9, 6}, absl::MakeConstSpan(c.relative).first(9 * 6));
     }},
    {"mask of a row",
     [](OwnedCall& c) {
       c.call.mask = View<float>({33}, absl::MakeConstSpan(c.mask).subspan(0, 33));
     }},
    {"bias and mask",
     [](OwnedCall& c) {
       c.call.attention_bias =
           View<float>({4, 21, 33}, absl::MakeConstSpan(c.mask).first(4 * 21 * 33));
       c.call.mask = View<float>({21, 1}, absl::MakeConstSpan(c.mask).subspan(0, 21));
     }},
    {"past and bias of a row",
     [](OwnedCall& c) {
       c.call.past_key = View<float>({2, 2, 11, 8}, c.past_key);
       c.call.past_value = View<float>({2, 2, 11, 6}, c.past_value);
       c.call.attention_bias = View<float>({44}, absl::MakeConstSpan(c.mask).first(44));
     }},
    {"mask of a column",
     [](OwnedCall& c) {
       c.call.mask = View<float>({21, 1}, absl::MakeConstSpan(c.mask).subspan(0, 21));
     }},
};

void ExpectNear(const Tensor& got, const Tensor& want) {
  EXPECT_EQ(got.shape(), want.shape());
  EXPECT_THAT(got.values<float>(), Pointwise(FloatNear(2e-5f), want.values<float>()));
}

class StreamTest : public testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = new ServerProcess({"--threads=2"}); }
  static void TearDownTestSuite() { delete server_; }

  static std::unique_ptr<Client> Connect(const Options& options = {}) {
    absl::StatusOr<std::unique_ptr<Client>> client =
        Client::Connect(server_->grpc_address(), options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  // Expects the results of AttendStream and Attend to be equal.
  void ExpectSame(const AttendCall& call, const StreamOptions& stream) {
    const absl::StatusOr<AttendResult> whole = client_->Attend(call);
    ASSERT_TRUE(whole.ok()) << whole.status();
    const absl::StatusOr<AttendResult> streamed = client_->AttendStream(call, stream);
    ASSERT_TRUE(streamed.ok()) << streamed.status();
    EXPECT_EQ(streamed->path, Path::kStream);
    EXPECT_EQ(streamed->backend, "cpu");
    ExpectNear(streamed->y, whole->y);
    ASSERT_EQ(streamed->lse.has_value(), whole->lse.has_value());
    ASSERT_EQ(streamed->scores.has_value(), whole->scores.has_value());
    if (whole->lse) ExpectNear(*streamed->lse, *whole->lse);
    if (whole->scores) ExpectNear(*streamed->scores, *whole->scores);
  }

  static ServerProcess* server_;
  std::unique_ptr<Client> client_ = Connect({.shared_memory = false});
};

ServerProcess* StreamTest::server_ = nullptr;

TEST_F(StreamTest, EqualsAttendInEveryLayoutAndChunking) {
  for (const Feature& feature : kFeatures) {
    for (const Layout layout : {Layout::kBhsd, Layout::kBshd, Layout::kBse}) {
      for (const Streaming streaming : {Streaming::kKeys, Streaming::kQueries}) {
        for (const int64_t chunk : {1, 5, 1000}) {
          SCOPED_TRACE(absl::StrCat(feature.name, ", layout ", static_cast<int>(layout),
                                    streaming == Streaming::kKeys ? ", keys" : ", queries",
                                    ", chunk ", chunk));
          OwnedCall owned(layout);
          feature.change(owned);
          ExpectSame(owned.call,
                     {.streaming = streaming, .query_chunk = chunk, .key_chunk = chunk});
        }
      }
    }
  }
}

TEST_F(StreamTest, TakesAnAlphaForEachHead) {
  const std::vector<float> alpha = {1, 1.25f, 1.5f, 2};
  OwnedCall owned(Layout::kBhsd);
  owned.call.normalizer = Normalizer::kEntmax;
  owned.call.head_alpha = View<float>({4}, alpha);
  ExpectSame(owned.call, {.query_chunk = 5});
}

TEST_F(StreamTest, ChoosesSideAndChunks) {
  OwnedCall owned(Layout::kByRank);
  ExpectSame(owned.call, {});
  owned.call.score_output = ScoreOutput::kWeights;  // requires that queries stream
  ExpectSame(owned.call, {});
}

// Large enough to be sent by reference, with chunks that end within the past.
TEST_F(StreamTest, SendsLargeRowsWithoutCopies) {
  const std::vector<float> q = Values(3 * 64, 1), k = Values(6000 * 64, 2),
                           v = Values(6000 * 64, 3), past = Values(5000 * 64, 4);
  AttendCall call = {.q = View<float>({1, 1, 3, 64}, q),
                     .k = View<float>({1, 1, 6000, 64}, k),
                     .v = View<float>({1, 1, 6000, 64}, v),
                     .past_key = View<float>({1, 1, 5000, 64}, past),
                     .past_value = View<float>({1, 1, 5000, 64}, past)};
  ExpectSame(call, {.streaming = Streaming::kKeys, .key_chunk = 3000});
  ExpectSame(call, {.streaming = Streaming::kQueries, .query_chunk = 1, .key_chunk = 700});
}

// Copies these rows of `length` rows of each head.
void CopyRows(const std::vector<float>& from, int64_t heads, int64_t length, int64_t size,
              const StreamRows& rows, absl::Span<std::byte> to) {
  auto* out = reinterpret_cast<float*>(to.data());
  for (int64_t head = 0; head < heads; ++head) {
    const float* first = from.data() + (head * length + rows.begin) * size;
    out = std::copy_n(first, rows.count * size, out);
  }
}

TEST_F(StreamTest, AFunctionFillsTheStreamingRows) {
  OwnedCall owned(Layout::kBhsd);
  for (const Streaming streaming : {Streaming::kKeys, Streaming::kQueries}) {
    const absl::StatusOr<AttendResult> whole = client_->Attend(owned.call);
    ASSERT_TRUE(whole.ok());
    AttendCall call = owned.call;
    int64_t next = 0;
    StreamOptions stream = {.streaming = streaming, .query_chunk = 4, .key_chunk = 10};
    if (streaming == Streaming::kKeys) {
      call.k.data = call.v.data = {};
      stream.read = [&](const StreamRows& rows) {
        EXPECT_EQ(std::exchange(next, rows.begin + rows.count), rows.begin);
        EXPECT_TRUE(rows.q.empty() && rows.mask.empty() && rows.attention_bias.empty());
        CopyRows(owned.k, 2 * 2, 33, 8, rows, rows.k);
        CopyRows(owned.v, 2 * 2, 33, 6, rows, rows.v);
        return absl::OkStatus();
      };
    } else {
      call.q.data = {};
      stream.read = [&](const StreamRows& rows) {
        EXPECT_EQ(std::exchange(next, rows.begin + rows.count), rows.begin);
        CopyRows(owned.q, 2 * 4, 21, 8, rows, rows.q);
        return absl::OkStatus();
      };
    }
    const absl::StatusOr<AttendResult> streamed = client_->AttendStream(call, stream);
    ASSERT_TRUE(streamed.ok()) << streamed.status();
    EXPECT_EQ(next, streaming == Streaming::kKeys ? 33 : 21);
    ExpectNear(streamed->y, whole->y);
  }
}

TEST_F(StreamTest, AFunctionFillsMaskAndBias) {
  const std::vector<float> bias = Values(21 * 33, 9);
  OwnedCall owned(Layout::kBhsd);
  owned.call.mask = View<float>({21, 33}, absl::MakeConstSpan(owned.mask).first(21 * 33));
  owned.call.attention_bias = View<float>({21, 33}, bias);
  const absl::StatusOr<AttendResult> whole = client_->Attend(owned.call);
  ASSERT_TRUE(whole.ok()) << whole.status();
  AttendCall call = owned.call;
  call.q.data = call.mask->data = call.attention_bias->data = {};
  StreamOptions stream = {.streaming = Streaming::kQueries, .query_chunk = 4};
  stream.read = [&](const StreamRows& rows) {
    CopyRows(owned.q, 2 * 4, 21, 8, rows, rows.q);
    CopyRows(owned.mask, 1, 21, 33, rows, rows.mask);
    CopyRows(bias, 1, 21, 33, rows, rows.attention_bias);
    return absl::OkStatus();
  };
  const absl::StatusOr<AttendResult> streamed = client_->AttendStream(call, stream);
  ASSERT_TRUE(streamed.ok()) << streamed.status();
  ExpectNear(streamed->y, whole->y);
}

TEST_F(StreamTest, ReportsItsProgress) {
  OwnedCall owned(Layout::kBhsd);
  std::vector<StreamProgress> updates;
  const absl::StatusOr<AttendResult> result = client_->AttendStream(
      owned.call, {.query_chunk = 7, .key_chunk = 11, .progress = [&](const StreamProgress& now) {
                     updates.push_back(now);
                   }});
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(updates.size(), 3u + 3u);
  const auto bytes =
      static_cast<int64_t>(sizeof(float) * (owned.q.size() + owned.k.size() + owned.v.size()));
  int64_t sent = 0;
  for (const StreamProgress& now : updates) {
    EXPECT_EQ(now.bytes, bytes);
    EXPECT_GT(now.sent_bytes, sent);
    sent = now.sent_bytes;
  }
  EXPECT_EQ(sent, bytes);
}

// --- The path by size ----------------------------------------------------------------------------

TEST_F(StreamTest, ACallBeyondTheMessageLimitIsStreamed) {
  const std::vector<float> x = Values(1 << 16, 1);
  const TensorView view = View<float>({1, 1, 1 << 10, 1 << 6}, x);
  const AttendCall call = {.q = view, .k = view, .v = view};
  const absl::StatusOr<AttendResult> whole = client_->Attend(call);
  ASSERT_TRUE(whole.ok());
  EXPECT_EQ(whole->path, Path::kMessage);

  const auto own_limit = Connect({.max_message_bytes = 300'000, .shared_memory = false});
  const absl::StatusOr<AttendResult> streamed = own_limit->Attend(call);
  ASSERT_TRUE(streamed.ok()) << streamed.status();
  EXPECT_EQ(streamed->path, Path::kStream);
  ExpectNear(streamed->y, whole->y);

  const ServerProcess small({"--max_message_bytes=65536"});
  const auto its_limit = Client::Connect(small.grpc_address(), {.shared_memory = false});
  ASSERT_TRUE(its_limit.ok());
  const absl::StatusOr<AttendResult> also = (*its_limit)->Attend(call);
  ASSERT_TRUE(also.ok()) << also.status();
  EXPECT_EQ(also->path, Path::kStream);
  ExpectNear(also->y, whole->y);
}

TEST_F(StreamTest, RejectsALargeCallThatCannotBeStreamed) {
  const std::vector<float> x = Values(1 << 16, 1);
  const TensorView view = View<float>({1, 1, 1 << 10, 1 << 6}, x);
  const auto client = Connect({.max_message_bytes = 300'000, .shared_memory = false});
  EXPECT_THAT(
      client->Attend({.q = view, .k = view, .v = view, .wants_present = true}).status().message(),
      HasSubstr("max_message_bytes is 300000"));
}

// --- Errors --------------------------------------------------------------------------------------

TEST_F(StreamTest, ErrorsNameTheField) {
  const OwnedCall owned(Layout::kBhsd);
  const std::vector<uint8_t> bytes(33);
  const struct {
    const char* message;
    void (*spoil)(AttendCall& call, StreamOptions& stream, const std::vector<uint8_t>& bytes);
  } cases[] = {
      {"k has shape [2, 2, 33, 7]; the shapes of the other tensors require [2, 2, 33, 8]",
       [](AttendCall& c, StreamOptions&, const auto&) { c.k.shape[3] = 7; }},
      {"q has shape [21, 8]; it must have rank 4",
       [](AttendCall& c, StreamOptions&, const auto&) {
         c.q.shape = {21, 8};
       }},
      {"v has type FP16; it must be FP32, the type of q",
       [](AttendCall& c, StreamOptions&, const auto&) { c.v.dtype = DType::kFloat16; }},
      {"q has shape [2, 4, 21, 8] of FP32, but its data has 5372 bytes",
       [](AttendCall& c, StreamOptions&, const auto&) { c.q.data.remove_suffix(4); }},
      {"mask has type UINT8; in a stream it must be BOOL or a float type",
       [](AttendCall& c, StreamOptions&, const std::vector<uint8_t>& b) {
         c.mask = View<uint8_t>({33}, b);
       }},
      {"attention_bias has type BOOL; in a stream it must be a float type",
       [](AttendCall& c, StreamOptions&, const std::vector<uint8_t>& b) {
         c.attention_bias = View<uint8_t>({33}, b);
         c.attention_bias->dtype = DType::kBool;
       }},
      {"attention_bias has shape [34]; in a stream it must broadcast to [2, 4, 21, 33]",
       [](AttendCall& c, StreamOptions&, const auto&) {
         c.attention_bias = TensorView{DType::kFloat32, {34}, c.q.data.first(4 * 34)};
       }},
      {"present keys and values are not supported in streams",
       [](AttendCall& c, StreamOptions&, const auto&) { c.wants_present = true; }},
      {"relative_query is not supported in streams",
       [](AttendCall& c, StreamOptions&, const auto&) { c.relative_query = c.q; }},
      {"block_mask is not supported in streams",
       [](AttendCall& c, StreamOptions&, const std::vector<uint8_t>& b) {
         c.block_mask = View<uint8_t>({33}, b);
       }},
      {"head_sink has shape [4] of FP32, but its data has 132 bytes",
       [](AttendCall& c, StreamOptions&, const auto&) {
         c.head_sink = TensorView{DType::kFloat32, {4}, c.q.data.first(132)};
       }},
      {"head_sink and the tensors before it have 64516 bytes; in a stream, those that do not "
       "arrive "
       "in chunks may have 64512 together",
       [](AttendCall& c, StreamOptions&, const auto&) {
         static const std::vector<float> zeros(16129);
         c.head_sink = View<float>({16129}, zeros);
       }},
      {"head_sink has shape [3]; it must be [4], the number of heads of q",  // from the server
       [](AttendCall& c, StreamOptions&, const auto&) {
         c.head_sink = TensorView{DType::kFloat32, {3}, c.q.data.first(12)};
       }},
      {"additive scores are not supported in streams",
       [](AttendCall& c, StreamOptions&, const auto&) {
         c.score_function = ScoreFunction::kAdditive;
       }},
      {"query_heads is 3 and kv_heads 0; they must be 0, or those of q and k: 4 and 2",
       [](AttendCall& c, StreamOptions&, const auto&) { c.query_heads = 3; }},
      {"query_chunk is 0 and key_chunk -1; both must be at least 0",
       [](AttendCall&, StreamOptions& s, const auto&) { s.key_chunk = -1; }},
      {"stream the queries instead",  // from the server
       [](AttendCall& c, StreamOptions& s, const auto&) {
         c.score_output = ScoreOutput::kWeights;
         s.streaming = Streaming::kKeys;
       }},
  };
  for (const auto& wrong : cases) {
    AttendCall call = owned.call;
    StreamOptions stream;
    wrong.spoil(call, stream, bytes);
    const absl::Status status = client_->AttendStream(call, stream).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(status.message(), HasSubstr(wrong.message));
  }
}

TEST_F(StreamTest, AnErrorOfTheFunctionEndsTheCall) {
  OwnedCall owned(Layout::kBhsd);
  owned.call.k.data = owned.call.v.data = {};
  const absl::Status status =
      client_
          ->AttendStream(owned.call, {.streaming = Streaming::kKeys,
                                      .key_chunk = 10,
                                      .read =
                                          [](const StreamRows& rows) {
                                            if (rows.begin < 20) return absl::OkStatus();
                                            return absl::DataLossError("the disk is gone");
                                          }})
          .status();
  EXPECT_EQ(status, absl::DataLossError("the disk is gone"));
  WaitUntilNothingIsHeld(*server_);
}

TEST_F(StreamTest, AStopAndADeadlineEndTheCall) {
  OwnedCall owned(Layout::kBhsd);
  owned.call.k.data = owned.call.v.data = {};
  std::stop_source stop;
  const StreamOptions stopping = {
      .streaming = Streaming::kKeys, .key_chunk = 10, .read = [&](const StreamRows&) {
        WaitForMetric(*server_, "rapt_open_streams", 1);
        stop.request_stop();
        return absl::OkStatus();
      }};
  EXPECT_EQ(client_->AttendStream(owned.call, stopping, {.stop = stop.get_token()}).status().code(),
            absl::StatusCode::kCancelled);
  const StreamOptions waiting = {
      .streaming = Streaming::kKeys, .key_chunk = 10, .read = [&](const StreamRows&) {
        WaitForMetric(*server_, "rapt_open_streams", 0);  // then the deadline has passed
        return absl::OkStatus();
      }};
  EXPECT_EQ(
      client_->AttendStream(owned.call, waiting, {.timeout = milliseconds(300)}).status().code(),
      absl::StatusCode::kDeadlineExceeded);
  WaitUntilNothingIsHeld(*server_);
}

TEST(StreamWithoutServerTest, IsUnavailable) {
  const auto client = Client::Connect("127.0.0.1:1", {.connect_timeout = {}});
  ASSERT_TRUE(client.ok());
  const OwnedCall owned(Layout::kBhsd);
  const absl::Status status = (*client)->AttendStream(owned.call).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("127.0.0.1:1"));
}

}  // namespace
}  // namespace rapt::client
