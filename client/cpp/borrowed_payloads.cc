#include "client/cpp/borrowed_payloads.h"

#include <utility>
#include <vector>

#include "base/check.h"

namespace rapt::client {

BorrowedPayloads::~BorrowedPayloads() {
  MutexLock lock(mutex_);
  RAPT_CHECK(borrowed_slices_ == 0, "gRPC must release payloads before their tracker is destroyed");
}

grpc::ByteBuffer BorrowedPayloads::MakeBuffer(const RequestMessage& message) {
  std::vector<grpc::Slice> slices;
  for (const RequestMessage::Piece& piece : message.pieces()) {
    if (!piece.bytes.empty()) slices.emplace_back(piece.bytes);
    if (!piece.payload.empty()) slices.push_back(MakeSlice(piece.payload));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

grpc::Slice BorrowedPayloads::MakeSlice(absl::Span<const std::byte> bytes) {
  {
    MutexLock lock(mutex_);
    ++borrowed_slices_;
  }
  return grpc::Slice(
      const_cast<std::byte*>(bytes.data()), bytes.size(),
      [](void* payloads) { static_cast<BorrowedPayloads*>(payloads)->ReleaseSlice(); }, this);
}

void BorrowedPayloads::ReleaseSlice() {
  absl::AnyInvocable<void()> released;
  {
    MutexLock lock(mutex_);
    if (--borrowed_slices_ > 0) return;
    released = std::exchange(released_, nullptr);
    all_released_.SignalAll();
  }
  // By now, WaitUntilReleased() may have returned and this object may be destroyed.
  if (released) released();
}

void BorrowedPayloads::WaitUntilReleased() {
  MutexLock lock(mutex_);
  while (borrowed_slices_ > 0) all_released_.Wait(mutex_);
}

bool BorrowedPayloads::IsReleased(absl::AnyInvocable<void()> released) {
  MutexLock lock(mutex_);
  if (borrowed_slices_ == 0) return true;
  released_ = std::move(released);
  return false;
}

}  // namespace rapt::client
