#include "attention/layer/files/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/support/corrupt.h"
#include "tests/support/saved_tensors.h"

namespace rapt::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

[[nodiscard]] std::string MessageFor(const std::string& index, const std::string& data = "") {
  const auto tensors = Safetensors::Parse(SafetensorsFile(index, data));
  EXPECT_EQ(tensors.status().code(), absl::StatusCode::kInvalidArgument) << index;
  return std::string(tensors.status().message());
}

// An entry of one F32 tensor, whose data is `bytes` long from `begin`.
std::string Entry(absl::string_view name, int64_t count, int64_t begin, int64_t end) {
  return absl::StrCat("\"", name, R"(":{"dtype":"F32","shape":[)", count, R"(],"data_offsets":[)",
                      begin, ",", end, "]}");
}

TEST(SafetensorsTest, ReadsTensorsInPlace) {
  const std::string file = SaveTensors({{"w", {2, 3}, {1, 2, 3, 4, 5, 6}}, {"b", {2}, {7, 8}}});
  const auto tensors = Safetensors::Parse(file);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_EQ(tensors->tensors().size(), 2);
  const SavedTensor& w = *tensors->Find("w");
  EXPECT_EQ(w.type, "F32");
  EXPECT_EQ(w.dtype, DType::kFloat32);
  EXPECT_THAT(w.shape, ElementsAre(2, 3));
  ASSERT_EQ(w.bytes.size(), 24);
  float last = 0;
  std::memcpy(&last, w.bytes.data() + 20, sizeof(last));
  EXPECT_EQ(last, 6);
  EXPECT_EQ(tensors->Find("b")->bytes.data(), w.bytes.data() + 24);
  EXPECT_EQ(tensors->Find("absent"), nullptr);
}

TEST(SafetensorsTest, ReadsEveryTypeScalarsEmptyTensorsAndMetadata) {
  const auto tensors = Safetensors::Parse(SafetensorsFile(
      R"({"__metadata__":{"format":"pt"},
          "d":{"dtype":"F64","shape":[],"data_offsets":[0,8]},
          "h":{"dtype":"F16","shape":[1],"data_offsets":[8,10]},
          "z":{"dtype":"BF16","shape":[0,9000000000000000000,9],"data_offsets":[10,10]},
          "b":{"dtype":"BF16","shape":[1],"data_offsets":[10,12]},
          "i":{"dtype":"I64","shape":[1],"data_offsets":[12,20]}}   )",
      std::string(20, '\0')));
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  EXPECT_EQ(tensors->Find("d")->dtype, DType::kFloat64);
  EXPECT_EQ(tensors->Find("h")->dtype, DType::kFloat16);
  EXPECT_EQ(tensors->Find("b")->dtype, DType::kBFloat16);
  EXPECT_TRUE(tensors->Find("z")->bytes.empty());
  // A snapshot may have other tensors beside those of a layer.
  EXPECT_EQ(tensors->Find("i")->dtype, std::nullopt);
  EXPECT_EQ(tensors->Find("i")->type, "I64");
}

// Types that the format has or gets say nothing of how many bytes a tensor must have.
TEST(SafetensorsTest, TensorsOfOtherTypesAreBytes) {
  int64_t end = 0;
  std::string index = "{";
  for (const char* type :
       {"F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2", "C64", "F31", "NEW"}) {
    absl::StrAppend(&index, end == 0 ? "" : ",", "\"", type, R"(":{"dtype":")", type,
                    R"(","shape":[2,3],"data_offsets":[)", end, ",", end + 3, "]}");
    end += 3;
  }
  const std::string file = SafetensorsFile(index + "}", std::string(end, 'x'));
  const auto tensors = Safetensors::Parse(file);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  EXPECT_EQ(tensors->tensors().size(), 9);
  EXPECT_EQ(tensors->Find("F4")->dtype, std::nullopt);
  EXPECT_EQ(tensors->Find("C64")->type, "C64");
  EXPECT_EQ(tensors->Find("NEW")->bytes.size(), 3);
}

TEST(SafetensorsTest, TensorsMayBeInAnyOrder) {
  const auto tensors = Safetensors::Parse(SafetensorsFile(
      absl::StrCat("{", Entry("late", 1, 4, 8), ",", Entry("early", 1, 0, 4), "}"), "12345678"));
  EXPECT_TRUE(tensors.ok()) << tensors.status();
}

