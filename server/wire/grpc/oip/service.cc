#include "server/wire/grpc/oip/service.h"

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/version.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "server/protocols/oip/codec.h"
#include "server/protocols/oip/model.h"
#include "server/protocols/oip/statistics.h"
#include "server/wire/grpc/oip/stream_infer_call.h"
#include "server/wire/grpc/status.h"
#include "server/wire/grpc/unary_answer.h"

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

// There are no settings of tracing and logging, so only a request for all of them is valid.
template <typename Settings>
absl::Status CheckNoSettings(const Settings& settings, absl::string_view kind) {
  if (settings.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("unknown ", kind, " setting ", settings.begin()->first));
}

// An empty name selects all models; there is only one.
absl::Status CheckModelOrAll(const std::string& name, const std::string& version) {
  return name.empty() ? absl::OkStatus() : CheckModel(name, version);
}

absl::Status NotOffered(Method method) {
  return absl::UnimplementedError(
      absl::StrCat("not supported: ", kMethodNames[static_cast<size_t>(method)]));
}

// The dependencies of all calls.
struct Environment {
  const CallEnvironment& call;
  SharedMemory& shared_memory;
  std::function<bool()> is_ready;
  std::shared_ptr<Statistics> statistics;  // updated by the observers of both infer methods
  std::array<CallObserver, kMethodNames.size()> observers;  // with resolved labels

  const CallObserver& observe(Method method) const {
    return observers[static_cast<size_t>(method)];
  }
};

class InferCall final : public TensorCall {
 public:
  InferCall(const Environment& environment, std::unique_ptr<GrpcCall> call)
      : TensorCall(environment.call, environment.observe(Method::kModelInfer), std::move(call)),
        shared_memory_(environment.shared_memory) {}

 private:
  void OnMessage(const MessageBytes& message) override {
    absl::StatusOr<DecodedInfer> decoded = DecodeInfer(message, arrived(), shared_memory_);
    if (!decoded.ok()) return End(decoded.status());
    decoded_ = *std::move(decoded);
    Bind(decoded_.request);
    engine().Submit(std::move(decoded_.request),
                    [this](Result result) { OnResult(std::move(result)); });
  }

  void OnResult(Result result) {
    Record(result);
    if (!result.status.ok()) return End(std::move(result.status));
    Answer(EncodeInfer(decoded_, result));
  }

  const SharedMemory& shared_memory_;
  DecodedInfer decoded_;
};

using Rpcs = inference::GRPCInferenceService;

