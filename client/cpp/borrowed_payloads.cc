#include "client/cpp/borrowed_payloads.h"

#include <utility>

#include "base/check.h"
#include "client/cpp/byte_buffer.h"

namespace rapt::client {

BorrowedPayloads::~BorrowedPayloads() {
  MutexLock lock(mutex_);
  RAPT_CHECK(borrowed_slices_ == 0, "gRPC must release payloads before their tracker is destroyed");
}

grpc::ByteBuffer BorrowedPayloads::MakeBuffer(const RequestMessage& message) {
  return ToByteBuffer(message,
                      [this](absl::Span<const std::byte> payload) { return MakeSlice(payload); });
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
