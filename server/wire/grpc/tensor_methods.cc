#include "server/wire/grpc/tensor_methods.h"

#include <grpcpp/alarm.h>
#include <pthread.h>

#include <chrono>
#include <utility>

#include "server/wire/grpc/grpc_stream.h"
#include "server/wire/grpc/tensor_call.h"

namespace rapt {
namespace {

// For top, gdb and perf.
constexpr char kThreadName[] = "rapt-wire";

// The number of calls that may arrive at once; each call that arrives requests the next.
constexpr int kExpectedCalls = 32;

class UnknownMethod final : public GenericCall {
 public:
  explicit UnknownMethod(std::unique_ptr<GrpcCall> call) : GenericCall(std::move(call)) {}
  void Begin() override { StartFinish(grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "")); }

 private:
  void OnDone() override { delete this; }
};

}  // namespace

// A call requested from gRPC. Owned by its GenericCall once it has arrived.
class TensorMethods::Expected final : public GrpcCall {
 public:
  // Requests a call. Deletes itself if the server shuts down before one arrives.
  static void Request(TensorMethods& methods) {
    auto* const call = new Expected(methods);
    call->context.AsyncNotifyWhenDone(&call->ended_);
    grpc::ServerCompletionQueue* const queue = methods.queue_.get();
    methods.service_.RequestCall(&call->context, &call->stream, queue, queue, &call->arrived_);
  }

  ~Expected() override {
    if (--methods_.count_ > 0) return;
    MutexLock lock(methods_.mutex_);
    methods_.none_.SignalAll();
  }

 private:
  explicit Expected(TensorMethods& methods)
      : methods_(methods),
        arrived_([this](bool ok) { OnArrived(ok); }),
        ended_([this](bool) { OnStep(); }) {
    ++methods_.count_;
  }

  void OnArrived(bool ok) {
    std::unique_ptr<GrpcCall> self(this);
    if (!ok) return;
    Request(methods_);
    call_ = methods_.NewCallOf(std::move(self));
    call_->Begin();
    OnStep();
  }

  // Called when the call has begun and when it has ended, in either order.
  void OnStep() {
    if (--steps_ == 0) call_->OnEnded();
  }

  TensorMethods& methods_;
  GenericCall* call_ = nullptr;
  std::atomic<int> steps_{2};
  Completion arrived_, ended_;
};

void TensorMethods::AddUnary(const CallEnvironment& environment, const UnaryMethods& methods) {
  for (const auto& [path, method] : methods) {
    if (!method.traits.carries_tensors) continue;
    Add(path, [&environment, &method = method](auto call) {
      return new TensorCall(environment, method, std::move(call));
    });
  }
}

void TensorMethods::AddStreams(const StreamMethods& methods) {
  for (const auto& [path, new_stream] : methods) {
    Add(path, [&new_stream = new_stream](auto call) {
      auto* const stream = new GrpcStream(std::move(call));
      stream->Serve(new_stream);
      return stream;
    });
  }
}

GenericCall* TensorMethods::NewCallOf(std::unique_ptr<GrpcCall> call) const {
  const auto new_call = calls_.find(call->context.method());
  if (new_call == calls_.end()) return new UnknownMethod(std::move(call));
  return new_call->second(std::move(call));
}

void TensorMethods::Start(std::unique_ptr<grpc::ServerCompletionQueue> queue, int threads) {
  queue_ = std::move(queue);
  for (int n = 0; n < kExpectedCalls; ++n) Expected::Request(*this);
  for (int n = 0; n < threads; ++n) threads_.emplace_back([this] { Serve(); });
}

void TensorMethods::Serve() {
  pthread_setname_np(pthread_self(), kThreadName);
  void* tag;
  bool ok;
  while (queue_->Next(&tag, &ok)) (*static_cast<Completion*>(tag))(ok);
}

void TensorMethods::Post(absl::AnyInvocable<void()> run) {
  struct Posted {
    grpc::Alarm alarm;
    Completion fired;
  };
  auto* const posted = new Posted;
  posted->fired = [posted, run = std::move(run)](bool) mutable {
    run();
    delete posted;
  };
  // gRPC has no other way to post an event to a queue than an alarm that is already due.
  posted->alarm.Set(queue_.get(), std::chrono::system_clock::now(), &posted->fired);
}

void TensorMethods::Stop() {
  if (queue_ == nullptr) return;
  {
    MutexLock lock(mutex_);
    while (count_ > 0) none_.Wait(mutex_);
  }
  queue_->Shutdown();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  queue_.reset();
}

}  // namespace rapt
