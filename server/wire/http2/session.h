// nghttp2's side of a connection.
#ifndef RAPT_SERVER_WIRE_HTTP2_SESSION_H_
#define RAPT_SERVER_WIRE_HTTP2_SESSION_H_

#include <nghttp2/nghttp2.h>

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/wire/http2/response_queue.h"
#include "server/wire/output_queue.h"
#include "server/wire/trailers.h"

namespace rapt {

// Parses what arrives, and frames what is sent. nghttp2 keeps no window open by itself. Errors of a
// stream that has ended meanwhile are ignored. Not thread-safe.
class Http2Session {
 public:
  class Events {
   public:
    // A frame begins to arrive.
    virtual void OnFrameHead(const nghttp2_frame_hd& head) = 0;
    virtual void OnBeginHeaders(const nghttp2_frame& frame) = 0;
    virtual void OnHeader(absl::string_view name, absl::string_view value) = 0;
    virtual void OnData(int32_t id, absl::Span<const uint8_t> bytes) = 0;
    // It has arrived.
    virtual void OnFrame(const nghttp2_frame& frame) = 0;
    // A frame of the server's is in the output.
    virtual void OnFrameSent(const nghttp2_frame& frame) = 0;
    // So are bytes of a response.
    virtual void OnFramed(int32_t id, int64_t bytes) = 0;
    virtual void OnStreamClose(int32_t id) = 0;
    // Something waits for Fill().
    virtual void OnQueued() = 0;

   protected:
    ~Events() = default;
  };

  // REQUIRES: both outlive this.
  Http2Session(Events& events, OutputQueue& out);
  ~Http2Session() { nghttp2_session_del(session_); }
  Http2Session(const Http2Session&) = delete;
  Http2Session& operator=(const Http2Session&) = delete;

  // Both return false if the connection has failed.
  bool Receive(absl::Span<const uint8_t> bytes);
  // Frames what is queued, while the output has room.
  bool Fill();

  // What nghttp2 itself wants. Neither: the connection is at its end.
  bool WantsRead() const { return nghttp2_session_want_read(session_) != 0; }
  bool WantsWrite() const { return nghttp2_session_want_write(session_) != 0; }
  size_t queued_frames() const { return nghttp2_session_get_outbound_queue_size(session_); }
  // The bytes that the peer may still send on the stream, or on the connection: 0.
  int64_t window(int32_t id) const;

  void SendSettings(absl::Span<const nghttp2_settings_entry> settings);
  void SendPing(const uint8_t* payload = nullptr);
  void OpenWindow(int32_t id, int64_t bytes);
  // Ends the stream. NGHTTP2_NO_ERROR: after a response, for a caller that still sends.
  void Reset(int32_t id, uint32_t error_code);

  // Begins a response. With a body it goes on until the body ends, otherwise it ends here.
  // REQUIRES: the body outlives the stream.
  void Respond(int32_t id, const Trailers& headers, ResponseQueue* body = nullptr);
  // Call when the body has more.
  void Resume(int32_t id);

  // GOAWAY that names no last stream, or the last one that has arrived.
  void Announce();
  void GoAway(uint32_t error_code, absl::string_view reason = "");
  // The same, and ends the connection when it is sent.
  void Terminate(uint32_t error_code);

 private:
  static nghttp2_session_callbacks* NewCallbacks();
  template <auto kEvent, typename Argument>
  static int Forward(nghttp2_session*, const Argument* argument, void* session);
  static Http2Session& From(void* session) { return *static_cast<Http2Session*>(session); }
  ssize_t Provide(int32_t id, const ResponseQueue& body, size_t length, uint32_t& flags);
  int Write(int32_t id, ResponseQueue& body, const uint8_t* head, size_t length);
  void Submit(int error);

  Events& events_;
  OutputQueue& out_;
  nghttp2_session* session_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_HTTP2_SESSION_H_
