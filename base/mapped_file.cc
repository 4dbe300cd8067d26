#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <utility>

#include "base/round_up.h"

namespace rapt {

std::shared_ptr<const MappedFile> MappedFile::Open(const std::string& path) {
  // O_NONBLOCK: without it, opening a pipe waits for a writer.
  Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat facts = {};
  if (file.get() < 0 || fstat(file.get(), &facts) != 0) return nullptr;
  if (!S_ISREG(facts.st_mode) || facts.st_size == 0) return nullptr;
  const auto bytes = static_cast<size_t>(facts.st_size);
  void* const begin = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (begin == MAP_FAILED) return nullptr;
  const std::shared_ptr<MappedFile> mapped(
      new MappedFile(std::move(file), facts, {static_cast<const char*>(begin), bytes}));
  auto guard =
      BusErrorGuard::Protect(static_cast<std::byte*>(begin),
                             RoundUp(int64_t{facts.st_size}, int64_t{sysconf(_SC_PAGESIZE)}));
  if (!guard) return nullptr;
  mapped->guard_.emplace(*std::move(guard));
  return mapped;
}

MappedFile::~MappedFile() {
  guard_.reset();  // before other memory can take the place of the mapping
  munmap(const_cast<char*>(content_.data()), content_.size());
}

bool MappedFile::unchanged() const {
  struct stat now = {};
  return !guard_->broken() && fstat(file_.get(), &now) == 0 && now.st_size == facts_.st_size &&
         now.st_mtim.tv_sec == facts_.st_mtim.tv_sec &&
         now.st_mtim.tv_nsec == facts_.st_mtim.tv_nsec;
}

}  // namespace rapt
