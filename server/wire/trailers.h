#ifndef RAPT_SERVER_WIRE_TRAILERS_H_
#define RAPT_SERVER_WIRE_TRAILERS_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/calls/call.h"

namespace rapt {

// Names and values that accompany the end of a call.
using Trailers = std::vector<std::pair<std::string, std::string>>;

// Returns the reason of a status of caches, the traceparent, and backend, plan and times.
Trailers TrailersOf(const Call& call, const absl::Status& status);

// Returns the message of a status, truncated if it is too long for a header.
std::string StatusMessage(const absl::Status& status);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_TRAILERS_H_
