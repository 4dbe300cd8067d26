#include "attention/problem_text.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "attention/attributes.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

// The predicate of an error whose subject is the quoted text: "is empty". nullopt on success.
using ParseError = std::optional<std::string>;

// Parses "32/8" into two numbers and "32" into the same number twice.
bool ParsePair(absl::string_view text, char separator, int64_t& first, int64_t& second) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, separator);
  return parts.size() <= 2 && absl::SimpleAtoi(parts.front(), &first) &&
         absl::SimpleAtoi(parts.back(), &second);
}

ParseError ReadAxes(absl::string_view text, Problem& p) {
  const std::vector<absl::string_view> axes = absl::StrSplit(text, 'x');
  if (axes.size() != 4) return absl::StrCat("has ", axes.size(), " axes; it must have 4, BxHxSxD");
  if (!absl::SimpleAtoi(axes[0], &p.batch) || !ParsePair(axes[1], '/', p.query_heads, p.kv_heads) ||
      !ParsePair(axes[2], ':', p.query_length, p.key_length) ||
      !ParsePair(axes[3], '/', p.head_size, p.value_head_size)) {
    return "has an axis that is not a number";
  }
  return std::nullopt;
}

bool ReadDType(absl::string_view word, Problem& p) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
    if (!absl::EqualsIgnoreCase(word, NameOf(dtype))) continue;
    p.dtype = dtype;
    return true;
  }
  return false;
}

bool ReadValue(absl::string_view text, bool& out) {
  out = text != "0";
  return text.empty() || text == "0" || text == "1";
}
bool ReadValue(absl::string_view text, int64_t& out) { return absl::SimpleAtoi(text, &out); }
bool ReadValue(absl::string_view text, double& out) { return absl::SimpleAtod(text, &out); }

bool ReadChoice(absl::Span<const absl::string_view> choices, absl::string_view text, auto& out) {
  const auto choice = std::find(choices.begin(), choices.end(), text);
  if (choice == choices.end()) return false;
  out = static_cast<std::decay_t<decltype(out)>>(choice - choices.begin());
  return true;
}

template <typename T>
bool ReadValue(absl::string_view text, std::optional<T>& out) {
  return ReadValue(text, out.emplace());
}

// Parses "causal", or a number: "past=512", "scale=0.5". Validate() checks the range of the number.
bool ReadAttribute(absl::string_view name, absl::string_view value, Problem& p) {
  for (const AttributeInfo& info : Attributes()) {
    if (info.c != name) continue;
    const auto read = [&](const auto& field) {
      if (field.problem == nullptr) return false;
      auto& out = p.*field.problem;
      if constexpr (std::is_enum_v<std::decay_t<decltype(out)>>) {
        return ReadChoice(info.choices, value, out);
      } else {
        return ReadValue(value, out);
      }
    };
    return std::visit(read, info.field);
  }
  if (name == "past") return ReadValue(value, p.past_length);
  if (name == "ragged") return ReadValue(value, p.has_key_lengths);
  const bool is_onnx = name == "onnx_alignment";
  if ((name != "bottom_right" && !is_onnx) || !value.empty()) return false;
  p.alignment = is_onnx ? Alignment::kOnnx : Alignment::kBottomRight;
  return true;
}

// REQUIRES: all other fields are set.
bool SetMask(absl::string_view kind, Problem& p) {
  if (kind == "padding") {
    p.mask = MaskShape{DType::kBool, {p.batch, 1, 1, p.total_keys()}};
  } else if (kind == "bool" || kind == "float") {
    const DType dtype = kind == "bool" ? DType::kBool : p.dtype;
    p.mask = MaskShape{dtype, {1, 1, p.query_length, p.total_keys()}};
  }
  return p.mask.has_value();
}

ParseError ReadWords(absl::Span<const absl::string_view> words, Problem& p) {
  std::string mask;
  for (const absl::string_view any_case : words) {
    const std::string word = absl::AsciiStrToLower(any_case);
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(word, absl::MaxSplits('=', 1));
    if (parts.first == "mask") {
      mask = std::string(parts.second);
    } else if (!ReadDType(word, p) && !ReadAttribute(parts.first, parts.second, p)) {
      return absl::StrCat("has the invalid word '", any_case, "'");
    }
  }
  if (p.is_additive()) p.additive_weight = AdditiveWeight{};
  if (!mask.empty() && !SetMask(mask, p)) {
    return absl::StrCat("has mask '", mask, "'; it must be bool, float or padding");
  }
  return std::nullopt;
}

absl::StatusOr<Problem> ParseProblem(absl::string_view text) {
  const std::vector<absl::string_view> words =
      absl::StrSplit(text, absl::ByAnyChar(" \t"), absl::SkipEmpty());
  Problem problem;
  ParseError why = words.empty() ? "is empty" : ReadAxes(words.front(), problem);
  if (!why) why = ReadWords(absl::MakeConstSpan(words).subspan(1), problem);
  if (!why) {
    if (absl::Status status = Validate(problem); !status.ok()) {
      why = absl::StrCat("is not a valid problem: ", std::string(status.message()));
    }
  }
  if (!why) return problem;
  return Invalid("'", absl::StripAsciiWhitespace(text), "' ", *why);
}

}  // namespace

absl::StatusOr<std::vector<Problem>> ParseProblems(absl::string_view text) {
  std::vector<Problem> problems;
  for (const absl::string_view one : absl::StrSplit(text, ',')) {
    RAPT_ASSIGN_OR_RETURN(const Problem problem, ParseProblem(one));
    problems.push_back(problem);
  }
  return problems;
}

}  // namespace rapt
