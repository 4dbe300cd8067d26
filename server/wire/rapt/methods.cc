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
#include "server/wire/rapt/operator_stream_call.h"

namespace rapt::native {
namespace {

// Of Attend and AttendBackward, which differ in their messages.
class AttendHandler final : public ComputedHandler {
 public:
  using DecodeMessage = absl::StatusOr<DecodedCall> (*)(const MessageBytes&, const SharedMemory&);

  AttendHandler(DecodeMessage decode, const SharedMemory& shared_memory)
      : decode_(decode), shared_memory_(shared_memory) {}

 private:
  absl::StatusOr<Request> Decode(const MessageBytes& message, MethodCall& call) override {
    RAPT_ASSIGN_OR_RETURN(DecodedCall decoded, decode_(message, shared_memory_));
    RAPT_ASSIGN_OR_RETURN(decoded.request.encoding_bytes,
                          call.EncodingBytes(OutputsInResponse(decoded)));
    call_ = decoded.request.call;
    places_ = decoded.fields.places();
    return std::move(decoded.request);
  }

  ResponseMessage Encode(const Result& result, MethodCall&) override {
    return EncodeResult(call_, places_, result);
  }

  const DecodeMessage decode_;
  const SharedMemory& shared_memory_;
  ResolvedCall call_;
  v1::OutputPlaces places_;
};

class OperatorHandler final : public ComputedHandler {
 public:
  OperatorHandler(const OperatorCodec& codec, const SharedMemory& shared_memory)
      : codec_(codec), shared_memory_(shared_memory) {}

 private:
  absl::StatusOr<Request> Decode(const MessageBytes& message, MethodCall& call) override {
    RAPT_ASSIGN_OR_RETURN(Request request, codec_.Decode(message, shared_memory_));
    operator_ = request.tensor_operator;
    outputs_ = request.Outputs();
    RAPT_ASSIGN_OR_RETURN(request.encoding_bytes,
                          call.EncodingBytes(OutputsOf(*operator_, outputs_)));
    return request;
  }

  ResponseMessage Encode(const Result& result, MethodCall&) override {
    return codec_.Encode(*operator_, outputs_, result);
  }

  const OperatorCodec& codec_;
  const SharedMemory& shared_memory_;
  std::shared_ptr<const TensorOperator> operator_;
  SlotSet outputs_;
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
                 CallObserverFactory observe)
    : environment_(environment),
      shared_memory_(shared_memory),
      repository_(repository),
      caches_(caches),
      observe_(std::move(observe)),
      observe_attend_stream_(observe_(MethodName("AttendStream"))) {
  AttendSchema();  // checks the tables at startup, not at the first request
}

void Methods::AddTo(UnaryMethods& methods) {
  const auto add = [&](absl::string_view name, auto new_handler) {
    methods[PathOf(name)] = {.observe = observe_(MethodName(name)),
                             .new_handler = std::move(new_handler)};
  };
  const SharedMemory& memory = shared_memory_;
  add("Attend", [&memory] { return std::make_unique<AttendHandler>(DecodeAttend, memory); });
  add("AttendBackward",
      [&memory] { return std::make_unique<AttendHandler>(DecodeBackward, memory); });
  for (const OperatorCodec& codec : OperatorCodecs()) {
    add(codec.schema().method,
        [&codec, &memory] { return std::make_unique<OperatorHandler>(codec, memory); });
  }
  add("Diagnose", [&memory] { return std::make_unique<DiagnoseHandler>(memory); });
  methods[PathOf("EstimateMemory")] =
      SmallMethod(*this, &Methods::EstimateMemory, observe_(MethodName("EstimateMemory")));
  methods[PathOf("GetServerInfo")] =
      SmallMethod(*this, &Methods::GetServerInfo, observe_(MethodName("GetServerInfo")));
}

void Methods::AddTo(StreamMethods& methods) {
  methods[PathOf("AttendStream")] = [this](MessageStream& stream) {
    return std::make_unique<AttendStreamCall>(environment_, observe_attend_stream_, stream);
  };
  for (const OperatorCodec& codec : OperatorCodecs()) {
    if (codec.schema().want_state == nullptr) continue;
    const std::string name = absl::StrCat(codec.schema().method, "Stream");
    methods[PathOf(name)] = [this, &codec,
                             observe = observe_(MethodName(name))](MessageStream& stream) {
      return std::make_unique<OperatorStreamCall>(codec, environment_, observe, stream);
    };
  }
}

absl::Status Methods::EstimateMemory(const v1::EstimateMemoryRequest& request,
                                     v1::EstimateMemoryResponse& response) const {
  return native::EstimateMemory(request, environment_.engine.plan_options(), repository_, response);
}

absl::Status Methods::GetServerInfo(const v1::GetServerInfoRequest&,
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
