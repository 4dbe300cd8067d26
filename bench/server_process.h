// Servers in separate processes for benchmarks, and their resource usage.
#ifndef RAPT_BENCH_SERVER_PROCESS_H_
#define RAPT_BENCH_SERVER_PROCESS_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace rapt::bench {

inline constexpr int64_t kKiB = 1024;
inline constexpr int64_t kMiB = 1024 * kKiB;

struct Server {
  pid_t pid;
  int port;
  int metrics_port = 0;  // of rapt-server
  int http_port = 0;     // likewise, if it serves HTTP

  std::string address() const { return "127.0.0.1:" + std::to_string(port); }
  std::string http_address() const { return "127.0.0.1:" + std::to_string(http_port); }
};

// Forks a process that runs `serve`, which listens on loopback, writes its port to the pipe and
// never returns. REQUIRES: this process has no other threads.
Server Fork(const std::function<void(int pipe)>& serve);

// Starts rapt-server with these flags.
Server StartRapt(const std::vector<std::string>& flags);

void Stop(const Server& server);

// CPU time since the process started.
double CpuSeconds(pid_t pid);

int64_t RssAnonBytes(pid_t pid);

// The peak anonymous memory of a process, sampled every 2 ms during this object's lifetime.
class PeakMemory {
 public:
  explicit PeakMemory(pid_t pid);
  ~PeakMemory();
  PeakMemory(const PeakMemory&) = delete;
  PeakMemory& operator=(const PeakMemory&) = delete;

  int64_t bytes() const { return bytes_; }

 private:
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> bytes_{0};
  std::thread thread_;
};

// REQUIRES: at least one value. `share` is 0.5 for the median.
double Quantile(std::vector<double> values, double share);
inline double Median(std::vector<double> values) { return Quantile(std::move(values), 0.5); }

}  // namespace rapt::bench

#endif  // RAPT_BENCH_SERVER_PROCESS_H_
