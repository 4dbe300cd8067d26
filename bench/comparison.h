// Peers whose calls are compared in one run, and the goals that the ratios must reach.
#ifndef RAPT_BENCH_COMPARISON_H_
#define RAPT_BENCH_COMPARISON_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace rapt::bench {

// A target ratio: at least `floor`, or at most `floor` if `aim` is below it.
struct Goal {
  std::string what;
  double reached;
  double floor;
  double aim;
};
using Goals = std::vector<Goal>;

void Print(const Goals& goals);

// One of the compared peers: its call, its server's process, its measurements.
struct Peer {
  const char* name;
  pid_t server;
  std::function<void()> call;
  std::vector<double> seconds = {};
  std::vector<double> cpu_seconds = {};

  void Measure();
};

// Calls the peers in turn. Each round begins with an uncounted call of the first peer: a peer that
// returns hundreds of megabytes to the system slows down the next one by up to a quarter at 192
// MiB.
void Measure(absl::Span<Peer> peers, int rounds);

// Prints a row of a table: KiB, milliseconds and GB/s of a call of that size, its speed as a
// multiple of that of `baseline_seconds`, nanoseconds of CPU a byte, and that as a multiple of
// `baseline_cpu_seconds`.
void PrintRow(const Peer& peer, int64_t bytes, double baseline_seconds,
              double baseline_cpu_seconds);

// Returns how many rounds of calls of that size are measured.
int RoundsFor(int64_t bytes);

}  // namespace rapt::bench

#endif  // RAPT_BENCH_COMPARISON_H_
