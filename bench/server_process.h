// What benchmarks share: servers in processes of their own, and what those cost.
#ifndef RAPT_BENCH_SERVER_PROCESS_H_
#define RAPT_BENCH_SERVER_PROCESS_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace rapt::bench {

inline constexpr int64_t kKiB = 1024;
inline constexpr int64_t kMiB = 1024 * kKiB;

struct Server {
  pid_t pid;
  int port;
};

// `serve` listens on the loopback, writes its port to the pipe and never returns. Before this
// process has threads, which fork() would lose.
Server Fork(const std::function<void(int pipe)>& serve);

// rapt-server with these flags.
Server StartRapt(const std::vector<std::string>& flags);

void Stop(const Server& server);

// Since the process began.
double CpuSeconds(pid_t pid);

int64_t RssAnonBytes(pid_t pid);

// Of at least one value; `share` is 0.5 for the median.
double Quantile(std::vector<double> values, double share);
inline double Median(std::vector<double> values) { return Quantile(std::move(values), 0.5); }

}  // namespace rapt::bench

#endif  // RAPT_BENCH_SERVER_PROCESS_H_
