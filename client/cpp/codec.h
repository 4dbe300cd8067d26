// Converts the public values to protocol messages and back. Tensor data is not copied into a
// request, and copied once out of a response.
#ifndef RAPT_CLIENT_CPP_CODEC_H_
#define RAPT_CLIENT_CPP_CODEC_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/sliced_bytes.h"
#include "client/cpp/call_fields.h"
#include "client/cpp/request_message.h"
#include "client/cpp/shared_regions.h"
#include "proto/rapt/v1/attention.pb.h"
#include "rapt/attend.h"
#include "rapt/reports.h"

namespace rapt::client {

// Encodes an AttendRequest, a DiagnoseRequest or an AttendBackwardRequest, tensors before other
// fields. The message refers to the call's tensors. InvalidArgument, naming the field, for a tensor
// whose data does not match its shape and for an unknown gradient; ResourceExhausted for a message
// of more than `max_bytes`. The server checks everything else.
absl::StatusOr<RequestMessage> EncodeAttend(const AttendCall& call, int64_t max_bytes);
absl::StatusOr<RequestMessage> EncodeDiagnose(const AttendCall& call, int64_t max_bytes);
absl::StatusOr<RequestMessage> EncodeDiagnose(const BackwardCall& call, int64_t max_bytes);
absl::StatusOr<RequestMessage> EncodeBackward(const BackwardCall& call, int64_t max_bytes);
v1::EstimateMemoryRequest Encode(const MemoryQuestion& question);
v1::EstimateMemoryRequest Encode(const LayerMemoryQuestion& question);

// Returns the size of a region for the call's tensors and its Y. Returns nullopt for an invalid
// call, for which EncodeAttend() or the server returns an error.
std::optional<int64_t> BytesInRegion(const AttendCall& call);
// Copies the call's tensors into the region, and requests Y there.
// REQUIRES: the region has at least BytesInRegion(call).
RequestMessage EncodeAttendIn(const SharedRegion& region, const AttendCall& call);

// Returns the request without its tensors.
v1::AttendRequest WithoutTensors(const AttendCall& call);
v1::DataType ToProto(DType dtype);

// Returns InvalidArgument, with `name`, if the data of a tensor does not match its shape.
absl::Status CheckData(absl::string_view name, const TensorView& view);
// Appends the tensor as field `number`; the message refers to its data. Errors as CheckData().
absl::Status AppendTensor(absl::string_view name, int number, const TensorView& view,
                          RequestMessage& message);
// ResourceExhausted for a message of more than `max_bytes`.
absl::Status CheckSize(int64_t bytes, int64_t max_bytes);
// Sets the type and shape of a tensor.
void Describe(const TensorView& view, v1::Tensor& tensor);

// Internal: "malformed response from server: `why`".
absl::Status MalformedResponse(absl::string_view why);
// Returns the type of the tensor `name`; Internal for one that only newer servers know.
absl::StatusOr<DType> FromProto(absl::string_view name, v1::DataType dtype);
// Returns Internal, with `name`, unless a tensor of this type and shape has `bytes` bytes.
absl::Status CheckReceived(absl::string_view name, DType dtype, const Shape& shape, int64_t bytes);
// Returns the tensor `name` with the bytes of `message`. Internal if it is malformed.
absl::StatusOr<Tensor> TakeTensor(absl::string_view name, v1::Tensor& message);

// Copies how the server computed the result.
template <typename Response, typename Result>
void ReadPlan(const Response& fields, Result& result) {
  result.backend = fields.backend();
  result.plan = fields.plan();
  result.queue_time = std::chrono::microseconds(fields.timing().queue_us());
  result.compute_time = std::chrono::microseconds(fields.timing().compute_us());
}

// The outputs that a call requests, with Y.
using WantedOutputs = absl::InlinedVector<const CallOutput*, 5>;
WantedOutputs WantedBy(const AttendCall& call);

// Decodes an AttendResponse of `size` bytes, whose outputs may be in `region`. Internal for a
// malformed response or one without the wanted outputs.
absl::StatusOr<AttendResult> DecodeAttend(const WantedOutputs& wanted, const SlicedBytes& bytes,
                                          int64_t size, absl::Span<const std::byte> region = {});

// Decodes an AttendBackwardResponse likewise.
absl::StatusOr<BackwardResult> DecodeBackward(const WantedGradients& wanted,
                                              const SlicedBytes& bytes, int64_t size);

// Internal for an unknown data type.
absl::StatusOr<Diagnosis> Decode(const v1::DiagnoseResponse& response);
MemoryEstimates Decode(const v1::EstimateMemoryResponse& response);
ServerInfo Decode(const v1::GetServerInfoResponse& response);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_CODEC_H_
