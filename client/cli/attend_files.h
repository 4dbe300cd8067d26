// The files of one attention call: from arrays to a call and from its reply back to arrays.
#ifndef RAPT_CLIENT_CLI_ATTEND_FILES_H_
#define RAPT_CLIENT_CLI_ATTEND_FILES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/roles.h"
#include "client/cli/npy.h"
#include "rapt/client.h"

namespace rapt {

// The name of an input in archives and errors, and of its flag: that of rapt.v1.
absl::string_view NameOf(Role role);

// Where the inputs are: each in its file, otherwise in the .npz archive under its name.
struct CallSources {
  std::optional<std::string> archive;
  InputMap<std::optional<std::string>> files;
  std::string dtype;  // --dtype
};

struct LoadedTensor {
  NpyArray array;
  client::DType dtype = client::DType::kFloat32;
  Shape shape;  // as it travels

  client::TensorView view() const { return {dtype, shape, array.bytes()}; }
};

struct LoadedCall {
  InputMap<std::optional<LoadedTensor>> tensors;  // always Q; without K and V: Q again
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
