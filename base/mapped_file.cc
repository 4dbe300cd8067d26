#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace rapt {

std::shared_ptr<const MappedFile> MappedFile::Open(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return nullptr;
  struct stat facts = {};
  void* bytes = MAP_FAILED;
  if (fstat(file, &facts) == 0 && S_ISREG(facts.st_mode) && facts.st_size > 0) {
    bytes = mmap(nullptr, static_cast<size_t>(facts.st_size), PROT_READ, MAP_PRIVATE, file, 0);
  }
  close(file);  // the mapping remains valid
  if (bytes == MAP_FAILED) return nullptr;
  return std::shared_ptr<const MappedFile>(
      new MappedFile({static_cast<const char*>(bytes), static_cast<size_t>(facts.st_size)}));
}

MappedFile::~MappedFile() { munmap(const_cast<char*>(content_.data()), content_.size()); }

}  // namespace rapt
