#include "client/http/connection.h"

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"

namespace rapt::client {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxHeadBytes = 64 * 1024;
constexpr size_t kMaxBodyBytes = size_t{4} << 30;
constexpr size_t kMaxPlaces = 64;
constexpr size_t kMaxErrorBytes = 512;  // of a body that is not JSON

// Returns the text of {"error": "..."}, or the begin of the body.
std::string ErrorIn(const std::string& body) {
  google::protobuf::Struct json;
  if (google::protobuf::util::JsonStringToMessage(body, &json).ok()) {
    const auto error = json.fields().find("error");
    if (error != json.fields().end()) return error->second.string_value();
  }
  return body.substr(0, kMaxErrorBytes);
}

absl::StatusCode CodeOf(int status) {
  switch (status) {
    case 400:
      return absl::StatusCode::kInvalidArgument;
    case 401:
      return absl::StatusCode::kUnauthenticated;
    case 403:
      return absl::StatusCode::kPermissionDenied;
    case 404:
    case 405:
      return absl::StatusCode::kNotFound;
    case 409:
      return absl::StatusCode::kAborted;
    case 408:
    case 413:
    case 429:
      return absl::StatusCode::kResourceExhausted;
    case 499:
      return absl::StatusCode::kCancelled;
    case 501:
      return absl::StatusCode::kUnimplemented;
    case 503:
      return absl::StatusCode::kUnavailable;
    case 504:
      return absl::StatusCode::kDeadlineExceeded;
    default:
      return status < 500 ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kInternal;
  }
}

absl::Status Malformed(absl::string_view why) {
  return absl::InternalError(absl::StrCat("malformed response from server: ", why));
}

}  // namespace

absl::string_view HttpResponse::Value(absl::string_view name) const {
  for (size_t begin = head.find("\r\n"); begin != std::string::npos;) {
    begin += 2;
    const size_t end = head.find("\r\n", begin);
    absl::string_view line = absl::string_view(head).substr(begin, end - begin);
    if (absl::ConsumePrefix(&line, name) && absl::ConsumePrefix(&line, ":")) {
      return absl::StripAsciiWhitespace(line);
    }
    begin = end;
  }
  return "";
}

absl::Status StatusOf(const HttpResponse& response) {
  if (response.status / 100 == 2) return absl::OkStatus();
  return absl::Status(CodeOf(response.status), ErrorIn(response.body));
}

void HttpConnection::FreeSsl::operator()(SSL* ssl) const { SSL_free(ssl); }

HttpConnection::~HttpConnection() = default;

void HttpConnection::Start(std::string head, std::vector<iovec> body) {
  head_ = std::move(head);
  out_ = std::move(body);
  out_.insert(out_.begin(), iovec{head_.data(), head_.size()});
  sent_places_ = sent_bytes_ = 0;
  has_head_ = false;
  received_ = 0;
  response_ = {};
  status_ = absl::OkStatus();
  if (IsClosed()) Close();
  state_ = socket_.get() >= 0 ? State::kSending : State::kConnecting;
}

// Whether the server has closed the idle connection.
bool HttpConnection::IsClosed() const {
  pollfd ended = {socket_.get(), POLLRDHUP, 0};
  return poll(&ended, 1, 0) != 0;
}

HttpConnection::Wait HttpConnection::Continue() {
  while (state_ != State::kIdle) {
    const absl::StatusOr<Wait> wait = Advance();
    if (wait.ok() && *wait == Wait::kNothing) continue;
    if (wait.ok()) return *wait;
    Close();
    status_ = wait.status();
  }
  return Wait::kNothing;
}

absl::StatusOr<HttpConnection::Wait> HttpConnection::Advance() {
  switch (state_) {
    case State::kConnecting:
      return Connect();
    case State::kShaking:
      return Shake();
    case State::kSending:
      return Send();
    case State::kReceiving:
      return Receive();
    case State::kIdle:
      break;
  }
  return Wait::kNothing;
}

absl::Status HttpConnection::Broken() const {
  return absl::UnavailableError(
      absl::StrCat(target_.address(), ": the server closed the connection"));
}

