// rapt.v1.AttentionService: the native interface, documented in
// proto/rapt/v1/attention.proto.
#ifndef RAPT_SERVER_WIRE_GRPC_RAPT_SERVICE_H_
#define RAPT_SERVER_WIRE_GRPC_RAPT_SERVICE_H_

#include <grpcpp/impl/service_type.h>

#include <memory>

#include "server/calls/call_observer.h"
#include "server/shared_memory/shared_memory.h"
#include "server/wire/grpc/tensor_call.h"
#include "server/wire/grpc/tensor_methods.h"

namespace rapt::native {

inline constexpr char kServiceName[] = "rapt.v1.AttentionService";

// Returns the service, and adds its tensor methods to `tensor_methods`; register both with a
// server. Thread-safe. REQUIRES: everything borrowed outlives it.
std::unique_ptr<grpc::Service> NewService(const CallEnvironment& environment,
                                          const SharedMemory& shared_memory,
                                          const CallObserverFactory& observe,
                                          TensorMethods& tensor_methods);

}  // namespace rapt::native

#endif  // RAPT_SERVER_WIRE_GRPC_RAPT_SERVICE_H_
