#include "server/protocols/json_limits.h"

#include "absl/strings/str_cat.h"
#include "server/rejection.h"

namespace rapt {
namespace {

absl::Status TooMuchJson(absl::string_view what, int64_t most, absl::string_view remedy) {
  return Reject(Rejection::kTooLarge, absl::StatusCode::kResourceExhausted,
                absl::StrCat(what, " bytes of JSON; --max_json_bytes allows ", most, "; ", remedy));
}

}  // namespace

absl::Status RequestHasTooMuchJson(int64_t bytes, int64_t most) {
  return TooMuchJson(absl::StrCat("the request has ", bytes), most, "send tensors as binary data");
}

absl::Status AnswerHasTooMuchJson(int64_t most) {
  return TooMuchJson("the answer has too many", most,
                     "ask for binary data, or for application/x-protobuf below /rapt/v1");
}

}  // namespace rapt
