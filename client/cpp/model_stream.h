// Streams of calls of an operator that has a state.
#ifndef RAPT_CLIENT_CPP_MODEL_STREAM_H_
#define RAPT_CLIENT_CPP_MODEL_STREAM_H_

#include <google/protobuf/message.h>

#include <memory>
#include <stop_token>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/connections.h"
#include "client/cpp/deadline.h"
#include "rapt/model.h"

namespace rapt::client {

// Sets the fields with the names of the call's tensors and parameters, and "want_<name>" of its
// outputs, which `response` has. InvalidArgument, with the name, for a field that the message does
// not have, a value that it does not take, and data that does not match its shape.
absl::Status EncodeOperator(const ModelCall& call, const google::protobuf::Descriptor& response,
                            google::protobuf::Message& request);

// Moves the outputs out of the response. Internal if it is malformed or lacks a wanted output.
absl::StatusOr<ModelResult> DecodeOperator(const ModelCall& call,
                                           google::protobuf::Message& response);

// Starts a LinearAttendStream. `connections` outlive it.
std::unique_ptr<ModelStream> NewLinearAttendStream(Connections& connections,
                                                   const Deadline& deadline, std::stop_token stop);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_MODEL_STREAM_H_
