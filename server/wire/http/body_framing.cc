#include "server/wire/http/body_framing.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/strip.h"

namespace rapt::http {
namespace {

constexpr size_t kMaxSizeDigits = 15;  // fits int64_t

// Whether a line is "Name: value". Another line belongs to the next request: the body was not
// terminated.
bool IsField(absl::string_view line) {
  const absl::string_view name = line.substr(0, line.find(':'));
  return !name.empty() && name.size() < line.size() &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return absl::ascii_isalnum(c) || absl::StrContains("!#$%&'*+-.^_`|~", char(c));
         });
}

// "1f" or "1f;name=value"
std::optional<uint64_t> ParseSize(absl::string_view line) {
  absl::string_view digits = line.substr(0, line.find(';'));
  digits = absl::StripTrailingAsciiWhitespace(digits);
  if (digits.empty() || digits.size() > kMaxSizeDigits) return std::nullopt;
  uint64_t size = 0;
  for (const char digit : digits) {
    if (!absl::ascii_isxdigit(static_cast<unsigned char>(digit))) return std::nullopt;
    const int value = absl::ascii_isdigit(static_cast<unsigned char>(digit))
                          ? digit - '0'
                          : absl::ascii_tolower(static_cast<unsigned char>(digit)) - 'a' + 10;
    size = size * 16 + static_cast<uint64_t>(value);
  }
  return size;
}

}  // namespace

BodyFraming::Next BodyFraming::Advance(absl::string_view& bytes) {
  while (data_left_ == 0 && state_ != State::kEnd) {
    const size_t end = bytes.find('\n');
    const absl::string_view part = bytes.substr(0, end);
    line_.append(part.data(), part.size());
    bytes.remove_prefix(std::min(bytes.size(), part.size() + 1));
    const size_t most = state_ == State::kTrailers ? kMaxTrailers : kMaxChunkLine;
    if (line_.size() > most) return Next::kMalformed;
    if (end == absl::string_view::npos) return Next::kNeedMore;
    if (const Next next = OnLine(); next != Next::kNeedMore) return next;
    line_.clear();
  }
  return data_left_ > 0 ? Next::kData : Next::kEnd;
}

// Returns kNeedMore to go on.
BodyFraming::Next BodyFraming::OnLine() {
  absl::string_view line = line_;
  if (!absl::ConsumeSuffix(&line, "\r") || absl::StrContains(line, '\r')) return Next::kMalformed;
  if (state_ == State::kEndOfData) {
    state_ = State::kSize;
    return line.empty() ? Next::kNeedMore : Next::kMalformed;
  }
  if (state_ == State::kTrailers) {
    trailer_bytes_ += line_.size() + 1;
    if (line.empty()) {
      state_ = State::kEnd;
    } else if (!IsField(line)) {
      return Next::kMalformed;
    }
    return trailer_bytes_ > kMaxTrailers ? Next::kMalformed : Next::kNeedMore;
  }
  const std::optional<uint64_t> size = ParseSize(line);
  if (!size) return Next::kMalformed;
  data_left_ = *size;
  state_ = *size > 0 ? State::kEndOfData : State::kTrailers;
  return Next::kNeedMore;
}

}  // namespace rapt::http
