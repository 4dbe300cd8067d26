// ZIP archives for NumPy's .npz, by libzip.
#ifndef RAPT_CLIENT_CLI_ZIP_H_
#define RAPT_CLIENT_CLI_ZIP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

struct zip;

namespace rapt {

// An archive in memory. Members may be stored or deflated. Thread-compatible.
class ZipReader {
 public:
  // The archive may be hostile. InvalidArgument describes the problem.
  static absl::StatusOr<ZipReader> Open(std::string archive);

  const std::vector<std::string>& names() const { return names_; }

  // Returns the content of names()[index]. Checks the sizes that the archive states before it
  // allocates memory, and the checksum.
  absl::StatusOr<std::string> Read(size_t index) const;

 private:
  struct Discard {
    void operator()(zip* archive) const;
  };

  std::unique_ptr<const std::string> bytes_;
  std::unique_ptr<zip, Discard> archive_;
  std::vector<std::string> names_;
};

struct ZipContent {
  std::string name;
  std::string content;
};

// Writes an archive of stored members, as numpy.savez does. Replaces the file at `path` only once
// the archive is complete. The same members give the same bytes.
absl::Status WriteZip(const std::string& path, absl::Span<const ZipContent> members);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_ZIP_H_
