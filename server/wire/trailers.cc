#include "server/wire/trailers.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/utf8.h"
#include "server/cache/reason.h"

namespace rapt {
namespace {

// Clients accept 8 KiB of headers by default, and a byte may be encoded as three.
constexpr size_t kMaxMessageBytes = 2048;

}  // namespace

Trailers TrailersOf(const Call& call, const absl::Status& status) {
  Trailers trailers;
  const cache::Reason reason = cache::ReasonOf(status);
  if (reason != cache::Reason::kNone) {
    trailers.emplace_back("rapt-reason", std::string(NameOf(reason)));
  }
  call.ForEachTrailer([&trailers](const char* name, const std::string& value) {
    trailers.emplace_back(name, value);
  });
  return trailers;
}

std::string StatusMessage(const absl::Status& status) {
  const absl::string_view message = status.message();
  if (message.size() <= kMaxMessageBytes) return std::string(message);
  return absl::StrCat(Utf8Prefix(message, kMaxMessageBytes), "...");
}

}  // namespace rapt
