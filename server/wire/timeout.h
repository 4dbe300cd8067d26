#ifndef RAPT_SERVER_WIRE_TIMEOUT_H_
#define RAPT_SERVER_WIRE_TIMEOUT_H_

#include <chrono>
#include <optional>

#include "absl/strings/string_view.h"

namespace rapt {

inline constexpr char kTimeoutHeader[] = "grpc-timeout";
inline constexpr char kTimeoutFormat[] = "it must be 1 to 8 digits and one of H, M, S, m, u, n";

// Parses the value of kTimeoutHeader, such as "500m". Returns nullopt if it is invalid.
std::optional<std::chrono::nanoseconds> ParseTimeout(absl::string_view digits);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_TIMEOUT_H_
