// Caches for display.
#ifndef RAPT_CLIENT_CLI_CACHE_REPORT_H_
#define RAPT_CLIENT_CLI_CACHE_REPORT_H_

#include <vector>

#include "absl/status/statusor.h"
#include "client/console/exit_code.h"
#include "client/console/json.h"
#include "rapt/cache.h"

namespace rapt {

// One line for each cache, under a line of headings.
void PrintTable(const std::vector<client::CacheInfo>& caches);
// One cache, one line for each of its properties.
void Print(const client::CacheInfo& cache);
// As an object.
void Write(const client::CacheInfo& cache, JsonWriter& json);
void PrintJson(const client::CacheInfo& cache);
// Prints the id of a cache that was made, and leaves it with the server.
ExitCode PrintMade(absl::StatusOr<client::Cache> made, bool json);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_CACHE_REPORT_H_
