#include "tests/support/raw_http2.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "base/mutex.h"
#include "tests/support/loopback.h"

namespace rapt::test {
namespace {

constexpr size_t kFrameHead = 9;
constexpr std::chrono::seconds kPatience{60};

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

// Blocks until the socket has one of the events. Returns false if it has none in this time.
bool WaitFor(int socket, short events, std::chrono::milliseconds time = kPatience) {
  pollfd poll_for = {socket, events, 0};
  return poll(&poll_for, 1, static_cast<int>(time.count())) > 0;
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

// OpenSSL's client. A session is not thread-safe.
struct RawHttp2::Tls {
  explicit Tls(int socket)
      : context(SSL_CTX_new(TLS_client_method()), SSL_CTX_free),
        ssl(SSL_new(context.get()), SSL_free) {
    std::signal(SIGPIPE, SIG_IGN);  // OpenSSL writes without MSG_NOSIGNAL
    SSL_set_alpn_protos(ssl.get(), reinterpret_cast<const unsigned char*>("\2h2"), 3);
    SSL_set_mode(ssl.get(), SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_set_fd(ssl.get(), socket);
    SSL_connect(ssl.get());
  }

  // Calls SSL_read_ex() or SSL_write_ex().
  template <typename Bytes, typename Transfer>
  std::optional<size_t> Try(Transfer transfer, Bytes* bytes, size_t count) {
    MutexLock lock(mutex);
    ERR_clear_error();
    size_t done = 0;
    if (transfer(ssl.get(), bytes, count, &done) == 1) return done;
    const int error = SSL_get_error(ssl.get(), 0);
    if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE) return 0;
    return std::nullopt;
  }

  Mutex mutex;
  const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context;
  const std::unique_ptr<SSL, void (*)(SSL*)> ssl;
};

RawHttp2::RawHttp2(const std::string& address, Security security, const std::string& from)
    : connection_(ConnectTo(address, from)) {
  EXPECT_EQ(nghttp2_hd_inflate_new(&inflater_), 0);
  if (security == Security::kTls) {
    const timeval patience = {kPatience.count(), 0};
    setsockopt(connection_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    tls_ = std::make_unique<Tls>(connection_);
  }
  const int on = 1;
  EXPECT_EQ(setsockopt(connection_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)), 0);
  EXPECT_EQ(fcntl(connection_, F_SETFL, O_NONBLOCK), 0);
  Send(Preface());
}

RawHttp2::~RawHttp2() {
  nghttp2_hd_inflate_del(inflater_);
  close(connection_);
}

std::optional<size_t> RawHttp2::TryRead(char* bytes, size_t count) {
  if (tls_ != nullptr) return tls_->Try(SSL_read_ex, bytes, count);
  const ssize_t n = recv(connection_, bytes, count, 0);
  if (n > 0) return static_cast<size_t>(n);
  if (n < 0 && errno == EAGAIN) return 0;
  return std::nullopt;
}

std::optional<size_t> RawHttp2::TryWrite(absl::string_view bytes) {
  if (tls_ != nullptr) return tls_->Try(SSL_write_ex, bytes.data(), bytes.size());
  const ssize_t n = send(connection_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (n >= 0) return static_cast<size_t>(n);
  if (errno == EAGAIN) return 0;
  return std::nullopt;
}

bool RawHttp2::Send(const std::string& bytes) {
  for (absl::string_view left = bytes; !left.empty();) {
    const std::optional<size_t> n = TryWrite(left);
    if (!n) return false;
    if (*n == 0 && !WaitFor(connection_, POLLOUT)) return false;
    left.remove_prefix(*n);
  }
  return true;
}

bool RawHttp2::HasUnread() const {
  char byte;
  return recv(connection_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
}

size_t RawHttp2::SendWithoutWaiting(absl::string_view bytes) {
  absl::string_view left = bytes;
  while (!left.empty()) {
    const size_t n = TryWrite(left).value_or(0);
    if (n == 0) break;
    left.remove_prefix(n);
  }
  return bytes.size() - left.size();
}

void RawHttp2::OpenCall(uint32_t stream, const Headers& headers, uint8_t flags) {
  Send(Frame(NGHTTP2_HEADERS, flags | NGHTTP2_FLAG_END_HEADERS, stream, HeaderBlock(headers)));
}

void RawHttp2::SendData(uint32_t stream, const std::string& bytes, bool ends) {
  Send(Frame(NGHTTP2_DATA, ends ? NGHTTP2_FLAG_END_STREAM : NGHTTP2_FLAG_NONE, stream, bytes));
}

void RawHttp2::Discard(std::chrono::milliseconds time) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end = Clock::now() + time;
  std::string bytes(16 * 1024, '\0');
  for (Clock::time_point now = Clock::now(); now < end; now = Clock::now()) {
    const std::optional<size_t> n = TryRead(bytes.data(), bytes.size());
    if (!n) return;
    if (*n == 0)
      WaitFor(connection_, POLLIN, std::chrono::ceil<std::chrono::milliseconds>(end - now));
  }
}

bool RawHttp2::ReadExactly(size_t count, std::string& bytes) {
  bytes.resize(count);
  for (size_t have = 0; have < count;) {
    const std::optional<size_t> n = TryRead(bytes.data() + have, count - have);
    if (!n) return false;
    if (*n == 0 && !WaitFor(connection_, POLLIN)) {
      ADD_FAILURE() << "the server is silent";
      return false;
    }
    have += *n;
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
