// Files in the format of safetensors, written by tests.
#ifndef RAPT_TESTS_SUPPORT_SAVED_TENSORS_H_
#define RAPT_TESTS_SUPPORT_SAVED_TENSORS_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace rapt::test {

struct TensorToSave {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

// Returns a file with this index and these bytes of data.
inline std::string SafetensorsFile(const std::string& index, const std::string& data) {
  std::string file(8, '\0');
  const uint64_t length = index.size();
  std::memcpy(file.data(), &length, sizeof(length));  // the machine is little-endian
  return file + index + data;
}

// Returns a file with these FP32 tensors.
inline std::string SaveTensors(const std::vector<TensorToSave>& tensors) {
  std::string data;
  std::vector<std::string> entries;
  for (const TensorToSave& tensor : tensors) {
    const size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(tensor.values.data()),
                tensor.values.size() * sizeof(float));
    entries.push_back(absl::StrCat("\"", tensor.name, R"(":{"dtype":"F32","shape":[)",
                                   absl::StrJoin(tensor.shape, ","), R"(],"data_offsets":[)", begin,
                                   ",", data.size(), "]}"));
  }
  return SafetensorsFile(absl::StrCat("{", absl::StrJoin(entries, ","), "}"), data);
}

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_SAVED_TENSORS_H_
