// The files of one attention call: from arrays to a call and from its reply back to arrays.
#ifndef RAPT_CLIENT_CLI_ATTEND_FILES_H_
#define RAPT_CLIENT_CLI_ATTEND_FILES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/npy.h"
#include "rapt/client.h"

namespace rapt {

// Where the inputs are. `archive` is an .npz with members of these names; what is named beside it
// stands before it.
struct CallSources {
  std::optional<std::string> archive;
  std::optional<std::string> q, k, v, mask, past_key, past_value, key_lengths, attention_bias,
      head_sink;
  std::string dtype;  // --dtype
};

struct LoadedTensor {
  NpyArray array;
  client::DType dtype = client::DType::kFloat32;
  Shape shape;  // as it travels

  client::TensorView view() const { return {dtype, shape, array.bytes()}; }
};

struct LoadedCall {
  LoadedTensor q;
  std::optional<LoadedTensor> k, v;  // absent: Q again
  std::optional<LoadedTensor> mask, past_key, past_value, attention_bias, head_sink;
  std::vector<int64_t> key_lengths;

  client::AttendCall attributes;  // the call without its tensors
  bool is_2d = false;             // came as [S, D], travels as [1, S, D]

  // The whole call. Views of this object.
  client::AttendCall call() const;
};

// Integer masks become boolean. Without K and V the call is self-attention. The attributes are
// still to be set. InvalidArgument or NotFound names the file.
absl::StatusOr<LoadedCall> LoadCall(const CallSources& sources);

// The shape that an output gets in its file: as the inputs were. Of a 2-D call the batch axis goes,
// and for one head the head axis that scores and lse have.
enum class HeadAxis { kNone, kSecond };
Shape ShapeInFile(const Shape& shape, HeadAxis head_axis, bool is_2d);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_ATTEND_FILES_H_
