// Attend's messages to the engine's requests and back.
#ifndef RAPT_SERVER_WIRE_RAPT_CODEC_H_
#define RAPT_SERVER_WIRE_RAPT_CODEC_H_

#include <cstdint>
#include <optional>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/rapt/v1/attention.pb.h"
#include "server/request.h"

namespace rapt::native {

// Gives memory for an input that has to be converted; ResourceExhausted where there is none.
using AllocateInput = absl::FunctionRef<absl::StatusOr<InputBuffer>(int64_t bytes)>;

// The request reads its tensors where they lie in `message`, which has to stay until the engine is
// done with it; only a mask of integers is converted. InvalidArgument names the field, what came
// and what is allowed.
absl::StatusOr<Request> DecodeCall(const v1::AttendRequest& message, AllocateInput allocate);

// ResourceExhausted where the answer would exceed what a message can hold.
absl::Status CheckAnswerSize(const ResolvedCall& call);

// `result` is OK and answers `call`.
void EncodeResult(const ResolvedCall& call, const Result& result, v1::AttendResponse& response);

// The tensor that came as the field `name` of the request.
const v1::Tensor& FindTensor(const v1::AttendRequest& message, absl::string_view name);

// The library's type of that code; nothing for integers, unknown codes and the unspecified one.
std::optional<DType> ToDType(v1::DataType type);

}  // namespace rapt::native

#endif  // RAPT_SERVER_WIRE_RAPT_CODEC_H_
