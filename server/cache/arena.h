// Memory for the pages of resident keys and values, within a fixed limit.
#ifndef RAPT_SERVER_CACHE_ARENA_H_
#define RAPT_SERVER_CACHE_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/mutex.h"

namespace rapt::cache {

// Pages of one size lie one after the other in a zone of addresses, so that no page size wastes
// memory. A zone takes and returns memory in slabs of 2 MiB, which the system may back with huge
// pages. A slab counts towards the limit while one of its pages is in use. New pages take the
// lowest free place of their zone, which keeps the number of slabs small.
//
// Thread-safe. REQUIRES: outlives its pages.
class Arena {
  struct Zone;

 public:
  static constexpr int64_t kSlabBytes = int64_t{2} << 20;
  static constexpr int64_t kPageAlignment = 64;

  // Memory of a fixed size, aligned to a cache line, with any content. Returned to the arena on
  // destruction. Move-only.
  class Page {
   public:
    Page() = default;
    Page(Page&& other) noexcept { *this = std::move(other); }
    Page& operator=(Page&& other) noexcept {
      std::swap(arena_, other.arena_);
      std::swap(zone_, other.zone_);
      std::swap(index_, other.index_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Page() {
      if (arena_ != nullptr) arena_->GiveBack(*zone_, index_);
    }

    absl::Span<std::byte> bytes() const { return bytes_; }

   private:
    friend class Arena;
    Page(Arena* arena, Zone* zone, int64_t index, absl::Span<std::byte> bytes)
        : arena_(arena), zone_(zone), index_(index), bytes_(bytes) {}

    Arena* arena_ = nullptr;
    Zone* zone_ = nullptr;
    int64_t index_ = 0;
    absl::Span<std::byte> bytes_;
  };

  // Memory of other kinds that counts towards the limit, such as tables of pages. Returned on
  // destruction. Move-only.
  class Charge {
   public:
    Charge() = default;
    Charge(Charge&& other) noexcept { *this = std::move(other); }
    Charge& operator=(Charge&& other) noexcept {
      std::swap(arena_, other.arena_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Charge() {
      if (arena_ != nullptr) arena_->Uncharge(bytes_);
    }

   private:
    friend class Arena;
    Charge(Arena* arena, int64_t bytes) : arena_(arena), bytes_(bytes) {}

    Arena* arena_ = nullptr;
    int64_t bytes_ = 0;
  };

  // The limit is `capacity_bytes`, rounded down to whole slabs.
  explicit Arena(int64_t capacity_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Returns `count` pages, or ResourceExhausted with the needed and the free bytes. Then none is
  // taken. REQUIRES: page_bytes >= 1, count >= 0.
  absl::StatusOr<std::vector<Page>> Take(int64_t page_bytes, int64_t count);

  // Counts memory that the caller allocates. ResourceExhausted as Take().
  absl::StatusOr<Charge> TryCharge(int64_t bytes);
  // The same even beyond the limit, so that others are refused. REQUIRES: other memory of the same
  // kind is returned soon.
  Charge ChargeAnyway(int64_t bytes);

  int64_t capacity_bytes() const { return capacity_bytes_; }
  // Returns the bytes of the pages in use.
  int64_t used_bytes() const;
  // Returns the bytes that count towards the limit: of slabs in use and charges.
  int64_t committed_bytes() const;

 private:
  absl::StatusOr<Zone*> FindZone(int64_t page_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns whether the zone had room for one more page, which it appends to `pages`.
  bool TakeOne(Zone& zone, std::vector<Page>& pages) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Fits(const Zone& zone, int64_t index) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveBack(Zone& zone, int64_t index);
  void Uncharge(int64_t bytes);
  void GiveBackLocked(Zone& zone, int64_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Refuse(int64_t page_bytes, int64_t count) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t capacity_bytes_;
  mutable Mutex mutex_;
  std::map<int64_t, std::unique_ptr<Zone>> zones_ ABSL_GUARDED_BY(mutex_);  // by page bytes
  int64_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t committed_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace rapt::cache

#endif  // RAPT_SERVER_CACHE_ARENA_H_
