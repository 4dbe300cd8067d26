// Messages of LinearAttend.
#ifndef RAPT_CLIENT_CPP_LINEAR_CODEC_H_
#define RAPT_CLIENT_CPP_LINEAR_CODEC_H_

#include "absl/status/statusor.h"
#include "proto/rapt/v1/attention.pb.h"
#include "rapt/linear.h"

namespace rapt::client {

// Returns InvalidArgument if the data of a tensor does not match its shape.
absl::StatusOr<v1::LinearAttendRequest> Encode(const LinearCall& call);

// The same for a later message of a stream: only its tokens and wanted outputs.
absl::StatusOr<v1::LinearAttendRequest> EncodeTokens(const LinearCall& call);

// Returns Internal for a malformed response or one without the wanted outputs.
absl::StatusOr<LinearResult> Decode(const LinearCall& call, v1::LinearAttendResponse response);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_LINEAR_CODEC_H_
