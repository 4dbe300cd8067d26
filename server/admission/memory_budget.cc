#include "server/admission/memory_budget.h"

#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "server/rejection.h"

namespace rapt {

MemoryBudget::Reservation& MemoryBudget::Reservation::operator=(Reservation&& other) noexcept {
  if (this == &other) return *this;
  Release();
  budget_ = std::exchange(other.budget_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  caller_ = std::move(other.caller_);
  return *this;
}

MemoryBudget::Reservation MemoryBudget::Reservation::Split(int64_t bytes) {
  RAPT_CHECK(bytes >= 0 && bytes <= bytes_, "cannot split off more than the reservation holds");
  bytes_ -= bytes;
  return {budget_, bytes, caller_};
}

void MemoryBudget::Reservation::Release() {
  MemoryBudget* const budget = std::exchange(budget_, nullptr);
  const int64_t bytes = std::exchange(bytes_, 0);
  std::shared_ptr<CallerBytes> caller = std::move(caller_);
  if (budget == nullptr || bytes == 0) return;
  if (caller != nullptr) caller->Subtract(bytes, budget->for_small_);
  caller.reset();  // before others look for memory
  budget->reserved_bytes_.fetch_sub(bytes);
  budget->on_release_();
}

// Counts one reservation for the caller until the last part is released.
MemoryBudget::Reservation MemoryBudget::Make(int64_t bytes, std::shared_ptr<CallerBytes> caller) {
  if (caller == nullptr || bytes == 0) return {this, bytes, nullptr};
  caller->Add(bytes, for_small_);
  caller->AddReservation();
  CallerBytes* const counted = caller.get();
  return {this, bytes, {counted, [caller = std::move(caller)](CallerBytes*) {
                          caller->RemoveReservation();
                        }}};
}

std::optional<MemoryBudget::Reservation> MemoryBudget::Reserve(
    int64_t bytes, std::shared_ptr<CallerBytes> caller) {
  RAPT_CHECK(bytes >= 0, "a reservation cannot be negative");
  int64_t reserved = reserved_bytes_.load();
  do {
    if (bytes > capacity_bytes_ - reserved) return std::nullopt;
  } while (!reserved_bytes_.compare_exchange_weak(reserved, reserved + bytes));
  return Make(bytes, std::move(caller));
}

MemoryBudget::Reservation MemoryBudget::Charge(int64_t bytes, std::shared_ptr<CallerBytes> caller) {
  RAPT_CHECK(bytes >= 0, "a reservation cannot be negative");
  reserved_bytes_.fetch_add(bytes);
  return Make(bytes, std::move(caller));
}

absl::StatusOr<ReservedBuffer> Allocate(BufferPool& pool, int64_t bytes,
                                        MemoryBudget::Reservation reservation) {
  RAPT_CHECK(reservation.bytes() == BufferPool::SizeOfClass(bytes),
             "the reservation must have the size of the buffer's class");
  try {
    return ReservedBuffer{std::move(reservation), pool.Take(bytes)};
  } catch (const std::bad_alloc&) {
    return OutOfMemory(absl::StrCat("a buffer of ", bytes, " bytes"));
  }
}

absl::StatusOr<ReservedBuffer> AllocatePart(BufferPool& pool, int64_t bytes,
                                            MemoryBudget::Reservation& from) {
  return Allocate(pool, bytes, from.Split(BufferPool::SizeOfClass(bytes)));
}

}  // namespace rapt
