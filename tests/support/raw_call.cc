#include "tests/support/raw_call.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "tests/support/loopback.h"

namespace rapt::test {
namespace {

// HTTP/2, RFC 9113.
enum FrameType : uint8_t { kData = 0, kHeaders = 1, kResetStream = 3, kSettings = 4, kGoAway = 7 };
constexpr uint8_t kEndStream = 0x1;
constexpr uint8_t kEndHeaders = 0x4;
constexpr uint32_t kStream = 1;
constexpr size_t kFrameHeaderBytes = 9;

// HPACK: a literal without indexing and without Huffman coding.
void AppendHeader(const std::string& name, const std::string& value, std::string& block) {
  block += '\0';
  block += static_cast<char>(name.size());
  block += name;
  block += static_cast<char>(value.size());
  block += value;
}

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, const std::string& payload) {
  const auto size = static_cast<uint32_t>(payload.size());
  std::string frame;
  for (int shift = 16; shift >= 0; shift -= 8) frame += static_cast<char>(size >> shift);
  frame += static_cast<char>(type);
  frame += static_cast<char>(flags);
  for (int shift = 24; shift >= 0; shift -= 8) frame += static_cast<char>(stream >> shift);
  return frame + payload;
}

// A message of `message_bytes` that begins with `bytes`.
std::string DataFrames(uint32_t message_bytes, const std::string& bytes, uint32_t frame_bytes) {
  std::string data(1, '\0');  // not compressed
  for (int shift = 24; shift >= 0; shift -= 8) data += static_cast<char>(message_bytes >> shift);
  data += bytes;
  std::string frames;
  for (size_t begin = 0; begin < data.size(); begin += frame_bytes) {
    frames += Frame(kData, 0, kStream, data.substr(begin, frame_bytes));
  }
  return frames;
}

bool ReadExactly(int connection, size_t count, std::string& bytes) {
  bytes.resize(count);
  for (size_t have = 0; have < count;) {
    const ssize_t n = read(connection, bytes.data() + have, count - have);
    if (n <= 0) return false;
    have += static_cast<size_t>(n);
  }
  return true;
}

}  // namespace

std::string OpeningBytes(const std::string& address, const std::string& path,
                         const std::map<std::string, std::string>& headers) {
  std::string block;
  AppendHeader(":method", "POST", block);
  AppendHeader(":scheme", "http", block);
  AppendHeader(":path", path, block);
  AppendHeader(":authority", address, block);
  AppendHeader("content-type", "application/grpc", block);
  AppendHeader("te", "trailers", block);
  for (const auto& [name, value] : headers) AppendHeader(name, value, block);
  return "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(kSettings, 0, 0, "") +
         Frame(kHeaders, kEndHeaders, kStream, block);
}

std::string MessageBytes(const std::string& message, uint32_t frame_bytes) {
  return DataFrames(static_cast<uint32_t>(message.size()), message, frame_bytes) +
         Frame(kData, kEndStream, kStream, "");
}

RawCall::RawCall(const std::string& address, const std::string& path,
                 const std::map<std::string, std::string>& headers)
    : connection_(ConnectTo(address)) {
  Send(OpeningBytes(address, path, headers));
}

RawCall::~RawCall() { close(connection_); }

void RawCall::SendPart(uint32_t message_bytes, uint32_t sent_bytes) {
  Send(DataFrames(message_bytes, std::string(sent_bytes, '\0'), kMaxFrameBytes));
}

void RawCall::SendMessage(const std::string& message, uint32_t frame_bytes) {
  Send(MessageBytes(message, frame_bytes));
}

void RawCall::HalfClose() { Send(Frame(kData, kEndStream, kStream, "")); }

int RawCall::WaitForStatus() {
  for (std::string header, payload; ReadExactly(connection_, kFrameHeaderBytes, header);) {
    const auto byte = [&](int i) { return static_cast<uint32_t>(static_cast<uint8_t>(header[i])); };
    const uint32_t size = byte(0) << 16 | byte(1) << 8 | byte(2);
    if (!ReadExactly(connection_, size, payload)) return -1;
    const uint32_t type = byte(3);
    if (type == kResetStream || type == kGoAway) return -1;
    // gRPC sends the name as a literal the first time, then the length of the value and the value.
    const std::string name = "grpc-status";
    const size_t place = payload.find(name);
    if (type == kHeaders && place != std::string::npos) {
      const auto digits = static_cast<size_t>(payload[place + name.size()]);
      return std::atoi(payload.substr(place + name.size() + 1, digits).c_str());
    }
  }
  return -1;
}

void RawCall::Send(const std::string& bytes) {
  send(connection_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

}  // namespace rapt::test
