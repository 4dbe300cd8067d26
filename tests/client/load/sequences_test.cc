// The calls of a stream of sequences, answered by a model of the server.
#include "client/load/sequences.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/connections.h"
#include "proto/rapt/v1/cache.pb.h"
#include "rapt/cache.h"

namespace rapt::load {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// One head of size 1.
struct CacheModel {
  uint64_t generation = 1;
  std::vector<float> keys, values;
};

std::vector<float> Floats(const v1::Tensor& tensor) {
  std::vector<float> numbers(tensor.data().size() / sizeof(float));
  std::memcpy(numbers.data(), tensor.data().data(), tensor.data().size());
  return numbers;
}

// Caches of one head of size 1, with attention over all tokens of an item, of one row each.
class ServerModel {
 public:
  // Returns the response to a call; notes its method.
  std::string Answer(const OutgoingCall& call) {
    const std::string method = call.method.substr(call.method.rfind('/') + 1);
    methods.push_back(method);
    grpc::ByteBuffer bytes = call.encoded->messages.front();
    grpc::Slice slice;
    EXPECT_TRUE(bytes.DumpToSingleSlice(&slice).ok());
    const std::string request(reinterpret_cast<const char*>(slice.begin()), slice.size());
    if (method == "Create") return Make({});
    if (method == "Fork") {
      v1::ForkRequest fork;
      EXPECT_TRUE(fork.ParseFromString(request));
      CacheModel cache = caches.at(fork.cache());
      cache.keys.resize(fork.length());
      cache.values.resize(fork.length());
      return Make(cache);
    }
    if (method == "Append") return Append(request);
    if (method == "Attend") return Attend(request);
    if (method == "Truncate") {
      v1::TruncateRequest truncate;
      EXPECT_TRUE(truncate.ParseFromString(request));
      CacheModel& cache = caches.at(truncate.cache());
      EXPECT_EQ(truncate.generation(), cache.generation++);
      cache.keys.resize(truncate.length());
      cache.values.resize(truncate.length());
      return Describe(truncate.cache());
    }
    v1::Ids ids;
    EXPECT_EQ(method, "Close");
    EXPECT_TRUE(ids.ParseFromString(request));
    for (const std::string& id : ids.caches()) EXPECT_EQ(caches.erase(id), 1u) << id;
    return "";
  }

  std::map<std::string, CacheModel> caches;
  std::vector<std::string> methods;
  float error = 0;  // added to y

 private:
  std::string Make(const CacheModel& cache) {
    const std::string id = absl::StrCat("cache ", ++made_);
    caches[id] = cache;
    caches[id].generation = 1;
    return Describe(id);
  }

  std::string Describe(const std::string& id) {
    v1::Cache message;
    message.set_id(id);
    message.set_generation(caches.at(id).generation);
    return message.SerializeAsString();
  }

  void Add(const std::string& id, int64_t at, absl::Span<const float> keys,
           absl::Span<const float> values) {
    CacheModel& cache = caches.at(id);
    EXPECT_EQ(at, static_cast<int64_t>(cache.keys.size()));
    cache.keys.insert(cache.keys.end(), keys.begin(), keys.end());
    cache.values.insert(cache.values.end(), values.begin(), values.end());
  }

  std::string Append(const std::string& request) {
    v1::AppendRequest append;
    EXPECT_TRUE(append.ParseFromString(request));
    v1::AppendResponse response;
    for (const v1::AppendPart& part : append.parts()) {
      Add(part.cache(), part.at(), Floats(part.k()), Floats(part.v()));
      response.add_results();
    }
    return response.SerializeAsString();
  }

  std::string Attend(const std::string& request) {
    v1::AttendCachedRequest attend;
    EXPECT_TRUE(attend.ParseFromString(request));
    const std::vector<float> q = Floats(attend.q()), k = Floats(attend.k()), v = Floats(attend.v());
    std::vector<float> y;
    v1::AttendCachedResponse response;
    size_t row = 0;
    for (const v1::Item& item : attend.items()) {
      EXPECT_EQ(item.generation(), caches.at(item.cache()).generation);
      for (int n = 0; n < item.rows(); ++n, ++row) {
        Add(item.cache(), item.at() + n, {&k[row], 1}, {&v[row], 1});
        const CacheModel& cache = caches.at(item.cache());
        double sum = 0, output = 0;
        for (size_t t = 0; t < cache.keys.size(); ++t) {
          const double weight = std::exp(static_cast<double>(q[row]) * cache.keys[t]);
          sum += weight;
          output += weight * cache.values[t];
        }
        y.push_back(static_cast<float>(output / sum) + error);
      }
      response.add_items();
    }
    *response.mutable_y() = attend.q();
    response.mutable_y()->set_data(y.data(), y.size() * sizeof(float));
    return response.SerializeAsString();
  }

