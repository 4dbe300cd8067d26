// Calls as messages of a protocol, serialized once and sent many times, and Y from responses.
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
#include "client/cpp/request_message.h"
#include "client/cpp/shared_regions.h"
#include "client/load/call_data.h"

namespace rapt::load {

enum class Protocol : uint8_t {
  kRapt,
  kOip,
  kHttp,  // the Open Inference Protocol over HTTP/1.1, with binary tensors; unary
};

enum class Transport : uint8_t {
  kUnary,
  kStream,        // one stream per call
  kSharedMemory,  // inputs and Y in shared memory; unary
};

struct Interface {
  Protocol protocol = Protocol::kRapt;
  Transport transport = Transport::kUnary;
  std::string model = "attention";  // for kOip and kHttp
};

// "/inference.GRPCInferenceService/ModelInfer", or the path over HTTP
std::string MethodOf(const Interface& interface);

// The messages of one call, which can be sent any number of times. Refers to the CallData.
struct EncodedCall {
  std::vector<grpc::ByteBuffer> messages;             // one, except for streams
  int64_t message_bytes = 0;                          // of all messages
  int64_t json_bytes = 0;                             // for kHttp: before the tensors
  std::shared_ptr<client::SharedRegion> region = {};  // for kSharedMemory
};

// Refers to the payloads, which outlive all calls.
grpc::ByteBuffer ToByteBuffer(const client::RequestMessage& message);

// Serializes a call. For kSharedMemory, also copies the inputs to a new region and registers it
// through `connection`, which may be null otherwise. ResourceExhausted if the call exceeds the
// maximum message size or shared memory runs out; otherwise the status of the registration.
absl::StatusOr<EncodedCall> Encode(const Interface& interface, const CallData& data,
                                   const client::Connection* connection);

// Unregisters the call's region, if any.
void Release(const EncodedCall& call, const client::Connection* connection);

// Returns the error that a stream's response carries, or OK.
absl::Status StatusInResponse(const Interface& interface, const grpc::ByteBuffer& received);

// Returns the bytes of Y. Internal if the responses are malformed. Over HTTP, a response is the
// binary data after the JSON.
absl::StatusOr<std::string> ReadY(const Interface& interface, const CallData& data,
                                  const EncodedCall& call,
                                  const std::vector<grpc::ByteBuffer>& responses);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_REQUESTS_H_
