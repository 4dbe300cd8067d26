#include "attention/cudnn/probe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <string>

namespace rapt::cudnn {
namespace {

using ::testing::HasSubstr;

constexpr std::chrono::seconds kLimit{60};

std::string Message(absl::Status (*attempt)(), std::chrono::seconds limit = kLimit) {
  const absl::Status status = TryInChild(attempt, limit);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  return std::string(status.message());
}

TEST(TryInChildTest, ReturnsTheStatusOfTheAttempt) {
  EXPECT_TRUE(TryInChild([] { return absl::OkStatus(); }, kLimit).ok());
  EXPECT_EQ(Message([] { return absl::InternalError("there is no such device"); }),
            "there is no such device");
}

TEST(TryInChildTest, SurvivesAnAttemptThatCrashes) {
  EXPECT_THAT(Message([]() -> absl::Status { std::abort(); }), HasSubstr("signal 6"));
  EXPECT_THAT(Message([]() -> absl::Status {
                std::raise(SIGKILL);
                return absl::OkStatus();
              }),
              HasSubstr("signal 9"));
}

TEST(TryInChildTest, LimitsTheTime) {
  EXPECT_THAT(Message(
                  []() -> absl::Status {
                    for (;;) pause();
                  },
                  std::chrono::seconds(1)),
              HasSubstr("more than 1 s"));
}

TEST(TryInChildTest, IsCancelledByAStopSignal) {
  for (const int stop : {SIGTERM, SIGINT}) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, stop);
    ASSERT_EQ(pthread_sigmask(SIG_BLOCK, &signals, nullptr), 0);
    const auto attempt = [stop]() -> absl::Status {
      kill(getppid(), stop);
      for (;;) pause();
    };
    EXPECT_EQ(TryInChild(attempt, kLimit).code(), absl::StatusCode::kCancelled);
    EXPECT_EQ(waitpid(-1, nullptr, 0), -1) << "the child still exists";
    EXPECT_EQ(errno, ECHILD);
    int pending = 0;
    EXPECT_EQ(sigwait(&signals, &pending), 0) << "the signal stays pending";
    EXPECT_EQ(pending, stop);
    ASSERT_EQ(pthread_sigmask(SIG_UNBLOCK, &signals, nullptr), 0);
  }
}

TEST(TryInChildTest, DoesNotChangeTheParent) {
  static int changed = 0;
  EXPECT_TRUE(TryInChild([] { return changed = 1, absl::OkStatus(); }, kLimit).ok());
  EXPECT_EQ(changed, 0);
}

}  // namespace
}  // namespace rapt::cudnn
