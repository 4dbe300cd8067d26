#include "tests/support/server_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <regex>

#include "absl/strings/string_view.h"
#include "base/check.h"

namespace rapt::test {
namespace {

std::vector<char*> NullTerminated(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& string : strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::vector<std::string> WithOurEnvironment(std::vector<std::string> environment) {
  for (char** variable = environ; *variable != nullptr; ++variable) {
    environment.emplace_back(*variable);
  }
  return environment;
}

std::vector<std::string> WithDefaults(std::vector<std::string> flags) {
  flags.insert(flags.begin(),
               {"--grpc_address=127.0.0.1:0", "--metrics_address=127.0.0.1:0",
                "--http_address=127.0.0.1:0", "--drain_pause=0", "--drain_refusal_time=0"});
  return flags;
}

}  // namespace

ChildProcess::ChildProcess(std::vector<std::string> command,
                           const std::vector<std::string>& environment) {
  int pipe_ends[2];
  RAPT_CHECK(pipe2(pipe_ends, O_CLOEXEC) == 0, "no pipe");
  output_ = pipe_ends[0];
  errors_ = memfd_create("stderr", MFD_CLOEXEC);
  RAPT_CHECK(errors_ >= 0, "no file for the child's errors");

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, errors_, STDERR_FILENO);
  std::vector<std::string> variables = WithOurEnvironment(environment);
  const int error = posix_spawn(&pid_, command[0].c_str(), &actions, nullptr,
                                NullTerminated(command).data(), NullTerminated(variables).data());
  posix_spawn_file_actions_destroy(&actions);
  close(pipe_ends[1]);
  RAPT_CHECK(error == 0, "the child did not start");
}

ChildProcess::~ChildProcess() {
  if (pid_ > 0) {
    Signal(SIGKILL);
    Wait();
  }
  close(output_);
  close(errors_);
}

std::string ChildProcess::ReadLine() {
  std::string line;
  for (char c; read(output_, &c, 1) == 1 && c != '\n';) line += c;
  return line;
}

void ChildProcess::Signal(int signal_number) { kill(pid_, signal_number); }

int ChildProcess::Wait() {
  int status = 0;
  RAPT_CHECK(waitpid(pid_, &status, 0) == pid_, "waitpid failed");
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

std::string ChildProcess::Errors() const {
  std::string text(static_cast<size_t>(lseek(errors_, 0, SEEK_END)), '\0');
  const ssize_t count = pread(errors_, text.data(), text.size(), 0);
  RAPT_CHECK(count == static_cast<ssize_t>(text.size()), "the child's errors can't be read");
  return text;
}

std::vector<std::string> ServerCommand(const std::vector<std::string>& flags) {
  // Off unless a test asks for it: servers side by side can't share the default port.
  std::vector<std::string> command = {RAPT_SERVER_BINARY, "--http_address="};
  command.insert(command.end(), flags.begin(), flags.end());
  return command;
}

ServerProcess::ServerProcess(const std::vector<std::string>& flags,
                             const std::vector<std::string>& environment)
    : process_(ServerCommand(WithDefaults(flags)), environment) {
  const std::string line = process_.ReadLine();
  const std::regex ready(
      R"(rapt-server ready grpc=((?:127\.0\.0\.\d|\[::\]):\d+)(?:,unix:\S+)? metrics=(127\.0\.0\.1:\d+)(?: \S+?)*?(?: http=(\S+))?)");
  std::smatch match;
  if (!std::regex_match(line, match, ready)) {
    ADD_FAILURE() << "rapt-server did not start; it printed '" << line << "'; its log:\n" << Log();
    return;
  }
  grpc_address_ = match[1];
  metrics_address_ = match[2];
  http_address_ = match[3];
}

ServerProcess::~ServerProcess() {
  if (waited_) return;
  Terminate();
  EXPECT_EQ(Wait(), 0) << "rapt-server exited with an error; its log:\n" << Log();
}

void ServerProcess::Terminate() { Signal(SIGTERM); }

int ServerProcess::Wait() {
  waited_ = true;
  return process_.Wait();
}

}  // namespace rapt::test
