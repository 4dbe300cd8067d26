// What the handles of a client's caches share.
#ifndef RAPT_CLIENT_CPP_CACHE_CALLS_H_
#define RAPT_CLIENT_CPP_CACHE_CALLS_H_

#include <grpcpp/grpcpp.h>

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/cache_renewals.h"
#include "client/cpp/unary_calls.h"
#include "proto/rapt/v1/cache.grpc.pb.h"
#include "rapt/cache.h"

namespace rapt::client {

// Thread-safe.
class CacheCalls {
 public:
  // REQUIRES: `calls` outlives this object.
  explicit CacheCalls(UnaryCalls& calls);

  static CacheCalls& Of(Client& client);

  UnaryCalls& calls() { return calls_; }
  CacheRenewals& renewals() { return renewals_; }

 private:
  UnaryCalls& calls_;
  CacheRenewals renewals_;
};

// Returns a name that no other cache has, so that the server knows a call that is repeated.
std::string DrawName();
bool IsDrawn(absl::string_view name);

// A handle that owns a cache. `start`: before the call that made it, or found it by its name.
Cache OwnCache(CacheCalls& calls, const CacheInfo& info, CacheLease::Clock::time_point start);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_CACHE_CALLS_H_
