#include "client/cli/zip.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <zlib.h>

#include <csignal>
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

// `archive` with a ZIP64 record that states `count` members.
std::string WithZip64Count(std::string archive, uint64_t count) {
  const size_t end = archive.find("PK\5\6");
  const size_t directory = archive.find("PK\1\2");
  std::string record(56, '\0');
  Put(record, 0, 0x06064b50, 4);
  Put(record, 4, record.size() - 12, 8);
  Put(record, 24, count, 8);
  Put(record, 32, count, 8);
  Put(record, 40, end - directory, 8);
  Put(record, 48, directory, 8);
  std::string locator(20, '\0');
  Put(locator, 0, 0x07064b50, 4);
  Put(locator, 8, end, 8);
  Put(locator, 16, 1, 4);
  for (const size_t field : {8, 10}) Put(archive, end + field, 0xffff, 2);
  for (const size_t field : {12, 16}) Put(archive, end + field, 0xffffffff, 4);
  return archive.insert(end, record + locator);
}

// libzip must compare the number of members with the size of the file before it allocates memory.
TEST(ZipTest, RefusesMoreMembersThanTheFileCanHoldInLittleMemory) {
  const auto peak_kib = [] {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
  };
  const std::string archive = DeflatedArchive("hello", 5);
  EXPECT_EQ(*ReadOnly(WithZip64Count(archive, 1)), "hello");
  const int64_t before = peak_kib();
  // In this order, a failure costs 100 MB at most.
  for (const uint64_t count : {uint64_t{1'000'000}, uint64_t{1'000'000'000}, ~uint64_t{0}}) {
    const absl::StatusOr<ZipReader> reader = ZipReader::Open(WithZip64Count(archive, count));
    ASSERT_EQ(reader.status().code(), absl::StatusCode::kInvalidArgument) << count;
    ASSERT_LT(peak_kib(), before + 16'000) << count;
  }
}

TEST(ZipTest, SurvivesAnyPositionOfTheZip64Record) {
  const std::string archive = WithZip64Count(DeflatedArchive("hello", 5), 1);
  const size_t locator = archive.find("PK\6\7");
  for (uint64_t position = 0; position < archive.size() + 8; ++position) {
    for (const uint64_t at : {position, ~position}) {
      std::string moved = archive;
      Put(moved, locator + 8, at, 8);
      const absl::StatusOr<std::string> read = ReadOnly(moved);
      EXPECT_EQ(read.ok() ? *read : "hello", "hello") << at;
    }
  }
}

// The names of the files in `directory`.
std::vector<std::string> FilesIn(const std::filesystem::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    names.push_back(entry.path().filename());
  }
  return names;
}

TEST(ZipTest, KeepsTheOldFileIfTheDiskIsFull) {
  const std::filesystem::path directory = ::testing::TempDir() + "zip_test_full";
  std::filesystem::remove_all(directory);
  std::filesystem::create_directory(directory);
  const std::string path = directory / "y.npz";
  ASSERT_TRUE(WriteZip(path, std::vector<ZipContent>{{"a", "old"}}).ok());

  // Writes beyond the limit fail as on a full disk.
  rlimit old_limit;
  getrlimit(RLIMIT_FSIZE, &old_limit);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{10'000, old_limit.rlim_max};
  setrlimit(RLIMIT_FSIZE, &limit);
  std::vector<absl::Status> written;
  for (const size_t bytes : {9'990, 20'000, 10'000'000}) {
    written.push_back(WriteZip(path, std::vector<ZipContent>{{"a", std::string(bytes, 'x')}}));
  }
  setrlimit(RLIMIT_FSIZE, &old_limit);
  std::signal(SIGXFSZ, old_handler);

  for (const absl::Status& status : written) {
    EXPECT_THAT(std::string(status.message()), HasSubstr("can't write " + path + ": "));
    EXPECT_THAT(std::string(status.message()), HasSubstr("File too large"));
  }
  EXPECT_EQ(*ReadOnly(ReadWholeFile(path)), "old");
  EXPECT_THAT(FilesIn(directory), ElementsAre("y.npz"));
}

TEST(ZipTest, KeepsDevicesAndPipes) {
  const std::string pipe = ::testing::TempDir() + "zip_test_pipe.npz";
  std::filesystem::remove(pipe);
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const absl::Status written = WriteZip(pipe, std::vector<ZipContent>{{"a", "one"}});
  EXPECT_EQ(std::string(written.message()), "can't write " + pipe + ": not a regular file");
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  std::filesystem::remove(pipe);
}

}  // namespace
}  // namespace rapt
