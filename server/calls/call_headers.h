// The headers of a call as plain values, independent of the transport.
#ifndef RAPT_SERVER_CALLS_CALL_HEADERS_H_
#define RAPT_SERVER_CALLS_CALL_HEADERS_H_

#include <optional>

#include "absl/container/inlined_vector.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"

namespace rapt {

inline constexpr char kTraceparentHeader[] = "traceparent";
inline constexpr char kAuthorizationHeader[] = "authorization";

// All values of one header, in the order received.
using HeaderValues = absl::InlinedVector<absl::string_view, 1>;

// The values point into the call that carried them.
struct CallHeaders {
  HeaderValues authorization = {};
  HeaderValues traceparent = {};
  // The name in the caller's verified certificate, which may be empty.
  std::optional<absl::string_view> certificate = {};
  absl::string_view peer = {};        // "ipv4:127.0.0.1:4711", "unix:"
  Instant deadline = Instant::max();  // Instant::max(): none is set
};

// Returns whether the specification allows a receiver to use the text: version 00, or a later
// version that begins with the same fields. Version ff and traces or parents of zeros are invalid.
bool IsTraceparent(absl::string_view text);

// Returns the traceparent to report and to return to the caller. Empty if there is none, more than
// one, or an invalid one: the specification says to ignore these.
std::string TraceparentOf(const HeaderValues& values);

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_CALL_HEADERS_H_
