#include "server/protocols/shared_tensors.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt {

absl::StatusOr<OutputPlace> SharedTensors::Find(const std::string& field,
                                                const SharedReference& reference) {
  absl::StatusOr<SharedBytes> found = shared_memory_.Find(reference);
  if (!found.ok()) {
    return absl::Status(found.status().code(), absl::StrCat(field, ": ", found.status().message()));
  }
  const OutputPlace place{found->bytes, found->device};
  if (std::find(regions_.begin(), regions_.end(), found->region) == regions_.end()) {
    regions_.push_back(std::move(found->region));
  }
  return place;
}

absl::StatusOr<InputBytes> SharedTensors::FindInput(const std::string& field,
                                                    const SharedReference& reference,
                                                    int64_t bytes) {
  if (reference.byte_size != bytes) {
    return Invalid(field, " has ", reference.byte_size, " bytes of shared memory; its shape needs ",
                   bytes);
  }
  RAPT_ASSIGN_OR_RETURN(const OutputPlace found, Find(field, reference));
  if (found.device.memory != nullptr) return InputBytes(found.device, bytes);
  InputBytes input(found.bytes.data(), bytes);
  input.is_shared = true;
  return input;
}

absl::StatusOr<OutputPlace> SharedTensors::FindOutput(const std::string& field,
                                                      const SharedReference& reference,
                                                      const TensorSpec& spec) {
  RAPT_ASSIGN_OR_RETURN(const int64_t bytes, ByteSize(field, spec));
  if (reference.byte_size < bytes) {
    return Invalid(field, " has ", reference.byte_size, " bytes of shared memory; it needs ",
                   bytes);
  }
  absl::StatusOr<OutputPlace> found = Find(field, reference);
  if (!found.ok() || found->device.memory != nullptr) return found;
  if (reinterpret_cast<uintptr_t>(found->bytes.data()) %
          static_cast<uintptr_t>(SizeOf(spec.dtype)) !=
      0) {
    return Invalid(field, " begins at offset ", reference.offset,
                   " of its region, which is not aligned to the ", SizeOf(spec.dtype), " bytes of ",
                   NameOf(spec.dtype));
  }
  found->bytes = found->bytes.subspan(0, static_cast<size_t>(bytes));
  return found;
}

void SharedTensors::TransferTo(Request& request) && {
  if (regions_.empty()) return;
  using Regions = std::vector<std::shared_ptr<const Region>>;
  // A request has one owner pointer, so this one owns the previous one.
  struct Owners {
    Regions regions;
    std::shared_ptr<const void> other;
  };
  auto owners =
      std::make_shared<const Owners>(Owners{std::move(regions_), std::move(request.owner)});
  request.check_shared_memory = [&regions = owners->regions] {
    const bool intact = std::all_of(regions.begin(), regions.end(),
                                    [](const auto& region) { return region->intact(); });
    return intact ? absl::OkStatus() : BrokenRegion();
  };
  request.owner = std::move(owners);
}

}  // namespace rapt
