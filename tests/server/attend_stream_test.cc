// AttendStream of the real rapt-server, called through gRPC.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "proto/rapt/v1/attention.grpc.pb.h"
#include "tests/support/memory_watch.h"
#include "tests/support/metrics_page.h"
#include "tests/support/rapt_messages.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;
using Stub = v1::AttentionService::Stub;
using Message = v1::AttendStreamRequest;
using Response = v1::AttendStreamResponse;

constexpr char kMethod[] = "rapt.v1.AttentionService/AttendStream";
constexpr int64_t kMiB = 1 << 20;
constexpr v1::Layout kLayouts[] = {v1::BHSD, v1::BSHD, v1::BSE};
constexpr v1::StreamDirection kDirections[] = {v1::KEYS_STREAM, v1::QUERIES_STREAM};
constexpr DType kFloatTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                 DType::kFloat64};

std::unique_ptr<Stub> Connect(const ServerProcess& server, grpc::ChannelArguments arguments = {}) {
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return v1::AttentionService::NewStub(grpc::CreateCustomChannel(
      server.grpc_address(), grpc::InsecureChannelCredentials(), arguments));
}

// --- Messages sent -------------------------------------------------------------------------------

struct Cut {
  v1::StreamDirection direction = v1::KEYS_STREAM;
  int64_t query_chunk = 1;
  int64_t key_chunk = 1;
  v1::Layout layout = v1::BHSD;

  bool keys_stream() const { return direction == v1::KEYS_STREAM; }
};

void Declare(v1::StreamMask& mask, v1::DataType dtype, absl::Span<const int64_t> shape) {
  mask.set_dtype(dtype);
  mask.mutable_shape()->Assign(shape.begin(), shape.end());
}

// Copies the tensors that the header holds whole. Their fields have the same names in both
// messages.
void CopyTensors(const v1::AttendRequest& from, v1::AttendStreamHeader& to) {
  const auto& header = *v1::AttendStreamHeader::descriptor();
  for (int n = 0; n < header.field_count(); ++n) {
    if (header.field(n)->message_type() != v1::Tensor::descriptor()) continue;
    const auto* field = v1::AttendRequest::descriptor()->FindFieldByName(header.field(n)->name());
    if (!from.GetReflection()->HasField(from, field)) continue;
    to.GetReflection()
        ->MutableMessage(&to, header.field(n))
        ->CopyFrom(from.GetReflection()->GetMessage(from, field));
  }
}

Message HeaderOf(const Problem& p, const Inputs& inputs, const Cut& cut) {
  const v1::AttendRequest whole = ToMessage(p, inputs, cut.layout);
  Message message;
  v1::AttendStreamHeader& header = *message.mutable_header();
  header.set_direction(cut.direction);
  header.set_dtype(CodeOf(p.dtype));
  header.set_batch(p.batch);
  header.set_query_heads(p.query_heads);
  header.set_kv_heads(p.kv_heads);
  header.set_query_length(p.query_length);
  header.set_key_length(p.total_keys());
  header.set_past_length(p.past_length);
  header.set_head_size(p.head_size);
  header.set_value_head_size(p.value_head_size);
  header.set_query_chunk(cut.query_chunk);
  header.set_key_chunk(cut.key_chunk);
  *header.mutable_attention() = whole.attention();
  *header.mutable_key_lengths() = whole.key_lengths();
  if (p.mask) Declare(*header.mutable_mask(), CodeOf(p.mask->dtype), p.mask->dims);
  if (p.bias) Declare(*header.mutable_attention_bias(), CodeOf(p.bias->dtype), p.bias->dims);
  header.set_score_output(whole.score_output());
  header.set_want_lse(whole.want_lse());
  CopyTensors(whole, header);
  return message;
}

std::string BytesOf(const Tensor& tensor, int axis, int64_t begin, int64_t count,
                    v1::Layout layout = v1::BHSD) {
  return ToMessage(SliceAxis(tensor, axis, begin, count), layout).data();
}

void AddQueries(const Problem& p, const Inputs& inputs, const Cut& cut,
                std::vector<Message>& messages) {
  for (int64_t begin = 0; begin < p.query_length; begin += cut.query_chunk) {
    const int64_t count = std::min(cut.query_chunk, p.query_length - begin);
    v1::QueryChunk& chunk = *messages.emplace_back().mutable_queries();
    chunk.set_offset(begin);
    chunk.set_count(count);
    chunk.set_q(BytesOf(inputs.query, 2, begin, count, cut.layout));
    if (cut.keys_stream()) continue;
    if (p.mask) chunk.set_mask(BytesOf(*inputs.mask, 2, begin, count));
    if (p.bias) chunk.set_attention_bias(BytesOf(*inputs.bias, 2, begin, count));
  }
}

void AddKeys(const Problem& p, const Inputs& inputs, const Cut& cut,
             std::vector<Message>& messages) {
  const Tensor key = JoinRows(inputs.past_key, inputs.key);
  const Tensor value = JoinRows(inputs.past_value, inputs.value);
  for (int64_t begin = 0; begin < p.total_keys(); begin += cut.key_chunk) {
    const int64_t count = std::min(cut.key_chunk, p.total_keys() - begin);
    v1::KeyChunk& chunk = *messages.emplace_back().mutable_keys();
    chunk.set_offset(begin);
    chunk.set_count(count);
    chunk.set_k(BytesOf(key, 2, begin, count, cut.layout));
    chunk.set_v(BytesOf(value, 2, begin, count, cut.layout));
    if (!cut.keys_stream()) continue;
    if (p.mask) chunk.set_mask(BytesOf(*inputs.mask, 3, begin, count));
    if (p.bias) chunk.set_attention_bias(BytesOf(*inputs.bias, 3, begin, count));
  }
}

// The header, the resident chunks, the streaming chunks.
std::vector<Message> MessagesOf(const Problem& p, const Inputs& inputs, const Cut& cut) {
  std::vector<Message> messages = {HeaderOf(p, inputs, cut)};
  if (cut.keys_stream()) AddQueries(p, inputs, cut, messages);
  AddKeys(p, inputs, cut, messages);
  if (!cut.keys_stream()) AddQueries(p, inputs, cut, messages);
  return messages;
}

// --- Messages received ---------------------------------------------------------------------------

struct Responses {
  grpc::Status status;
  std::vector<Response> messages;
};

// An open stream whose responses are read while messages are sent.
class Caller {
 public:
  explicit Caller(Stub& stub, std::chrono::milliseconds timeout = std::chrono::minutes(2)) {
    context_.set_deadline(std::chrono::system_clock::now() + timeout);
    stream_ = stub.AttendStream(&context_);
    reader_ = std::thread([this] {
      Response response;
      while (stream_->Read(&response)) responses_.messages.push_back(response);
    });
  }

  // Returns false if the call has ended.
  bool Send(const Message& message) { return stream_->Write(message); }
  void HalfClose() { stream_->WritesDone(); }
  void Cancel() { context_.TryCancel(); }

  Responses Wait() {
    reader_.join();
    responses_.status = stream_->Finish();
    return std::move(responses_);
  }

  std::string Trailer(const std::string& name) const {
    const auto found = context_.GetServerTrailingMetadata().find(name);
    if (found == context_.GetServerTrailingMetadata().end()) return "";
    return {found->second.data(), found->second.size()};
  }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<Message, Response>> stream_;
  std::thread reader_;
  Responses responses_;
};

Responses Call(Stub& stub, const std::vector<Message>& messages) {
  Caller caller(stub);
  for (const Message& message : messages) {
    if (!caller.Send(message)) break;
  }
  caller.HalfClose();
  return caller.Wait();
}

