// A gRPC call over a raw socket, which can stop in the middle of a message.
#ifndef RAPT_TESTS_SUPPORT_RAW_CALL_H_
#define RAPT_TESTS_SUPPORT_RAW_CALL_H_

#include <cstdint>
#include <map>
#include <string>

#include "tests/support/raw_http2.h"

namespace rapt::test {

// HTTP/2's default maximum frame size.
inline constexpr uint32_t kMaxFrameBytes = 16384;

// Everything that a client sends in a call with one message: the bytes that open the connection and
// the call, then those of the message. `path` is "/inference.GRPCInferenceService/ModelInfer".
std::string OpeningBytes(const std::string& address, const std::string& path,
                         const std::map<std::string, std::string>& headers = {});
std::string MessageBytes(const std::string& message, uint32_t frame_bytes = kMaxFrameBytes);

// One call on a separate connection, which is closed on destruction even if the call is open.
class RawCall {
 public:
  // Sends the headers.
  RawCall(const std::string& address, const std::string& path,
          const std::map<std::string, std::string>& headers = {});

  // Announces a message of `message_bytes` and sends the first `sent_bytes` of it.
  // REQUIRES: they fit into the initial window of a stream.
  void SendPart(uint32_t message_bytes, uint32_t sent_bytes);
  // Sends a whole message in frames of `frame_bytes` and half-closes. REQUIRES: as above.
  void SendMessage(const std::string& message, uint32_t frame_bytes = kMaxFrameBytes);
  // Half-closes.
  void HalfClose();

  // Blocks until the server ends the call. Returns the gRPC status code, or -1 if the server reset
  // the stream or closed the connection without one.
  int WaitForStatus();

 private:
  RawHttp2 connection_;
};

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_RAW_CALL_H_
