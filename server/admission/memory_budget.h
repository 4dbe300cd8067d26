// A number of bytes that everything which grows with a request is charged to before it is
// allocated.
#ifndef RAPT_SERVER_ADMISSION_MEMORY_BUDGET_H_
#define RAPT_SERVER_ADMISSION_MEMORY_BUDGET_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "base/buffer_pool.h"

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

  // `on_release` is called whenever bytes have come back, on whatever thread gave them back and
  // with whatever locks it holds: it must do no more than wake somebody.
  explicit MemoryBudget(
      int64_t capacity_bytes, std::function<void()> on_release = [] {})
      : capacity_bytes_(capacity_bytes), on_release_(std::move(on_release)) {}
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  // Nothing where they are not free now.
  std::optional<Reservation> Reserve(int64_t bytes);
  // Whether they are free or not, for bytes that exist already: until as many have come back,
  // nothing is.
  Reservation Charge(int64_t bytes);

  int64_t capacity_bytes() const { return capacity_bytes_; }
  int64_t reserved_bytes() const { return reserved_bytes_.load(); }

 private:
  const int64_t capacity_bytes_;
  const std::function<void()> on_release_;
  // Sequentially consistent: who gives back and then looks for somebody waiting, and who waits and
  // then looks for free bytes, must not both find nothing.
  std::atomic<int64_t> reserved_bytes_{0};
};

// Memory that is charged to a budget as long as it lives.
struct ReservedBuffer {
  MemoryBudget::Reservation reservation;
  PooledBuffer buffer;
};

// A buffer of so many bytes; `reservation` is of BufferPool::SizeOfClass(bytes). ResourceExhausted
// where the system has fewer than the budget says.
absl::StatusOr<ReservedBuffer> Allocate(BufferPool& pool, int64_t bytes,
                                        MemoryBudget::Reservation reservation);

// The same, charged to a part of what `from` has.
absl::StatusOr<ReservedBuffer> AllocatePart(BufferPool& pool, int64_t bytes,
                                            MemoryBudget::Reservation& from);

}  // namespace rapt

#endif  // RAPT_SERVER_ADMISSION_MEMORY_BUDGET_H_
