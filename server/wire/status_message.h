#ifndef RAPT_SERVER_WIRE_STATUS_MESSAGE_H_
#define RAPT_SERVER_WIRE_STATUS_MESSAGE_H_

#include <string>

#include "absl/status/status.h"

namespace rapt {

// Returns the message of a status, truncated if it is too long for a header.
std::string StatusMessage(const absl::Status& status);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_STATUS_MESSAGE_H_
