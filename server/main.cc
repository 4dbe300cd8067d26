// rapt-server: reads the options, starts the server, waits for a signal, drains.
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "base/host_limits.h"
#include "base/log.h"
#include "server/housekeeper.h"
#include "server/options.h"
#include "server/server.h"

namespace rapt {
namespace {

constexpr int kExitUsage = 2;

int Fail(const absl::Status& status, int exit_code) {
  std::fprintf(stderr, "rapt-server: %s\n", std::string(status.message()).c_str());
  return exit_code;
}

// REQUIRES: no other thread runs, so that only sigwait() receives the signals.
sigset_t BlockSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal_number : {SIGTERM, SIGINT, SIGHUP}) {
    std::signal(signal_number, SIG_DFL);
    sigaddset(&signals, signal_number);
  }
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return signals;
}

bool HasStopSignal() {
  sigset_t pending;
  sigpending(&pending);
  return sigismember(&pending, SIGTERM) == 1 || sigismember(&pending, SIGINT) == 1;
}

// Blocks until SIGTERM or SIGINT and returns its name; the next one terminates the process.
// SIGHUP reloads files until then, and has no effect later.
const char* WaitForStopSignal(Server& server, sigset_t signals) {
  int signal_number = 0;
  while (sigwait(&signals, &signal_number) == 0 && signal_number == SIGHUP) server.ReloadFiles();
  sigdelset(&signals, SIGHUP);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  return signal_number == SIGTERM ? "SIGTERM" : "SIGINT";
}

int Serve(std::unique_ptr<Server> server, const sigset_t& signals) {
  const absl::Status started = server->Start(HasStopSignal);
  if (!started.ok() && !absl::IsCancelled(started)) return Fail(started, EXIT_FAILURE);
  if (started.ok()) {
    const std::string http = server->http_address();
    std::printf(
        "rapt-server ready grpc=%s metrics=%s grpc_security=%s metrics_security=plaintext%s%s\n",
        server->grpc_address().c_str(), server->metrics_address().c_str(),
        server->security().c_str(), http.empty() ? "" : " http=", http.c_str());
    std::fflush(stdout);
  }
  const char* const signal = WaitForStopSignal(*server, signals);
  Log(LogLevel::kInfo, "draining", {{"signal", signal}, {"open_calls", server->open_calls()}});
  server->Drain();
  return EXIT_SUCCESS;
}

// `entries` end with null.
Environment EnvironmentOf(const char* const* entries) {
  size_t count = 0;
  while (entries[count] != nullptr) ++count;
  return {entries, count};
}

int Main(int argc, char** argv) {
  const sigset_t signals = BlockSignals();
  std::signal(SIGPIPE, SIG_IGN);
  TuneMalloc();
  RaiseDescriptorLimit();
  const absl::StatusOr<Options> options =
      ParseOptions(absl::Span<const char* const>(argv, argc).subspan(std::min(argc, 1)),
                   EnvironmentOf(environ), ReadHostLimits());
  if (!options.ok()) return Fail(options.status(), kExitUsage);
  if (const std::string& text = options->text_to_print; !text.empty()) {
    return std::fputs(text.c_str(), stdout) < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
  }
  SetLogFormat(options->log.format);
  for (const std::string& warning : options->warnings) {
    Log(LogLevel::kWarning, "check the settings", {{"reason", warning}});
  }
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Create(*options);
  if (absl::IsCancelled(server.status())) {
    Log(LogLevel::kInfo, "stopped", {{"reason", server.status().message()}});
    return EXIT_SUCCESS;
  }
  if (!server.ok()) return Fail(server.status(), kExitUsage);
  const LogWriter log_writer;  // not earlier: Create() needs a process with one thread
  return Serve(*std::move(server), signals);
}

}  // namespace
}  // namespace rapt

int main(int argc, char** argv) { return rapt::Main(argc, argv); }
