#include "tests/support/raw_http2.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "tests/support/loopback.h"

namespace rapt::test {
namespace {

constexpr size_t kFrameHead = 9;
constexpr int kPatienceSeconds = 60;

// HPACK's integer with a prefix of 7 bits.
void AppendLength(size_t length, std::string& block) {
  constexpr size_t kMost = 127;
  if (length < kMost) {
    block += static_cast<char>(length);
    return;
  }
  block += static_cast<char>(kMost);
  for (length -= kMost; length >= 128; length /= 128) {
    block += static_cast<char>(length % 128 + 128);
  }
  block += static_cast<char>(length);
}

uint32_t NumberAt(const std::string& bytes, size_t offset, size_t count) {
  uint32_t number = 0;
  for (size_t i = offset; i < offset + count; ++i) {
    number = number << 8 | static_cast<uint8_t>(bytes.at(i));
  }
  return number;
}

Headers Inflate(nghttp2_hd_inflater* inflater, const std::string& block) {
  Headers headers;
  const auto* bytes = reinterpret_cast<const uint8_t*>(block.data());
  for (size_t left = block.size();;) {
    nghttp2_nv header;
    int flags = 0;
    const ssize_t used = nghttp2_hd_inflate_hd2(inflater, &header, &flags, bytes, left, 1);
    if (used < 0) break;
    bytes += used;
    left -= static_cast<size_t>(used);
    if ((flags & NGHTTP2_HD_INFLATE_EMIT) != 0) {
      headers[{reinterpret_cast<char*>(header.name), header.namelen}] = {
          reinterpret_cast<char*>(header.value), header.valuelen};
    }
    if ((flags & NGHTTP2_HD_INFLATE_FINAL) != 0 || (flags == 0 && left == 0)) break;
  }
  nghttp2_hd_inflate_end_headers(inflater);
  return headers;
}

}  // namespace

std::string BigEndian(uint32_t number) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(number >> shift);
  return bytes;
}

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, const std::string& payload) {
  std::string frame = BigEndian(static_cast<uint32_t>(payload.size())).substr(1);
  frame += static_cast<char>(type);
  frame += static_cast<char>(flags);
  return frame + BigEndian(stream) + payload;
}

std::string HeaderBlock(const Headers& headers) {
  std::string block;
  for (const auto& [name, value] : headers) {
    block += '\0';  // a literal without indexing
    AppendLength(name.size(), block);
    block += name;
    AppendLength(value.size(), block);
    block += value;
  }
  return block;
}

Headers CallHeaders(const std::string& path, const Headers& more) {
  Headers headers = more;
  headers.insert({{":method", "POST"},
                  {":scheme", "http"},
                  {":path", path},
                  {":authority", "localhost"},
                  {"content-type", "application/grpc"},
                  {"te", "trailers"}});
  return headers;
}

std::string Prefixed(const std::string& message, std::optional<uint32_t> announced) {
  return std::string(1, '\0') +
         BigEndian(announced.value_or(static_cast<uint32_t>(message.size()))) + message;
}

std::string Preface() {
  return NGHTTP2_CLIENT_MAGIC + Frame(NGHTTP2_SETTINGS, NGHTTP2_FLAG_NONE, 0, "");
}

uint32_t RawHttp2::Received::Number(size_t offset) const { return NumberAt(payload, offset, 4); }

RawHttp2::RawHttp2(const std::string& address) : connection_(ConnectTo(address)) {
  EXPECT_EQ(nghttp2_hd_inflate_new(&inflater_), 0);
  const timeval patience = {kPatienceSeconds, 0};
  setsockopt(connection_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  setsockopt(connection_, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  Send(Preface());
}

RawHttp2::~RawHttp2() {
  nghttp2_hd_inflate_del(inflater_);
  close(connection_);
}

bool RawHttp2::Send(const std::string& bytes) {
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t n = send(connection_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) return false;
    sent += static_cast<size_t>(n);
  }
  return true;
}

size_t RawHttp2::SendWithoutWaiting(absl::string_view bytes) {
  const ssize_t n = send(connection_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  return static_cast<size_t>(std::max<ssize_t>(n, 0));
}

void RawHttp2::OpenCall(uint32_t stream, const Headers& headers, uint8_t flags) {
  Send(Frame(NGHTTP2_HEADERS, flags | NGHTTP2_FLAG_END_HEADERS, stream, HeaderBlock(headers)));
}

void RawHttp2::SendData(uint32_t stream, const std::string& bytes, bool ends) {
  Send(Frame(NGHTTP2_DATA, ends ? NGHTTP2_FLAG_END_STREAM : NGHTTP2_FLAG_NONE, stream, bytes));
}

bool RawHttp2::ReadExactly(size_t count, std::string& bytes) {
  bytes.resize(count);
  for (size_t have = 0; have < count;) {
    const ssize_t n = read(connection_, bytes.data() + have, count - have);
    EXPECT_FALSE(n < 0 && errno == EAGAIN) << "the server is silent";
    if (n <= 0) return false;
    have += static_cast<size_t>(n);
  }
  return true;
}

std::optional<RawHttp2::Received> RawHttp2::Read() {
  std::string head;
  Received frame;
  if (!ReadExactly(kFrameHead, head)) return std::nullopt;
  frame.type = static_cast<uint8_t>(head[3]);
  frame.flags = static_cast<uint8_t>(head[4]);
  frame.stream = NumberAt(head, 5, 4);
  if (!ReadExactly(NumberAt(head, 0, 3), frame.payload)) return std::nullopt;
  if (frame.type == NGHTTP2_HEADERS) frame.headers = Inflate(inflater_, frame.payload);
  return frame;
}

std::optional<RawHttp2::Received> RawHttp2::ReadUntil(uint8_t type) {
  for (;;) {
    std::optional<Received> frame = Read();
    if (!frame || frame->type == type) return frame;
  }
}

Headers RawHttp2::ReadResponse(uint32_t stream) {
  for (;;) {
    const std::optional<Received> frame = Read();
    if (!frame) return {};
    if (frame->stream != stream) continue;
    if (frame->type == NGHTTP2_RST_STREAM) return {};
    if (frame->type == NGHTTP2_HEADERS && (frame->flags & NGHTTP2_FLAG_END_STREAM) != 0) {
      return frame->headers;
    }
  }
}

std::optional<uint32_t> RawHttp2::ReadGoAway() {
  const std::optional<Received> frame = ReadUntil(NGHTTP2_GOAWAY);
  if (!frame) return std::nullopt;
  return frame->Number(4);
}

}  // namespace rapt::test
