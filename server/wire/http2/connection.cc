#include "server/wire/http2/connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <random>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "server/wire/trailers.h"

namespace rapt {
namespace {

// Of DATA that is received. Fewer and larger frames.
constexpr uint32_t kFrameBytes = 1 << 20;

// Frames that wait in nghttp2 are written before more is read: it needs many times their bytes.
constexpr size_t kMaxQueuedFrames = 128;
// What is read at once from a caller that leaves this many bytes of responses unread.
constexpr int64_t kManyUnreadBytes = 16 * 1024;
constexpr size_t kSlowReadBytes = 4096;

// A read into a message's place is worthwhile for this many bytes.
constexpr size_t kLeastDirectBytes = 4096;
// Read, and written, before other connections have their turn.
constexpr int64_t kFairBytes = 2 << 20;
// Read, if fewer bytes take that long: headers and small messages cost more than payload.
constexpr std::chrono::milliseconds kFairTime{1};

// Of TLS and HTTP/2: until the caller's SETTINGS.
constexpr std::chrono::seconds kHandshakeTime{20};
// A caller that reads nothing for this long is considered gone.
constexpr std::chrono::seconds kWriteTime{20};
// The time for the caller to read GOAWAY. Meanwhile some of its bytes are read and dropped, because
// closing a socket with unread bytes discards unsent ones.
constexpr std::chrono::seconds kLingerTime{1};
// The time for the calls that a caller has sent before it reads GOAWAY, and the ping behind that
// GOAWAY: once it is acknowledged, there are no more.
constexpr std::chrono::seconds kAnnouncedTime{1};
constexpr uint8_t kAnnouncedPing[8] = {'g', 'o', ' ', 'a', 'w', 'a', 'y'};
constexpr int64_t kMaxLingerBytes = 1 << 20;

// A paused connection is read again after this time even if no call ends.
constexpr std::chrono::seconds kLongestPause{1};

// An age that is varied, so that connections that began together do not end together.
std::chrono::nanoseconds Vary(std::chrono::nanoseconds age) {
  std::minstd_rand random(std::random_device{}());
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      age * std::uniform_real_distribution<double>(0.9, 1.1)(random));
}

}  // namespace

struct Connection::Stream {
  int32_t id = 0;
  CallStream* handler = nullptr;
  bool has_ended = false;      // the caller's half
  bool has_begun = false;      // the response
  bool has_responded = false;  // the response has been sent
  bool is_refused = false;     // see LowerStreamLimit()
  ReceiveWindows::Stream window;
  ResponseQueue response;
};

Connection::Connection(EventLoop& loop, std::unique_ptr<Socket> socket, std::string peer,
                       const Settings& settings, Paused& paused, NewStream new_stream,
                       std::function<void()> on_closed)
    : loop_(loop),
      socket_(std::move(socket)),
      peer_(std::move(peer)),
      settings_(settings),
      paused_(paused),
      new_stream_(std::move(new_stream)),
      on_closed_(std::move(on_closed)),
      budget_(loop.clock().Now()),
      out_(loop.clock()),
      keepalive_(loop.clock().Now()),
      stream_limit_(settings.max_streams),
      session_(std::make_unique<Http2Session>(static_cast<Events&>(*this), out_)) {
  handshake_.due = Now() + kHandshakeTime;
  idle_.due = Now() + settings.max_idle;
  if (settings.max_age.count() == 0) return;
  age_.due = Now() + Vary(settings.max_age);
  aged_calls_.due = age_.due + settings.max_call_time;
}

Connection::~Connection() { RAPT_CHECK(session_ == nullptr, "a connection is closed first"); }

