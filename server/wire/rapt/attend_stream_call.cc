#include "server/wire/rapt/attend_stream_call.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt::native {
namespace {

// One chunk is computed, one is received.
constexpr int64_t kHeldChunks = 2;

// The number of result slots; small results free theirs when they are encoded.
constexpr size_t kHeldResponses = 2;

}  // namespace

AttendStreamCall::AttendStreamCall(const CallEnvironment& environment, const CallObserver& observe,
                                   MessageStream& stream)
    : StreamCall(stream),
      call_(environment, observe),
      alarm_(environment.timer, [this] { OnAlarm(); }) {
  ++call_.streams().open;
}

void AttendStreamCall::Begin() {
  const CallHeaders headers = stream().Headers(call_.arrived());
  absl::Status status = call_.Enter(headers);
  if (status.ok()) status = call_.SetDeadline(headers.deadline);
  is_admitting_ = true;
  admission_began_ = call_.arrived();
  const auto on_admitted = [this](absl::StatusOr<MessageReservation> place) {
    Post([this, place = std::move(place)]() mutable { OnHeaderAdmitted(std::move(place)); });
  };
  if (!status.ok()) return on_admitted(std::move(status));
  call_.AdmitMessage(kMaxHeaderBytes, on_admitted);
}

void AttendStreamCall::Post(Event event) {
  {
    MutexLock lock(mutex_);
    events_.push_back(std::move(event));
    if (std::exchange(is_handling_, true)) return;
  }
  for (;;) {
    std::vector<Event> events;
    {
      MutexLock lock(mutex_);
      events.swap(events_);
      if (events.empty()) {
        is_handling_ = false;
        return;
      }
    }
    for (Event& next : events) next();
    if (Proceed()) return;  // no later event is handled
  }
}

void AttendStreamCall::OnHeaderAdmitted(absl::StatusOr<MessageReservation> place) {
  is_admitting_ = false;
  call_.AddTimeSince(admission_began_, Stage::kQueue);
  if (!place.ok()) return Fail(place.status(), Stage::kQueue);
  call_.KeepMessageMemory(*std::move(place));
}

bool AttendStreamCall::Proceed() {
  if (!status_.ok()) {
    if (is_admitting_ || is_computing_ || is_writing_) return false;
    FinishWithError();
    return true;
  }
  if (is_admitting_) return false;
  if (!is_computing_) ComputeNext();
  if (!is_writing_ && !responses_.empty()) WriteNext();
  if (MayRead()) Read();
  if (!IsComplete()) return false;
  FinishOk();
  return true;
}

// A chunk may be read while no received one waits.
bool AttendStreamCall::MayRead() const { return !is_reading_ && !is_half_closed_ && !waiting_; }

void AttendStreamCall::Read() {
  is_reading_ = true;
  const int64_t bytes = order_ ? MaxChunkMessageBytes(stream_->plan()) : kMaxHeaderBytes;
  call_.BeginReceiving(bytes, Held(), alarm_);
  SetAlarm();
  stream().StartRead(bytes);
}

void AttendStreamCall::OnRead(bool ok) {
  is_reading_ = false;
  SetAlarm();
  call_.EndReceiving();
  if (!status_.ok()) return;
  absl::Status status;
  if (ok) {
    status = order_ ? TakeChunk() : OpenStream();
  } else if (!order_) {
    status = Invalid("the stream ended before its header");
  } else if (const auto expected = order_->next()) {
    status = Invalid("the stream ended; expected ", ToText(*expected));
  } else {
    is_half_closed_ = true;
  }
  was_truncated_ = !ok && !status.ok();
  if (!status.ok()) Fail(std::move(status), Stage::kReceive);
}

void AttendStreamCall::OnTooLarge(int64_t bytes) {
  is_reading_ = false;
  // The same text as the codec's.
  const std::string error =
      order_ ? absl::StrCat("the message has ", bytes, " bytes; a chunk of the header's size has ",
                            "at most ", MaxChunkMessageBytes(stream_->plan()))
             : absl::StrCat("the header has ", bytes, " bytes; at most ", kMaxHeaderBytes,
                            " are allowed");
  Fail(Invalid(error), Stage::kReceive);
}

