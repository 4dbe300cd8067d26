// An HTTP/2 connection that carries gRPC messages.
#ifndef RAPT_SERVER_WIRE_HTTP2_CONNECTION_H_
#define RAPT_SERVER_WIRE_HTTP2_CONNECTION_H_

#include <nghttp2/nghttp2.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "server/protocols/message_parts.h"
#include "server/request.h"
#include "server/wire/connection_counts.h"
#include "server/wire/event_loop.h"
#include "server/wire/http2/frame_budget.h"
#include "server/wire/http2/keepalive.h"
#include "server/wire/http2/receive_windows.h"
#include "server/wire/http2/request_head.h"
#include "server/wire/http2/session.h"
#include "server/wire/http2/stream_limit.h"
#include "server/wire/output_queue.h"
#include "server/wire/socket.h"
#include "server/wire/trailers.h"

namespace rapt {

// A call on a connection. Called on the thread of the connection's loop.
class CallStream {
 public:
  // Bytes of messages. The bytes may lie in the place that DirectPlace() returned.
  virtual void OnData(absl::Span<const uint8_t> bytes) = 0;
  // The caller has half-closed.
  virtual void OnEnd() = 0;
  // The stream is gone, `has_responded`: after its trailers were sent. The last call; the stream
  // then owns itself.
  virtual void OnClosed(bool has_responded) = 0;
  // Returns the place of the next bytes of DATA if it is known, so that they are not copied.
  virtual absl::Span<uint8_t> DirectPlace() = 0;
  // Whether this is a unary call with tensors, which ends soon once it has room. Others may stay
  // open without a message.
  virtual bool carries_tensors() { return false; }
  // Bytes of messages passed to SendMessage() are framed.
  virtual void OnFramed(int64_t bytes) = 0;
  // All of them are.
  virtual void OnDrained() {}

