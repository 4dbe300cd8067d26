#include "server/wire/oip/infer_run.h"

#include <utility>

namespace rapt::oip {

void InferRun::Start(cache::Sequences* sequences, DecodedInfer&& decoded, Call& call, Done done) {
  decoded_ = std::move(decoded);
  if (decoded_.session) {
    return session_.emplace().Start(*sequences, decoded_, call, std::move(done));
  }
  call.Bind(decoded_.request);
  call.engine().Submit(std::move(decoded_.request), std::move(done));
}

}  // namespace rapt::oip
