#include "base/check.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>

namespace rapt {
namespace {

void FailACheck() { RAPT_CHECK(1 + 1 == 3, "sums are correct"); }

TEST(CheckDeathTest, AFailedCheckPrintsTheConditionAndAborts) {
  EXPECT_EXIT(FailACheck(), ::testing::KilledBySignal(SIGABRT),
              "check_test.cc:[0-9]+: check failed: 1 \\+ 1 == 3: sums are correct\n");
}

// Replaces stderr by a pipe that is full and not read.
void BlockStderr() {
  int ends[2];
  if (pipe(ends) != 0) _exit(1);
  dup2(ends[1], STDERR_FILENO);
  const int flags = fcntl(STDERR_FILENO, F_GETFL);
  fcntl(STDERR_FILENO, F_SETFL, flags | O_NONBLOCK);
  while (write(STDERR_FILENO, "x", 1) == 1) {
  }
  fcntl(STDERR_FILENO, F_SETFL, flags);
}

TEST(CheckDeathTest, AFailedCheckAbortsIfNobodyReadsStderr) {
  const auto fail = [] {
    BlockStderr();
    alarm(30);  // ends a write that blocks
    FailACheck();
  };
  EXPECT_EXIT(fail(), ::testing::KilledBySignal(SIGABRT), "");
}

}  // namespace
}  // namespace rapt
