// A peer that floods a server, for benchmarks.
#ifndef RAPT_BENCH_ATTACK_H_
#define RAPT_BENCH_ATTACK_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>

namespace rapt::bench {

// What an attacker does on each of its connections.
struct Flood {
  std::string name;
  std::string once;           // sent first; of gRPC, it begins with the preface
  std::string repeated = {};  // sent over and over afterwards; empty: nothing
  int connections = 1;        // at a time
  bool reads = true;          // what the server sends
  // Between two bytes of `repeated`; 0: as fast as the server reads.
  std::chrono::milliseconds pace{0};
  // After this time, a connection on which everything was sent is replaced; 0: it stays.
  std::chrono::milliseconds keep{0};
  // Before a connection that the server has ended is replaced.
  std::chrono::milliseconds pause{0};
  bool is_http = false;  // for the metrics port
  const char* from = "127.0.0.2";
};

// Floods a port of this machine until destruction, on one thread.
// Connections that the server ends are replaced. The thread has a low priority: an attacker usually
// has a machine of its own and does not take the server's cores.
class Attack {
 public:
  static constexpr int kNice = 10;

  struct Reached {
    int64_t ended = 0;   // connections, by the server
    int64_t frames = 0;  // of HTTP/2, sent
    int64_t bytes = 0;   // sent
  };

  // REQUIRES: `flood` outlives this.
  Attack(const Flood& flood, int port);
  ~Attack() { Stop(); }
  Attack(const Attack&) = delete;
  Attack& operator=(const Attack&) = delete;

  // Closes all connections.
  Reached Stop();

 private:
  std::atomic<bool> stopping_{false};
  Reached reached_;
  std::thread thread_;
};

}  // namespace rapt::bench

#endif  // RAPT_BENCH_ATTACK_H_
