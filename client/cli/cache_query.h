// The query rows of a call on a cache, and how they are scored: what `rapt cache attend` and `rapt
// cache diagnose` share.
#ifndef RAPT_CLIENT_CLI_CACHE_QUERY_H_
#define RAPT_CLIENT_CLI_CACHE_QUERY_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/attend_files.h"
#include "client/cli/cache_flags.h"
#include "client/console/command_line.h"
#include "rapt/cache.h"

namespace rapt {

struct CacheQueryFlags {
  CacheFlags flags;  // with two operands, the cache and the file of q
  ExpectedFlags expected;
  std::optional<std::string> head_sink;
  std::string dtype;
  client::CacheAttendCall call;  // without tensors and layer

  std::vector<Flag> Table();
};

// The tensors of a call.
struct CacheQuery {
  LoadedTensor q;
  std::optional<LoadedTensor> head_sink;
};

// Returns an error that names --dtype or the file.
absl::StatusOr<CacheQuery> LoadQuery(const CacheQueryFlags& flags);

// Returns the call, which refers to the tensors.
client::CacheAttendCall CallOf(const CacheQueryFlags& flags, const CacheQuery& query);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_CACHE_QUERY_H_
