// What a load sends.
#ifndef RAPT_CLIENT_LOAD_WORKLOAD_H_
#define RAPT_CLIENT_LOAD_WORKLOAD_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/connections.h"
#include "client/load/call_data.h"
#include "client/load/mix.h"
#include "client/load/requests.h"

namespace rapt::load {

struct OutgoingCall {
  std::string method;
  std::shared_ptr<const EncodedCall> encoded;
  size_t shape = 0;  // of Workload::shapes()
  // False: it prepares later calls, and counts only if it fails.
  bool is_measured = true;
};

// The calls of one stream, one after the other. Used by one thread at a time.
class CallSource {
 public:
  virtual ~CallSource() = default;

  // Sends the calls that come before the load, and waits for them. `shape` is the load's choice.
  virtual absl::Status Prepare(size_t shape) = 0;
  // Returns the next call; the same one until OnDone(). `shape` is the load's choice.
  virtual OutgoingCall Next(size_t shape) = 0;
  virtual void OnDone(const absl::Status& status, std::vector<grpc::ByteBuffer> responses) = 0;
  // Compares the last measured response with the definition. NotFound if there is none; Internal
  // names what differs.
  virtual absl::Status Check() const = 0;
  // Returns what the calls hold at the server.
  virtual void Release() = 0;
};

class Workload {
 public:
  virtual ~Workload() = default;

  // The shapes of measured calls. A weight of 0 excludes a shape from the load's choice.
  virtual const std::vector<CallShape>& shapes() const = 0;
  // Returns the calls of a stream, which refer to this. `connection`: null over HTTP. Not
  // thread-safe.
  virtual absl::StatusOr<std::unique_ptr<CallSource>> NewSource(
      const client::Connection* connection) = 0;
};

// The same calls again and again, one of each shape.
std::unique_ptr<Workload> RepeatCalls(const Interface& interface,
                                      const std::vector<CallShape>& shapes, uint64_t seed);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_WORKLOAD_H_