void Connection::Start(const PeerNetwork& network) {
  const std::array<nghttp2_settings_entry, 5> settings = {{
      {NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, static_cast<uint32_t>(settings_.max_streams)},
      {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, ReceiveWindows::kInitial},
      {NGHTTP2_SETTINGS_MAX_FRAME_SIZE, kFrameBytes},
      {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, static_cast<uint32_t>(RequestHead::kMaxBytes)},
      {NGHTTP2_SETTINGS_NO_RFC7540_PRIORITIES, 1},
  }};
  interest_ = EPOLLIN;
  loop_.Add(socket_->descriptor(), interest_, shared_from_this(), network);
  session_->SendSettings(settings);
  // Framed at once: the frames of the limit of streams come later.
  if (!session_->Fill()) Close();
}

void Connection::GoAway() {
  if (session_ == nullptr || leaving_ != Leaving::kNo) return;
  leaving_ = Leaving::kAnnounced;
  announced_.due = Now() + kAnnouncedTime;
  ResumeReading();
  session_->Announce();
}

void Connection::EndStreams() {
  if (session_ == nullptr || std::exchange(leaving_, Leaving::kFinal) == Leaving::kFinal) return;
  ResumeReading();
  session_->GoAway(NGHTTP2_NO_ERROR);
  // Framed at once: a call that arrived before that would be served, although the frame says that
  // it is not.
  if (!session_->Fill()) Close();
}

void Connection::Close() {
  if (session_ == nullptr) return;
  ResumeReading();
  session_.reset();
  AbandonStreams();
  out_.Clear();
  loop_.Remove(socket_->descriptor());
  if (!lingers() || leaving_ == Leaving::kFinal) socket_->EndWriting();
  shutdown(socket_->descriptor(), SHUT_RDWR);  // the socket is closed at the end of the round
  on_closed_();
}

void Connection::AbandonStreams() {
  for (auto& [id, stream] : std::exchange(streams_, {})) {
    if (stream->handler != nullptr) stream->handler->OnClosed(stream->has_responded);
  }
}

// Ends a connection that exceeds the budget.
void Connection::CloseAbusive() {
  if (std::exchange(is_abusive_, true)) return;
  session_->Terminate(NGHTTP2_ENHANCE_YOUR_CALM);
}

// Tells callers that ping too often in gRPC's words, to which its clients react.
void Connection::OnPing(const nghttp2_ping& ping) {
  if ((ping.hd.flags & NGHTTP2_FLAG_ACK) != 0) {
    const bool is_ours =
        std::equal(std::begin(kAnnouncedPing), std::end(kAnnouncedPing), ping.opaque_data);
    if (is_ours && leaving_ == Leaving::kAnnounced) leaving_ = Leaving::kAcknowledged;
    return;
  }
  if (keepalive_.OnPing(Now(), !streams_.empty())) return;
  session_->GoAway(NGHTTP2_ENHANCE_YOUR_CALM, "too_many_pings");
}

void Connection::LowerStreamLimit(int32_t id) {
  Stream* const stream = Find(id);
  if (stream == nullptr) return;
  stream->is_refused = true;
  stream_limit_.OnRefusal();
}

// Limits the streams to those that are left without the refused ones, with a place for at least one
// call with tensors: a client that may open none does not notice that the limit rises.
//
// A caller with one call is not held back by that: reading pauses, unless another call has
// something to send. A health watch has not.
void Connection::HandleRefusals() {
  int64_t tensor_calls = 0, others = 0;
  bool all_have_ended = true;
  for (const auto& [id, stream] : streams_) {
    if (stream->handler == nullptr || stream->is_refused) continue;
    ++(stream->handler->carries_tensors() ? tensor_calls : others);
    all_have_ended = all_have_ended && stream->has_ended;
  }
  Send(stream_limit_.Lower(std::max<int64_t>(tensor_calls, 1) + others));
  if (tensor_calls == 0 && all_have_ended) PauseReading();
}

void Connection::Send(const std::optional<StreamLimit::Frame>& limit) {
  if (!limit) return;
  out_.Append(limit->data(), limit->size());
  FlushSoon();
}

