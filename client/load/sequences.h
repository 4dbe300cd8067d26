// Sequences whose keys and values stay with the server, as a workload.
#ifndef RAPT_CLIENT_LOAD_SEQUENCES_H_
#define RAPT_CLIENT_LOAD_SEQUENCES_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "client/load/mix.h"
#include "client/load/workload.h"

namespace rapt::load {

enum class CacheScenario : uint8_t {
  kDecode,         // prompts are appended before the load, each step appends and attends
  kPrefillDecode,  // sequences begin and end during the load; their prompts are measured, too
  kSharedPrefix,   // as kDecode, but all sequences are forks of one prompt
};

// Parses "decode", "prefill-decode" or "shared-prefix". InvalidArgument otherwise.
absl::StatusOr<CacheScenario> ParseCacheScenario(std::string_view text);

struct SequenceOptions {
  CacheScenario scenario = CacheScenario::kDecode;
  int64_t steps = 128;  // of a sequence, which then begins again after its prompt or, with
                        // kPrefillDecode, ends
  std::chrono::nanoseconds deadline{0};  // of the calls before the load and after it
  uint64_t seed = 0;
};

// Each stream has `batch` sequences of a shape, which take their steps in one call. A shape's keys
// are the tokens of the prompt; a step has as many rows and new tokens as the shape has queries, or
// one if they are as many as the keys. Caches have one layer. A stream whose call fails closes its
// caches and begins with new ones. InvalidArgument for a shape with a mask or ragged lengths, and
// for a batch of more than 1024.
absl::StatusOr<std::unique_ptr<Workload>> KeepSequences(const SequenceOptions& options,
                                                        const std::vector<CallShape>& shapes);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_SEQUENCES_H_
