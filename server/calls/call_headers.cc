#include "server/calls/call_headers.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace rapt {
namespace {

// "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01": version, trace, parent, flags. Later
// versions may continue after another dash.
constexpr size_t kVersion = 0, kTrace = 3, kParent = 36, kFlags = 53, kSize = 55;

bool IsLowerHex(absl::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsZero(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c == '0'; });
}

}  // namespace

bool IsTraceparent(absl::string_view text) {
  if (text.size() < kSize || text[kTrace - 1] != '-' || text[kParent - 1] != '-' ||
      text[kFlags - 1] != '-') {
    return false;
  }
  const absl::string_view version = text.substr(kVersion, 2), trace = text.substr(kTrace, 32),
                          parent = text.substr(kParent, 16), flags = text.substr(kFlags, 2);
  if (!IsLowerHex(version) || !IsLowerHex(trace) || !IsLowerHex(parent) || !IsLowerHex(flags)) {
    return false;
  }
  if (version == "ff" || IsZero(trace) || IsZero(parent)) return false;
  return text.size() == kSize || (version != "00" && text[kSize] == '-');
}

std::string TraceparentOf(const HeaderValues& values) {
  if (values.size() != 1 || !IsTraceparent(values.front())) return "";
  // Only the part that version 00 defines can be passed on.
  return absl::StrCat("00", values.front().substr(2, kSize - 2));
}

}  // namespace rapt
