// Arrays in files, as named on the command line: "q.npy", "in.npz:q", or "in.npz" if the member is
// unambiguous.
#ifndef RAPT_CLIENT_CLI_TENSOR_FILE_H_
#define RAPT_CLIENT_CLI_TENSOR_FILE_H_

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/npy.h"
#include "client/cli/zip.h"

namespace rapt {

bool IsNpz(std::string_view path);

// Returns the float type of the array's elements. NumPy's V2 is bfloat16 only if `dtype`, the flag
// --dtype, is "bf16"; otherwise its meaning is unknown. InvalidArgument names `reference`.
absl::StatusOr<DType> FloatTypeOf(const NpyArray& array, const std::string& reference,
                                  const std::string& dtype);

// Checks that --dtype is empty or bf16.
absl::Status ValidateDTypeFlag(const std::string& dtype);

// Returns the type that NumPy files use for this type.
NpyType NpyTypeOf(DType type);

// An .npz file in memory. Thread-compatible.
class NpzArchive {
 public:
  static absl::StatusOr<NpzArchive> Open(const std::string& path);

  bool Has(std::string_view name) const { return Find(name).has_value(); }
  std::vector<std::string> names() const;  // without ".npy", as numpy.load lists them

  // Errors name the file and the member.
  absl::StatusOr<NpyArray> Read(std::string_view name) const;

 private:
  NpzArchive(std::string path, ZipReader zip) : path_(std::move(path)), zip_(std::move(zip)) {}

  std::optional<size_t> Find(std::string_view name) const;

  std::string path_;
  ZipReader zip_;
};

// Reads the array that `reference` names. If it names an archive without a member, reads the member
// `usual_name` or the only one. Errors name the file.
absl::StatusOr<NpyArray> LoadArray(const std::string& reference, std::string_view usual_name);

// Returns the texts of the archive's member `member`, in UTF-8. Returns none if `reference` names
// no archive, or if its archive has no such member or numbers there.
absl::StatusOr<std::vector<std::string>> LoadTexts(const std::string& reference,
                                                   std::string_view member);

// Collects arrays and writes them to their files. Arrays with the same .npz path become members of
// one archive.
class ArrayWriter {
 public:
  void Add(const std::string& path, std::string_view member, NpyType type, const Shape& shape,
           absl::Span<const std::byte> elements);

  absl::Status Write() const;

 private:
  struct File {
    std::string path;
    std::vector<ZipContent> arrays;
  };
  std::vector<File> files_;
};

absl::StatusOr<std::string> ReadFile(const std::string& path);
absl::Status WriteFile(const std::string& path, std::string_view content);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_TENSOR_FILE_H_
