// The rapt-server of this build as a child process.
#ifndef RAPT_TESTS_SUPPORT_SERVER_PROCESS_H_
#define RAPT_TESTS_SUPPORT_SERVER_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <vector>

namespace rapt::test {

// A child process with its output in files. Killed on destruction if it still runs.
class ChildProcess {
 public:
  // `environment` is added to that of the test, as "NAME=value".
  explicit ChildProcess(std::vector<std::string> command,
                        const std::vector<std::string>& environment = {});
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  // Returns the next line of its standard output without the newline. Blocks. Returns an empty
  // string at the end of the output.
  std::string ReadLine();

  void Signal(int signal_number);

  // Blocks until it has exited. Returns its exit code, or minus the signal that ended it.
  int Wait();

  // All of its standard error so far.
  std::string Errors() const;

  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  int output_ = -1;  // read end of a pipe
  int errors_ = -1;  // an unnamed file
};

// Returns the command line of rapt-server with these flags.
std::vector<std::string> ServerCommand(const std::vector<std::string>& flags);

// By default, servers under test drain without pauses. Tests of the phases of a drain pass these.
inline constexpr char kDrainPause[] = "--drain_pause=100ms";
inline constexpr char kDrainRefusalTime[] = "--drain_refusal_time=200ms";

// rapt-server on free loopback ports, ready on construction. The destructor stops it with SIGTERM;
// an exit code other than 0 fails the test and shows the server's log.
class ServerProcess {
 public:
  explicit ServerProcess(const std::vector<std::string>& flags = {},
                         const std::vector<std::string>& environment = {});
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  // "127.0.0.1:43211"
  const std::string& grpc_address() const { return grpc_address_; }
  const std::string& metrics_address() const { return metrics_address_; }
  const std::string& http_address() const { return http_address_; }

  // Sends SIGTERM.
  void Terminate();
  void Signal(int signal_number) { process_.Signal(signal_number); }

  // Like ChildProcess::Wait(). The destructor then no longer checks the exit code.
  int Wait();

  std::string Log() const { return process_.Errors(); }
  pid_t pid() const { return process_.pid(); }

 private:
  ChildProcess process_;
  std::string grpc_address_;
  std::string metrics_address_;
  std::string http_address_;
  bool waited_ = false;
};

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_SERVER_PROCESS_H_
