// The exit codes of `rapt` and `rapt-load`. Scripts rely on these numbers.
#ifndef RAPT_CLIENT_CONSOLE_EXIT_CODE_H_
#define RAPT_CLIENT_CONSOLE_EXIT_CODE_H_

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "client/console/command_line.h"

namespace rapt {

enum class ExitCode : int {
  kOk = 0,
  kCallFailed = 1,   // the call was rejected or failed; the message has the status code
  kUsage = 2,        // invalid flags, or a file that can't be read, used or written
  kUnreachable = 3,  // no server at the address
};

// Prints one line on stderr, "rapt: message" for the program rapt, and returns `code`. The message
// may quote text from files and servers, see Printable().
ExitCode Fail(ExitCode code, std::string_view message);

// For invalid flags or files. Prints the status's message alone.
ExitCode FailUsage(const absl::Status& status);

// For a status of Connect(): no server at the address, or an invalid flag.
ExitCode FailConnect(const absl::Status& status);

// For a failed call. Prints the code's name too: "rapt: INVALID_ARGUMENT: K has head size 64, ...".
ExitCode FailCall(const absl::Status& status);

// Declares or assigns a variable from an absl::StatusOr, or returns what `fail`, one of the three
// above, returns for its error:
//
//     RAPT_ASSIGN_OR_EXIT(const auto server, FailConnect, Connect(flags));
#define RAPT_ASSIGN_OR_EXIT(variable, fail, ...) \
  RAPT_ASSIGN_OR_EXIT_BY(RAPT_JOINED(rapt_result_, __LINE__), variable, fail, __VA_ARGS__)

#define RAPT_ASSIGN_OR_EXIT_BY(result, variable, fail, ...) \
  auto result = (__VA_ARGS__);                              \
  if (!result.ok()) return fail(result.status());           \
  variable = *std::move(result)

// The same for a status.
#define RAPT_EXIT_IF_ERROR(fail, ...)                                  \
  do {                                                                 \
    if (absl::Status rapt_status = (__VA_ARGS__); !rapt_status.ok()) { \
      return fail(rapt_status);                                        \
    }                                                                  \
  } while (false)

// Sets the flags' targets and `operands`, which may be null for a command without. Returns an exit
// code if the command ends here: --help was given, which prints the help, or the arguments are
// wrong.
std::optional<ExitCode> ParseOrExit(const CommandLine& line,
                                    absl::Span<const std::string> arguments,
                                    std::vector<std::string>* operands = nullptr);

}  // namespace rapt

#endif  // RAPT_CLIENT_CONSOLE_EXIT_CODE_H_
