#include "client/console/command_line.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace rapt {
namespace {

// Debian builds Abseil with its own string_view type.
absl::string_view Absl(std::string_view text) { return {text.data(), text.size()}; }

bool ParseValue(std::string_view text, bool* value) { return absl::SimpleAtob(Absl(text), value); }
bool ParseValue(std::string_view text, int64_t* value) {
  return absl::SimpleAtoi(Absl(text), value);
}
bool ParseValue(std::string_view text, uint64_t* value) {
  return absl::SimpleAtoi(Absl(text), value);
}
bool ParseValue(std::string_view text, double* value) {
  return absl::SimpleAtod(Absl(text), value);
}
bool ParseValue(std::string_view text, std::string* value) {
  value->assign(text);
  return true;
}
bool ParseValue(std::string_view text, std::vector<int64_t>* values) {
  values->clear();
  for (absl::string_view part : absl::StrSplit(Absl(text), ',')) {
    if (!absl::SimpleAtoi(part, &values->emplace_back())) return false;
  }
  return true;
}
template <typename T>
bool ParseValue(std::string_view text, std::optional<T>* value) {
  return ParseValue(text, &value->emplace());
}

const char* Expected(const bool*) { return "true or false"; }
const char* Expected(const int64_t*) { return "a whole number"; }
const char* Expected(const uint64_t*) { return "a whole number of at least 0"; }
const char* Expected(const double*) { return "a number"; }
const char* Expected(const std::string*) { return "text"; }
const char* Expected(const std::vector<int64_t>*) { return "whole numbers like 1,2,3"; }
template <typename T>
const char* Expected(const std::optional<T>*) {
  return Expected(static_cast<const T*>(nullptr));
}

bool IsSwitch(const Flag& flag) { return std::holds_alternative<bool*>(flag.target); }

absl::Status Assign(const Flag& flag, std::string_view text) {
  // CLI11 would take the flag of "--output --causal" for a file name.
  if (text.starts_with("--")) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--%s needs a value: --%s %s", flag.name, flag.name, flag.placeholder));
  }
  return std::visit(
      [&](auto* target) {
        if (ParseValue(text, target)) return absl::OkStatus();
        return absl::InvalidArgumentError(
            absl::StrFormat("--%s is '%s'; it takes %s", flag.name, text, Expected(target)));
      },
      flag.target);
}

// Levenshtein distance, with two rows.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> previous(b.size() + 1), current(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) previous[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    current[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = previous[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      current[j] = std::min({replaced, previous[j] + 1, current[j - 1] + 1});
    }
    std::swap(previous, current);
  }
  return previous[b.size()];
}

// Breaks text into lines of at most `width` columns.
std::string Wrap(std::string_view text, size_t width) {
  std::string out;
  size_t column = 0;
  for (absl::string_view word : absl::StrSplit(Absl(text), ' ')) {
    const bool breaks = column > 0 && column + 1 + word.size() > width;
    if (column > 0) out.push_back(breaks ? '\n' : ' ');
    column = (breaks || column == 0 ? 0 : column + 1) + word.size();
    absl::StrAppend(&out, word);
  }
  return out;
}

constexpr size_t kHelpWidth = 80;
constexpr size_t kHelpColumn = 28;

// The usage line comes first, as part of the description.
struct HelpFormatter : CLI::Formatter {
  std::string make_usage(const CLI::App*, std::string) const override { return ""; }
};

// A command line as CLI11 sees it.
struct Application {
  explicit Application(const CommandLine& line) {
    app.description(absl::StrCat("usage: ", Wrap(line.usage, kHelpWidth - 7), "\n\n",
                                 Wrap(line.summary, kHelpWidth)));
    const auto formatter = std::make_shared<HelpFormatter>();
    formatter->column_width(kHelpColumn);
    app.formatter(formatter);
    app.set_help_flag("-h,--help", "show this help");
    app.allow_extras();  // OperandsIn() looks at them
    for (const Flag& flag : line.flags) Add(flag);
    std::string examples;
    for (std::string_view example : line.examples)
      absl::StrAppend(&examples, "\n  ", Absl(example));
    if (!examples.empty()) app.footer("examples:" + examples);
  }

