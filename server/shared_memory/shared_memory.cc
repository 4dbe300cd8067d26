#include "server/shared_memory/shared_memory.h"

#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/checked_math.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "base/utf8.h"
#include "server/shared_memory/region.h"

namespace rapt {
namespace {

constexpr size_t kMaxNameBytes = 256;  // bounded because errors quote names

absl::Status CheckName(const std::string& name) {
  if (!name.empty() && name.size() <= kMaxNameBytes) return absl::OkStatus();
  return Invalid("the region's name has ", name.size(), " bytes; it must have 1 to ",
                 kMaxNameBytes);
}

absl::StatusOr<int64_t> ToSigned(absl::string_view field, uint64_t value) {
  if (value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return static_cast<int64_t>(value);
  }
  return Invalid(field, " is ", value, "; it must fit in 63 bits");
}

absl::Status ForRegion(const std::string& name, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("region '", name, "': ", status.message()));
}

absl::Status UnknownRegion(const std::string& name) {
  return absl::NotFoundError(
      absl::StrCat("unknown shared memory region '", Utf8Prefix(name, kMaxNameBytes), "'"));
}

// shm_open() ignores leading slashes.
absl::string_view WithoutLeadingSlashes(absl::string_view key) {
  while (absl::StartsWith(key, "/")) key.remove_prefix(1);
  return key;
}

class CudaRegion final : public Region {
 public:
  explicit CudaRegion(std::shared_ptr<const DeviceMemory> memory) : memory_(std::move(memory)) {}

  absl::Span<std::byte> bytes() const override { return {}; }
  const DeviceMemory* device() const override { return memory_.get(); }
  bool intact() const override { return true; }  // copies report errors instead

 private:
  const std::shared_ptr<const DeviceMemory> memory_;
};

}  // namespace

absl::Status BrokenRegion() {
  return Invalid(
      "the owner truncated the shared memory while it was registered; unregister it and register "
      "it again");
}

absl::Status SharedMemory::CheckAllowed() const {
  if (options_.allowed) return absl::OkStatus();
  return absl::UnimplementedError(
      "shared memory is not enabled; start the server with --allow_shared_memory");
}

absl::Status SharedMemory::CheckKey(const std::string& key) const {
  const absl::string_view object = WithoutLeadingSlashes(key);
  if (object.empty() ||
      object.find_first_of(absl::string_view("/\0", 2)) != absl::string_view::npos) {
    return Invalid("the key must be a name without inner slashes");
  }
  if (absl::StartsWith(object, options_.key_prefix)) return absl::OkStatus();
  return Invalid("the key must begin with '", options_.key_prefix,
                 "', this server's --shared_memory_prefix");
}

absl::Status SharedMemory::CheckPlaceLocked(const std::string& name) const {
  if (entries_.count(name) != 0) return absl::AlreadyExistsError("already registered");
  if (entries_.size() < kMaxRegions) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      kMaxRegions, " regions are registered, the most that a server keeps; unregister one"));
}

absl::Status SharedMemory::CheckPlace(const std::string& name) const {
  MutexLock lock(mutex_);
  return CheckPlaceLocked(name);
}

absl::Status SharedMemory::Add(Kind kind, Description description,
                               std::shared_ptr<const Region> region) {
  MutexLock lock(mutex_);
  RAPT_RETURN_IF_ERROR(CheckPlaceLocked(description.name));
  const std::string name = description.name;
  entries_.emplace(name, Entry{kind, std::move(description), std::move(region)});
  return absl::OkStatus();
}

absl::Status SharedMemory::RegisterSystem(const std::string& name, const std::string& key,
                                          uint64_t offset, uint64_t byte_size) {
  RAPT_RETURN_IF_ERROR(CheckAllowed());
  RAPT_RETURN_IF_ERROR(CheckName(name));
  const absl::StatusOr<int64_t> begin = ToSigned("offset", offset);
  const absl::StatusOr<int64_t> size = ToSigned("byte_size", byte_size);
  absl::Status status = begin.status();
  status.Update(size.status());
  if (status.ok()) status = CheckKey(key);
  if (status.ok()) status = CheckPlace(name);
  if (!status.ok()) return ForRegion(name, status);
  absl::StatusOr<std::shared_ptr<const Region>> region = OpenSystemRegion(key, *begin, *size);
  if (!region.ok()) return ForRegion(name, region.status());
  status =
      Add(Kind::kSystem, {.name = name, .offset = *begin, .byte_size = *size}, *std::move(region));
  return status.ok() ? status : ForRegion(name, status);
}

