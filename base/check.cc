#include "base/check.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace rapt {
namespace {

constexpr int kTimeoutMs = 1000;

}  // namespace

void CheckFailed(const char* file, int line, const char* condition, const char* message) {
  char text[1024];  // a pipe that is ready takes this many bytes without blocking
  const int length = std::snprintf(text, sizeof(text), "%s:%d: check failed: %s: %s\n", file, line,
                                   condition, message);
  const size_t bytes = std::min(static_cast<size_t>(length), sizeof(text) - 1);
  pollfd ready = {STDERR_FILENO, POLLOUT, 0};
  if (poll(&ready, 1, kTimeoutMs) > 0) {
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text, bytes);
  }
  std::abort();
}

}  // namespace rapt
