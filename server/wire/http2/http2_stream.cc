#include "server/wire/http2/http2_stream.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/invalid.h"
#include "server/rejection.h"

namespace rapt {
namespace {

// Whether the server has no room. A caller's own limit does not concern others of its connection.
bool IsForLackOfRoom(Rejection rejection) {
  return rejection == Rejection::kQueueFull || rejection == Rejection::kOpenCalls;
}

}  // namespace

Http2Stream::Http2Stream(Connection& connection, int32_t id, const Traits& traits, Engine& engine,
                         BufferPool& pool, LiveCount& live)
    : loop_(connection.loop()),
      weak_connection_(connection.weak_from_this()),
      connection_(&connection),
      id_(id),
      traits_(traits),
      engine_(engine),
      pool_(pool),
      place_(live) {}

void Http2Stream::Serve(absl::FunctionRef<std::unique_ptr<StreamCall>(MessageStream&)> new_call,
                        const CallHeaders& headers, std::chrono::nanoseconds timeout) {
  headers_ = &headers;
  timeout_ = timeout;
  call_ = new_call(*this);
  Ref();
  call_->Begin();
  headers_ = nullptr;
  Unref();
}

CallHeaders Http2Stream::Headers(Instant now) const {
  CallHeaders headers = *headers_;
  if (timeout_ < Instant::max() - now) headers.deadline = now + timeout_;
  return headers;
}

void Http2Stream::Unref() {
  if (--pending_ > 0) return;
  call_->OnDone();
  delete this;
}

template <typename Task>
void Http2Stream::Run(Task task) {
  Ref();
  loop_.Run([this, task = std::move(task)]() mutable {
    task();
    Unref();  // NOLINT(clang-analyzer-cplusplus.NewDelete): Ref() keeps it
  });
}

void Http2Stream::OnData(absl::Span<const uint8_t> bytes) {
  if (has_finished_ || is_bad_) return;
  if (has_message_) {
    call_->OnCancel();
    return connection_->Reset(id_, NGHTTP2_PROTOCOL_ERROR);
  }
  Ref();
  if (early_.empty()) {
    is_taking_ = true;
    bytes = Take(bytes);
    is_taking_ = false;
  }
  if (!has_finished_ && !is_bad_) HoldEarly(bytes);
  Proceed();
  Unref();
}

// Takes bytes of the message that is read. Returns those after it.
absl::Span<const uint8_t> Http2Stream::Take(absl::Span<const uint8_t> bytes) {
  while (takes() && (!bytes.empty() || is_whole())) {
    if (body_ == nullptr) {
      const size_t count = std::min(bytes.size(), prefix_.size() - prefix_bytes_);
      std::copy_n(bytes.begin(), count, prefix_.begin() + static_cast<ptrdiff_t>(prefix_bytes_));
      prefix_bytes_ += count;
      bytes.remove_prefix(count);
      if (prefix_bytes_ == prefix_.size()) OpenBody();
      continue;
    }
    const absl::Span<uint8_t> place = DirectPlace();
    if (traits_.is_unary && bytes.size() > place.size()) {
      FailRead(Invalid("the call sent more than one message; the first has ", size_, " bytes"),
               NGHTTP2_PROTOCOL_ERROR);
      return {};
    }
    const size_t count = std::min(bytes.size(), place.size());
    if (count > 0 && bytes.data() != place.data()) std::memcpy(place.data(), bytes.data(), count);
    bytes.remove_prefix(count);
    received_ += static_cast<int64_t>(count);
    call_->OnBytesRead(static_cast<int64_t>(count));
    if (!is_whole()) continue;
    has_message_ = traits_.is_unary;
    if (!traits_.is_unary) {
      connection_->EarnByMessage();
    } else if (std::exchange(expects_, false)) {
      connection_->GrantWindow(id_, 0);  // the call may finish in EndRead()
    }
    EndRead(true);
  }
  return bytes;
}

void Http2Stream::OpenBody() {
  size_ = 0;
  for (size_t i = 1; i < prefix_.size(); ++i) size_ = size_ << 8 | prefix_[i];
  if (is_compressed()) return FailRead(CompressedMessage(), NGHTTP2_PROTOCOL_ERROR);
  if (size_ > max_bytes_) {
    is_reading_ = false;
    return call_->OnSize(size_);
  }
  auto body = std::make_shared<Body>();
  try {
    body->buffer = pool_.Take(size_);
  } catch (const std::bad_alloc&) {
    return FailRead(OutOfMemory(absl::StrCat("a message of ", size_, " bytes")),
                    NGHTTP2_INTERNAL_ERROR);
  }
  body->slice = {body->buffer.data(), 0, size_};
  body_ = std::move(body);
  received_ = 0;
}

absl::Span<uint8_t> Http2Stream::DirectPlace() {
  if (!is_reading_ || body_ == nullptr) return {};
  return {reinterpret_cast<uint8_t*>(body_->buffer.data()) + received_,
          static_cast<size_t>(size_ - received_)};
}

// The call gives the memory of a message that failed back.
void Http2Stream::EndRead(bool ok) {
  if (!ok) body_ = nullptr;
  is_reading_ = false;
  prefix_bytes_ = 0;
  call_->OnReadDone(ok);
}

void Http2Stream::FailRead(absl::Status status, uint32_t reset_code) {
  is_bad_ = true;
  body_ = nullptr;
  if (!traits_.is_unary) return connection_->Reset(id_, reset_code);
  is_reading_ = false;
  call_->OnBadRead(std::move(status));
}

absl::Status Http2Stream::CompressedMessage() const {
  if (prefix_[0] == 1 && traits_.has_encoding) {
    return absl::UnimplementedError("the message is compressed; send it with identity encoding");
  }
  return absl::InternalError(absl::StrCat("the compressed flag of the message is ", prefix_[0],
                                          " without an encoding; it must be 0"));
}

IncomingMessage Http2Stream::TakeMessage() {
  std::shared_ptr<Body> body = std::exchange(body_, nullptr);
  const absl::Span<const ByteSlice> slices(&body->slice, size_ > 0 ? 1 : 0);
  return {{{slices, 0}, size_}, std::move(body)};
}

// Keeps bytes that arrive while no message is read, at most the window that OpenWindow() leaves. Of
// those after the message of a unary call, one suffices to refuse them.
void Http2Stream::HoldEarly(absl::Span<const uint8_t> bytes) {
  if (bytes.empty()) return;
  int64_t most = ReceiveWindows::kInitial;
  if (traits_.is_unary) most = std::min(most, size_);
  if (early_.empty()) early_memory_ = engine_.ChargeMessage(most);
  if (traits_.is_unary) bytes = bytes.subspan(0, static_cast<size_t>(most) + 1 - early_.size());
  early_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Resumes reading after a change. A read that starts meanwhile is served by the loop.
void Http2Stream::Proceed() {
  if (connection_ == nullptr || has_finished_ || is_bad_ || is_taking_) return;
  TakeEarly();
  OpenWindow();
  if (is_reading_ && has_ended_) EndRead(false);
}

void Http2Stream::TakeEarly() {
  if (early_.empty() && !(takes() && is_whole())) return;
  is_taking_ = true;
  while (takes() && (!early_.empty() || is_whole())) {
    const std::string early = std::exchange(early_, {});
    early_memory_ = {};
    const absl::Span<const uint8_t> rest =
        Take({reinterpret_cast<const uint8_t*>(early.data()), early.size()});
    if (!is_bad_) HoldEarly(rest);
  }
  is_taking_ = false;
  connection_->SetUnadmitted(id_, static_cast<int64_t>(early_.size()));
}

// Opens the window for the rest of the message that is read, and for bytes that may come early.
void Http2Stream::OpenWindow() {
  int64_t expected = is_reading_ && body_ != nullptr ? size_ - received_ : 0;
  if (!traits_.is_unary) expected += ReceiveWindows::kInitial - static_cast<int64_t>(early_.size());
  if (expected > 0 || expects_) connection_->GrantWindow(id_, expected);
  expects_ = expected > 0;
}

void Http2Stream::OnEnd() {
  has_ended_ = true;
  Ref();
  Proceed();
  Unref();
}

void Http2Stream::OnDrained() {
  if (!is_writing_) return;
  is_writing_ = false;
  // Posted: must run neither inside nghttp2 nor inside the call that started the write.
  Ref();
  loop_.Post([this] {
    call_->OnWriteDone(true);
    Unref();
  });
}

void Http2Stream::OnClosed(bool has_responded) {
  Ref();
  connection_ = nullptr;
  if (!has_responded) call_->OnCancel();
  if (is_reading_) EndRead(false);
  if (std::exchange(is_writing_, false)) call_->OnWriteDone(false);
  Unref();
  // The end of the stream, which holds a reference until here.
  Unref();  // NOLINT(clang-analyzer-cplusplus.NewDelete)
}

void Http2Stream::StartRead(int64_t max_bytes) {
  Run([this, max_bytes] {
    if (has_finished_) return;
    max_bytes_ = max_bytes;
    is_reading_ = true;
    if (connection_ == nullptr) return EndRead(false);
    if (prefix_bytes_ == prefix_.size()) OpenBody();  // after OnSize()
    Proceed();
  });
}

void Http2Stream::StartWrite(ResponseMessage message) {
  Run([this, message = std::move(message)]() mutable {
    if (connection_ == nullptr) {
      Ref();
      return loop_.Post([this] {
        call_->OnWriteDone(false);
        Unref();
      });
    }
    is_writing_ = true;
    connection_->SendMessage(id_, std::move(message));
  });
}

void Http2Stream::StartWriteAndFinish(ResponseMessage message, const Call& call) {
  Run([this, message = std::move(message),
       trailers = TrailersOf(call, absl::OkStatus())]() mutable {
    has_finished_ = true;
    if (connection_ != nullptr) {
      connection_->SendMessage(id_, std::move(message));
      connection_->SendStatus(id_, absl::OkStatus(), std::move(trailers));
    }
    Unref();  // the end of the call
  });
}

void Http2Stream::StartFinish(const absl::Status& status, const Call& call) {
  Run([this, status, trailers = TrailersOf(call, status)]() mutable {
    has_finished_ = true;
    if (connection_ != nullptr) {
      if (is_compressed()) trailers.emplace_back("grpc-accept-encoding", "identity");
      if (traits_.carries_tensors && IsForLackOfRoom(RejectionOf(status))) {
        connection_->LowerStreamLimit(id_);
      }
      connection_->SendStatus(id_, status, std::move(trailers));
    }
    Unref();  // the end of the call
  });
}

void Http2Stream::Post(absl::AnyInvocable<void()> task) { Run(std::move(task)); }

void Http2Stream::Cancel() {
  loop_.Post([connection = weak_connection_, id = id_] {
    if (const auto open = connection.lock()) open->Reset(id, NGHTTP2_CANCEL);
  });
}

}  // namespace rapt
