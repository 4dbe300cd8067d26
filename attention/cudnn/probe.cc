#include "attention/cudnn/probe.h"

#include <poll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"

namespace rapt::cudnn {
namespace {

// Never returns. Does not affect the parent: runs no destructor and flushes no buffer twice.
[[noreturn]] void Attempt(absl::FunctionRef<absl::Status()> attempt, std::chrono::seconds limit,
                          int result_pipe) {
  alarm(static_cast<unsigned>(limit.count()));
  const absl::Status status = attempt();
  const std::string text(status.message());
  const bool sent =
      write(result_pipe, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  _exit(status.ok() && sent ? 0 : 1);
}

// Readable while a stop signal is pending. Never read, so that the signal stays pending.
int OpenStopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signalfd(-1, &signals, SFD_CLOEXEC);
}

// Returns the child's output, or nullopt if a stop signal arrives first.
std::optional<std::string> ReadAll(int from, int stop_signals) {
  std::string text;
  std::array<char, 512> part;
  std::array<pollfd, 2> sources = {{{from, POLLIN, 0}, {stop_signals, POLLIN, 0}}};
  for (;;) {
    if (poll(sources.data(), sources.size(), /*timeout=*/-1) < 0) continue;  // EINTR
    if (sources[1].revents != 0) return std::nullopt;
    const ssize_t n = read(from, part.data(), part.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return text;
    text.append(part.data(), static_cast<size_t>(n));
  }
}

int WaitFor(pid_t child) {
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

}  // namespace

absl::Status TryInChild(absl::FunctionRef<absl::Status()> attempt, std::chrono::seconds limit) {
  int result_pipe[2];
  if (pipe(result_pipe) != 0)
    return absl::FailedPreconditionError("cannot create a pipe for the GPU probe");
  const pid_t child = fork();
  if (child < 0) return absl::FailedPreconditionError("cannot create a process for the GPU probe");
  if (child == 0) Attempt(attempt, limit, result_pipe[1]);
  close(result_pipe[1]);
  const int stop_signals = OpenStopSignals();
  const std::optional<std::string> text = ReadAll(result_pipe[0], stop_signals);
  close(stop_signals);
  close(result_pipe[0]);
  if (!text) kill(child, SIGKILL);
  const int status = WaitFor(child);
  if (!text) return absl::CancelledError("a signal interrupted the GPU probe");
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return absl::OkStatus();
  if (WIFEXITED(status)) return absl::FailedPreconditionError(*text);
  if (WTERMSIG(status) == SIGALRM) {
    return absl::FailedPreconditionError(
        absl::StrCat("the GPU probe took more than ", limit.count(), " s"));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the GPU probe was killed by signal ", WTERMSIG(status)));
}

}  // namespace rapt::cudnn
