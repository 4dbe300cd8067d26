#include "rapt/client.h"

#include <grpcpp/alarm.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/memory/memory.h"
#include "base/invalid.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "client/cpp/borrowed_payloads.h"
#include "client/cpp/byte_buffer.h"
#include "client/cpp/cache_calls.h"
#include "client/cpp/codec.h"
#include "client/cpp/connections.h"
#include "client/cpp/deadline.h"
#include "client/cpp/infer_codec.h"
#include "client/cpp/model_stream.h"
#include "client/cpp/retry.h"
#include "client/cpp/shared_regions.h"
#include "client/cpp/stream_call.h"
#include "client/cpp/stream_codec.h"
#include "client/cpp/unary_calls.h"

namespace rapt::client {
namespace {

absl::Status Validate(const std::string& address, const Options& options) {
  if (address.empty())
    return Invalid("address is empty; it must be a gRPC target such as 127.0.0.1:8001");
  if (options.connect_timeout.count() < 0) {
    return Invalid("connect_timeout is negative; it must be at least 0");
  }
  if (options.max_message_bytes < 1 ||
      options.max_message_bytes > std::numeric_limits<int32_t>::max()) {
    return Invalid("max_message_bytes is ", options.max_message_bytes,
                   "; it must be 1 to 2147483647");
  }
  constexpr std::chrono::seconds kLeastMaxSilence{1};
  constexpr std::chrono::hours kMostMaxSilence{24};
  if (options.max_silence.count() != 0 &&
      (options.max_silence < kLeastMaxSilence || options.max_silence > kMostMaxSilence)) {
    return Invalid("max_silence is ", options.max_silence.count(),
                   " ns; it must be 0 or from 1 s to 24 h");
  }
  if (options.connections < 1) {
    return Invalid("connections is ", options.connections, "; it must be at least 1");
  }
  return Validate(options.retries);
}

// Below this size, the copy into shared memory and its page faults cost as much as the socket.
constexpr int64_t kMinSharedBytes = 64 * 1024;

// With a smaller message limit, a chunk would have only a few rows.
constexpr int64_t kMinStreamMessageBytes = 64 * 1024;

using AttentionStub = v1::AttentionService::Stub;

// Methods whose requests are serialized by hand.
constexpr char kAttendMethod[] = "/rapt.v1.AttentionService/Attend";
constexpr char kAttendBackwardMethod[] = "/rapt.v1.AttentionService/AttendBackward";
constexpr char kDiagnoseMethod[] = "/rapt.v1.AttentionService/Diagnose";

absl::StatusOr<AttendResult> DecodeResponse(const WantedOutputs& wanted,
                                            const grpc::ByteBuffer& response,
                                            absl::Span<const std::byte> region = {}) {
  return DecodeBytes(response, [&](const SlicedBytes& bytes, int64_t size) {
    return DecodeAttend(wanted, bytes, size, region);
  });
}

absl::StatusOr<BackwardResult> DecodeResponse(const WantedGradients& wanted,
                                              const grpc::ByteBuffer& response) {
  return DecodeBytes(response, [&](const SlicedBytes& bytes, int64_t size) {
    return DecodeBackward(wanted, bytes, size);
  });
}

}  // namespace

// The state shared by all calls of a client. Thread-safe.
class Client::Core : public UnaryCalls {
 public:
  Core(const std::string& address, const Options& options,
       const std::shared_ptr<grpc::ChannelCredentials>& credentials)
      : UnaryCalls(address, options, credentials), shared_regions_(address, connections()) {}

  CacheCalls& caches() { return caches_; }

  template <typename AnyCall>
  absl::StatusOr<Diagnosis> Diagnose(const AnyCall& call, const CallOptions& options);
  absl::StatusOr<MemoryEstimates> EstimateMemory(const v1::EstimateMemoryRequest& request,
                                                 const CallOptions& options);

  // Makes one attempt through shared memory. Returns nullopt if the caller should send a message
  // instead: shared memory is unavailable, the call is too small, or the attempt failed and may be
  // retried. Sets `attempts` to the number of attempts made.
  std::optional<absl::StatusOr<AttendResult>> AttendShared(const AttendCall& call,
                                                           const CallOptions& options,
                                                           const Deadline& deadline, int& attempts);

  // Sends the call in chunks, in messages of at most `max_bytes`.
  absl::StatusOr<AttendResult> AttendStream(const AttendCall& call, const StreamOptions& stream,
                                            const CallOptions& options, const Deadline& deadline,
                                            int64_t max_bytes);

