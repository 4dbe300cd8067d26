#include "attention/layer/files/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/support/corrupt.h"
#include "tests/support/saved_tensors.h"

namespace rapt::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string MessageFor(const std::string& index, const std::string& data = "") {
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
  for (const char* index :
       {"",
        "[]",
        "1",
        "null",
        R"("w")",
        "{",
        R"({"w":1})",
        R"({"w":{"dtype":1}})",
        R"({"w":{}})",
        R"({"w":{"dtype":"F32","shape":[1.5],"data_offsets":[0,0]}})",
        R"({"w":{"dtype":"F32","shape":[[1]],"data_offsets":[0,0]}})",
        R"({"w":{"dtype":"F32","shape":{},"data_offsets":[0,0]}})",
        R"({"w":{"dtype":"F32","shape":[0],"data_offsets":[0]}})",
        R"({"w":{"dtype":"F32","shape":[0],"shape":[0],"data_offsets":[0,0]}})",
        R"({"w":{"dtype":"F32","dtype":"F32","shape":[0],"data_offsets":[0,0]}})",
        R"({"w":{"dtype":"F31","shape":[0],"data_offsets":[0,0]}})",
        R"({"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"more":[1]}})",
        R"({"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}} {})",
        R"({"__metadata__":{"a":{}}})",
        R"({"__metadata__":{"a":1}})"}) {
    MessageFor(index);
  }
  EXPECT_THAT(MessageFor("{\n\"w\": }"), HasSubstr("invalid JSON: line 2, column 6 (byte 8): "));
  EXPECT_THAT(MessageFor(std::string("{}\0 x", 5)), HasSubstr("a NUL byte"));
  EXPECT_THAT(
      MessageFor(absl::StrCat("{", Entry("w", 1, 0, 4), ",", Entry("w", 1, 4, 8), "}"), "12345678"),
      HasSubstr("w is given twice"));
}

// None of them may take memory or stack that grows with more than the index.
TEST(SafetensorsTest, RejectsBombs) {
  MessageFor(std::string(1 << 20, '['));
  std::string nested;
  for (int n = 0; n < 100'000; ++n) nested += R"({"a":)";
  MessageFor(nested);
  MessageFor(R"({"w":{"dtype":"F32","shape":[)" + std::string(100, '1') + "]}}");
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

TEST(SafetensorsTest, AFileThatCanNotBeMappedIsNotFound) {
  EXPECT_EQ(Safetensors::Open("/nonexistent").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Safetensors::Open("/dev/null").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace rapt::test
