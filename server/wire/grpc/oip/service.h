// inference.GRPCInferenceService: any client of Triton or KServe works unmodified. The messages'
// meaning is in proto/inference; what the server offers of them is said by ServerMetadata.
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

// The service, to be registered with a server beside the tensor methods, to which it adds its own.
// Thread-safe; everything borrowed outlives it. `is_ready` may be called from any thread.
std::unique_ptr<grpc::Service> NewService(const CallEnvironment& environment,
                                          SharedMemory& shared_memory,
                                          std::function<bool()> is_ready,
                                          const CallObserverFactory& observe,
                                          TensorMethods& tensor_methods);

}  // namespace rapt::oip

#endif  // RAPT_SERVER_WIRE_GRPC_OIP_SERVICE_H_
