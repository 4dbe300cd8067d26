#ifndef RAPT_SERVER_WIRE_JSON_MESSAGE_H_
#define RAPT_SERVER_WIRE_JSON_MESSAGE_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/calls/call.h"
#include "server/protocols/message_parts.h"

namespace rapt {

// Returns the message as JSON, with the fields' names in the proto and 64-bit integers as numbers,
// as Triton writes them. Fields that were not set have their defaults, apart from messages.
nlohmann::ordered_json ToJson(const google::protobuf::Message& message);

// Memory that was reserved for a text: its first `bytes`. Others are charged.
struct TextMemory {
  std::shared_ptr<const void> memory = nullptr;
  int64_t bytes = 0;
};

// Returns a serialized message in Protocol Buffers' JSON, all fields with it. The text is charged
// to the call's caller in blocks before they exist, and until they are sent; a call without tensors
// charges its response itself. ResourceExhausted if the text has more than `max_json_bytes`.
absl::StatusOr<ResponseMessage> ToProtoJson(const google::protobuf::Descriptor& type,
                                            const std::string& serialized, int64_t max_json_bytes,
                                            TextMemory reserved, const Call& call);

// Returns the bytes that blocks of a text of at most `bytes` take.
int64_t TextMemoryBytes(int64_t bytes);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_JSON_MESSAGE_H_
