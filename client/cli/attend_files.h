// Reads the files of an attention call, and gives its outputs their shapes in files.
#ifndef RAPT_CLIENT_CLI_ATTEND_FILES_H_
#define RAPT_CLIENT_CLI_ATTEND_FILES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/roles.h"
#include "client/cli/npy.h"
#include "rapt/client.h"

namespace rapt {

// Returns the name of an input in rapt.v1. Archives, errors and flags use the same name.
absl::string_view NameOf(Role role);

// The sources of the inputs: the file of each, or else the member of its name in the archive.
struct CallSources {
  std::optional<std::string> archive;
  InputMap<std::optional<std::string>> files;  // only files have the inputs of the backward pass
  InputMap<std::optional<NpyArray>> arrays;    // instead of files, if the command made them
  std::string dtype;                           // --dtype
  bool values_in_keys = false;                 // --v-head-size was given; v has no file
};

struct LoadedTensor {
  NpyArray array;
  client::DType dtype = client::DType::kFloat32;
  Shape shape;  // as sent

  client::TensorView view() const { return {dtype, shape, array.bytes()}; }
};

struct LoadedCall {
  InputMap<std::optional<LoadedTensor>> tensors;  // includes Q
  std::vector<int64_t> key_lengths;

  client::AttendCall attributes;  // the call without its tensors
  std::vector<std::string> gradients;
  bool is_2d = false;  // read as [S, D], sent as [1, S, D]

  // Returns the whole call, which refers to this object. Without K and V, Q stands for both.
  client::AttendCall call() const;
  // Returns its backward pass, likewise. REQUIRES: dY is loaded.
  client::BackwardCall backward() const;

  // Returns the array that stands for an input: Q for K and V that have no file.
  const LoadedTensor& InputOf(Role role) const {
    return *(tensors[role] ? tensors[role] : tensors[Role::kQ]);
  }
};

// Reads the tensors of a call and converts integer masks to boolean. Does not set the attributes.
// InvalidArgument or NotFound names the file.
absl::StatusOr<LoadedCall> LoadCall(const CallSources& sources);

// Returns a mask [batch, 1, 1, keys] that hides the keys whose token is `pad_token`. `ids` has one
// integer per key, [keys] for all batch rows or [batch, keys]; InvalidArgument otherwise.
absl::StatusOr<LoadedTensor> PaddingMask(const NpyArray& ids, int64_t pad_token, int64_t batch,
                                         int64_t keys);

// Returns positions of any integer type as int64. InvalidArgument names the tensor.
absl::StatusOr<LoadedTensor> IntegerTensor(absl::string_view name, const NpyArray& array);

// Reads a tensor of the kind of `usual`: any float; integers of any type as INT64 or INT32; or a
// mask, which may be bool, integers 0 and 1 or, if it is that of attention, any float. Errors name
// the file or the tensor.
absl::StatusOr<LoadedTensor> LoadTensor(const std::string& path, std::string_view name,
                                        const std::string& dtype, DType usual = DType::kFloat32);

// Reads integers [B]. InvalidArgument names the tensor.
absl::StatusOr<std::vector<int64_t>> LoadLengths(const std::string& path, std::string_view name);

// Returns the shape of an output in its file. For 2-D inputs, drops the batch axis and, if there is
// one head, the head axis of scores and lse.
enum class HeadAxis { kNone, kSecond };
Shape ShapeInFile(const Shape& shape, HeadAxis head_axis, bool is_2d);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_ATTEND_FILES_H_
