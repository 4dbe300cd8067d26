#include "server/wire/rapt/methods.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "server/protocols/rapt/codec.h"
#include "server/protocols/rapt/operator_codec.h"
#include "server/protocols/rapt/reports.h"
#include "server/protocols/response_size.h"
#include "server/wire/rapt/attend_stream_call.h"
#include "server/wire/rapt/linear_stream_call.h"

namespace rapt::native {
namespace {

// Of Attend and AttendBackward, which differ in their messages.
class AttendHandler final : public MessageHandler {
 public:
  using Decode = absl::StatusOr<DecodedCall> (*)(const MessageBytes&, const SharedMemory&);

  AttendHandler(Decode decode, const SharedMemory& shared_memory)
      : decode_(decode), shared_memory_(shared_memory) {}

 private:
  void OnMessage(const MessageBytes& message, MethodCall& call) override {
    absl::StatusOr<DecodedCall> decoded = decode_(message, shared_memory_);
    if (!decoded.ok()) return call.End(decoded.status());
    const absl::StatusOr<int64_t> encoding = call.EncodingBytes(OutputsInResponse(*decoded));
    if (!encoding.ok()) return call.End(encoding.status());
    Request& request = decoded->request;
    request.encoding_bytes = *encoding;
    call_ = request.call;
    places_ = decoded->fields.places();
    call.call().Bind(request);
    call.call().engine().Submit(
        std::move(request), [this, &call](Result result) { OnResult(std::move(result), call); });
  }

  void OnResult(Result result, MethodCall& call) const {
    call.call().Record(result);
    if (!result.status.ok()) return call.End(std::move(result.status));
    call.Respond(EncodeResult(call_, places_, result));
  }

  const Decode decode_;
  const SharedMemory& shared_memory_;
  ResolvedCall call_;
  v1::OutputPlaces places_;
};

class OperatorHandler final : public MessageHandler {
 public:
  OperatorHandler(const OperatorCodec& codec, const SharedMemory& shared_memory)
      : codec_(codec), shared_memory_(shared_memory) {}

 private:
  void OnMessage(const MessageBytes& message, MethodCall& call) override {
    absl::StatusOr<Request> request = codec_.Decode(message, shared_memory_);
    if (!request.ok()) return call.End(request.status());
    operator_ = request->tensor_operator;
    outputs_ = request->Outputs();
    const absl::StatusOr<int64_t> encoding = call.EncodingBytes(OutputsOf(*operator_, outputs_));
    if (!encoding.ok()) return call.End(encoding.status());
    request->encoding_bytes = *encoding;
    call.call().Bind(*request);
    call.call().engine().Submit(
        *std::move(request), [this, &call](Result result) { OnResult(std::move(result), call); });
  }

  void OnResult(Result result, MethodCall& call) const {
    call.call().Record(result);
    if (!result.status.ok()) return call.End(std::move(result.status));
    call.Respond(codec_.Encode(*operator_, outputs_, result));
  }

  const OperatorCodec& codec_;
  const SharedMemory& shared_memory_;
  std::shared_ptr<const TensorOperator> operator_;
  RoleSet outputs_;
};

class DiagnoseHandler final : public MessageHandler {
 public:
  explicit DiagnoseHandler(const SharedMemory& shared_memory) : shared_memory_(shared_memory) {}

 private:
  void OnMessage(const MessageBytes& message, MethodCall& call) override {
    absl::StatusOr<DecodedCall> decoded = DecodeDiagnose(message, shared_memory_);
    if (!decoded.ok()) return call.End(decoded.status());
    fields_ = std::move(decoded->fields);
    backward_ = std::move(decoded->backward);
    call.call().Bind(decoded->request);
    call.call().engine().Diagnose(
        std::move(decoded->request),
        [this, &call](const absl::StatusOr<DiagnosisReport>& report) { OnReport(report, call); });
  }

  void OnReport(const absl::StatusOr<DiagnosisReport>& report, MethodCall& call) const {
    if (!report.ok()) return call.End(report.status());
    v1::DiagnoseResponse response;
    EncodeDiagnosis(fields_, backward_, *report, response);
    ResponseMessage serialized;
    serialized.Append(response.SerializeAsString());
    call.Respond(std::move(serialized));
  }

