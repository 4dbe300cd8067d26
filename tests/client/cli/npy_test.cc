#include "client/cli/npy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"

namespace rapt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Returns a file as numpy.save writes it, with any header.
std::string NpyFile(const std::string& header, const std::string& elements, char major = 1) {
  const std::string padded = header + "\n";
  std::string file = "\x93NUMPY";
  file.push_back(major);
  file.push_back('\0');
  file.push_back(static_cast<char>(padded.size() & 0xff));
  file.push_back(static_cast<char>(padded.size() >> 8));
  if (major > 1) file.append(2, '\0');
  return file + padded + elements;
}

std::string Header(const std::string& descr, const std::string& shape,
                   const std::string& order = "False") {
  return absl::StrCat("{'descr': '", descr, "', 'fortran_order': ", order, ", 'shape': ", shape,
                      ", }");
}

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

template <typename T>
std::vector<T> Values(const NpyArray& array) {
  std::vector<T> values(array.size());
  std::memcpy(values.data(), array.bytes().data(), array.bytes().size());
  return values;
}

// The output of numpy 2.4's numpy.save(numpy.arange(6, dtype="f4").reshape(2, 3)).
TEST(NpyTest, ReadsAFileWrittenByNumPy) {
  std::string file = std::string("\x93NUMPY\x01\x00v\x00", 10) +
                     "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }" +
                     std::string(58, ' ') + "\n";
  ASSERT_EQ(file.size(), 128);
  const absl::StatusOr<NpyArray> array = ParseNpy(file + Bytes<float>({0, 1, 2, 3, 4, 5}));
  ASSERT_TRUE(array.ok()) << array.status();
  EXPECT_EQ(array->type, (NpyType{'f', 4}));
  EXPECT_THAT(array->shape, ElementsAre(2, 3));
  EXPECT_THAT(Values<float>(*array), ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST(NpyTest, WritesWhatItReads) {
  const std::vector<double> values = {1, -2.5, 3};
  for (const Shape& shape : {Shape{}, Shape{3}, Shape{1, 3, 1}}) {
    const std::vector<double> some(values.begin(), values.begin() + (shape.empty() ? 1 : 3));
    const std::string file =
        FormatNpy({'f', 8}, shape,
                  {reinterpret_cast<const std::byte*>(some.data()), some.size() * sizeof(double)});
    EXPECT_EQ((file.size() - some.size() * sizeof(double)) % 64, 0);
    const absl::StatusOr<NpyArray> array = ParseNpy(file);
    ASSERT_TRUE(array.ok()) << array.status() << " for " << ToString(shape);
    EXPECT_EQ(array->shape, shape);
    EXPECT_EQ(Values<double>(*array), some);
  }
}

TEST(NpyTest, TurnsFortranOrderIntoCOrder) {
  const absl::StatusOr<NpyArray> array =
      ParseNpy(NpyFile(Header("<i2", "(2, 3)", "True"), Bytes<int16_t>({0, 3, 1, 4, 2, 5})));
  ASSERT_TRUE(array.ok()) << array.status();
  EXPECT_THAT(Values<int16_t>(*array), ElementsAre(0, 1, 2, 3, 4, 5));
  const absl::StatusOr<NpyArray> deep = ParseNpy(
      NpyFile(Header("|u1", "(2, 2, 2)", "True"), Bytes<uint8_t>({0, 4, 2, 6, 1, 5, 3, 7})));
  ASSERT_TRUE(deep.ok()) << deep.status();
  EXPECT_THAT(Values<uint8_t>(*deep), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_TRUE(ParseNpy(NpyFile(Header("<f8", "(0, 9223372036854775807)", "True"), "")).ok());
}

TEST(NpyTest, ReadsEveryVersionOfTheFormat) {
  for (const char major : {1, 2, 3}) {
    const absl::StatusOr<NpyArray> array =
        ParseNpy(NpyFile(Header("<f4", "(1,)"), Bytes<float>({7}), major));
    ASSERT_TRUE(array.ok()) << int{major} << ": " << array.status();
    EXPECT_THAT(Values<float>(*array), ElementsAre(7));
  }
}

TEST(NpyTest, ReadsEverySupportedType) {
  for (const char* descr : {"<f2", "<f4", "<f8", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4",
                            "<u8", "|b1", "<V2", "|V2"}) {
    const int bytes = descr[2] - '0';
    const absl::StatusOr<NpyArray> array =
        ParseNpy(NpyFile(Header(descr, "(3,)"), std::string(3 * bytes, '\1')));
    ASSERT_TRUE(array.ok()) << descr << ": " << array.status();
    EXPECT_EQ(array->type, (NpyType{descr[1], bytes})) << descr;
    EXPECT_EQ(array->size(), 3) << descr;
  }
  EXPECT_EQ(ParseNpy(NpyFile(Header("bfloat16", "()"), "ab"))->type, (NpyType{'V', 2}));
}

TEST(NpyTest, ReadsText) {
  const absl::StatusOr<NpyArray> array =
      ParseNpy(NpyFile(Header("<U3", "(2,)"), std::string(2 * 3 * 4, '\0')));
  ASSERT_TRUE(array.ok()) << array.status();
  EXPECT_EQ(array->type, (NpyType{'U', 12}));
  EXPECT_EQ(array->size(), 2);
}

TEST(NpyTest, KeysComeInAnyOrderAndQuotes) {
  const absl::StatusOr<NpyArray> array =
      ParseNpy(NpyFile("{\"shape\":(2,),\"fortran_order\":True,\"descr\":\"|b1\"}", "\1\1"));
  ASSERT_TRUE(array.ok()) << array.status();
  EXPECT_THAT(array->shape, ElementsAre(2));
}

struct Damage {
  std::string name;
  std::string file;
  std::string message;
};

class NpyDamageTest : public ::testing::TestWithParam<Damage> {};

TEST_P(NpyDamageTest, IsRejectedInOneLine) {
  const absl::StatusOr<NpyArray> array = ParseNpy(GetParam().file);
  ASSERT_EQ(array.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(array.status().message()), HasSubstr(GetParam().message));
  EXPECT_EQ(array.status().message().find('\n'), absl::string_view::npos);
}

INSTANTIATE_TEST_SUITE_P(
    All, NpyDamageTest,
    ::testing::Values(
        Damage{"Empty", "", "does not start with"}, Damage{"Text", "a,b,c", "does not start with"},
        Damage{"MagicOnly", "\x93NUMPY", "ends within its header"},
        Damage{"NoHeaderSize", std::string("\x93NUMPY\x02\x00\x10\x00", 10), "ends within"},
        Damage{"Version", NpyFile(Header("<f4", "(1,)"), "abcd", 9), "format version is 9"},
        Damage{"HeaderCut", NpyFile(Header("<f4", "(1,)"), "").substr(0, 40), "ends within"},
        Damage{"NoDictionary", NpyFile("[1, 2]", ""), "not a dictionary"},
        Damage{"Unclosed", NpyFile("{'descr': '<f4'", ""), "not a dictionary"},
        Damage{"UnknownKey", NpyFile("{'desc': '<f4', }", ""), "unknown key"},
        Damage{"NoShape", NpyFile("{'descr': '<f4', 'fortran_order': False, }", ""), "lacks"},
        Damage{"BadOrder", NpyFile(Header("<f4", "(1,)", "Maybe"), ""), "neither True nor False"},
        Damage{"BadShape", NpyFile(Header("<f4", "(-1,)"), ""), "not a tuple of sizes"},
        Damage{"SizeOverflow", NpyFile(Header("<f4", "(99999999999999999999,)"), ""),
               "not a tuple"},
        Damage{"TooManyAxes",
               NpyFile(Header("<f4",
                              "(1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,"
                              "1,1,1)"),
                       "abcd"),
               "not a tuple"},
        Damage{"ProductOverflow", NpyFile(Header("<f8", "(4294967296, 4294967296)"), "12345678"),
               "does not match"},
        Damage{"TooFewElements", NpyFile(Header("<f4", "(2,)"), "abcd"), "the 4 bytes that follow"},
        Damage{"TooManyElements", NpyFile(Header("<f4", "(1,)"), "abcdabcd"), "does not match"},
        Damage{"BigEndian", NpyFile(Header(">f4", "(1,)"), "abcd"), "big-endian"},
        Damage{"Complex", NpyFile(Header("<c8", "(1,)"), "abcdabcd"), "'<c8'"},
        Damage{"NoLetters", NpyFile(Header("<U0", "(1,)"), ""), "'<U0'"},
        Damage{"TooManyLetters", NpyFile(Header("<U1073741824", "(1,)"), ""), "'<U1073741824'"},
        Damage{"Objects", NpyFile(Header("|O", "(1,)"), "abcd"), "'|O'"},
        Damage{"Records",
               NpyFile("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", ""),
               "records"}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace rapt
