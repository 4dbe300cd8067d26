// The limit --max_json_bytes, for every protocol.
#ifndef RAPT_SERVER_PROTOCOLS_JSON_LIMITS_H_
#define RAPT_SERVER_PROTOCOLS_JSON_LIMITS_H_

#include <cstdint>

#include "absl/status/status.h"

namespace rapt {

// Return ResourceExhausted. `most`: the limit.
absl::Status RequestHasTooMuchJson(int64_t bytes, int64_t most);
absl::Status AnswerHasTooMuchJson(int64_t most);

}  // namespace rapt

#endif  // RAPT_SERVER_PROTOCOLS_JSON_LIMITS_H_
