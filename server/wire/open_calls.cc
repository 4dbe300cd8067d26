#include "server/wire/open_calls.h"

namespace rapt {

void OpenCalls::Enter() {
  MutexLock lock(mutex_);
  ++count_;
}

void OpenCalls::Leave() {
  MutexLock lock(mutex_);
  ++served_;
  if (--count_ == 0) none_.SignalAll();
}

int64_t OpenCalls::served() const {
  MutexLock lock(mutex_);
  return served_;
}

int64_t OpenCalls::count() const {
  MutexLock lock(mutex_);
  return count_;
}

bool OpenCalls::WaitUntilNone(std::chrono::nanoseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  MutexLock lock(mutex_);
  while (count_ > 0) {
    const auto left = end - std::chrono::steady_clock::now();
    if (left <= left.zero()) return false;
    none_.WaitFor(mutex_, left);
  }
  return true;
}

}  // namespace rapt
