#ifndef RAPT_SERVER_WIRE_OIP_INFER_RUN_H_
#define RAPT_SERVER_WIRE_OIP_INFER_RUN_H_

#include <optional>

#include "server/cache/sequences.h"
#include "server/calls/call.h"
#include "server/protocols/oip/codec.h"
#include "server/request.h"
#include "server/wire/oip/session_run.h"

namespace rapt::oip {

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
