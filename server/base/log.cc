#include "server/base/log.h"

#include <unistd.h>

#include <algorithm>

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

}  // namespace

std::string FormatLogLine(absl::Time time, LogLevel level, absl::string_view event,
                          std::initializer_list<LogField> fields) {
  std::string line =
      absl::StrCat(absl::FormatTime("%Y-%m-%d%ET%H:%M:%E3SZ", time, absl::UTCTimeZone()), " ",
                   NameOf(level), " ", event);
  for (const LogField& field : fields) {
    absl::StrAppend(&line, " ", field.key, "=");
    if (IsPlain(field.value)) {
      line += field.value;
    } else {
      absl::StrAppend(&line, "\"", absl::CEscape(field.value), "\"");
    }
  }
  line += '\n';
  return line;
}

void Log(LogLevel level, absl::string_view event, std::initializer_list<LogField> fields) {
  const std::string line = FormatLogLine(absl::Now(), level, event, fields);
  // A log that can't be written is no reason to stop serving.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace rapt
