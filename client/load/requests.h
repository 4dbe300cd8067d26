// Calls as messages of a protocol, serialized once and sent again and again; and Y out of an
// answer.
#ifndef RAPT_CLIENT_LOAD_REQUESTS_H_
#define RAPT_CLIENT_LOAD_REQUESTS_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/connections.h"
#include "client/cpp/shared_regions.h"
#include "client/load/call_data.h"

namespace rapt::load {

enum class Protocol : uint8_t { kRapt, kOip };

enum class Transport : uint8_t {
  kUnary,
  kStream,        // a stream of its own for every call
  kSharedMemory,  // inputs and Y; unary
};

struct Interface {
  Protocol protocol = Protocol::kRapt;
  Transport transport = Transport::kUnary;
  std::string model = "attention";  // of kOip
};

// "/inference.GRPCInferenceService/ModelInfer"
std::string MethodOf(const Interface& interface);

// One call's messages, ready to be sent any number of times. Refers to its CallData.
struct EncodedCall {
  std::vector<grpc::ByteBuffer> messages;        // one, unless it is a stream
  int64_t message_bytes = 0;                     // of all of them
  std::shared_ptr<client::SharedRegion> region;  // of kSharedMemory
};

// For kSharedMemory, makes a region with the inputs in it and registers it by way of `connection`;
// ResourceExhausted where the system has none, or the server's status. Otherwise ResourceExhausted
// for what is more than a message may be.
absl::StatusOr<EncodedCall> Encode(const Interface& interface, const CallData& data,
                                   const client::Connection& connection);

// Unregisters the region of the call, if it has one.
void Release(const EncodedCall& call, const client::Connection& connection);

// The failure that a stream's answer tells of, or OK.
absl::Status StatusInAnswer(const Interface& interface, const grpc::ByteBuffer& answer);

// Y's bytes. Internal for what is no answer.
absl::StatusOr<std::string> ReadY(const Interface& interface, const CallData& data,
                                  const EncodedCall& call,
                                  const std::vector<grpc::ByteBuffer>& answers);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_REQUESTS_H_
