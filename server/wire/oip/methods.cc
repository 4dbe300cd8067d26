#include "server/wire/oip/methods.h"

#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "base/version.h"
#include "server/protocols/oip/codec.h"
#include "server/protocols/oip/model.h"
#include "server/wire/oip/infer_run.h"
#include "server/wire/oip/stream_infer_call.h"

namespace rapt::oip {
namespace {

// There are no settings of tracing and logging, so only a request for all of them is valid.
template <typename Settings>
absl::Status CheckNoSettings(const Settings& settings, absl::string_view kind) {
  if (settings.empty()) return absl::OkStatus();
  return Invalid("unknown ", kind, " setting ", settings.begin()->first);
}

// An empty name selects all models.
absl::Status CheckModelOrAll(const std::string& name, const std::string& version,
                             const ModelContext& context) {
  return name.empty() ? absl::OkStatus() : FindModel(name, version, context).status();
}

ModelContext ModelContextOf(const cache::Sequences* sequences, const ModelRepository* repository) {
  ModelContext context{.repository = repository};
  if (sequences != nullptr) context.sequence_lease = sequences->store().options().default_lease;
  return context;
}

std::unique_ptr<EventLoop> LoaderOf(const ModelRepository* repository, const Clock& clock) {
  if (repository == nullptr) return nullptr;
  auto loader = std::make_unique<EventLoop>(clock, "rapt-models");
  loader->Start();
  return loader;
}

// Passes a message to another handler on the thread that loads models.
class LoadingHandler final : public MessageHandler {
 public:
  LoadingHandler(const Methods& methods, std::unique_ptr<MessageHandler> handler)
      : methods_(methods), handler_(std::move(handler)) {}

 private:
  void OnMessage(const MessageBytes& message, MethodCall& call) override {
    methods_.PostToLoader([this, message, &call] {
      if (call.call().is_over()) return call.End(call.call().CancelledOrLate());
      handler_->OnMessage(message, call);
    });
  }

  const Methods& methods_;
  const std::unique_ptr<MessageHandler> handler_;
};

class InferHandler final : public MessageHandler {
 public:
  InferHandler(const SharedMemory& shared_memory, cache::Sequences* sequences,
               const ModelContext& context)
      : shared_memory_(shared_memory), sequences_(sequences), model_context_(context) {}

 private:
  void OnMessage(const MessageBytes& message, MethodCall& call) override {
    absl::StatusOr<DecodedInfer> decoded =
        DecodeInfer(message, call.call().arrived(), shared_memory_, &call.call().report().model,
                    model_context_);
    if (!decoded.ok()) return call.End(decoded.status());
    run_.Start(sequences_, *std::move(decoded), call.call(),
               [this, &call](Result result) { OnResult(std::move(result), call); });
  }

  void OnResult(Result result, MethodCall& call) const {
    call.call().Record(result);
    if (!result.status.ok()) return call.End(std::move(result.status));
    call.Respond(EncodeInfer(run_.decoded(), result));
  }

