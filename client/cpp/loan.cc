#include "client/cpp/loan.h"

#include <utility>
#include <vector>

#include "base/check.h"

namespace rapt::client {

Loan::~Loan() {
  MutexLock lock(mutex_);
  RAPT_CHECK(lent_slices_ == 0, "what is lent comes back before its loan ends");
}

grpc::ByteBuffer Loan::Lend(const RequestMessage& message) {
  std::vector<grpc::Slice> slices;
  for (const RequestMessage::Piece& piece : message.pieces()) {
    if (!piece.bytes.empty()) slices.emplace_back(piece.bytes);
    if (!piece.payload.empty()) slices.push_back(LendBytes(piece.payload));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

grpc::Slice Loan::LendBytes(absl::Span<const std::byte> bytes) {
  {
    MutexLock lock(mutex_);
    ++lent_slices_;
  }
  return grpc::Slice(
      const_cast<std::byte*>(bytes.data()), bytes.size(),
      [](void* loan) { static_cast<Loan*>(loan)->Return(); }, this);
}

void Loan::Return() {
  absl::AnyInvocable<void()> returned;
  {
    MutexLock lock(mutex_);
    if (--lent_slices_ > 0) return;
    returned = std::exchange(returned_, nullptr);
    all_returned_.SignalAll();
  }
  // Who waited may have destroyed this object by now.
  if (returned) returned();
}

void Loan::WaitUntilReturned() {
  MutexLock lock(mutex_);
  while (lent_slices_ > 0) all_returned_.Wait(mutex_);
}

bool Loan::IsReturned(absl::AnyInvocable<void()> returned) {
  MutexLock lock(mutex_);
  if (lent_slices_ == 0) return true;
  returned_ = std::move(returned);
  return false;
}

}  // namespace rapt::client
