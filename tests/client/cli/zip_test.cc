#include "client/cli/zip.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>

namespace rapt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::StatusOr<std::string> ReadOnly(const std::string& archive) {
  const absl::StatusOr<ZipReader> reader = ZipReader::Open(archive);
  if (!reader.ok()) return reader.status();
  if (reader->names().size() != 1) return absl::InternalError("not one member");
  return reader->Read(0);
}

std::string ReadWholeFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// Returns the output of WriteZip().
std::string StoredArchive(const std::vector<ZipContent>& members) {
  const std::string path = ::testing::TempDir() + "zip_test.npz";
  const absl::Status written = WriteZip(path, members);
  EXPECT_TRUE(written.ok()) << written;
  return ReadWholeFile(path);
}

void Put(std::string& bytes, size_t at, uint64_t value, int count) {
  for (int i = 0; i < count; ++i) bytes[at + i] = static_cast<char>(value >> (8 * i));
}

// An archive of one deflated member without ZIP64 fields, as zip(1) writes it.
std::string DeflatedArchive(const std::string& content, uint32_t claimed_bytes) {
  std::string deflated(compressBound(content.size()) + 64, '\0');
  z_stream stream{};
  deflateInit2(&stream, Z_BEST_COMPRESSION, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(content.data()));
  stream.avail_in = content.size();
  stream.next_out = reinterpret_cast<Bytef*>(deflated.data());
  stream.avail_out = deflated.size();
  deflate(&stream, Z_FINISH);
  deflated.resize(stream.total_out);
  deflateEnd(&stream);

  const uint32_t crc = crc32(0, reinterpret_cast<const Bytef*>(content.data()), content.size());
  std::string local(30, '\0');
  Put(local, 0, 0x04034b50, 4);
  Put(local, 26, 1, 2);
  std::string central(46, '\0');
  Put(central, 0, 0x02014b50, 4);
  Put(central, 10, 8, 2);
  Put(central, 16, crc, 4);
  Put(central, 20, deflated.size(), 4);
  Put(central, 24, claimed_bytes, 4);
  Put(central, 28, 1, 2);
  std::string end(22, '\0');
  Put(end, 0, 0x06054b50, 4);
  Put(end, 8, 1, 2);
  Put(end, 10, 1, 2);
  Put(end, 12, central.size() + 1, 4);
  Put(end, 16, local.size() + 1 + deflated.size(), 4);
  return local + "a" + deflated + central + "a" + end;
}

TEST(ZipTest, ReadsWhatItWrites) {
  const absl::StatusOr<ZipReader> reader =
      ZipReader::Open(StoredArchive({{"a.npy", "one"}, {"b.npy", ""}}));
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_THAT(reader->names(), ElementsAre("a.npy", "b.npy"));
  EXPECT_EQ(*reader->Read(0), "one");
  EXPECT_EQ(*reader->Read(1), "");
}

TEST(ZipTest, WritesTheSameBytesForTheSameMembers) {
  const std::string archive = StoredArchive({{"a.npy", "one"}});
  EXPECT_EQ(StoredArchive({{"a.npy", "one"}}), archive);
  EXPECT_THAT(archive, HasSubstr("one"));  // stored
}

TEST(ZipTest, WritesThroughSymbolicLinks) {
  const std::string link = ::testing::TempDir() + "zip_test_link.npz";
  const std::string target = ::testing::TempDir() + "zip_test_target.npz";
  ASSERT_TRUE(WriteZip(target, std::vector<ZipContent>{{"a", "zero"}}).ok());
  std::filesystem::remove(link);
  std::filesystem::create_symlink(target, link);
  ASSERT_TRUE(WriteZip(link, std::vector<ZipContent>{{"a", "one"}}).ok());
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(*ReadOnly(ReadWholeFile(target)), "one");
}

TEST(ZipTest, NamesAFileThatCannotBeWritten) {
  const absl::Status written = WriteZip("/nowhere/y.npz", std::vector<ZipContent>{{"a", "one"}});
  EXPECT_THAT(std::string(written.message()), HasSubstr("can't write /nowhere/y.npz: "));
}

TEST(ZipTest, ReadsDeflatedMembers) {
  const std::string content(100000, 'x');
  const absl::StatusOr<std::string> read = ReadOnly(DeflatedArchive(content, content.size()));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, content);
}

TEST(ZipTest, FindsTheDirectoryBeforeAComment) {
  std::string archive = DeflatedArchive("hello", 5);
  Put(archive, archive.size() - 2, 3, 2);
  EXPECT_EQ(*ReadOnly(archive + "abc"), "hello");
}

TEST(ZipTest, RejectsMembersOfAWrongStatedSize) {
  const std::string content(1000, 'x');
  for (const uint32_t claimed : {999u, 1001u, 0u, 0xfffffff0u}) {
    const absl::StatusOr<std::string> read = ReadOnly(DeflatedArchive(content, claimed));
    EXPECT_EQ(read.status().code(), absl::StatusCode::kInvalidArgument) << claimed;
  }
}

TEST(ZipTest, RejectsAWrongChecksum) {
  std::string archive = StoredArchive({{"a", "content"}});
  archive[archive.find("content")] = 'k';
  EXPECT_THAT(std::string(ReadOnly(archive).status().message()), HasSubstr("CRC"));
}

TEST(ZipTest, RejectsAStoredMemberLargerThanTheFile) {
  std::string archive = StoredArchive({{"a", "content"}});
  const size_t directory = archive.find("PK\1\2");
  Put(archive, directory + 20, 0xfffffff0, 4);
  Put(archive, directory + 24, 0xfffffff0, 4);
  EXPECT_THAT(std::string(ReadOnly(archive).status().message()),
              HasSubstr("a member is larger than the file"));
}

TEST(ZipTest, RejectsOtherCompressionMethods) {
  std::string archive = DeflatedArchive("hello", 5);
  Put(archive, archive.find("PK\1\2") + 10, 12, 2);
  EXPECT_THAT(std::string(ReadOnly(archive).status().message()),
              HasSubstr("compression method 12; it must be stored (0) or deflate (8)"));
}

TEST(ZipTest, SurvivesTruncationAtEveryByte) {
  for (const std::string& archive :
       {StoredArchive({{"a.npy", "content"}}), DeflatedArchive("content", 7)}) {
    for (size_t size = 0; size < archive.size(); ++size) {
      EXPECT_FALSE(ReadOnly(archive.substr(0, size)).ok()) << size << " of " << archive.size();
    }
  }
}

// A flipped bit must not crash, and must be detected in the content.
TEST(ZipTest, SurvivesEveryFlippedBit) {
  for (const std::string& archive :
       {StoredArchive({{"a.npy", "content"}}), DeflatedArchive("content", 7)}) {
    for (size_t bit = 0; bit < archive.size() * 8; ++bit) {
      std::string flipped = archive;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
      const absl::StatusOr<std::string> read = ReadOnly(flipped);
      EXPECT_EQ(read.ok() ? *read : "content", "content") << "bit " << bit;
    }
  }
}

}  // namespace
}  // namespace rapt
