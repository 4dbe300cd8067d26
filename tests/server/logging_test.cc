// The built server with a stderr that nobody reads.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "rapt/client.h"
#include "tests/support/loopback.h"
#include "tests/support/server_process.h"

namespace rapt {
namespace {

using client::Client;
using client::View;
using ::testing::HasSubstr;

// A server whose standard error is a pipe of two pages.
class UnreadServer {
 public:
  UnreadServer() {
    std::string pattern = std::filesystem::temp_directory_path() / "rapt-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    const std::string pipe = folder_ / "stderr";
    EXPECT_EQ(mkfifo(pipe.c_str(), 0600), 0);
    pipe_ = open(pipe.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
    fcntl(pipe_, F_SETPIPE_SZ, 8192);
    std::vector<std::string> command = {"/bin/sh", "-c", "exec \"$0\" \"$@\" 2>" + pipe};
    const std::vector<std::string> server = test::ServerCommand(
        {"--grpc_address=127.0.0.1:0", "--metrics_address=127.0.0.1:0", "--drain_pause=0",
         "--drain_refusal_time=0", "--slow_call=1ms", "--backend=reference"});
    command.insert(command.end(), server.begin(), server.end());
    process_ = std::make_unique<test::ChildProcess>(command);
    const std::string ready = process_->ReadLine();
    std::smatch match;
    EXPECT_TRUE(std::regex_search(ready, match, std::regex(R"(grpc=(\S+) metrics=(\S+))")));
    grpc_address_ = match[1];
    metrics_address_ = match[2];
  }
  ~UnreadServer() {
    process_.reset();
    close(pipe_);
    std::filesystem::remove_all(folder_);
  }

  bool HasFullPipe() const {
    pollfd writable = {pipe_, POLLOUT, 0};
    return poll(&writable, 1, 0) == 0;
  }

  std::string Page(const std::string& path) const { return test::HttpGet(metrics_address_, path); }
  const std::string& grpc_address() const { return grpc_address_; }
  test::ChildProcess& process() { return *process_; }

 private:
  std::filesystem::path folder_;
  int pipe_ = -1;
  std::unique_ptr<test::ChildProcess> process_;
  std::string grpc_address_, metrics_address_;
};

// A call that is logged as slow: it takes the reference far longer than a millisecond.
absl::Status AttendSlowly(Client& client, std::chrono::nanoseconds timeout) {
  static const std::vector<float> x(256 * 64, 0.5f);
  const client::TensorView tokens = View<float>({1, 1, 256, 64}, x);
  return client.Attend({.q = tokens, .k = tokens, .v = tokens}, {.timeout = timeout}).status();
}

TEST(LoggingTest, TheServerWarnsAboutItsSettings) {
  const test::ServerProcess server({"--kv_cache_bytes=1000T"}, {"RAPT_THREDS=3"});
  EXPECT_THAT(server.Log(), HasSubstr("WARNING check the settings"));
  EXPECT_THAT(server.Log(), HasSubstr("unknown variable RAPT_THREDS; did you mean RAPT_THREADS?"));
  EXPECT_THAT(server.Log(), HasSubstr("--kv_cache_bytes=1099511627776000"));
}

TEST(LoggingTest, AServerWithAnUnreadLogServesAndStops) {
  constexpr int kRefused = 900;
  UnreadServer server;
  auto client = Client::Connect(server.grpc_address(), {.retries = {.max_attempts = 1}});
  ASSERT_TRUE(client.ok()) << client.status();
  // At most ten calls a second are logged. Those after the pipe is full would fill it again.
  const auto attend_slowly = [&](int calls) {
    for (int n = 0; n < calls; ++n) {
      const absl::Status status = AttendSlowly(**client, std::chrono::seconds(30));
      ASSERT_TRUE(status.ok()) << status;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  };
  for (int n = 0; n < 60 && !server.HasFullPipe(); ++n) attend_slowly(10);
  ASSERT_TRUE(server.HasFullPipe());
  attend_slowly(60);
  const std::vector<float> x(2 * 3 * 4, 0.5f);
  for (int n = 0; n < kRefused; ++n) {
    const client::TensorView bad = View<float>({1, 2, 3, 4}, x);
    const client::TensorView other = View<float>({1, 2, 4, 3}, x);
    EXPECT_EQ((*client)->Attend({.q = bad, .k = other, .v = bad}).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(AttendSlowly(**client, std::chrono::seconds(60)).ok());
  EXPECT_THAT(server.Page("/readyz"), HasSubstr("200"));
  server.process().Signal(SIGTERM);
  EXPECT_EQ(server.process().Wait(), 0);
}

}  // namespace
}  // namespace rapt
