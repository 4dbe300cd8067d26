#include "client/console/command_line.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <memory>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

// Debian builds Abseil with its own string_view type.
absl::string_view Absl(std::string_view text) { return {text.data(), text.size()}; }

using rapt::ParseValue;

absl::Status ParseValue(std::string_view name, const std::string& text,
                        std::vector<int64_t>& values) {
  values.clear();
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    if (!absl::SimpleAtoi(part, &values.emplace_back())) {
      return BadValue(name, text, "whole numbers like 1,2,3");
    }
  }
  return absl::OkStatus();
}
template <typename T>
absl::Status ParseValue(std::string_view name, const std::string& text, std::optional<T>& value) {
  return ParseValue(name, text, value.emplace());
}

absl::Status ParseChoice(std::string_view name, const std::string& text,
                         const NamedChoice& choice) {
  const auto found = std::find(choice.names.begin(), choice.names.end(), text);
  if (found == choice.names.end()) {
    return BadValue(name, text, absl::StrJoin(choice.names, " or "));
  }
  choice.set(static_cast<size_t>(found - choice.names.begin()));
  return absl::OkStatus();
}

bool IsSwitch(const Flag& flag) { return flag.placeholder.empty(); }

absl::Status Assign(const Flag& flag, const std::string& text) {
  const std::string name = absl::StrCat("--", Absl(flag.name));
  if (const auto* choice = std::get_if<NamedChoice>(&flag.target)) {
    return ParseChoice(name, text, *choice);
  }
  if (const auto* read = std::get_if<FlagReader>(&flag.target)) return (*read)(name, text);
  return std::visit(
      [&](auto target) {
        if constexpr (std::is_pointer_v<decltype(target)>) return ParseValue(name, text, *target);
        return absl::OkStatus();
      },
      flag.target);
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

void Add(const Flag& flag, CLI::App& app) {
  std::string names = absl::StrCat("--", Absl(flag.name));
  if (flag.letter != '\0') names = absl::StrFormat("-%c,%s", flag.letter, names);
  CLI::Option* const option = AddFlag(app, names, IsSwitch(flag));
  if (!IsSwitch(flag)) option->type_name(std::string(flag.placeholder));
  const std::string help = absl::StrCat(absl::StrReplaceAll(Absl(flag.of), {{"|", ", "}}),
                                        flag.of.empty() ? "" : ": ", Absl(flag.help));
  option->description(Wrap(help, kHelpWidth - kHelpColumn))->required(flag.required);
}

absl::Status CheckUse(const Flag& flag, const ParsedArguments& parsed) {
  if (flag.of.empty()) return absl::OkStatus();
  const bool is_used =
      absl::StartsWith(Absl(flag.of), "--")
          ? absl::c_any_of(parsed.flags,
                           [&](const GivenFlag& g) { return g.name == flag.of.substr(2); })
          : !parsed.operands.empty() &&
                absl::c_linear_search(absl::StrSplit(Absl(flag.of), '|'), parsed.operands.front());
  if (is_used) return absl::OkStatus();
  return Invalid("--", Absl(flag.name), " is a flag of ",
                 absl::StrReplaceAll(Absl(flag.of), {{"|", " or "}}));
}

// Returns the CLI11 parser of a command line.
std::unique_ptr<CLI::App> MakeApp(const CommandLine& line) {
  auto app = std::make_unique<CLI::App>(absl::StrCat("usage: ", Wrap(line.usage, kHelpWidth - 7),
                                                     "\n\n", Wrap(line.summary, kHelpWidth)));
  const auto formatter = std::make_shared<HelpFormatter>();
  formatter->column_width(kHelpColumn);
  app->formatter(formatter);
  app->set_help_flag("-h,--help", "show this help");
  for (const Flag& flag : line.flags) Add(flag, *app);
  std::string examples;
  for (std::string_view example : line.examples) absl::StrAppend(&examples, "\n  ", Absl(example));
  if (!examples.empty()) app->footer("examples:" + examples);
  return app;
}

}  // namespace

std::vector<Flag> Joined(std::initializer_list<std::vector<Flag>> tables) {
  std::vector<Flag> rows;
  for (const std::vector<Flag>& table : tables) rows.insert(rows.end(), table.begin(), table.end());
  return rows;
}

std::vector<std::string_view> NamesOf(const std::vector<Flag>& flags) {
  std::vector<std::string_view> names;
  names.reserve(flags.size());
  for (const Flag& flag : flags) names.push_back(flag.name);
  return names;
}

absl::Status CheckAtLeastOne(std::string_view flag, int64_t value) {
  if (value >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("--%s is %d; it must be at least 1", flag, value));
}

absl::StatusOr<ParsedArguments> CommandLine::Parse(absl::Span<const std::string> arguments) const {
  const std::unique_ptr<CLI::App> app = MakeApp(*this);
  RAPT_ASSIGN_OR_RETURN(ParsedArguments parsed, ParseArguments(*app, arguments));
  std::vector<std::string>& operands = parsed.operands;
  const auto separator = std::find(operands.begin(), operands.end(), "--");
  if (separator != operands.end()) operands.erase(separator);
  if (operands.size() > static_cast<size_t>(max_operands)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("unexpected argument '%s'; usage: %s", operands[max_operands], usage));
  }
  for (const GivenFlag& given : parsed.flags) {
    const auto flag = std::find_if(flags.begin(), flags.end(),
                                   [&](const Flag& f) { return f.name == given.name; });
    RAPT_RETURN_IF_ERROR(Assign(*flag, given.value));  // a wrong value is wrong for every use
    RAPT_RETURN_IF_ERROR(CheckUse(*flag, parsed));
  }
  parsed.flags.clear();
  return parsed;
}

}  // namespace rapt
