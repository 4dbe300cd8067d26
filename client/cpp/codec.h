// The public values to protocol messages and back. Tensors' bytes are not copied into a request,
// and once out of an answer.
#ifndef RAPT_CLIENT_CPP_CODEC_H_
#define RAPT_CLIENT_CPP_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "base/sliced_bytes.h"
#include "client/cpp/request_message.h"
#include "client/cpp/shared_regions.h"
#include "proto/rapt/v1/attention.pb.h"
#include "rapt/attend.h"
#include "rapt/reports.h"

namespace rapt::client {

// An AttendRequest, a DiagnoseRequest, byte for byte as generated code serializes it; refers to the
// call's tensors. InvalidArgument, naming the field, for a tensor whose data is not as long as its
// shape says; ResourceExhausted for a message of more than `max_bytes`. What the call means is the
// server's to judge.
absl::StatusOr<RequestMessage> EncodeAttend(const AttendCall& call, int64_t max_bytes);
absl::StatusOr<RequestMessage> EncodeDiagnose(const AttendCall& call, int64_t max_bytes);
v1::EstimateMemoryRequest Encode(const MemoryQuestion& question);

// How large a region has to be that the call's tensors and its Y are put into. Nothing where the
// call makes no sense; EncodeAttend() or the server will say why.
std::optional<int64_t> BytesInRegion(const AttendCall& call);
// Copies the call's tensors into such a region, and wants Y there.
RequestMessage EncodeAttendIn(const SharedRegion& region, const AttendCall& call);

// All of a call but its tensors.
v1::AttendRequest WithoutTensors(const AttendCall& call);
v1::DataType ToProto(DType dtype);

// What a call asks for beside Y.
struct WantedOutputs {
  bool scores = false;
  bool lse = false;
  bool present = false;
};
WantedOutputs WantedBy(const AttendCall& call);

// Reads an AttendResponse of `size` bytes, whose outputs may be in `region`. Internal where it is
// none, or no answer to such a call.
absl::StatusOr<AttendResult> DecodeAttend(const WantedOutputs& wanted, const SlicedBytes& bytes,
                                          int64_t size, absl::Span<const std::byte> region = {});

// Internal for a data type that we do not know.
absl::StatusOr<Diagnosis> Decode(const v1::DiagnoseResponse& response);
MemoryEstimates Decode(const v1::EstimateMemoryResponse& response);
ServerInfo Decode(const v1::GetServerInfoResponse& response);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_CODEC_H_
