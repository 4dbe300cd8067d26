#include "server/wire/http2/session.h"

#include <algorithm>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/strings/match.h"
#include "base/check.h"
#include "server/wire/http2/frame_reader.h"

namespace rapt {
namespace {

// Of DATA. Fewer and larger frames.
constexpr int64_t kSentFrameBytes = 256 * 1024;

// nghttp2's own limits, above those of FrameBudget.
constexpr uint64_t kResetBurst = 100000;
constexpr size_t kMaxOutboundAcks = 100000;

// Headers whose values seldom repeat: they would displace others from the compression's table.
bool IsRepeated(absl::string_view name) {
  return name != "grpc-message" && name != "traceparent" && !absl::EndsWith(name, "-us");
}

using HeaderBlock = absl::InlinedVector<nghttp2_nv, 12>;

// The result refers to the headers.
HeaderBlock ToNghttp2(const Trailers& headers) {
  const auto bytes = [](const std::string& text) {
    return reinterpret_cast<uint8_t*>(const_cast<char*>(text.data()));
  };
  HeaderBlock result;
  for (const auto& [name, value] : headers) {
    const uint8_t flags = IsRepeated(name) ? NGHTTP2_NV_FLAG_NONE : NGHTTP2_NV_FLAG_NO_INDEX;
    result.push_back({bytes(name), bytes(value), name.size(), value.size(), flags});
  }
  return result;
}

nghttp2_option* NewOption() {
  nghttp2_option* option;
  RAPT_CHECK(nghttp2_option_new(&option) == 0, "no memory");
  nghttp2_option_set_no_auto_window_update(option, 1);
  nghttp2_option_set_no_closed_streams(option, 1);
  nghttp2_option_set_max_outbound_ack(option, kMaxOutboundAcks);
  // gRPC's clients send values such as "Bearer ", which RFC 9113 forbids.
  nghttp2_option_set_no_rfc9113_leading_and_trailing_ws_validation(option, 1);
  nghttp2_option_set_stream_reset_rate_limit(option, kResetBurst, kResetBurst);
  return option;
}

}  // namespace

Http2Session::Http2Session(Events& events, OutputQueue& out) : events_(events), out_(out) {
  static nghttp2_session_callbacks* const callbacks = NewCallbacks();
  static nghttp2_option* const option = NewOption();
  RAPT_CHECK(nghttp2_session_server_new2(&session_, callbacks, this, option) == 0, "no memory");
}

template <auto kEvent, typename Argument>
int Http2Session::Forward(nghttp2_session*, const Argument* argument, void* session) {
  (From(session).events_.*kEvent)(*argument);
  return 0;
}

nghttp2_session_callbacks* Http2Session::NewCallbacks() {
  nghttp2_session_callbacks* callbacks;
  RAPT_CHECK(nghttp2_session_callbacks_new(&callbacks) == 0, "no memory");
  nghttp2_session_callbacks_set_on_begin_frame_callback(callbacks, Forward<&Events::OnFrameHead>);
  nghttp2_session_callbacks_set_on_begin_headers_callback(callbacks,
                                                          Forward<&Events::OnBeginHeaders>);
  nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, Forward<&Events::OnFrame>);
  nghttp2_session_callbacks_set_on_frame_send_callback(callbacks, Forward<&Events::OnFrameSent>);
  nghttp2_session_callbacks_set_on_header_callback(
      callbacks, [](nghttp2_session*, const nghttp2_frame*, const uint8_t* name, size_t name_size,
                    const uint8_t* value, size_t value_size, uint8_t, void* session) {
        From(session).events_.OnHeader({reinterpret_cast<const char*>(name), name_size},
                                       {reinterpret_cast<const char*>(value), value_size});
        return 0;
      });
  nghttp2_session_callbacks_set_on_data_chunk_recv_callback(
      callbacks,
      [](nghttp2_session*, uint8_t, int32_t id, const uint8_t* data, size_t size, void* session) {
        From(session).events_.OnData(id, {data, size});
        return 0;
      });
  nghttp2_session_callbacks_set_on_stream_close_callback(
      callbacks, [](nghttp2_session*, int32_t id, uint32_t, void* session) {
        From(session).events_.OnStreamClose(id);
        return 0;
      });
  nghttp2_session_callbacks_set_send_data_callback(
      callbacks, [](nghttp2_session*, nghttp2_frame* frame, const uint8_t* head, size_t size,
                    nghttp2_data_source* source, void* session) {
        auto& body = *static_cast<ResponseQueue*>(source->ptr);
        return From(session).Write(frame->hd.stream_id, body, head, size);
      });
  nghttp2_session_callbacks_set_data_source_read_length_callback(
      callbacks,
      [](nghttp2_session*, uint8_t, int32_t, int32_t connection_window, int32_t stream_window,
         uint32_t max_frame, void*) -> ssize_t {
        return std::min<int64_t>(
            {connection_window, stream_window, int64_t{max_frame}, kSentFrameBytes});
      });
  return callbacks;
}