// What the caller sends meanwhile waits in the socket.
void Connection::PauseReading() {
  if (place_in_paused_ || leaving_ != Leaving::kNo) return;
  place_in_paused_ = paused_.insert(paused_.end(), this);
  pause_.due = Now() + kLongestPause;
}

void Connection::ResumeReading() {
  if (!place_in_paused_) return;
  paused_.erase(*std::exchange(place_in_paused_, std::nullopt));
  UpdateInterest();
}

void Connection::Linger() {
  ResumeReading();
  linger_.due = Now() + kLingerTime;
  // A caller that was told to go away closes the connection once it has read its responses. Some
  // clients lose responses that come together with the end of the connection.
  if (leaving_ != Leaving::kFinal) socket_->EndWriting();
  AbandonStreams();
}

void Connection::OnEvents(uint32_t events) {
  flushes_soon_ = true;
  TakeTurn(events);
  flushes_soon_ = false;
}

void Connection::TakeTurn(uint32_t events) {
  if (session_ == nullptr) return;
  // After a reset, the socket still returns what arrived before it. Nobody reads the responses.
  if ((events & EPOLLHUP) != 0) return Close();
  if ((events & EPOLLRDHUP) != 0) ResumeReading();
  if (socket_->NeedsHandshake() && !Establish()) return;
  if ((events & (EPOLLIN | EPOLLERR)) != 0) Read();
  Flush();
}

void Connection::OnTick(Instant now) {
  if (!Fire({&handshake_, &linger_}, now) || lingers() || socket_->NeedsHandshake()) return;
  if (!out_.empty() && now - out_.progressed() >= kWriteTime) return Close();
  if (!Fire({&idle_, &age_, &aged_calls_, &announced_, &pause_}, now)) return;
  if (!place_in_paused_) Send(stream_limit_.Raise());
  const Keepalive::Action ping = keepalive_.OnTick(now);
  if (ping == Keepalive::Action::kClose) return Close();
  if (ping == Keepalive::Action::kPing) session_->SendPing();
}

// Returns whether the connection is still open.
bool Connection::Fire(std::initializer_list<const Timer*> timers, Instant now) {
  for (const Timer* timer : timers) {
    if (session_ != nullptr && now >= timer->due) (this->*timer->action)();
  }
  return session_ != nullptr;
}

// Continues the handshake. Returns whether it is complete.
bool Connection::Establish() {
  const Socket::Handshake handshake = socket_->ContinueHandshake();
  if (handshake == Socket::Handshake::kComplete) return true;
  if (handshake == Socket::Handshake::kFailed) {
    Close();
  } else {
    SetInterest(InterestOf(handshake));
  }
  return false;
}

// Returns the place of the payload that comes next, if a read into it is worthwhile.
absl::Span<uint8_t> Connection::DirectPlace() {
  Stream* const stream = data_left_ > 0 ? Find(data_stream_) : nullptr;
  if (stream == nullptr || stream->handler == nullptr) return {};
  // nghttp2 reports no DATA that it ignores, so data_left_ may be too large. The bytes of another
  // frame may end the stream and free the place while they are parsed.
  const int64_t payload = std::min(data_left_, reader_.payload_left());
  const auto place = stream->handler->DirectPlace().subspan(0, static_cast<size_t>(payload));
  return place.size() < kLeastDirectBytes ? absl::Span<uint8_t>() : place;
}

// Reads the payload of a message into its place, and everything else into the loop's buffer.
void Connection::Read() {
  const Instant began = Now();
  for (int64_t left = kFairBytes; left > 0 && Now() - began < kFairTime;) {
    absl::Span<uint8_t> scratch = loop_.scratch();
    if (out_.copied_bytes() >= kManyUnreadBytes) scratch = scratch.subspan(0, kSlowReadBytes);
    const absl::Span<uint8_t> direct = DirectPlace();
    const std::array<iovec, 2> places = {
        {{direct.data(), direct.size()}, {scratch.data(), scratch.size()}}};
    const ssize_t count = socket_->Read(places);
    if (count == Socket::kBlocked) return;
    if (count == Socket::kEnded) return Close();
    keepalive_.OnRead(Now());
    const size_t size = static_cast<size_t>(count);
    Feed(direct.subspan(0, size));
    if (session_ != nullptr && size > direct.size()) {
      Feed(scratch.subspan(0, size - direct.size()));
    }
    if (session_ == nullptr || is_abusive_) return;
    if (session_->queued_frames() >= kMaxQueuedFrames) return;
    if (size < direct.size() + scratch.size()) return;
    left -= count;
  }
}

