// inference.GRPCInferenceService: any client of Triton or KServe works unmodified. The messages'
// meaning is in proto/inference; what the server offers of them is said by ServerMetadata.
#ifndef RAPT_SERVER_WIRE_OIP_SERVICE_H_
#define RAPT_SERVER_WIRE_OIP_SERVICE_H_

#include <grpcpp/impl/service_type.h>

#include <functional>
#include <memory>

#include "server/base/clock.h"
#include "server/engine.h"
#include "server/wire/call_observer.h"
#include "server/wire/open_calls.h"

namespace rapt::oip {

inline constexpr char kServiceName[] = "inference.GRPCInferenceService";

// The service, to be registered with a server. Thread-safe; everything borrowed outlives it.
// `is_ready` may be called from any thread.
std::unique_ptr<grpc::Service> NewService(Engine& engine, OpenCalls& open_calls, const Clock& clock,
                                          std::function<bool()> is_ready,
                                          const CallObserverFactory& observe);

}  // namespace rapt::oip

#endif  // RAPT_SERVER_WIRE_OIP_SERVICE_H_
