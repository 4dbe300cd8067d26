// The flow control of what a connection receives.
#ifndef RAPT_SERVER_WIRE_HTTP2_RECEIVE_WINDOWS_H_
#define RAPT_SERVER_WIRE_HTTP2_RECEIVE_WINDOWS_H_

#include <cstdint>

namespace rapt {

// Opens the windows of streams for messages whose memory is admitted, and that of the connection so
// that the other bytes of all streams together are bounded. Windows are passed as nghttp2 counts
// them, so that no error accumulates. Not thread-safe.
class ReceiveWindows {
 public:
  // Bytes that a caller may send on a stream before its message is admitted: 64 KiB of tensors and
  // the fields beside them need no further window, which would take a round trip.
  static constexpr int64_t kInitial = 68 * 1024;

  // The part of a stream.
  struct Stream {
    int64_t expected = 0;    // admitted bytes still to come
    int64_t unadmitted = 0;  // bytes that are held
    int64_t credit = 0;      // what the window lets through of the expected bytes
  };

  // Returns by how much to open the window of a stream for what it expects: 0, or a large step.
  int64_t Grant(Stream& stream, int64_t window);
  // The stream holds this many bytes that are not admitted yet.
  void SetUnadmitted(Stream& stream, int64_t bytes);
  // The stream is gone.
  void Remove(const Stream& stream);

  // Returns by how much to open the window of the connection: 0, or a large step.
  int64_t TopUp(int64_t window) const;

 private:
  int64_t unadmitted_ = 0;  // of all streams
  int64_t credit_ = 0;      // likewise
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_HTTP2_RECEIVE_WINDOWS_H_
