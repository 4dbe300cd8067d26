// A gRPC call written by hand, to do what no client library does: stop in the middle.
#ifndef RAPT_TESTS_SUPPORT_RAW_CALL_H_
#define RAPT_TESTS_SUPPORT_RAW_CALL_H_

#include <cstdint>
#include <map>
#include <string>

namespace rapt::test {

// Of HTTP/2, where nobody asks for more.
inline constexpr uint32_t kMaxFrameBytes = 16384;

// What opens a connection and a call on it, and what sends its only message: together all that a
// client ever says. `path` is "/inference.GRPCInferenceService/ModelInfer".
std::string OpeningBytes(const std::string& address, const std::string& path,
                         const std::map<std::string, std::string>& headers = {});
std::string MessageBytes(const std::string& message, uint32_t frame_bytes = kMaxFrameBytes);

// One call on a connection of its own; the connection is closed on destruction, whatever the call
// is doing then.
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
  // All of a message that fits into such a window, and no more comes; in frames of so many bytes.
  void SendMessage(const std::string& message, uint32_t frame_bytes = kMaxFrameBytes);
  // No more comes.
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