 protected:
  ~CallStream() = default;
};

// Reads and writes frames and bounds their cost: windows are opened explicitly, for bytes whose
// memory is admitted; frames that carry nothing exhaust a budget, which ends the connection.
// Belongs to the thread of its loop.
class Connection final : public EventLoop::Watcher,
                         private Http2Session::Events,
                         public std::enable_shared_from_this<Connection> {
 public:
  struct Settings {
    int64_t max_streams = 0;
    std::chrono::nanoseconds max_idle{0};       // without calls
    std::chrono::nanoseconds max_age{0};        // 0: unlimited; varied randomly by a tenth
    std::chrono::nanoseconds max_call_time{0};  // on a connection that has reached that age
  };

  // The connections of a thread that are not read because there was no room for their calls, in the
  // order in which they are read again.
  using Paused = std::list<Connection*>;

  // Returns the handler of a request whose headers are complete, or null if it has responded.
  using NewStream = std::function<CallStream*(Connection&, int32_t id, const RequestHead&)>;

  // `peer` is "ipv4:127.0.0.1:4711" or "unix:". `on_closed` runs once. REQUIRES: `settings`
  // and `paused`, which belongs to the same thread, outlive this.
  Connection(EventLoop& loop, std::unique_ptr<Socket> socket, std::string peer,
             const Settings& settings, Paused& paused, NewStream new_stream,
             std::function<void()> on_closed);
  ~Connection() override;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Sends the settings and begins to read. The connection shares the turns of the network.
  void Start(const PeerNetwork& network);

  // Tells the caller to open no more streams. Streams that are on their way are still served.
  void GoAway();
  // Serves no more streams than those that have arrived.
  void EndStreams();
  // Ends the connection and its streams at once.
  void Close();

  EventLoop& loop() const { return loop_; }
  const std::string& peer() const { return peer_; }
  // The name in the peer's certificate, as in CallHeaders.
  std::optional<absl::string_view> certificate() const { return socket_->certificate(); }

  // The following have no effect for a stream that is gone.

  // Appends a message, whose outputs stay until they are written to the socket.
  void SendMessage(int32_t id, ResponseMessage message);
  // Ends the response with a status and trailers.
  void SendStatus(int32_t id, const absl::Status& status, Trailers trailers);
  // Ends the response with an HTTP status other than 200.
  void SendHttpError(int32_t id, int http_status);
  // The call is being refused for lack of room at the server: lowers the limit of streams that the
  // caller is told to those that are left. The limit doubles after each second without this. If
  // none is left, the connection is not read until one call with tensors has ended for each that
  // was paused before it, or for about a second.
  void LowerStreamLimit(int32_t id);
  void Reset(int32_t id, uint32_t error_code);
  // The memory of this many more bytes of the stream is admitted: opens its window for them, in
  // steps. Call it again with each part that has come.
  void GrantWindow(int32_t id, int64_t bytes);
  // A stream has taken a message.
  void EarnByMessage() { budget_.EarnByMessage(); }
  // The stream holds this many bytes that are not admitted yet.
  void SetUnadmitted(int32_t id, int64_t bytes);

 private:
  struct Stream;
  // What the caller was told: nothing; to open no more streams; the same, and it has read that; the
  // last stream that is served.
  enum class Leaving : uint8_t { kNo, kAnnounced, kAcknowledged, kFinal };
  // OnTick() takes the action from this time on; it may do so again and again.
  struct Timer {
    void (Connection::*action)();
    Instant due = Instant::max();  // never
  };

  void OnEvents(uint32_t events) override;
  void OnTick(Instant now) override;
  bool NextTurnIsHeavy() const override { return socket_->NeedsHandshake(); }

  void OnFrameHead(const nghttp2_frame_hd& head) override;
  void OnBeginHeaders(const nghttp2_frame& frame) override;
  void OnHeader(absl::string_view name, absl::string_view value) override;
  void OnData(int32_t id, absl::Span<const uint8_t> bytes) override;
  void OnFrame(const nghttp2_frame& frame) override;
  void OnFrameSent(const nghttp2_frame& frame) override;
  void OnFramed(int32_t id, int64_t bytes) override;
  void OnStreamClose(int32_t id) override;
  void OnQueued() override { FlushSoon(); }

  void TakeTurn(uint32_t events);
  bool Establish();
  void Read();
  void Feed(absl::Span<const uint8_t> bytes);
  absl::Span<uint8_t> DirectPlace();
  bool ShouldForward(const FrameHead& frame);
  void CloseAbusive();
  void Linger();

  void OnPing(const nghttp2_ping& ping);
  void HandleRefusals();
  void Send(const std::optional<StreamLimit::Frame>& limit);
  void PauseReading();
  void ResumeReading();

  void OnRequest(Stream& stream);
  Stream* Find(int32_t id);
  void AbandonStreams();
  bool TopUp();

  void FlushSoon();
  void Flush();
  void UpdateInterest();
  void SetInterest(uint32_t interest);
  bool Fire(std::initializer_list<const Timer*> timers, Instant now);
  bool lingers() const { return linger_.due != Instant::max(); }
  Instant Now() const { return loop_.clock().Now(); }

  EventLoop& loop_;
  const std::unique_ptr<Socket> socket_;
  const std::string peer_;
  const Settings& settings_;
  Paused& paused_;
  const NewStream new_stream_;
  const std::function<void()> on_closed_;

  absl::flat_hash_map<int32_t, std::unique_ptr<Stream>> streams_;
  RequestHead head_;  // of the header block that is being received
  FrameReader reader_;
  FrameBudget budget_;
  ReceiveWindows windows_;
  OutputQueue out_;
  Keepalive keepalive_;
  StreamLimit stream_limit_;
  std::unique_ptr<Http2Session> session_;            // null: closed
  std::optional<Paused::iterator> place_in_paused_;  // reading is paused
  bool is_in_header_block_ = false;                  // of the caller
  uint32_t last_opened_ = 0;                         // the stream of the last new HEADERS
  bool is_abusive_ = false;
  Leaving leaving_ = Leaving::kNo;

  int32_t data_stream_ = 0;  // of the DATA frame that is being received; 0: none
  int64_t data_left_ = 0;    // of its payload

  uint32_t interest_ = 0;
  bool flushes_soon_ = false;

  int64_t lingered_bytes_ = 0;

  Timer handshake_{&Connection::Close};  // of TLS and HTTP/2
  Timer linger_{&Connection::Close};
  Timer idle_{&Connection::GoAway};
  Timer age_{&Connection::GoAway};
  Timer aged_calls_{&Connection::Close};
  Timer announced_{&Connection::EndStreams};
  Timer pause_{&Connection::ResumeReading};
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_HTTP2_CONNECTION_H_
