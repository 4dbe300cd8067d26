// Which backend computes a problem, and which ones did not.
#ifndef RAPT_ATTENTION_ROUTING_H_
#define RAPT_ATTENTION_ROUTING_H_

#include <string>

namespace rapt {

class Backend;

// One value from the plan to the answer, the metrics and the log.
struct Routing {
  // Null before there is a plan.
  const Backend* backend = nullptr;
  // The first backend of the list that is available here but does not support the problem, or can't
  // take it now. Null if there is none or the caller named the backend.
  const Backend* declined = nullptr;
  // It supports the problem and is only unavailable now, such as after a failure.
  bool declined_for_now = false;
  // The backend that computed a part of the problem in `backend`'s place. Set after the run.
  const Backend* stand_in = nullptr;
};

// Returns the name of the backend, "cudnn", with that of the stand-in: "cudnn+cpu".
// REQUIRES: routing.backend is not null.
std::string NamesOf(const Routing& routing);

}  // namespace rapt

#endif  // RAPT_ATTENTION_ROUTING_H_
