// Large buffers that are used again: a page that was touched before costs nothing, a fresh one
// costs more than copying it does.
#ifndef RAPT_BASE_BUFFER_POOL_H_
#define RAPT_BASE_BUFFER_POOL_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace rapt {

class BufferPool;

// Bytes of any content, aligned to a cache line. They go back to their pool on destruction.
class PooledBuffer {
 public:
  static constexpr int64_t kAlignment = 64;

  PooledBuffer() = default;
  PooledBuffer(PooledBuffer&& other) noexcept { *this = std::move(other); }
  PooledBuffer& operator=(PooledBuffer&& other) noexcept;
  ~PooledBuffer() { Release(); }

  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }
  absl::Span<std::byte> span() const { return {data_, static_cast<size_t>(size_)}; }

 private:
  friend class BufferPool;
  PooledBuffer(BufferPool* pool, std::byte* data, int64_t size)
      : pool_(pool), data_(data), size_(size) {}
  void Release();

  BufferPool* pool_ = nullptr;
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

// Thread-safe. Outlives its buffers.
//
// Small sizes come from the heap. Larger ones are rounded up to a class, an eighth of a power of
// two, and mapped; those that are given back wait for the next of their class. Buffers in use and
// those that wait never exceed the capacity together, as long as those in use alone don't.
class BufferPool {
 public:
  BufferPool(int64_t capacity_bytes, const Clock& clock)
      : capacity_bytes_(capacity_bytes), clock_(clock) {}
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // What a buffer of that size really takes; at most an eighth more, and never beyond int64.
  static int64_t SizeOfClass(int64_t bytes);

  // Throws std::bad_alloc where the system refuses.
  PooledBuffer Take(int64_t bytes);

  // Gives back to the system what has waited since before `then`.
  void Trim(Instant then);

  // What waits to be used again.
  int64_t idle_bytes() const;

 private:
  friend class PooledBuffer;
  struct Idle {
    std::byte* data;
    Instant since;
  };

  void GiveBack(std::byte* data, int64_t bytes);
  // Gives up idle buffers until so many more bytes can be mapped; to be unmapped once the lock is
  // free.
  struct Mapping {
    std::byte* data;
    int64_t bytes;
  };
  std::vector<Mapping> MakeRoom(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void UnmapAll(absl::Span<const Mapping> mappings);

  const int64_t capacity_bytes_;
  const Clock& clock_;
  mutable Mutex mutex_;
  // By class; the last of a class is the one used last, whose pages are the warmest.
  std::multimap<int64_t, Idle> idle_ ABSL_GUARDED_BY(mutex_);
  int64_t idle_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace rapt

#endif  // RAPT_BASE_BUFFER_POOL_H_
