#ifndef RAPT_SERVER_ADMISSION_CALLER_MEMORY_H_
#define RAPT_SERVER_ADMISSION_CALLER_MEMORY_H_

#include <atomic>
#include <cstdint>

namespace rapt {

// The bytes of one share of the budget that one caller holds. Thread-safe and lock-free: bytes are
// released under whatever locks their owner holds.
class CallerBytes {
 public:
  // `holders` counts the callers that hold bytes of the share; outlives this.
  explicit CallerBytes(std::atomic<int64_t>& holders) : holders_(holders) {}
  CallerBytes(const CallerBytes&) = delete;
  CallerBytes& operator=(const CallerBytes&) = delete;

  // `for_small`: bytes of the part that is reserved for small requests.
  void Add(int64_t bytes, bool for_small = false) {
    if (for_small) held_for_small_ += bytes;
    if (bytes > 0 && held_.fetch_add(bytes) == 0) ++holders_;
  }
  void Subtract(int64_t bytes, bool for_small = false) {
    if (for_small) held_for_small_ -= bytes;
    if (bytes > 0 && held_.fetch_sub(bytes) == bytes) --holders_;
  }
  int64_t held() const { return held_.load(); }
  int64_t held_for_small() const { return held_for_small_.load(); }

  void AddReservation() { ++reservations_; }
  void RemoveReservation() { --reservations_; }
  // The number of calls that hold bytes: each makes one reservation of a share.
  int64_t reservations() const { return reservations_.load(); }

  // Whether the caller is confined to a fair share, others waiting or not.
  bool is_confined() const { return is_confined_.load(); }
  void set_confined(bool is_confined) { is_confined_ = is_confined; }

 private:
  std::atomic<int64_t>& holders_;
  std::atomic<int64_t> held_{0};
  std::atomic<int64_t> held_for_small_{0};
  std::atomic<int64_t> reservations_{0};
  std::atomic<bool> is_confined_{false};
};

// The memory that one caller holds. Exists as long as the caller has calls or memory.
struct CallerMemory {
  CallerMemory(std::atomic<int64_t>& receive_holders, std::atomic<int64_t>& compute_holders)
      : receive(receive_holders), compute(compute_holders) {}

  CallerBytes receive;
  CallerBytes compute;
};

}  // namespace rapt

#endif  // RAPT_SERVER_ADMISSION_CALLER_MEMORY_H_