absl::Status AttendStreamCall::OpenStream() {
  const IncomingMessage header = stream().TakeMessage();
  call_.report().received_bytes += header.bytes.size;
  RAPT_ASSIGN_OR_RETURN(StreamRequest request, DecodeStreamHeader(header.bytes));
  request.deadline = call_.deadline();
  request.cancelled = &call_.cancelled();
  request.caller = call_.caller_memory();
  RAPT_ASSIGN_OR_RETURN(stream_, call_.engine().PlanStream(std::move(request)));
  const ChunkedPlan& plan = stream_->plan();
  call_.report().model = Model::kAttention;
  call_.SetProblem(plan.problem);
  call_.report().routing = plan.full.routing;
  call_.report().plan = plan.full.Describe();
  RAPT_RETURN_IF_ERROR(CheckMessageSizes(plan, call_.limits().max_message_bytes));

  // A call that waits for memory holds none, except the tensors of its header: 64 KiB at most.
  call_.ReleaseMessageMemory();
  is_admitting_ = true;
  admission_began_ = call_.Now();
  call_.engine().AdmitStream(
      stream_, kHeldChunks * MaxChunkMessageBytes(plan), [this](absl::Status admitted) {
        Post([this, admitted = std::move(admitted)] { OnStreamAdmitted(admitted); });
      });
  return absl::OkStatus();
}

void AttendStreamCall::OnStreamAdmitted(const absl::Status& status) {
  is_admitting_ = false;
  call_.AddTimeSince(admission_began_, Stage::kQueue);
  if (!status.ok()) return Fail(status, Stage::kQueue);
  order_.emplace(stream_->plan());
}

absl::Status AttendStreamCall::TakeChunk() {
  Received received{.message = stream().TakeMessage(), .chunk = {}};
  call_.report().received_bytes += received.message.bytes.size;
  const std::optional<ChunkOrder::Expected> expected = order_->next();
  RAPT_ASSIGN_OR_RETURN(received.chunk,
                        DecodeChunk(received.message.bytes, stream_->plan(), expected));
  received.streams = expected->streams;
  waiting_ = std::move(received);
  order_->Advance();
  ++call_.streams().chunks;
  return absl::OkStatus();
}

void AttendStreamCall::ComputeNext() {
  if (!order_ || responses_.size() >= kHeldResponses) return;
  if (waiting_) return ComputeChunk();
  if (!order_->next() && stream_->plan().keys_stream()) FinishRows();
}

void AttendStreamCall::ComputeChunk() {
  computed_ = std::exchange(waiting_, std::nullopt);
  is_computing_ = true;
  if (computed_->streams) {
    stream_->Fold(computed_->chunk, [this](StepResult result) { PostResult(std::move(result)); });
  } else {
    stream_->Keep(computed_->chunk, [this](StepResult result) { PostResult(std::move(result)); });
  }
}

void AttendStreamCall::FinishRows() {
  const int64_t rows = stream_->plan().problem.query_length;
  if (finished_rows_ == rows) return;
  const int64_t chunk = stream_->plan().chunking.query_chunk;
  const RowRange range = {finished_rows_, std::min(chunk, rows - finished_rows_)};
  finished_rows_ += range.count;
  is_computing_ = true;
  stream_->Finish(range, [this](StepResult result) { PostResult(std::move(result)); });
}

void AttendStreamCall::PostResult(StepResult result) {
  Post([this, result = std::move(result)]() mutable { OnComputed(std::move(result)); });
}

void AttendStreamCall::OnComputed(StepResult result) {
  is_computing_ = false;
  computed_.reset();
  call_.AddTime(Stage::kQueue, result.queue_time);
  call_.AddTime(Stage::kCompute, result.compute_time);
  if (!result.status.ok()) return Fail(std::move(result.status), Stage::kCompute);
  call_.report().flops += result.flops;
  if (result.outputs != StepResult::Outputs::kNone) responses_.push_back(EncodeOutput(result));
}

void AttendStreamCall::WriteNext() {
  ResponseMessage response = std::move(responses_.front());
  responses_.pop_front();
  is_writing_ = true;
  BeginSending(response);
  SetAlarm();
  stream().StartWrite(std::move(response));
}

// A caller that does not read would hold the outgoing message, and block results that need its
// slot.
void AttendStreamCall::BeginSending(const ResponseMessage& message) {
  call_.BeginSending(message.size(), call_.deadline(), Held(), alarm_);
}

