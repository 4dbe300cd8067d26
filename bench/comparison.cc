#include "bench/comparison.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "bench/infer_call.h"
#include "bench/server_process.h"

namespace rapt::bench {
namespace {

const char* VerdictOn(const Goal& goal) {
  const double sign = goal.aim < goal.floor ? -1 : 1;
  if (sign * goal.reached >= sign * goal.aim) return "aim";
  return sign * goal.reached >= sign * goal.floor ? "floor" : "missed";
}

}  // namespace

void Print(const Goals& goals) {
  std::printf("\n| ratio | reached | floor | aim | |\n| --- | --- | --- | --- | --- |\n");
  for (const Goal& goal : goals) {
    std::printf("| %s | %.2f | %.2f | %.2f | %s |\n", goal.what.c_str(), goal.reached, goal.floor,
                goal.aim, VerdictOn(goal));
  }
}

void Peer::Measure() {
  const double cpu = CpuSeconds(server);
  const auto begin = std::chrono::steady_clock::now();
  call();
  seconds.push_back(Since(begin).count());
  cpu_seconds.push_back(CpuSeconds(server) - cpu);
}

void Measure(absl::Span<Peer> peers, int rounds) {
  for (; rounds > 0; --rounds) {
    peers[0].call();
    for (Peer& peer : peers) peer.Measure();
  }
}

void PrintRow(const Peer& peer, int64_t bytes, double baseline_seconds,
              double baseline_cpu_seconds) {
  const double seconds = Median(peer.seconds), cpu = Median(peer.cpu_seconds);
  const double size = static_cast<double>(bytes);
  std::printf("| %ld KiB | %s | %.3f | %.2f | %.2f | %.3f | %.2f |\n",
              static_cast<long>(bytes / kKiB), peer.name, seconds * 1e3, size / seconds * 1e-9,
              baseline_seconds / seconds, cpu / size * 1e9, cpu / baseline_cpu_seconds);
}

int RoundsFor(int64_t bytes) {
  return static_cast<int>(std::clamp<int64_t>(1536 * kMiB / bytes, 9, 400));
}

}  // namespace rapt::bench
