#include "base/log.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/log_limit.h"
#include "tests/support/fake_clock.h"

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
                          {{"a", "x=\"y\"\\"}, {"b", "\n\x01\x7F\xFFé"}, {"c", ""}}),
            "{\"time\":\"2026-01-01T00:00:00.123Z\",\"level\":\"ERROR\",\"event\":\"e\","
            "\"a\":\"x=\\\"y\\\"\\\\\",\"b\":\"\\u000a\\u0001\\u007f\uFFFDé\",\"c\":\"\"}\n");
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

// --- A reader of stderr that stops reading -------------------------------------------------------

// Redirects stderr to a small pipe that is read on request only.
class StderrPipe {
 public:
  StderrPipe() : stderr_(dup(STDERR_FILENO)) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    read_end_ = ends[0];
    fcntl(read_end_, F_SETPIPE_SZ, 4096);
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
  }
  ~StderrPipe() {
    Close();
    close(read_end_);
    close(stderr_);
  }

  // Restores stderr. Returns the lines of the pipe, which has no other writer then.
  std::vector<std::string> ReadToEnd() {
    Close();
    std::string text;
    char buffer[4096];
    for (ssize_t n; (n = read(read_end_, buffer, sizeof(buffer))) > 0;) {
      text.append(buffer, static_cast<size_t>(n));
    }
    return absl::StrSplit(text, '\n', absl::SkipEmpty());
  }

  // Returns the bytes that are in the pipe within a tenth of a second.
  std::string ReadSome() const {
    pollfd ready = {read_end_, POLLIN, 0};
    std::string text;
    char buffer[4096];
    while (poll(&ready, 1, 100) > 0) {
      text.append(buffer, static_cast<size_t>(read(read_end_, buffer, sizeof(buffer))));
    }
    return text;
  }

  // Until the writer's thread has filled the pipe.
  static void WaitUntilFull() {
    pollfd ready = {STDERR_FILENO, POLLOUT, 0};
    while (poll(&ready, 1, 0) > 0) std::this_thread::yield();
  }

 private:
  void Close() const { dup2(stderr_, STDERR_FILENO); }

  const int stderr_;
  int read_end_ = -1;
};

class CounterSink final : public MetricSink {
 public:
  void AddGauge(const std::string&, const std::string&, Labels, std::function<double()>) override {}
  void AddCounter(const std::string& name, const std::string&, Labels,
                  std::function<double()> read) override {
    counters_[name] = std::move(read);
  }
  int64_t Read(const std::string& name) { return static_cast<int64_t>(counters_.at(name)()); }

 private:
  std::map<std::string, std::function<double()>> counters_;
};

int64_t DroppedLines() {
  CounterSink sink;
  ExportLog(sink);
  return sink.Read("rapt_log_dropped_lines_total");
}

