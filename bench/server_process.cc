#include "bench/server_process.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace rapt::bench {
namespace {

// Returns the port of an address in rapt-server's ready line; 0 if it is not there.
int PortOf(const char* name, const std::string& line) {
  const std::string before = absl::StrCat(" ", name, "=127.0.0.1:");
  const size_t place = line.find(before);
  return place == std::string::npos ? 0 : std::atoi(line.c_str() + place + before.size());
}

}  // namespace

Server Fork(const std::function<void(int pipe)>& serve) {
  int ends[2];
  RAPT_CHECK(pipe(ends) == 0, "no pipe");
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(ends[0]);
    serve(ends[1]);
    std::_Exit(1);
  }
  close(ends[1]);
  std::string line;
  for (char c; read(ends[0], &c, 1) == 1 && c != '\n';) line += c;
  // rapt-server writes its ready line, others only the port.
  if (line.find('=') == std::string::npos) return {pid, std::atoi(line.c_str())};
  const Server server = {pid, PortOf("grpc", line), PortOf("metrics", line), PortOf("http", line)};
  RAPT_CHECK(server.port > 0 && server.metrics_port > 0, "the ready line lacks an address");
  return server;
}

Server StartRapt(const std::vector<std::string>& flags) {
  return Fork([&flags](int pipe) {
    dup2(pipe, STDOUT_FILENO);
    RAPT_CHECK(freopen("/dev/null", "w", stderr) != nullptr, "no /dev/null");
    std::vector<std::string> command = {RAPT_SERVER_BINARY, "--grpc_address=127.0.0.1:0",
                                        "--metrics_address=127.0.0.1:0", "--http_address="};
    command.insert(command.end(), flags.begin(), flags.end());
    std::vector<char*> arguments;
    arguments.reserve(command.size() + 1);
    for (std::string& word : command) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    execv(RAPT_SERVER_BINARY, arguments.data());
  });
}

void Stop(const Server& server) {
  kill(server.pid, SIGKILL);
  waitpid(server.pid, nullptr, 0);
}

double CpuSeconds(pid_t pid) {
  clockid_t clock;
  timespec time;
  RAPT_CHECK(clock_getcpuclockid(pid, &clock) == 0 && clock_gettime(clock, &time) == 0,
             "the server is gone");
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

int64_t RssAnonBytes(pid_t pid) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  for (std::string word; status >> word;) {
    int64_t kib;
    if (word == "RssAnon:" && status >> kib) return kib * kKiB;
  }
  return 0;
}

PeakMemory::PeakMemory(pid_t pid)
    : thread_([this, pid] {
        while (!stopping_) {
          bytes_ = std::max(bytes_.load(), RssAnonBytes(pid));
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
      }) {}

PeakMemory::~PeakMemory() {
  stopping_ = true;
  thread_.join();
}

double Quantile(std::vector<double> values, double share) {
  const auto place = static_cast<size_t>(share * static_cast<double>(values.size()));
  const auto nth = values.begin() + static_cast<int64_t>(std::min(place, values.size() - 1));
  std::nth_element(values.begin(), nth, values.end());
  return *nth;
}

}  // namespace rapt::bench