  const SharedMemory& shared_memory_;
  v1::AttendRequest fields_;
  v1::AttendBackwardRequest backward_;
};

void DescribeAdmission(const CallEnvironment& call, v1::AdmissionLimits& limits) {
  const AdmissionGate& gate = call.engine.gate();
  limits.set_max_open_calls(call.open_calls.limits().calls);
  limits.set_max_calls_per_caller(call.open_calls.limits().calls_per_caller);
  limits.set_max_compute_bytes(gate.LimitOf(AdmissionGate::Share::kCompute));
  limits.set_max_queued_requests(gate.options().max_queued);
  limits.set_max_queue_delay_ms(Milliseconds(gate.options().max_queue_delay));
  limits.set_min_receive_bytes_per_second(call.limits.min_receive_bytes_per_second);
  limits.set_default_deadline_ms(Milliseconds(call.limits.default_deadline));
  limits.set_max_deadline_ms(Milliseconds(call.limits.max_deadline));
}

void DescribeCaches(const cache::CacheStore& store, v1::CacheLimits& limits) {
  const cache::CacheStore::Options& options = store.options();
  limits.set_max_bytes(store.arena().capacity_bytes());
  limits.set_max_bytes_per_caller(options.max_bytes_per_caller);
  limits.set_max_caches_per_caller(options.max_caches_per_caller);
  limits.set_default_lease_ms(Milliseconds(options.default_lease));
  limits.set_max_lease_ms(Milliseconds(options.max_lease));
}

std::string MethodName(absl::string_view method) { return absl::StrCat(kServiceName, "/", method); }
std::string PathOf(absl::string_view method) { return absl::StrCat("/", MethodName(method)); }

}  // namespace

Methods::Methods(const CallEnvironment& environment, const SharedMemory& shared_memory,
                 const ModelRepository* repository, const cache::CacheStore* caches,
                 const CallObserverFactory& observe)
    : environment_(environment),
      shared_memory_(shared_memory),
      repository_(repository),
      caches_(caches),
      observe_attend_(observe(MethodName("Attend"))),
      observe_attend_backward_(observe(MethodName("AttendBackward"))),
      observe_attend_stream_(observe(MethodName("AttendStream"))),
      observe_linear_attend_stream_(observe(MethodName("LinearAttendStream"))),
      observe_diagnose_(observe(MethodName("Diagnose"))),
      observe_estimate_memory_(observe(MethodName("EstimateMemory"))),
      observe_get_server_info_(observe(MethodName("GetServerInfo"))) {
  AttendSchema();  // checks the tables at startup, not at the first request
  for (const OperatorCodec& codec : OperatorCodecs()) {
    observe_operators_.push_back(observe(MethodName(codec.schema().method)));
  }
}

void Methods::AddTo(UnaryMethods& methods) {
  methods[PathOf("Attend")] = {.observe = observe_attend_, .new_handler = [this] {
                                 return std::make_unique<AttendHandler>(DecodeAttend,
                                                                        shared_memory_);
                               }};
  methods[PathOf("AttendBackward")] = {.observe = observe_attend_backward_, .new_handler = [this] {
                                         return std::make_unique<AttendHandler>(DecodeBackward,
                                                                                shared_memory_);
                                       }};
  for (size_t n = 0; n < OperatorCodecs().size(); ++n) {
    const OperatorCodec& codec = OperatorCodecs()[n];
    methods[PathOf(codec.schema().method)] = {
        .observe = observe_operators_[n], .new_handler = [this, &codec] {
          return std::make_unique<OperatorHandler>(codec, shared_memory_);
        }};
  }
  methods[PathOf("Diagnose")] = {.observe = observe_diagnose_, .new_handler = [this] {
                                   return std::make_unique<DiagnoseHandler>(shared_memory_);
                                 }};
  methods[PathOf("EstimateMemory")] =
      SmallMethod<v1::EstimateMemoryRequest, v1::EstimateMemoryResponse>(*this,
                                                                         observe_estimate_memory_);
  methods[PathOf("GetServerInfo")] =
      SmallMethod<v1::GetServerInfoRequest, v1::GetServerInfoResponse>(*this,
                                                                       observe_get_server_info_);
}

void Methods::AddTo(StreamMethods& methods) {
  methods[PathOf("AttendStream")] = [this](MessageStream& stream) {
    return std::make_unique<AttendStreamCall>(environment_, observe_attend_stream_, stream);
  };
  methods[PathOf("LinearAttendStream")] = [this](MessageStream& stream) {
    return std::make_unique<LinearStreamCall>(environment_, observe_linear_attend_stream_, stream);
  };
}

absl::Status Methods::Respond(const v1::EstimateMemoryRequest& request,
                              v1::EstimateMemoryResponse& response) const {
  return native::EstimateMemory(request, environment_.engine.plan_options(), repository_, response);
}

absl::Status Methods::Respond(const v1::GetServerInfoRequest&,
                              v1::GetServerInfoResponse& response) const {
  const Engine& engine = environment_.engine;
  DescribeServer(engine.plan_options(), response);
  response.set_memory_budget_bytes(engine.gate().capacity_bytes());
  response.set_memory_reserved_bytes(engine.gate().reserved_bytes());
  response.set_max_message_bytes(environment_.limits.max_message_bytes);
  DescribeAdmission(environment_, *response.mutable_admission());
  if (caches_ != nullptr) DescribeCaches(*caches_, *response.mutable_caches());
  return absl::OkStatus();
}

}  // namespace rapt::native