void Connection::Feed(absl::Span<const uint8_t> bytes) {
  if (bytes.empty()) return;
  if (is_abusive_ || lingers()) {
    lingered_bytes_ += static_cast<int64_t>(bytes.size());
    return;
  }
  budget_.Refill(Now());
  bool is_within_budget = true;
  const FrameReader::Pieces pieces = reader_.Read(bytes, [&](const FrameHead& frame) {
    is_within_budget = budget_.OnFrame(frame) && is_within_budget;
    return ShouldForward(frame);
  });
  if (!is_within_budget) return CloseAbusive();
  for (const absl::Span<const uint8_t> piece : pieces) {
    if (!session_->Receive(piece)) return Close();
  }
  if (leaving_ == Leaving::kAcknowledged) EndStreams();
}

// Returns false for two kinds of frames that nghttp2 takes for errors:
// - resets of streams that were not opened. RFC 9113 (5.1) demands that they end the connection,
//   but gRPC's clients send one now and then, if a call ends before its headers are written;
// - acknowledgements of the frames of the limit of streams.
bool Connection::ShouldForward(const FrameHead& frame) {
  const bool begins_block = frame.type == NGHTTP2_HEADERS;
  if (is_in_header_block_ || begins_block) {
    // Any frame but CONTINUATION inside a block is an error.
    is_in_header_block_ = (frame.flags & NGHTTP2_FLAG_END_HEADERS) == 0;
    if (begins_block) last_opened_ = std::max(last_opened_, frame.stream);
    return true;
  }
  if (stream_limit_.IsAcknowledgement(frame)) return false;
  const bool is_of_caller = frame.stream % 2 == 1;
  return frame.type != NGHTTP2_RST_STREAM || !is_of_caller || frame.stream <= last_opened_;
}

void Connection::OnBeginHeaders(const nghttp2_frame& frame) {
  head_.Clear();
  if (frame.headers.cat != NGHTTP2_HCAT_REQUEST) return;
  auto stream = std::make_unique<Stream>();
  stream->id = frame.hd.stream_id;
  streams_[stream->id] = std::move(stream);
  idle_.due = Instant::max();
}

void Connection::OnHeader(absl::string_view name, absl::string_view value) {
  head_.Add(name, value);
  // A few compressed bytes can expand to large headers.
  if (head_.bytes() > 2 * FrameBudget::kMaxHeaderBlock) CloseAbusive();
}

void Connection::OnRequest(Stream& stream) {
  if (head_.is_too_large()) {
    return SendStatus(stream.id,
                      absl::ResourceExhaustedError(
                          absl::StrCat("the headers have ", head_.bytes(), " bytes; at most ",
                                       RequestHead::kMaxBytes, " are allowed")),
                      {});
  }
  const int32_t id = stream.id;
  CallStream* const handler = new_stream_(*this, id, head_);
  head_.Clear();
  if (Stream* const opened = Find(id)) opened->handler = handler;
}

void Connection::OnFrameHead(const nghttp2_frame_hd& head) {
  // nghttp2 ignores all PRIORITY frames, but one on stream 0 is an error.
  if (head.type == NGHTTP2_PRIORITY && head.stream_id == 0) {
    session_->Terminate(NGHTTP2_PROTOCOL_ERROR);
  }
  const bool is_plain = head.type == NGHTTP2_DATA && (head.flags & NGHTTP2_FLAG_PADDED) == 0;
  data_stream_ = is_plain ? head.stream_id : 0;
  data_left_ = is_plain ? static_cast<int64_t>(head.length) : 0;
}

