// A memory-mapped file. Bytes are read on access and not copied.
#ifndef RAPT_BASE_MAPPED_FILE_H_
#define RAPT_BASE_MAPPED_FILE_H_

#include <memory>
#include <string>
#include <string_view>

namespace rapt {

class MappedFile {
 public:
  // Returns nullptr if the file can't be opened or mapped, such as a pipe or an empty file.
  static std::shared_ptr<const MappedFile> Open(const std::string& path);

  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view content() const { return content_; }

 private:
  explicit MappedFile(std::string_view content) : content_(content) {}

  const std::string_view content_;
};

}  // namespace rapt

#endif  // RAPT_BASE_MAPPED_FILE_H_
