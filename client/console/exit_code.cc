#include "client/console/exit_code.h"

#include <cerrno>
#include <cstdio>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/console/text.h"

namespace rapt {

ExitCode Fail(ExitCode code, std::string_view message) {
  const std::string line = absl::StrReplaceAll(std::string(message), {{"\n", " "}});
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, Printable(line).c_str());
  return code;
}

ExitCode FailUsage(const absl::Status& status) {
  return Fail(ExitCode::kUsage, std::string(status.message()));
}

ExitCode FailConnect(const absl::Status& status) {
  return Fail(absl::IsUnavailable(status) ? ExitCode::kUnreachable : ExitCode::kUsage,
              std::string(status.message()));
}

ExitCode FailCall(const absl::Status& status) {
  return Fail(ExitCode::kCallFailed,
              absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message()));
}

std::optional<ExitCode> ParseOrExit(const CommandLine& line,
                                    absl::Span<const std::string> arguments,
                                    std::vector<std::string>* operands) {
  absl::StatusOr<ParsedArguments> parsed = line.Parse(arguments);
  if (!parsed.ok()) return FailUsage(parsed.status());
  if (!parsed->text_to_print.empty()) {
    std::fputs(parsed->text_to_print.c_str(), stdout);
    return ExitCode::kOk;
  }
  if (operands != nullptr) *operands = std::move(parsed->operands);
  return std::nullopt;
}

}  // namespace rapt
