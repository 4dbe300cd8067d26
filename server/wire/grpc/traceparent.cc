#include "server/wire/grpc/traceparent.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace rapt {
namespace {

constexpr char kHeader[] = "traceparent";

// "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01": version, trace, parent, flags. Later
// versions may go on after another dash.
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

std::string ReturnTraceparent(grpc::ServerContextBase& context) {
  const auto [first, last] = context.client_metadata().equal_range(kHeader);
  if (first == last || std::next(first) != last) return "";
  const absl::string_view text(first->second.data(), first->second.size());
  if (!IsTraceparent(text)) return "";
  // What later versions may add is nothing that this one can pass on.
  std::string traceparent = absl::StrCat("00", text.substr(2, kSize - 2));
  context.AddTrailingMetadata(kHeader, traceparent);
  return traceparent;
}

}  // namespace rapt
