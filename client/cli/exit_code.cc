#include "client/cli/exit_code.h"

#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace rapt {

ExitCode Fail(ExitCode code, std::string_view message) {
  const std::string line = absl::StrReplaceAll(std::string(message), {{"\n", " "}});
  std::fprintf(stderr, "rapt: %s\n", line.c_str());
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

}  // namespace rapt
