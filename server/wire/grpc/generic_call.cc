#include "server/wire/grpc/generic_call.h"

#include <algorithm>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/rejection.h"
#include "server/wire/grpc/deadline.h"

namespace rapt {
namespace {

// A sender is not called slow before this: connections stall for a moment.
constexpr std::chrono::seconds kReceiveGrace{2};

// Nor a reader before this: it may compute between two answers of a stream.
constexpr std::chrono::seconds kSendGrace{20};

std::chrono::nanoseconds SlowestTransfer(int64_t bytes, const CallLimits& limits) {
  const double seconds =
      static_cast<double>(bytes) / static_cast<double>(limits.min_receive_bytes_per_second);
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(std::min(seconds, 1e6)));
}

absl::Status TooLarge(int64_t message_bytes, const CallLimits& limits) {
  return Reject(Rejection::kTooLarge, absl::StatusCode::kResourceExhausted,
                absl::StrCat("the message has ", message_bytes, " bytes; at most ",
                             limits.max_message_bytes, " are allowed"));
}

// None where it never came to the stage.
int64_t TimeSpent(std::chrono::nanoseconds time) {
  return Microseconds(std::max(time, time.zero()));
}

// A slice that keeps the output, and its place in the budget, until gRPC has sent it.
grpc::Slice SliceOf(const OutputBuffer& payload) {
  auto* kept = new OutputBuffer(payload);
  return grpc::Slice(
      const_cast<std::byte*>(kept->bytes.data()), kept->bytes.size(),
      [](void* output) { delete static_cast<OutputBuffer*>(output); }, kept);
}

}  // namespace

GenericCall::GenericCall(std::unique_ptr<GrpcCall> call)
    : call_(std::move(call)),
      read_([this](bool ok) {
        OnReadDone(ok);
        LetGo();
      }),
      written_([this](bool ok) {
        OnWriteDone(ok);
        LetGo();
      }),
      finished_([this](bool) {
        LetGo();  // of what Hold() held
        LetGo();
      }) {}

void GenericCall::OnEnded() {
  if (context().IsCancelled()) OnCancel();
  LetGo();
}

void GenericCall::LetGo() {
  if (--pending_ == 0) OnDone();
}

void GenericCall::StartRead(grpc::ByteBuffer* message) {
  ++pending_;
  call_->stream.Read(message, &read_);
}

void GenericCall::StartWrite(const grpc::ByteBuffer* message) {
  ++pending_;
  call_->stream.Write(*message, &written_);
}

void GenericCall::StartWriteAndFinish(const grpc::ByteBuffer* message, const grpc::Status& status) {
  Hold();
  call_->stream.WriteAndFinish(*message, grpc::WriteOptions(), status, &finished_);
}

void GenericCall::Finish(const grpc::Status& status) {
  Hold();
  call_->stream.Finish(status, &finished_);
}

absl::StatusOr<std::string> EnterOpenCalls(const CallEnvironment& environment,
                                           const grpc::ServerContextBase& context) {
  absl::StatusOr<std::string> caller = environment.access.Identify(context);
  if (!caller.ok()) return caller;
  if (absl::Status status = environment.open_calls.Enter(*caller); !status.ok()) return status;
  return caller;
}

absl::StatusOr<Instant> DeadlineOf(const grpc::ServerContextBase& context, Instant arrived,
                                   const CallLimits& limits) {
  Instant deadline = DeadlineOf(context, arrived);
  if (deadline == Instant::max()) deadline = arrived + limits.default_deadline;
  deadline = std::min(deadline, arrived + limits.max_deadline);
  if (deadline > arrived) return deadline;
  return absl::DeadlineExceededError("the deadline had passed when the call arrived");
}

absl::StatusOr<std::optional<int64_t>> DeclaredBytes(const grpc::ServerContextBase& context,
                                                     const CallLimits& limits) {
  const auto header = context.client_metadata().find(kMessageBytesHeader);
  if (header == context.client_metadata().end()) return std::nullopt;
  const absl::string_view text(header->second.data(), header->second.size());
  int64_t bytes;
  if (!absl::SimpleAtoi(text, &bytes) || bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("header ", kMessageBytesHeader, " is '",
                                                   text.substr(0, 32),
                                                   "'; it must be a number of bytes"));
  }
  if (bytes > limits.max_message_bytes) return TooLarge(bytes, limits);
  return bytes;
}

absl::Status CheckSize(int64_t message_bytes, std::optional<int64_t> declared_bytes,
                       const CallLimits& limits) {
  if (message_bytes > limits.max_message_bytes) return TooLarge(message_bytes, limits);
  if (message_bytes <= declared_bytes.value_or(message_bytes)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the message has ", message_bytes,
                                                 " bytes; its header ", kMessageBytesHeader,
                                                 " says ", *declared_bytes));
}

Instant ReceiveEnd(Instant now, int64_t bytes, const CallLimits& limits) {
  return now + kReceiveGrace + SlowestTransfer(bytes, limits);
}

Instant SendEnd(Instant now, int64_t bytes, Instant deadline, const CallLimits& limits) {
  return std::min(deadline, now + kSendGrace + SlowestTransfer(bytes, limits));
}

absl::Status NotSent(Instant now, Instant send_end, Instant deadline, const CallLimits& limits) {
  if (now < send_end) return absl::CancelledError("the caller left");
  if (send_end == deadline) {
    return absl::DeadlineExceededError("the deadline passed while the answer was sent");
  }
  return Reject(Rejection::kSlowReader, absl::StatusCode::kResourceExhausted,
                absl::StrCat("the answer was read slower than ",
                             limits.min_receive_bytes_per_second, " bytes a second"));
}

void AddTime(Stage stage, std::chrono::nanoseconds time, CallReport& report) {
  std::chrono::nanoseconds& sum = report.time_of(stage);
  sum = std::max(sum, sum.zero()) + time;
}

void AddTrailers(const CallReport& report, std::chrono::nanoseconds total,
                 grpc::ServerContext& context) {
  if (report.routing.backend == nullptr) return;
  const auto add_time = [&context](const char* name, std::chrono::nanoseconds time) {
    context.AddTrailingMetadata(name, absl::StrCat(TimeSpent(time)));
  };
  context.AddTrailingMetadata("rapt-backend", NamesOf(report.routing));
  context.AddTrailingMetadata("rapt-plan", report.plan);
  add_time("rapt-queue-us", report.time_of(Stage::kQueue));
  add_time("rapt-compute-us", report.time_of(Stage::kCompute));
  add_time("rapt-total-us", total);
}

grpc::ByteBuffer ToByteBuffer(AnswerMessage answer) {
  absl::InlinedVector<grpc::Slice, 4> slices;
  for (const AnswerMessage::Piece& piece : answer.TakePieces()) {
    if (!piece.bytes.empty()) slices.emplace_back(piece.bytes);
    if (!piece.payload.bytes.empty()) slices.push_back(SliceOf(piece.payload));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

}  // namespace rapt
