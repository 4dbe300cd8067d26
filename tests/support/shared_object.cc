#include "tests/support/shared_object.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace rapt::test {
namespace {

std::string NewKey(const std::string& prefix) {
  static std::atomic<int> made{0};
  return absl::StrCat("/", prefix, "-", getpid(), "-", made++);
}

}  // namespace

SharedObject::SharedObject(int64_t bytes, const std::string& prefix)
    : key_(NewKey(prefix)), bytes_(bytes) {
  descriptor_ = shm_open(key_.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  RAPT_CHECK(descriptor_ >= 0, "no shared memory object");
  Truncate(bytes);
  void* const mapped =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  RAPT_CHECK(mapped != MAP_FAILED, "the shared memory object can't be mapped");
  data_ = static_cast<std::byte*>(mapped);
}

SharedObject::~SharedObject() {
  munmap(data_, static_cast<size_t>(bytes_));
  close(descriptor_);
  shm_unlink(key_.c_str());
}

void SharedObject::Truncate(int64_t bytes) {
  RAPT_CHECK(ftruncate(descriptor_, bytes) == 0, "the shared memory object keeps its size");
}

}  // namespace rapt::test
