#include "server/cache/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/checked_math.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace rapt::cache {

// Addresses for as many pages of one size as the arena could ever hold. Without pages a zone has no
// memory and is unmapped.
struct Arena::Zone {
  ~Zone() { munmap(mapping, static_cast<size_t>(mapped_bytes)); }

  // The slabs [first, last] of a page.
  int64_t FirstSlab(int64_t index) const { return index * page_bytes / kSlabBytes; }
  int64_t LastSlab(int64_t index) const { return ((index + 1) * page_bytes - 1) / kSlabBytes; }
  std::byte* Slab(int64_t slab) const { return begin + slab * kSlabBytes; }

  void* mapping = nullptr;
  int64_t mapped_bytes = 0;
  std::byte* begin = nullptr;  // aligned to a slab
  int64_t page_bytes = 0;
  int64_t most_pages = 0;
  int64_t used_pages = 0;
  int64_t end = 0;                   // all pages from here on are free
  std::set<int64_t> free;            // below `end`
  std::vector<int64_t> pages_using;  // of each slab; as long as was needed so far
};

Arena::Arena(int64_t capacity_bytes) : capacity_bytes_(capacity_bytes / kSlabBytes * kSlabBytes) {}

Arena::~Arena() {
  MutexLock lock(mutex_);
  RAPT_CHECK(used_bytes_ == 0, "the arena outlives its pages");
}

int64_t Arena::used_bytes() const {
  MutexLock lock(mutex_);
  return used_bytes_;
}

int64_t Arena::committed_bytes() const {
  MutexLock lock(mutex_);
  return committed_bytes_;
}

absl::StatusOr<std::vector<Arena::Page>> Arena::Take(int64_t page_bytes, int64_t count) {
  std::vector<Page> pages;
  if (count == 0) return pages;
  MutexLock lock(mutex_);
  // Without this an absurd count would be tried page by page. It also bounds the arithmetic below.
  if (page_bytes > capacity_bytes_ || count > capacity_bytes_ / page_bytes) {
    return Refuse(page_bytes, count);
  }
  RAPT_ASSIGN_OR_RETURN(Zone* const zone, FindZone(RoundUp(page_bytes, kPageAlignment)));
  pages.reserve(static_cast<size_t>(count));
  for (int64_t n = 0; n < count; ++n) {
    if (TakeOne(*zone, pages)) continue;
    for (Page& page : pages) {
      page.arena_ = nullptr;  // its destructor would wait for the lock
      GiveBackLocked(*zone, page.index_);
    }
    // A zone without pages ends with the last of them; one that never had any ends here.
    if (pages.empty() && zone->used_pages == 0) zones_.erase(zone->page_bytes);
    return Refuse(page_bytes, count);
  }
  return pages;
}

absl::StatusOr<Arena::Zone*> Arena::FindZone(int64_t page_bytes) {
  std::unique_ptr<Zone>& zone = zones_[page_bytes];
  if (zone != nullptr) return zone.get();
  // One more slab for the alignment, and one for the last page, which may begin in the last slab.
  const int64_t bytes = capacity_bytes_ + 2 * kSlabBytes;
  void* const mapping = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    const int error = errno;
    zones_.erase(page_bytes);
    return absl::ResourceExhaustedError(absl::StrCat("the system has no addresses for pages of ",
                                                     page_bytes, " bytes: ", std::strerror(error)));
  }
  zone = std::make_unique<Zone>();
  zone->mapping = mapping;
  zone->mapped_bytes = bytes;
  const auto address = reinterpret_cast<uintptr_t>(mapping);
  const auto slab = static_cast<uintptr_t>(kSlabBytes);
  zone->begin = static_cast<std::byte*>(mapping) + (slab - address % slab) % slab;
  zone->page_bytes = page_bytes;
  zone->most_pages = capacity_bytes_ / page_bytes;
  // Both are advice: without huge pages reading is slower, and a core dump is larger.
  madvise(mapping, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  madvise(mapping, static_cast<size_t>(bytes), MADV_DONTDUMP);
  return zone.get();
}

