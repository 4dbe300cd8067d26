// The one budget that every byte which grows with a request is charged to, before it is allocated.
#ifndef RAPT_SERVER_ADMISSION_MEMORY_BUDGET_H_
#define RAPT_SERVER_ADMISSION_MEMORY_BUDGET_H_

#include <atomic>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "server/base/aligned_buffer.h"

namespace rapt {

// Thread-safe. Outlives its reservations.
class MemoryBudget {
 public:
  // Bytes taken from the budget, given back on destruction. Movable; not thread-safe.
  class Reservation {
   public:
    Reservation() = default;
    Reservation(Reservation&& other) noexcept { *this = std::move(other); }
    Reservation& operator=(Reservation&& other) noexcept;
    ~Reservation() { Release(); }

    int64_t bytes() const { return bytes_; }

    // Moves `bytes` of this one, at most all of them, into a new one.
    Reservation Split(int64_t bytes);

   private:
    friend class MemoryBudget;
    Reservation(MemoryBudget* budget, int64_t bytes) : budget_(budget), bytes_(bytes) {}
    void Release();

    MemoryBudget* budget_ = nullptr;
    int64_t bytes_ = 0;
  };

  explicit MemoryBudget(int64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  // ResourceExhausted, with the bytes needed and allowed, where they are not free now.
  absl::StatusOr<Reservation> Reserve(int64_t bytes);

  int64_t capacity_bytes() const { return capacity_bytes_; }
  int64_t reserved_bytes() const { return reserved_bytes_.load(std::memory_order_relaxed); }

 private:
  const int64_t capacity_bytes_;
  std::atomic<int64_t> reserved_bytes_{0};
};

// Memory that is charged to a budget as long as it lives.
struct ReservedBuffer {
  MemoryBudget::Reservation reservation;
  AlignedBuffer buffer;
};

// As many bytes as are reserved. ResourceExhausted where the system has fewer than the budget says.
absl::StatusOr<ReservedBuffer> Allocate(MemoryBudget::Reservation reservation);

}  // namespace rapt

#endif  // RAPT_SERVER_ADMISSION_MEMORY_BUDGET_H_