  // Falls back to a stream for a call too large for one message. Returns `refusal` if the call
  // can't be streamed.
  absl::StatusOr<AttendResult> FallBackToStream(const AttendCall& call, const CallOptions& options,
                                                const Deadline& deadline, int64_t max_bytes,
                                                absl::Status refusal);

  void EnterAsync() {
    MutexLock lock(mutex_);
    ++async_calls_;
  }

  // REQUIRES: the asynchronous call does not use the client afterwards.
  void LeaveAsync() {
    MutexLock lock(mutex_);
    if (--async_calls_ == 0) no_async_calls_.SignalAll();
  }

  // Requested by the client's destructor.
  std::stop_token stop_of_client() const { return stop_.get_token(); }

  void StopAsyncCalls() {
    stop_.request_stop();
    MutexLock lock(mutex_);
    while (async_calls_ > 0) no_async_calls_.Wait(mutex_);
  }

 private:
  std::stop_source stop_;

  Mutex mutex_;
  CondVar no_async_calls_;
  int async_calls_ ABSL_GUARDED_BY(mutex_) = 0;

  SharedRegions shared_regions_;
  CacheCalls caches_{*this};
};

CacheCalls& CacheCalls::Of(Client& client) { return client.core_->caches(); }

std::optional<absl::StatusOr<AttendResult>> Client::Core::AttendShared(const AttendCall& call,
                                                                       const CallOptions& options,
                                                                       const Deadline& deadline,
                                                                       int& attempts) {
  if (!this->options().shared_memory) return std::nullopt;
  const std::optional<int64_t> bytes = BytesInRegion(call);
  if (!bytes || *bytes < kMinSharedBytes) return std::nullopt;
  std::unique_ptr<SharedRegion> region = shared_regions_.Take(*bytes, deadline, options.stop);
  if (region == nullptr) return std::nullopt;

  const RequestMessage request = EncodeAttendIn(*region, call);
  const absl::StatusOr<grpc::ByteBuffer> response =
      Send<grpc::ByteBuffer>(kAttendMethod, request, options, deadline, {.max_attempts = 1});
  if (!response.ok()) {
    // The server may still write to the region.
    shared_regions_.Discard(std::move(region));
    // A restarted server does not know the region. That does not count as a failed attempt.
    if (absl::IsNotFound(response.status())) return std::nullopt;
    attempts = 1;
    const auto delay =
        DelayBeforeRetry(this->options().retries, response.status(), attempts, deadline);
    if (!delay) return response.status();
    const ConnectionLease connection = connections().LeastBusy();
    if (!WaitBeforeRetry(*delay, *connection->channel, options.stop)) return StopRequested();
    return std::nullopt;
  }
  absl::StatusOr<AttendResult> result = DecodeResponse(WantedBy(call), *response, region->bytes());
  if (result.ok()) result->path = Path::kSharedMemory;
  shared_regions_.Return(std::move(region));
  return result;
}

absl::StatusOr<AttendResult> Client::Core::AttendStream(const AttendCall& call,
                                                        const StreamOptions& stream,
                                                        const CallOptions& options,
                                                        const Deadline& deadline,
                                                        int64_t max_bytes) {
  RAPT_ASSIGN_OR_RETURN(const ChunkedCall chunked, ChunkedCall::Make(call, stream, max_bytes));
  StreamResult result(chunked);
  BorrowedPayloads payloads;
  absl::Status own_error;
  absl::Status status;
  {
    grpc::ClientContext context;
    context.set_deadline(deadline.ToGrpc());
    const std::stop_callback stop(options.stop, [&context] { context.TryCancel(); });
    const ConnectionLease connection = connections().LeastBusy();
    StreamCall stream_call(*connection, context, chunked, stream, payloads, result);
    const grpc::Status grpc_status = stream_call.Run(own_error);
    status = connections().FromGrpc(grpc_status, options.stop.stop_requested());
  }
  payloads.WaitUntilReleased();
  if (!own_error.ok()) return own_error;
  if (!status.ok()) return status;
  return result.Finish();
}

absl::StatusOr<AttendResult> Client::Core::FallBackToStream(const AttendCall& call,
                                                            const CallOptions& options,
                                                            const Deadline& deadline,
                                                            int64_t max_bytes,
                                                            absl::Status refusal) {
  if (max_bytes < kMinStreamMessageBytes || !ChunkedCall::Make(call, {}, max_bytes).ok())
    return refusal;
  return AttendStream(call, {}, options, deadline, max_bytes);
}

// How each asynchronous method names itself, encodes its call and knows what to decode.
template <typename Result>
struct AsyncMethod;

template <>
struct AsyncMethod<AttendResult> {
  using Call = AttendCall;
  using Wanted = WantedOutputs;
  static constexpr const char* kName = kAttendMethod;
  static constexpr auto& kEncode = EncodeAttend;
  static constexpr auto& kWanted = WantedBy;
};

template <>
struct AsyncMethod<BackwardResult> {
  using Call = BackwardCall;
  using Wanted = WantedGradients;
  static constexpr const char* kName = kAttendBackwardMethod;
  static constexpr auto& kEncode = EncodeBackward;
  static constexpr auto& kWanted = GradientsWantedBy;
};

// One asynchronous call. Makes attempts until one is final, deletes itself and runs the callback.
// Its steps run one after another, the first on the caller's thread, the others on gRPC's. Only
// Stop() may run at any time, on any thread.
template <typename Result>
class Client::AsyncCall {
  using Method = AsyncMethod<Result>;
  using Callback = absl::AnyInvocable<void(absl::StatusOr<Result>)>;

