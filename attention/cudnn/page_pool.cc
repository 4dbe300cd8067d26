#include "attention/cudnn/page_pool.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace rapt::cudnn {
namespace {

absl::Status NotFinite() { return absl::OutOfRangeError("a page has a number that is not finite"); }

}  // namespace

PagePool::PagePool(int64_t memory_bytes)
    : segment_bytes_(memory_bytes / static_cast<int64_t>(kSegments)),
      counts_{.memory_bytes = memory_bytes} {}

int64_t PagePool::Lease::page(size_t use) const { return copies_[use]->page; }

std::pair<int64_t, int64_t> PagePool::PagesIn(size_t segment, int64_t page_bytes) const {
  const int64_t begin = static_cast<int64_t>(segment) * segment_bytes_;
  return {CeilDiv(begin, page_bytes), (begin + segment_bytes_) / page_bytes};
}

int64_t PagePool::CapacityOf(int64_t page_bytes) const {
  int64_t pages = 0;
  for (size_t segment = 0; segment < kSegments; ++segment) {
    const auto [first, end] = PagesIn(segment, page_bytes);
    pages += std::max<int64_t>(0, end - first);
  }
  return pages;
}

absl::StatusOr<PagePool::Lease> PagePool::Acquire(int64_t page_bytes,
                                                  absl::Span<const PageUse> uses, Fill fill) {
  Lease lease(*this);
  {
    MutexLock lock(mutex_);
    if (PinComplete(uses, lease)) return lease;  // does not wait for copies of other runs
  }
  MutexLock filling(fill_mutex_);
  absl::StatusOr<std::vector<MissingRows>> missing;
  {
    MutexLock lock(mutex_);
    missing = Pin(page_bytes, uses, lease);
  }
  if (!missing.ok()) return missing.status();
  if (missing->empty()) return lease;
  RAPT_RETURN_IF_ERROR(fill(absl::MakeSpan(*missing)));
  RAPT_RETURN_IF_ERROR(Publish(*missing, lease));
  return lease;
}

absl::Status PagePool::Publish(absl::Span<const MissingRows> filled, const Lease& lease) {
  MutexLock lock(mutex_);
  absl::Status status;
  for (const MissingRows& rows : filled) {
    Copy& copy = *lease.copies_[rows.use];
    counts_.copied_bytes += rows.copied_bytes;
    copy.is_finite = rows.is_finite;
    if (copy.is_finite) {
      copy.rows = rows.rows;
    } else {
      status = NotFinite();
    }
  }
  return status;
}

bool PagePool::PinComplete(absl::Span<const PageUse> uses, Lease& lease) {
  for (const PageUse& use : uses) {
    const auto found = by_id_.find(use.id);
    if (found == by_id_.end()) return false;
    const Copy& copy = *found->second;
    if (!copy.is_finite || copy.rows < use.rows) return false;
  }
  for (const PageUse& use : uses) PinOne(by_id_.find(use.id)->second, lease);
  counts_.hits += static_cast<int64_t>(uses.size());
  return true;
}

void PagePool::PinOne(Copies::iterator copy, Lease& lease) {
  copies_.splice(copies_.end(), copies_, copy);
  ++copy->pins;
  ++segments_[copy->segment].pins;
  lease.copies_.push_back(copy);
}

absl::StatusOr<std::vector<MissingRows>> PagePool::Pin(int64_t page_bytes,
                                                       absl::Span<const PageUse> uses,
                                                       Lease& lease) {
  const auto fail = [&](absl::Status status) {
    for (const auto& copy : lease.copies_) copy->wanted = 0;
    return status;
  };
  for (const PageUse& use : uses) {
    const auto copy = FindOrAdd(use.id, page_bytes);
    if (copy == copies_.end()) {
      return fail(absl::ResourceExhaustedError(
          absl::StrCat("the device has no room for the ", uses.size(), " pages of a run")));
    }
    if (!copy->is_finite) return fail(NotFinite());
    PinOne(copy, lease);
    copy->wanted = std::max(copy->wanted, use.rows);
    copy->rows < use.rows ? ++counts_.misses : ++counts_.hits;
  }
  std::vector<MissingRows> missing;
  for (size_t use = 0; use < uses.size(); ++use) {
    Copy& copy = *lease.copies_[use];
    if (copy.rows < copy.wanted) {
      missing.push_back({.use = use,
                         .offset = copy.page * page_bytes,
                         .first_row = copy.rows,
                         .rows = copy.wanted});
    }
    copy.wanted = 0;  // once for each page
  }
  return missing;
}

void PagePool::Unpin(absl::Span<const Copies::iterator> copies) {
  MutexLock lock(mutex_);
  for (const auto& copy : copies) {
    --copy->pins;
    --segments_[copy->segment].pins;
  }
}

PagePool::Copies::iterator PagePool::FindOrAdd(uint64_t id, int64_t page_bytes) {
  if (const auto found = by_id_.find(id); found != by_id_.end()) return found->second;
  size_t segment = SegmentWithRoom(page_bytes);
  if (segment == kSegments && Evict(page_bytes)) segment = SegmentWithRoom(page_bytes);
  if (segment == kSegments) return copies_.end();
  Segment& place = segments_[segment];
  const int64_t page = place.free.back();
  place.free.pop_back();
  ++place.used;
  counts_.resident_bytes += page_bytes;
  const auto copy = copies_.insert(
      copies_.end(), {.id = id, .page_bytes = page_bytes, .segment = segment, .page = page});
  by_id_[id] = copy;
  return copy;
}

size_t PagePool::SegmentWithRoom(int64_t page_bytes) {
  for (size_t n = 0; n < kSegments; ++n) {
    if (segments_[n].page_bytes == page_bytes && !segments_[n].free.empty()) return n;
  }
  for (size_t n = 0; n < kSegments; ++n) {
    Segment& segment = segments_[n];
    const auto [first, end] = PagesIn(n, page_bytes);
    if (segment.used > 0 || first >= end) continue;
    segment.page_bytes = page_bytes;
    segment.free.clear();
    for (int64_t page = end; page > first; --page) segment.free.push_back(page - 1);
    return n;
  }
  return kSegments;
}

bool PagePool::Evict(int64_t page_bytes) {
  for (auto copy = copies_.begin(); copy != copies_.end(); ++copy) {
    if (copy->pins > 0) continue;
    if (copy->page_bytes == page_bytes) {
      Drop(copy);
      return true;
    }
    const size_t segment = copy->segment;
    const auto [first, end] = PagesIn(segment, page_bytes);
    if (segments_[segment].pins > 0 || first >= end) continue;
    for (auto other = copy; other != copies_.end();) {
      other = other->segment == segment ? Drop(other) : std::next(other);
    }
    return true;
  }
  return false;
}

PagePool::Copies::iterator PagePool::Drop(Copies::iterator copy) {
  Segment& segment = segments_[copy->segment];
  segment.free.push_back(copy->page);
  --segment.used;
  counts_.resident_bytes -= copy->page_bytes;
  ++counts_.evictions;
  by_id_.erase(copy->id);
  return copies_.erase(copy);
}

void PagePool::Clear() {
  MutexLock lock(mutex_);
  copies_.clear();
  by_id_.clear();
  segments_ = {};
  counts_.resident_bytes = 0;
}

PagePool::Counts PagePool::counts() const {
  MutexLock lock(mutex_);
  return counts_;
}

}  // namespace rapt::cudnn