// Assembles the outputs. Outputs that are missing, out of order or not requested fail the test.
class Collector {
 public:
  Collector(const Problem& p, const Cut& cut) : p_(p), cut_(cut) {
    outputs_.output = Tensor(p.dtype, {p.batch, p.query_heads, p.query_length, p.value_head_size});
    if (p.wants_lse) {
      outputs_.lse = Tensor(p.lse_dtype(), {p.batch, p.query_heads, p.query_length, 1});
    }
    if (p.score_output) {
      outputs_.scores = Tensor(p.dtype, {p.batch, p.query_heads, p.query_length, p.total_keys()});
    }
  }

  Outputs Collect(const std::vector<Response>& responses) {
    for (const Response& response : responses) {
      EXPECT_FALSE(ended_) << "a message came after the end";
      switch (response.part_case()) {
        case Response::kOutput:
          TakeRows(response.output());
          break;
        case Response::kScores:
          TakeScores(response.scores());
          break;
        default:
          EXPECT_TRUE(response.has_end());
          EXPECT_EQ(response.end().backend(), "cpu");
          outputs_.plan = response.end().plan();
          ended_ = true;
      }
    }
    EXPECT_TRUE(ended_);
    EXPECT_EQ(rows_, p_.query_length);
    EXPECT_EQ(keys_, scores_come_by_keys() ? p_.total_keys() : 0);
    return std::move(outputs_);
  }

 private:
  bool scores_come_by_keys() const { return p_.score_output && cut_.keys_stream(); }

  void TakeRows(const v1::OutputChunk& chunk) {
    EXPECT_EQ(chunk.offset(), rows_);
    EXPECT_EQ(chunk.count(), std::min(cut_.query_chunk, p_.query_length - rows_));
    EXPECT_EQ(chunk.lse().empty(), !p_.wants_lse || p_.batch == 0);
    const auto read = [&](const char* name, const std::string& bytes, DType dtype, int64_t size,
                          v1::Layout layout) {
      return FromBytes(name, bytes, dtype, {p_.batch, p_.query_heads, chunk.count(), size}, layout);
    };
    Put(outputs_.output, 2, rows_, read("y", chunk.y(), p_.dtype, p_.value_head_size, cut_.layout));
    if (outputs_.lse) {
      Put(*outputs_.lse, 2, rows_, read("lse", chunk.lse(), p_.lse_dtype(), 1, v1::BHSD));
    }
    if (outputs_.scores && !cut_.keys_stream()) {
      Put(*outputs_.scores, 2, rows_,
          read("scores", chunk.scores(), p_.dtype, p_.total_keys(), v1::BHSD));
    } else {
      EXPECT_TRUE(chunk.scores().empty());
    }
    rows_ += chunk.count();
  }

  void TakeScores(const v1::ScoreChunk& chunk) {
    ASSERT_TRUE(scores_come_by_keys());
    EXPECT_EQ(rows_, 0) << "scores came after rows were finished";
    EXPECT_EQ(chunk.offset(), keys_);
    EXPECT_EQ(chunk.count(), std::min(cut_.key_chunk, p_.total_keys() - keys_));
    Put(*outputs_.scores, 3, keys_,
        FromBytes("scores", chunk.scores(), p_.dtype,
                  {p_.batch, p_.query_heads, p_.query_length, chunk.count()}));
    keys_ += chunk.count();
  }

  static void Put(Tensor& whole, int axis, int64_t begin, const Tensor& part) {
    if (!::testing::Test::HasFailure()) PasteAxis(whole, axis, begin, part);
  }

  const Problem& p_;
  const Cut& cut_;
  Outputs outputs_;
  int64_t rows_ = 0;
  int64_t keys_ = 0;
  bool ended_ = false;
};

void ExpectConforms(Stub& stub, const Problem& p, const Inputs& inputs, const Cut& cut) {
  SCOPED_TRACE(absl::StrCat(ToText(p), " ", v1::StreamDirection_Name(cut.direction), " ",
                            v1::Layout_Name(cut.layout), " query_chunk ", cut.query_chunk,
                            " key_chunk ", cut.key_chunk));
  const Responses responses = Call(stub, MessagesOf(p, inputs, cut));
  ASSERT_TRUE(responses.status.ok()) << responses.status.error_message();
  const Outputs outputs = Collector(p, cut).Collect(responses.messages);
  if (::testing::Test::HasFailure()) return;
  EXPECT_TRUE(Matches(p, outputs, rapt::test::Attend(p, inputs)));
}

// Tests that leave the server unchanged share one.
class AttendStreamTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = new ServerProcess({"--threads=2"}); }
  static void TearDownTestSuite() { delete server_; }

  std::unique_ptr<Stub> stub_ = Connect(*server_);
  static ServerProcess* server_;
};

ServerProcess* AttendStreamTest::server_ = nullptr;

// --- Results -------------------------------------------------------------------------------------

Problem SmallProblem() {
  return {.batch = 2,
          .query_heads = 4,
          .kv_heads = 2,
          .query_length = 11,
          .key_length = 23,
          .head_size = 8,
          .value_head_size = 6};
}

struct Feature {
  const char* name;
  void (*change)(Problem& p);
};

