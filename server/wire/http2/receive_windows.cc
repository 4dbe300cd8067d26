#include "server/wire/http2/receive_windows.h"

#include <algorithm>

namespace rapt {
namespace {

// The window for bytes that are not admitted, of all streams together. Admitted bytes come on top.
constexpr int64_t kConnectionWindow = 1 << 20;

// The most bytes of an admitted message that a window lets through at once: they stay in the
// processor's cache until they are read. A window for the whole message is slower.
constexpr int64_t kStep = 512 * 1024;

}  // namespace

int64_t ReceiveWindows::Grant(Stream& stream, int64_t window) {
  const int64_t wanted = std::min(stream.expected, kStep);
  int64_t more = 0;
  if (window < stream.expected && window <= wanted / 2) more = wanted - window;
  const int64_t credit = std::min(window + more, stream.expected);
  credit_ += credit - stream.credit;
  stream.credit = credit;
  return more;
}

void ReceiveWindows::SetUnadmitted(Stream& stream, int64_t bytes) {
  unadmitted_ += bytes - stream.unadmitted;
  stream.unadmitted = bytes;
}

void ReceiveWindows::Remove(const Stream& stream) {
  unadmitted_ -= stream.unadmitted;
  credit_ -= stream.credit;
}

int64_t ReceiveWindows::TopUp(int64_t window) const {
  // Calls that wait for memory leave room for those that do not. They hold no more than the windows
  // of their streams.
  const int64_t wanted = std::max(kConnectionWindow - unadmitted_, kInitial) + credit_;
  const int64_t missing = wanted - window;
  if (missing <= 0 || (missing < kConnectionWindow / 4 && window > wanted / 2)) return 0;
  return missing;
}

}  // namespace rapt
