// W3C Trace Context: the trace of the caller to which a call belongs.
#ifndef RAPT_SERVER_CALLS_TRACEPARENT_H_
#define RAPT_SERVER_CALLS_TRACEPARENT_H_

#include <string>

#include "absl/strings/string_view.h"
#include "server/calls/call_headers.h"

namespace rapt {

// Returns whether the specification lets a receiver use the text: version 00 in full, and of later
// versions the part that it defines; never version ff, nor a trace or parent of zeros.
bool IsTraceparent(absl::string_view text);

// Returns the traceparent to report and to return to the caller. Empty if there is none, more than
// one, or an invalid one: the specification says to ignore these.
std::string TraceparentOf(const HeaderValues& values);

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_TRACEPARENT_H_
