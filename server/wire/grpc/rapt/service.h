// rapt.v1.AttentionService over gRPC.
#ifndef RAPT_SERVER_WIRE_GRPC_RAPT_SERVICE_H_
#define RAPT_SERVER_WIRE_GRPC_RAPT_SERVICE_H_

#include <grpcpp/impl/service_type.h>

#include <memory>

#include "server/calls/call.h"
#include "server/wire/rapt/methods.h"

namespace rapt::native {

// Returns the service; its methods with tensors are generic ones, of TensorMethods. Thread-safe.
// REQUIRES: everything borrowed outlives it.
std::unique_ptr<grpc::Service> NewService(const CallEnvironment& environment,
                                          const Methods& methods);

}  // namespace rapt::native

#endif  // RAPT_SERVER_WIRE_GRPC_RAPT_SERVICE_H_
