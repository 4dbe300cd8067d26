#ifndef RAPT_SERVER_WIRE_JSON_MESSAGE_H_
#define RAPT_SERVER_WIRE_JSON_MESSAGE_H_

#include <google/protobuf/message.h>

#include <nlohmann/json.hpp>

namespace rapt {

// Returns the message as JSON, with the fields' names in the proto and 64-bit integers as numbers,
// as Triton writes them. Fields that were not set have their defaults, apart from messages.
nlohmann::ordered_json ToJson(const google::protobuf::Message& message);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_JSON_MESSAGE_H_
