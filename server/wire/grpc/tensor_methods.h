#ifndef RAPT_SERVER_WIRE_GRPC_TENSOR_METHODS_H_
#define RAPT_SERVER_WIRE_GRPC_TENSOR_METHODS_H_

#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/async_generic_service.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "base/mutex.h"
#include "server/wire/grpc/generic_call.h"
#include "server/wire/message_stream.h"
#include "server/wire/unary_method.h"

namespace rapt {

// The methods of all protocols that are implemented by GenericCalls, as one service. gRPC passes it
// every method that no other service has. Thread-safe after the last Add().
class TensorMethods {
 public:
  using NewCall = std::function<GenericCall*(std::unique_ptr<GrpcCall> call)>;

  TensorMethods() = default;
  ~TensorMethods() { Stop(); }
  TensorMethods(const TensorMethods&) = delete;
  TensorMethods& operator=(const TensorMethods&) = delete;

  // `path` is "/inference.GRPCInferenceService/ModelInfer".
  void Add(const std::string& path, NewCall new_call) { calls_[path] = std::move(new_call); }

  // Adds those of the methods that carry tensors. REQUIRES: both outlive this; `methods` does not
  // change.
  void AddUnary(const CallEnvironment& environment, const UnaryMethods& methods);
  // REQUIRES: `methods` outlives this.
  void AddStreams(const StreamMethods& methods);

  grpc::AsyncGenericService& service() { return service_; }

  // Accepts calls from the queue on this number of threads, which also run gRPC's I/O. REQUIRES:
  // the service is registered with a running server.
  void Start(std::unique_ptr<grpc::ServerCompletionQueue> queue, int threads);

  // Runs the function as an event of the queue. REQUIRES: between Start() and Stop().
  void Post(absl::AnyInvocable<void()> run);

  // Returns when the last call has ended. REQUIRES: the server is shut down.
  void Stop();

 private:
  class Expected;

  GenericCall* NewCallOf(std::unique_ptr<GrpcCall> call) const;
  void Serve();

  absl::flat_hash_map<std::string, NewCall> calls_;
  grpc::AsyncGenericService service_;
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::vector<std::thread> threads_;

  std::atomic<int64_t> count_{0};  // accepted calls and pending accepts
  Mutex mutex_;
  CondVar none_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_TENSOR_METHODS_H_
