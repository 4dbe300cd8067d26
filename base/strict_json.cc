#include "base/strict_json.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/invalid.h"
#include "base/utf8.h"

namespace rapt {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxNameBytes = 64;     // of a member, in errors
constexpr size_t kMaxReasonBytes = 256;  // of a syntax error, which quotes the last token

// A number that the parser does not know.
struct NonFinite {
  size_t string = 0;  // the number of strings before it
  size_t offset = 0;
  absl::string_view text;
  double value = 0;
};

constexpr std::pair<absl::string_view, double> kNonFiniteNumbers[] = {
    {"NaN", std::numeric_limits<double>::quiet_NaN()},
    {"Infinity", std::numeric_limits<double>::infinity()},
    {"-Infinity", -std::numeric_limits<double>::infinity()},
};

// Returns the end of the string that begins at the offset.
size_t EndOfString(absl::string_view text, size_t begin) {
  size_t end = begin + 1;
  while (end < text.size() && text[end] != '"') end += text[end] == '\\' ? 2 : 1;
  return std::min(end + 1, text.size());
}

// Puts a string of the same length in the place of each such number, so that positions stay.
std::vector<NonFinite> QuoteNonFinite(std::string& text) {
  std::vector<NonFinite> found;
  size_t strings = 0;
  for (size_t offset = 0; offset < text.size();) {
    const absl::string_view rest = absl::string_view(text).substr(offset);
    const auto number =
        std::find_if(std::begin(kNonFiniteNumbers), std::end(kNonFiniteNumbers),
                     [&](const auto& n) { return absl::StartsWith(rest, n.first); });
    if (number != std::end(kNonFiniteNumbers)) {
      found.push_back({strings++, offset, number->first, number->second});
      text[offset] = text[offset + number->first.size() - 1] = '"';
      offset += number->first.size();
    } else if (text[offset] == '"') {
      ++strings;
      offset = EndOfString(text, offset);
    } else {
      ++offset;
    }
  }
  return found;
}

// What the parser calls. Checks what it does not check itself.
class Checker {
 public:
  using number_integer_t = Json::number_integer_t;
  using number_unsigned_t = Json::number_unsigned_t;
  using number_float_t = Json::number_float_t;
  using string_t = Json::string_t;
  using binary_t = Json::binary_t;

  Checker(absl::string_view text, std::vector<NonFinite> non_finite, JsonHandler& handler)
      : text_(text), non_finite_(std::move(non_finite)), handler_(handler) {}

  // Each returns false. `byte`: a number from 1.
  bool FailAt(size_t byte, absl::string_view why) {
    const absl::string_view before = text_.substr(0, std::max<size_t>(byte, 1) - 1);
    const size_t line = before.rfind('\n');
    const size_t column = byte - (line == absl::string_view::npos ? 0 : line + 1);
    return Fail(absl::StrCat("line ", 1 + std::count(before.begin(), before.end(), '\n'),
                             ", column ", column, " (byte ", byte, "): ", why));
  }

  // For the parser.
  bool null() { return handler_.null(); }
  bool boolean(bool value) { return handler_.boolean(value); }
  bool number_integer(number_integer_t value) { return handler_.number_integer(value); }
  bool number_unsigned(number_unsigned_t value) { return handler_.number_unsigned(value); }
  bool number_float(number_float_t value, const string_t& text) {
    return handler_.number_float(value, text);
  }
  bool binary(binary_t&) { return false; }

  bool string(string_t& value) {
    const NonFinite* const number = NextString();
    if (number == nullptr) return handler_.string(value);
    return handler_.number_float(number->value, std::string(number->text));
  }

  bool key(string_t& name) {
    if (const NonFinite* const number = NextString()) {
      return FailAt(number->offset + 1, absl::StrCat(number->text, " in place of a name"));
    }
    Level& level = levels_[depth_ - 1];
    level.name = name.empty() ? "\"\"" : std::string(Utf8Prefix(name, kMaxNameBytes));
    if (!level.names.insert(absl::HashOf(name)).second) {
      return Fail(absl::StrCat(Path(), " is given twice"));
    }
    if (++members_ <= kMaxJsonMembers) return handler_.key(name);
    return Fail(absl::StrCat("there are more than ", kMaxJsonMembers, " members in ", Path()));
  }

  bool start_object(size_t size) { return Enter() && handler_.start_object(size); }
  bool start_array(size_t size) { return Enter() && handler_.start_array(size); }
  bool end_array() {
    --depth_;
    return handler_.end_array();
  }
  bool end_object() {
    Level& level = levels_[--depth_];
    members_ -= level.names.size();
    level.names.clear();
    level.name.clear();
    return handler_.end_object();
  }

