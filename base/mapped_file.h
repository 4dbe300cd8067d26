// A memory-mapped file. Bytes are read on access and not copied.
#ifndef RAPT_BASE_MAPPED_FILE_H_
#define RAPT_BASE_MAPPED_FILE_H_

#include <sys/stat.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/bus_error_guard.h"
#include "base/descriptor.h"

namespace rapt {

class MappedFile {
 public:
  // Returns nullptr if the file can't be opened or mapped, such as a pipe or an empty file, or if
  // there are BusErrorGuard::kMaxGuards mappings. Does not wait for the writer of a pipe.
  static std::shared_ptr<const MappedFile> Open(const std::string& path);

  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  // If the file becomes shorter, what was cut off reads as anything, also as zeros.
  std::string_view content() const { return content_; }

  // Returns whether all bytes that were read so far are of the file as it was opened: its size and
  // its time of modification are the same.
  bool unchanged() const;

 private:
  MappedFile(Descriptor file, const struct stat& facts, std::string_view content)
      : file_(std::move(file)), facts_(facts), content_(content) {}

  const Descriptor file_;
  const struct stat facts_;  // when it was opened
  const std::string_view content_;
  std::optional<BusErrorGuard> guard_;  // of the mapping
};

}  // namespace rapt

#endif  // RAPT_BASE_MAPPED_FILE_H_
