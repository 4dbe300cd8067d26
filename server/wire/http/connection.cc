#include "server/wire/http/connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/host_port.h"
#include "base/log.h"

namespace rapt::http {
namespace {

// Read or written before other connections have their turn.
constexpr int64_t kFairBytes = 2 << 20;
constexpr std::chrono::milliseconds kFairTime{1};

constexpr std::chrono::seconds kHandshakeTime{20};
// A caller that reads nothing for this long is considered gone.
constexpr std::chrono::milliseconds kCallWriteTime{20'000};

// Chunks of fewer bytes are read together with what follows them.
constexpr uint64_t kLeastDirectBytes = 4096;

// A close with unread bytes resets the connection, and the client may lose the response. Therefore
// up to this number of bytes is read and discarded first.
constexpr int64_t kMaxDroppedBytes = int64_t{64} << 20;

constexpr char kContinue[] = "HTTP/1.1 100 Continue\r\n\r\n";
constexpr char kAllowedHeaders[] =
    "authorization, content-type, inference-header-content-length, grpc-timeout, traceparent";
constexpr char kExposedHeaders[] = "inference-header-content-length, retry-after, traceparent";

}  // namespace

Connection::Connection(EventLoop& loop, std::unique_ptr<Socket> socket, std::string peer,
                       ConnectionOwner& owner)
    : loop_(loop),
      socket_(std::move(socket)),
      peer_(std::move(peer)),
      owner_(owner),
      since_(loop.clock().Now()),
      out_(loop.clock()) {}

void Connection::Start(const PeerNetwork& network) {
  interest_ = EPOLLIN | EPOLLRDHUP;
  loop_.Add(socket_->descriptor(), interest_, shared_from_this(), network);
}

void Connection::Finish() {
  closes_ = true;
  if (state_ == State::kHead && in_.empty()) Close();
}

void Connection::Close() {
  if (state_ == State::kClosed) return;
  state_ = State::kClosed;
  loop_.Remove(socket_->descriptor());
  socket_->EndWriting();
  shutdown(socket_->descriptor(), SHUT_RDWR);  // the socket is closed at the end of the round
  out_.Clear();
  if (ConnectionCall* const call = std::exchange(call_, nullptr)) call->OnClosed(false);
  owner_.OnClosed(*this);
}

void Connection::CloseDuring(uint64_t call_number) {
  if (call_ != nullptr && call_number_ == call_number) Close();
}

// --- Events --------------------------------------------------------------------------------------

void Connection::OnEvents(uint32_t events) {
  if (state_ == State::kClosed) return;
  if ((events & (EPOLLHUP | EPOLLERR)) != 0) return Close();
  if (socket_->NeedsHandshake() && !Establish()) return;
  if ((events & EPOLLRDHUP) != 0 && state_ == State::kCall) return Close();
  if ((events & (EPOLLIN | EPOLLRDHUP)) != 0) is_readable_ = true;
  Run();
}

// Continues the handshake. Returns whether it is complete.
bool Connection::Establish() {
  const Socket::Handshake handshake = socket_->ContinueHandshake();
  if (handshake == Socket::Handshake::kComplete) {
    since_ = Now();
    is_readable_ = true;  // OpenSSL may hold bytes
    return true;
  }
  if (handshake == Socket::Handshake::kFailed) {
    Close();
  } else {
    SetInterest(InterestOf(handshake));
  }
  return false;
}

void Connection::OnTick(Instant now) {
  const std::chrono::nanoseconds time = now - since_;
  if (socket_->NeedsHandshake()) {
    if (time >= kHandshakeTime) Close();
    return;
  }
  const ConnectionSettings& settings = owner_.settings();
  switch (state_) {
    case State::kHead:
      if (in_.empty()) {
        if (time >= (has_served_ ? settings.idle : settings.patience)) Close();
      } else if (time >= settings.patience) {
        Reject(ErrorResponse(408, "the head of the request was sent too slowly"));
      }
      return;
    case State::kResponding:
      // The call watches the speed as well.
      if (time >= (call_ == nullptr ? settings.patience : kCallWriteTime)) Close();
      return;
    case State::kLingering:
      if (time >= settings.patience) Close();
      return;
    case State::kCall:
    case State::kBody:  // the call watches them
    case State::kClosed:
      return;
  }
}

// Goes on until it has to wait, or its turn is over.
void Connection::Run() {
  if (std::exchange(is_running_, true)) return;
  const std::shared_ptr<Connection> self = shared_from_this();
  const Instant began = Now();
  turn_left_ = kFairBytes;
  bool goes_on = true;
  while (goes_on && turn_left_ > 0 && Now() - began < kFairTime) goes_on = Step();
  is_running_ = false;
  if (state_ == State::kClosed) return;
  if (goes_on) loop_.RequestTurn(self, 0);
  UpdateInterest();
}

bool Connection::Step() {
  switch (state_) {
    case State::kHead:
      return ReadHead();
    case State::kBody:
      return StepBody();
    case State::kResponding:
      return Write();
    case State::kLingering:
      return Drop();
    case State::kCall:
    case State::kClosed:
      return false;
  }
  return false;
}

// A connection at work changes its interest only if it has to.
void Connection::UpdateInterest() {
  if (state_ == State::kResponding) return SetInterest(EPOLLOUT);
  const bool holds_back = state_ == State::kCall && is_readable_;
  SetInterest(holds_back ? EPOLLRDHUP : EPOLLIN | EPOLLRDHUP);
}

void Connection::SetInterest(uint32_t interest) {
  if (interest == interest_) return;
  interest_ = interest;
  loop_.Change(socket_->descriptor(), interest);
}

// --- Requests ------------------------------------------------------------------------------------

bool Connection::Fill() {
  in_.erase(0, std::exchange(in_begin_, 0));
  const size_t room = HeadParser::kMaxBytes - in_.size();
  const absl::Span<uint8_t> place = loop_.scratch().subspan(0, room);
  const iovec span = {place.data(), place.size()};
  if (!is_readable_ && !socket_->HasPending()) return false;
  const ssize_t count = socket_->Read({&span, 1});
  if (count == Socket::kEnded) {
    Close();
    return false;
  }
  if (count < static_cast<ssize_t>(room)) is_readable_ = false;
  if (count == Socket::kBlocked) return false;
  if (state_ == State::kHead && in_.empty()) since_ = Now();
  in_.append(reinterpret_cast<const char*>(place.data()), static_cast<size_t>(count));
  turn_left_ -= count;
  return true;
}

void Connection::Consume(size_t count) {
  in_begin_ += count;
  if (in_begin_ < in_.size()) return;
  in_.clear();
  in_begin_ = 0;
}

bool Connection::ReadHead() {
  if (in_.empty()) return Fill();
  if (parser_ == nullptr) parser_ = std::make_unique<HeadParser>();
  switch (parser_->Parse(Unread())) {
    case HeadParser::Result::kIncomplete:
      return Fill();
    case HeadParser::Result::kComplete:
      OnHead();
      return true;
    case HeadParser::Result::kMalformed:
      Reject(ErrorResponse(400, absl::StrCat("malformed request: ", parser_->error())));
      return true;
    case HeadParser::Result::kTooLarge:
      Reject(ErrorResponse(431, absl::StrCat("the head must have at most ", HeadParser::kMaxBytes,
                                             " bytes and ", HeadParser::kMaxHeaders, " headers")));
      return true;
    case HeadParser::Result::kUnknownVersion:
      Reject(ErrorResponse(505, "the version must be HTTP/1.1 or HTTP/1.0"));
      return true;
  }
  return false;
}

void Connection::OnHead() {
  request_ = parser_->TakeRequest();
  Consume(parser_->size());
  parser_.reset();
  has_served_ = true;
  closes_ = closes_ || !request_.keeps_alive;
  framing_ =
      request_.is_chunked ? BodyFraming::Chunked() : BodyFraming::OfLength(request_.content_length);
  if (const std::optional<Response> error = CheckHead()) return Reject(*error);
  expects_continue_ = request_.is_http11 && request_.Value("expect").has_value();
  Served served = Serve();
  if (const Response* const response = std::get_if<Response>(&served)) {
    if (request_.has_body()) return Reject(*response);
    return Respond(*response);
  }
  owner_.OnCall(*this);
  state_ = State::kCall;
  ++call_number_;
  call_ = owner_.NewCall(*this, std::get<CalledMethod>(std::move(served)));
  call_->Begin(request_);
}

// Returns an error for a head that can't be served, whatever its path.
std::optional<Response> Connection::CheckHead() const {
  const HeaderValues hosts = request_.Values("host");
  if (hosts.size() > 1 || (hosts.empty() && request_.is_http11)) {
    return ErrorResponse(
        400, absl::StrCat("the request has ", hosts.size(), " Host headers; it must have 1"));
  }
  if (std::optional<Response> error = CheckHost()) return error;
  if (owner_.settings().refuses_other_origins && !IsOurPage()) {
    return ErrorResponse(403, "the origin is not listed in --http_allow_origin");
  }
  const HeaderValues codings = request_.Values("transfer-encoding");
  const bool is_chunked = codings.size() == 1 && absl::EqualsIgnoreCase(codings[0], "chunked");
  if (!codings.empty() && (!is_chunked || !request_.is_http11)) {
    return ErrorResponse(501, "the transfer encoding must be chunked, in HTTP/1.1");
  }
  const auto encoding = request_.Value("content-encoding");
  if (encoding && !absl::EqualsIgnoreCase(*encoding, "identity")) {
    return ErrorResponse(415, absl::StrCat("the content encoding is ", *encoding,
                                           "; bodies must not be compressed"));
  }
  const auto expectation = request_.Value("expect");
  if (expectation && !absl::EqualsIgnoreCase(*expectation, "100-continue")) {
    return ErrorResponse(417, "the only expectation that is met is 100-continue");
  }
  return std::nullopt;
}

// That of an absolute target takes precedence, as RFC 9112 demands.
absl::string_view Connection::Authority() const {
  absl::string_view target = request_.target;
  if (absl::ConsumePrefix(&target, "http://") || absl::ConsumePrefix(&target, "https://")) {
    return target.substr(0, target.find_first_of("/?"));
  }
  return request_.Value("host").value_or("localhost");
}

std::optional<Response> Connection::CheckHost() const {
  for (const absl::string_view text : {request_.Value("host").value_or(""), Authority()}) {
    if (ParseHostPort(text)) continue;
    return ErrorResponse(400, absl::StrCat("the host is '", absl::CHexEscape(text.substr(0, 64)),
                                           "'; it must be a name or an address, with a port from "
                                           "0 to 65535 or none, and no user"));
  }
  const absl::string_view host = ParseHostPort(Authority())->host;
  const std::optional<HostNames>& ours = owner_.settings().hosts;
  if (!ours || ours->Contains(host)) return std::nullopt;
  return ErrorResponse(403, absl::StrCat("the host is '", host.substr(0, 64),
                                         "'; it must be localhost, an IP address or a name that "
                                         "--http_hosts lists"));
}

// Returns false if a page of another origin that is not allowed sent the request. A browser sends a
// page's simple requests without asking first, and says where they come from.
bool Connection::IsOurPage() const {
  const HeaderValues origins = request_.Values("origin");
  if (origins.empty()) return true;
  if (origins.size() > 1) return false;
  if (!AllowedOrigin().empty()) return true;
  absl::string_view origin = origins[0];
  // A proxy in front may add TLS.
  return (absl::ConsumePrefix(&origin, "http://") || absl::ConsumePrefix(&origin, "https://")) &&
         absl::EqualsIgnoreCase(origin, Authority());
}

// Returns the origin of the page that sent the request, if the page may read the response.
absl::string_view Connection::AllowedOrigin() const {
  const auto& allowed = owner_.settings().allowed_origins;
  const auto origin = request_.Value("origin");
  if (!origin || std::find(allowed.begin(), allowed.end(), *origin) == allowed.end()) return "";
  return *origin;
}

bool Connection::IsPreflight() const {
  return request_.method == "OPTIONS" && !AllowedOrigin().empty() &&
         request_.Value("access-control-request-method").has_value();
}

Served Connection::Serve() {
  if (IsPreflight()) {
    return Response{.status = 204,
                    .headers = {{"Access-Control-Allow-Methods", "GET, HEAD, POST"},
                                {"Access-Control-Allow-Headers", kAllowedHeaders},
                                {"Access-Control-Max-Age", "600"}}};
  }
  try {
    return owner_.Serve(request_);
  } catch (const std::exception& exception) {
    Log(LogLevel::kError, "HTTP request failed", {{"reason", exception.what()}});
    return ErrorResponse(500, "internal error");
  }
}

// --- Bodies --------------------------------------------------------------------------------------

void Connection::ReadBody() {
  if (state_ == State::kClosed) return;
  state_ = State::kBody;
  if (std::exchange(expects_continue_, false) && in_.empty()) {
    const iovec text = {const_cast<char*>(kContinue), sizeof(kContinue) - 1};
    // All responses have been sent, so there is room.
    if (socket_->Write({&text, 1}) != static_cast<ssize_t>(text.iov_len)) return Close();
  }
  Run();
}

bool Connection::StepBody() {
  absl::string_view bytes = Unread();
  const BodyFraming::Next next = framing_.Advance(bytes);
  Consume(Unread().size() - bytes.size());
  if (next == BodyFraming::Next::kData) return ReadData();
  if (next == BodyFraming::Next::kNeedMore) return Fill();
  state_ = State::kCall;
  if (next == BodyFraming::Next::kEnd) {
    call_->OnBodyEnd();
  } else {
    closes_ = true;
    call_->OnBadBody();
  }
  return true;
}

// Moves data into its place, from the buffer or from the socket.
bool Connection::ReadData() {
  state_ = State::kCall;  // unless there is a place, or the call goes on at once
  absl::Span<uint8_t> place = call_->BodyPlace();
  if (place.empty()) return state_ != State::kCall;
  state_ = State::kBody;
  if (in_.empty() && request_.is_chunked && framing_.data_left() < kLeastDirectBytes) return Fill();
  place = place.subspan(0, std::min<uint64_t>(place.size(), framing_.data_left()));
  size_t count = std::min(place.size(), Unread().size());
  if (count > 0) {
    std::memcpy(place.data(), Unread().data(), count);
    Consume(count);
  } else {
    if (!is_readable_ && !socket_->HasPending()) return false;
    place = place.subspan(0, std::max<int64_t>(turn_left_, 1));
    const iovec span = {place.data(), place.size()};
    const ssize_t read = socket_->Read({&span, 1});
    if (read == Socket::kEnded) {
      Close();
      return false;
    }
    if (read == Socket::kBlocked) {
      is_readable_ = false;
      return false;
    }
    count = static_cast<size_t>(read);
    turn_left_ -= read;
  }
  framing_.TakeData(count);
  call_->OnBodyBytes(count);
  return true;
}

// --- Responses -----------------------------------------------------------------------------------

std::string Connection::HeadOf(int status, absl::string_view content_type,
                               absl::Span<const Header> headers, int64_t body_bytes) const {
  std::string head = absl::StrCat("HTTP/1.1 ", status, " ", ReasonOf(status), "\r\n");
  if (status != 204 && status != 304) {
    absl::StrAppend(&head, "Content-Type: ", content_type, "\r\nContent-Length: ", body_bytes,
                    "\r\n");
  }
  for (const Header& header : headers) {
    absl::StrAppend(&head, header.name, ": ", header.value, "\r\n");
  }
  if (!owner_.settings().allowed_origins.empty()) head += "Vary: Origin\r\n";
  if (const absl::string_view origin = AllowedOrigin(); !origin.empty()) {
    absl::StrAppend(&head, "Access-Control-Allow-Origin: ", origin,
                    "\r\nAccess-Control-Expose-Headers: ", kExposedHeaders, "\r\n");
  }
  if (closes_) head += "Connection: close\r\n";
  return head + "\r\n";
}

void Connection::Respond(int status, absl::string_view content_type,
                         absl::Span<const Header> headers, ResponseMessage body) {
  if (state_ == State::kClosed) return;
  // Bytes of the body that have not been read would be taken for the next request.
  const bool is_unread = call_ != nullptr && !framing_.is_complete();
  closes_ = closes_ || is_unread || owner_.is_draining();
  state_ = State::kResponding;
  since_ = Now();
  out_.Append({HeadOf(status, content_type, headers, body.size()), {}});
  if (request_.method != "HEAD") {
    for (ResponseMessage::Piece& piece : body.TakePieces()) {
      out_.Append({std::move(piece.bytes), {}});
      out_.Append({{}, std::move(piece.payload)});
    }
  }
  Run();
}

void Connection::Respond(const Response& response) {
  if (request_.method != "HEAD") {
    owner_.OnHolding(*this, static_cast<int64_t>(response.body.size()));
  }
  ResponseMessage body;
  body.Append(response.body);
  Respond(response.status, response.content_type, response.headers, std::move(body));
}

// Responds, and reads no more requests.
void Connection::Reject(const Response& response) {
  closes_ = true;
  Respond(response);
}

bool Connection::Write() {
  int64_t left = turn_left_;
  const OutputQueue::Written result = out_.Write(*socket_, left);
  const int64_t written = std::exchange(turn_left_, left) - left;
  if (written > 0) {
    since_ = Now();
    if (call_ != nullptr) call_->OnBytesWritten(written);
  }
  if (result == OutputQueue::Written::kFailed) Close();
  if (result == OutputQueue::Written::kAll) OnResponseSent();
  return result == OutputQueue::Written::kAll || turn_left_ <= 0;
}

void Connection::OnResponseSent() {
  since_ = Now();
  request_ = {};
  state_ = closes_ ? State::kLingering : State::kHead;
  if (closes_) socket_->EndWriting();
  owner_.OnResponded(*this);
  if (ConnectionCall* const call = std::exchange(call_, nullptr)) call->OnClosed(true);
}

// Discards the client's bytes after the last response.
bool Connection::Drop() {
  if (!is_readable_ && !socket_->HasPending()) return false;
  const absl::Span<uint8_t> scratch = loop_.scratch();
  const iovec span = {scratch.data(), scratch.size()};
  const ssize_t count = socket_->Read({&span, 1});
  if (count == Socket::kBlocked) {
    is_readable_ = false;
    return false;
  }
  if (count == Socket::kEnded || (dropped_bytes_ += count) > kMaxDroppedBytes) {
    Close();
    return false;
  }
  turn_left_ -= count;
  return true;
}

}  // namespace rapt::http
