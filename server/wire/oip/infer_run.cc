#include "server/wire/oip/infer_run.h"

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "base/status_macros.h"

namespace rapt::oip {
namespace {

// Sequences never truncate their caches.
constexpr uint64_t kGeneration = 1;

// Returns the tokens that the layer has.
absl::StatusOr<int64_t> LengthOf(cache::CacheStore& store, const std::string& owner,
                                 const std::string& cache, int64_t layer) {
  const cache::LayerCall call = {.cache = cache, .layer = layer, .generation = kGeneration};
  RAPT_ASSIGN_OR_RETURN(const auto batch, store.Open(owner, {&call, 1}, "items"));
  RAPT_RETURN_IF_ERROR(batch.FirstError(/*partial=*/false));
  return batch.states().front().length;
}

}  // namespace

void SessionRun::Start(cache::Sequences& sequences, DecodedInfer& decoded, Call& call, Done done) {
  store_ = &sequences.store();
  decoded_ = &decoded;
  call_ = &call;
  done_ = std::move(done);
  entered_ = call.Now();
  sequences.Enter(call.caller(), decoded.session->sequence,
                  [this](cache::Sequences::Turn turn) { OnTurn(std::move(turn)); });
}

void SessionRun::OnTurn(cache::Sequences::Turn turn) {
  turn_.emplace(std::move(turn));
  waited_ = call_->Now() - entered_;
  const absl::StatusOr<std::string>& cache = turn_->cache();
  absl::Status status = cache.status();
  const bool is_empty = decoded_->session->is_empty();
  if (status.ok() && !is_empty) status = Prepare(*cache);
  if (!status.ok() || is_empty) {
    Result result;
    result.status = std::move(status);
    return Finish(std::move(result));
  }
  Request& request = decoded_->request;
  call_->Bind(request);
  if (turn_->has_waited()) request.leaves_thread = true;
  call_->engine().Submit(std::move(request), [this](Result result) { Finish(std::move(result)); });
}

// Makes the request, with the cache of the sequence.
absl::Status SessionRun::Prepare(const std::string& cache) {
  SessionCall& session = *decoded_->session;
  cache::AttendCall& attend = session.attend;
  cache::LayerCall& layer = attend.items.front().call;
  layer.cache = cache;
  layer.generation = kGeneration;
  if (!layer.at) {
    RAPT_ASSIGN_OR_RETURN(layer.at, LengthOf(*store_, call_->caller(), cache, layer.layer));
  }
  RAPT_ASSIGN_OR_RETURN(
      Request request,
      session.layer ? layer_.Start(*store_, call_->caller(), *std::move(session.layer), attend)
                    : attention_.Start(*store_, call_->caller(), attend));
  return CompleteSession(std::move(request), *decoded_);
}

void SessionRun::Finish(Result result) {
  attention_.Release();
  layer_.Release();
  result.status.Update(layer_.status());
  if (!result.status.ok()) result.outputs = {};
  result.status =
      SessionError(result.status, decoded_->model.name(), decoded_->session->sequence.id);
  result.queue_time += waited_;
  turn_->End(result.status.ok());
  // The next turn begins when this one is destroyed, after the response, which destroys this.
  const cache::Sequences::Turn turn = *std::move(turn_);
  Done done = std::move(done_);
  done(std::move(result));
}

void InferRun::Start(cache::Sequences* sequences, DecodedInfer&& decoded, Call& call, Done done) {
  decoded_ = std::move(decoded);
  if (decoded_.session) {
    return session_.emplace().Start(*sequences, decoded_, call, std::move(done));
  }
  call.Bind(decoded_.request);
  call.engine().Submit(std::move(decoded_.request), std::move(done));
}

}  // namespace rapt::oip