absl::Status SharedMemory::RegisterCuda(const std::string& name, const std::string& raw_handle,
                                        int64_t device_id, uint64_t byte_size) {
  RAPT_RETURN_IF_ERROR(CheckAllowed());
  RAPT_RETURN_IF_ERROR(CheckName(name));
  if (!options_.open_cuda) {
    return absl::UnimplementedError(
        "CUDA shared memory needs a server that uses a GPU: start it with --backend=cudnn or "
        "--cudnn_memory_bytes on a machine with a GPU");
  }
  const absl::StatusOr<int64_t> size = ToSigned("byte_size", byte_size);
  absl::Status status = size.status();
  if (status.ok()) status = CheckPlace(name);
  if (!status.ok()) return ForRegion(name, status);
  absl::StatusOr<std::shared_ptr<const DeviceMemory>> memory =
      options_.open_cuda(raw_handle, device_id, *size);
  if (!memory.ok()) return ForRegion(name, memory.status());
  status = Add(Kind::kCuda, {.name = name, .device_id = device_id, .byte_size = *size},
               std::make_shared<const CudaRegion>(*std::move(memory)));
  return status.ok() ? status : ForRegion(name, status);
}

absl::Status SharedMemory::Unregister(Kind kind, const std::string& name) {
  RAPT_RETURN_IF_ERROR(CheckAllowed());
  std::map<std::string, Entry> removed;  // destroyed, and unmapped, after the lock is released
  MutexLock lock(mutex_);
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto next = std::next(entry);
    const bool matches = entry->second.kind == kind && (name.empty() || entry->first == name);
    if (matches) removed.insert(entries_.extract(entry));
    entry = next;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<SharedMemory::Description>> SharedMemory::Describe(
    Kind kind, const std::string& name) const {
  RAPT_RETURN_IF_ERROR(CheckAllowed());
  std::vector<Description> found;
  {
    MutexLock lock(mutex_);
    for (const auto& [entry_name, entry] : entries_) {
      const bool matches = entry.kind == kind && (name.empty() || entry_name == name);
      if (matches) found.push_back(entry.description);
    }
  }
  if (found.empty() && !name.empty()) return UnknownRegion(name);
  return found;
}

absl::StatusOr<SharedBytes> SharedMemory::Find(const SharedReference& reference) const {
  RAPT_RETURN_IF_ERROR(CheckAllowed());
  std::shared_ptr<const Region> region;
  {
    MutexLock lock(mutex_);
    const auto entry = entries_.find(reference.region);
    if (entry != entries_.end()) region = entry->second.region;
  }
  if (region == nullptr) return UnknownRegion(reference.region);
  if (!region->intact()) return ForRegion(reference.region, BrokenRegion());
  const absl::Span<std::byte> bytes = region->bytes();
  const DeviceMemory* const device = region->device();
  const int64_t size = device == nullptr ? static_cast<int64_t>(bytes.size()) : device->size();
  const std::optional<int64_t> end = CheckedAdd(reference.offset, reference.byte_size);
  const bool fits = reference.offset >= 0 && reference.byte_size >= 0 && end && *end <= size;
  if (!fits) {
    return ForRegion(reference.region,
                     Invalid("offset ", reference.offset, " and byte_size ", reference.byte_size,
                             " exceed its ", size, " bytes"));
  }
  if (device != nullptr) return SharedBytes{{}, {device, reference.offset}, std::move(region)};
  return SharedBytes{bytes.subspan(static_cast<size_t>(reference.offset),
                                   static_cast<size_t>(reference.byte_size)),
                     {},
                     std::move(region)};
}

}  // namespace rapt