  bool parse_error(size_t byte, const std::string&, const Json::exception& exception) {
    // "[json.exception.parse_error.101] parse error at line 1, column 5: syntax error while ..." or
    // "[json.exception.out_of_range.406] number overflow parsing '1e400'"
    absl::string_view why = exception.what();
    why.remove_prefix(why.find("] ") + 2);
    if (absl::StartsWith(why, "parse error at line ")) why.remove_prefix(why.find(": ") + 2);
    if (why.size() <= kMaxReasonBytes) return FailAt(byte, why);
    return FailAt(byte, absl::StrCat(Utf8Prefix(why, kMaxReasonBytes), "..."));
  }

 private:
  // An array or an object that is being read.
  struct Level {
    std::string name;                   // of the latest member; empty in an array
    absl::flat_hash_set<size_t> names;  // of an object, hashed
  };

  bool Enter() {
    if (depth_ == kMaxJsonDepth) {
      return Fail(absl::StrCat("arrays and objects are nested more than ", kMaxJsonDepth, " deep"));
    }
    if (++depth_ > levels_.size()) levels_.emplace_back();
    return true;
  }

  // Counts a string. Returns the number whose place it takes, or null.
  const NonFinite* NextString() {
    const size_t string = strings_++;
    if (next_ == non_finite_.size() || non_finite_[next_].string != string) return nullptr;
    return &non_finite_[next_++];
  }

  // "inputs.shape"
  std::string Path() const {
    std::vector<absl::string_view> names;
    for (size_t n = 0; n < depth_; ++n) {
      if (!levels_[n].name.empty()) names.emplace_back(levels_[n].name);
    }
    return absl::StrJoin(names, ".");
  }

  bool Fail(absl::string_view why) {
    handler_.OnInvalid(why);
    return false;
  }

  const absl::string_view text_;
  const std::vector<NonFinite> non_finite_;
  size_t next_ = 0;  // of non_finite_
  size_t strings_ = 0;
  JsonHandler& handler_;
  std::vector<Level> levels_;  // the first `depth_` are being read
  size_t depth_ = 0;
  size_t members_ = 0;
};

// Keeps a document whole.
class Builder final : public JsonHandler {
 public:
  absl::StatusOr<Json> Read(absl::string_view text, JsonNumberSyntax numbers) {
    if (!ReadStrictJson(text, *this, numbers)) return status_;
    return std::move(root_);
  }

 private:
  void OnInvalid(absl::string_view why) override {
    status_ = Invalid("the JSON is invalid: ", why);
  }
  bool null() override { return Put(nullptr); }
  bool boolean(bool value) override { return Put(value); }
  bool number_integer(number_integer_t value) override { return Put(value); }
  bool number_unsigned(number_unsigned_t value) override { return Put(value); }
  bool number_float(number_float_t value, const string_t&) override { return Put(value); }
  bool string(string_t& value) override { return Put(std::move(value)); }
  bool start_object(size_t) override { return Open(Json::object()); }
  bool start_array(size_t) override { return Open(Json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(string_t& name) override {
    name_ = std::move(name);
    return true;
  }

  bool Put(Json value) {
    if (open_.empty()) {
      last_ = &(root_ = std::move(value));
    } else if (open_.back()->is_array()) {
      open_.back()->push_back(std::move(value));
      last_ = &open_.back()->back();
    } else {
      last_ = &((*open_.back())[name_] = std::move(value));
    }
    return true;
  }
  bool Open(Json value) {
    Put(std::move(value));
    open_.push_back(last_);
    return true;
  }
  bool Close() {
    open_.pop_back();
    return true;
  }

  Json root_;
  std::vector<Json*> open_;  // arrays and objects that are being read
  Json* last_ = nullptr;     // the value that was put last
  std::string name_;         // of the next member
  absl::Status status_;
};

}  // namespace

bool ReadStrictJson(absl::string_view text, JsonHandler& handler, JsonNumberSyntax numbers) {
  std::string quoted;
  std::vector<NonFinite> non_finite;
  if (numbers == JsonNumberSyntax::kNonFinite) {
    quoted.assign(text.data(), text.size());
    non_finite = QuoteNonFinite(quoted);
    text = quoted;
  }
  Checker checker(text, std::move(non_finite), handler);
  // The parser takes NUL for the end.
  if (const size_t nul = text.find('\0'); nul != absl::string_view::npos) {
    return checker.FailAt(nul + 1, "a NUL byte");
  }
  return Json::sax_parse(text.begin(), text.end(), &checker);
}

absl::StatusOr<Json> ParseStrictJson(absl::string_view text, JsonNumberSyntax numbers) {
  return Builder().Read(text, numbers);
}

}  // namespace rapt
