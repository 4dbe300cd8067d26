#include "server/admission/memory_budget.h"

#include <new>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/base/check.h"

namespace rapt {

MemoryBudget::Reservation& MemoryBudget::Reservation::operator=(Reservation&& other) noexcept {
  if (this == &other) return *this;
  Release();
  budget_ = std::exchange(other.budget_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

MemoryBudget::Reservation MemoryBudget::Reservation::Split(int64_t bytes) {
  RAPT_CHECK(bytes >= 0 && bytes <= bytes_, "a part is larger than its reservation");
  bytes_ -= bytes;
  return Reservation(budget_, bytes);
}

void MemoryBudget::Reservation::Release() {
  if (budget_ != nullptr) budget_->reserved_bytes_.fetch_sub(bytes_, std::memory_order_relaxed);
  budget_ = nullptr;
  bytes_ = 0;
}

absl::StatusOr<MemoryBudget::Reservation> MemoryBudget::Reserve(int64_t bytes) {
  RAPT_CHECK(bytes >= 0, "a reservation can't be negative");
  if (bytes > capacity_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the request needs ", bytes, " bytes for its outputs and workspace; at most ",
                     capacity_bytes_, " are allowed"));
  }
  int64_t reserved = reserved_bytes_.load(std::memory_order_relaxed);
  do {
    if (bytes > capacity_bytes_ - reserved) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the request needs ", bytes, " bytes for its outputs and workspace; of the ",
                       capacity_bytes_, " allowed, ", capacity_bytes_ - reserved, " are free now"));
    }
  } while (!reserved_bytes_.compare_exchange_weak(reserved, reserved + bytes,
                                                  std::memory_order_relaxed));
  return Reservation(this, bytes);
}

absl::StatusOr<ReservedBuffer> Allocate(MemoryBudget::Reservation reservation) {
  const int64_t bytes = reservation.bytes();
  try {
    return ReservedBuffer{std::move(reservation), AlignedBuffer(static_cast<size_t>(bytes))};
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the system has no ", bytes, " bytes of memory left"));
  }
}

}  // namespace rapt
