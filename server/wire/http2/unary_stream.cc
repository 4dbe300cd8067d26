#include "server/wire/http2/unary_stream.h"

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

UnaryStream::UnaryStream(Connection& connection, int32_t id, const CallEnvironment& environment,
                         BufferPool& pool, LiveCount& live_calls, const UnaryMethod& method)
    : UnaryCall(environment, method.observe, method.traits),
      loop_(connection.loop()),
      weak_connection_(connection.weak_from_this()),
      connection_(&connection),
      id_(id),
      pool_(pool),
      place_(live_calls),
      handler_(method.new_handler()) {}

void UnaryStream::Begin(CallHeaders headers, std::chrono::nanoseconds timeout, bool has_encoding) {
  has_encoding_ = has_encoding;
  const Instant arrived = call().arrived();
  if (timeout < Instant::max() - arrived) headers.deadline = arrived + timeout;
  OnHeaders(headers);
}

void UnaryStream::OnData(absl::Span<const uint8_t> bytes) {
  if (has_finished_) return;
  if (state_ == State::kPrefix) TakePrefix(bytes);
  if (bytes.empty() || has_finished_) return;
  switch (state_) {
    case State::kPrefix:
      return;
    case State::kWaiting:
      return HoldEarly(bytes);
    case State::kBody:
      return TakeBody(bytes);
    case State::kReceived:
      OnCancelled();
      return connection_->Reset(id_, NGHTTP2_PROTOCOL_ERROR);
  }
}

void UnaryStream::TakePrefix(absl::Span<const uint8_t>& bytes) {
  const size_t count = std::min(bytes.size(), prefix_.size() - prefix_bytes_);
  std::copy_n(bytes.begin(), count, prefix_.begin() + static_cast<ptrdiff_t>(prefix_bytes_));
  prefix_bytes_ += count;
  bytes.remove_prefix(count);
  if (prefix_bytes_ < prefix_.size()) return;
  for (size_t i = 1; i < prefix_.size(); ++i) size_ = size_ << 8 | prefix_[i];
  state_ = State::kWaiting;
  if (absl::Status status = CheckPrefix(); !status.ok()) return FailReading(std::move(status));
  OnSize(size_);
}

absl::Status UnaryStream::CheckPrefix() const {
  if (!is_compressed()) return absl::OkStatus();
  if (prefix_[0] == 1 && has_encoding_) {
    return absl::UnimplementedError("the message is compressed; send it with identity encoding");
  }
  return absl::InternalError(absl::StrCat("the compressed flag of the message is ", prefix_[0],
                                          " without an encoding; it must be 0"));
}

// Bytes that the stream's initial window let through.
void UnaryStream::HoldEarly(absl::Span<const uint8_t> bytes) {
  if (early_.empty()) {
    const int64_t most = std::min(size_, ReceiveWindows::kInitial);
    early_memory_ = engine().ChargeMessage(most);
    early_.reserve(static_cast<size_t>(most));
  }
  const size_t missing = static_cast<size_t>(size_) - early_.size();
  has_surplus_ = bytes.size() > missing;
  bytes = bytes.subspan(0, missing);
  early_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  connection_->SetUnadmitted(id_, static_cast<int64_t>(early_.size()));
}

void UnaryStream::StartReading() {
  loop_.Run([this] { OpenBody(); });
}

void UnaryStream::OpenBody() {
  state_ = State::kBody;
  if (connection_ == nullptr) {
    OnRead(false);  // deletes this
    return;
  }
  if (!OnReadingStarted()) return;  // may have deleted this
  try {
    body_ = pool_.Take(size_);
  } catch (const std::bad_alloc&) {
    return FailReading(OutOfMemory(absl::StrCat("a message of ", size_, " bytes")));
  }
  const std::string early = std::exchange(early_, {});
  early_memory_ = {};
  if (!early.empty()) connection_->SetUnadmitted(id_, 0);
  if (has_surplus_) return FailReading(MoreThanOneMessage());
  if (!early.empty() || size_ == 0) {
    TakeBody({reinterpret_cast<const uint8_t*>(early.data()), early.size()});
  }
  if (has_ended_ && state_ == State::kBody) OnEnd();
}

void UnaryStream::FailReading(absl::Status status) {
  state_ = State::kReceived;
  OnBadRead(std::move(status));
}

absl::Status UnaryStream::MoreThanOneMessage() const {
  return Invalid("the call sent more than one message; the first has ", size_, " bytes");
}

absl::Span<uint8_t> UnaryStream::DirectPlace() {
  if (state_ != State::kBody) return {};
  return {reinterpret_cast<uint8_t*>(body_.data()) + received_,
          static_cast<size_t>(size_ - received_)};
}

void UnaryStream::TakeBody(absl::Span<const uint8_t> bytes) {
  const absl::Span<uint8_t> place = DirectPlace();
  if (bytes.size() > place.size()) return FailReading(MoreThanOneMessage());
  if (bytes.data() != place.data() && !bytes.empty()) {
    std::memcpy(place.data(), bytes.data(), bytes.size());
  }
  received_ += static_cast<int64_t>(bytes.size());
  OnBytesRead(static_cast<int64_t>(bytes.size()));
  const int64_t missing = size_ - received_;
  if (missing > 0 || expects_) connection_->GrantWindow(id_, missing);
  expects_ = missing > 0;
  if (missing == 0) OnWhole();
}

void UnaryStream::OnWhole() {
  state_ = State::kReceived;
  if (!OnRead(true)) return;
  slice_ = {body_.data(), 0, size_};
  const absl::Span<const ByteSlice> slices(&slice_, size_ > 0 ? 1 : 0);
  handler_->OnMessage({{slices, 0}, size_}, *this);
}

void UnaryStream::OnEnd() {
  has_ended_ = true;
  // While the call waits for memory, OpenBody() finds out whether the message is whole.
  if (has_finished_ || state_ == State::kReceived || state_ == State::kWaiting) return;
  state_ = State::kReceived;
  OnRead(false);
}

void UnaryStream::Respond(ResponseMessage response) {
  BeginResponse(response.size());
  loop_.Run([this, response = std::move(response)]() mutable {
    has_finished_ = true;
    if (connection_ == nullptr) return Delete();
    connection_->SendMessage(id_, std::move(response));
    connection_->SendStatus(id_, absl::OkStatus(), TrailersOf(call(), absl::OkStatus()));
  });
}

void UnaryStream::Finish(const absl::Status& status) {
  loop_.Run([this, status] {
    has_finished_ = true;
    if (connection_ == nullptr) return Delete();
    Trailers trailers = TrailersOf(call(), status);
    if (is_compressed()) trailers.emplace_back("grpc-accept-encoding", "identity");
    if (carries_tensors() && IsForLackOfRoom(RejectionOf(status))) {
      connection_->LowerStreamLimit(id_);
    }
    connection_->SendStatus(id_, status, std::move(trailers));
  });
}

// The call may be gone when the task runs.
void UnaryStream::Abort() {
  loop_.Post([connection = weak_connection_, id = id_] {
    if (const auto open = connection.lock()) open->Reset(id, NGHTTP2_CANCEL);
  });
}

void UnaryStream::OnClosed(bool has_responded) {
  connection_ = nullptr;
  if (!has_responded) OnCancelled();
  if (has_finished_) return Delete();
  if (state_ == State::kPrefix || state_ == State::kBody) OnRead(false);  // deletes this
}

void UnaryStream::Delete() {
  UnaryCall::OnClosed();
  delete this;
}

}  // namespace rapt
