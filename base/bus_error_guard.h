#ifndef RAPT_BASE_BUS_ERROR_GUARD_H_
#define RAPT_BASE_BUS_ERROR_GUARD_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

namespace rapt {

// Protects the process from a mapping whose file another process truncates. An access beyond the
// end raises SIGBUS; in a guarded range, the handler replaces the whole range with zero pages and
// marks the guard as broken, and the thread continues. Any other SIGBUS terminates the process as
// before.
//
// Guards are in a table of fixed size that the handler reads without a lock. Movable; guards of
// different ranges may be created, used and destroyed concurrently. REQUIRES: the range stays
// mapped while guarded, and is not accessed after its guard is destroyed.
class BusErrorGuard {
 public:
  // Bounded because the handler searches all guards.
  static constexpr int kMaxGuards = 1024;

  // Returns nullopt if there are kMaxGuards already. REQUIRES: the range is whole pages. It may
  // be written to only if it is writable.
  static std::optional<BusErrorGuard> Protect(std::byte* begin, int64_t bytes);

  BusErrorGuard(BusErrorGuard&& other) noexcept : slot_(std::exchange(other.slot_, kNone)) {}
  BusErrorGuard& operator=(BusErrorGuard&&) = delete;
  ~BusErrorGuard();

  // Returns whether a truncated part of the range was accessed.
  bool broken() const;

 private:
  static constexpr int kNone = -1;
  explicit BusErrorGuard(int slot) : slot_(slot) {}

  int slot_;
};

}  // namespace rapt

#endif  // RAPT_BASE_BUS_ERROR_GUARD_H_
