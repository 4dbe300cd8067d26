#include "base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace rapt {
namespace {

constexpr absl::Time kTime = absl::FromUnixMillis(1767225600123);

TEST(LogTest, ALineHasTimeLevelEventAndFields) {
  EXPECT_EQ(FormatLogLine(LogFormat::kText, kTime, LogLevel::kInfo, "ready",
                          {{"grpc", "127.0.0.1:80"}, {"threads", 4}, {"bytes", int64_t{-1}}}),
            "2026-01-01T00:00:00.123Z INFO ready grpc=127.0.0.1:80 threads=4 bytes=-1\n");
  EXPECT_EQ(FormatLogLine(LogFormat::kText, kTime, LogLevel::kError, "stopped", {}),
            "2026-01-01T00:00:00.123Z ERROR stopped\n");
}

TEST(LogTest, QuotesAndEscapesValuesThatAreNotWords) {
  EXPECT_EQ(FormatLogLine(LogFormat::kText, kTime, LogLevel::kWarning, "e",
                          {{"a", "two words"}, {"b", "x=\"y\""}, {"c", "line\nbreak"}, {"d", ""}}),
            "2026-01-01T00:00:00.123Z WARNING e a=\"two words\" b=\"x=\\\"y\\\"\" "
            "c=\"line\\nbreak\" d=\"\"\n");
}

TEST(LogTest, AJsonLineIsAnObject) {
  EXPECT_EQ(FormatLogLine(LogFormat::kJson, kTime, LogLevel::kInfo, "ready",
                          {{"grpc", "127.0.0.1:80"}, {"threads", 4}, {"bytes", int64_t{-1}}}),
            "{\"time\":\"2026-01-01T00:00:00.123Z\",\"level\":\"INFO\",\"event\":\"ready\","
            "\"grpc\":\"127.0.0.1:80\",\"threads\":4,\"bytes\":-1}\n");
}

TEST(LogTest, AJsonStringHoldsAnyBytes) {
  EXPECT_EQ(FormatLogLine(LogFormat::kJson, kTime, LogLevel::kError, "e",
                          {{"a", "x=\"y\"\\"}, {"b", "\n\x01\x7F\xFF"}, {"c", ""}}),
            "{\"time\":\"2026-01-01T00:00:00.123Z\",\"level\":\"ERROR\",\"event\":\"e\","
            "\"a\":\"x=\\\"y\\\"\\\\\",\"b\":\"\\u000a\\u0001\\u007f\\u00ff\",\"c\":\"\"}\n");
}

TEST(LogTest, LinesOfManyThreadsStayWhole) {
  constexpr int kThreads = 4, kLines = 200;
  const std::string text(200, 'x');
  ::testing::internal::CaptureStderr();
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int line = 0; line < kLines; ++line) Log(LogLevel::kInfo, "event", {{"text", text}});
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<std::string> lines =
      absl::StrSplit(::testing::internal::GetCapturedStderr(), '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), static_cast<size_t>(kThreads * kLines));
  for (const std::string& line : lines) {
    EXPECT_THAT(line, ::testing::EndsWith(absl::StrCat("Z INFO event text=", text)));
  }
}

}  // namespace
}  // namespace rapt
