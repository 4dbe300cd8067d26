#include "server/wire/grpc/oip/service.h"

#include "proto/inference/grpc_service.grpc.pb.h"
#include "server/wire/grpc/unary_response.h"

namespace rapt::oip {
namespace {

using Rpcs = inference::GRPCInferenceService;

// The methods that carry tensors are tensor methods.
class Service final
    : public UnaryService<Rpcs::WithGenericMethod_ModelInfer<
                              Rpcs::WithGenericMethod_ModelStreamInfer<Rpcs::Service>>,
                          Methods> {
 public:
  using UnaryService::UnaryService;

  grpc::Status ServerLive(grpc::ServerContext* context, const inference::ServerLiveRequest* request,
                          inference::ServerLiveResponse* response) override {
    return Respond(context, methods().observe("ServerLive"), request, response);
  }

  grpc::Status ServerReady(grpc::ServerContext* context,
                           const inference::ServerReadyRequest* request,
                           inference::ServerReadyResponse* response) override {
    return Respond(context, methods().observe("ServerReady"), request, response);
  }

  grpc::Status ModelReady(grpc::ServerContext* context, const inference::ModelReadyRequest* request,
                          inference::ModelReadyResponse* response) override {
    return Respond(context, methods().observe("ModelReady"), request, response);
  }

  grpc::Status ServerMetadata(grpc::ServerContext* context,
                              const inference::ServerMetadataRequest* request,
                              inference::ServerMetadataResponse* response) override {
    return Respond(context, methods().observe("ServerMetadata"), request, response);
  }

  grpc::Status ModelMetadata(grpc::ServerContext* context,
                             const inference::ModelMetadataRequest* request,
                             inference::ModelMetadataResponse* response) override {
    return Respond(context, methods().observe("ModelMetadata"), request, response);
  }

  grpc::Status ModelConfig(grpc::ServerContext* context,
                           const inference::ModelConfigRequest* request,
                           inference::ModelConfigResponse* response) override {
    return Respond(context, methods().observe("ModelConfig"), request, response);
  }

  grpc::Status ModelStatistics(grpc::ServerContext* context,
                               const inference::ModelStatisticsRequest* request,
                               inference::ModelStatisticsResponse* response) override {
    return Respond(context, methods().observe("ModelStatistics"), request, response);
  }

  grpc::Status RepositoryIndex(grpc::ServerContext* context,
                               const inference::RepositoryIndexRequest* request,
                               inference::RepositoryIndexResponse* response) override {
    return Respond(context, methods().observe("RepositoryIndex"), request, response);
  }

  grpc::Status RepositoryModelLoad(grpc::ServerContext* context,
                                   const inference::RepositoryModelLoadRequest* request,
                                   inference::RepositoryModelLoadResponse* response) override {
    return Respond(context, methods().observe("RepositoryModelLoad"), request, response);
  }

  grpc::Status RepositoryModelUnload(grpc::ServerContext* context,
                                     const inference::RepositoryModelUnloadRequest* request,
                                     inference::RepositoryModelUnloadResponse* response) override {
    return Respond(context, methods().observe("RepositoryModelUnload"), request, response);
  }

  grpc::Status SystemSharedMemoryStatus(
      grpc::ServerContext* context, const inference::SystemSharedMemoryStatusRequest* request,
      inference::SystemSharedMemoryStatusResponse* response) override {
    return Respond(context, methods().observe("SystemSharedMemoryStatus"), request, response);
  }

  grpc::Status SystemSharedMemoryRegister(
      grpc::ServerContext* context, const inference::SystemSharedMemoryRegisterRequest* request,
      inference::SystemSharedMemoryRegisterResponse* response) override {
    return Respond(context, methods().observe("SystemSharedMemoryRegister"), request, response);
  }

  grpc::Status SystemSharedMemoryUnregister(
      grpc::ServerContext* context, const inference::SystemSharedMemoryUnregisterRequest* request,
      inference::SystemSharedMemoryUnregisterResponse* response) override {
    return Respond(context, methods().observe("SystemSharedMemoryUnregister"), request, response);
  }

  grpc::Status CudaSharedMemoryStatus(
      grpc::ServerContext* context, const inference::CudaSharedMemoryStatusRequest* request,
      inference::CudaSharedMemoryStatusResponse* response) override {
    return Respond(context, methods().observe("CudaSharedMemoryStatus"), request, response);
  }

  grpc::Status CudaSharedMemoryRegister(
      grpc::ServerContext* context, const inference::CudaSharedMemoryRegisterRequest* request,
      inference::CudaSharedMemoryRegisterResponse* response) override {
    return Respond(context, methods().observe("CudaSharedMemoryRegister"), request, response);
  }

  grpc::Status CudaSharedMemoryUnregister(
      grpc::ServerContext* context, const inference::CudaSharedMemoryUnregisterRequest* request,
      inference::CudaSharedMemoryUnregisterResponse* response) override {
    return Respond(context, methods().observe("CudaSharedMemoryUnregister"), request, response);
  }

  grpc::Status TraceSetting(grpc::ServerContext* context,
                            const inference::TraceSettingRequest* request,
                            inference::TraceSettingResponse* response) override {
    return Respond(context, methods().observe("TraceSetting"), request, response);
  }

  grpc::Status LogSettings(grpc::ServerContext* context,
                           const inference::LogSettingsRequest* request,
                           inference::LogSettingsResponse* response) override {
    return Respond(context, methods().observe("LogSettings"), request, response);
  }
};

}  // namespace

std::unique_ptr<grpc::Service> NewService(const CallEnvironment& environment,
                                          const Methods& methods) {
  return std::make_unique<Service>(environment, methods);
}

}  // namespace rapt::oip
