// Copies of pages of keys and values in a device's memory.
#ifndef RAPT_ATTENTION_CUDNN_PAGE_POOL_H_
#define RAPT_ATTENTION_CUDNN_PAGE_POOL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/mutex.h"

namespace rapt::cudnn {

// A page that a run reads.
struct PageUse {
  uint64_t id = 0;   // of its content; rows may be added to it, but none changes
  int64_t rows = 0;  // the first rows, which the copy must have; at least 1
};

// Rows [first_row, rows) that a copy lacks. If first_row is 0, the copy is new and has any content:
// what lies beyond the rows must become zeros, because kernels multiply it by weights of 0.
struct MissingRows {
  size_t use = 0;      // the index of a use of the page
  int64_t offset = 0;  // of the page in the device's memory
  int64_t first_row = 0;
  int64_t rows = 0;
  // Set by who copies them. Rows with a NaN or an infinity are not copied.
  bool is_finite = true;
  int64_t copied_bytes = 0;
};

// Decides which pages have a copy and where. The memory is divided into segments, each with pages
// of one size; a page's offset is a multiple of its size. If there is no room, the copy that was
// used longest ago makes room, or the segment that it is in for pages of another size. The pages of
// a freed cache need no notice: their ids are never used again, so their copies become the oldest.
//
// Thread-safe.
class PagePool {
  struct Copy;
  using Copies = std::list<Copy>;

 public:
  explicit PagePool(int64_t memory_bytes);

  // The copies of a run's pages, which stay until its destruction. Move-only.
  class Lease {
   public:
    Lease(Lease&& other) noexcept : pool_(other.pool_), copies_(std::exchange(other.copies_, {})) {}
    Lease& operator=(Lease&&) = delete;
    ~Lease() { pool_.Unpin(copies_); }

    // Returns the number of the page of a use: its offset divided by the page's size.
    int64_t page(size_t use) const;

   private:
    friend class PagePool;
    explicit Lease(PagePool& pool) : pool_(pool) {}

    PagePool& pool_;
    std::vector<Copies::iterator> copies_;  // of each use
  };

  // Copies missing rows to the device.
  using Fill = absl::FunctionRef<absl::Status(absl::Span<MissingRows>)>;

  // Makes copies of all pages complete, and calls `fill` if rows are missing. One caller fills at a
  // time. Returns ResourceExhausted if the pages do not fit beside those of other leases,
  // OutOfRange if a page has a number that is not finite, or the error of `fill`. REQUIRES: pages
  // of one id have one size.
  absl::StatusOr<Lease> Acquire(int64_t page_bytes, absl::Span<const PageUse> uses, Fill fill);

  // Forgets all copies. REQUIRES: there is no lease.
  void Clear();

  // Returns the number of pages of this size that fit.
  int64_t CapacityOf(int64_t page_bytes) const;

  struct Counts {
    int64_t memory_bytes = 0;
    int64_t resident_bytes = 0;
    int64_t copied_bytes = 0;
    int64_t hits = 0;    // uses of a complete copy
    int64_t misses = 0;  // uses of a page that lacked rows
    int64_t evictions = 0;
  };
  Counts counts() const;

 private:
  static constexpr size_t kSegments = 16;

  struct Copy {
    uint64_t id = 0;
    int64_t page_bytes = 0;
    size_t segment = 0;
    int64_t page = 0;  // number
    int64_t rows = 0;
    int64_t wanted = 0;  // rows, by the caller that fills
    int pins = 0;
    bool is_finite = true;
  };
  struct Segment {
    int64_t page_bytes = 0;     // 0: not in use yet
    std::vector<int64_t> free;  // numbers of pages
    int64_t used = 0;           // pages
    int pins = 0;               // of its copies
  };

  // Pins the copies of all uses if none lacks rows; otherwise returns false.
  bool PinComplete(absl::Span<const PageUse> uses, Lease& lease)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PinOne(Copies::iterator copy, Lease& lease) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Pins the copies of all uses. Returns the rows that they lack.
  absl::StatusOr<std::vector<MissingRows>> Pin(int64_t page_bytes, absl::Span<const PageUse> uses,
                                               Lease& lease) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes the rows that were copied part of their copies.
  absl::Status Publish(absl::Span<const MissingRows> filled, const Lease& lease);
  void Unpin(absl::Span<const Copies::iterator> copies);
  // Returns the copy, which may be new; end() if there is no room.
  Copies::iterator FindOrAdd(uint64_t id, int64_t page_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns a segment with a free page; kSegments if there is none.
  size_t SegmentWithRoom(int64_t page_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns whether copies made room for a page.
  bool Evict(int64_t page_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Copies::iterator Drop(Copies::iterator copy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the first number of a segment's pages and the one after the last.
  std::pair<int64_t, int64_t> PagesIn(size_t segment, int64_t page_bytes) const;

  const int64_t segment_bytes_;
  Mutex fill_mutex_;  // held while rows are copied; before mutex_
  mutable Mutex mutex_;
  Copies copies_ ABSL_GUARDED_BY(mutex_);  // used longest ago first
  std::unordered_map<uint64_t, Copies::iterator> by_id_ ABSL_GUARDED_BY(mutex_);
  std::array<Segment, kSegments> segments_ ABSL_GUARDED_BY(mutex_);
  Counts counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_PAGE_POOL_H_
