// Methods of rapt.v1 over HTTP: the paths below /rapt/v1, in proto3 JSON or in Protocol Buffers'
// binary format.
#ifndef RAPT_SERVER_WIRE_RAPT_REST_METHODS_H_
#define RAPT_SERVER_WIRE_RAPT_REST_METHODS_H_

#include <cstdint>

#include "base/buffer_pool.h"
#include "server/calls/call_report.h"
#include "server/wire/http/router.h"
#include "server/wire/json_threads.h"
#include "server/wire/unary_method.h"

namespace rapt::native {

// Methods of gRPC, and what their translation needs.
struct JsonMethods {
  const UnaryMethods& methods;
  BufferPool& pool;
  JsonThreads& threads;
  int64_t max_json_bytes;
};

// Adds the paths. Their calls are those of `json.methods`, apart from their encoding, and are
// counted as "rapt/v1/Diagnose" and so on. REQUIRES: what `json` refers to outlives the router.
void AddRestMethods(const JsonMethods& json, const CallObserverFactory& observe,
                    http::Router& router);

}  // namespace rapt::native

#endif  // RAPT_SERVER_WIRE_RAPT_REST_METHODS_H_