// The methods that carry tensors are tensor methods.
class Service final : public Rpcs::WithGenericMethod_ModelInfer<
                          Rpcs::WithGenericMethod_ModelStreamInfer<Rpcs::Service>> {
 public:
  explicit Service(Environment environment) : environment_(std::move(environment)) {}

  // Adds this service's tensor methods. REQUIRES: this outlives `methods`.
  void AddTo(TensorMethods& methods) const {
    methods.Add(absl::StrCat("/", kServiceName, "/ModelInfer"),
                [this](auto call) { return new InferCall(environment_, std::move(call)); });
    methods.Add(absl::StrCat("/", kServiceName, "/ModelStreamInfer"), [this](auto call) {
      return new StreamInferCall(environment_.call, environment_.shared_memory,
                                 environment_.observe(Method::kModelStreamInfer), std::move(call));
    });
  }

  grpc::Status ServerLive(grpc::ServerContext* context, const inference::ServerLiveRequest*,
                          inference::ServerLiveResponse* response) override {
    return Answer(context, Method::kServerLive, [&] {
      response->set_live(true);
      return absl::OkStatus();
    });
  }

  grpc::Status ServerReady(grpc::ServerContext* context, const inference::ServerReadyRequest*,
                           inference::ServerReadyResponse* response) override {
    return Answer(context, Method::kServerReady, [&] {
      response->set_ready(environment_.is_ready());
      return absl::OkStatus();
    });
  }

  // As in Triton, an unknown model is not ready, without an error.
  grpc::Status ModelReady(grpc::ServerContext* context, const inference::ModelReadyRequest* request,
                          inference::ModelReadyResponse* response) override {
    return Answer(context, Method::kModelReady, [&] {
      response->set_ready(CheckModel(request->name(), request->version()).ok() &&
                          environment_.is_ready());
      return absl::OkStatus();
    });
  }

  grpc::Status ServerMetadata(grpc::ServerContext* context, const inference::ServerMetadataRequest*,
                              inference::ServerMetadataResponse* response) override {
    return Answer(context, Method::kServerMetadata, [&] {
      response->set_name("rapt");
      response->set_version(std::string(Version()));
      for (const char* extension : {"statistics", "parameters", "model_configuration"}) {
        response->add_extensions(extension);
      }
      if (environment_.shared_memory.allowed()) response->add_extensions("system_shared_memory");
      if (environment_.shared_memory.takes_cuda()) response->add_extensions("cuda_shared_memory");
      return absl::OkStatus();
    });
  }

  grpc::Status ModelMetadata(grpc::ServerContext* context,
                             const inference::ModelMetadataRequest* request,
                             inference::ModelMetadataResponse* response) override {
    return Answer(context, Method::kModelMetadata, [&] {
      absl::Status status = CheckModel(request->name(), request->version());
      if (status.ok()) *response = DescribeModel();
      return status;
    });
  }

  grpc::Status ModelConfig(grpc::ServerContext* context,
                           const inference::ModelConfigRequest* request,
                           inference::ModelConfigResponse* response) override {
    return Answer(context, Method::kModelConfig, [&] {
      absl::Status status = CheckModel(request->name(), request->version());
      if (status.ok()) *response->mutable_config() = ConfigureModel();
      return status;
    });
  }

  grpc::Status ModelStatistics(grpc::ServerContext* context,
                               const inference::ModelStatisticsRequest* request,
                               inference::ModelStatisticsResponse* response) override {
    return Answer(context, Method::kModelStatistics, [&] {
      absl::Status status = CheckModelOrAll(request->name(), request->version());
      if (!status.ok()) return status;
      inference::ModelStatistics& model = *response->add_model_stats();
      model.set_name(kModelName);
      model.set_version(kModelVersion);
      environment_.statistics->Describe(model);
      return status;
    });
  }

  grpc::Status RepositoryIndex(grpc::ServerContext* context,
                               const inference::RepositoryIndexRequest* request,
                               inference::RepositoryIndexResponse* response) override {
    return Answer(context, Method::kRepositoryIndex, [&] {
      if (!request->repository_name().empty()) {
        return absl::UnimplementedError("the only repository has no name; leave it empty");
      }
      const bool is_ready = environment_.is_ready();
      if (request->ready() && !is_ready) return absl::OkStatus();
      auto& model = *response->add_models();
      model.set_name(kModelName);
      model.set_version(kModelVersion);
      model.set_state(is_ready ? "READY" : "UNAVAILABLE");
      return absl::OkStatus();
    });
  }

  grpc::Status RepositoryModelLoad(grpc::ServerContext* context,
                                   const inference::RepositoryModelLoadRequest*,
                                   inference::RepositoryModelLoadResponse*) override {
    return Refuse(context, Method::kRepositoryModelLoad);
  }

  grpc::Status RepositoryModelUnload(grpc::ServerContext* context,
                                     const inference::RepositoryModelUnloadRequest*,
                                     inference::RepositoryModelUnloadResponse*) override {
    return Refuse(context, Method::kRepositoryModelUnload);
  }

  grpc::Status SystemSharedMemoryStatus(
      grpc::ServerContext* context, const inference::SystemSharedMemoryStatusRequest* request,
      inference::SystemSharedMemoryStatusResponse* response) override {
    return Answer(context, Method::kSystemSharedMemoryStatus, [&] {
      const auto regions =
          environment_.shared_memory.Describe(SharedMemory::Kind::kSystem, request->name());
      if (!regions.ok()) return regions.status();
      for (const SharedMemory::Description& region : *regions) {
        auto& message = (*response->mutable_regions())[region.name];
        message.set_name(region.name);
        message.set_offset(static_cast<uint64_t>(region.offset));
        message.set_byte_size(static_cast<uint64_t>(region.byte_size));
      }
      return absl::OkStatus();
    });
  }

  grpc::Status SystemSharedMemoryRegister(
      grpc::ServerContext* context, const inference::SystemSharedMemoryRegisterRequest* request,
      inference::SystemSharedMemoryRegisterResponse*) override {
    return Answer(context, Method::kSystemSharedMemoryRegister, [&] {
      return environment_.shared_memory.RegisterSystem(request->name(), request->key(),
                                                       request->offset(), request->byte_size());
    });
  }

  grpc::Status SystemSharedMemoryUnregister(
      grpc::ServerContext* context, const inference::SystemSharedMemoryUnregisterRequest* request,
      inference::SystemSharedMemoryUnregisterResponse*) override {
    return Answer(context, Method::kSystemSharedMemoryUnregister, [&] {
      return environment_.shared_memory.Unregister(SharedMemory::Kind::kSystem, request->name());
    });
  }

  grpc::Status CudaSharedMemoryStatus(
      grpc::ServerContext* context, const inference::CudaSharedMemoryStatusRequest* request,
      inference::CudaSharedMemoryStatusResponse* response) override {
    return Answer(context, Method::kCudaSharedMemoryStatus, [&] {
      const auto regions =
          environment_.shared_memory.Describe(SharedMemory::Kind::kCuda, request->name());
      if (!regions.ok()) return regions.status();
      for (const SharedMemory::Description& region : *regions) {
        auto& message = (*response->mutable_regions())[region.name];
        message.set_name(region.name);
        message.set_device_id(static_cast<uint64_t>(region.device_id));
        message.set_byte_size(static_cast<uint64_t>(region.byte_size));
      }
      return absl::OkStatus();
    });
  }

  grpc::Status CudaSharedMemoryRegister(grpc::ServerContext* context,
                                        const inference::CudaSharedMemoryRegisterRequest* request,
                                        inference::CudaSharedMemoryRegisterResponse*) override {
    return Answer(context, Method::kCudaSharedMemoryRegister, [&] {
      return environment_.shared_memory.RegisterCuda(request->name(), request->raw_handle(),
                                                     request->device_id(), request->byte_size());
    });
  }

  grpc::Status CudaSharedMemoryUnregister(
      grpc::ServerContext* context, const inference::CudaSharedMemoryUnregisterRequest* request,
      inference::CudaSharedMemoryUnregisterResponse*) override {
    return Answer(context, Method::kCudaSharedMemoryUnregister, [&] {
      return environment_.shared_memory.Unregister(SharedMemory::Kind::kCuda, request->name());
    });
  }

  grpc::Status TraceSetting(grpc::ServerContext* context,
                            const inference::TraceSettingRequest* request,
                            inference::TraceSettingResponse*) override {
    return Answer(context, Method::kTraceSetting, [&] {
      absl::Status status = CheckModelOrAll(request->model_name(), "");
      status.Update(CheckNoSettings(request->settings(), "trace"));
      return status;
    });
  }

  grpc::Status LogSettings(grpc::ServerContext* context,
                           const inference::LogSettingsRequest* request,
                           inference::LogSettingsResponse*) override {
    return Answer(context, Method::kLogSettings,
                  [&] { return CheckNoSettings(request->settings(), "log"); });
  }

 private:
  grpc::Status Answer(grpc::ServerContext* context, Method method,
                      absl::FunctionRef<absl::Status()> fill) {
    return AnswerAtOnce(*context, environment_.call, environment_.observe(method), fill);
  }

  grpc::Status Refuse(grpc::ServerContext* context, Method method) {
    return Answer(context, method, [method] { return NotOffered(method); });
  }

  const Environment environment_;
};

}  // namespace

std::unique_ptr<grpc::Service> NewService(const CallEnvironment& call, SharedMemory& shared_memory,
                                          std::function<bool()> is_ready,
                                          const CallObserverFactory& observe,
                                          TensorMethods& tensor_methods) {
  auto statistics = std::make_shared<Statistics>();
  Environment environment{call, shared_memory, std::move(is_ready), statistics, {}};
  for (size_t i = 0; i < kMethodNames.size(); ++i) {
    environment.observers[i] = observe(absl::StrCat(kServiceName, "/", kMethodNames[i]));
  }
  for (const Method method : {Method::kModelInfer, Method::kModelStreamInfer}) {
    CallObserver& observer = environment.observers[static_cast<size_t>(method)];
    observer = [statistics, observe = std::move(observer)](const CallReport& report) {
      statistics->Count(report);
      observe(report);
    };
  }
  auto service = std::make_unique<Service>(std::move(environment));
  service->AddTo(tensor_methods);
  return service;
}

}  // namespace rapt::oip