constexpr Feature kFeatures[] = {
    {"plain", [](Problem&) {}},
    {"lse", [](Problem& p) { p.wants_lse = true; }},
    {"scale and softcap", [](Problem& p) { p.scale = 0.7, p.softcap = 1.5; }},
    {"causal", [](Problem& p) { p.causal = p.wants_lse = true; }},
    {"causal, bottom right",
     [](Problem& p) { p.causal = true, p.alignment = Alignment::kBottomRight; }},
    {"causal, bottom right, rows without a key",
     [](Problem& p) {
       p.causal = p.wants_lse = true;
       p.alignment = Alignment::kBottomRight;
       p.key_length = 5;
     }},
    {"window", [](Problem& p) { p.left_window = 4, p.right_window = 2; }},
    {"window and prefix",
     [](Problem& p) { p.left_window = 2, p.causal = true, p.prefix_keys = 3; }},
    {"window, bottom right",
     [](Problem& p) { p.left_window = 6, p.alignment = Alignment::kBottomRight; }},
    {"rotary, past, causal",
     [](Problem& p) { p.past_length = 9, p.causal = true, p.rope_theta = 100; }},
    {"rotary of queries, key lengths",
     [](Problem& p) {
       p.rope_theta = 100;
       p.interleaved = p.has_key_lengths = true;
       p.rotary_embedding_dim = 2;
       p.rotary_keys = false;
     }},
    {"past, causal", [](Problem& p) { p.past_length = 9, p.causal = true; }},
    {"key lengths", [](Problem& p) { p.has_key_lengths = true; }},
    {"key lengths, causal", [](Problem& p) { p.has_key_lengths = p.causal = true; }},
    {"key lengths, causal, bottom right",
     [](Problem& p) {
       p.has_key_lengths = p.causal = true;
       p.alignment = Alignment::kBottomRight;
     }},
    {"key lengths, causal, ONNX",
     [](Problem& p) {
       p.has_key_lengths = p.causal = true;
       p.alignment = Alignment::kOnnx;
     }},
    {"past and key lengths", [](Problem& p) { p.past_length = 5, p.has_key_lengths = true; }},
    {"bool mask",
     [](Problem& p) {
       p.mask = MaskShape{DType::kBool, {2, 4, 11, 23}};
     }},
    {"bool mask of a row",
     [](Problem& p) {
       p.mask = MaskShape{DType::kBool, {2, 1, 1, 23}};
     }},
    {"bool mask of a column",
     [](Problem& p) {
       p.mask = MaskShape{DType::kBool, {1, 4, 11, 1}};
     }},
    {"FP32 mask",
     [](Problem& p) {
       p.mask = MaskShape{DType::kFloat32, {1, 4, 11, 23}};
     }},
    {"FP64 mask",
     [](Problem& p) {
       p.mask = MaskShape{DType::kFloat64, {2, 1, 11, 23}};
     }},
    {"BF16 mask",
     [](Problem& p) {
       p.mask = MaskShape{DType::kBFloat16, {1, 1, 11, 23}};
     }},
    {"scores", [](Problem& p) { p.score_output = ScoreOutput::kScores; }},
    {"biased scores and lse",
     [](Problem& p) {
       p.score_output = ScoreOutput::kBiased;
       p.mask = MaskShape{DType::kFloat32, {1, 1, 11, 23}};
       p.causal = p.wants_lse = true;
     }},
    {"sink", [](Problem& p) { p.head_sink = p.dtype, p.wants_lse = true; }},
    {"FP32 sink, rows without a key",
     [](Problem& p) {
       p.head_sink = DType::kFloat32;
       p.causal = p.wants_lse = true;
       p.alignment = Alignment::kBottomRight;
       p.key_length = 5;
     }},
    {"sink, past, softcap, mask",
     [](Problem& p) {
       p.head_sink = DType::kFloat32;
       p.softcap = 1.5, p.past_length = 9;
       p.mask = MaskShape{DType::kBool, {2, 1, 1, 32}};
     }},
    {"sink without keys",
     [](Problem& p) { p.head_sink = p.dtype, p.key_length = 0, p.wants_lse = true; }},
    {"alibi slopes of each batch row, key lengths",
     [](Problem& p) {
       p.alibi_slopes = AlibiSlopes{DType::kFloat32, 2};
       p.has_key_lengths = true;
     }},
    {"alibi slopes, past, window",
     [](Problem& p) {
       p.alibi_slopes = AlibiSlopes{p.dtype, 1};
       p.past_length = 9, p.left_window = 6;
     }},
    {"bidirectional bias table, sink",
     [](Problem& p) {
       p.bias_table = BiasTable{p.dtype, 8};
       p.is_bidirectional = true;
       p.max_distance = 16;
       p.head_sink = DType::kFloat32;
     }},
    {"bias table, past, causal",
     [](Problem& p) {
       p.bias_table = BiasTable{DType::kFloat32, 6};
       p.past_length = 9, p.causal = true;
     }},
    {"relative bias of each head, bottom right",
     [](Problem& p) {
       p.relative_bias = RelativeBias{p.dtype, 4, 9};
       p.alignment = Alignment::kBottomRight, p.causal = true;
     }},
    {"relative bias, mask, scores",
     [](Problem& p) {
       p.relative_bias = RelativeBias{DType::kFloat32, 1, 51};
       p.mask = MaskShape{DType::kFloat32, {1, 4, 11, 23}};
       p.score_output = ScoreOutput::kBiased;
     }},
    {"relative keys and values, past, causal",
     [](Problem& p) {
       p.relative_keys = RelativeVectors{p.dtype, 4, 21};
       p.relative_values = RelativeVectors{DType::kFloat32, 1, 71};
       p.past_length = 9, p.causal = true;
     }},
    {"bias",
     [](Problem& p) {
       p.bias = MaskShape{p.dtype, {2, 4, 11, 23}};
       p.wants_lse = true;
     }},
    {"FP64 bias of a row, causal",
     [](Problem& p) {
       p.bias = MaskShape{DType::kFloat64, {1, 4, 1, 23}};
       p.causal = true;
     }},
    {"FP16 bias of a column and bool mask",
     [](Problem& p) {
       p.bias = MaskShape{DType::kFloat16, {2, 1, 11, 1}};
       p.mask = MaskShape{DType::kBool, {1, 4, 11, 23}};
     }},
    {"bias, FP32 mask, sink and relative bias",
     [](Problem& p) {
       p.bias = MaskShape{DType::kBFloat16, {1, 1, 11, 23}};
       p.mask = MaskShape{DType::kFloat32, {2, 1, 1, 23}};
       p.head_sink = p.dtype;
       p.relative_bias = RelativeBias{p.dtype, 1, 9};
       p.score_output = ScoreOutput::kBiased;
     }},
    {"softmax in FP64", [](Problem& p) { p.softmax_in_fp64 = true; }},
    {"dropout", [](Problem& p) { p.dropout = Dropout{.probability = 0.3, .seed = 12345678901}; }},
    {"no queries", [](Problem& p) { p.query_length = 0; }},
    {"no keys", [](Problem& p) { p.key_length = 0, p.wants_lse = true; }},
    {"no batch", [](Problem& p) { p.batch = 0, p.wants_lse = true; }},
};

