#include "base/bus_error_guard.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <mutex>

#include "base/check.h"

namespace rapt {
namespace {

// A guarded range. Its version is odd while it changes, so that the handler never combines the
// start of one range with the end of another. All operations are sequentially consistent,
// because none is on a hot path.
struct Slot {
  std::atomic<bool> taken{false};
  std::atomic<uint64_t> version{0};
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
  std::atomic<bool> broken{false};

  void Set(uintptr_t new_begin, uintptr_t new_end) {
    ++version;
    begin = new_begin;
    end = new_end;
    ++version;
  }
};
static_assert(std::atomic<uintptr_t>::is_always_lock_free &&
              std::atomic<bool>::is_always_lock_free);

Slot slots[BusErrorGuard::kMaxGuards];
struct sigaction previous_action;

// Async-signal-safe. Slots that change can be skipped: an accessing thread keeps its guard alive.
bool ReplaceWithZeros(uintptr_t address) {
  for (Slot& slot : slots) {
    const uint64_t version = slot.version;
    const uintptr_t begin = slot.begin, end = slot.end;
    if (version % 2 == 1 || slot.version != version) continue;
    if (address < begin || address >= end) continue;
    slot.broken = true;
    // The raw system call: a sanitizer's mmap() is not async-signal-safe. If several threads map
    // zeros at once, the last mapping stays.
    const long mapped = syscall(SYS_mmap, begin, end - begin, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0L);
    return mapped == static_cast<long>(begin);
  }
  return false;
}

void OnBusError(int, siginfo_t* info, void*) {
  const int saved_errno = errno;
  const bool is_fault = info->si_code > 0;  // not sent by kill()
  if (!is_fault || !ReplaceWithZeros(reinterpret_cast<uintptr_t>(info->si_addr))) {
    // Restore the previous action: a fault repeats on return; a sent signal is raised again.
    sigaction(SIGBUS, &previous_action, nullptr);
    if (!is_fault) raise(SIGBUS);
  }
  errno = saved_errno;
}

void InstallHandler() {
  struct sigaction action = {};
  action.sa_sigaction = OnBusError;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  // The handler, which may run as soon as it is installed, reads previous_action.
  RAPT_CHECK(sigaction(SIGBUS, nullptr, &previous_action) == 0, "cannot read the SIGBUS action");
  RAPT_CHECK(sigaction(SIGBUS, &action, nullptr) == 0, "cannot install the SIGBUS handler");
}

}  // namespace

std::optional<BusErrorGuard> BusErrorGuard::Protect(std::byte* begin, int64_t bytes) {
  static std::once_flag installed;
  std::call_once(installed, InstallHandler);
  const auto address = reinterpret_cast<uintptr_t>(begin);
  for (int n = 0; n < kMaxGuards; ++n) {
    if (slots[n].taken.exchange(true)) continue;
    slots[n].broken = false;
    slots[n].Set(address, address + static_cast<uintptr_t>(bytes));
    return BusErrorGuard(n);
  }
  return std::nullopt;
}

BusErrorGuard::~BusErrorGuard() {
  if (slot_ == kNone) return;
  slots[slot_].Set(0, 0);
  slots[slot_].taken = false;
}

bool BusErrorGuard::broken() const { return slots[slot_].broken; }

}  // namespace rapt
