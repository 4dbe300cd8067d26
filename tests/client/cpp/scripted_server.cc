#include "tests/client/cpp/scripted_server.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "proto/inference/grpc_service.grpc.pb.h"

namespace rapt::test {

class ScriptedServer::Service : public v1::AttentionService::CallbackService {
 public:
  explicit Service(Script script) : script_(std::move(script)) {}

  grpc::ServerUnaryReactor* Attend(grpc::CallbackServerContext* context,
                                   const v1::AttendRequest* request,
                                   v1::AttendResponse* response) override {
    Count(*context, request->ByteSizeLong());
    return Answer(*context, script_(*request, *response));
  }

  grpc::ServerUnaryReactor* AttendBackward(grpc::CallbackServerContext* context,
                                           const v1::AttendBackwardRequest* request,
                                           v1::AttendBackwardResponse* response) override {
    Count(*context, request->ByteSizeLong());
    v1::AttendResponse forward;
    const std::optional<grpc::Status> status = script_(request->call(), forward);
    if (forward.has_y()) *response->mutable_dq() = std::move(*forward.mutable_y());
    return Answer(*context, status);
  }

  grpc::ServerUnaryReactor* Diagnose(grpc::CallbackServerContext* context,
                                     const v1::DiagnoseRequest* request,
                                     v1::DiagnoseResponse*) override {
    {
      MutexLock lock(mutex_);
      message_bytes_.push_back(request->ByteSizeLong());
    }
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish({grpc::UNIMPLEMENTED, "the script has no Diagnose"});
    return reactor;
  }

  int calls() const {
    MutexLock lock(mutex_);
    return calls_;
  }

  std::vector<size_t> message_bytes() const {
    MutexLock lock(mutex_);
    return message_bytes_;
  }

  std::set<std::string> peers() const {
    MutexLock lock(mutex_);
    return peers_;
  }

  void WaitForCalls(int count) const {
    MutexLock lock(mutex_);
    while (calls_ < count) changed_.Wait(mutex_);
  }

  void WaitForCancellations(int count) const {
    MutexLock lock(mutex_);
    while (cancellations_ < count) changed_.Wait(mutex_);
  }

 private:
  void Count(const grpc::CallbackServerContext& context, size_t message_bytes) {
    MutexLock lock(mutex_);
    ++calls_;
    peers_.insert(context.peer());
    message_bytes_.push_back(message_bytes);
    changed_.SignalAll();
  }

  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext& context,
                                   const std::optional<grpc::Status>& status) {
    if (!status) return new Unanswered(*this);
    grpc::ServerUnaryReactor* reactor = context.DefaultReactor();
    reactor->Finish(*status);
    return reactor;
  }

  class Unanswered : public grpc::ServerUnaryReactor {
   public:
    explicit Unanswered(Service& service) : service_(service) {}
    void OnCancel() override { Finish(grpc::Status::CANCELLED); }
    void OnDone() override {
      {
        MutexLock lock(service_.mutex_);
        ++service_.cancellations_;
        service_.changed_.SignalAll();
      }
      delete this;
    }

   private:
    Service& service_;
  };

  const Script script_;
  mutable Mutex mutex_;
  mutable CondVar changed_;
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;
  int cancellations_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<size_t> message_bytes_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> peers_ ABSL_GUARDED_BY(mutex_);
};

class ScriptedServer::Regions : public inference::GRPCInferenceService::Service {
 public:
  grpc::Status SystemSharedMemoryRegister(grpc::ServerContext*,
                                          const inference::SystemSharedMemoryRegisterRequest*,
                                          inference::SystemSharedMemoryRegisterResponse*) override {
    return grpc::Status::OK;
  }
  grpc::Status SystemSharedMemoryUnregister(
      grpc::ServerContext*, const inference::SystemSharedMemoryUnregisterRequest*,
      inference::SystemSharedMemoryUnregisterResponse*) override {
    return grpc::Status::OK;
  }
};

ScriptedServer::ScriptedServer(Script script, SharedMemory shared_memory)
    : service_(std::make_unique<Service>(std::move(script))) {
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(service_.get());
  if (shared_memory == SharedMemory::kRegistered) {
    regions_ = std::make_unique<Regions>();
    builder.RegisterService(regions_.get());
  }
  builder.SetMaxReceiveMessageSize(-1);
  server_ = builder.BuildAndStart();
  RAPT_CHECK(server_ != nullptr && port != 0, "no free port on loopback");
  address_ = absl::StrCat("127.0.0.1:", port);
}

// Cancels unanswered calls.
ScriptedServer::~ScriptedServer() { server_->Shutdown(std::chrono::system_clock::now()); }

int ScriptedServer::calls() const { return service_->calls(); }
std::vector<size_t> ScriptedServer::message_bytes() const { return service_->message_bytes(); }
std::set<std::string> ScriptedServer::peers() const { return service_->peers(); }
void ScriptedServer::WaitForCalls(int count) const { service_->WaitForCalls(count); }
void ScriptedServer::WaitForCancellations(int count) const {
  service_->WaitForCancellations(count);
}

std::optional<grpc::Status> Echo(const v1::AttendRequest& request, v1::AttendResponse& response) {
  *response.mutable_y() = request.q();
  return grpc::Status::OK;
}

std::optional<grpc::Status> Hang(const v1::AttendRequest&, v1::AttendResponse&) {
  return std::nullopt;
}

std::string DeadAddress() {
  const ScriptedServer gone(Echo);
  return gone.address();
}

}  // namespace rapt::test
