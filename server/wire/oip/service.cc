#include "server/wire/oip/service.h"

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "server/base/version.h"
#include "server/wire/oip/codec.h"
#include "server/wire/oip/model.h"
#include "server/wire/status.h"
#include "server/wire/unary_answer.h"

namespace rapt::oip {
namespace {

enum class Method {
  kServerLive,
  kServerReady,
  kModelReady,
  kServerMetadata,
  kModelMetadata,
  kModelConfig,
  kModelInfer,
  kModelStreamInfer,
  kModelStatistics,
  kRepositoryIndex,
  kRepositoryModelLoad,
  kRepositoryModelUnload,
  kSystemSharedMemoryStatus,
  kSystemSharedMemoryRegister,
  kSystemSharedMemoryUnregister,
  kCudaSharedMemoryStatus,
  kCudaSharedMemoryRegister,
  kCudaSharedMemoryUnregister,
  kTraceSetting,
  kLogSettings,
};

// In the order of Method.
constexpr std::array kMethodNames = {
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelConfig",
    "ModelInfer",
    "ModelStreamInfer",
    "ModelStatistics",
    "RepositoryIndex",
    "RepositoryModelLoad",
    "RepositoryModelUnload",
    "SystemSharedMemoryStatus",
    "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister",
    "CudaSharedMemoryStatus",
    "CudaSharedMemoryRegister",
    "CudaSharedMemoryUnregister",
    "TraceSetting",
    "LogSettings",
};
static_assert(kMethodNames.size() == static_cast<size_t>(Method::kLogSettings) + 1);

absl::Status NotOffered(Method method) {
  return absl::UnimplementedError(
      absl::StrCat("this server does not offer ", kMethodNames[static_cast<size_t>(method)]));
}

// What every call needs.
struct Environment {
  const CallEnvironment& call;
  std::function<bool()> is_ready;
  std::array<CallObserver, kMethodNames.size()> observers;  // their labels resolved

  const CallObserver& observe(Method method) const {
    return observers[static_cast<size_t>(method)];
  }
};

class InferCall final : public TensorCall {
 public:
  InferCall(const Environment& environment, grpc::GenericCallbackServerContext& context)
      : TensorCall(environment.call, environment.observe(Method::kModelInfer), context) {}

 private:
  void OnMessage(const MessageBytes& message) override {
    absl::StatusOr<DecodedInfer> decoded = DecodeInfer(message, arrived());
    if (!decoded.ok()) return End(decoded.status());
    decoded_ = *std::move(decoded);
    Bind(decoded_.request);
    engine().Submit(std::move(decoded_.request),
                    [this](Result result) { OnResult(std::move(result)); });
  }

  void OnResult(Result result) {
    TellOf(result);
    if (!result.status.ok()) return End(std::move(result.status));
    Answer(EncodeInfer(decoded_, result));
  }

  DecodedInfer decoded_;
};

class RefusedStream final : public grpc::ServerBidiReactor<inference::ModelInferRequest,
                                                           inference::ModelStreamInferResponse> {
 public:
  explicit RefusedStream(const absl::Status& status) { Finish(ToGrpcStatus(status)); }
  void OnDone() override { delete this; }
};

using Rpcs = inference::GRPCInferenceService;

// ModelInfer is one of the tensor methods.
class Service final : public Rpcs::WithGenericMethod_ModelInfer<Rpcs::CallbackService> {
 public:
  explicit Service(Environment environment) : environment_(std::move(environment)) {}

  TensorCall* NewInferCall(grpc::GenericCallbackServerContext& context) const {
    return new InferCall(environment_, context);
  }