 public:
  AsyncCall(Core& core, const typename Method::Call& call, CallOptions options, Callback callback)
      : core_(core),
        options_(std::move(options)),
        deadline_(core.DeadlineOf(options_)),
        callback_(std::move(callback)),
        request_(Method::kEncode(call, core.options().max_message_bytes)) {
    if (request_.ok()) wanted_ = Method::kWanted(call);
    core_.EnterAsync();
  }

  void Start() {
    stop_of_caller_.emplace(options_.stop, CallStop{this});
    stop_of_client_.emplace(core_.stop_of_client(), CallStop{this});
    if (request_.ok()) {
      Attempt();
    } else {
      ContinueAfter({});  // the callback never runs inside the method
    }
  }

 private:
  struct CallStop {
    AsyncCall* call;
    void operator()() const { call->Stop(); }
  };

  void Attempt() {
    auto context = std::make_shared<grpc::ClientContext>();
    context->set_deadline(deadline_.ToGrpc());
    {
      MutexLock lock(mutex_);
      context_ = context;
      if (stopped_) context->TryCancel();  // gRPC then finishes it as soon as it starts
    }
    ++attempts_;
    connection_.emplace(core_.connections().LeastBusy());
    sent_ = payloads_.MakeBuffer(*request_);
    grpc::GenericStub((*connection_)->channel)
        .UnaryCall(context.get(), Method::kName, {}, &sent_, &received_,
                   [this](const grpc::Status& status) { OnAttempt(status); });
    // Another thread may have deleted this object by now. Do not touch it.
  }

  void OnAttempt(const grpc::Status& grpc_status) {
    connection_.reset();
    sent_.Clear();
    const absl::Status status = core_.connections().FromGrpc(grpc_status, WasStopped());
    if (status.ok()) return EndWith(DecodeResponse(wanted_, received_));
    const auto delay =
        core_.DelayBeforeRetry(core_.options().retries, status, attempts_, deadline_);
    if (!delay) return EndWith(status);
    ContinueAfter(*delay);
  }

  void ContinueAfter(std::chrono::nanoseconds delay) {
    const auto alarm = std::make_shared<grpc::Alarm>();
    bool stopped;
    {
      // OnAlarm() takes this lock too, so the object lives until the lock is released.
      MutexLock lock(mutex_);
      alarm_ = alarm;
      alarm->Set(Deadline::After(delay).ToGrpc(), [this](bool) { OnAlarm(); });
      stopped = stopped_;
    }
    if (stopped) alarm->Cancel();
  }

  bool WasStopped() {
    MutexLock lock(mutex_);
    return stopped_;
  }

  void OnAlarm() {
    const bool stopped = WasStopped();
    if (result_) return End();
    if (!request_.ok()) return EndWith(request_.status());
    if (stopped) return EndWith(StopRequested());
    Attempt();
  }

