#include "base/arguments.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

// CLI11 2.1 takes the argument after "--title=" for the title, and "=FILE" of "-o=FILE" for the
// file. A zero byte, which no argument contains, marks what follows the "=" of a flag.
constexpr char kMark = '\0';

void Mark(std::string& argument) {
  const size_t equals = argument.find('=');
  if (argument[0] == '-' && equals != std::string::npos) argument.insert(equals + 1, 1, kMark);
}

void Unmark(std::string& argument) { std::erase(argument, kMark); }

// Returns `given`, a value as CLI11 found it, without marks.
absl::StatusOr<std::string> ValueOf(const CLI::Option& option, std::string given) {
  // CLI11 would take the flag of "--output --causal" for a file name.
  if (given.starts_with("--")) {
    return absl::InvalidArgumentError(absl::StrFormat("%s needs a value: %s %s", option.get_name(),
                                                      option.get_name(), option.get_type_name()));
  }
  if (given.starts_with(std::string{'=', kMark})) given.erase(0, 1);  // of "-o=FILE"
  Unmark(given);
  return given;
}

// Levenshtein distance.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (const char letter : a) {
    size_t diagonal = row[0]++;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (letter == b[j] ? 0 : 1);
      diagonal = std::exchange(row[j + 1], std::min({replaced, row[j] + 1, row[j + 1] + 1}));
    }
  }
  return row.back();
}

absl::Status UnknownFlag(const CLI::App& app, std::string_view argument) {
  std::vector<std::string_view> names;
  for (const CLI::Option* option : app.get_options()) names.push_back(option->get_lnames()[0]);
  const std::string_view shown = argument.substr(0, argument.find('='));
  const std::string_view nearest = Nearest(shown.substr(shown.starts_with("--") ? 2 : 1), names);
  return absl::InvalidArgumentError(
      nearest.empty() ? absl::StrFormat("unknown flag %s; --help lists the flags", shown)
                      : absl::StrFormat("unknown flag %s; did you mean --%s?", shown, nearest));
}

// `remaining` are the arguments that CLI11 assigned to no flag.
absl::Status CheckOperands(const CLI::App& app, const std::vector<std::string>& remaining) {
  for (const std::string& argument : remaining) {
    if (argument == "--") break;
    // A lone "-" is an operand by convention.
    if (argument.size() > 1 && argument[0] == '-') return UnknownFlag(app, argument);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<GivenFlag>> GivenFlags(const CLI::App& app) {
  std::vector<GivenFlag> flags;
  std::map<const CLI::Option*, size_t> count;
  for (const CLI::Option* option : app.parse_order()) {
    RAPT_ASSIGN_OR_RETURN(std::string value, ValueOf(*option, option->results()[count[option]++]));
    flags.push_back({option->get_lnames()[0], std::move(value)});
  }
  return flags;
}

}  // namespace

CLI::Option* AddFlag(CLI::App& app, const std::string& names, bool is_switch) {
  return (is_switch ? app.add_flag(names) : app.add_option(names)->type_name("value"))->take_last();
}

absl::StatusOr<ParsedArguments> ParseArguments(CLI::App& app,
                                               absl::Span<const std::string> arguments) {
  std::vector<std::string> marked(arguments.rbegin(), arguments.rend());  // as CLI11 expects them
  std::for_each(marked.begin(), marked.end(), Mark);
  absl::Status parsed;
  try {
    app.allow_extras()->parse(std::move(marked));
  } catch (const CLI::CallForHelp&) {
    return ParsedArguments{.text_to_print = app.help(), .flags = {}, .operands = {}};
  } catch (const CLI::CallForVersion& version) {
    return ParsedArguments{.text_to_print = version.what(), .flags = {}, .operands = {}};
  } catch (const CLI::ParseError& error) {
    parsed = absl::InvalidArgumentError(error.what());
  }
  // A misspelt flag may be the cause of CLI11's error.
  std::vector<std::string> operands = app.remaining();
  absl::Status status = CheckOperands(app, operands);
  status.Update(parsed);
  if (!status.ok()) return status;
  RAPT_ASSIGN_OR_RETURN(std::vector<GivenFlag> flags, GivenFlags(app));
  std::for_each(operands.begin(), operands.end(), Unmark);
  return ParsedArguments{
      .text_to_print = "", .flags = std::move(flags), .operands = std::move(operands)};
}

absl::Status BadValue(std::string_view name, std::string_view text, std::string_view allowed) {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is '%s'; it takes %s", name, text, allowed));
}

std::string_view Nearest(std::string_view word, absl::Span<const std::string_view> known) {
  std::string_view nearest;
  size_t nearest_distance = 3;  // At most two edits.
  for (std::string_view candidate : known) {
    const size_t distance = EditDistance(word, candidate);
    if (distance < nearest_distance && distance < candidate.size()) {
      nearest = candidate;
      nearest_distance = distance;
    }
  }
  return nearest;
}

}  // namespace rapt