absl::StatusOr<Arena::Charge> Arena::TryCharge(int64_t bytes) {
  MutexLock lock(mutex_);
  if (bytes > capacity_bytes_ - committed_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("needs ", bytes, " bytes for tables of pages, ",
                     std::max<int64_t>(0, capacity_bytes_ - committed_bytes_), " are free"));
  }
  committed_bytes_ += bytes;
  return Charge(this, bytes);
}

Arena::Charge Arena::ChargeAnyway(int64_t bytes) {
  MutexLock lock(mutex_);
  committed_bytes_ += bytes;
  return Charge(this, bytes);
}

void Arena::Uncharge(int64_t bytes) {
  MutexLock lock(mutex_);
  committed_bytes_ -= bytes;
}

bool Arena::Fits(const Zone& zone, int64_t index) const {
  int64_t new_bytes = 0;
  for (int64_t slab = zone.FirstSlab(index); slab <= zone.LastSlab(index); ++slab) {
    const bool is_used =
        slab < static_cast<int64_t>(zone.pages_using.size()) && zone.pages_using[slab] > 0;
    if (!is_used) new_bytes += kSlabBytes;
  }
  return committed_bytes_ + new_bytes <= capacity_bytes_;
}

bool Arena::TakeOne(Zone& zone, std::vector<Page>& pages) {
  std::optional<int64_t> index;
  for (const int64_t candidate : zone.free) {
    // Once the slabs are used up, only a place in a slab in use fits.
    if (!Fits(zone, candidate)) continue;
    index = candidate;
    break;
  }
  if (index) {
    zone.free.erase(*index);
  } else {
    if (zone.end == zone.most_pages || !Fits(zone, zone.end)) return false;
    index = zone.end++;
  }
  if (zone.LastSlab(*index) >= static_cast<int64_t>(zone.pages_using.size())) {
    zone.pages_using.resize(static_cast<size_t>(zone.LastSlab(*index) + 1));
  }
  for (int64_t slab = zone.FirstSlab(*index); slab <= zone.LastSlab(*index); ++slab) {
    if (zone.pages_using[slab]++ == 0) committed_bytes_ += kSlabBytes;
  }
  ++zone.used_pages;
  used_bytes_ += zone.page_bytes;
  pages.push_back(
      Page(this, &zone, *index,
           {zone.begin + *index * zone.page_bytes, static_cast<size_t>(zone.page_bytes)}));
  return true;
}

void Arena::GiveBack(Zone& zone, int64_t index) {
  MutexLock lock(mutex_);
  GiveBackLocked(zone, index);
}

void Arena::GiveBackLocked(Zone& zone, int64_t index) {
  for (int64_t slab = zone.FirstSlab(index); slab <= zone.LastSlab(index); ++slab) {
    if (--zone.pages_using[slab] > 0) continue;
    committed_bytes_ -= kSlabBytes;
    // The memory returns to the system before another zone may take as much.
    madvise(zone.Slab(slab), static_cast<size_t>(kSlabBytes), MADV_DONTNEED);
  }
  used_bytes_ -= zone.page_bytes;
  if (--zone.used_pages == 0) {
    zones_.erase(zone.page_bytes);
    return;
  }
  zone.free.insert(index);
}

absl::Status Arena::Refuse(int64_t page_bytes, int64_t count) const {
  const int64_t needed =
      CheckedMul(page_bytes, count).value_or(std::numeric_limits<int64_t>::max());
  const int64_t free_slabs = std::max<int64_t>(0, capacity_bytes_ - committed_bytes_) / kSlabBytes;
  int64_t free_bytes = free_slabs * kSlabBytes;
  const auto zone = zones_.find(RoundUp(std::min(page_bytes, capacity_bytes_), kPageAlignment));
  if (zone != zones_.end()) {
    // Of the slabs in use, only pages of the same size can take what is free.
    for (const int64_t pages : zone->second->pages_using) free_bytes += pages > 0 ? kSlabBytes : 0;
    free_bytes -= zone->second->used_pages * zone->second->page_bytes;
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("needs ", needed, " bytes of pages, ", free_bytes, " are free"));
}

}  // namespace rapt::cache
