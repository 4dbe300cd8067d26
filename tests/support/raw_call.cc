#include "tests/support/raw_call.h"

#include <cstdlib>
#include <optional>

namespace rapt::test {
namespace {

constexpr uint32_t kStream = 1;

// A message of `message_bytes` that begins with `bytes`.
std::string DataFrames(uint32_t message_bytes, const std::string& bytes, uint32_t frame_bytes) {
  const std::string data = Prefixed(bytes, message_bytes);
  std::string frames;
  for (size_t begin = 0; begin < data.size(); begin += frame_bytes) {
    frames += Frame(NGHTTP2_DATA, NGHTTP2_FLAG_NONE, kStream, data.substr(begin, frame_bytes));
  }
  return frames;
}

}  // namespace

std::string OpeningBytes(const std::string& address, const std::string& path,
                         const std::map<std::string, std::string>& headers) {
  Headers all = headers;
  all[":authority"] = address;
  return Preface() + Frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, kStream,
                           HeaderBlock(CallHeaders(path, all)));
}

std::string MessageBytes(const std::string& message, uint32_t frame_bytes) {
  return DataFrames(static_cast<uint32_t>(message.size()), message, frame_bytes) +
         Frame(NGHTTP2_DATA, NGHTTP2_FLAG_END_STREAM, kStream, "");
}

RawCall::RawCall(const std::string& address, const std::string& path,
                 const std::map<std::string, std::string>& headers)
    : connection_(address) {
  Headers all = headers;
  all[":authority"] = address;
  connection_.OpenCall(kStream, CallHeaders(path, all));
}

void RawCall::SendPart(uint32_t message_bytes, uint32_t sent_bytes) {
  connection_.Send(DataFrames(message_bytes, std::string(sent_bytes, '\0'), kMaxFrameBytes));
}

void RawCall::SendMessage(const std::string& message, uint32_t frame_bytes) {
  connection_.Send(MessageBytes(message, frame_bytes));
}

void RawCall::HalfClose() {
  connection_.Send(Frame(NGHTTP2_DATA, NGHTTP2_FLAG_END_STREAM, kStream, ""));
}

int RawCall::WaitForStatus() {
  for (;;) {
    const std::optional<RawHttp2::Received> frame = connection_.Read();
    if (!frame || frame->type == NGHTTP2_RST_STREAM || frame->type == NGHTTP2_GOAWAY) return -1;
    const auto status = frame->headers.find("grpc-status");
    if (status != frame->headers.end()) return std::atoi(status->second.c_str());
  }
}

}  // namespace rapt::test
