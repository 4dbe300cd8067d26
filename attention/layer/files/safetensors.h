// The file format safetensors: an index in JSON, and the tensors' bytes. A model that is large has
// several such files, its shards, and an index file that says which shard has which tensor.
#ifndef RAPT_ATTENTION_LAYER_FILES_SAFETENSORS_H_
#define RAPT_ATTENTION_LAYER_FILES_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/operator.h"
#include "attention/tensor_view.h"
#include "base/mapped_file.h"

namespace rapt {

struct SavedTensor {
  std::string type;            // as in the file: "F32"
  std::optional<DType> dtype;  // absent: another type, whose bytes mean nothing here
  Shape shape;
  absl::Span<const std::byte> bytes;  // row-major, with any alignment
};

// Returns NotFound with the reason why MappedFile::Open() returned null for a file.
absl::Status WhyUnreadable(const std::string& path);

// The tensors of a file or of all shards. They are read in place. Immutable; may be shared by
// threads; copies share the files.
class Safetensors {
 public:
  // Of the index. As in the reference implementation.
  static constexpr int64_t kMaxHeaderBytes = 100'000'000;
  static constexpr size_t kMaxTensors = 100'000;      // of all shards together
  static constexpr size_t kMaxShards = 500;           // each is mapped, see BusErrorGuard
  static constexpr size_t kMaxIndexBytes = 32 << 20;  // of the index file of shards
  static constexpr size_t kMaxRank = 16;

  // Returns NotFound if the file can't be mapped, and otherwise errors as Parse() does.
  static absl::StatusOr<Safetensors> Open(const std::string& path);

  // Opens the shards of an index file, which lie beside it. Tensors that the index does not name
  // are read, too. Returns NotFound with the file that can't be mapped, InvalidArgument with the
  // shard for the errors of Parse(), for a tensor that is not in the shard that the index names, or
  // is in two of them, and for names of shards with a folder.
  static absl::StatusOr<Safetensors> OpenShards(const std::string& index_path);

  // Reads the index of a file in memory, which must outlive the result. Returns InvalidArgument
  // with the tensor, what the index has and what is allowed, unless the index is valid and its
  // tensors tile the rest of the file, in any order, without a hole or an overlap.
  static absl::StatusOr<Safetensors> Parse(absl::string_view content);

  const std::map<std::string, SavedTensor>& tensors() const { return *tensors_; }
  // Returns null if there is no such tensor.
  const SavedTensor* Find(const std::string& name) const;
  // Returns whether the bytes that were read so far are those of the files when they were opened.
  bool unchanged() const;

 private:
  using Tensors = std::map<std::string, SavedTensor>;

  explicit Safetensors(Tensors tensors) : tensors_(std::make_shared<Tensors>(std::move(tensors))) {}

  std::shared_ptr<const Tensors> tensors_;
  std::vector<std::shared_ptr<const MappedFile>> files_;  // none: memory of the caller
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_FILES_SAFETENSORS_H_
