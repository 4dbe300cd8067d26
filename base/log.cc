#include "base/log.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <deque>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/json_string.h"
#include "base/mutex.h"

namespace rapt {
namespace {

absl::string_view NameOf(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo:
      return "INFO";
    case LogLevel::kWarning:
      return "WARNING";
    case LogLevel::kError:
      return "ERROR";
  }
  return "?";
}

bool IsPlain(absl::string_view value) {
  return !value.empty() && std::all_of(value.begin(), value.end(), [](unsigned char c) {
    return absl::ascii_isgraph(c) && c != '"' && c != '=' && c != '\\';
  });
}

std::string Timestamp(absl::Time time) {
  return absl::FormatTime("%Y-%m-%d%ET%H:%M:%E3SZ", time, absl::UTCTimeZone());
}

std::string FormatText(absl::Time time, LogLevel level, absl::string_view event,
                       absl::Span<const LogField> fields) {
  std::string line = absl::StrCat(Timestamp(time), " ", NameOf(level), " ", event);
  for (const LogField& field : fields) {
    absl::StrAppend(&line, " ", field.key, "=");
    if (IsPlain(field.value)) {
      line += field.value;
    } else {
      absl::StrAppend(&line, "\"", absl::CEscape(field.value), "\"");
    }
  }
  return line + '\n';
}

std::string Quote(absl::string_view text) {
  std::string quoted;
  AppendJsonString(text, quoted);
  return quoted;
}

std::string FormatJson(absl::Time time, LogLevel level, absl::string_view event,
                       absl::Span<const LogField> fields) {
  std::string line = absl::StrCat("{\"time\":", Quote(Timestamp(time)),
                                  ",\"level\":", Quote(NameOf(level)), ",\"event\":", Quote(event));
  for (const LogField& field : fields) {
    absl::StrAppend(&line, ",", Quote(field.key), ":",
                    field.is_number ? field.value : Quote(field.value));
  }
  return line + "}\n";
}

std::atomic<LogFormat> log_format{LogFormat::kText};
std::atomic<int64_t> dropped_lines{0};

std::string LineNow(LogLevel level, absl::string_view event, absl::Span<const LogField> fields) {
  return FormatLogLine(log_format, absl::Now(), level, event, fields);
}

// Waits up to `timeout_ms` for each part of the line, or without a limit for the whole line if it
// is -1. Counts the line as dropped on failure, which must not stop the server.
void Write(absl::string_view line, int timeout_ms) {
  while (!line.empty()) {
    pollfd ready = {STDERR_FILENO, POLLOUT, 0};
    const int polled = poll(&ready, 1, timeout_ms);
    // A pipe that is ready takes this many bytes without blocking.
    const size_t part = timeout_ms < 0 ? line.size() : std::min<size_t>(line.size(), PIPE_BUF);
    const ssize_t written = polled > 0 ? write(STDERR_FILENO, line.data(), part) : -1;
    if (written >= 0) {
      line.remove_prefix(static_cast<size_t>(written));
    } else if (polled == 0 || (errno != EINTR && errno != EAGAIN)) {
      ++dropped_lines;
      return;
    }
  }
}

}  // namespace

// Lines that wait for the writer's thread.
class LogWriter::Queue {
 public:
  void Push(std::string line) {
    MutexLock lock(mutex_);
    const auto bytes = static_cast<int64_t>(line.size());
    if (is_abandoned_ || is_flushed_ || bytes_ + bytes > kMaxQueuedBytes) {
      ++unreported_;
      ++dropped_lines;
      return;
    }
    bytes_ += bytes;
    lines_.push_back(std::move(line));
    changed_.SignalAll();
  }

  // Returns the next line, or the report of dropped ones; empty after Stop() if there is none.
  std::string Pop() {
    MutexLock lock(mutex_);
    while (lines_.empty() && unreported_ == 0 && !is_stopping_) changed_.Wait(mutex_);
    if (!lines_.empty()) {
      std::string line = std::move(lines_.front());
      lines_.pop_front();
      bytes_ -= static_cast<int64_t>(line.size());
      return line;
    }
    const int64_t count = std::exchange(unreported_, 0);
    if (count > 0) return LineNow(LogLevel::kWarning, "log lines dropped", {{"count", count}});
    is_flushed_ = true;
    changed_.SignalAll();
    return "";
  }

  // Returns false if the lines were not written in `time`; they are dropped then.
  bool Stop(std::chrono::nanoseconds time) {
    const auto end = std::chrono::steady_clock::now() + time;
    MutexLock lock(mutex_);
    is_stopping_ = true;
    changed_.SignalAll();
    while (!is_flushed_) {
      const std::chrono::nanoseconds left = end - std::chrono::steady_clock::now();
      if (left <= std::chrono::nanoseconds::zero()) break;
      changed_.WaitFor(mutex_, left);
    }
    is_abandoned_ = !is_flushed_;
    dropped_lines += static_cast<int64_t>(lines_.size());
    lines_.clear();
    return is_flushed_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::string> lines_ ABSL_GUARDED_BY(mutex_);
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t unreported_ ABSL_GUARDED_BY(mutex_) = 0;  // dropped lines
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_flushed_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_abandoned_ ABSL_GUARDED_BY(mutex_) = false;
};

namespace {

// A line that precedes an abort waits this long for stderr.
constexpr int kAbortTimeoutMs = 1000;

// Held while a line is queued, so that the queue is not deleted before.
Mutex writer_mutex;

}  // namespace

LogWriter::Queue* LogWriter::current = nullptr;

std::string FormatLogLine(LogFormat format, absl::Time time, LogLevel level,
                          absl::string_view event, absl::Span<const LogField> fields) {
  return format == LogFormat::kJson ? FormatJson(time, level, event, fields)
                                    : FormatText(time, level, event, fields);
}

void SetLogFormat(LogFormat format) { log_format = format; }

void Log(LogLevel level, absl::string_view event, absl::Span<const LogField> fields) {
  std::string line = LineNow(level, event, fields);
  {
    MutexLock lock(writer_mutex);
    if (LogWriter::current != nullptr) return LogWriter::current->Push(std::move(line));
  }
  Write(line, /*timeout_ms=*/-1);
}

void LogNow(LogLevel level, absl::string_view event, absl::Span<const LogField> fields) {
  Write(LineNow(level, event, fields), kAbortTimeoutMs);
}

void ExportLog(MetricSink& sink) {
  sink.AddCounter("rapt_log_dropped_lines_total",
                  "Log lines dropped because stderr accepted no more bytes.", {},
                  [] { return dropped_lines.load(); });
}

LogWriter::LogWriter() : queue_(new Queue) {
  thread_ = std::thread([queue = queue_] {
    for (std::string line = queue->Pop(); !line.empty(); line = queue->Pop()) Write(line, -1);
  });
  MutexLock lock(writer_mutex);
  current = queue_;
}

LogWriter::~LogWriter() {
  if (!queue_->Stop(kFlushTime)) {
    // Its write may never return. The queue stays for it, and for threads that still log; it also
    // stays reachable, or LeakSanitizer would report it.
    static auto* const abandoned =
        new std::deque<Queue*>;  // NOLINT(bugprone-unhandled-exception-at-new)
    MutexLock lock(writer_mutex);
    abandoned->push_back(queue_);
    thread_.detach();
    return;
  }
  thread_.join();
  {
    MutexLock lock(writer_mutex);
    current = nullptr;
  }
  delete queue_;
}

}  // namespace rapt
