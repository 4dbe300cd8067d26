// W3C Trace Context: the trace of the caller to which a call belongs.
#ifndef RAPT_SERVER_CALLS_TRACEPARENT_H_
#define RAPT_SERVER_CALLS_TRACEPARENT_H_

#include <string>

#include "absl/strings/string_view.h"
#include "server/calls/call_headers.h"

namespace rapt {

// Returns whether the specification allows a receiver to use the text: version 00, or a later
// version that begins with the same fields. Version ff and traces or parents of zeros are invalid.
bool IsTraceparent(absl::string_view text);

// Returns the traceparent to report and to return to the caller. Empty if there is none, more than
// one, or an invalid one: the specification says to ignore these.
std::string TraceparentOf(const HeaderValues& values);

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_TRACEPARENT_H_
