// The public values to protocol messages and back.
#ifndef RAPT_CLIENT_RAPT_CODEC_H_
#define RAPT_CLIENT_RAPT_CODEC_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "proto/rapt/v1/attention.pb.h"
#include "rapt/attend.h"
#include "rapt/reports.h"

namespace rapt::client {

// InvalidArgument, naming the field, for a tensor whose data is not as long as its shape says;
// ResourceExhausted for a message of more than `max_bytes`. What the call means is the server's to
// judge.
absl::StatusOr<v1::AttendRequest> Encode(const AttendCall& call, int64_t max_bytes);
v1::EstimateMemoryRequest Encode(const MemoryQuestion& question);

// Takes the bytes out of the response. Internal where it is not an answer to `request`.
absl::StatusOr<AttendResult> Decode(const v1::AttendRequest& request,
                                    v1::AttendResponse&& response);

// Internal for a data type that we do not know.
absl::StatusOr<Diagnosis> Decode(const v1::DiagnoseResponse& response);
MemoryEstimates Decode(const v1::EstimateMemoryResponse& response);
ServerInfo Decode(const v1::GetServerInfoResponse& response);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_CODEC_H_
