#include "base/mapped_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

namespace rapt {
namespace {

constexpr size_t kBytes = 1 << 20;

class MappedFileTest : public ::testing::Test {
 protected:
  void Write(char byte) { std::ofstream(path_) << std::string(kBytes, byte); }
  void TearDown() override { std::filesystem::remove(path_); }

  const std::string path_ = testing::TempDir() + "mapped_file_test." + std::to_string(getpid());
};

TEST_F(MappedFileTest, HasTheBytesOfTheFile) {
  Write('x');
  const auto file = MappedFile::Open(path_);
  ASSERT_NE(file, nullptr);
  EXPECT_EQ(file->content(), std::string(kBytes, 'x'));
  EXPECT_TRUE(file->unchanged());
}

TEST_F(MappedFileTest, AFileThatIsReplacedByRenamingStaysAsItWas) {
  Write('x');
  const auto file = MappedFile::Open(path_);
  ASSERT_NE(file, nullptr);
  const std::string other = path_ + ".new";
  std::ofstream(other) << "y";
  std::filesystem::rename(other, path_);
  EXPECT_EQ(file->content(), std::string(kBytes, 'x'));
  EXPECT_TRUE(file->unchanged());
}

TEST_F(MappedFileTest, ReadingAFileThatWasTruncatedDoesNotEndTheProcess) {
  Write('x');
  const auto file = MappedFile::Open(path_);
  ASSERT_NE(file, nullptr);
  std::filesystem::resize_file(path_, 10);
  EXPECT_EQ(std::count(file->content().begin(), file->content().end(), 'y'), 0);
  EXPECT_FALSE(file->unchanged());
  Write('x');  // as long as before
  EXPECT_FALSE(file->unchanged());
}

TEST_F(MappedFileTest, AFileThatWasWrittenToIsChanged) {
  Write('x');
  // Earlier than any time that a file system gives to a write now.
  std::filesystem::last_write_time(path_,
                                   std::filesystem::file_time_type() - std::chrono::years(100));
  const auto file = MappedFile::Open(path_);
  ASSERT_NE(file, nullptr);
  Write('y');
  EXPECT_FALSE(file->unchanged());
}

TEST_F(MappedFileTest, OnlyRegularFilesWithBytesAreOpened) {
  EXPECT_EQ(MappedFile::Open(path_), nullptr);
  EXPECT_EQ(MappedFile::Open("/dev/null"), nullptr);
  EXPECT_EQ(MappedFile::Open(testing::TempDir()), nullptr);
  std::ofstream(path_).close();
  EXPECT_EQ(MappedFile::Open(path_), nullptr);
  std::filesystem::remove(path_);
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_EQ(MappedFile::Open(path_), nullptr) << "without waiting for a writer";
}

}  // namespace
}  // namespace rapt
