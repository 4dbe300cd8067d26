// NumPy's .npy format, versions 1.0 to 3.0.
#ifndef RAPT_CLIENT_CLI_NPY_H_
#define RAPT_CLIENT_CLI_NPY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/operator.h"
#include "base/mapped_file.h"

namespace rapt {

// An element type by NumPy's letter and size: f4, i8, b1. V2 stands for bfloat16, which NumPy
// lacks: ml_dtypes writes it as two raw bytes. U is text in UTF-32, filled up with zeros.
struct NpyType {
  char kind = 'f';
  int bytes = 4;

  bool operator==(const NpyType&) const = default;
};

// "float32", as NumPy prints it, or "text".
std::string ToString(NpyType type);

// An array in C order, owned or in a mapped file. Thread-compatible.
struct NpyArray {
  NpyType type;
  Shape shape;
  std::string storage;
  size_t first_byte = 0;  // of the elements in content(), after the file's header
  std::shared_ptr<const MappedFile> file = nullptr;  // instead of storage

  int64_t size() const;  // elements
  std::string_view content() const { return file ? file->content() : std::string_view(storage); }
  absl::Span<const std::byte> bytes() const {
    return {reinterpret_cast<const std::byte*>(content().data()) + first_byte,
            content().size() - first_byte};
  }
};

// Parses the content of a file. Converts Fortran order to C order. The file may be hostile:
// InvalidArgument describes the problem.
absl::StatusOr<NpyArray> ParseNpy(std::string file);

// Like above. Does not copy elements in C order.
absl::StatusOr<NpyArray> ParseNpy(std::shared_ptr<const MappedFile> file);

// Returns a file of version 1.0 in C order.
std::string FormatNpy(NpyType type, const Shape& shape, absl::Span<const std::byte> elements);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_NPY_H_
