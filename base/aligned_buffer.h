// An owned, uninitialized buffer aligned to a cache line.
#ifndef RAPT_BASE_ALIGNED_BUFFER_H_
#define RAPT_BASE_ALIGNED_BUFFER_H_

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#include "absl/types/span.h"

namespace rapt {

class AlignedBuffer {
 public:
  static constexpr size_t kAlignment = 64;

  AlignedBuffer() = default;
  // Throws std::bad_alloc if the allocation fails. A size of 0 allocates nothing.
  explicit AlignedBuffer(size_t bytes) : size_(bytes) {
    if (bytes == 0) return;
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (rounded < bytes) throw std::bad_alloc();
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded)));
    if (data_ == nullptr) throw std::bad_alloc();
  }

  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }
  absl::Span<std::byte> span() { return {data_.get(), size_}; }
  absl::Span<const std::byte> span() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0;
};

}  // namespace rapt

#endif  // RAPT_BASE_ALIGNED_BUFFER_H_
