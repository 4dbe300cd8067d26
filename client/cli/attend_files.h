// The files of one attention call: from arrays to a call and from its reply back to arrays.
#ifndef RAPT_CLIENT_CLI_ATTEND_FILES_H_
#define RAPT_CLIENT_CLI_ATTEND_FILES_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "client/cli/attention_caller.h"
#include "client/cli/npy.h"
#include "client/cli/tensor_file.h"
#include "server/attention/operator.h"

namespace rapt {

// Where the inputs are. `archive` is an .npz with members of these names; what is named beside it
// stands before it.
struct AttendSources {
  std::optional<std::string> archive;
  std::optional<std::string> q, k, v, mask, past_key, past_value, key_lengths;
  std::string dtype;  // --dtype
};

// A call whose tensors are loaded; its attributes are still to be set.
struct LoadedCall {
  OperatorCall call;
  bool is_2d = false;  // came as [S, D], travels as [1, S, D]

  // Views into the arrays below.
  AttentionInputs inputs() const;

  NpyArray q;
  std::optional<NpyArray> k, v;  // absent: Q again
  std::optional<NpyArray> mask, past_key, past_value, key_lengths;
};

// Integer masks become boolean, integer key lengths int64. Without K and V the call is
// self-attention. InvalidArgument or NotFound names the file.
absl::StatusOr<LoadedCall> LoadCall(const AttendSources& sources);

// The shape that an output gets in its file: as the inputs were. Of a 2-D call the batch axis goes,
// and for one head the head axis that scores and lse have.
enum class HeadAxis { kNone, kSecond };
Shape ShapeInFile(const Shape& shape, HeadAxis head_axis, bool is_2d);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_ATTEND_FILES_H_
