#ifndef RAPT_SERVER_WIRE_JSON_MESSAGE_H_
#define RAPT_SERVER_WIRE_JSON_MESSAGE_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <cstdint>
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

// Returns a serialized message in Protocol Buffers' JSON, all fields with it. The text is charged
// to the call's caller in blocks before they exist, and until they are sent. ResourceExhausted if
// it has more than `max_json_bytes`.
absl::StatusOr<ResponseMessage> ToProtoJson(const google::protobuf::Descriptor& type,
                                            const std::string& serialized, int64_t max_json_bytes,
                                            const Call& call);

// Returns the message of Protocol Buffers' JSON, serialized. InvalidArgument names what is wrong.
absl::StatusOr<std::string> FromProtoJson(const google::protobuf::Descriptor& type,
                                          absl::string_view json);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_JSON_MESSAGE_H_
