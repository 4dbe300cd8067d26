// The methods of rapt.v1.CacheService, independent of the transport. proto/rapt/v1/cache.proto
// documents them.
#ifndef RAPT_SERVER_WIRE_RAPT_CACHE_METHODS_H_
#define RAPT_SERVER_WIRE_RAPT_CACHE_METHODS_H_

#include <string>

#include "absl/status/status.h"
#include "proto/rapt/v1/cache.pb.h"
#include "server/cache/cache_store.h"
#include "server/calls/call.h"
#include "server/calls/call_report.h"
#include "server/wire/message_stream.h"
#include "server/wire/unary_method.h"

namespace rapt::native {

inline constexpr char kCacheServiceName[] = "rapt.v1.CacheService";

// Returns the status of every method of a server without caches.
absl::Status NoCaches();

// Thread-safe. REQUIRES: everything borrowed outlives it.
class CacheMethods {
 public:
  // Null `store`: the server keeps no caches, and every method is UNIMPLEMENTED.
  CacheMethods(cache::CacheStore* store, const CallObserverFactory& observe);

  // Adds the unary methods. REQUIRES: this outlives them.
  void AddTo(UnaryMethods& methods);
  // Adds Export and Import. REQUIRES: this and `environment` outlive them.
  void AddTo(StreamMethods& methods, const CallEnvironment& environment);

 private:
  cache::CacheStore* const store_;
  const CallObserverFactory observe_;
  const CallObserver observe_export_, observe_import_;
};

}  // namespace rapt::native

#endif  // RAPT_SERVER_WIRE_RAPT_CACHE_METHODS_H_
