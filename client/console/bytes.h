// Numbers of bytes for display.
#ifndef RAPT_CLIENT_CONSOLE_BYTES_H_
#define RAPT_CLIENT_CONSOLE_BYTES_H_

#include <cstdint>
#include <string>

namespace rapt {

// "256 MiB", "-1.5 GiB"
std::string HumanBytes(int64_t bytes);

}  // namespace rapt

#endif  // RAPT_CLIENT_CONSOLE_BYTES_H_
