// Structured logging: one line per event on stderr, as text
//
//     2026-01-31T12:00:00.123Z INFO draining signal=SIGTERM open_calls=3
//
// where values with a space, a quote, an equals sign or a control character are quoted and escaped,
// or as a JSON object
//
//     {"time":"2026-01-31T12:00:00.123Z","level":"INFO","event":"draining","signal":"SIGTERM","open_calls":3}
//
// where a non-ASCII byte becomes the code point of the same value.
#ifndef RAPT_BASE_LOG_H_
#define RAPT_BASE_LOG_H_

#include <chrono>
#include <concepts>
#include <cstdint>
#include <string>
#include <thread>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/metric_sink.h"

namespace rapt {

enum class LogLevel : uint8_t { kInfo, kWarning, kError };
enum class LogFormat : uint8_t { kText, kJson };

struct LogField {
  LogField(absl::string_view key, absl::string_view value) : key(key), value(value) {}
  LogField(absl::string_view key, std::integral auto value)
      : key(key), value(std::to_string(value)), is_number(true) {}

  absl::string_view key;
  std::string value;
  bool is_number = false;
};

// Sets the format of all later lines. The default is text. Thread-safe.
void SetLogFormat(LogFormat format);

// Thread-safe: each line is written by one system call. Never blocks while a LogWriter exists.
void Log(LogLevel level, absl::string_view event, absl::Span<const LogField> fields = {});

// Writes the line before it returns, ahead of queued lines, unless stderr accepts no bytes for a
// second; then the rest is dropped. Lines of other threads may separate the parts of a line of more
// than 4096 bytes. For a line that precedes an abort.
void LogNow(LogLevel level, absl::string_view event, absl::Span<const LogField> fields = {});

// Writes the lines of Log() on a separate thread, so that a full pipe on stderr blocks no other
// thread. Lines beyond the capacity of the queue are dropped and counted; the line "log lines
// dropped" reports their number when the queued lines have been written. REQUIRES: at most one
// exists at a time.
class LogWriter {
 public:
  static constexpr int64_t kMaxQueuedBytes = 256 * 1024;
  static constexpr std::chrono::seconds kFlushTime{1};

  LogWriter();
  // Writes the queued lines. If that takes longer than kFlushTime, it drops them and all later
  // ones.
  ~LogWriter();
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

 private:
  class Queue;

  static Queue* current;  // of the existing LogWriter, or null

  Queue* const queue_;
  std::thread thread_;

  friend void Log(LogLevel level, absl::string_view event, absl::Span<const LogField> fields);
};

// Exports the number of dropped lines.
void ExportLog(MetricSink& sink);

// Returns the line that Log writes, including its newline.
std::string FormatLogLine(LogFormat format, absl::Time time, LogLevel level,
                          absl::string_view event, absl::Span<const LogField> fields);

}  // namespace rapt

#endif  // RAPT_BASE_LOG_H_