  int made_ = 0;
};

// A stream of a load with one shape; no server is there.
class SequencesTest : public ::testing::Test {
 protected:
  void Start(CacheScenario scenario, int64_t batch, int64_t prompt, int64_t steps) {
    auto workload = KeepSequences({.scenario = scenario, .steps = steps},
                                  {{.batch = batch, .queries = prompt, .keys = prompt}});
    ASSERT_TRUE(workload.ok()) << workload.status();
    workload_ = *std::move(workload);
    auto source = workload_->NewSource(&connections_.at(0));
    ASSERT_TRUE(source.ok()) << source.status();
    source_ = *std::move(source);
  }

  // Sends the next calls; returns those that are measured, by their shapes.
  std::vector<size_t> Send(int calls) {
    std::vector<size_t> measured;
    for (; calls > 0; --calls) {
      const OutgoingCall call = source_->Next(0);
      if (call.is_measured) measured.push_back(call.shape);
      const grpc::Slice answer(server_.Answer(call));
      source_->OnDone(absl::OkStatus(), {grpc::ByteBuffer(&answer, 1)});
    }
    return measured;
  }

  void Fail() {
    source_->Next(0);
    source_->OnDone(absl::UnavailableError("lost"), {});
  }

  client::Connections connections_{"127.0.0.1:1", {}, grpc::InsecureChannelCredentials()};
  ServerModel server_;
  std::unique_ptr<Workload> workload_;
  std::unique_ptr<CallSource> source_;
};

TEST_F(SequencesTest, DecodeStartsAgainAfterThePrompt) {
  Start(CacheScenario::kDecode, 2, 3, /*steps=*/2);
  const std::vector<size_t> measured = Send(2 + 2 + 2 + 2 + 2);
  EXPECT_THAT(server_.methods, ElementsAre("Create", "Create", "Append", "Append", "Attend",
                                           "Attend", "Truncate", "Truncate", "Attend", "Attend"));
  EXPECT_THAT(measured, ElementsAre(0, 0, 0, 0));
  for (const auto& [id, cache] : server_.caches) {
    EXPECT_EQ(cache.keys.size(), 5u);
    EXPECT_EQ(cache.generation, 2u);
  }
  EXPECT_TRUE(source_->Check().ok()) << source_->Check();
}

TEST_F(SequencesTest, PrefillDecodeEndsItsSequencesAndMeasuresPrompts) {
  Start(CacheScenario::kPrefillDecode, 1, 3, /*steps=*/2);
  const std::vector<size_t> measured = Send(1 + 1 + 2 + 1 + 1 + 1);
  EXPECT_THAT(server_.methods,
              ElementsAre("Create", "Attend", "Attend", "Attend", "Close", "Create", "Attend"));
  EXPECT_THAT(measured, ElementsAre(1, 0, 0, 1));
  EXPECT_EQ(server_.caches.size(), 1u);
  ASSERT_EQ(workload_->shapes().size(), 2u);
  EXPECT_EQ(Describe(workload_->shapes()[0]), "1x1x1:3x1 FP32 causal");
  EXPECT_EQ(Describe(workload_->shapes()[1]), "1x1x3x1 FP32 causal");
  EXPECT_TRUE(source_->Check().ok()) << source_->Check();
}

TEST_F(SequencesTest, AWrongStepIsNamed) {
  Start(CacheScenario::kDecode, 2, 3, /*steps=*/4);
  EXPECT_TRUE(absl::IsNotFound(source_->Check()));
  Send(2 + 2 + 3);
  EXPECT_TRUE(source_->Check().ok()) << source_->Check();
  server_.error = 1e-3f;
  Send(1);
  const absl::Status wrong = source_->Check();
  EXPECT_TRUE(absl::IsInternal(wrong));
  EXPECT_THAT(std::string(wrong.message()),
              StartsWith("the response to 2x1x1:3x1 FP32 causal is wrong: Y[0, 0, 0, 0] is"));
}

TEST_F(SequencesTest, AFailureEndsTheCachesAndBeginsAgain) {
  Start(CacheScenario::kDecode, 2, 3, /*steps=*/4);
  Send(2 + 2 + 1);
  Fail();
  Send(1 + 2);
  EXPECT_THAT(server_.methods, ElementsAre("Create", "Create", "Append", "Append", "Attend",
                                           "Close", "Create", "Create"));
  EXPECT_EQ(server_.caches.size(), 2u);
  Fail();  // of an append
  Fail();  // of the close: the caches may be gone
  Send(1);
  EXPECT_EQ(server_.methods.back(), "Create");
}

TEST(CacheScenarioTest, NamesWhatItTakes) {
  EXPECT_EQ(*ParseCacheScenario("shared-prefix"), CacheScenario::kSharedPrefix);
  const absl::Status status = ParseCacheScenario("chat").status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("'chat'; it takes decode, prefill-decode or shared-prefix"));
}

}  // namespace
}  // namespace rapt::load
