// inference.GRPCInferenceService: clients of Triton and KServe work unmodified. proto/inference
// documents the messages; ServerMetadata lists the supported extensions.
#ifndef RAPT_SERVER_WIRE_GRPC_OIP_SERVICE_H_
#define RAPT_SERVER_WIRE_GRPC_OIP_SERVICE_H_

#include <grpcpp/impl/service_type.h>

#include <functional>
#include <memory>

#include "server/calls/call_observer.h"
#include "server/shared_memory/shared_memory.h"
#include "server/wire/grpc/tensor_call.h"
#include "server/wire/grpc/tensor_methods.h"

namespace rapt::oip {

inline constexpr char kServiceName[] = "inference.GRPCInferenceService";

// Returns the service, and adds its tensor methods to `tensor_methods`; register both with a
// server. Thread-safe. `is_ready` is called from any thread. REQUIRES: everything borrowed outlives
// it.
std::unique_ptr<grpc::Service> NewService(const CallEnvironment& environment,
                                          SharedMemory& shared_memory,
                                          std::function<bool()> is_ready,
                                          const CallObserverFactory& observe,
                                          TensorMethods& tensor_methods);

}  // namespace rapt::oip

#endif  // RAPT_SERVER_WIRE_GRPC_OIP_SERVICE_H_
