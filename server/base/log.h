// One structured line an event, on stderr:
//
//     2026-01-31T12:00:00.123Z INFO draining signal=SIGTERM open_calls=3
//
// Values with a space, a quote, an equals sign or a control character are quoted and escaped.
#ifndef RAPT_SERVER_BASE_LOG_H_
#define RAPT_SERVER_BASE_LOG_H_

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace rapt {

enum class LogLevel : uint8_t { kInfo, kWarning, kError };

struct LogField {
  LogField(absl::string_view key, absl::string_view value) : key(key), value(value) {}
  LogField(absl::string_view key, std::integral auto value)
      : key(key), value(std::to_string(value)) {}

  absl::string_view key;
  std::string value;
};

// Thread-safe: a line is written whole, with one system call.
void Log(LogLevel level, absl::string_view event, std::initializer_list<LogField> fields = {});

// The line that Log writes, its newline included.
std::string FormatLogLine(absl::Time time, LogLevel level, absl::string_view event,
                          std::initializer_list<LogField> fields);

}  // namespace rapt

#endif  // RAPT_SERVER_BASE_LOG_H_
