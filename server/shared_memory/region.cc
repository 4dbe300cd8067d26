#include "server/shared_memory/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/bus_error_guard.h"
#include "base/checked_math.h"
#include "base/descriptor.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

// A mapping of whole pages of a file.
class Mapping {
 public:
  Mapping(std::byte* begin, int64_t bytes) : begin_(begin), bytes_(bytes) {}
  ~Mapping() { munmap(begin_, static_cast<size_t>(bytes_)); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* begin() const { return begin_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* const begin_;
  const int64_t bytes_;
};

class SystemRegion final : public Region {
 public:
  SystemRegion(std::unique_ptr<Mapping> mapping, BusErrorGuard guard, absl::Span<std::byte> bytes)
      : mapping_(std::move(mapping)), guard_(std::move(guard)), bytes_(bytes) {}

  absl::Span<std::byte> bytes() const override { return bytes_; }
  bool intact() const override { return !guard_.broken(); }

 private:
  const std::unique_ptr<Mapping> mapping_;  // outlives its guard
  const BusErrorGuard guard_;
  const absl::Span<std::byte> bytes_;
};

// Returns OK if the bytes are within the file.
absl::Status CheckRange(const Descriptor& file, int64_t offset, int64_t byte_size) {
  if (byte_size <= 0 || offset < 0) {
    return Invalid("byte_size is ", byte_size, " and offset ", offset,
                   "; they must be at least 1 and 0");
  }
  struct stat status;
  if (fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    return absl::NotFoundError("the key is not a shared memory object");
  }
  const std::optional<int64_t> end = CheckedAdd(offset, byte_size);
  if (end && *end <= int64_t{status.st_size}) return absl::OkStatus();
  return Invalid("offset ", offset, " and byte_size ", byte_size,
                 " exceed the shared memory object, which has ", int64_t{status.st_size}, " bytes");
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Region>> OpenSystemRegion(const std::string& key,
                                                               int64_t offset, int64_t byte_size) {
  const Descriptor file(shm_open(key.c_str(), O_RDWR, 0));
  if (file.get() < 0) {
    return absl::NotFoundError(
        "no shared memory object has this key, or the server is not permitted to open it");
  }
  RAPT_RETURN_IF_ERROR(CheckRange(file, offset, byte_size));
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t before = offset % page;  // mappings begin at a page
  const int64_t mapped_bytes = (before + byte_size + page - 1) / page * page;
  void* const begin = mmap(nullptr, static_cast<size_t>(mapped_bytes), PROT_READ | PROT_WRITE,
                           MAP_SHARED, file.get(), offset - before);
  if (begin == MAP_FAILED) {
    return absl::ResourceExhaustedError("the system cannot map the shared memory object");
  }
  auto mapping = std::make_unique<Mapping>(static_cast<std::byte*>(begin), mapped_bytes);
  std::optional<BusErrorGuard> guard = BusErrorGuard::Protect(mapping->begin(), mapping->bytes());
  if (!guard) {
    return absl::ResourceExhaustedError(
        absl::StrCat("at most ", BusErrorGuard::kMaxGuards, " regions can be mapped at once"));
  }
  const absl::Span<std::byte> bytes(mapping->begin() + before, static_cast<size_t>(byte_size));
  return std::make_shared<SystemRegion>(std::move(mapping), *std::move(guard), bytes);
}

}  // namespace rapt