TEST(SafetensorsTest, RejectsHolesOverlapsAndTrailingBytes) {
  const auto two = [](int64_t begin, int64_t end) {
    return absl::StrCat("{", Entry("a", 1, 0, 4), ",", Entry("b", 1, begin, end), "}");
  };
  EXPECT_THAT(
      MessageFor(two(5, 9), "123456789"),
      HasSubstr("tensor b begins at byte 5 of the data, behind a hole; it must begin at 4"));
  EXPECT_THAT(MessageFor(two(2, 6), "123456"),
              HasSubstr("tensor b begins at byte 2 of the data, within another one"));
  EXPECT_THAT(MessageFor(two(4, 8), "1234567"), HasSubstr("within the 7 bytes of data"));
  EXPECT_THAT(MessageFor(two(4, 8), "123456789"),
              HasSubstr("the tensors have 8 bytes; the file has 9 bytes of data"));
  EXPECT_THAT(MessageFor(two(8, 4), "12345678"), HasSubstr("tensor b has data_offsets [8, 4]"));
  EXPECT_THAT(MessageFor("{}", "1"), HasSubstr("the tensors have 0 bytes"));
}

TEST(SafetensorsTest, RejectsSizesThatDoNotFitTheShape) {
  EXPECT_THAT(MessageFor(absl::StrCat("{", Entry("w", 2, 0, 4), "}"), "1234"),
              HasSubstr("tensor w has 4 bytes; its shape [2] of F32 needs 8"));
  EXPECT_THAT(
      MessageFor(R"({"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})"),
      HasSubstr("of F32 needs more than 2^63"));
  EXPECT_THAT(
      MessageFor(R"({"w":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,0]}})"),
      HasSubstr("tensor w has 18446744073709551615 in shape"));
  EXPECT_THAT(MessageFor(R"({"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,0]}})"),
              HasSubstr("tensor w: field shape has a negative number"));
}

TEST(SafetensorsTest, RejectsWhatIsNoIndex) {
  const std::pair<const char*, const char*> rows[] = {
      {"", "the index is invalid JSON: line 1, column 1 (byte 1): "},
      {"[]", "the index has an array; the index is an object of tensors"},
      {"1", "the index has a number; the index is"},
      {"null", "the index has null; the index is"},
      {R"("w")", "the index has a string; the index is"},
      {"{", "the index is invalid JSON: line 1, column 2 (byte 2): "},
      {R"({"w":1})", "field w has a number; the index is"},
      {R"({"w":{"dtype":1}})", "tensor w: field dtype has a number; the index is"},
      {R"({"w":{}})", "tensor w needs dtype, shape and data_offsets"},
      {R"({"w":{"dtype":"F32","shape":[1.5],"data_offsets":[0,0]}})",
       "tensor w: field shape has a number that is not whole or has more than 64 bits; the index "
       "is"},
      {R"({"w":{"dtype":"F32","shape":[[1]],"data_offsets":[0,0]}})",
       "tensor w: field shape has an array; the index is"},
      {R"({"w":{"dtype":"F32","shape":{},"data_offsets":[0,0]}})",
       "tensor w: field shape has an object; the index is"},
      {R"({"w":{"dtype":"F32","shape":[0],"data_offsets":[0]}})",
       "tensor w has 1 data_offsets; it must have 2"},
      {R"({"w":{"dtype":"F32","shape":[0],"shape":[0],"data_offsets":[0,0]}})",
       "w.shape is given twice"},
      {R"({"w":{"dtype":"F32","dtype":"F32","shape":[0],"data_offsets":[0,0]}})",
       "w.dtype is given twice"},
      {R"({"w":{"dtype":"","shape":[0],"data_offsets":[0,0]}})",
       "tensor w has a dtype of 0 bytes; it must have 1 to 32"},
      {R"({"w":{"dtype":"TYPE_OF_A_NAME_LONGER_THAN_32_BYTES","shape":[0],"data_offsets":[0,0]}})",
       "tensor w has a dtype of 35 bytes; it must have 1 to 32"},
      {R"({"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"more":[1]}})",
       "tensor w: field more has an array; the index is"},
      {R"({"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}} {})", "column 56 (byte 56): "},
      {R"({"__metadata__":{"a":{}}})", "field a has an object; the index is"},
      {R"({"__metadata__":{"a":1}})", "field a has a number; the index is"},
  };
  for (const auto& [index, message] : rows) EXPECT_THAT(MessageFor(index), HasSubstr(message));
  EXPECT_THAT(MessageFor("{\n\"w\": }"), HasSubstr("invalid JSON: line 2, column 6 (byte 8): "));
  EXPECT_THAT(MessageFor(std::string("{}\0 x", 5)), HasSubstr("a NUL byte"));
  EXPECT_THAT(
      MessageFor(absl::StrCat("{", Entry("w", 1, 0, 4), ",", Entry("w", 1, 4, 8), "}"), "12345678"),
      HasSubstr("w is given twice"));
}

