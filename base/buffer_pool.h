// A pool of large buffers. Reusing a page is free, whereas a page fault costs more than copying the
// page.
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
#include "base/metric_sink.h"
#include "base/mutex.h"

namespace rapt {

class BufferPool;

// Uninitialized bytes aligned to a cache line. Returned to their pool on destruction.
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

// Thread-safe. REQUIRES: outlives its buffers.
//
// Small buffers come from the heap and count as used. Larger sizes are rounded up to a size class,
// an eighth of a power of two, and mapped; a released buffer stays idle until a request of its
// class reuses it. The sum of used and idle bytes stays within the capacity unless the used bytes
// alone exceed it.
class BufferPool {
 public:
  BufferPool(int64_t capacity_bytes, const Clock& clock)
      : capacity_bytes_(capacity_bytes), clock_(clock) {}
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // Returns the bytes that a buffer of this size occupies: at most an eighth more. Never overflows.
  static int64_t SizeOfClass(int64_t bytes);

  // Throws std::bad_alloc if the allocation fails.
  PooledBuffer Take(int64_t bytes);

  // Unmaps buffers that have been idle since before `then`.
  void Trim(Instant then);

  // Returns the bytes held idle for reuse.
  int64_t idle_bytes() const;

  void ExportTo(MetricSink& sink) const;

 private:
  friend class PooledBuffer;
  struct Idle {
    std::byte* data;
    Instant since;
  };

  void GiveBack(std::byte* data, int64_t bytes);
  // Removes idle buffers until `bytes` more can be mapped. The caller unmaps them after releasing
  // the lock.
  struct Mapping {
    std::byte* data;
    int64_t bytes;
  };
  std::vector<Mapping> MakeRoom(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void UnmapAll(absl::Span<const Mapping> mappings);

  const int64_t capacity_bytes_;
  const Clock& clock_;
  mutable Mutex mutex_;
  // By class. The last of a class was used most recently and has the warmest pages.
  std::multimap<int64_t, Idle> idle_ ABSL_GUARDED_BY(mutex_);
  int64_t idle_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace rapt

#endif  // RAPT_BASE_BUFFER_POOL_H_
