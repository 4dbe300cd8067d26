#include "server/models/model_repository.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/admission/gate.h"
#include "tests/support/fake_clock.h"

namespace rapt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ModelRepositoryTest : public ::testing::Test {
 protected:
  ModelRepositoryTest() { std::filesystem::create_directories(folder_); }
  ~ModelRepositoryTest() override { std::filesystem::remove_all(folder_); }

  // Writes a layer without weights: Luong's dot product.
  void Write(const std::string& name, int embed_size = 4) const {
    std::filesystem::create_directories(folder_ / name);
    std::ofstream(folder_ / name / "model.safetensors") << std::string("\2\0\0\0\0\0\0\0{}", 10);
    std::ofstream(folder_ / name / "config.json")
        << absl::StrCat(R"({"hidden_size": )", embed_size, R"(, "rapt": {"naming": "plain"}})");
  }

  std::vector<std::string> Loaded() const {
    std::vector<std::string> names;
    for (const ModelInfoPtr& model : repository_.loaded()) {
      names.emplace_back(model->name());
    }
    return names;
  }

  const std::filesystem::path folder_ =
      testing::TempDir() + "model_repository_test." + std::to_string(getpid());
  test::FakeClock clock_;
  Timer timer_{clock_};
  AdmissionGate gate_{{.budget_bytes = 1 << 20}, timer_, clock_};
  ModelRepository repository_{{.folder = folder_.string(), .reserved = {"attention"}}, gate_};
};

const auto kNever = [] { return false; };
constexpr std::chrono::seconds kDelay{10};

// Returns a file of empty tensors.
std::string FileWithIndexOf(int tensors) {
  std::string index = "{";
  for (int n = 0; n < tensors; ++n) {
    absl::StrAppend(&index, n > 0 ? "," : "", "\"", n,
                    R"(":{"dtype":"F32","shape":[0],"data_offsets":[0,0]})");
  }
  index += "}";
  std::string length(8, '\0');
  for (size_t n = 0; n < 4; ++n) length[n] = static_cast<char>(index.size() >> 8 * n);
  return length + index;
}

TEST_F(ModelRepositoryTest, AModelIsDescribedOnceForAllItsCalls) {
  Write("a");
  ASSERT_TRUE(repository_.LoadAll(kNever).ok());
  const ModelInfoPtr first = repository_.Find("a");
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(repository_.Find("a"), first);
  EXPECT_EQ(repository_.loaded().front(), first);
  Write("a", 6);
  EXPECT_EQ(repository_.Load("a").value(), first);
  const ModelInfoPtr second = repository_.Find("a");
  EXPECT_EQ(first->inputs.front().size, 4);
  EXPECT_EQ(second->inputs.front().size, 6);
  EXPECT_TRUE(*first->has_ended);
  EXPECT_FALSE(*second->has_ended);
  EXPECT_EQ(repository_.Unload("a").value(), second);
  EXPECT_TRUE(*second->has_ended);
  EXPECT_EQ(repository_.Unload("a").value(), nullptr);
  EXPECT_EQ(repository_.Load("a").value(), nullptr);
}

TEST_F(ModelRepositoryTest, StopsBetweenTwoModels) {
  for (const char* name : {"a", "b", "c", "d"}) Write(name);
  int asked = 0;
  const absl::Status status = repository_.LoadAll([&] { return ++asked > 2; });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(Loaded(), ElementsAre("a", "b"));
}

TEST_F(ModelRepositoryTest, TheFirstWrongModelEndsTheLoadByName) {
  for (const char* name : {"a", "b", "c"}) Write(name);
  std::ofstream(folder_ / "b" / "config.json") << "{";
  const absl::Status status = repository_.LoadAll(kNever);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("model 'b': config.json"));
  EXPECT_THAT(Loaded(), ElementsAre("a"));
}

