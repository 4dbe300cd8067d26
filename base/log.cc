#include "base/log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"

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
  std::string quoted = "\"";
  for (const unsigned char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += static_cast<char>(c);
    } else if (absl::ascii_isprint(c)) {
      quoted += static_cast<char>(c);
    } else {
      absl::StrAppend(&quoted, "\\u00", absl::Hex(c, absl::kZeroPad2));
    }
  }
  return quoted + '"';
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

}  // namespace

std::string FormatLogLine(LogFormat format, absl::Time time, LogLevel level,
                          absl::string_view event, absl::Span<const LogField> fields) {
  return format == LogFormat::kJson ? FormatJson(time, level, event, fields)
                                    : FormatText(time, level, event, fields);
}

void SetLogFormat(LogFormat format) { log_format = format; }

void Log(LogLevel level, absl::string_view event, absl::Span<const LogField> fields) {
  const std::string line = FormatLogLine(log_format, absl::Now(), level, event, fields);
  // A failed write must not stop the server.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace rapt
