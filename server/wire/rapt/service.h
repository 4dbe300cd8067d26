// rapt.v1.AttentionService: the native interface. What it means is said in
// proto/rapt/v1/attention.proto.
#ifndef RAPT_SERVER_WIRE_RAPT_SERVICE_H_
#define RAPT_SERVER_WIRE_RAPT_SERVICE_H_

#include <grpcpp/impl/service_type.h>

#include <cstdint>
#include <memory>

#include "server/wire/call_observer.h"
#include "server/wire/engine_call.h"

namespace rapt::native {

inline constexpr char kServiceName[] = "rapt.v1.AttentionService";

// The service, to be registered with a server that receives messages of `max_message_bytes`.
// Thread-safe; everything borrowed outlives it.
std::unique_ptr<grpc::Service> NewService(const CallEnvironment& environment,
                                          int64_t max_message_bytes,
                                          const CallObserverFactory& observe);

}  // namespace rapt::native

#endif  // RAPT_SERVER_WIRE_RAPT_SERVICE_H_
