#include "server/wire/grpc/rapt/attend_stream_call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/rejection.h"
#include "server/wire/grpc/status.h"
#include "server/wire/grpc/traceparent.h"

namespace rapt::native {
namespace {

// Of chunks: one is computed, one is received.
constexpr int64_t kHeldChunks = 2;

// As many as there are places for results; small ones leave their place when they are encoded.
constexpr size_t kHeldAnswers = 2;

}  // namespace

AttendStreamCall::AttendStreamCall(const CallEnvironment& environment, const CallObserver& observe,
                                   std::unique_ptr<GrpcCall> call)
    : GenericCall(std::move(call)),
      environment_(environment),
      observe_(observe),
      arrived_(environment.clock.Now()),
      alarm_(environment.timer, [this] { OnAlarm(); }) {
  ++environment_.streams.open;
}

void AttendStreamCall::Begin() {
  report_.traceparent = ReturnTraceparent(context());
  absl::StatusOr<std::string> caller = EnterOpenCalls(environment_, context());
  absl::Status status = caller.status();
  if (status.ok()) {
    caller_ = *std::move(caller);
    const absl::StatusOr<Instant> deadline = DeadlineOf(context(), arrived_, environment_.limits);
    status = deadline.status();
    if (deadline.ok()) deadline_ = *deadline;
  }
  is_admitting_ = true;
  admission_began_ = arrived_;
  const auto answer = [this](absl::StatusOr<MessageReservation> place) {
    Tell([&](Events& events) { events.header_admitted = std::move(place); });
  };
  if (!status.ok()) return answer(std::move(status));
  engine().AdmitMessage(kMaxHeaderBytes, deadline_, given_up_, answer);
}

void AttendStreamCall::Tell(absl::FunctionRef<void(Events&)> note) {
  {
    MutexLock lock(mutex_);
    note(events_);
    events_.any = true;
    if (std::exchange(is_attended_, true)) return;
  }
  for (;;) {
    Events events;
    {
      MutexLock lock(mutex_);
      if (!events_.any) {
        is_attended_ = false;
        return;
      }
      events = std::exchange(events_, {});
    }
    See(std::move(events));
    if (Proceed()) return;  // and stays attended, so that nothing more is done
  }
}

void AttendStreamCall::See(Events events) {
  if (events.cancelled) Fail(GivenUp(), StageNow());
  if (events.header_admitted) {
    is_admitting_ = false;
    AddTime(Stage::kQueue, Now() - admission_began_, report_);
    if (events.header_admitted->ok()) {
      header_place_ = **std::move(events.header_admitted);
    } else {
      Fail(events.header_admitted->status(), Stage::kQueue);
    }
  }
  if (events.stream_admitted) OnStreamAdmitted(*std::move(events.stream_admitted));
  if (events.read) OnRead(*events.read);
  if (events.written) OnWritten(*events.written);
  if (events.computed) OnComputed(*std::move(events.computed));
  if (events.rang) OnTimeOver();
}

bool AttendStreamCall::Proceed() {
  if (!status_.ok()) {
    if (is_admitting_ || is_computing_ || is_writing_) return false;
    FinishBadly();
    return true;
  }
  if (is_admitting_) return false;
  if (!is_computing_) ComputeNext();
  if (!is_writing_ && !answers_.empty()) WriteNext();
  if (MayRead()) Read();
  if (!IsComplete()) return false;
  FinishWell();
  return true;
}

// Into the chunk that is neither computed nor waits to be.
bool AttendStreamCall::MayRead() const { return !is_reading_ && !has_all_ && !waiting_; }

void AttendStreamCall::Read() {
  is_reading_ = true;
  read_began_ = Now();
  const int64_t bytes = order_ ? MaxChunkMessageBytes(stream_->plan()) : kMaxHeaderBytes;
  receive_end_ = std::min(deadline_, ReceiveEnd(read_began_, bytes, environment_.limits));
  SetAlarm();
  StartRead(&incoming_);
}

void AttendStreamCall::OnRead(bool ok) {
  is_reading_ = false;
  SetAlarm();
  AddTime(Stage::kReceive, Now() - read_began_, report_);
  if (!status_.ok()) return;
  absl::Status status;
  if (ok) {
    status = order_ ? TakeChunk() : OpenStream();
  } else if (!order_) {
    status = absl::InvalidArgumentError("the stream ended before its header");
  } else if (const auto expected = order_->next()) {
    status = absl::InvalidArgumentError(
        absl::StrCat("the stream ended where ", ToText(*expected), " are expected"));
  } else {
    has_all_ = true;
  }
  was_cut_ = !ok && !status.ok();
  if (!status.ok()) Fail(std::move(status), Stage::kReceive);
}

absl::Status AttendStreamCall::OpenStream() {
  ReceivedMessage header;
  if (absl::Status status = header.Take(incoming_); !status.ok()) return status;
  report_.received_bytes += header.size();
  absl::StatusOr<StreamRequest> request = DecodeStreamHeader(header.bytes());
  if (!request.ok()) return request.status();
  request->deadline = deadline_;
  request->cancelled = &given_up_;
  absl::StatusOr<std::shared_ptr<AttentionStream>> stream =
      engine().PlanStream(*std::move(request));
  if (!stream.ok()) return stream.status();
  stream_ = *std::move(stream);
  const ChunkedPlan& plan = stream_->plan();
  problem_ = plan.whole;
  report_.problem = &problem_;
  report_.routing = plan.full.routing;
  report_.plan = plan.full.Describe();
  absl::Status status = CheckMessageSizes(plan, environment_.limits.max_message_bytes);
  if (!status.ok()) return status;

  header_place_ = {};  // who waits holds nothing
  is_admitting_ = true;
  admission_began_ = Now();
  engine().AdmitStream(
      stream_, kHeldChunks * MaxChunkMessageBytes(plan), [this](absl::Status admitted) {
        Tell([&](Events& events) { events.stream_admitted = std::move(admitted); });
      });
  return absl::OkStatus();
}

void AttendStreamCall::OnStreamAdmitted(absl::Status status) {
  is_admitting_ = false;
  AddTime(Stage::kQueue, Now() - admission_began_, report_);
  if (!status.ok()) return Fail(std::move(status), Stage::kQueue);
  order_.emplace(stream_->plan());
}

absl::Status AttendStreamCall::TakeChunk() {
  Received received;
  if (absl::Status status = received.message.Take(incoming_); !status.ok()) return status;
  report_.received_bytes += received.message.size();
  const std::optional<ChunkOrder::Expected> expected = order_->next();
  absl::StatusOr<StreamChunk> chunk =
      DecodeChunk(received.message.bytes(), stream_->plan(), expected);
  if (!chunk.ok()) return chunk.status();
  received.chunk = *std::move(chunk);
  received.streams = expected->streams;
  waiting_ = std::move(received);
  order_->Advance();
  ++environment_.streams.chunks;
  return absl::OkStatus();
}

void AttendStreamCall::ComputeNext() {
  if (!order_ || answers_.size() >= kHeldAnswers) return;
  if (waiting_) return ComputeChunk();
  if (!order_->next() && stream_->plan().keys_stream()) FinishRows();
}

void AttendStreamCall::ComputeChunk() {
  computed_ = std::exchange(waiting_, std::nullopt);
  is_computing_ = true;
  if (computed_->streams) {
    stream_->Fold(computed_->chunk, [this](StepResult result) { TellOf(std::move(result)); });
  } else {
    stream_->Keep(computed_->chunk, [this](StepResult result) { TellOf(std::move(result)); });
  }
}

void AttendStreamCall::FinishRows() {
  const int64_t rows = problem_.query_length;
  if (finished_rows_ == rows) return;
  const int64_t chunk = stream_->plan().chunking.query_chunk;
  const RowRange range = {finished_rows_, std::min(chunk, rows - finished_rows_)};
  finished_rows_ += range.count;
  is_computing_ = true;
  stream_->Finish(range, [this](StepResult result) { TellOf(std::move(result)); });
}

void AttendStreamCall::TellOf(StepResult result) {
  Tell([&](Events& events) { events.computed = std::move(result); });
}

void AttendStreamCall::OnComputed(StepResult result) {
  is_computing_ = false;
  computed_.reset();
  AddTime(Stage::kQueue, result.queue_time, report_);
  AddTime(Stage::kCompute, result.compute_time, report_);
  if (!result.status.ok()) return Fail(std::move(result.status), Stage::kCompute);
  report_.flops += result.flops;
  if (result.gives != StepResult::Gives::kNothing) answers_.push_back(EncodeOutput(result));
}

void AttendStreamCall::WriteNext() {
  outgoing_ = ToByteBuffer(std::move(answers_.front()));
  answers_.pop_front();
  is_writing_ = true;
  BeginSending();
  SetAlarm();
  StartWrite(&outgoing_);
}

// A caller that does not read would keep what is outgoing, and all that waits for its place.
void AttendStreamCall::BeginSending() {
  const auto bytes = static_cast<int64_t>(outgoing_.Length());
  report_.sent_bytes += bytes;
  write_began_ = Now();
  send_end_ = SendEnd(write_began_, bytes, deadline_, environment_.limits);
}

void AttendStreamCall::OnWritten(bool ok) {
  is_writing_ = false;
  SetAlarm();
  outgoing_.Clear();  // its place is free once gRPC has let go of it too
  AddTime(Stage::kSend, Now() - write_began_, report_);
  if (!ok) Fail(GivenUp(), Stage::kSend);
}

void AttendStreamCall::OnAlarm() {
  if (is_answered_) {  // and the caller does not read the end, if it did not ring for another
    if (Now() >= send_end_) context().TryCancel();
    return;
  }
  Tell([](Events& events) { events.rang = true; });
}

void AttendStreamCall::OnTimeOver() {
  const Instant now = Now();
  if (now >= deadline_) {
    Fail(GivenUp(), StageNow());
    if (is_writing_) context().TryCancel();  // to a caller that does not read
    return;
  }
  if (is_writing_ && now >= send_end_) {
    Fail(NotSent(now, send_end_, deadline_, environment_.limits), Stage::kSend);
    return context().TryCancel();
  }
  if (is_reading_ && now >= receive_end_) {
    Fail(Reject(Rejection::kSlowSender, absl::StatusCode::kResourceExhausted,
                absl::StrCat("the stream came slower than ",
                             environment_.limits.min_receive_bytes_per_second, " bytes a second")),
         Stage::kReceive);
  }
  SetAlarm();  // it may have rung for what was done meanwhile
}

void AttendStreamCall::SetAlarm() {
  Instant end = deadline_;
  if (is_reading_ && status_.ok()) end = std::min(end, receive_end_);
  if (is_writing_) end = std::min(end, send_end_);
  alarm_.Set(end);
}

Stage AttendStreamCall::StageNow() const {
  if (is_writing_) return Stage::kSend;
  if (is_computing_) return Stage::kCompute;
  return is_reading_ ? Stage::kReceive : Stage::kQueue;
}

void AttendStreamCall::Fail(absl::Status status, Stage stage) {
  if (!status_.ok()) return;
  status_ = std::move(status);
  report_.ended_in = stage;
  answers_.clear();  // a step may wait for their places
  given_up_ = true;
  engine().NoticeCancellation();
}

// By the caller, or because its deadline passed.
absl::Status AttendStreamCall::GivenUp() const {
  if (Now() < deadline_) return absl::CancelledError("the caller left");
  return absl::DeadlineExceededError("the deadline passed");
}

bool AttendStreamCall::IsComplete() const {
  if (!has_all_ || waiting_ || is_computing_ || is_writing_ || !answers_.empty()) return false;
  return !stream_->plan().keys_stream() || finished_rows_ == problem_.query_length;
}

void AttendStreamCall::FinishWell() {
  report_.ended_in = Stage::kSend;
  const auto queue_time = report_.time_of(Stage::kQueue);
  const auto compute_time = std::max(report_.time_of(Stage::kCompute), Instant::duration::zero());
  outgoing_ = ToByteBuffer(EncodeEnd(stream_->plan(), queue_time, compute_time));
  BeginSending();
  Release();
  AddTrailers(report_, Now() - arrived_, context());
  is_answered_ = true;
  alarm_.Set(send_end_);
  StartWriteAndFinish(&outgoing_, grpc::Status::OK);
}

void AttendStreamCall::FinishBadly() {
  Release();
  AddTrailers(report_, Now() - arrived_, context());
  Finish(ToGrpcStatus(status_));
}

// Before the caller hears that it is over, but for results that gRPC still sends.
void AttendStreamCall::Release() {
  header_place_ = {};
  answers_.clear();
  waiting_.reset();
  computed_.reset();
  order_.reset();
  stream_.reset();
}

void AttendStreamCall::OnReadDone(bool ok) {
  Tell([ok](Events& events) { events.read = ok; });
}

void AttendStreamCall::OnWriteDone(bool ok) {
  Tell([ok](Events& events) { events.written = ok; });
}

void AttendStreamCall::OnCancel() {
  caller_left_ = true;
  Tell([](Events& events) { events.cancelled = true; });
}

void AttendStreamCall::OnDone() {
  alarm_.Cancel();
  // A read may fail before it is known that the caller left; and the last answer may not have left.
  if (caller_left_ && was_cut_) status_ = GivenUp();
  if (caller_left_ && status_.ok()) {
    status_ = NotSent(Now(), send_end_, deadline_, environment_.limits);
  }
  report_.status = status_;
  report_.total = Now() - arrived_;
  observe_(report_);
  if (!caller_.empty()) environment_.open_calls.Leave(caller_);
  --environment_.streams.open;
  delete this;
}

}  // namespace rapt::native