// Memory of the header until the stream has its own, of both shares, until its last message.
AdmissionGate::Shares AttendStreamCall::Held() const {
  return {.receive = order_ || call_.message_memory_bytes() > 0, .compute = order_.has_value()};
}

void AttendStreamCall::OnWritten(bool ok) {
  is_writing_ = false;
  SetAlarm();
  call_.EndSending();
  if (!ok) Fail(call_.CancelledOrLate(), Stage::kSend);
}

void AttendStreamCall::OnAlarm() {
  if (has_responded_) {  // the caller does not read the end of the stream
    if (call_.Now() >= call_.send_end()) stream().Cancel();
    return;
  }
  Post([this] { HandleAlarm(); });
}

void AttendStreamCall::HandleAlarm() {
  const Instant now = call_.Now();
  if (now >= call_.deadline()) {
    Fail(call_.CancelledOrLate(), StageNow());
    if (is_writing_) stream().Cancel();  // the caller does not read
    return;
  }
  if (is_writing_ && now >= call_.send_end()) {
    Fail(call_.NotSent(), Stage::kSend);
    return stream().Cancel();
  }
  if (is_reading_ && now >= call_.receive_end()) {
    Fail(call_.SlowSender("stream"), Stage::kReceive);
  }
  SetAlarm();  // it may have fired for an operation that has ended since
}

void AttendStreamCall::SetAlarm() {
  alarm_.Set(NextEnd());
  alarm_.SetNoLaterThan(NextEnd());  // it may have become earlier before the last line
}

Instant AttendStreamCall::NextEnd() const {
  Instant end = call_.deadline();
  if (is_reading_ && status_.ok()) end = std::min(end, call_.receive_end());
  if (is_writing_) end = std::min(end, call_.send_end());
  return end;
}

Stage AttendStreamCall::StageNow() const {
  if (is_writing_) return Stage::kSend;
  if (is_computing_) return Stage::kCompute;
  return is_reading_ ? Stage::kReceive : Stage::kQueue;
}

void AttendStreamCall::Fail(absl::Status status, Stage stage) {
  if (!status_.ok()) return;
  status_ = std::move(status);
  call_.report().ended_in = stage;
  responses_.clear();  // a step may wait for their slots
  call_.Cancel();
}

bool AttendStreamCall::IsComplete() const {
  if (!is_half_closed_ || waiting_ || is_computing_ || is_writing_ || !responses_.empty())
    return false;
  return !stream_->plan().keys_stream() || finished_rows_ == stream_->plan().problem.query_length;
}

void AttendStreamCall::FinishOk() {
  call_.report().ended_in = Stage::kSend;
  const CallReport& report = call_.report();
  const auto queue_time = report.time_of(Stage::kQueue);
  const auto compute_time = std::max(report.time_of(Stage::kCompute), Instant::duration::zero());
  ResponseMessage end = EncodeEnd(stream_->plan(), queue_time, compute_time);
  Release();
  BeginSending(end);
  has_responded_ = true;
  alarm_.Set(call_.send_end());
  stream().StartWriteAndFinish(std::move(end), call_);
}

void AttendStreamCall::FinishWithError() {
  Release();
  stream().StartFinish(status_, call_);
}

// Releases the memory before the caller receives the status, except results that the transport
// still sends.
void AttendStreamCall::Release() {
  call_.ReleaseMessageMemory();
  responses_.clear();
  waiting_.reset();
  computed_.reset();
  order_.reset();
  stream_.reset();
}

void AttendStreamCall::OnSize(int64_t bytes) {
  Post([this, bytes] { OnTooLarge(bytes); });
}

void AttendStreamCall::OnReadDone(bool ok) {
  Post([this, ok] { OnRead(ok); });
}

void AttendStreamCall::OnWriteDone(bool ok) {
  Post([this, ok] { OnWritten(ok); });
}

void AttendStreamCall::OnCancel() {
  is_cancelled_ = true;
  Post([this] { Fail(call_.CancelledOrLate(), StageNow()); });
}

void AttendStreamCall::OnDone() {
  call_.EndWaits();
  alarm_.Cancel();
  // A read may fail before the cancellation by the caller is known, and the last response may be
  // unsent.
  if (is_cancelled_ && was_truncated_) status_ = call_.CancelledOrLate();
  if (is_cancelled_ && status_.ok()) {
    status_ = call_.NotSent();
  }
  call_.Report(std::move(status_));
  --call_.streams().open;
}

}  // namespace rapt::native