  const SharedMemory& shared_memory_;
  cache::Sequences* const sequences_;
  const ModelContext& model_context_;
  InferRun run_;
};

std::string PathOf(const std::string& name) { return absl::StrCat("/", kServiceName, "/", name); }

}  // namespace

Methods::Methods(SharedMemory& shared_memory, std::function<bool()> is_ready,
                 const CallObserverFactory& observe, const Clock& clock, Optional optional)
    : shared_memory_(shared_memory),
      sequences_(optional.sequences),
      repository_(optional.repository),
      model_context_(ModelContextOf(sequences_, repository_)),
      is_ready_(std::move(is_ready)),
      loader_(LoaderOf(repository_, clock)) {
  const auto& service = *inference::ModelInferRequest::descriptor()->file()->service(0);
  for (int n = 0; n < service.method_count(); ++n) {
    const std::string& name = service.method(n)->name();
    observers_[name] = observe(absl::StrCat(kServiceName, "/", name));
  }
  for (const char* name : {"ModelInfer", "ModelStreamInfer"}) {
    observers_[name] = Counted(std::move(observers_[name]));
  }
}

CallObserver Methods::Counted(CallObserver observe) const {
  return [statistics = statistics_, observe = std::move(observe)](const CallReport& report) {
    (*statistics)[report.model].Count(report);
    observe(report);
  };
}

void Methods::AddTo(UnaryMethods& methods) {
  methods[PathOf("ModelInfer")] = {
      .observe = observe("ModelInfer"), .traits = InferTraits(), .new_handler = [this] {
        return std::make_unique<InferHandler>(shared_memory_, sequences_, model_context_);
      }};
  const auto add = [&](const std::string& name, auto function) -> UnaryMethod& {
    return methods[PathOf(name)] = SmallMethod(*this, function, observe(name));
  };
  const auto add_loading = [&](const std::string& name, auto function) {
    auto& new_handler = add(name, function).new_handler;
    if (repository_ == nullptr) return;  // it fails at once
    new_handler = [this, small = new_handler] {
      return std::make_unique<LoadingHandler>(*this, small());
    };
  };
  add("ServerLive", &Methods::ServerLive);
  add("ServerReady", &Methods::ServerReady);
  add("ModelReady", &Methods::ModelReady);
  add("ServerMetadata", &Methods::ServerMetadata);
  add("ModelMetadata", &Methods::ModelMetadata);
  add("ModelConfig", &Methods::ModelConfig);
  add("ModelStatistics", &Methods::ModelStatistics);
  add("RepositoryIndex", &Methods::RepositoryIndex);
  add_loading("RepositoryModelLoad", &Methods::RepositoryModelLoad);
  add_loading("RepositoryModelUnload", &Methods::RepositoryModelUnload);
  add("SystemSharedMemoryStatus", &Methods::SystemSharedMemoryStatus);
  add("SystemSharedMemoryRegister", &Methods::SystemSharedMemoryRegister);
  add("SystemSharedMemoryUnregister", &Methods::SystemSharedMemoryUnregister);
  add("CudaSharedMemoryStatus", &Methods::CudaSharedMemoryStatus);
  add("CudaSharedMemoryRegister", &Methods::CudaSharedMemoryRegister);
  add("CudaSharedMemoryUnregister", &Methods::CudaSharedMemoryUnregister);
  add("TraceSetting", &Methods::TraceSetting);
  add("LogSettings", &Methods::LogSettings);
}

void Methods::AddTo(StreamMethods& methods, const CallEnvironment& environment) {
  methods[PathOf("ModelStreamInfer")] = [this, &environment](MessageStream& stream) {
    return std::make_unique<StreamInferCall>(environment, shared_memory_, sequences_,
                                             model_context_, observe("ModelStreamInfer"),
                                             InferTraits(), stream);
  };
}

absl::Status Methods::ServerLive(const inference::ServerLiveRequest&,
                                 inference::ServerLiveResponse& response) const {
  response.set_live(true);
  return absl::OkStatus();
}

absl::Status Methods::ServerReady(const inference::ServerReadyRequest&,
                                  inference::ServerReadyResponse& response) const {
  response.set_ready(is_ready_());
  return absl::OkStatus();
}

// As in Triton, an unknown model is not ready, without an error.
absl::Status Methods::ModelReady(const inference::ModelReadyRequest& request,
                                 inference::ModelReadyResponse& response) const {
  response.set_ready(FindModel(request.name(), request.version(), model_context_).ok() &&
                     is_ready_());
  return absl::OkStatus();
}

absl::Status Methods::ServerMetadata(const inference::ServerMetadataRequest&,
                                     inference::ServerMetadataResponse& response) const {
  response.set_name("rapt");
  response.set_version(std::string(Version()));
  for (const char* extension :
       {"statistics", "parameters", "model_configuration", "binary_tensor_data"}) {
    response.add_extensions(extension);
  }
  if (sequences_ != nullptr) response.add_extensions("sequence");
  if (repository_ != nullptr) response.add_extensions("model_repository");
  if (shared_memory_.allowed()) response.add_extensions("system_shared_memory");
  if (shared_memory_.takes_cuda()) response.add_extensions("cuda_shared_memory");
  return absl::OkStatus();
}

absl::Status Methods::ModelMetadata(const inference::ModelMetadataRequest& request,
                                    inference::ModelMetadataResponse& response) const {
  const auto model = FindModel(request.name(), request.version(), model_context_);
  if (model.ok()) response = Describe(**model);
  return model.status();
}

absl::Status Methods::ModelConfig(const inference::ModelConfigRequest& request,
                                  inference::ModelConfigResponse& response) const {
  const auto model = FindModel(request.name(), request.version(), model_context_);
  if (model.ok()) *response.mutable_config() = Configure(**model, model_context_);
  return model.status();
}

absl::Status Methods::ModelStatistics(const inference::ModelStatisticsRequest& request,
                                      inference::ModelStatisticsResponse& response) const {
  RAPT_RETURN_IF_ERROR(CheckModelOrAll(request.name(), request.version(), model_context_));
  for (const ModelInfoPtr& model : Models(model_context_)) {
    if (!request.name().empty() && request.name() != model->name()) continue;
    inference::ModelStatistics& statistics = *response.add_model_stats();
    statistics.set_name(std::string(model->name()));
    statistics.set_version(kModelVersion);
    (*statistics_)[model->model].Describe(statistics);
  }
  return absl::OkStatus();
}

absl::Status Methods::CheckRepository(const std::string& repository_name) const {
  if (repository_name.empty()) return absl::OkStatus();
  return absl::UnimplementedError("the only repository has no name; leave it empty");
}

absl::Status Methods::EndSequences(const absl::StatusOr<ModelInfoPtr>& replaced) const {
  if (replaced.ok() && *replaced != nullptr && sequences_ != nullptr) {
    sequences_->EndAll((*replaced)->has_ended);
  }
  return replaced.status();
}

absl::Status Methods::RepositoryIndex(const inference::RepositoryIndexRequest& request,
                                      inference::RepositoryIndexResponse& response) const {
  RAPT_RETURN_IF_ERROR(CheckRepository(request.repository_name()));
  const bool is_ready = is_ready_();
  const auto add = [&](absl::string_view name, bool model_is_ready, const std::string& reason) {
    if (request.ready() && !model_is_ready) return;
    auto& model = *response.add_models();
    model.set_name(std::string(name));
    model.set_version(kModelVersion);
    model.set_state(model_is_ready ? "READY" : "UNAVAILABLE");
    model.set_reason(reason);
  };
  for (const ModelInfo& model : BuiltInInfos(model_context_)) add(model.name(), is_ready, "");
  if (repository_ == nullptr) return absl::OkStatus();
  for (const ModelRepository::Entry& entry : repository_->Describe()) {
    add(entry.name, entry.is_loaded && is_ready, entry.reason);
  }
  return absl::OkStatus();
}

absl::Status Methods::RepositoryModelLoad(const inference::RepositoryModelLoadRequest& request,
                                          inference::RepositoryModelLoadResponse&) const {
  RAPT_RETURN_IF_ERROR(CheckRepository(request.repository_name()));
  if (repository_ == nullptr) {
    return absl::UnimplementedError("not supported: RepositoryModelLoad needs --model_repository");
  }
  if (!request.parameters().empty()) {
    return absl::UnimplementedError(absl::StrCat("load parameter '",
                                                 request.parameters().begin()->first,
                                                 "' is not supported; a model is its folder"));
  }
  return EndSequences(repository_->Load(request.model_name()));
}

absl::Status Methods::RepositoryModelUnload(const inference::RepositoryModelUnloadRequest& request,
                                            inference::RepositoryModelUnloadResponse&) const {
  RAPT_RETURN_IF_ERROR(CheckRepository(request.repository_name()));
  if (repository_ == nullptr) {
    return absl::UnimplementedError(
        "not supported: RepositoryModelUnload needs --model_repository");
  }
  // No model depends on another.
  return EndSequences(repository_->Unload(request.model_name()));
}

absl::Status Methods::SystemSharedMemoryStatus(
    const inference::SystemSharedMemoryStatusRequest& request,
    inference::SystemSharedMemoryStatusResponse& response) const {
  RAPT_ASSIGN_OR_RETURN(const auto regions,
                        shared_memory_.Describe(SharedMemory::Kind::kSystem, request.name()));
  for (const SharedMemory::Description& region : regions) {
    auto& message = (*response.mutable_regions())[region.name];
    message.set_name(region.name);
    message.set_offset(static_cast<uint64_t>(region.offset));
    message.set_byte_size(static_cast<uint64_t>(region.byte_size));
  }
  return absl::OkStatus();
}

absl::Status Methods::SystemSharedMemoryRegister(
    const inference::SystemSharedMemoryRegisterRequest& request,
    inference::SystemSharedMemoryRegisterResponse&) const {
  return shared_memory_.RegisterSystem(request.name(), request.key(), request.offset(),
                                       request.byte_size());
}

absl::Status Methods::SystemSharedMemoryUnregister(
    const inference::SystemSharedMemoryUnregisterRequest& request,
    inference::SystemSharedMemoryUnregisterResponse&) const {
  return shared_memory_.Unregister(SharedMemory::Kind::kSystem, request.name());
}

absl::Status Methods::CudaSharedMemoryStatus(
    const inference::CudaSharedMemoryStatusRequest& request,
    inference::CudaSharedMemoryStatusResponse& response) const {
  RAPT_ASSIGN_OR_RETURN(const auto regions,
                        shared_memory_.Describe(SharedMemory::Kind::kCuda, request.name()));
  for (const SharedMemory::Description& region : regions) {
    auto& message = (*response.mutable_regions())[region.name];
    message.set_name(region.name);
    message.set_device_id(static_cast<uint64_t>(region.device_id));
    message.set_byte_size(static_cast<uint64_t>(region.byte_size));
  }
  return absl::OkStatus();
}

absl::Status Methods::CudaSharedMemoryRegister(
    const inference::CudaSharedMemoryRegisterRequest& request,
    inference::CudaSharedMemoryRegisterResponse&) const {
  return shared_memory_.RegisterCuda(request.name(), request.raw_handle(), request.device_id(),
                                     request.byte_size());
}

absl::Status Methods::CudaSharedMemoryUnregister(
    const inference::CudaSharedMemoryUnregisterRequest& request,
    inference::CudaSharedMemoryUnregisterResponse&) const {
  return shared_memory_.Unregister(SharedMemory::Kind::kCuda, request.name());
}

absl::Status Methods::TraceSetting(const inference::TraceSettingRequest& request,
                                   inference::TraceSettingResponse&) const {
  absl::Status status = CheckModelOrAll(request.model_name(), "", model_context_);
  status.Update(CheckNoSettings(request.settings(), "trace"));
  return status;
}

absl::Status Methods::LogSettings(const inference::LogSettingsRequest& request,
                                  inference::LogSettingsResponse&) const {
  return CheckNoSettings(request.settings(), "log");
}

}  // namespace rapt::oip
