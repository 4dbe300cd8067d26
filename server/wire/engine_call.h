// What the calls of all protocols share that the engine answers.
#ifndef RAPT_SERVER_WIRE_ENGINE_CALL_H_
#define RAPT_SERVER_WIRE_ENGINE_CALL_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "server/base/clock.h"
#include "server/engine.h"
#include "server/request.h"
#include "server/wire/call_observer.h"
#include "server/wire/open_calls.h"

namespace rapt {

// What a protocol's calls work with; outlives them.
struct CallEnvironment {
  Engine& engine;
  OpenCalls& open_calls;
  const Clock& clock;
};

// A unary call that waits for the engine. Lives until its answer has left and the engine is done
// with it, whichever is later: only the engine's done may end it once the engine has its request.
class EngineCall : public grpc::ServerUnaryReactor {
 protected:
  // `observe` outlives the call.
  EngineCall(const CallEnvironment& environment, const CallObserver& observe,
             grpc::CallbackServerContext& context);

  Engine& engine() const { return environment_.engine; }
  Instant arrived() const { return arrived_; }

  // Gives the request the call's deadline, where that is the earlier one, and its cancellation.
  void Bind(Request& request);

  // Tells in trailing metadata which backend and plan it was, as far as it came to that.
  void NamePlan(const Result& result);

  // Finishes the call. Nothing of this object may be touched afterwards.
  void End(absl::Status status);

 private:
  void OnCancel() final { cancelled_.store(true, std::memory_order_relaxed); }
  void OnDone() final;

  const CallEnvironment& environment_;
  const CallObserver& observe_;
  grpc::CallbackServerContext& context_;
  const Instant arrived_;
  std::atomic<bool> cancelled_{false};
  absl::Status status_;
};

// A call that is answered on the spot: `fill` writes the response and says how it went.
grpc::ServerUnaryReactor* AnswerAtOnce(grpc::CallbackServerContext& context, const Clock& clock,
                                       const CallObserver& observe,
                                       absl::FunctionRef<absl::Status()> fill);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_ENGINE_CALL_H_