  // gRPC may finish the call inside TryCancel(). Do not touch the object afterwards.
  void Stop() {
    std::shared_ptr<grpc::ClientContext> context;
    std::shared_ptr<grpc::Alarm> alarm;
    {
      MutexLock lock(mutex_);
      stopped_ = true;
      context = context_;
      alarm = alarm_;
    }
    if (alarm != nullptr) alarm->Cancel();
    if (context != nullptr) context->TryCancel();
  }

  // Ends the call once gRPC has released the caller's bytes.
  void EndWith(absl::StatusOr<Result> result) {
    result_.emplace(std::move(result));
    std::shared_ptr<grpc::ClientContext>
        context;  // the context of a call that failed early holds its message
    {
      MutexLock lock(mutex_);
      context.swap(context_);
    }
    context.reset();
    if (payloads_.IsReleased([this] { ContinueAfter({}); })) End();
  }

  void End() {
    stop_of_caller_.reset();  // waits for a Stop() on another thread
    stop_of_client_.reset();
    Core& core = core_;
    {
      Callback callback = std::move(callback_);
      absl::StatusOr<Result> result = *std::move(result_);
      delete this;
      callback(std::move(result));
    }
    core.LeaveAsync();
  }

  Core& core_;
  const CallOptions options_;
  const Deadline deadline_;
  Callback callback_;
  const absl::StatusOr<RequestMessage> request_;
  typename Method::Wanted wanted_;
  BorrowedPayloads payloads_;
  grpc::ByteBuffer sent_;
  grpc::ByteBuffer received_;
  std::optional<absl::StatusOr<Result>> result_;  // once final
  std::optional<ConnectionLease> connection_;
  int attempts_ = 0;

  Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  // Shared with Stop(), which uses them outside the lock.
  std::shared_ptr<grpc::ClientContext> context_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<grpc::Alarm> alarm_ ABSL_GUARDED_BY(mutex_);

  std::optional<std::stop_callback<CallStop>> stop_of_caller_;
  std::optional<std::stop_callback<CallStop>> stop_of_client_;
};

Client::Client(std::unique_ptr<Core> core) : core_(std::move(core)) {}

Client::~Client() { core_->StopAsyncCalls(); }

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& address,
                                                        const Options& options) {
  RAPT_RETURN_IF_ERROR(Validate(address, options));
  RAPT_ASSIGN_OR_RETURN(const auto credentials, CredentialsFor(address, options));
  auto core = std::make_unique<Core>(address, options, credentials);
  if (options.connect_timeout.count() > 0) {
    RAPT_RETURN_IF_ERROR(core->connections().WaitUntilReady(options.connect_timeout));
  }
  return absl::WrapUnique(new Client(std::move(core)));
}

absl::StatusOr<AttendResult> Client::Attend(const AttendCall& call, const CallOptions& options) {
  const Deadline deadline = core_->DeadlineOf(options);  // includes the time for encoding
  int attempts = 0;
  if (auto result = core_->AttendShared(call, options, deadline, attempts)) {
    return *std::move(result);
  }
  const int64_t max_bytes = core_->options().max_message_bytes;
  const absl::StatusOr<RequestMessage> request = EncodeAttend(call, max_bytes);
  if (absl::IsResourceExhausted(request.status())) {
    return core_->FallBackToStream(call, options, deadline, max_bytes, request.status());
  }
  if (!request.ok()) return request.status();
  const absl::StatusOr<grpc::ByteBuffer> response = core_->Send<grpc::ByteBuffer>(
      kAttendMethod, *request, options, deadline, core_->options().retries, attempts);
  if (response.ok()) return DecodeResponse(WantedBy(call), *response);
  if (!absl::IsResourceExhausted(response.status())) return response.status();
  const absl::StatusOr<ServerInfo> server =
      GetServerInfo({.timeout = deadline.left(), .stop = options.stop});
  if (!server.ok() || request->size() <= server->max_message_bytes) return response.status();
  return core_->FallBackToStream(call, options, deadline,
                                 std::min(max_bytes, server->max_message_bytes), response.status());
}

absl::StatusOr<AttendResult> Client::AttendStream(const AttendCall& call,
                                                  const StreamOptions& stream,
                                                  const CallOptions& options) {
  return core_->AttendStream(call, stream, options, core_->DeadlineOf(options),
                             core_->options().max_message_bytes);
}

void Client::AttendAsync(const AttendCall& call, const CallOptions& options,
                         AttendCallback callback) {
  (new AsyncCall<AttendResult>(*core_, call, options, std::move(callback)))->Start();
}

