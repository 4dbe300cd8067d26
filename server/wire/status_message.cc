#include "server/wire/status_message.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/utf8.h"

namespace rapt {
namespace {

// Clients accept 8 KiB of headers by default, and a byte may be encoded as three.
constexpr size_t kMaxMessageBytes = 2048;

}  // namespace

std::string StatusMessage(const absl::Status& status) {
  const absl::string_view message = status.message();
  if (message.size() <= kMaxMessageBytes) return std::string(message);
  return absl::StrCat(Utf8Prefix(message, kMaxMessageBytes), "...");
}

}  // namespace rapt