  void Add(const Flag& flag) {
    std::string names = absl::StrCat("--", Absl(flag.name));
    if (flag.letter != '\0') names = absl::StrFormat("-%c,%s", flag.letter, names);
    CLI::Option* const option = IsSwitch(flag) ? app.add_flag(names) : app.add_option(names);
    if (!IsSwitch(flag)) option->type_name(std::string(flag.placeholder));
    option->description(Wrap(flag.help, kHelpWidth - kHelpColumn));
    option->required(flag.required)->take_last();
    options.push_back(option);
  }

  CLI::App app;
  std::vector<CLI::Option*> options;  // one per flag, in order
};

// Makes two arguments of "--title=" and "-o=FILE". CLI11 would take the argument after "--title="
// for the title and "=FILE" for the file. The result is in reverse, as CLI11 expects it.
std::vector<std::string> ForCli11(absl::Span<const std::string> arguments) {
  std::vector<std::string> out;
  bool only_operands = false;
  for (const std::string& argument : arguments) {
    only_operands |= argument == "--";
    const size_t equals = argument.find('=');
    const bool is_short = equals == 2 && argument[1] != '-';
    const bool is_empty = absl::StartsWith(argument, "--") && equals + 1 == argument.size();
    if (!only_operands && argument[0] == '-' && (is_short || is_empty)) {
      out.push_back(argument.substr(0, equals));
      out.push_back(argument.substr(equals + 1));
    } else {
      out.push_back(argument);
    }
  }
  std::reverse(out.begin(), out.end());
  return out;
}

absl::Status UnknownFlag(const CommandLine& line, std::string_view argument) {
  std::vector<std::string_view> names = {"help"};
  for (const Flag& flag : line.flags) names.push_back(flag.name);
  const std::string_view shown = argument.substr(0, argument.find('='));
  const std::string_view nearest = Nearest(shown.substr(shown.starts_with("--") ? 2 : 1), names);
  return absl::InvalidArgumentError(
      nearest.empty() ? absl::StrFormat("unknown flag %s; --help lists the flags", shown)
                      : absl::StrFormat("unknown flag %s; did you mean --%s?", shown, nearest));
}

// `extras` is what CLI11 assigned to no flag.
absl::StatusOr<std::vector<std::string>> OperandsIn(const CommandLine& line,
                                                    const std::vector<std::string>& extras) {
  std::vector<std::string> operands;
  bool only_operands = false;
  for (const std::string& extra : extras) {
    if (!only_operands && extra == "--") {
      only_operands = true;
      continue;
    }
    // A lone "-" is an operand by convention.
    if (!only_operands && extra.size() > 1 && extra[0] == '-') return UnknownFlag(line, extra);
    operands.push_back(extra);
  }
  if (operands.size() <= static_cast<size_t>(line.max_operands)) return operands;
  return absl::InvalidArgumentError(absl::StrFormat("unexpected argument '%s'; usage: %s",
                                                    operands[line.max_operands], line.usage));
}

}  // namespace

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

absl::Status CheckAtLeastOne(std::string_view flag, int64_t value) {
  if (value >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("--%s is %d; it must be at least 1", flag, value));
}

absl::StatusOr<ParsedArguments> CommandLine::Parse(absl::Span<const std::string> arguments) const {
  Application application(*this);
  absl::Status parsed;
  try {
    application.app.parse(ForCli11(arguments));
  } catch (const CLI::CallForHelp&) {
    return ParsedArguments{.wants_help = true, .operands = {}};
  } catch (const CLI::ParseError& error) {
    parsed = absl::InvalidArgumentError(error.what());
  }
  // These errors come first: a misspelt flag may be the cause of the other one.
  absl::StatusOr<std::vector<std::string>> operands =
      OperandsIn(*this, application.app.remaining());
  absl::Status status = operands.status();
  status.Update(parsed);
  for (size_t i = 0; i < flags.size() && status.ok(); ++i) {
    const CLI::Option& option = *application.options[i];
    if (option.count() > 0) status = Assign(flags[i], option.results().back());
  }
  if (!status.ok()) return status;
  return ParsedArguments{.operands = *std::move(operands)};
}

std::string CommandLine::Help() const { return Application(*this).app.help(); }

}  // namespace rapt