absl::StatusOr<BackwardResult> Client::AttendBackward(const BackwardCall& call,
                                                      const CallOptions& options) {
  const Deadline deadline = core_->DeadlineOf(options);
  RAPT_ASSIGN_OR_RETURN(const RequestMessage request,
                        EncodeBackward(call, core_->options().max_message_bytes));
  RAPT_ASSIGN_OR_RETURN(const grpc::ByteBuffer response,
                        core_->Send<grpc::ByteBuffer>(kAttendBackwardMethod, request, options,
                                                      deadline, core_->options().retries));
  return DecodeResponse(GradientsWantedBy(call), response);
}

void Client::AttendBackwardAsync(const BackwardCall& call, const CallOptions& options,
                                 BackwardCallback callback) {
  (new AsyncCall<BackwardResult>(*core_, call, options, std::move(callback)))->Start();
}

template <typename AnyCall>
absl::StatusOr<Diagnosis> Client::Core::Diagnose(const AnyCall& call, const CallOptions& options) {
  const Deadline deadline = DeadlineOf(options);
  RAPT_ASSIGN_OR_RETURN(const RequestMessage request,
                        EncodeDiagnose(call, this->options().max_message_bytes));
  RAPT_ASSIGN_OR_RETURN(const v1::DiagnoseResponse response,
                        Send<v1::DiagnoseResponse>(kDiagnoseMethod, request, options, deadline,
                                                   this->options().retries));
  return Decode(response);
}

absl::StatusOr<Diagnosis> Client::Diagnose(const AttendCall& call, const CallOptions& options) {
  return core_->Diagnose(call, options);
}

absl::StatusOr<Diagnosis> Client::Diagnose(const BackwardCall& call, const CallOptions& options) {
  return core_->Diagnose(call, options);
}

absl::StatusOr<MemoryEstimates> Client::Core::EstimateMemory(
    const v1::EstimateMemoryRequest& request, const CallOptions& options) {
  RAPT_ASSIGN_OR_RETURN(const auto response,
                        Call(&AttentionStub::EstimateMemory, request, options));
  return Decode(response);
}

absl::StatusOr<MemoryEstimates> Client::EstimateMemory(const MemoryQuestion& question,
                                                       const CallOptions& options) {
  return core_->EstimateMemory(Encode(question), options);
}

absl::StatusOr<MemoryEstimates> Client::EstimateLayerMemory(const LayerMemoryQuestion& question,
                                                            const CallOptions& options) {
  return core_->EstimateMemory(Encode(question), options);
}

absl::StatusOr<ModelResult> Client::Infer(const ModelCall& call, const CallOptions& options) {
  RAPT_ASSIGN_OR_RETURN(const inference::ModelInferRequest request, EncodeInfer(call));
  RAPT_ASSIGN_OR_RETURN(
      inference::ModelInferResponse response,
      core_->Call(&inference::GRPCInferenceService::Stub::ModelInfer, request, options));
  return DecodeInfer(call, std::move(response));
}

std::unique_ptr<ModelStream> Client::LinearAttendStream(const CallOptions& options) {
  return NewLinearAttendStream(core_->connections(), core_->DeadlineOf(options), options.stop);
}

absl::StatusOr<ServerInfo> Client::GetServerInfo(const CallOptions& options) {
  RAPT_ASSIGN_OR_RETURN(
      const v1::GetServerInfoResponse response,
      core_->Call(&AttentionStub::GetServerInfo, v1::GetServerInfoRequest(), options));
  return Decode(response);
}

absl::StatusOr<HealthStatus> Client::CheckHealth(const std::string& service,
                                                 const CallOptions& options) {
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  const absl::StatusOr<grpc::health::v1::HealthCheckResponse> response =
      core_->Call<grpc::health::v1::HealthCheckResponse>(
          options, core_->DeadlineOf(options), {.max_attempts = 1},
          [this, &request](const Connection&, grpc::ClientContext* context,
                           grpc::health::v1::HealthCheckResponse* message) {
            return core_->connections().health().Check(context, request, message);
          });
  if (!response.ok()) return response.status();
  switch (response->status()) {
    case grpc::health::v1::HealthCheckResponse::SERVING:
      return HealthStatus::kServing;
    case grpc::health::v1::HealthCheckResponse::NOT_SERVING:
      return HealthStatus::kNotServing;
    default:
      return HealthStatus::kUnknown;
  }
}

}  // namespace rapt::client
