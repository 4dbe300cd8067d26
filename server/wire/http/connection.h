// A connection of HTTP/1.1.
#ifndef RAPT_SERVER_WIRE_HTTP_CONNECTION_H_
#define RAPT_SERVER_WIRE_HTTP_CONNECTION_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "server/protocols/message_parts.h"
#include "server/wire/connection_counts.h"
#include "server/wire/event_loop.h"
#include "server/wire/http/body_framing.h"
#include "server/wire/http/head_parser.h"
#include "server/wire/http/host_names.h"
#include "server/wire/http/message.h"
#include "server/wire/http/router.h"
#include "server/wire/output_queue.h"
#include "server/wire/socket.h"

namespace rapt::http {

class Connection;

struct ConnectionSettings {
  // For a whole request head, for any progress of a response that is not a call's, and for the rest
  // of the client's bytes after the last response.
  std::chrono::milliseconds patience{5'000};
  // Between two requests.
  std::chrono::milliseconds idle{90'000};
  // Requests for other hosts are refused; absent: any.
  std::optional<HostNames> hosts = std::nullopt;
  // Pages of these origins may send requests and read responses: "https://example.org".
  std::vector<std::string> allowed_origins = {};
  // Whether requests of pages from other origins than these and the server's own are refused.
  bool refuses_other_origins = false;
};

// A call as its connection sees it, on the thread of the connection's loop.
class ConnectionCall {
 public:
  // Called once. `request` is valid during this only.
  virtual void Begin(const Request& request) = 0;
  // Returns the place of the next bytes of the body; empty: the connection waits for ReadBody().
  virtual absl::Span<uint8_t> BodyPlace() = 0;
  virtual void OnBodyBytes(size_t count) = 0;
  virtual void OnBodyEnd() = 0;
  virtual void OnBadBody() = 0;
  // Bytes of the response are written.
  virtual void OnBytesWritten(int64_t bytes) = 0;
  // The response is sent, or the connection is gone. The last call; the call then owns itself.
  virtual void OnClosed(bool has_responded) = 0;

 protected:
  ~ConnectionCall() = default;
};

// The server as its connections see it, on the thread of their loop.
class ConnectionOwner {
 public:
  virtual const ConnectionSettings& settings() const = 0;
  // Whether responses end their connections.
  virtual bool is_draining() const = 0;
  virtual Served Serve(const Request& request) = 0;
  virtual ConnectionCall* NewCall(Connection& connection, CalledMethod called) = 0;
  virtual void OnCall(Connection& connection) = 0;
  // A response without a call waits to be sent. May close other connections.
  virtual void OnHolding(Connection& connection, int64_t bytes) = 0;
  virtual void OnResponded(Connection& connection) = 0;
  virtual void OnClosed(Connection& connection) = 0;

 protected:
  ~ConnectionOwner() = default;
};

// Serves one request after another. While a call waits or computes, nothing is read, so that TCP
// holds back the client; the end of the client's bytes, a half-close too, then cancels the call.
// After an error of framing, it closes the connection. Belongs to the thread of its loop.
class Connection final : public EventLoop::Watcher,
                         public std::enable_shared_from_this<Connection> {
 public:
  // `owner` outlives it.
  Connection(EventLoop& loop, std::unique_ptr<Socket> socket, std::string peer,
             ConnectionOwner& owner);

  void Start(const PeerNetwork& network);
  // Closes it after the response that is due, if there is one.
  void Finish();
  void Close();

  EventLoop& loop() const { return loop_; }
  const std::string& peer() const { return peer_; }
  // Of the latest call.
  uint64_t call_number() const { return call_number_; }
  // Closes it if this call has not left it.
  void CloseDuring(uint64_t call_number);
  std::optional<absl::string_view> certificate() const { return socket_->certificate(); }

  // For the call: reads the body into the places that the call returns.
  void ReadBody();
  // For the call: once. The body's payloads are released as they are sent.
  void Respond(int status, absl::string_view content_type, absl::Span<const Header> headers,
               ResponseMessage body);

 private:
  enum class State : uint8_t { kHead, kCall, kBody, kResponding, kLingering, kClosed };

  void OnEvents(uint32_t events) override;
  void OnTick(Instant now) override;
  bool NextTurnIsHeavy() const override { return socket_->NeedsHandshake(); }

  bool Establish();
  void Run();
  // Each returns whether the connection can go on without waiting.
  bool Step();
  bool ReadHead();
  bool StepBody();
  bool ReadData();
  bool Write();
  bool Drop();
  // Reads into the buffer.
  bool Fill();
  // The bytes in the buffer that are not consumed. Chunks consume few at a time, so the others do
  // not move.
  absl::string_view Unread() const { return absl::string_view(in_).substr(in_begin_); }
  void Consume(size_t count);

  void OnHead();
  std::optional<Response> CheckHead() const;
  absl::string_view Authority() const;
  std::optional<Response> CheckHost() const;
  bool IsOurPage() const;
  absl::string_view AllowedOrigin() const;
  bool IsPreflight() const;
  Served Serve();
  void Respond(const Response& response);
  void Reject(const Response& response);
  std::string HeadOf(int status, absl::string_view content_type, absl::Span<const Header> headers,
                     int64_t body_bytes) const;
  void OnResponseSent();
  void UpdateInterest();
  void SetInterest(uint32_t interest);
  Instant Now() const { return loop_.clock().Now(); }

  EventLoop& loop_;
  const std::unique_ptr<Socket> socket_;
  const std::string peer_;
  ConnectionOwner& owner_;

  State state_ = State::kHead;
  Instant since_;  // of the state, the head's first byte, or the last progress
  bool is_running_ = false;
  bool is_readable_ = false;  // as far as the loop has reported
  int64_t turn_left_ = 0;     // bytes of this turn
  uint32_t interest_ = 0;

  std::string in_;       // bytes that were read, at most those of a head; empty if all are consumed
  size_t in_begin_ = 0;  // of those that are not consumed yet
  std::unique_ptr<HeadParser> parser_;
  Request request_;
  BodyFraming framing_ = BodyFraming::OfLength(0);
  bool expects_continue_ = false;
  bool has_served_ = false;  // a request
  bool closes_ = false;      // after the response
  ConnectionCall* call_ = nullptr;
  uint64_t call_number_ = 0;

  OutputQueue out_;
  int64_t dropped_bytes_ = 0;
};

}  // namespace rapt::http

#endif  // RAPT_SERVER_WIRE_HTTP_CONNECTION_H_
