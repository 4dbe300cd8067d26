#include "server/wire/http/server.h"

#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>

#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/basic_parser.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/status.hpp>
#include <boost/optional.hpp>
#include <cerrno>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/descriptor.h"
#include "base/log.h"
#include "base/log_limit.h"
#include "server/wire/listening_sockets.h"

namespace rapt::http {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
using boost::system::error_code;
using Protocol = asio::generic::stream_protocol;

constexpr size_t kMaxHeadBytes = 8192;
constexpr size_t kMaxHeaders = 100;

// A close with unread bytes resets the connection, and the peer may lose the response. Therefore up
// to this number of bytes is read and discarded first.
constexpr size_t kMaxDroppedBytes = 64 * 1024;

// Pause while the process has no descriptor left; connections wait meanwhile.
constexpr std::chrono::milliseconds kAcceptPause{100};

// Parses a head that arrives in parts.
class HeadParser final : public beast::http::basic_parser</*isRequest=*/true> {
 public:
  HeadParser() { body_limit(boost::none); }

  const Request& request() const { return request_; }
  // Whether the connection can serve another request. REQUIRES: the head is complete.
  bool keeps_alive() const { return version_ == 11 && keep_alive() && !has_body(); }

 private:
  using View = beast::string_view;

  bool has_body() const { return !is_done(); }

  void on_request_impl(beast::http::verb, View method, View target, int version,
                       error_code&) override {
    request_.method = std::string(method);
    request_.target = std::string(target);
    version_ = version;
  }
  void on_field_impl(beast::http::field, View name, View value, error_code& error) override {
    if (request_.headers.size() == kMaxHeaders) error = beast::http::error::header_limit;
    request_.headers.push_back({std::string(name), std::string(value)});
  }
  void on_response_impl(int, View, int, error_code&) override {}
  void on_header_impl(error_code&) override {}
  void on_body_init_impl(const boost::optional<uint64_t>&, error_code&) override {}
  size_t on_body_impl(View, error_code&) override { return 0; }
  void on_chunk_header_impl(uint64_t, View, error_code&) override {}
  size_t on_chunk_body_impl(uint64_t, View, error_code&) override { return 0; }
  void on_finish_impl(error_code&) override {}

  Request request_;
  int version_ = 0;
};

std::string HeadOf(const Response& response, bool keeps_alive) {
  const auto status = static_cast<beast::http::status>(response.status);
  std::string head = absl::StrCat("HTTP/1.1 ", response.status, " ",
                                  std::string(beast::http::obsolete_reason(status)),
                                  "\r\nContent-Type: ", response.content_type,
                                  "\r\nContent-Length: ", response.body.size(), "\r\n");
  for (const Header& header : response.headers) {
    absl::StrAppend(&head, header.name, ": ", header.value, "\r\n");
  }
  if (!keeps_alive) head += "Connection: close\r\n";
  return head + "\r\n";
}

class Session;

// The open sessions, in the order in which they were opened or have responded.
class Sessions {
 public:
  using List = std::list<std::shared_ptr<Session>>;

  explicit Sessions(size_t max) : max_(max) {}

  // Closes the first one if there are too many.
  List::iterator Add(std::shared_ptr<Session> session);
  void MoveToEnd(List::iterator session) { open_.splice(open_.end(), open_, session); }
  void Remove(List::iterator session) { open_.erase(session); }

 private:
  const size_t max_;
  List open_;
};

// One connection. Its pending operations keep it alive; it is in `sessions` until it is closed. An
// operation may have succeeded just before Close(): its completion checks for that.
class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(Protocol::socket socket, const Handler& handler, const ServerLimits& limits,
          Sessions& sessions)
      : handler_(handler),
        limits_(limits),
        sessions_(sessions),
        socket_(std::move(socket)),
        deadline_(socket_.get_executor()),
        parser_(boost::in_place_init) {}

  void Start() {
    place_ = sessions_.Add(shared_from_this());
    SetDeadline(limits_.patience);
    Read();
  }

  void Close() {
    if (!socket_.is_open()) return;
    error_code ignored;
    socket_.close(ignored);
    deadline_.cancel();
    sessions_.Remove(place_);
  }

 private:
  void SetDeadline(std::chrono::milliseconds time) {
    deadline_.expires_after(time);
    deadline_.async_wait([this, self = shared_from_this()](const error_code& error) {
      // The previous deadline may have passed just before it was replaced.
      if (!error && deadline_.expiry() <= asio::steady_timer::clock_type::now()) Close();
    });
  }

  void Read() {
    socket_.async_read_some(asio::buffer(buffer_) + received_,
                            [this, self = shared_from_this()](const error_code& error, size_t n) {
                              if (error || !socket_.is_open()) return Close();
                              // The first bytes after a pause between requests.
                              if (received_ == 0) SetDeadline(limits_.patience);
                              received_ += n;
                              Parse();
                            });
  }

  void Parse() {
    error_code error;
    parsed_ += parser_->put(asio::buffer(buffer_.data() + parsed_, received_ - parsed_), error);
    if (error == beast::http::error::need_more && received_ < buffer_.size()) return Read();
    if (!error) return Write(Handle(parser_->request()), parser_->keeps_alive());
    const bool too_large =
        error == beast::http::error::need_more || error == beast::http::error::header_limit;
    Write(too_large ? Response{.status = 431,
                               .body = absl::StrCat("the head must have at most ", kMaxHeadBytes,
                                                    " bytes and ", kMaxHeaders, " headers\n")}
                    : Response{.status = 400,
                               .body = absl::StrCat("malformed request: ", error.message(), "\n")},
          /*keeps_alive=*/false);
  }

