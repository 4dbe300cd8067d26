#include "client/console/command_line.h"

#include <algorithm>
#include <set>
#include <type_traits>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace rapt {
namespace {

// Debian's Abseil has a string_view of its own.
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

std::string_view Expected(const FlagTarget& target) {
  struct Names {
    std::string_view operator()(bool*) const { return "true or false"; }
    std::string_view operator()(int64_t*) const { return "a whole number"; }
    std::string_view operator()(uint64_t*) const { return "a whole number of at least 0"; }
    std::string_view operator()(double*) const { return "a number"; }
    std::string_view operator()(std::string*) const { return "text"; }
    std::string_view operator()(std::optional<int64_t>*) const { return "a whole number"; }
    std::string_view operator()(std::optional<double>*) const { return "a number"; }
    std::string_view operator()(std::optional<std::string>*) const { return "text"; }
    std::string_view operator()(std::vector<int64_t>*) const { return "whole numbers like 1,2,3"; }
  };
  return std::visit(Names{}, target);
}

bool IsSwitch(const Flag& flag) { return std::holds_alternative<bool*>(flag.target); }

absl::Status Assign(const Flag& flag, std::string_view text) {
  const bool parsed =
      std::visit([text](auto* target) { return ParseValue(text, target); }, flag.target);
  if (parsed) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("--%s is '%s'; it takes %s", flag.name, text, Expected(flag.target)));
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

// Text in lines of at most `width` columns, each after the first led by `indent` spaces.
std::string Wrap(std::string_view text, size_t width, size_t indent) {
  std::string out;
  size_t column = 0;
  for (absl::string_view word : absl::StrSplit(Absl(text), ' ')) {
    if (column > 0 && column + 1 + word.size() > width) {
      absl::StrAppend(&out, "\n", std::string(indent, ' '));
      column = 0;
    }
    absl::StrAppend(&out, column > 0 ? " " : "", word);
    column += word.size() + (column > 0 ? 1 : 0);
  }
  return out;
}

}  // namespace

std::string_view Nearest(std::string_view word, absl::Span<const std::string_view> known) {
  std::string_view nearest;
  size_t nearest_distance = 3;  // More than two slips are another word.
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

bool AsksForHelp(absl::Span<const std::string> arguments) {
  for (const std::string& argument : arguments) {
    if (argument == "--") return false;
    if (argument == "--help" || argument == "-h") return true;
  }
  return false;
}

const Flag* CommandLine::Find(std::string_view name) const {
  for (const Flag& flag : flags) {
    if (flag.name == name) return &flag;
    if (name.size() == 1 && name[0] == flag.letter) return &flag;
  }
  return nullptr;
}

absl::Status CommandLine::UnknownFlag(std::string_view argument, std::string_view name) const {
  std::vector<std::string_view> names = {"help"};
  for (const Flag& flag : flags) names.push_back(flag.name);
  const std::string_view nearest = Nearest(name, names);
  if (nearest.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("unknown flag %s; --help lists what there is", argument));
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("unknown flag %s; did you mean --%s?", argument, nearest));
}

absl::Status CommandLine::Parse(absl::Span<const std::string> arguments,
                                std::vector<std::string>* operands) const {
  std::set<std::string_view> given;
  bool only_operands = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view argument = arguments[i];
    // A lone "-" is an operand by custom.
    if (only_operands || argument.size() < 2 || argument[0] != '-') {
      operands->emplace_back(argument);
      continue;
    }
    if (argument == "--") {
      only_operands = true;
      continue;
    }
    const std::string_view written = argument.substr(argument[1] == '-' ? 2 : 1);
    const size_t equals = written.find('=');
    const std::string_view name = written.substr(0, equals);
    const std::string_view shown = argument.substr(0, argument.find('='));
    const Flag* flag = Find(name);
    // "-output" is not "--output".
    if (flag == nullptr || (argument[1] != '-' && name.size() != 1)) {
      return UnknownFlag(shown, name);
    }
    std::string_view value = "true";
    if (equals != std::string_view::npos) {
      value = written.substr(equals + 1);
    } else if (!IsSwitch(*flag)) {
      if (i + 1 == arguments.size() || absl::StartsWith(arguments[i + 1], "--")) {
        return absl::InvalidArgumentError(
            absl::StrFormat("%s needs a value: %s %s", shown, shown, flag->placeholder));
      }
      value = arguments[++i];
    }
    if (absl::Status assigned = Assign(*flag, value); !assigned.ok()) return assigned;
    given.insert(flag->name);
  }
  for (const Flag& flag : flags) {
    if (flag.required && given.count(flag.name) == 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("--%s %s is required: %s", flag.name, flag.placeholder, flag.help));
    }
  }
  if (operands->size() > static_cast<size_t>(max_operands)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("unexpected argument '%s'; usage: %s", (*operands)[max_operands], usage));
  }
  return absl::OkStatus();
}

std::string CommandLine::Help() const {
  constexpr size_t kWidth = 80;
  std::vector<std::string> spellings;
  size_t widest = 0;
  for (const Flag& flag : flags) {
    std::string spelling = flag.letter == '\0' ? "    " : absl::StrFormat("-%c, ", flag.letter);
    absl::StrAppend(&spelling, "--", Absl(flag.name), flag.placeholder.empty() ? "" : " ",
                    Absl(flag.placeholder));
    widest = std::max(widest, spelling.size());
    spellings.push_back(std::move(spelling));
  }
  const size_t help_column = widest + 4;
  std::string out =
      absl::StrCat("usage: ", Wrap(usage, kWidth - 7, 11), "\n\n", Wrap(summary, kWidth, 0), "\n");
  if (!flags.empty()) absl::StrAppend(&out, "\nflags:\n");
  for (size_t i = 0; i < flags.size(); ++i) {
    absl::StrAppend(&out, "  ", spellings[i], std::string(widest + 2 - spellings[i].size(), ' '),
                    Wrap(flags[i].help, kWidth - help_column, help_column), "\n");
  }
  if (!examples.empty()) absl::StrAppend(&out, "\nexamples:\n");
  for (std::string_view example : examples) absl::StrAppend(&out, "  ", Absl(example), "\n");
  return out;
}

}  // namespace rapt