// Begins to connect. Sets errno if it returns false.
bool HttpConnection::Open() {
  const HttpTarget::Name& name = target_.names()[name_];
  socket_ = Descriptor(
      socket(name.bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
  const int on = 1;
  setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return connect(socket_.get(), reinterpret_cast<const sockaddr*>(&name.bytes), name.size) == 0 ||
         errno == EINPROGRESS;
}

// Ends the request if the target has no further name.
absl::StatusOr<HttpConnection::Wait> HttpConnection::TryNextName() {
  const int error = errno;
  socket_ = Descriptor();
  name_ = (name_ + 1) % target_.names().size();
  if (name_ != 0) return Wait::kNothing;
  return absl::UnavailableError(absl::StrCat(target_.address(), ": ", std::strerror(error)));
}

absl::StatusOr<HttpConnection::Wait> HttpConnection::Connect() {
  if (socket_.get() < 0 && !Open()) return TryNextName();
  pollfd ready = {socket_.get(), POLLOUT, 0};
  if (poll(&ready, 1, 0) == 0) return Wait::kWriting;
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  errno = error;
  if (error != 0) return TryNextName();
  state_ = State::kSending;
  if (target_.tls() != nullptr) BeginTls();
  return Wait::kNothing;
}

void HttpConnection::BeginTls() {
  state_ = State::kShaking;
  tls_.reset(SSL_new(target_.tls()));
  SSL_set_fd(tls_.get(), socket_.get());
  SSL_set_connect_state(tls_.get());
  const char* const name = target_.server_name().c_str();
  if (X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(tls_.get()), name) == 1) return;
  ERR_clear_error();
  SSL_set1_host(tls_.get(), name);
  SSL_set_tlsext_host_name(tls_.get(), name);
}

absl::StatusOr<HttpConnection::Wait> HttpConnection::Shake() {
  ERR_clear_error();
  Wait wait = Wait::kNothing;
  const int result = SSL_do_handshake(tls_.get());
  if (result == 1) {
    state_ = State::kSending;
    return wait;
  }
  if (ResultOfTls(result, wait) < 0) return wait;
  return absl::UnavailableError(absl::StrCat(
      target_.address(), ": no TLS, or one side does not trust the other's certificate"));
}

absl::StatusOr<HttpConnection::Wait> HttpConnection::Send() {
  while (sent_places_ < out_.size()) {
    if (sent_bytes_ == out_[sent_places_].iov_len) {
      ++sent_places_;
      sent_bytes_ = 0;
      continue;
    }
    Wait wait = Wait::kNothing;
    ssize_t count = Write(wait);
    if (count < 0) return wait;
    // The server may have responded before it closed the connection.
    if (count == 0) break;
    while (count > 0) {
      const size_t rest = out_[sent_places_].iov_len - sent_bytes_;
      if (static_cast<size_t>(count) < rest) {
        sent_bytes_ += static_cast<size_t>(count);
        break;
      }
      count -= static_cast<ssize_t>(rest);
      ++sent_places_;
      sent_bytes_ = 0;
    }
  }
  state_ = State::kReceiving;
  return Wait::kNothing;
}

absl::StatusOr<HttpConnection::Wait> HttpConnection::Receive() {
  std::string& part = has_head_ ? response_.body : response_.head;
  if (!has_head_) part.resize(received_ + 4096);
  Wait wait = Wait::kNothing;
  const ssize_t count = Read(part.data() + received_, part.size() - received_, wait);
  if (!has_head_) part.resize(received_ + static_cast<size_t>(std::max<ssize_t>(count, 0)));
  if (count < 0) return wait;
  if (count == 0) return Broken();
  received_ += static_cast<size_t>(count);
  if (!has_head_) {
    RAPT_RETURN_IF_ERROR(OnHead());
  }
  if (!has_head_ || received_ < response_.body.size()) return Wait::kNothing;
  state_ = State::kIdle;
  if (absl::EqualsIgnoreCase(response_.Value("connection"), "close")) Close();
  return Wait::kNothing;
}

// Reads the head, once it is complete, and moves what follows it into the body.
absl::Status HttpConnection::OnHead() {
  std::string& head = response_.head;
  const size_t end = head.find("\r\n\r\n");
  if (end == std::string::npos) {
    if (head.size() <= kMaxHeadBytes) return absl::OkStatus();
    return Malformed("the head is too long");
  }
  std::string rest = head.substr(end + 4);
  head.resize(end + 2);
  for (size_t i = 0; i < head.size();) {  // names to lower case
    const size_t next = std::min(head.find("\r\n", i), head.size());
    const size_t colon = std::min(head.find(':', i), next);
    for (; i < colon; ++i) head[i] = absl::ascii_tolower(static_cast<unsigned char>(head[i]));
    i = next + 2;
  }
  if (!absl::StartsWith(head, "http/1.") && !absl::StartsWith(head, "HTTP/1.")) {
    return Malformed("it is not HTTP/1.1");
  }
  if (!absl::SimpleAtoi(absl::string_view(head).substr(std::min<size_t>(9, head.size()), 3),
                        &response_.status)) {
    return Malformed("it has no status");
  }
  size_t length = 0;
  if (!absl::SimpleAtoi(response_.Value("content-length"), &length) || length > kMaxBodyBytes) {
    return Malformed("its Content-Length is missing or too large");
  }
  if (rest.size() > length) return Malformed("it is longer than its Content-Length");
  received_ = rest.size();
  response_.body = std::move(rest);
  response_.body.resize(length);
  has_head_ = true;
  return absl::OkStatus();
}

ssize_t HttpConnection::ResultOfTls(int result, Wait& wait) {
  switch (SSL_get_error(tls_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      wait = Wait::kReading;
      return -1;
    case SSL_ERROR_WANT_WRITE:
      wait = Wait::kWriting;
      return -1;
    default:
      return 0;
  }
}

ssize_t HttpConnection::Read(char* place, size_t size, Wait& wait) {
  if (tls_ != nullptr) {
    ERR_clear_error();
    size_t count = 0;
    const int result = SSL_read_ex(tls_.get(), place, size, &count);
    return result == 1 ? static_cast<ssize_t>(count) : ResultOfTls(result, wait);
  }
  const ssize_t count = recv(socket_.get(), place, size, 0);
  if (count >= 0) return count;
  if (errno != EAGAIN && errno != EINTR) return 0;
  wait = Wait::kReading;
  return -1;
}

ssize_t HttpConnection::Write(Wait& wait) {
  iovec first = out_[sent_places_];
  first.iov_base = static_cast<char*>(first.iov_base) + sent_bytes_;
  first.iov_len -= sent_bytes_;
  if (tls_ != nullptr) {
    ERR_clear_error();
    size_t count = 0;
    const int result = SSL_write_ex(tls_.get(), first.iov_base, first.iov_len, &count);
    return result == 1 ? static_cast<ssize_t>(count) : ResultOfTls(result, wait);
  }
  std::vector<iovec> places(out_.begin() + static_cast<ptrdiff_t>(sent_places_), out_.end());
  places[0] = first;
  msghdr message = {};
  message.msg_iov = places.data();
  message.msg_iovlen = std::min(places.size(), kMaxPlaces);
  const ssize_t count = sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
  if (count >= 0) return count;
  if (errno != EAGAIN && errno != EINTR) return 0;
  wait = Wait::kWriting;
  return -1;
}

absl::StatusOr<HttpResponse> HttpConnection::TakeResponse() {
  if (!status_.ok()) return status_;
  return std::move(response_);
}

void HttpConnection::Close() {
  tls_.reset();
  socket_ = Descriptor();
  state_ = State::kIdle;
}

absl::StatusOr<HttpResponse> HttpConnection::Exchange(std::string head, std::vector<iovec> body,
                                                      std::chrono::nanoseconds timeout) {
  const Clock::time_point end = Clock::now() + timeout;
  Start(std::move(head), std::move(body));
  for (Wait wait = Continue(); wait != Wait::kNothing; wait = Continue()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
    pollfd ready = {descriptor(), static_cast<short>(wait == Wait::kReading ? POLLIN : POLLOUT), 0};
    if (left.count() > 0 && poll(&ready, 1, static_cast<int>(left.count())) != 0) continue;
    Close();
    return absl::DeadlineExceededError(
        absl::StrCat(target_.address(), ": no response within the timeout"));
  }
  return TakeResponse();
}

}  // namespace rapt::client
