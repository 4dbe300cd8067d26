#include "server/wire/grpc/call_headers.h"

#include <chrono>
#include <optional>

namespace rapt {
namespace {

absl::string_view View(grpc::string_ref text) { return {text.data(), text.size()}; }

HeaderValues ValuesOf(const grpc::ServerContextBase& context, const char* name) {
  const auto [first, last] = context.client_metadata().equal_range(name);
  HeaderValues values;
  for (auto value = first; value != last; ++value) values.push_back(View(value->second));
  return values;
}

std::optional<absl::string_view> CertificateOf(const grpc::ServerContextBase& context) {
  const auto names = context.auth_context()->GetPeerIdentity();
  if (names.empty()) return std::nullopt;
  return View(names.front());
}

// gRPC's deadline uses the system clock.
Instant DeadlineOf(const grpc::ServerContextBase& context, Instant now) {
  using std::chrono::system_clock;
  // Later deadlines would overflow the sum.
  constexpr std::chrono::hours kForever{24 * 365 * 100};
  const system_clock::time_point wall_now = system_clock::now();
  const system_clock::time_point deadline = context.deadline();
  if (deadline >= wall_now + kForever) return Instant::max();
  return now + (deadline - wall_now);
}

}  // namespace

CallHeaders HeadersOf(const grpc::ServerContextBase& context, Instant now) {
  return {.authorization = ValuesOf(context, kAuthorizationHeader),
          .traceparent = ValuesOf(context, kTraceparentHeader),
          .message_bytes = ValuesOf(context, kMessageBytesHeader),
          .certificate = CertificateOf(context),
          .peer = context.peer(),
          .deadline = DeadlineOf(context, now)};
}

}  // namespace rapt