// None of them may take memory or stack that grows with more than the index.
TEST(SafetensorsTest, RejectsBombs) {
  EXPECT_THAT(MessageFor(std::string(1 << 20, '[')), HasSubstr("the index has an array"));
  std::string nested;
  for (int n = 0; n < 100'000; ++n) nested += R"({"a":)";
  EXPECT_THAT(MessageFor(nested), HasSubstr("tensor a: field a has an object"));
  EXPECT_THAT(MessageFor(R"({"w":{"dtype":"F32","shape":[)" + std::string(100, '1') + "]}}"),
              HasSubstr("field shape has a number that is not whole or has more than 64 bits"));
  EXPECT_THAT(MessageFor(R"({")" + std::string(2000, 'n') + R"(":{}})"),
              HasSubstr("a name has 2000 bytes"));
  std::string shape = "1";
  for (int n = 0; n < 100; ++n) shape += ",1";
  EXPECT_THAT(MessageFor(R"({"w":{"dtype":"F32","shape":[)" + shape + R"(],"data_offsets":[0,4]}})",
                         "1234"),
              HasSubstr("more than 16 numbers"));
}

TEST(SafetensorsTest, RejectsLengthsOfTheIndexThatTheFileDoesNotHave) {
  const auto message = [](uint64_t length, const std::string& rest) {
    std::string file(8, '\0');
    std::memcpy(file.data(), &length, sizeof(length));
    return std::string(Safetensors::Parse(file + rest).status().message());
  };
  EXPECT_THAT(message(3, "{}"), HasSubstr("the index has 3 bytes; the file has 10"));
  EXPECT_THAT(message(100'000'001, "{}"), HasSubstr("at most 100000000 are allowed"));
  EXPECT_THAT(message(~uint64_t{0}, "{}"), HasSubstr("at most 100000000 are allowed"));
  EXPECT_THAT(std::string(Safetensors::Parse("1234567").status().message()),
              HasSubstr("the file has 7 bytes"));
}

// Whatever is damaged, tensors that are accepted lie within the file.
TEST(SafetensorsTest, DamagedFilesAreReadWithinTheirBytesOrRejected) {
  const std::string whole = SaveTensors({{"w", {2, 3}, {1, 2, 3, 4, 5, 6}}, {"b", {2}, {7, 8}}});
  std::mt19937 random(7);
  int accepted = 0;
  for (int n = 0; n < 20'000; ++n) {
    const std::string file = Corrupt(whole, random);
    const auto tensors = Safetensors::Parse(file);
    if (!tensors.ok()) continue;
    ++accepted;
    const auto* const begin = reinterpret_cast<const std::byte*>(file.data());
    for (const auto& [name, tensor] : tensors->tensors()) {
      EXPECT_GE(tensor.bytes.data(), begin);
      EXPECT_LE(tensor.bytes.data() + tensor.bytes.size(), begin + file.size());
    }
  }
  EXPECT_GT(accepted, 0);
}

// Shards in a folder of their own.
class ShardsTest : public ::testing::Test {
 protected:
  ~ShardsTest() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& content) {
    std::ofstream(folder_ / name) << content;
  }
  absl::StatusOr<Safetensors> Open(const std::string& index) {
    Write("index.json", index);
    return Safetensors::OpenShards(folder_ / "index.json");
  }
  [[nodiscard]] std::string MessageFor(const std::string& index,
                                       absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    const absl::Status status = Open(index).status();
    EXPECT_EQ(status.code(), code) << index << status;
    return std::string(status.message());
  }

 private:
  const std::filesystem::path folder_ = [] {
    std::filesystem::path folder = testing::TempDir() + "shards_test." + std::to_string(getpid());
    std::filesystem::create_directories(folder);
    return folder;
  }();
};

TEST_F(ShardsTest, AreReadTogether) {
  Write("1.safetensors", SaveTensors({{"a", {1}, {7}}}));
  Write("2.safetensors", SaveTensors({{"b", {1}, {8}}, {"c", {1}, {9}}}));
  const auto tensors = Open(R"({"metadata": {"total_size": 12, "other": [{"weight_map": 1}]},
      "weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}})");
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  EXPECT_EQ(tensors->tensors().size(), 3);
  float c = 0;
  std::memcpy(&c, tensors->Find("c")->bytes.data(), sizeof(c));
  EXPECT_EQ(c, 9);
  EXPECT_TRUE(tensors->unchanged());
  Write("2.safetensors", "cut");
  EXPECT_FALSE(tensors->unchanged());
}