TEST(LogWriterTest, WritesQueuedLinesBeforeItEnds) {
  ::testing::internal::CaptureStderr();
  {
    const LogWriter writer;
    for (int n = 0; n < 100; ++n) Log(LogLevel::kInfo, "event", {{"n", n}});
  }
  Log(LogLevel::kInfo, "later");
  const std::vector<std::string> lines =
      absl::StrSplit(::testing::internal::GetCapturedStderr(), '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), 101u);
  for (int n = 0; n < 100; ++n) EXPECT_THAT(lines[n], ::testing::EndsWith(absl::StrCat("n=", n)));
}

TEST(LogWriterTest, AFullPipeBlocksNoThreadAndDroppedLinesAreReported) {
  constexpr int kLines = 10'000;
  const std::string text(200, 'x');
  const int64_t dropped_before = DroppedLines();
  StderrPipe pipe;
  std::string early;
  {
    const LogWriter writer;
    for (int n = 0; n < kLines; ++n) Log(LogLevel::kInfo, "event", {{"text", text}});
    const int64_t dropped = DroppedLines() - dropped_before;
    EXPECT_GT(dropped, 0);
    for (std::string more; !absl::StrContains(early, "dropped"); early += more) {
      more = pipe.ReadSome();
      ASSERT_FALSE(more.empty()) << "the writer did not continue";
    }
    const std::vector<std::string> lines = absl::StrSplit(early, '\n', absl::SkipEmpty());
    EXPECT_EQ(static_cast<int64_t>(lines.size()) - 1, kLines - dropped);
    EXPECT_THAT(lines.back(),
                ::testing::EndsWith(absl::StrCat("WARNING log lines dropped count=", dropped)));
    Log(LogLevel::kInfo, "again");
  }
  EXPECT_THAT(pipe.ReadToEnd(), ::testing::ElementsAre(::testing::EndsWith("INFO again")));
}

TEST(LogWriterTest, EndsEvenIfThePipeIsNotRead) {
  const StderrPipe pipe;
  const std::string text(200, 'x');
  {
    const LogWriter writer;
    for (int n = 0; n < 1000; ++n) Log(LogLevel::kInfo, "event", {{"text", text}});
  }
  const int64_t dropped = DroppedLines();
  Log(LogLevel::kInfo, "late");  // a thread that outlives the writer
  EXPECT_EQ(DroppedLines(), dropped + 1);
  while (!pipe.ReadSome().empty()) continue;  // lets the writer's thread end
}

// Each line is written by the writer's thread, or by its own after the writer's end, or counted.
TEST(LogWriterTest, NoLineIsLostUncountedAtTheEnd) {
  const int64_t dropped_before = DroppedLines();
  std::atomic<bool> has_ended = false;
  int64_t count = 0;
  ::testing::internal::CaptureStderr();
  std::thread thread([&] {
    for (; !has_ended; ++count) Log(LogLevel::kInfo, "event");
  });
  for (int n = 0; n < 50; ++n) const LogWriter writer;
  has_ended = true;
  thread.join();
  const std::string text = ::testing::internal::GetCapturedStderr();
  int64_t written = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    written += absl::EndsWith(line, "INFO event") ? 1 : 0;
  }
  EXPECT_EQ(written + DroppedLines() - dropped_before, count);
}

TEST(LogWriterTest, ALongLineBeforeAnAbortDoesNotWaitForever) {
  const StderrPipe pipe;
  const int64_t dropped = DroppedLines();
  LogNow(LogLevel::kError, "last words", {{"text", std::string(100'000, 'x')}});
  EXPECT_EQ(DroppedLines(), dropped + 1);
}

TEST(LogWriterTest, ALineBeforeAnAbortIsWrittenAtOnceAndDoesNotWaitForever) {
  StderrPipe pipe;
  {
    const LogWriter writer;
    LogNow(LogLevel::kError, "last words");
    EXPECT_THAT(pipe.ReadSome(), ::testing::HasSubstr("ERROR last words\n"));
    for (int n = 0; n < 10'000; ++n) Log(LogLevel::kInfo, "event", {{"n", n}});
    pipe.WaitUntilFull();
    const int64_t dropped = DroppedLines();
    LogNow(LogLevel::kError, "last words");
    EXPECT_EQ(DroppedLines(), dropped + 1);
    while (!pipe.ReadSome().empty()) continue;
  }
}

TEST(LogLimitTest, LeavesOutLinesBeyondItsRateAndCountsThem) {
  test::FakeClock clock;
  LogLimit limit(2, clock);
  EXPECT_EQ(limit.Take(), 0);
  EXPECT_EQ(limit.Take(), 0);
  EXPECT_EQ(limit.Take(), std::nullopt);
  EXPECT_EQ(limit.Take(), std::nullopt);
  clock.Advance(std::chrono::seconds(1));
  EXPECT_EQ(limit.Take(), 2);
  EXPECT_EQ(limit.Take(), 0);
  EXPECT_EQ(limit.Take(), std::nullopt);
}

}  // namespace
}  // namespace rapt
