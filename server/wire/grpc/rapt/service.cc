#include "server/wire/grpc/rapt/service.h"

#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "proto/rapt/v1/attention.grpc.pb.h"
#include "server/protocols/rapt/codec.h"
#include "server/protocols/rapt/reports.h"
#include "server/wire/grpc/rapt/attend_stream_call.h"
#include "server/wire/grpc/unary_answer.h"

namespace rapt::native {
namespace {

// The dependencies of all calls.
struct Environment {
  const CallEnvironment& call;
  const SharedMemory& shared_memory;
  CallObserver observe_attend, observe_attend_stream, observe_diagnose, observe_estimate_memory,
      observe_get_server_info;
};

class AttendCall final : public TensorCall {
 public:
  AttendCall(const Environment& environment, std::unique_ptr<GrpcCall> call)
      : TensorCall(environment.call, environment.observe_attend, std::move(call)),
        shared_memory_(environment.shared_memory) {}

 private:
  void OnMessage(const MessageBytes& message) override {
    absl::StatusOr<DecodedCall> decoded = DecodeAttend(message, shared_memory_);
    if (!decoded.ok()) return End(decoded.status());
    if (absl::Status status = CheckAnswerSize(*decoded); !status.ok())
      return End(std::move(status));
    Request& request = decoded->request;
    call_ = request.call;
    places_ = decoded->fields.places();
    Bind(request);
    engine().Submit(std::move(request), [this](Result result) { OnResult(std::move(result)); });
  }

  void OnResult(Result result) {
    Record(result);
    if (!result.status.ok()) return End(std::move(result.status));
    Answer(EncodeResult(call_, places_, result));
  }

  const SharedMemory& shared_memory_;
  ResolvedCall call_;
  v1::OutputPlaces places_;
};

class DiagnoseCall final : public TensorCall {
 public:
  DiagnoseCall(const Environment& environment, std::unique_ptr<GrpcCall> call)
      : TensorCall(environment.call, environment.observe_diagnose, std::move(call)),
        shared_memory_(environment.shared_memory) {}

 private:
  void OnMessage(const MessageBytes& message) override {
    absl::StatusOr<DecodedCall> decoded = DecodeDiagnose(message, shared_memory_);
    if (!decoded.ok()) return End(decoded.status());
    fields_ = std::move(decoded->fields);
    Bind(decoded->request);
    engine().Diagnose(std::move(decoded->request),
                      [this](const absl::StatusOr<DiagnosisReport>& report) { OnReport(report); });
  }

  void OnReport(const absl::StatusOr<DiagnosisReport>& report) {
    if (!report.ok()) return End(report.status());
    v1::DiagnoseResponse response;
    EncodeDiagnosis(fields_, *report, response);
    AnswerMessage answer;
    answer.Append(response.SerializeAsString());
    Answer(std::move(answer));
  }

  const SharedMemory& shared_memory_;
  v1::AttendRequest fields_;
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

using Rpcs = v1::AttentionService;

// Attend, AttendStream and Diagnose are tensor methods.
class Service final
    : public Rpcs::WithGenericMethod_Attend<
          Rpcs::WithGenericMethod_AttendStream<Rpcs::WithGenericMethod_Diagnose<Rpcs::Service>>> {
 public:
  explicit Service(Environment environment) : environment_(std::move(environment)) {}

  // Adds this service's tensor methods. REQUIRES: this outlives `methods`.
  void AddTo(TensorMethods& methods) const {
    methods.Add(absl::StrCat("/", kServiceName, "/Attend"),
                [this](auto call) { return new AttendCall(environment_, std::move(call)); });
    methods.Add(absl::StrCat("/", kServiceName, "/AttendStream"), [this](auto call) {
      return new AttendStreamCall(environment_.call, environment_.observe_attend_stream,
                                  std::move(call));
    });
    methods.Add(absl::StrCat("/", kServiceName, "/Diagnose"),
                [this](auto call) { return new DiagnoseCall(environment_, std::move(call)); });
  }

  grpc::Status EstimateMemory(grpc::ServerContext* context,
                              const v1::EstimateMemoryRequest* request,
                              v1::EstimateMemoryResponse* response) override {
    return Answer(context, environment_.observe_estimate_memory, [&] {
      return native::EstimateMemory(*request, environment_.call.engine.plan_options(), *response);
    });
  }

  grpc::Status GetServerInfo(grpc::ServerContext* context, const v1::GetServerInfoRequest*,
                             v1::GetServerInfoResponse* response) override {
    return Answer(context, environment_.observe_get_server_info, [&] {
      const Engine& engine = environment_.call.engine;
      DescribeServer(engine.plan_options(), *response);
      response->set_memory_budget_bytes(engine.gate().capacity_bytes());
      response->set_memory_reserved_bytes(engine.gate().reserved_bytes());
      response->set_max_message_bytes(environment_.call.limits.max_message_bytes);
      DescribeAdmission(environment_.call, *response->mutable_admission());
      return absl::OkStatus();
    });
  }

 private:
  grpc::Status Answer(grpc::ServerContext* context, const CallObserver& observe,
                      absl::FunctionRef<absl::Status()> fill) {
    return AnswerAtOnce(*context, environment_.call, observe, fill);
  }

  const Environment environment_;
};

}  // namespace

std::unique_ptr<grpc::Service> NewService(const CallEnvironment& environment,
                                          const SharedMemory& shared_memory,
                                          const CallObserverFactory& observe,
                                          TensorMethods& tensor_methods) {
  const auto observe_method = [&](absl::string_view method) {
    return observe(absl::StrCat(kServiceName, "/", method));
  };
  auto service = std::make_unique<Service>(Environment{
      .call = environment,
      .shared_memory = shared_memory,
      .observe_attend = observe_method("Attend"),
      .observe_attend_stream = observe_method("AttendStream"),
      .observe_diagnose = observe_method("Diagnose"),
      .observe_estimate_memory = observe_method("EstimateMemory"),
      .observe_get_server_info = observe_method("GetServerInfo"),
  });
  service->AddTo(tensor_methods);
  return service;
}

}  // namespace rapt::native