void Connection::OnData(int32_t id, absl::Span<const uint8_t> bytes) {
  data_left_ -= static_cast<int64_t>(bytes.size());
  Stream* const stream = Find(id);
  if (stream == nullptr) return;
  if (stream->handler != nullptr) stream->handler->OnData(bytes);
}

void Connection::OnFrame(const nghttp2_frame& frame) {
  data_left_ = 0;
  if (frame.hd.type == NGHTTP2_SETTINGS) handshake_.due = Instant::max();
  if (frame.hd.type == NGHTTP2_PING) OnPing(frame.ping);
  if (frame.hd.type != NGHTTP2_HEADERS && frame.hd.type != NGHTTP2_DATA) return;
  keepalive_.OnActivity();
  const int32_t id = frame.hd.stream_id;
  Stream* stream = Find(id);
  if (stream == nullptr) return;
  stream->has_ended = (frame.hd.flags & NGHTTP2_FLAG_END_STREAM) != 0;
  if (frame.hd.type == NGHTTP2_HEADERS && frame.headers.cat == NGHTTP2_HCAT_REQUEST) {
    OnRequest(*stream);
    stream = Find(id);
  }
  if (stream != nullptr && stream->has_ended && stream->handler != nullptr) {
    stream->handler->OnEnd();
  }
}

void Connection::OnFrameSent(const nghttp2_frame& frame) {
  // Not earlier: nghttp2 sends pings ahead of other frames.
  if (frame.hd.type == NGHTTP2_GOAWAY && leaving_ == Leaving::kAnnounced) {
    return session_->SendPing(kAnnouncedPing);
  }
  if (frame.hd.type == NGHTTP2_RST_STREAM) {
    if (frame.rst_stream.error_code == NGHTTP2_NO_ERROR) return;
    if (!budget_.Spend(FrameBudget::kProvokedResetCost)) CloseAbusive();
    return;
  }
  if (frame.hd.type != NGHTTP2_HEADERS || (frame.hd.flags & NGHTTP2_FLAG_END_STREAM) == 0) return;
  Stream* const stream = Find(frame.hd.stream_id);
  if (stream == nullptr) return;
  stream->has_responded = true;
  keepalive_.OnResponse();
  budget_.EarnByResponse();
  // Tells a caller that still sends to stop. Not earlier: nghttp2 drops frames queued before a
  // reset.
  if (!stream->has_ended) Reset(stream->id, NGHTTP2_NO_ERROR);
}

void Connection::OnStreamClose(int32_t id) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  const std::unique_ptr<Stream> stream = std::move(found->second);
  streams_.erase(found);
  windows_.Remove(stream->window);
  if (id == data_stream_) data_left_ = 0;
  const bool makes_room =
      stream->handler != nullptr && stream->handler->carries_tensors() && !stream->is_refused;
  if (makes_room && !paused_.empty()) paused_.front()->ResumeReading();
  if (streams_.empty()) idle_.due = Now() + settings_.max_idle;
  if (stream->handler != nullptr) stream->handler->OnClosed(stream->has_responded);
}

Connection::Stream* Connection::Find(int32_t id) {
  const auto found = streams_.find(id);
  return found == streams_.end() ? nullptr : found->second.get();
}

void Connection::SendMessage(int32_t id, ResponseMessage message) {
  static const Trailers* const head =
      new Trailers{{":status", "200"}, {"content-type", "application/grpc"}};
  Stream* const stream = Find(id);
  if (stream == nullptr) return;
  stream->response.Append(std::move(message));
  if (std::exchange(stream->has_begun, true)) return session_->Resume(id);
  session_->Respond(id, *head, &stream->response);
}

