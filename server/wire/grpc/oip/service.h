// inference.GRPCInferenceService over gRPC: clients of Triton and KServe work unmodified.
#ifndef RAPT_SERVER_WIRE_GRPC_OIP_SERVICE_H_
#define RAPT_SERVER_WIRE_GRPC_OIP_SERVICE_H_

#include <grpcpp/impl/service_type.h>

#include <memory>

#include "server/calls/call.h"
#include "server/wire/oip/methods.h"

namespace rapt::oip {

// Returns the service; its methods with tensors are generic ones, of TensorMethods. Thread-safe.
// REQUIRES: everything borrowed outlives it.
std::unique_ptr<grpc::Service> NewService(const CallEnvironment& environment,
                                          const Methods& methods);

}  // namespace rapt::oip

#endif  // RAPT_SERVER_WIRE_GRPC_OIP_SERVICE_H_
