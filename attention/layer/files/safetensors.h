// The file format safetensors: an index in JSON, and the tensors' bytes.
#ifndef RAPT_ATTENTION_LAYER_FILES_SAFETENSORS_H_
#define RAPT_ATTENTION_LAYER_FILES_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/operator.h"
#include "attention/tensor_view.h"
#include "base/mapped_file.h"

namespace rapt {

struct SavedTensor {
  std::string type;            // as in the file: "F32"
  std::optional<DType> dtype;  // absent: not a floating-point type of the library
  Shape shape;
  absl::Span<const std::byte> bytes;  // row-major, with any alignment
};

// The tensors of a file. They are read in place. Immutable; may be shared by threads.
class Safetensors {
 public:
  // Of the index. As in the reference implementation.
  static constexpr int64_t kMaxHeaderBytes = 100'000'000;
  static constexpr size_t kMaxTensors = 100'000;
  static constexpr size_t kMaxRank = 16;

  // Returns NotFound if the file can't be mapped, and otherwise errors as Parse() does.
  static absl::StatusOr<Safetensors> Open(const std::string& path);

  // Reads the index of a file in memory, which must outlive the result. Returns InvalidArgument
  // with the tensor, what the index has and what is allowed, unless the index is valid and its
  // tensors tile the rest of the file, in any order, without a hole or an overlap.
  static absl::StatusOr<Safetensors> Parse(absl::string_view content);

  const std::map<std::string, SavedTensor>& tensors() const { return tensors_; }
  // Returns null if there is no such tensor.
  const SavedTensor* Find(const std::string& name) const;
  // Returns whether the bytes that were read so far are those of the file when it was opened.
  bool unchanged() const { return file_ == nullptr || file_->unchanged(); }

 private:
  explicit Safetensors(std::map<std::string, SavedTensor> tensors) : tensors_(std::move(tensors)) {}

  std::map<std::string, SavedTensor> tensors_;
  std::shared_ptr<const MappedFile> file_;  // null: memory of the caller
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_FILES_SAFETENSORS_H_
