// A budget in bytes. Everything that grows with a request is charged to it before it is allocated.
#ifndef RAPT_SERVER_ADMISSION_MEMORY_BUDGET_H_
#define RAPT_SERVER_ADMISSION_MEMORY_BUDGET_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "base/buffer_pool.h"
#include "server/admission/caller_memory.h"

namespace rapt {

// Thread-safe. REQUIRES: outlives its reservations.
class MemoryBudget {
 public:
  // Bytes reserved from the budget, released on destruction. Movable; not thread-safe.
  class Reservation {
   public:
    Reservation() = default;
    Reservation(Reservation&& other) noexcept { *this = std::move(other); }
    Reservation& operator=(Reservation&& other) noexcept;
    ~Reservation() { Release(); }

    int64_t bytes() const { return bytes_; }

    // Moves `bytes` of this reservation into a new one. REQUIRES: 0 <= bytes <= bytes().
    Reservation Split(int64_t bytes);

   private:
    friend class MemoryBudget;
    Reservation(MemoryBudget* budget, int64_t bytes, std::shared_ptr<CallerBytes> caller)
        : budget_(budget), bytes_(bytes), caller_(std::move(caller)) {}
    void Release();

    MemoryBudget* budget_ = nullptr;
    int64_t bytes_ = 0;
    std::shared_ptr<CallerBytes> caller_;
  };

  // `on_release` is called after bytes are released, on the releasing thread and under whatever
  // locks it holds. It must do no more than wake another thread.
  // `for_small`: the bytes count as CallerBytes::held_for_small() too.
  explicit MemoryBudget(
      int64_t capacity_bytes, std::function<void()> on_release = [] {}, bool for_small = false)
      : capacity_bytes_(capacity_bytes),
        on_release_(std::move(on_release)),
        for_small_(for_small) {}
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  // Returns nullopt if the bytes are not free now. They are counted as held by `caller`, unless it
  // is null.
  std::optional<Reservation> Reserve(int64_t bytes, std::shared_ptr<CallerBytes> caller = nullptr);
  // Always succeeds, for bytes that exist already, and may exceed the capacity; then Reserve()
  // fails until enough has been released.
  Reservation Charge(int64_t bytes, std::shared_ptr<CallerBytes> caller = nullptr);

  int64_t capacity_bytes() const { return capacity_bytes_; }
  int64_t reserved_bytes() const { return reserved_bytes_.load(); }
  int64_t free_bytes() const { return capacity_bytes_ - reserved_bytes(); }

 private:
  Reservation Make(int64_t bytes, std::shared_ptr<CallerBytes> caller);

  const int64_t capacity_bytes_;
  const std::function<void()> on_release_;
  const bool for_small_;
  // Sequentially consistent: a thread that releases and then checks for waiters, and a thread that
  // waits and then checks for free bytes, must not both find nothing.
  std::atomic<int64_t> reserved_bytes_{0};
};

// A buffer that is charged to a budget for its lifetime.
struct ReservedBuffer {
  MemoryBudget::Reservation reservation;
  PooledBuffer buffer;
};

// Returns a buffer of `bytes`, or ResourceExhausted if the system is out of memory.
// REQUIRES: reservation.bytes() == BufferPool::SizeOfClass(bytes).
absl::StatusOr<ReservedBuffer> Allocate(BufferPool& pool, int64_t bytes,
                                        MemoryBudget::Reservation reservation);

// The same, charged to bytes split from `from`.
absl::StatusOr<ReservedBuffer> AllocatePart(BufferPool& pool, int64_t bytes,
                                            MemoryBudget::Reservation& from);

}  // namespace rapt

#endif  // RAPT_SERVER_ADMISSION_MEMORY_BUDGET_H_
