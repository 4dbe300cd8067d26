// The methods of inference.GRPCInferenceService, independent of the transport. proto/inference
// documents the messages; ServerMetadata lists the supported extensions.
#ifndef RAPT_SERVER_WIRE_OIP_METHODS_H_
#define RAPT_SERVER_WIRE_OIP_METHODS_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "proto/inference/grpc_service.pb.h"
#include "server/cache/sequences.h"
#include "server/calls/call_report.h"
#include "server/calls/per_model.h"
#include "server/models/model_repository.h"
#include "server/protocols/oip/model.h"
#include "server/protocols/oip/statistics.h"
#include "server/shared_memory/shared_memory.h"
#include "server/wire/event_loop.h"
#include "server/wire/message_stream.h"
#include "server/wire/unary_method.h"

namespace rapt::oip {

inline constexpr char kServiceName[] = "inference.GRPCInferenceService";

// Thread-safe. `is_ready` is called from any thread. REQUIRES: everything borrowed outlives it.
class Methods {
 public:
  // What a server may have; null: it has none.
  struct Optional {
    cache::Sequences* sequences = nullptr;  // for attention_session
    ModelRepository* repository = nullptr;  // of layers
  };

  Methods(SharedMemory& shared_memory, std::function<bool()> is_ready,
          const CallObserverFactory& observe, const Clock& clock, Optional optional);

  // Adds the unary methods. REQUIRES: this outlives them.
  void AddTo(UnaryMethods& methods);
  // Adds ModelStreamInfer. REQUIRES: both outlive the methods.
  void AddTo(StreamMethods& methods, const CallEnvironment& environment);

  // The observer of a method, with resolved labels. `name` is "ModelInfer".
  const CallObserver& observe(const std::string& name) const { return observers_.at(name); }

  // Returns an observer of calls of a model that also counts them in its statistics.
  CallObserver Counted(CallObserver observe) const;

  // Calls of sequences are served while the server drains.
  MethodTraits InferTraits() const { return {.serves_while_draining = sequences_ != nullptr}; }

  const SharedMemory& shared_memory() const { return shared_memory_; }
  cache::Sequences* sequences() const { return sequences_; }
  const ModelContext& model_context() const { return model_context_; }

  // Runs a task on the thread that loads and unloads models, which takes too long for others.
  void PostToLoader(EventLoop::Task task) const { loader_->Post(std::move(task)); }

  // The methods without tensors. Return InvalidArgument, Unimplemented, or as SharedMemory does.
  absl::Status ServerLive(const inference::ServerLiveRequest& request,
                          inference::ServerLiveResponse& response) const;
  absl::Status ServerReady(const inference::ServerReadyRequest& request,
                           inference::ServerReadyResponse& response) const;
  absl::Status ModelReady(const inference::ModelReadyRequest& request,
                          inference::ModelReadyResponse& response) const;
  absl::Status ServerMetadata(const inference::ServerMetadataRequest& request,
                              inference::ServerMetadataResponse& response) const;
  absl::Status ModelMetadata(const inference::ModelMetadataRequest& request,
                             inference::ModelMetadataResponse& response) const;
  absl::Status ModelConfig(const inference::ModelConfigRequest& request,
                           inference::ModelConfigResponse& response) const;
  absl::Status ModelStatistics(const inference::ModelStatisticsRequest& request,
                               inference::ModelStatisticsResponse& response) const;
  absl::Status RepositoryIndex(const inference::RepositoryIndexRequest& request,
                               inference::RepositoryIndexResponse& response) const;
  absl::Status RepositoryModelLoad(const inference::RepositoryModelLoadRequest& request,
                                   inference::RepositoryModelLoadResponse& response) const;
  absl::Status RepositoryModelUnload(const inference::RepositoryModelUnloadRequest& request,
                                     inference::RepositoryModelUnloadResponse& response) const;
  absl::Status SystemSharedMemoryStatus(
      const inference::SystemSharedMemoryStatusRequest& request,
      inference::SystemSharedMemoryStatusResponse& response) const;
  absl::Status SystemSharedMemoryRegister(
      const inference::SystemSharedMemoryRegisterRequest& request,
      inference::SystemSharedMemoryRegisterResponse& response) const;
  absl::Status SystemSharedMemoryUnregister(
      const inference::SystemSharedMemoryUnregisterRequest& request,
      inference::SystemSharedMemoryUnregisterResponse& response) const;
  absl::Status CudaSharedMemoryStatus(const inference::CudaSharedMemoryStatusRequest& request,
                                      inference::CudaSharedMemoryStatusResponse& response) const;
  absl::Status CudaSharedMemoryRegister(
      const inference::CudaSharedMemoryRegisterRequest& request,
      inference::CudaSharedMemoryRegisterResponse& response) const;
  absl::Status CudaSharedMemoryUnregister(
      const inference::CudaSharedMemoryUnregisterRequest& request,
      inference::CudaSharedMemoryUnregisterResponse& response) const;
  absl::Status TraceSetting(const inference::TraceSettingRequest& request,
                            inference::TraceSettingResponse& response) const;
  absl::Status LogSettings(const inference::LogSettingsRequest& request,
                           inference::LogSettingsResponse& response) const;

 private:
  absl::Status CheckRepository(const std::string& repository_name) const;
  // Ends those of the layer that was replaced or unloaded, if there was one; returns the status.
  absl::Status EndSequences(const absl::StatusOr<ModelInfoPtr>& replaced) const;
  SharedMemory& shared_memory_;
  cache::Sequences* const sequences_;
  ModelRepository* const repository_;
  const ModelContext model_context_;
  const std::function<bool()> is_ready_;
  // Updated by the observers of both infer methods.
  const std::shared_ptr<PerModel<Statistics>> statistics_ =
      std::make_shared<PerModel<Statistics>>();
  std::map<std::string, CallObserver> observers_;
  const std::unique_ptr<EventLoop> loader_;  // null without a repository
};

}  // namespace rapt::oip

#endif  // RAPT_SERVER_WIRE_OIP_METHODS_H_
