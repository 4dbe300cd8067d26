// The Open Inference Protocol over HTTP: the paths below /v2.
#ifndef RAPT_SERVER_WIRE_OIP_REST_METHODS_H_
#define RAPT_SERVER_WIRE_OIP_REST_METHODS_H_

#include <cstdint>

#include "base/buffer_pool.h"
#include "server/calls/call_report.h"
#include "server/wire/http/router.h"
#include "server/wire/json_threads.h"
#include "server/wire/oip/methods.h"

namespace rapt::oip {

// What inference in JSON needs. Outlives its calls.
struct JsonInference {
  const Methods& methods;
  BufferPool& pool;
  JsonThreads& threads;
  int64_t max_json_bytes;
};

// Adds the paths below /v2, with the fields of Triton's HTTP interface. They are counted as calls
// of "v2/ModelInfer" and so on. REQUIRES: everything borrowed outlives the router.
void AddRestMethods(const JsonInference& inference, const CallObserverFactory& observe,
                    http::Router& router);

}  // namespace rapt::oip

#endif  // RAPT_SERVER_WIRE_OIP_REST_METHODS_H_