bool Http2Session::Receive(absl::Span<const uint8_t> bytes) {
  return nghttp2_session_mem_recv(session_, bytes.data(), bytes.size()) >= 0;
}

bool Http2Session::Fill() {
  while (out_.HasRoom()) {
    const uint8_t* data;
    const ssize_t size = nghttp2_session_mem_send(session_, &data);
    if (size < 0) return false;
    if (size == 0) return true;
    out_.Append(data, static_cast<size_t>(size));
  }
  return true;
}

int64_t Http2Session::window(int32_t id) const {
  return id == 0 ? nghttp2_session_get_local_window_size(session_)
                 : nghttp2_session_get_stream_local_window_size(session_, id);
}

// Other errors concern streams that have ended meanwhile.
void Http2Session::Submit(int error) {
  RAPT_CHECK(error != NGHTTP2_ERR_NOMEM, "no memory");
  events_.OnQueued();
}

void Http2Session::SendSettings(absl::Span<const nghttp2_settings_entry> settings) {
  Submit(nghttp2_submit_settings(session_, NGHTTP2_FLAG_NONE, settings.data(), settings.size()));
}

void Http2Session::SendPing(const uint8_t* payload) {
  Submit(nghttp2_submit_ping(session_, NGHTTP2_FLAG_NONE, payload));
}

void Http2Session::OpenWindow(int32_t id, int64_t bytes) {
  Submit(
      nghttp2_submit_window_update(session_, NGHTTP2_FLAG_NONE, id, static_cast<int32_t>(bytes)));
}

void Http2Session::Reset(int32_t id, uint32_t error_code) {
  Submit(nghttp2_submit_rst_stream(session_, NGHTTP2_FLAG_NONE, id, error_code));
}

void Http2Session::Respond(int32_t id, const Trailers& headers, ResponseQueue* body) {
  nghttp2_data_provider provider;
  provider.source.ptr = body;
  provider.read_callback = [](nghttp2_session*, int32_t stream, uint8_t*, size_t length,
                              uint32_t* flags, nghttp2_data_source* source, void* session) {
    const auto& queue = *static_cast<ResponseQueue*>(source->ptr);
    return From(session).Provide(stream, queue, length, *flags);
  };
  const HeaderBlock values = ToNghttp2(headers);
  Submit(nghttp2_submit_response(session_, id, values.data(), values.size(),
                                 body == nullptr ? nullptr : &provider));
}

void Http2Session::Resume(int32_t id) { Submit(nghttp2_session_resume_data(session_, id)); }

void Http2Session::Announce() { Submit(nghttp2_submit_shutdown_notice(session_)); }

void Http2Session::GoAway(uint32_t error_code, absl::string_view reason) {
  Submit(nghttp2_submit_goaway(session_, NGHTTP2_FLAG_NONE,
                               nghttp2_session_get_last_proc_stream_id(session_), error_code,
                               reinterpret_cast<const uint8_t*>(reason.data()), reason.size()));
}

void Http2Session::Terminate(uint32_t error_code) {
  Submit(nghttp2_session_terminate_session(session_, error_code));
}

// Returns how much of the body can be framed now. Write() takes it.
ssize_t Http2Session::Provide(int32_t id, const ResponseQueue& body, size_t length,
                              uint32_t& flags) {
  if (body.bytes() == 0 && !body.trailers()) return NGHTTP2_ERR_DEFERRED;
  const int64_t size = std::min(static_cast<int64_t>(length), body.bytes());
  flags |= NGHTTP2_DATA_FLAG_NO_COPY;
  if (size < body.bytes() || !body.trailers()) return size;
  flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
  const HeaderBlock trailers = ToNghttp2(*body.trailers());
  Submit(nghttp2_submit_trailer(session_, id, trailers.data(), trailers.size()));
  return size;
}

int Http2Session::Write(int32_t id, ResponseQueue& body, const uint8_t* head, size_t length) {
  if (!out_.HasRoom()) return NGHTTP2_ERR_WOULDBLOCK;
  out_.Append(head, FrameHead::kBytes);
  const auto size = static_cast<int64_t>(length);
  body.MoveTo(out_, size);
  events_.OnFramed(id, size);
  return 0;
}

}  // namespace rapt
