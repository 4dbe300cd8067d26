#include "base/buffer_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <new>

#include "base/round_up.h"

namespace rapt {
namespace {

// Smaller buffers are a few pages, which malloc provides cheaply.
constexpr int64_t kMinMappedBytes = 64 * 1024;
constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = 2 << 20;
constexpr int kClassesPerDoubling = 8;

bool IsMapped(int64_t class_bytes) { return class_bytes >= kMinMappedBytes; }

std::byte* FromHeap(int64_t bytes) {
  void* const data = std::aligned_alloc(PooledBuffer::kAlignment, static_cast<size_t>(bytes));
  if (data == nullptr) throw std::bad_alloc();
  return static_cast<std::byte*>(data);
}

// Aligned to a huge page if at least that large, which takes one page fault instead of 512.
std::byte* Map(int64_t bytes) {
  const int64_t slack = bytes >= kHugePage ? kHugePage : 0;
  void* mapped = mmap(nullptr, static_cast<size_t>(bytes + slack), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  if (slack == 0) return static_cast<std::byte*>(mapped);
  auto* const begin = static_cast<std::byte*>(mapped);
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const int64_t head = static_cast<int64_t>(-address & (kHugePage - 1));
  if (head > 0) munmap(begin, static_cast<size_t>(head));
  if (slack > head) munmap(begin + head + bytes, static_cast<size_t>(slack - head));
  madvise(begin + head, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  return begin + head;
}

}  // namespace

PooledBuffer& PooledBuffer::operator=(PooledBuffer&& other) noexcept {
  if (this == &other) return *this;
  Release();
  pool_ = std::exchange(other.pool_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  return *this;
}

void PooledBuffer::Release() {
  if (data_ != nullptr) pool_->GiveBack(data_, BufferPool::SizeOfClass(size_));
  data_ = nullptr;
  size_ = 0;
}

int64_t BufferPool::SizeOfClass(int64_t bytes) {
  if (bytes > std::numeric_limits<int64_t>::max() / 4) return bytes;  // larger than any memory
  if (bytes < kMinMappedBytes) return RoundUp(bytes, PooledBuffer::kAlignment);
  const int64_t power = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes)));
  return RoundUp(bytes, std::max(power / kClassesPerDoubling, kPage));
}

BufferPool::~BufferPool() { Trim(Instant::max()); }

PooledBuffer BufferPool::Take(int64_t bytes) {
  if (bytes == 0) return {};
  const int64_t class_bytes = SizeOfClass(bytes);
  std::vector<Mapping> surplus;
  {
    MutexLock lock(mutex_);
    if (auto end = idle_.upper_bound(class_bytes);
        end != idle_.begin() && std::prev(end)->first == class_bytes) {
      const auto last = std::prev(end);
      std::byte* const data = last->second.data;
      idle_.erase(last);
      idle_bytes_ -= class_bytes;
      used_bytes_ += class_bytes;
      return {this, data, bytes};
    }
    surplus = MakeRoom(class_bytes);
    used_bytes_ += class_bytes;
  }
  UnmapAll(surplus);
  try {
    return {this, IsMapped(class_bytes) ? Map(class_bytes) : FromHeap(class_bytes), bytes};
  } catch (const std::bad_alloc&) {
    MutexLock lock(mutex_);
    used_bytes_ -= class_bytes;
    throw;
  }
}

void BufferPool::GiveBack(std::byte* data, int64_t bytes) {
  if (!IsMapped(bytes)) std::free(data);
  std::vector<Mapping> surplus;
  {
    MutexLock lock(mutex_);
    used_bytes_ -= bytes;
    if (!IsMapped(bytes)) return;
    idle_bytes_ += bytes;
    idle_.emplace(bytes, Idle{data, clock_.Now()});
    surplus = MakeRoom(0);
  }
  UnmapAll(surplus);
}

std::vector<BufferPool::Mapping> BufferPool::MakeRoom(int64_t bytes) {
  std::vector<Mapping> surplus;
  while (!idle_.empty() && used_bytes_ + idle_bytes_ > capacity_bytes_ - bytes) {
    const auto largest = std::prev(idle_.end());
    surplus.push_back({largest->second.data, largest->first});
    idle_bytes_ -= largest->first;
    idle_.erase(largest);
  }
  return surplus;
}

void BufferPool::Trim(Instant then) {
  std::vector<Mapping> old;
  {
    MutexLock lock(mutex_);
    for (auto it = idle_.begin(); it != idle_.end();) {
      if (it->second.since >= then) {
        ++it;
        continue;
      }
      old.push_back({it->second.data, it->first});
      idle_bytes_ -= it->first;
      it = idle_.erase(it);
    }
  }
  UnmapAll(old);
}

// Runs outside the lock: unmapping gigabytes takes a while.
void BufferPool::UnmapAll(absl::Span<const Mapping> mappings) {
  for (const Mapping& mapping : mappings) {
    munmap(mapping.data, static_cast<size_t>(mapping.bytes));
  }
}

int64_t BufferPool::idle_bytes() const {
  MutexLock lock(mutex_);
  return idle_bytes_;
}

void BufferPool::ExportTo(MetricSink& sink) const {
  sink.AddGauge("rapt_pool_idle_bytes", "Idle buffers kept for reuse.", {},
                [this] { return idle_bytes(); });
}

}  // namespace rapt
