#include "server/wire/rapt/service.h"

#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/rapt/v1/attention.grpc.pb.h"
#include "server/wire/rapt/codec.h"
#include "server/wire/rapt/reports.h"

namespace rapt::native {
namespace {

// What every call needs.
struct Environment {
  CallEnvironment call;
  int64_t max_message_bytes;
  CallObserver observe_attend, observe_diagnose, observe_estimate_memory, observe_get_server_info;
};

absl::StatusOr<Request> Decode(const v1::AttendRequest& message, Engine& engine) {
  return DecodeCall(message, [&engine](int64_t bytes) { return engine.AllocateInput(bytes); });
}

class AttendCall final : public EngineCall {
 public:
  AttendCall(const Environment& environment, grpc::CallbackServerContext& context,
             const v1::AttendRequest& request, v1::AttendResponse& response)
      : EngineCall(environment.call, environment.observe_attend, context),
        request_(request),
        response_(response) {}

  void Start() {
    absl::StatusOr<Request> request = Decode(request_, engine());
    if (!request.ok()) return End(request.status());
    call_ = request->call;
    if (absl::Status status = CheckAnswerSize(call_); !status.ok()) return End(std::move(status));
    Bind(*request);
    engine().Submit(*std::move(request), [this](Result result) { OnResult(std::move(result)); });
  }

 private:
  void OnResult(Result result) {
    NamePlan(result);
    if (result.status.ok()) EncodeResult(call_, result, response_);
    End(std::move(result.status));
  }

  const v1::AttendRequest& request_;
  v1::AttendResponse& response_;
  ResolvedCall call_;
};

class DiagnoseCall final : public EngineCall {
 public:
  DiagnoseCall(const Environment& environment, grpc::CallbackServerContext& context,
               const v1::DiagnoseRequest& request, v1::DiagnoseResponse& response)
      : EngineCall(environment.call, environment.observe_diagnose, context),
        request_(request),
        response_(response) {}

  void Start() {
    absl::StatusOr<Request> request = Decode(request_.call(), engine());
    if (!request.ok()) return End(request.status());
    Bind(*request);
    engine().Diagnose(*std::move(request), [this](const absl::StatusOr<DiagnosisReport>& report) {
      if (report.ok()) EncodeDiagnosis(request_.call(), *report, response_);
      End(report.status());
    });
  }

 private:
  const v1::DiagnoseRequest& request_;
  v1::DiagnoseResponse& response_;
};

class Service final : public v1::AttentionService::CallbackService {
 public:
  explicit Service(Environment environment) : environment_(std::move(environment)) {}

  grpc::ServerUnaryReactor* Attend(grpc::CallbackServerContext* context,
                                   const v1::AttendRequest* request,
                                   v1::AttendResponse* response) override {
    auto* call = new AttendCall(environment_, *context, *request, *response);
    call->Start();
    return call;
  }

  grpc::ServerUnaryReactor* Diagnose(grpc::CallbackServerContext* context,
                                     const v1::DiagnoseRequest* request,
                                     v1::DiagnoseResponse* response) override {
    auto* call = new DiagnoseCall(environment_, *context, *request, *response);
    call->Start();
    return call;
  }

  grpc::ServerUnaryReactor* EstimateMemory(grpc::CallbackServerContext* context,
                                           const v1::EstimateMemoryRequest* request,
                                           v1::EstimateMemoryResponse* response) override {
    return Answer(context, environment_.observe_estimate_memory, [&] {
      return native::EstimateMemory(*request, environment_.call.engine.plan_options(), *response);
    });
  }

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest*,
                                          v1::GetServerInfoResponse* response) override {
    return Answer(context, environment_.observe_get_server_info, [&] {
      const Engine& engine = environment_.call.engine;
      DescribeServer(engine.plan_options(), *response);
      response->set_memory_budget_bytes(engine.memory_budget().capacity_bytes());
      response->set_memory_reserved_bytes(engine.memory_budget().reserved_bytes());
      response->set_max_message_bytes(environment_.max_message_bytes);
      return absl::OkStatus();
    });
  }

 private:
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context,
                                   const CallObserver& observe,
                                   absl::FunctionRef<absl::Status()> fill) {
    return AnswerAtOnce(*context, environment_.call.clock, observe, fill);
  }

  const Environment environment_;
};

}  // namespace

std::unique_ptr<grpc::Service> NewService(const CallEnvironment& environment,
                                          int64_t max_message_bytes,
                                          const CallObserverFactory& observe) {
  const auto observe_method = [&](absl::string_view method) {
    return observe(absl::StrCat(kServiceName, "/", method));
  };
  return std::make_unique<Service>(Environment{
      .call = environment,
      .max_message_bytes = max_message_bytes,
      .observe_attend = observe_method("Attend"),
      .observe_diagnose = observe_method("Diagnose"),
      .observe_estimate_memory = observe_method("EstimateMemory"),
      .observe_get_server_info = observe_method("GetServerInfo"),
  });
}

}  // namespace rapt::native
