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
#include "base/mutex.h"
#include "server/wire/grpc/generic_call.h"

namespace rapt {

// The methods of all protocols whose calls are GenericCalls, as one service: gRPC gives it whatever
// method no other service has. Thread-safe once every method is known.
class TensorMethods {
 public:
  using NewCall = std::function<GenericCall*(std::unique_ptr<GrpcCall> call)>;

  TensorMethods() = default;
  ~TensorMethods() { Stop(); }
  TensorMethods(const TensorMethods&) = delete;
  TensorMethods& operator=(const TensorMethods&) = delete;

  // `path` is "/inference.GRPCInferenceService/ModelInfer".
  void Add(const std::string& path, NewCall new_call) { calls_[path] = std::move(new_call); }

  grpc::AsyncGenericService& service() { return service_; }

  // Once a server has the service: takes calls from its queue, on so many threads, which do what
  // gRPC has to do as well.
  void Start(std::unique_ptr<grpc::ServerCompletionQueue> queue, int threads);

  // Once the server is shut down: returns when the last call is gone.
  void Stop();

 private:
  class Expected;

  GenericCall* NewCallOf(std::unique_ptr<GrpcCall> call) const;
  void Serve();

  absl::flat_hash_map<std::string, NewCall> calls_;
  grpc::AsyncGenericService service_;
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::vector<std::thread> threads_;

  std::atomic<int64_t> count_{0};  // calls that are expected or there
  Mutex mutex_;
  CondVar none_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_TENSOR_METHODS_H_
