#include "server/housekeeper.h"

#include <malloc.h>

#include <algorithm>
#include <utility>

namespace rapt {
namespace {

constexpr std::chrono::seconds kInterval{1};
constexpr std::chrono::seconds kIdle{3};
constexpr std::chrono::seconds kBusyTrimInterval{30};  // trimming causes page faults
constexpr std::chrono::seconds kIdleTrimInterval{10};  // connections close after their last call

}  // namespace

void TuneMalloc() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // glibc's maximum
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
  mallopt(M_ARENA_MAX, 1);
}

Housekeeper::Housekeeper(BufferPool& pool, const Clock& clock, std::function<bool()> was_busy,
                         std::function<void()> expire)
    : pool_(pool),
      clock_(clock),
      was_busy_(std::move(was_busy)),
      expire_(std::move(expire)),
      thread_([this] { Run(); }) {}

Housekeeper::~Housekeeper() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  stop_.Signal();
  thread_.join();
}

void Housekeeper::Run() {
  MutexLock lock(mutex_);
  while (!stopping_) {
    if (!stop_.WaitFor(mutex_, kInterval)) Check();
  }
}

void Housekeeper::Check() {
  expire_();
  const Instant now = clock_.Now();
  pool_.Trim(now - kIdle);
  if (was_busy_()) last_busy_ = now;
  // gRPC's receive buffers come from malloc, which retains everything below its topmost used block.
  const Instant due = last_trim_ <= last_busy_
                          ? std::min(last_busy_ + kIdle, last_trim_ + kBusyTrimInterval)
                          : last_trim_ + kIdleTrimInterval;
  if (now >= due) {
    malloc_trim(0);
    last_trim_ = now;
  }
}

}  // namespace rapt
