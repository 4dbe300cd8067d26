// The methods of rapt.v1.AttentionService, the native interface, independent of the transport.
// proto/rapt/v1/attention.proto documents them.
#ifndef RAPT_SERVER_WIRE_RAPT_METHODS_H_
#define RAPT_SERVER_WIRE_RAPT_METHODS_H_

#include <vector>

#include "absl/status/status.h"
#include "proto/rapt/v1/attention.pb.h"
#include "server/cache/cache_store.h"
#include "server/calls/call.h"
#include "server/calls/call_report.h"
#include "server/models/model_repository.h"
#include "server/shared_memory/shared_memory.h"
#include "server/wire/message_stream.h"
#include "server/wire/unary_method.h"

namespace rapt::native {

inline constexpr char kServiceName[] = "rapt.v1.AttentionService";

// Thread-safe. REQUIRES: everything borrowed outlives it.
class Methods {
 public:
  // Null `repository`: the server has no layers. Null `caches`: it keeps none.
  Methods(const CallEnvironment& environment, const SharedMemory& shared_memory,
          const ModelRepository* repository, const cache::CacheStore* caches,
          CallObserverFactory observe);

  // Adds the unary methods. REQUIRES: this outlives them.
  void AddTo(UnaryMethods& methods);
  // Adds the streams. REQUIRES: this outlives them.
  void AddTo(StreamMethods& methods);

 private:
  // The methods without tensors.
  absl::Status EstimateMemory(const v1::EstimateMemoryRequest& request,
                              v1::EstimateMemoryResponse& response) const;
  absl::Status GetServerInfo(const v1::GetServerInfoRequest& request,
                             v1::GetServerInfoResponse& response) const;

  const CallEnvironment& environment_;
  const SharedMemory& shared_memory_;
  const ModelRepository* const repository_;
  const cache::CacheStore* const caches_;
  const CallObserverFactory observe_;
  const CallObserver observe_attend_stream_;
};

}  // namespace rapt::native

#endif  // RAPT_SERVER_WIRE_RAPT_METHODS_H_