void Connection::SendStatus(int32_t id, const absl::Status& status, Trailers trailers) {
  Stream* const stream = Find(id);
  if (stream == nullptr) return;
  Trailers all = {{"grpc-status", absl::StrCat(static_cast<int>(status.code()))}};
  if (!status.ok()) all.emplace_back("grpc-message", PercentEncode(StatusMessage(status)));
  for (auto& trailer : trailers) all.push_back(std::move(trailer));
  if (stream->has_begun) {
    stream->response.End(std::move(all));
    return session_->Resume(id);
  }
  stream->has_begun = true;
  all.insert(all.begin(), {{":status", "200"}, {"content-type", "application/grpc"}});
  session_->Respond(id, all);
}

void Connection::SendHttpError(int32_t id, int http_status) {
  session_->Respond(id, {{":status", absl::StrCat(http_status)}});
}

void Connection::Reset(int32_t id, uint32_t error_code) {
  if (Find(id) != nullptr) session_->Reset(id, error_code);
}

void Connection::OnFramed(int32_t id, int64_t bytes) {
  budget_.EarnByPayload(bytes);
  Stream* const stream = Find(id);
  if (stream == nullptr || stream->handler == nullptr) return;
  stream->handler->OnFramed(bytes);
  if (stream->response.bytes() == 0) stream->handler->OnDrained();
}

// Keeps the stream's window open for what is expected, in steps.
void Connection::GrantWindow(int32_t id, int64_t bytes) {
  Stream* const stream = Find(id);
  if (stream == nullptr) return;
  stream->window.expected = bytes;
  const int64_t more = windows_.Grant(stream->window, session_->window(id));
  if (more > 0) session_->OpenWindow(id, more);
}

void Connection::SetUnadmitted(int32_t id, int64_t bytes) {
  Stream* const stream = Find(id);
  if (stream == nullptr) return;
  windows_.SetUnadmitted(stream->window, bytes);
  FlushSoon();
}

// Returns whether it opens the connection's window.
bool Connection::TopUp() {
  const int64_t more = windows_.TopUp(session_->window(0));
  if (more > 0) session_->OpenWindow(0, more);
  return more > 0;
}

void Connection::FlushSoon() {
  // Until it is established, there is nothing to send.
  if (flushes_soon_ || interest_ == 0 || socket_->NeedsHandshake()) return;
  flushes_soon_ = true;
  loop_.RequestTurn(shared_from_this(), 0);
}

void Connection::Flush() {
  if (session_ == nullptr) return;
  if (lingers()) return UpdateInterest();
  // Before the refusals: a call that is repeated at once finds the limit.
  if (stream_limit_.TakeRefusals()) HandleRefusals();
  TopUp();
  int64_t left = kFairBytes;
  do {
    if (!session_->Fill()) return Close();
    // Streams that ended meanwhile give their part of the window back.
    if (!TopUp() && out_.empty()) break;
    const OutputQueue::Written written = out_.Write(*socket_, left);
    if (written == OutputQueue::Written::kFailed) return Close();
    if (written == OutputQueue::Written::kBlocked) return UpdateInterest();
  } while (session_->WantsWrite());
  if (!session_->WantsRead() && !session_->WantsWrite()) Linger();
  UpdateInterest();
}

void Connection::UpdateInterest() {
  uint32_t interest = 0;
  if (place_in_paused_) {
    interest |= EPOLLRDHUP;
  } else if (out_.HasRoom() && lingered_bytes_ < kMaxLingerBytes) {
    interest |= EPOLLIN;
  }
  if (!out_.empty()) interest |= EPOLLOUT;
  SetInterest(interest);
  if ((interest & EPOLLIN) != 0 && socket_->HasPending()) {
    loop_.RequestTurn(shared_from_this(), EPOLLIN);
  }
}

void Connection::SetInterest(uint32_t interest) {
  if (interest == interest_) return;
  interest_ = interest;
  loop_.Change(socket_->descriptor(), interest);
}

}  // namespace rapt