TEST_F(ModelRepositoryTest, HasAMostNumberOfModels) {
  for (size_t n = 0; n < ModelRepository::kMaxModels; ++n) Write(absl::StrCat("m", n));
  ASSERT_TRUE(repository_.LoadAll(kNever).ok());
  EXPECT_EQ(Loaded().size(), ModelRepository::kMaxModels);
  Write("one_more");
  const auto full = [&] { return repository_.Load("one_more").status(); };
  EXPECT_EQ(full().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(full().message(), "model 'one_more': the repository has 1000 models, the most allowed");
  EXPECT_TRUE(repository_.Load("m7").ok());
  // An unloaded model counts as long as its folder exists: it may be loaded again.
  ASSERT_TRUE(repository_.Unload("m7").ok());
  EXPECT_EQ(full().code(), absl::StatusCode::kResourceExhausted);
  std::filesystem::remove_all(folder_ / "m7");
  EXPECT_TRUE(full().ok());
  EXPECT_EQ(repository_.Find("m7"), nullptr);
  EXPECT_EQ(repository_.Unload("m7").status().code(), absl::StatusCode::kNotFound);
}

// The tables that its index becomes have many times its bytes.
TEST_F(ModelRepositoryTest, ReadingAnIndexIsChargedBeforeItIsRead) {
  Write("a");
  std::ofstream(folder_ / "a" / "model.safetensors") << FileWithIndexOf(1000);
  const absl::Status status = repository_.Load("a").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("model 'a': the memory for reading its files needs"));
  EXPECT_EQ(gate_.reserved_bytes(), 0);
  Write("a");
  std::ofstream(folder_ / "a" / "tokenizer.json") << std::string(1 << 20, ' ');  // is not read
  EXPECT_TRUE(repository_.Load("a").ok());
  EXPECT_EQ(gate_.reserved_bytes(), gate_.long_reserved_bytes());
}

// A queue without a place refuses whatever has to wait.
TEST_F(ModelRepositoryTest, AMissingModelWaitsForNoMemory) {
  AdmissionGate gate({.budget_bytes = 1 << 20, .max_queued = 1, .max_queue_delay = kDelay}, timer_,
                     clock_);
  ModelRepository repository({.folder = folder_.string(), .reserved = {}}, gate);
  const auto all = gate.AdmitNow({.bytes = gate.LimitOf(AdmissionGate::Share::kCompute)});
  gate.Queue({.bytes = 1 << 18}, [](const AdmissionGate::Result&) {});
  ASSERT_EQ(gate.waiting().depth, 1);
  Write("a");
  EXPECT_EQ(repository.Load("a").status().code(), absl::StatusCode::kResourceExhausted);
  const absl::Status missing = repository.Load("missing").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound) << missing;
  clock_.Advance(kDelay);
  gate.Serve();
}

// Files that are not opened cost nothing.
TEST_F(ModelRepositoryTest, ShardsBesideTheWholeFileAreNotCharged) {
  Write("a");
  const std::string shard = FileWithIndexOf(1000);
  std::ofstream(folder_ / "a" / "model-00001-of-00001.safetensors") << shard;
  std::ofstream(folder_ / "a" / "model.safetensors.index.json")
      << R"({"weight_map": {"0": "model-00001-of-00001.safetensors"}})";
  EXPECT_TRUE(repository_.Load("a").ok());
  std::filesystem::remove(folder_ / "a" / "model.safetensors");
  EXPECT_THAT(std::string(repository_.Load("a").status().message()),
              HasSubstr("the memory for reading its files needs"));
}

// The index may name a shard without the usual ending.
TEST_F(ModelRepositoryTest, ShardsOfAnyNameAreCharged) {
  Write("a");
  std::filesystem::remove(folder_ / "a" / "model.safetensors");
  std::ofstream(folder_ / "a" / "weights") << FileWithIndexOf(1000);
  std::ofstream(folder_ / "a" / "model.safetensors.index.json")
      << R"({"weight_map": {"0": "weights"}})";
  EXPECT_THAT(std::string(repository_.Load("a").status().message()),
              HasSubstr("the memory for reading its files needs"));
}

TEST_F(ModelRepositoryTest, NamesDoNotLeadOutOfTheFolder) {
  for (const std::string& name :
       {std::string(".."), std::string("a/b"), std::string(), std::string("a\0b", 3),
        std::string(".hidden"), std::string(129, 'x'), std::string("attention")}) {
    EXPECT_EQ(repository_.Load(name).status().code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(repository_.Unload(name).status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
  EXPECT_EQ(repository_.Load(std::string(128, 'x')).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace rapt
