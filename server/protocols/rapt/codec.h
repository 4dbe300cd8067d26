// Converts the messages of Attend and AttendBackward to the engine's requests and back.
#ifndef RAPT_SERVER_PROTOCOLS_RAPT_CODEC_H_
#define RAPT_SERVER_PROTOCOLS_RAPT_CODEC_H_

#include <chrono>
#include <optional>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/wire_format.h"
#include "proto/rapt/v1/attention.pb.h"
#include "server/protocols/message_parts.h"
#include "server/protocols/shared_tensors.h"
#include "server/request.h"
#include "server/shared_memory/shared_memory.h"

namespace rapt::native {

struct DecodedCall {
  Request request;
  // Without the tensors' data. `backward` is empty in the forward pass and has no call.
  v1::AttendRequest fields;
  v1::AttendBackwardRequest backward;
};

// The field of Tensor that holds data.
const wire::MessageSchema& TensorDataSchema();

// The fields of AttendRequest, AttendBackwardRequest and DiagnoseRequest that hold tensor data. The
// first call aborts if rapt.v1 lacks a field that the tables of the attention library name.
const wire::MessageSchema& AttendSchema();
const wire::MessageSchema& BackwardSchema();
const wire::MessageSchema& DiagnoseSchema();

// Decodes an AttendRequest. The request reads its tensors in place, in `message`, which must
// outlive it, or in `shared_memory`; only a mask of integers is converted. InvalidArgument names
// the field, the value received and the values allowed; NotFound and Unimplemented concern shared
// memory.
absl::StatusOr<DecodedCall> DecodeAttend(const MessageBytes& message,
                                         const SharedMemory& shared_memory);

// The same for an AttendBackwardRequest; errors name the fields of its call as those of Attend do.
absl::StatusOr<DecodedCall> DecodeBackward(const MessageBytes& message,
                                           const SharedMemory& shared_memory);

// The same for the call or backward pass in a DiagnoseRequest.
absl::StatusOr<DecodedCall> DecodeDiagnose(const MessageBytes& message,
                                           const SharedMemory& shared_memory);

// Returns the outputs that the response contains.
absl::InlinedVector<const TensorSpec*, 5> OutputsInResponse(const DecodedCall& decoded);

// Encodes the AttendResponse, or of a backward pass the AttendBackwardResponse. REQUIRES:
// result.status is OK; `result` is that of `call`, whose outputs are in `places`.
ResponseMessage EncodeResult(const ResolvedCall& call, const v1::OutputPlaces& places,
                             const Result& result);

// REQUIRES: the message has `role`: of AttendRequest one of kInputTensors, of AttendBackwardRequest
// one of kBackwardInputs.
const v1::Tensor& TensorOf(const google::protobuf::Message& message, Role role);

// What a field of a message may hold.
struct TensorField {
  absl::string_view name;
  DType dtype = DType::kFloat32;  // any float type, or this type of integers
  bool is_mask = false;           // any float or integer type, or bool
  size_t max_rank = 4;
};
// Of attention's tensors, under the name that the message gives it.
TensorField TensorFieldOf(Role role, absl::string_view name);

// Reads the type and shape of an input. `data` is its data field, of the size that they require;
// set to the bytes in shared memory if the tensor is there. Null `shared_tensors`: it must not be
// there.
absl::StatusOr<TensorSpec> ReadTensor(const TensorField& field, const v1::Tensor& tensor,
                                      SharedTensors* shared_tensors, InputBytes& data);

// Appends a tensor as field number `field` of a response. `place`: where its data was written
// instead, or null.
void AppendTensor(int field, const TensorSpec& spec, const v1::SharedMemory* place,
                  OutputBuffer payload, ResponseMessage& response);

// Sets the attributes of `call`.
absl::Status ReadAttention(const v1::Attention& attention, OperatorCall& call);
absl::Status ReadScoreOutput(v1::ScoreOutput output, std::optional<ScoreOutput>& out);

// "direction is 7; it must be KEYS_STREAM (1) or QUERIES_STREAM (2)"
absl::Status UnknownValue(absl::string_view field, int value, absl::string_view allowed);

// "DOT_PRODUCT (0) or ADDITIVE (1)"
std::string ChoicesOf(const google::protobuf::EnumDescriptor& type);

// Reads an enumeration of choices.h, which has the protocol's values from `first` on.
template <typename Choice, typename Code>
absl::Status ReadChoice(absl::string_view field, Code code, Choice& out, int first = 0) {
  const google::protobuf::EnumDescriptor& type = *google::protobuf::GetEnumDescriptor<Code>();
  if (type.FindValueByNumber(code) == nullptr) return UnknownValue(field, code, ChoicesOf(type));
  out = static_cast<Choice>(code - first);
  return absl::OkStatus();
}

// "INT32"; the number of an enum value that this server does not know.
std::string NameOf(v1::DataType code);

void WriteTiming(std::chrono::nanoseconds queue_time, std::chrono::nanoseconds compute_time,
                 v1::Timing& timing);

// The numbers of the fields of a response that follow its tensors.
struct EndFields {
  int backend, plan, timing;
};
template <typename Response>
constexpr EndFields kEndFields = {Response::kBackendFieldNumber, Response::kPlanFieldNumber,
                                  Response::kTimingFieldNumber};
std::string EndOf(const EndFields& fields, const Result& result);

// Returns nullopt for unknown codes and the unspecified code.
std::optional<DType> ToDType(v1::DataType code);
// Returns InvalidArgument, which names the field, for others than float types.
absl::StatusOr<DType> ReadFloatType(absl::string_view field, v1::DataType code);
v1::DataType CodeOf(DType dtype);

}  // namespace rapt::native

#endif  // RAPT_SERVER_PROTOCOLS_RAPT_CODEC_H_