TEST_F(AttendStreamTest, ComputesEveryFeatureOfEveryTypeInBothDirections) {
  int layout = 0;
  for (const Feature& feature : kFeatures) {
    for (const DType dtype : kFloatTypes) {
      Problem problem = SmallProblem();
      problem.dtype = dtype;
      feature.change(problem);
      Rng rng(17);
      const Inputs inputs = RandomInputs(problem, rng);
      for (const v1::StreamDirection direction : kDirections) {
        SCOPED_TRACE(absl::StrCat(feature.name, " ", NameOf(dtype)));
        ExpectConforms(*stub_, problem, inputs, {direction, 4, 7, kLayouts[layout++ % 3]});
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(AttendStreamTest, ReturnsWeightsIfQueriesStream) {
  Problem problem = SmallProblem();
  problem.score_output = ScoreOutput::kWeights;
  problem.mask = MaskShape{DType::kBool, {1, 1, 11, 23}};
  Rng rng(3);
  const Inputs inputs = RandomInputs(problem, rng);
  ExpectConforms(*stub_, problem, inputs, {v1::QUERIES_STREAM, 4, 7});
}

TEST_F(AttendStreamTest, ComputesOtherNormalizersIfQueriesStream) {
  for (const Normalizer normalizer :
       {Normalizer::kSparsemax, Normalizer::kEntmax15, Normalizer::kEntmax}) {
    Problem problem = SmallProblem();
    problem.normalizer = normalizer;
    if (normalizer == Normalizer::kEntmax) problem.alpha = 1.7;
    problem.causal = true;
    problem.score_output = ScoreOutput::kWeights;
    Rng rng(4);
    const Inputs inputs = RandomInputs(problem, rng);
    ExpectConforms(*stub_, problem, inputs, {v1::QUERIES_STREAM, 4, 7});
  }
}

TEST_F(AttendStreamTest, TakesAnAlphaForEachHeadIfQueriesStream) {
  Problem problem = SmallProblem();
  problem.normalizer = Normalizer::kEntmax;
  problem.head_alpha = DType::kFloat32;
  Rng rng(4);
  const Inputs inputs = RandomInputs(problem, rng);
  ExpectConforms(*stub_, problem, inputs, {v1::QUERIES_STREAM, 4, 7});
}

// The result does not depend on the chunk sizes.
TEST_F(AttendStreamTest, RandomChunkingsOfRandomProblemsEqualTheWhole) {
  for (uint64_t seed = 1; seed <= 120; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Rng rng(seed);
    const auto any = [&rng](int64_t low, int64_t high) { return UniformInt(rng, low, high); };
    const auto coin = [&] { return any(0, 2) == 0; };
    Problem p;
    p.dtype = kFloatTypes[any(0, 3)];
    p.batch = any(1, 2);
    p.kv_heads = any(1, 3);
    p.query_heads = p.kv_heads * any(1, 3);
    p.query_length = any(1, 70);
    p.key_length = any(1, 300);
    p.past_length = coin() ? any(1, 40) : 0;
    p.head_size = any(1, 40);
    p.value_head_size = any(1, 40);
    p.causal = coin();
    p.alignment = static_cast<Alignment>(any(0, 2));
    if (coin()) p.left_window = any(0, 100);
    if (coin()) p.right_window = any(0, 100);
    p.has_key_lengths = coin();
    p.wants_lse = coin();
    if (coin()) {
      p.mask = MaskShape{coin() ? DType::kFloat32 : DType::kBool,
                         {coin() ? 1 : p.batch, coin() ? 1 : p.query_heads,
                          coin() ? 1 : p.query_length, coin() ? 1 : p.total_keys()}};
    }
    if (coin()) p.score_output = ScoreOutput::kBiased;
    if (coin()) {
      p.bias = MaskShape{p.dtype,
                         {coin() ? 1 : p.batch, coin() ? 1 : p.query_heads,
                          coin() ? 1 : p.query_length, coin() ? 1 : p.total_keys()}};
    }
    if (coin()) p.head_sink = coin() ? p.dtype : DType::kFloat32;
    switch (any(0, 5)) {
      case 0:
        p.alibi_slopes = AlibiSlopes{DType::kFloat32, coin() ? 1 : p.batch};
        break;
      case 1:
        p.bias_table = BiasTable{p.dtype, any(4, 40)};
        p.is_bidirectional = coin();
        break;
      case 2:
        p.relative_bias =
            RelativeBias{DType::kFloat32, coin() ? 1 : p.query_heads, 2 * any(0, 400) + 1};
        break;
      default:
        break;
    }
    const Inputs inputs = RandomInputs(p, rng);
    const Cut cut = {kDirections[any(0, 1)], any(1, 90), any(1, 350), kLayouts[any(0, 2)]};
    ExpectConforms(*stub_, p, inputs, cut);
    if (HasFailure()) return;
  }
}

// Messages that gRPC delivers in many slices.
TEST_F(AttendStreamTest, ReadsChunksOfMegabytes) {
  Problem problem = SmallProblem();
  problem.batch = 1;
  problem.query_length = 3;
  problem.key_length = 9'000;
  problem.head_size = problem.value_head_size = 64;
  problem.mask = MaskShape{DType::kFloat32, {1, 4, 3, 9'000}};
  problem.bias = MaskShape{DType::kFloat64, {1, 4, 3, 9'000}};
  Rng rng(5);
  const Inputs inputs = RandomInputs(problem, rng);
  for (const v1::Layout layout : {v1::BHSD, v1::BSHD}) {
    ExpectConforms(*stub_, problem, inputs, {v1::KEYS_STREAM, 3, 4'000, layout});
    ExpectConforms(*stub_, problem, inputs, {v1::QUERIES_STREAM, 1, 4'000, layout});
  }
}

TEST(AttendStreamBackendTest, TheReferenceBackendComputesStreams) {
  const ServerProcess server({"--backend=reference"});
  const auto stub = Connect(server);
  Problem problem = SmallProblem();
  problem.batch = 1;
  problem.key_length = 2'000;
  problem.head_size = 64;
  problem.causal = true;
  problem.mask = MaskShape{DType::kBool, {1, 1, 11, 2'000}};
  Rng rng(6);
  const Inputs inputs = RandomInputs(problem, rng);
  for (const v1::StreamDirection direction : kDirections) {
    const Cut cut = {direction, 5, 700};
    const Responses responses = Call(*stub, MessagesOf(problem, inputs, cut));
    ASSERT_TRUE(responses.status.ok()) << responses.status.error_message();
    EXPECT_EQ(responses.messages.back().end().backend(), "reference");
  }
}

TEST_F(AttendStreamTest, NamesBackendAndPlanInTheTrailersAndCountsChunks) {
  const Problem problem = SmallProblem();
  Rng rng(7);
  const Inputs inputs = RandomInputs(problem, rng);
  const double calls =
      ReadMetric(*server_, "rapt_requests_total", {{"method", kMethod}, {"code", "OK"}});
  const double chunks = ReadMetric(*server_, "rapt_chunks_total");
  Caller caller(*stub_);
  for (const Message& message : MessagesOf(problem, inputs, {v1::KEYS_STREAM, 4, 7})) {
    ASSERT_TRUE(caller.Send(message));
  }
  caller.HalfClose();
  const Responses responses = caller.Wait();
  ASSERT_TRUE(responses.status.ok());
  EXPECT_EQ(caller.Trailer("rapt-backend"), "cpu");
  EXPECT_EQ(caller.Trailer("rapt-plan"), responses.messages.back().end().plan());
  EXPECT_NE(caller.Trailer("rapt-compute-us"), "");
  WaitForMetric(*server_, "rapt_requests_total", calls + 1, {{"method", kMethod}, {"code", "OK"}});
  EXPECT_EQ(ReadMetric(*server_, "rapt_chunks_total"), chunks + 3 + 4);
}

// Returns the bytes that the server reserves for an open stream.
double BytesOfStream(const ServerProcess& server, Stub& stub,
                     const std::vector<Message>& messages) {
  const double chunks = ReadMetric(server, "rapt_chunks_total");
  Caller caller(stub);
  EXPECT_TRUE(caller.Send(messages[0]));
  EXPECT_TRUE(caller.Send(messages[1]));
  WaitForMetric(server, "rapt_chunks_total", chunks + 1);  // the stream is admitted
  const double bytes = ReadMetric(server, "rapt_memory_reserved_bytes", {{"kind", "compute"}});
  caller.Cancel();
  caller.Wait();
  WaitUntilNothingIsHeld(server);
  return bytes;
}

TEST_F(AttendStreamTest, TheTensorsOfTheHeaderAreChargedToTheBudget) {
  Problem problem = SmallProblem();
  const auto bytes_with = [&](int64_t distances) {
    problem.relative_bias = RelativeBias{DType::kFloat32, 4, distances};
    Rng rng(8);
    const Inputs inputs = RandomInputs(problem, rng);
    return BytesOfStream(*server_, *stub_, MessagesOf(problem, inputs, {v1::KEYS_STREAM, 4, 7}));
  };
  EXPECT_EQ(bytes_with(4001) - bytes_with(1), 4 * 4000 * 4);
}

// --- Invalid streams -----------------------------------------------------------------------------

// Two chunks of queries, then four of keys.
constexpr Cut kFaultyCut = {v1::KEYS_STREAM, 6, 6};

struct Fault {
  const char* name;
  const char* message;
  void (*spoil)(std::vector<Message>& messages);
  StatusCode code = StatusCode::INVALID_ARGUMENT;
};

v1::AttendStreamHeader& Header(std::vector<Message>& m) { return *m[0].mutable_header(); }
// Sets a tensor of the header; its data is of the size of its shape.
void Fill(v1::Tensor& tensor, v1::DataType dtype, std::initializer_list<int64_t> shape) {
  const auto count = std::accumulate(shape.begin(), shape.end(), size_t{1}, std::multiplies<>());
  const std::map<v1::DataType, size_t> sizes = {
      {v1::FP32, 4}, {v1::FP16, 2}, {v1::FP64, 8}, {v1::BOOL, 1}};
  tensor.set_dtype(dtype);
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  tensor.set_data(std::string(count * sizes.at(dtype), '\0'));
}
v1::QueryChunk& Queries(std::vector<Message>& m, int n) { return *m[1 + n].mutable_queries(); }
v1::KeyChunk& Keys(std::vector<Message>& m, int n) { return *m[3 + n].mutable_keys(); }

const Fault kFaults[] = {
    {"Nothing", "the stream ended before its header", [](auto& m) { m.clear(); }},
    {"NoHeader", "received a chunk of queries; expected a header",
     [](auto& m) { m.erase(m.begin()); }},
    {"AnEmptyMessage", "received an empty message; expected a header",
     [](auto& m) { m[0].Clear(); }},
    {"AnEmptyMessageLater", "received an empty message; expected keys [0, 6)",
     [](auto& m) { m[3].Clear(); }},
    {"TwoHeaders", "received a header; expected queries [0, 6)",
     [](auto& m) { m.insert(m.begin(), m[0]); }},
    {"QueriesCut", "the stream ended; expected queries [6, 11)", [](auto& m) { m.resize(2); }},
    {"KeysCut", "the stream ended; expected keys [18, 23)", [](auto& m) { m.pop_back(); }},
    {"QueriesMissing", "received a chunk of keys; expected queries [6, 11)",
     [](auto& m) { m.erase(m.begin() + 2); }},
    {"KeysMissing", "keys.offset is 12; it must be 6", [](auto& m) { m.erase(m.begin() + 4); }},
    {"KeysRepeated", "keys.offset is 0; it must be 6",
     [](auto& m) { m.insert(m.begin() + 4, m[3]); }},
    {"QueriesRepeated", "queries.offset is 0; it must be 6",
     [](auto& m) { m.insert(m.begin() + 2, m[1]); }},
    {"Overlap", "keys.offset is 5; it must be 6", [](auto& m) { Keys(m, 1).set_offset(5); }},
    {"NegativeOffset", "queries.offset is -1; it must be 0",
     [](auto& m) { Queries(m, 0).set_offset(-1); }},
    {"CountTooSmall", "keys.count is 5; it must be 6", [](auto& m) { Keys(m, 1).set_count(5); }},
    {"CountTooLarge", "keys.count is 6; it must be 5", [](auto& m) { Keys(m, 3).set_count(6); }},
    {"TooManyBytes", "queries.q has 1540 bytes; 6 rows of it have 1536",
     [](auto& m) { Queries(m, 0).mutable_q()->append(4, '\0'); }},
    {"TooFewBytes", "keys.v has 573 bytes; 6 rows of it have 576",
     [](auto& m) { Keys(m, 2).mutable_v()->resize(573); }},
    {"NoValues", "keys.v has 0 bytes; 6 rows of it have 576",
     [](auto& m) { Keys(m, 0).clear_v(); }},
    {"AMaskThatWasNotDeclared", "keys.mask has 3 bytes; 6 rows of it have 0",
     [](auto& m) { Keys(m, 0).set_mask("abc"); }},
    {"AMaskInAResidentChunk", "queries.mask has 3 bytes; 6 rows of it have 0",
     [](auto& m) { Queries(m, 0).set_mask("abc"); }},
    {"MoreThanDeclared", "received a chunk of keys after the last chunk that the header declares",
     [](auto& m) { m.push_back(m.back()); }},
    {"AHeaderAtTheEnd", "received a header after the last chunk that the header declares",
     [](auto& m) { m.push_back(m[0]); }},
    {"ALongMessage", "a chunk of the header's size has at most",
     [](auto& m) { Keys(m, 1).mutable_k()->resize(100'000); }},
    {"ALongHeader", "bytes; at most 65536 are allowed",
     [](auto& m) { Header(m).mutable_key_lengths()->Resize(70'000, 1); }},
    {"NoDirection", "direction is 0; it must be KEYS_STREAM (1) or QUERIES_STREAM (2)",
     [](auto& m) { Header(m).set_direction(v1::STREAM_DIRECTION_UNSPECIFIED); }},
    {"BadType", "dtype is INT8; it must be FP32, FP16, BF16 or FP64",
     [](auto& m) { Header(m).set_dtype(v1::INT8); }},
    {"BadMaskType", "mask.dtype is INT32; it must be BOOL, FP32, FP16, BF16 or FP64",
     [](auto& m) { Header(m).mutable_mask()->set_dtype(v1::INT32); }},
    {"BadMaskRank", "mask.shape has rank 1; it must be [B, Hq, Sq, T], rank 4",
     [](auto& m) { Declare(*Header(m).mutable_mask(), v1::BOOL, {23}); }},
    {"ShortMask", "mask has 20 keys; a chunked call requires 1 or all 23",
     [](auto& m) {
       Declare(*Header(m).mutable_mask(), v1::BOOL, {1, 1, 1, 20});
     }},
    {"ABiasThatWasNotDeclared", "keys.attention_bias has 4 bytes; 6 rows of it have 0",
     [](auto& m) { Keys(m, 0).set_attention_bias("abcd"); }},
    {"ABiasInAResidentChunk", "queries.attention_bias has 4 bytes; 6 rows of it have 0",
     [](auto& m) { Queries(m, 0).set_attention_bias("abcd"); }},
    {"AMissingBias", "keys.attention_bias has 0 bytes; 6 rows of it have 1056",
     [](auto& m) {
       Declare(*Header(m).mutable_attention_bias(), v1::FP32, {1, 4, 11, 23});
     }},
    {"ABoolBias", "attention_bias.dtype is BOOL; it must be FP32, FP16, BF16 or FP64",
     [](auto& m) {
       Declare(*Header(m).mutable_attention_bias(), v1::BOOL, {1, 1, 1, 23});
     }},
    {"ABiasOfRank2", "attention_bias.shape has rank 2; it must be [B, Hq, Sq, T], rank 4",
     [](auto& m) {
       Declare(*Header(m).mutable_attention_bias(), v1::FP32, {11, 23});
     }},
    {"ABiasOfOtherHeads", "attention_bias [1, 3, 11, 23] does not broadcast to [2, 4, 11, 23]",
     [](auto& m) {
       Declare(*Header(m).mutable_attention_bias(), v1::FP32, {1, 3, 11, 23});
     }},
    {"AShortBias", "attention_bias has 20 keys; a chunked call requires 1 or all 23",
     [](auto& m) {
       Declare(*Header(m).mutable_attention_bias(), v1::FP32, {1, 1, 1, 20});
     }},
    {"NegativeLength", "header.key_length is -1; it must be in [0, 2^40]",
     [](auto& m) { Header(m).set_key_length(-1); }},
    {"LongPast", "past_length is 24; it must be from 0 to key_length = 23",
     [](auto& m) { Header(m).set_past_length(24); }},
    {"AdditiveScores", "attention.score_function is ADDITIVE; in streams it must be DOT_PRODUCT",
     [](auto& m) { Header(m).mutable_attention()->set_score_function(v1::ADDITIVE); }},
    {"BlockSize", "attention.block_k is not supported in streams",
     [](auto& m) { Header(m).mutable_attention()->set_block_k(64); }},
    {"NegativePrefix", "attention.prefix_keys is -1; it must be at least 0",
     [](auto& m) { Header(m).mutable_attention()->set_prefix_keys(-1); }},
    {"NoHeadSize", "header.head_size is 0; it must be in [1, 2^40]",
     [](auto& m) { Header(m).set_head_size(0); }},
    {"BadHeads", "q has 4 heads, k and v have 3; the number of query heads must be a multiple of 3",
     [](auto& m) { Header(m).set_kv_heads(3); }},
    {"NoQueryChunk", "query_chunk is 0; it must be at least 1",
     [](auto& m) { Header(m).clear_query_chunk(); }},
    {"NegativeKeyChunk", "key_chunk is -4; it must be at least 1",
     [](auto& m) { Header(m).set_key_chunk(-4); }},
    {"BadKeyLengths", "key_lengths[1] is 24; it must be from 0 to the key length 23",
     [](auto& m) {
       for (const int64_t length : {1, 24}) Header(m).add_key_lengths(length);
     }},
    {"FewKeyLengths", "key_lengths has shape [1]; it must be [2], the batch of q",
     [](auto& m) { Header(m).add_key_lengths(3); }},
    {"WeightsWhileKeysStream", "stream the queries instead",
     [](auto& m) { Header(m).set_score_output(v1::WEIGHTS); }},
    {"SparsemaxWhileKeysStream", "attention.normalizer is sparsemax, which needs all keys at once",
     [](auto& m) { Header(m).mutable_attention()->set_normalizer(v1::SPARSEMAX); }},
    {"ALongTensor", "the header has 65",
     [](auto& m) { Fill(*Header(m).mutable_head_sink(), v1::FP32, {16384}); }},
    {"ASinkOfFewHeads", "head_sink has shape [3]; it must be [4], the number of heads of q",
     [](auto& m) { Fill(*Header(m).mutable_head_sink(), v1::FP32, {3}); }},
    {"ASinkOfRank2", "head_sink has shape [2, 4]; it must be [4], the number of heads of q",
     [](auto& m) {
       Fill(*Header(m).mutable_head_sink(), v1::FP32, {2, 4});
     }},
    {"ASinkOfRank5", "head_sink has a shape of rank 5; it must be at most 4",
     [](auto& m) {
       Fill(*Header(m).mutable_head_sink(), v1::FP32, {1, 1, 1, 1, 4});
     }},
    {"ASinkOfAnotherType", "head_sink has type FP64; it must be FP32, the type of q",
     [](auto& m) { Fill(*Header(m).mutable_head_sink(), v1::FP64, {4}); }},
    {"ASinkOfUnknownType", "head_sink has dtype INT8; it must be FP32, FP16, BF16 or FP64",
     [](auto& m) { Header(m).mutable_head_sink()->set_dtype(v1::INT8); }},
    {"AShortSink", "head_sink has 15 bytes of data; its shape [4] of FP32 needs 16",
     [](auto& m) {
       Fill(*Header(m).mutable_head_sink(), v1::FP32, {4});
       Header(m).mutable_head_sink()->mutable_data()->pop_back();
     }},
    {"ASinkInSharedMemory", "head_sink is in shared memory; it must be in the message",
     [](auto& m) {
       Fill(*Header(m).mutable_head_sink(), v1::FP32, {4});
       Header(m).mutable_head_sink()->mutable_shared_memory()->set_region("a");
     }},
    {"ASinkOfSparsemax", "attention.normalizer is sparsemax, which has no head_sink",
     [](auto& m) {
       Fill(*Header(m).mutable_head_sink(), v1::FP32, {4});
       Header(m).mutable_attention()->set_normalizer(v1::SPARSEMAX);
     }},
    {"SlopesOfFewHeads",
     "alibi_slopes has shape [2, 3]; it must be [4] or [2, 4], the heads and batch of q",
     [](auto& m) {
       Fill(*Header(m).mutable_alibi_slopes(), v1::FP32, {2, 3});
     }},
    {"SlopesOfAnotherBatch", "alibi_slopes has batch 3; it must be 1 or 2, that of q",
     [](auto& m) {
       Fill(*Header(m).mutable_alibi_slopes(), v1::FP32, {3, 4});
     }},
    {"ABiasTableOfFewHeads", "bias_table has shape [8, 3]; it must be [buckets, 4], the heads of q",
     [](auto& m) {
       Fill(*Header(m).mutable_bias_table(), v1::FP32, {8, 3});
     }},
    {"ABiasTableOfFewBuckets",
     "bias_table has 2 buckets; it must have from 4 to 2^40 if attention.is_bidirectional",
     [](auto& m) {
       Fill(*Header(m).mutable_bias_table(), v1::FP32, {2, 4});
       Header(m).mutable_attention()->set_is_bidirectional(true);
     }},
    {"AShortMaxDistance", "attention.max_distance is 4; it must be more than 4",
     [](auto& m) {
       Fill(*Header(m).mutable_bias_table(), v1::FP32, {8, 4});
       Header(m).mutable_attention()->set_max_distance(4);
     }},
    {"ARelativeBiasOfRank1", "relative_bias has shape [5]; it must be [1 or heads, 2c + 1], rank 2",
     [](auto& m) { Fill(*Header(m).mutable_relative_bias(), v1::FP32, {5}); }},
    {"ARelativeBiasOfFewHeads", "relative_bias has heads 2; it must be 1 or 4, that of q",
     [](auto& m) {
       Fill(*Header(m).mutable_relative_bias(), v1::FP32, {2, 5});
     }},
    {"ARelativeBiasOfEvenLength", "relative_bias has 6 distances; their number must be 2c + 1, odd",
     [](auto& m) {
       Fill(*Header(m).mutable_relative_bias(), v1::FP32, {4, 6});
     }},
    {"ARelativeBiasOfAnotherType", "relative_bias has type FP16; it must be FP32",
     [](auto& m) {
       Fill(*Header(m).mutable_relative_bias(), v1::FP16, {4, 5});
     }},
    {"RelativeKeysOfAnotherSize",
     "relative_keys has shape [4, 5, 7]; it must be [1 or heads, 2c + 1, 8]",
     [](auto& m) {
       Fill(*Header(m).mutable_relative_keys(), v1::FP32, {4, 5, 7});
     }},
    {"RelativeValuesOfEvenLength", "relative_values has 4 distances; their number must be 2c + 1",
     [](auto& m) {
       Fill(*Header(m).mutable_relative_values(), v1::FP32, {1, 4, 6});
     }},
    {"AnAlphaOfFewHeads", "head_alpha has shape [2]; it must be [4], the number of heads of q",
     [](auto& m) { Fill(*Header(m).mutable_head_alpha(), v1::FP32, {2}); }},
    {"TwoBiasesByDistance", "attention.alibi and relative_bias are both set; at most one",
     [](auto& m) {
       Fill(*Header(m).mutable_relative_bias(), v1::FP32, {4, 5});
       Header(m).mutable_attention()->set_alibi(true);
     }},
    {"Overflow", "overflows 64 bits",
     [](auto& m) {
       Header(m).set_query_length(int64_t{1} << 40);
       Header(m).set_key_length(int64_t{1} << 40);
     }},
    {"BeyondTheBudget", "needs ", [](auto& m) { Header(m).set_query_length(int64_t{1} << 33); },
     StatusCode::RESOURCE_EXHAUSTED},
    {"BeyondTheLargestMessage", "query_chunk or key_chunk must be smaller",
     [](auto& m) {
       Header(m).set_key_length(1 << 30);
       Header(m).set_key_chunk(1 << 30);
     },
     StatusCode::RESOURCE_EXHAUSTED},
};

class FaultyStreamTest : public AttendStreamTest, public ::testing::WithParamInterface<Fault> {};

TEST_P(FaultyStreamTest, EndsInOneClearStatusAndReleasesEverything) {
  const Problem problem = SmallProblem();
  Rng rng(11);
  const Inputs inputs = RandomInputs(problem, rng);
  std::vector<Message> messages = MessagesOf(problem, inputs, kFaultyCut);
  GetParam().spoil(messages);
  const Responses responses = Call(*stub_, messages);
  EXPECT_EQ(responses.status.error_code(), GetParam().code);
  EXPECT_THAT(responses.status.error_message(), HasSubstr(GetParam().message));
  for (const Response& response : responses.messages) EXPECT_FALSE(response.has_end());
  WaitUntilNothingIsHeld(*server_);
}

INSTANTIATE_TEST_SUITE_P(All, FaultyStreamTest, ::testing::ValuesIn(kFaults),
                         [](const auto& param) { return std::string(param.param.name); });

TEST_F(AttendStreamTest, TheStreamWithoutFaultsIsValid) {
  const Problem problem = SmallProblem();
  Rng rng(11);
  ExpectConforms(*stub_, problem, RandomInputs(problem, rng), kFaultyCut);
}

TEST_F(AttendStreamTest, RefusesAnAlphaOutOfRange) {
  Problem problem = SmallProblem();
  problem.normalizer = Normalizer::kEntmax;
  problem.head_alpha = DType::kFloat32;
  Rng rng(11);
  std::vector<Message> messages =
      MessagesOf(problem, RandomInputs(problem, rng), {v1::QUERIES_STREAM, 4, 7});
  const float alphas[] = {1, 2, 3, 1.5};
  Header(messages).mutable_head_alpha()->set_data(alphas, sizeof(alphas));
  const Responses responses = Call(*stub_, messages);
  EXPECT_EQ(responses.status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(responses.status.error_message(),
              HasSubstr("head_alpha[2] is 3; it must be from 1 (softmax) to 2 (sparsemax)"));
  WaitUntilNothingIsHeld(*server_);
}

// --- Streams that stop ---------------------------------------------------------------------------

// After each number of messages: the header only, resident chunks, streaming chunks, all of them.
TEST_F(AttendStreamTest, ACallerThatDisconnectsHoldsNothing) {
  const Problem problem = SmallProblem();
  Rng rng(12);
  const Inputs inputs = RandomInputs(problem, rng);
  for (const v1::StreamDirection direction : kDirections) {
    const std::vector<Message> messages = MessagesOf(problem, inputs, {direction, 4, 7});
    for (size_t sent = 0; sent <= messages.size(); ++sent) {
      SCOPED_TRACE(absl::StrCat(sent, " messages"));
      Caller caller(*stub_);
      for (size_t n = 0; n < sent; ++n) ASSERT_TRUE(caller.Send(messages[n]));
      WaitForMetric(*server_, "rapt_open_streams", 1);
      caller.Cancel();
      EXPECT_EQ(caller.Wait().status.error_code(), StatusCode::CANCELLED);
      WaitUntilNothingIsHeld(*server_);
    }
  }
  EXPECT_GT(
      ReadMetric(*server_, "rapt_requests_total", {{"method", kMethod}, {"code", "CANCELLED"}}), 0);
}

TEST_F(AttendStreamTest, ADeadlineEndsAStalledStream) {
  const Problem problem = SmallProblem();
  Rng rng(13);
  const Inputs inputs = RandomInputs(problem, rng);
  const std::vector<Message> messages = MessagesOf(problem, inputs, kFaultyCut);
  for (const size_t sent : {0, 2, 4}) {
    Caller caller(*stub_, std::chrono::milliseconds(300));
    for (size_t n = 0; n < sent; ++n) caller.Send(messages[n]);
    EXPECT_EQ(caller.Wait().status.error_code(), StatusCode::DEADLINE_EXCEEDED);
    WaitUntilNothingIsHeld(*server_);
  }
}

// Minutes of work in a chunk.
std::vector<Message> LongStream() {
  Problem problem = SmallProblem();
  problem.batch = 1;
  problem.query_length = problem.key_length = 1'000'000;
  problem.query_heads = problem.kv_heads = problem.head_size = problem.value_head_size = 1;
  problem.dtype = DType::kFloat32;
  std::vector<Message> messages = {HeaderOf(problem,
                                            {.query = Tensor(problem.dtype, {0, 0, 0, 0}),
                                             .key = Tensor(problem.dtype, {0, 0, 0, 0}),
                                             .value = Tensor(problem.dtype, {0, 0, 0, 0})},
                                            {v1::KEYS_STREAM, 1'000'000, 1'000'000})};
  const std::string zeros(4'000'000, '\0');
  v1::QueryChunk& queries = *messages.emplace_back().mutable_queries();
  queries.set_count(1'000'000);
  queries.set_q(zeros);
  v1::KeyChunk& keys = *messages.emplace_back().mutable_keys();
  keys.set_count(1'000'000);
  keys.set_k(zeros);
  keys.set_v(zeros);
  return messages;
}

TEST(AttendStreamEndTest, CancellationAndDeadlineEndTheComputationToo) {
  const ServerProcess server({"--threads=1"});
  const auto stub = Connect(server);
  const std::vector<Message> messages = LongStream();
  Caller caller(*stub);
  for (const Message& message : messages) ASSERT_TRUE(caller.Send(message));
  WaitForMetric(server, "rapt_compute_threads_busy", 1);
  caller.Cancel();
  EXPECT_EQ(caller.Wait().status.error_code(), StatusCode::CANCELLED);
  WaitUntilNothingIsHeld(server);
  WaitForMetric(server, "rapt_compute_threads_busy", 0);

  Caller late(*stub, std::chrono::seconds(1));
  for (const Message& message : messages) late.Send(message);
  EXPECT_EQ(late.Wait().status.error_code(), StatusCode::DEADLINE_EXCEEDED);
  WaitUntilNothingIsHeld(server);
  WaitForMetric(server, "rapt_compute_threads_busy", 0);
}

TEST(AttendStreamEndTest, ASlowSenderIsEvicted) {
  const ServerProcess server({"--min_receive_bytes_per_second=2000000000"});
  const auto stub = Connect(server);
  const Problem problem = SmallProblem();
  Rng rng(14);
  const Inputs inputs = RandomInputs(problem, rng);
  const std::vector<Message> messages = MessagesOf(problem, inputs, kFaultyCut);
  for (const size_t sent : {0, 3}) {
    Caller caller(*stub);
    for (size_t n = 0; n < sent; ++n) ASSERT_TRUE(caller.Send(messages[n]));
    const Responses responses = caller.Wait();
    EXPECT_EQ(responses.status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(responses.status.error_message(), HasSubstr("slower than 2000000000 bytes/s"));
    WaitUntilNothingIsHeld(server);
  }
}

// Sends everything and reads nothing of megabytes of responses: the server must neither continue
// nor wait forever. Returns the status of the call.
StatusCode SendAllAndReadNothing(const ServerProcess& server, std::chrono::seconds timeout) {
  const auto stub = Connect(server);
  Problem problem = SmallProblem();
  problem.batch = 1;
  problem.query_length = 64;
  problem.key_length = 100'000;
  problem.head_size = problem.value_head_size = 1;
  problem.score_output = ScoreOutput::kScores;
  Rng rng(15);
  const Inputs inputs = RandomInputs(problem, rng);
  const std::vector<Message> messages =
      MessagesOf(problem, inputs, {v1::QUERIES_STREAM, 4, 100'000});
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  const auto stream = stub->AttendStream(&context);
  for (const Message& message : messages) stream->Write(message);
  stream->WritesDone();
  WaitForMetric(server, "rapt_open_streams", 0);
  // Of 16 chunks, at most: one result is being sent, two wait, one is computed, two are received.
  EXPECT_LE(ReadMetric(server, "rapt_chunks_total"), 1 + 6);
  WaitUntilNothingIsHeld(server);
  for (Response response; stream->Read(&response);) {
  }  // drain the responses: the status follows them
  return stream->Finish().error_code();
}

TEST(AttendStreamEndTest, BackpressureHoldsACallerThatDoesNotReadUntilItsDeadline) {
  const ServerProcess server;
  EXPECT_EQ(SendAllAndReadNothing(server, std::chrono::seconds(2)), StatusCode::DEADLINE_EXCEEDED);
}

TEST(AttendStreamEndTest, ACallerThatDoesNotReadIsEvictedBeforeItsDeadline) {
  const ServerProcess server;
  EXPECT_EQ(SendAllAndReadNothing(server, std::chrono::hours(1)), StatusCode::CANCELLED);
  EXPECT_EQ(ReadMetric(server, "rapt_rejected_total", {{"reason", "slow_reader"}}), 1);
}

// The results are small enough to be copied and numerous enough to fill every flow control window.
TEST(AttendStreamEndTest, ACallerThatReadsLateGetsEveryResponse) {
  const ServerProcess server;
  Problem problem = SmallProblem();
  problem.batch = 1;
  problem.query_heads = problem.kv_heads = 1;
  problem.query_length = 125 * 300;
  problem.value_head_size = 8;
  Rng rng(19);
  const Inputs inputs = RandomInputs(problem, rng);
  const Cut cut = {v1::QUERIES_STREAM, 125, 23};
  const std::vector<Message> messages = MessagesOf(problem, inputs, cut);
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);  // otherwise windows grow to megabytes
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 64 * 1024);
  const auto stub = v1::AttentionService::NewStub(grpc::CreateCustomChannel(
      server.grpc_address(), grpc::InsecureChannelCredentials(), arguments));
  grpc::ClientContext context;
  const auto stream = stub->AttendStream(&context);
  std::thread sender([&] {
    for (const Message& message : messages) stream->Write(message);
    stream->WritesDone();
  });
  double taken = -1;  // until the server accepts no more
  for (int same = 0; same < 50;) {
    const double now = ReadMetric(server, "rapt_chunks_total");
    same = now > 1 && now == taken ? same + 1 : 0;
    taken = now;
  }
  EXPECT_LT(taken, static_cast<double>(messages.size()) - 1);
  Responses responses;
  for (Response response; stream->Read(&response);) responses.messages.push_back(response);
  sender.join();
  const grpc::Status status = stream->Finish();
  ASSERT_TRUE(status.ok()) << status.error_message();
  const Outputs outputs = Collector(problem, cut).Collect(responses.messages);
  EXPECT_TRUE(Matches(problem, outputs, rapt::test::Attend(problem, inputs)));
}

TEST(AttendStreamEndTest, ADrainingServerFinishesStreamsAndAcceptsNone) {
  ServerProcess server({kDrainPause, kDrainRefusalTime});
  const auto stub = Connect(server);
  const Problem problem = SmallProblem();
  Rng rng(16);
  const Inputs inputs = RandomInputs(problem, rng);
  const std::vector<Message> messages = MessagesOf(problem, inputs, kFaultyCut);
  Caller open(*stub);
  ASSERT_TRUE(open.Send(messages[0]));
  ASSERT_TRUE(open.Send(messages[1]));
  WaitForMetric(server, "rapt_chunks_total", 1);
  server.Terminate();
  // gRPC's client begins a call that GOAWAY refuses anew, on another connection. Version 1.51 then
  // sometimes omits a message of a stream.
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  const auto other_stub = Connect(server, arguments);
  grpc::Status refused;
  while (refused.ok()) refused = Call(*other_stub, messages).status;
  EXPECT_EQ(refused.error_code(), StatusCode::UNAVAILABLE) << refused.error_message();
  for (size_t n = 2; n < messages.size(); ++n) EXPECT_TRUE(open.Send(messages[n]));
  open.HalfClose();
  const Responses responses = open.Wait();
  EXPECT_TRUE(responses.status.ok()) << responses.status.error_message();
  EXPECT_TRUE(responses.messages.back().has_end());
  EXPECT_EQ(server.Wait(), 0);
}

// Each chunk is a frame of fewer than 256 bytes.
TEST(AttendStreamLengthTest, ManyTinyChunksAreNoFlood) {
  const ServerProcess server;
  const auto stub = Connect(server);
  Problem problem = SmallProblem();
  problem.batch = problem.query_heads = problem.kv_heads = problem.query_length = 1;
  problem.key_length = 25000;
  Rng rng(23);
  const Cut cut = {v1::KEYS_STREAM, 1, 1};
  const Responses responses = Call(*stub, MessagesOf(problem, RandomInputs(problem, rng), cut));
  EXPECT_TRUE(responses.status.ok()) << responses.status.error_message();
}

TEST(AttendStreamEndTest, OpenStreamsCountAsOpenCalls) {
  const ServerProcess server({"--max_calls_per_caller=2"});
  const auto stub = Connect(server);
  Caller first(*stub);
  Caller second(*stub);
  WaitForMetric(server, "rapt_open_calls", 2);
  Caller third(*stub);
  EXPECT_EQ(third.Wait().status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  for (Caller* caller : {&first, &second}) {
    caller->Cancel();
    caller->Wait();
  }
  WaitUntilNothingIsHeld(server);
}

// --- Any length ----------------------------------------------------------------------------------

// A million keys of 128 MiB, through a server that holds only a few at a time.
TEST(AttendStreamLengthTest, AMillionKeysTakeTheMemoryOfTwoChunks) {
  constexpr int64_t kKeys = 1 << 20;
  constexpr int64_t kChunk = 1 << 14;
  constexpr int64_t kQueries = 4;
  constexpr int64_t kSize = 16;
  const ServerProcess server({absl::StrCat("--memory_budget_bytes=", 256 * kMiB), "--threads=2"});
  const auto stub = Connect(server);
  Rng rng(18);
  const auto random = [&rng](int64_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(Uniform(rng, -1, 1));
    return values;
  };
  const std::vector<float> q = random(kQueries * kSize);
  const std::vector<float> k = random(kKeys * kSize);
  const std::vector<float> v = random(kKeys * kSize);
  const auto bytes = [](const std::vector<float>& values, int64_t begin, int64_t count) {
    return std::string(reinterpret_cast<const char*>(values.data() + begin * kSize),
                       count * kSize * sizeof(float));
  };
  const Problem problem = {.batch = 1,
                           .query_heads = 1,
                           .kv_heads = 1,
                           .query_length = kQueries,
                           .key_length = kKeys,
                           .head_size = kSize,
                           .value_head_size = kSize};
  const Tensor none(DType::kFloat32, {0, 0, 0, 0});

  const int64_t before = RssAnonBytes(server.pid());
  Responses responses;
  int64_t peak;
  {
    const MemoryWatch watch(server.pid());
    Caller caller(*stub);
    ASSERT_TRUE(caller.Send(HeaderOf(problem, {.query = none, .key = none, .value = none},
                                     {v1::KEYS_STREAM, kQueries, kChunk})));
    Message message;
    message.mutable_queries()->set_count(kQueries);
    message.mutable_queries()->set_q(bytes(q, 0, kQueries));
    ASSERT_TRUE(caller.Send(message));
    for (int64_t begin = 0; begin < kKeys; begin += kChunk) {
      v1::KeyChunk& chunk = *message.mutable_keys();
      chunk.set_offset(begin);
      chunk.set_count(kChunk);
      chunk.set_k(bytes(k, begin, kChunk));
      chunk.set_v(bytes(v, begin, kChunk));
      ASSERT_TRUE(caller.Send(message));
    }
    caller.HalfClose();
    responses = caller.Wait();
    peak = watch.peak();
  }
  ASSERT_TRUE(responses.status.ok()) << responses.status.error_message();
  ASSERT_EQ(responses.messages.size(), 2u);
  std::printf("RssAnon %ld MiB before, %ld MiB at most\n", before / kMiB, peak / kMiB);
  EXPECT_LE(kRssIsMeaningful ? peak - before : 0, 32 * kMiB);
  const Tensor y =
      FromBytes("y", responses.messages[0].output().y(), DType::kFloat32, {1, 1, kQueries, kSize});
  for (int64_t i = 0; i < kQueries; ++i) {
    double sum = 0;
    std::vector<double> want(kSize);
    for (int64_t j = 0; j < kKeys; ++j) {
      double score = 0;
      for (int64_t d = 0; d < kSize; ++d) score += double{q[i * kSize + d]} * k[j * kSize + d];
      const double weight = std::exp(score / 4);  // sqrt(16)
      sum += weight;
      for (int64_t d = 0; d < kSize; ++d) want[d] += weight * v[j * kSize + d];
    }
    for (int64_t d = 0; d < kSize; ++d) EXPECT_NEAR(y.At(0, 0, i, d), want[d] / sum, 2e-6);
  }
}

}  // namespace
}  // namespace rapt::test
