// A gRPC call written by hand, to do what no client library does: stop in the middle.
#ifndef RAPT_TESTS_SUPPORT_RAW_CALL_H_
#define RAPT_TESTS_SUPPORT_RAW_CALL_H_

#include <cstdint>
#include <map>
#include <string>

namespace rapt::test {

// HTTP/2's default maximum frame size.
inline constexpr uint32_t kMaxFrameBytes = 16384;

// The bytes that open a connection and a call, and those that send its only message: together all
// bytes that a client sends. `path` is "/inference.GRPCInferenceService/ModelInfer".
std::string OpeningBytes(const std::string& address, const std::string& path,
                         const std::map<std::string, std::string>& headers = {});
std::string MessageBytes(const std::string& message, uint32_t frame_bytes = kMaxFrameBytes);

// One call on a separate connection, which is closed on destruction even if the call is open.
class RawCall {
 public:
  // Sends the headers.
  RawCall(const std::string& address, const std::string& path,
          const std::map<std::string, std::string>& headers = {});
  ~RawCall();
  RawCall(const RawCall&) = delete;
  RawCall& operator=(const RawCall&) = delete;

  // Announces a message of `message_bytes` and sends that many of them, at most as many as fit into
  // a fresh stream's window.
  void SendPart(uint32_t message_bytes, uint32_t sent_bytes);
  // Sends a whole message that fits into such a window, in frames of this size, and half-closes.
  void SendMessage(const std::string& message, uint32_t frame_bytes = kMaxFrameBytes);
  // Half-closes.
  void HalfClose();

  // Blocks until the server has ended the call: its gRPC status code, or -1 where it has reset the
  // stream or closed the connection without one.
  int WaitForStatus();

 private:
  void Send(const std::string& bytes);

  int connection_;
};

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_RAW_CALL_H_
