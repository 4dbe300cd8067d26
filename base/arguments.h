// The arguments of a program, parsed by CLI11 with the same rules in every program of rapt.
#ifndef RAPT_BASE_ARGUMENTS_H_
#define RAPT_BASE_ARGUMENTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/flags/marshalling.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace rapt {

struct GivenFlag {
  std::string name;   // without the dashes
  std::string value;  // "true" for a switch without a value
};

struct ParsedArguments {
  std::string text_to_print;     // of --help or --version; if not empty, the rest is unset
  std::vector<GivenFlag> flags;  // in the order of the arguments; a repeated flag several times
  std::vector<std::string> operands;  // with the first "--", after which there are only operands
};

// Adds "--name" or "-n,--name". A switch takes a value only after "=".
CLI::Option* AddFlag(CLI::App& app, const std::string& names, bool is_switch);

// Accepts --name=value, --name value, -n value, -nvalue, -n=value, --switch and --switch=false. A
// value that begins with "--" must follow "=". Returns InvalidArgument, in one line, for an unknown
// flag, which it names with the most similar one, and for a flag without its value.
// REQUIRES: `app` was not used before and has only flags of AddFlag(), --help and --version.
absl::StatusOr<ParsedArguments> ParseArguments(CLI::App& app,
                                               absl::Span<const std::string> arguments);

// "--threads is '7x'; it takes a whole number"
absl::Status BadValue(std::string_view name, std::string_view text, std::string_view allowed);

inline std::string_view Allowed(const bool&) { return "true or false"; }
inline std::string_view Allowed(const int64_t&) { return "a whole number"; }
inline std::string_view Allowed(const std::optional<int64_t>&) { return "a whole number or empty"; }
inline std::string_view Allowed(const uint64_t&) { return "a whole number of at least 0"; }
inline std::string_view Allowed(const double&) { return "a number"; }
inline std::string_view Allowed(const std::string&) { return "text"; }

// Parses the value of the flag or variable `name`. Returns BadValue() for other text.
template <typename T>
absl::Status ParseValue(std::string_view name, const std::string& text, T& value) {
  std::string error;
  if (absl::ParseFlag(text, &value, &error)) return absl::OkStatus();
  return BadValue(name, text, Allowed(value));
}

// Returns the entry of `known` most similar to `word`, or "" if none is within two edits.
std::string_view Nearest(std::string_view word, absl::Span<const std::string_view> known);

}  // namespace rapt

#endif  // RAPT_BASE_ARGUMENTS_H_