TEST_F(ShardsTest, TensorsThatTheIndexDoesNotNameAreRead) {
  Write("1.safetensors", SaveTensors({{"a", {1}, {7}}, {"b", {1}, {8}}}));
  const auto tensors = Open(R"({"weight_map": {"a": "1.safetensors"}})");
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  EXPECT_NE(tensors->Find("b"), nullptr);
}

TEST_F(ShardsTest, WhatIsWrongIsNamed) {
  Write("1.safetensors", SaveTensors({{"a", {1}, {7}}}));
  Write("2.safetensors", SaveTensors({{"a", {1}, {7}}, {"b", {1}, {8}}}));
  Write("4.safetensors", SaveTensors({{"c", {1}, {9}}, {"d", {1}, {9}}}));
  Write("bad.safetensors", "1234567");
  EXPECT_EQ(MessageFor(R"({"weight_map": {"a": "3.safetensors"}})", absl::StatusCode::kNotFound),
            "3.safetensors: the file does not exist");
  EXPECT_THAT(MessageFor(R"({"weight_map": {"a": "bad.safetensors"}})"),
              HasSubstr("bad.safetensors: the file has 7 bytes"));
  EXPECT_EQ(MessageFor(R"({"weight_map": {"z": "1.safetensors"}})"),
            "1.safetensors: tensor z of weight_map is missing");
  EXPECT_EQ(MessageFor(R"({"weight_map": {"a": "1.safetensors", "c": "1.safetensors",
                                          "d": "4.safetensors"}})"),
            "1.safetensors: tensor c of weight_map is missing");
  EXPECT_EQ(MessageFor(R"({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})"),
            "2.safetensors: tensor a is in another shard, too");
  for (const char* shard : {"../1.safetensors", "/etc/passwd", "", "..", ".hidden"}) {
    EXPECT_THAT(MessageFor(absl::StrCat(R"({"weight_map": {"a": ")", shard, "\"}}")),
                HasSubstr("it must be in a file of the same folder"));
  }
  const std::pair<const char*, const char*> rows[] = {
      {"{}", "weight_map is missing or empty"},
      {"[]", "the file is no object"},
      {"3", "the file is no object"},
      {"{", "invalid JSON: line 1, column 2 (byte 2): "},
      {R"({"weight_map": {}})", "weight_map is missing or empty"},
      {R"({"weight_map": []})", "weight_map is missing or empty"},
      {R"({"weight_map": {"a": 1}})", "tensor a is in a number; it must be in a file"},
      {R"({"weight_map": {"a": ["1"]}})", "tensor a is in an array; it must be in a file"},
      {R"({"weight_map": {"a": {}}})", "tensor a is in an object; it must be in a file"},
      {R"({"weight_map": {"a": null}})", "tensor a is in null; it must be in a file"},
      {R"({"weight_map": {"a": "1.safetensors", "a": "1.safetensors"}})",
       "weight_map.a is given twice"},
      {R"({"x": {"weight_map": {"a": "1.safetensors"}}})", "weight_map is missing or empty"},
  };
  for (const auto& [index, message] : rows) EXPECT_THAT(MessageFor(index), HasSubstr(message));
}

TEST_F(ShardsTest, TheirIndexIsBounded) {
  EXPECT_THAT(MessageFor(std::string(Safetensors::kMaxIndexBytes + 1, ' ')),
              HasSubstr("the file has 33554433 bytes; at most 33554432 are allowed"));
  std::string shards = R"({"weight_map": {"n": "n")";
  for (size_t n = 0; n < Safetensors::kMaxShards; ++n)
    absl::StrAppend(&shards, ",\"", n, "\":\"", n, "\"");
  EXPECT_THAT(MessageFor(shards + "}}"), HasSubstr("weight_map has more than 500 shards"));
  std::string tensors = R"({"weight_map": {"n": "n")";
  for (size_t n = 0; n < Safetensors::kMaxTensors; ++n)
    absl::StrAppend(&tensors, ",\"", n, "\":\"n\"");
  EXPECT_THAT(MessageFor(tensors + "}}"), HasSubstr("weight_map has more than 100000 tensors"));
}

TEST(SafetensorsTest, AFileThatCanNotBeMappedIsNotFound) {
  EXPECT_EQ(Safetensors::Open("/nonexistent").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Safetensors::Open("/dev/null").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace rapt::test
