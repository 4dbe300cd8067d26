// Converts the messages of an operator's method to the engine's requests and back, by the
// operator's table: a field has the name of its tensor or attribute in lower case, an output that
// is asked for has a field "want_<name>" in the request.
#ifndef RAPT_SERVER_PROTOCOLS_RAPT_OPERATOR_CODEC_H_
#define RAPT_SERVER_PROTOCOLS_RAPT_OPERATOR_CODEC_H_

#include <google/protobuf/message.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/operator_schema.h"
#include "attention/tensor_operator.h"
#include "base/wire_format.h"
#include "server/protocols/message_parts.h"
#include "server/protocols/rapt/codec.h"
#include "server/protocols/shared_tensors.h"
#include "server/request.h"
#include "server/shared_memory/shared_memory.h"

namespace rapt::native {

// Immutable; thread-safe.
class OperatorCodec {
 public:
  // Aborts if the service lacks the method, or a message of it a field of the table.
  explicit OperatorCodec(const OperatorSchema& schema);

  // The fields of the request that hold tensor data.
  wire::MessageSchema payloads() const { return {payloads_}; }
  const OperatorSchema& schema() const { return schema_; }
  const google::protobuf::Message& request() const { return request_; }
  const google::protobuf::Message& response() const { return response_; }

  // As DecodeAttend(). ResourceExhausted if the response would exceed the largest message.
  absl::StatusOr<Request> Decode(const MessageBytes& message,
                                 const SharedMemory& shared_memory) const;

  // Encodes the response with these outputs. REQUIRES: `op` has them; result.status is OK; `result`
  // is that of `op`.
  ResponseMessage Encode(const TensorOperator& op, SlotSet wanted, const Result& result) const;

  // The parts of Decode(). A message whose payloads are the inputs of a request:
  struct Parsed {
    std::unique_ptr<google::protobuf::Message> fields;  // without the tensors' data
    Request request;
  };
  absl::StatusOr<Parsed> Parse(const MessageBytes& message) const;
  // InvalidArgument for a field that only the first message of a stream sets.
  absl::Status CheckLaterMessage(const google::protobuf::Message& fields) const;
  uint64_t PriorityOf(const google::protobuf::Message& fields) const;
  absl::Status ReadAttributes(const google::protobuf::Message& fields, SchemaCall& call) const;
  // Returns the outputs that the message asks for by fields, and asks the call for them.
  SlotSet ReadWants(const google::protobuf::Message& fields, SchemaCall& call) const;
  // Null `shared_tensors`: no tensor may be in shared memory.
  absl::Status ReadTensors(const google::protobuf::Message& fields, SharedTensors* shared_tensors,
                           SchemaCall& call, Request& request) const;

 private:
  template <typename Schema>
  struct Column {  // a row of the table and its field
    const Schema* schema;
    const google::protobuf::FieldDescriptor* field;
  };

  const google::protobuf::FieldDescriptor* FieldOf(const google::protobuf::Message& message,
                                                   absl::string_view name) const;

  const OperatorSchema& schema_;
  const google::protobuf::Message& request_;
  const google::protobuf::Message& response_;
  const google::protobuf::FieldDescriptor* const priority_;
  const EndFields end_;
  std::vector<Column<TensorSchema>> inputs_, outputs_, wants_;
  std::vector<Column<AttributeSchema>> attributes_;
  std::vector<wire::PayloadField> payloads_;
};

// Those of all operators that have a method in their table.
const std::vector<OperatorCodec>& OperatorCodecs();

}  // namespace rapt::native

#endif  // RAPT_SERVER_PROTOCOLS_RAPT_OPERATOR_CODEC_H_
