#ifndef RAPT_SERVER_WIRE_TENSOR_METHODS_H_
#define RAPT_SERVER_WIRE_TENSOR_METHODS_H_

#include <grpcpp/generic/async_generic_service.h>

#include <functional>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "server/wire/generic_call.h"

namespace rapt {

// The methods of all protocols whose calls are GenericCalls, as one service: gRPC gives it whatever
// method no other service has. Thread-safe once every method is known.
class TensorMethods final : public grpc::CallbackGenericService {
 public:
  using NewCall = std::function<GenericCall*(grpc::GenericCallbackServerContext& context)>;

  // `path` is "/inference.GRPCInferenceService/ModelInfer".
  void Add(const std::string& path, NewCall new_call) { calls_[path] = std::move(new_call); }

 private:
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    const auto new_call = calls_.find(context->method());
    if (new_call == calls_.end()) return CallbackGenericService::CreateReactor(context);
    GenericCall* const call = new_call->second(*context);
    call->Begin();
    return call;
  }

  absl::flat_hash_map<std::string, NewCall> calls_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_TENSOR_METHODS_H_