  grpc::ServerUnaryReactor* ServerLive(grpc::CallbackServerContext* context,
                                       const inference::ServerLiveRequest*,
                                       inference::ServerLiveResponse* response) override {
    return Answer(context, Method::kServerLive, [&] {
      response->set_live(true);
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* ServerReady(grpc::CallbackServerContext* context,
                                        const inference::ServerReadyRequest*,
                                        inference::ServerReadyResponse* response) override {
    return Answer(context, Method::kServerReady, [&] {
      response->set_ready(environment_.is_ready());
      return absl::OkStatus();
    });
  }

  // As Triton does: a model that is not there is not ready, and asking is no error.
  grpc::ServerUnaryReactor* ModelReady(grpc::CallbackServerContext* context,
                                       const inference::ModelReadyRequest* request,
                                       inference::ModelReadyResponse* response) override {
    return Answer(context, Method::kModelReady, [&] {
      response->set_ready(CheckModel(request->name(), request->version()).ok() &&
                          environment_.is_ready());
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* ServerMetadata(grpc::CallbackServerContext* context,
                                           const inference::ServerMetadataRequest*,
                                           inference::ServerMetadataResponse* response) override {
    return Answer(context, Method::kServerMetadata, [&] {
      response->set_name("rapt");
      response->set_version(std::string(Version()));
      response->add_extensions("parameters");
      response->add_extensions("model_configuration");
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* ModelMetadata(grpc::CallbackServerContext* context,
                                          const inference::ModelMetadataRequest* request,
                                          inference::ModelMetadataResponse* response) override {
    return Answer(context, Method::kModelMetadata, [&] {
      absl::Status status = CheckModel(request->name(), request->version());
      if (status.ok()) *response = DescribeModel();
      return status;
    });
  }

  grpc::ServerUnaryReactor* ModelConfig(grpc::CallbackServerContext* context,
                                        const inference::ModelConfigRequest* request,
                                        inference::ModelConfigResponse* response) override {
    return Answer(context, Method::kModelConfig, [&] {
      absl::Status status = CheckModel(request->name(), request->version());
      if (status.ok()) *response->mutable_config() = ConfigureModel();
      return status;
    });
  }

  grpc::ServerBidiReactor<inference::ModelInferRequest, inference::ModelStreamInferResponse>*
  ModelStreamInfer(grpc::CallbackServerContext*) override {
    const absl::Status status = NotOffered(Method::kModelStreamInfer);
    CallReport report;
    report.status = status;
    environment_.observe(Method::kModelStreamInfer)(report);
    return new RefusedStream(status);
  }

  grpc::ServerUnaryReactor* ModelStatistics(grpc::CallbackServerContext* context,
                                            const inference::ModelStatisticsRequest*,
                                            inference::ModelStatisticsResponse*) override {
    return Refuse(context, Method::kModelStatistics);
  }

  grpc::ServerUnaryReactor* RepositoryIndex(grpc::CallbackServerContext* context,
                                            const inference::RepositoryIndexRequest*,
                                            inference::RepositoryIndexResponse*) override {
    return Refuse(context, Method::kRepositoryIndex);
  }

  grpc::ServerUnaryReactor* RepositoryModelLoad(grpc::CallbackServerContext* context,
                                                const inference::RepositoryModelLoadRequest*,
                                                inference::RepositoryModelLoadResponse*) override {
    return Refuse(context, Method::kRepositoryModelLoad);
  }

  grpc::ServerUnaryReactor* RepositoryModelUnload(
      grpc::CallbackServerContext* context, const inference::RepositoryModelUnloadRequest*,
      inference::RepositoryModelUnloadResponse*) override {
    return Refuse(context, Method::kRepositoryModelUnload);
  }

  grpc::ServerUnaryReactor* SystemSharedMemoryStatus(
      grpc::CallbackServerContext* context, const inference::SystemSharedMemoryStatusRequest*,
      inference::SystemSharedMemoryStatusResponse*) override {
    return Refuse(context, Method::kSystemSharedMemoryStatus);
  }

  grpc::ServerUnaryReactor* SystemSharedMemoryRegister(
      grpc::CallbackServerContext* context, const inference::SystemSharedMemoryRegisterRequest*,
      inference::SystemSharedMemoryRegisterResponse*) override {
    return Refuse(context, Method::kSystemSharedMemoryRegister);
  }

  grpc::ServerUnaryReactor* SystemSharedMemoryUnregister(
      grpc::CallbackServerContext* context, const inference::SystemSharedMemoryUnregisterRequest*,
      inference::SystemSharedMemoryUnregisterResponse*) override {
    return Refuse(context, Method::kSystemSharedMemoryUnregister);
  }

  grpc::ServerUnaryReactor* CudaSharedMemoryStatus(
      grpc::CallbackServerContext* context, const inference::CudaSharedMemoryStatusRequest*,
      inference::CudaSharedMemoryStatusResponse*) override {
    return Refuse(context, Method::kCudaSharedMemoryStatus);
  }

  grpc::ServerUnaryReactor* CudaSharedMemoryRegister(
      grpc::CallbackServerContext* context, const inference::CudaSharedMemoryRegisterRequest*,
      inference::CudaSharedMemoryRegisterResponse*) override {
    return Refuse(context, Method::kCudaSharedMemoryRegister);
  }

  grpc::ServerUnaryReactor* CudaSharedMemoryUnregister(
      grpc::CallbackServerContext* context, const inference::CudaSharedMemoryUnregisterRequest*,
      inference::CudaSharedMemoryUnregisterResponse*) override {
    return Refuse(context, Method::kCudaSharedMemoryUnregister);
  }

  grpc::ServerUnaryReactor* TraceSetting(grpc::CallbackServerContext* context,
                                         const inference::TraceSettingRequest*,
                                         inference::TraceSettingResponse*) override {
    return Refuse(context, Method::kTraceSetting);
  }

  grpc::ServerUnaryReactor* LogSettings(grpc::CallbackServerContext* context,
                                        const inference::LogSettingsRequest*,
                                        inference::LogSettingsResponse*) override {
    return Refuse(context, Method::kLogSettings);
  }

 private:
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, Method method,
                                   absl::FunctionRef<absl::Status()> fill) {
    return AnswerAtOnce(*context, environment_.call.clock, environment_.observe(method), fill);
  }

  grpc::ServerUnaryReactor* Refuse(grpc::CallbackServerContext* context, Method method) {
    return Answer(context, method, [method] { return NotOffered(method); });
  }

  const Environment environment_;
};

}  // namespace

std::unique_ptr<grpc::Service> NewService(const CallEnvironment& call,
                                          std::function<bool()> is_ready,
                                          const CallObserverFactory& observe,
                                          TensorMethods& tensor_methods) {
  Environment environment{call, std::move(is_ready), {}};
  for (size_t i = 0; i < kMethodNames.size(); ++i) {
    environment.observers[i] = observe(absl::StrCat(kServiceName, "/", kMethodNames[i]));
  }
  auto service = std::make_unique<Service>(std::move(environment));
  tensor_methods.Add(absl::StrCat("/", kServiceName, "/ModelInfer"),
                     [&service = *service](grpc::GenericCallbackServerContext& context) {
                       return service.NewInferCall(context);
                     });
  return service;
}

}  // namespace rapt::oip
