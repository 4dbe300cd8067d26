// Which backend computes a problem, and which ones did not.
#ifndef RAPT_ATTENTION_ROUTING_H_
#define RAPT_ATTENTION_ROUTING_H_

#include <string>

namespace rapt {

class Backend;

// Passed unchanged from the plan to the response, the metrics and the log.
struct Routing {
  // Null before there is a plan.
  const Backend* backend = nullptr;
  // The first backend in the list that is available but does not support the problem or cannot
  // compute it now. Null if there is none or the caller named the backend.
  const Backend* declined = nullptr;
  // `declined` supports the problem but is temporarily unavailable, such as after a failure.
  bool declined_for_now = false;
  // The backend that computed a part of the problem as fallback for `backend`. Set after the run.
  const Backend* piece_fallback = nullptr;
};

// Returns the name of the backend, "cudnn", or with a piece fallback, "cudnn+cpu". REQUIRES:
// routing.backend is not null.
std::string NamesOf(const Routing& routing);

}  // namespace rapt

#endif  // RAPT_ATTENTION_ROUTING_H_