  Response Handle(const Request& request) const {
    try {
      return handler_(request);
    } catch (const std::exception& exception) {
      Log(LogLevel::kError, "HTTP request failed", {{"reason", exception.what()}});
      return {.status = 500, .body = "internal error\n"};
    }
  }

  void Write(Response response, bool keeps_alive) {
    SetDeadline(limits_.patience);
    head_ = HeadOf(response, keeps_alive);
    body_ = std::move(response.body);
    if (parser_->request().method == "HEAD") body_.clear();
    const std::array<asio::const_buffer, 2> bytes = {asio::buffer(head_), asio::buffer(body_)};
    asio::async_write(
        socket_, bytes,
        [this, keeps_alive, self = shared_from_this()](const error_code& error, size_t) {
          if (error || !socket_.is_open()) return Close();
          keeps_alive ? AwaitNext() : EndWriting();
        });
  }

  // Continues with the bytes that have arrived after the request.
  void AwaitNext() {
    body_ = std::string();
    std::memmove(buffer_.data(), buffer_.data() + parsed_, received_ - parsed_);
    received_ -= parsed_;
    parsed_ = 0;
    parser_.emplace();
    sessions_.MoveToEnd(place_);
    SetDeadline(received_ > 0 ? limits_.patience : limits_.idle);
    received_ > 0 ? Parse() : Read();
  }

  void EndWriting() {
    error_code ignored;
    socket_.shutdown(Protocol::socket::shutdown_send, ignored);
    SetDeadline(limits_.patience);
    Drop();
  }

  void Drop() {
    socket_.async_read_some(asio::buffer(buffer_),
                            [this, self = shared_from_this()](const error_code& error, size_t n) {
                              dropped_ += n;
                              if (error || !socket_.is_open() || dropped_ > kMaxDroppedBytes) {
                                return Close();
                              }
                              Drop();
                            });
  }

  const Handler& handler_;
  const ServerLimits& limits_;
  Sessions& sessions_;
  Sessions::List::iterator place_;
  Protocol::socket socket_;
  asio::steady_timer deadline_;
  boost::optional<HeadParser> parser_;  // of the current request
  std::array<char, kMaxHeadBytes> buffer_;
  size_t received_ = 0;  // bytes in the buffer
  size_t parsed_ = 0;    // and of these, bytes that the parser has taken
  std::string head_;     // of the response
  std::string body_;
  size_t dropped_ = 0;
};

Sessions::List::iterator Sessions::Add(std::shared_ptr<Session> session) {
  if (open_.size() >= max_) {
    const std::shared_ptr<Session> first = open_.front();
    first->Close();
  }
  return open_.insert(open_.end(), std::move(session));
}

// Accepts the connections of one listening socket and passes them to `take`.
class Acceptor {
 public:
  using Take = std::function<void(Descriptor connection)>;

  Acceptor(asio::io_context& context, Descriptor listening, Take take)
      : take_(std::move(take)), listening_(context, listening.Release()), pause_(context) {
    Wait();
  }

 private:
  void Wait() {
    listening_.async_wait(asio::posix::descriptor_base::wait_read, [this](const error_code& error) {
      if (!error) Accept();
    });
  }

  void Accept() {
    Descriptor connection(
        accept4(listening_.native_handle(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (connection.get() < 0 && IsShortage(errno)) return Pause(errno);
    if (connection.get() >= 0) take_(std::move(connection));
    Wait();
  }

  void Pause(int error) {
    if (const std::optional<int64_t> left_out = lines_.Take()) {
      Log(LogLevel::kWarning, "cannot accept HTTP connections",
          {{"reason", std::strerror(error)}, {"left_out", *left_out}});
    }
    pause_.expires_after(kAcceptPause);
    pause_.async_wait([this](const error_code& cancelled) {
      if (!cancelled) Accept();
    });
  }

  const Take take_;
  asio::posix::stream_descriptor listening_;
  asio::steady_timer pause_;
  const SteadyClock clock_;
  LogLimit lines_{1, clock_};
};

}  // namespace

class Server::Impl {
 public:
  Impl(ListeningSockets listening, Handler handler, const ServerLimits& limits)
      : handler_(std::move(handler)),
        limits_(limits),
        sessions_(limits.max_connections),
        port_(listening.port) {
    for (Descriptor& descriptor : listening.descriptors) {
      acceptors_.emplace_back(context_, std::move(descriptor),
                              [this](Descriptor connection) { Open(std::move(connection)); });
    }
    thread_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "rapt-http");
      context_.run();
    });
  }

  ~Impl() {
    context_.stop();
    thread_.join();
  }

  int port() const { return port_; }

 private:
  void Open(Descriptor connection) {
    Protocol::socket socket(context_);
    error_code error;
    socket.assign(Protocol(AF_UNSPEC, IPPROTO_TCP), connection.get(), error);
    if (error) return;
    connection.Release();
    std::make_shared<Session>(std::move(socket), handler_, limits_, sessions_)->Start();
  }

  const Handler handler_;
  const ServerLimits limits_;
  asio::io_context context_{/*concurrency_hint=*/1};
  Sessions sessions_;
  std::deque<Acceptor> acceptors_;
  const int port_;
  std::thread thread_;
};

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Server::~Server() = default;

int Server::port() const { return impl_->port(); }

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const std::string& address, Handler handler,
                                                      const ServerLimits& limits) {
  absl::StatusOr<ListeningSockets> listening = ListenOn(address);
  if (!listening.ok()) return listening.status();
  try {
    return std::unique_ptr<Server>(
        new Server(std::make_unique<Impl>(*std::move(listening), std::move(handler), limits)));
  } catch (const std::exception& error) {  // no descriptor for the event loop, or no thread
    return absl::UnavailableError(absl::StrCat("can't listen on ", address, "; ", error.what()));
  }
}

}  // namespace rapt::http
