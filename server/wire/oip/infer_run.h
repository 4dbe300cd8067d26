#ifndef RAPT_SERVER_WIRE_OIP_INFER_RUN_H_
#define RAPT_SERVER_WIRE_OIP_INFER_RUN_H_

#include <chrono>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "base/clock.h"
#include "server/cache/cached_attention.h"
#include "server/cache/cached_layer.h"
#include "server/cache/sequences.h"
#include "server/calls/call.h"
#include "server/protocols/oip/codec.h"
#include "server/request.h"

namespace rapt::oip {

// A call of a sequence, from its message to its result. It waits for its sequence's turn,
// which ends when the result is known: a caller that reads its response slowly delays no other
// call.
class SessionRun {
 public:
  // Computes the call, and calls `done` once, on any thread, with a result for EncodeInfer(). A
  // call that waits for its turn notices its deadline and its cancellation when the turn comes.
  // REQUIRES: called once, with the message of a session; everything outlives `done`, in which this
  // may be destroyed.
  void Start(cache::Sequences& sequences, DecodedInfer& decoded, Call& call, Done done);

 private:
  void OnTurn(cache::Sequences::Turn turn);
  absl::Status Prepare(const std::string& cache);
  void Finish(Result result);

  cache::CacheStore* store_ = nullptr;
  DecodedInfer* decoded_ = nullptr;
  Call* call_ = nullptr;
  Done done_;
  Instant entered_;
  std::chrono::nanoseconds waited_{0};
  cache::CachedAttention attention_;
  cache::CachedLayer layer_;  // instead, of a layer
  std::optional<cache::Sequences::Turn> turn_;
};

// A call of ModelInfer, from its decoded message to its result, whatever protocol carries it.
class InferRun {
 public:
  // Computes the call, and calls `done` once, on any thread, with a result for EncodeInfer(). Null
  // `sequences`: no message is one of a session. REQUIRES: called once; everything outlives `done`,
  // in which this may be destroyed.
  void Start(cache::Sequences* sequences, DecodedInfer&& decoded, Call& call, Done done);

  // REQUIRES: Start() was called.
  const DecodedInfer& decoded() const { return decoded_; }

 private:
  DecodedInfer decoded_;
  std::optional<SessionRun> session_;
};

}  // namespace rapt::oip

#endif  // RAPT_SERVER_WIRE_OIP_INFER_RUN_H_
