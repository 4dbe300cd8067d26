#ifndef RAPT_SERVER_SHARED_MEMORY_BUS_ERROR_GUARD_H_
#define RAPT_SERVER_SHARED_MEMORY_BUS_ERROR_GUARD_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

namespace rapt {

// Lets the process outlive a mapping whose file somebody else cuts short. Touching what is gone
// raises SIGBUS; where that is in a guarded range, the handler puts zero pages in the place of the
// whole range, marks the guard as broken, and the thread goes on. Any other SIGBUS does what it did
// before there was a guard: it ends the process.
//
// Guards are in a table of fixed size that the handler reads without a lock. Movable; guards of
// different ranges may be made, used and destroyed by different threads at once. The range has to
// stay mapped, and must not be touched after its guard is gone.
class BusErrorGuard {
 public:
  // So many at once; the handler looks at all of them.
  static constexpr int kMaxGuards = 1024;

  // The range is whole pages, readable and writable. Nothing where there are too many already.
  static std::optional<BusErrorGuard> Protect(std::byte* begin, int64_t bytes);

  BusErrorGuard(BusErrorGuard&& other) noexcept : slot_(std::exchange(other.slot_, kNone)) {}
  BusErrorGuard& operator=(BusErrorGuard&&) = delete;
  ~BusErrorGuard();

  // Whether a part of the range was touched after it was gone.
  bool broken() const;

 private:
  static constexpr int kNone = -1;
  explicit BusErrorGuard(int slot) : slot_(slot) {}

  int slot_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_SHARED_MEMORY_BUS_ERROR_GUARD_H_
