// The real rapt-server on a Unix domain socket.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "rapt/client.h"
#include "tests/support/server_process.h"

namespace rapt {
namespace {

using client::Client;
using client::View;
using test::ChildProcess;
using test::ServerCommand;
using test::ServerProcess;
using ::testing::HasSubstr;

class UnixSocketTest : public ::testing::Test {
 protected:
  UnixSocketTest() {
    std::string pattern = std::filesystem::temp_directory_path() / "rapt-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    path_ = folder_ / "socket";
  }
  ~UnixSocketTest() override { std::filesystem::remove_all(folder_); }

  std::string Flag() const { return absl::StrCat("--unix_socket=", path_.string()); }
  std::string Address() const { return absl::StrCat("unix:", path_.string()); }

  int ModeOfSocket() const {
    struct stat status = {};
    EXPECT_EQ(stat(path_.c_str(), &status), 0);
    EXPECT_TRUE(S_ISSOCK(status.st_mode));
    return static_cast<int>(status.st_mode & 0777);
  }

  static absl::StatusOr<client::AttendResult> Attend(const std::string& address) {
    auto client = Client::Connect(address);
    if (!client.ok()) return client.status();
    const std::vector<float> x(2 * 3 * 4, 0.5f);
    const client::TensorView tokens = View<float>({1, 2, 3, 4}, x);
    return (*client)->Attend({.q = tokens, .k = tokens, .v = tokens});
  }

  // Expects that the server does not start.
  static void ExpectRefusal(const std::vector<std::string>& flags, int code,
                            const std::string& fragment) {
    std::vector<std::string> all = {"--grpc_address=127.0.0.1:0", "--metrics_address=127.0.0.1:0"};
    all.insert(all.end(), flags.begin(), flags.end());
    ChildProcess server(ServerCommand(all));
    EXPECT_EQ(server.Wait(), code);
    EXPECT_THAT(server.Errors(), HasSubstr(fragment));
  }

  std::filesystem::path folder_, path_;
};

TEST_F(UnixSocketTest, ServesItsOwnerInAdditionToTcp) {
  {
    const ServerProcess server({Flag()});
    EXPECT_EQ(ModeOfSocket(), 0600);
    for (const std::string& address : {Address(), server.grpc_address()}) {
      const auto result = Attend(address);
      EXPECT_TRUE(result.ok()) << address << ": " << result.status();
    }
  }
  EXPECT_FALSE(std::filesystem::exists(path_)) << "the server must remove it on exit";
}

TEST_F(UnixSocketTest, ModeMayAdmitAGroup) {
  const ServerProcess server({Flag(), "--unix_socket_mode=0660"});
  EXPECT_EQ(ModeOfSocket(), 0660);
}

TEST_F(UnixSocketTest, MayBeTheOnlyAddress) {
  ChildProcess server(ServerCommand({"--grpc_address=", "--metrics_address=127.0.0.1:0", Flag()}));
  EXPECT_THAT(server.ReadLine(), HasSubstr(absl::StrCat("grpc=", Address(), " ")));
  EXPECT_TRUE(Attend(Address()).ok());
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(), 0);
}

// The least number that a new descriptor of the process can get.
rlim_t LowestFreeDescriptor(pid_t process) {
  rlim_t number = 0;
  const std::string folder = absl::StrCat("/proc/", process, "/fd/");
  while (std::filesystem::is_symlink(folder + std::to_string(number))) ++number;
  return number;
}

TEST_F(UnixSocketTest, SurvivesAMomentWithoutDescriptors) {
#ifdef RAPT_SANITIZED
  // UBSan checks the type of an object through a pipe, which needs descriptors.
  GTEST_SKIP() << "UBSan needs descriptors";
#endif
  const ServerProcess server({Flag()});
  rlimit usual = {};
  ASSERT_EQ(prlimit(server.pid(), RLIMIT_NOFILE, nullptr, &usual), 0);
  const rlimit none = {.rlim_cur = LowestFreeDescriptor(server.pid()), .rlim_max = usual.rlim_max};
  ASSERT_EQ(prlimit(server.pid(), RLIMIT_NOFILE, &none, nullptr), 0);
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  path_.string().copy(name.sun_path, sizeof(name.sun_path) - 1);
  const int waiting = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(connect(waiting, reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (server.Log().find("cannot accept connections") == std::string::npos) {
    ASSERT_LT(std::chrono::steady_clock::now(), end) << "the server did not notice";
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  ASSERT_EQ(prlimit(server.pid(), RLIMIT_NOFILE, &usual, nullptr), 0);
  EXPECT_TRUE(Attend(Address()).ok());
  close(waiting);
}

TEST_F(UnixSocketTest, AStaleSocketIsReplaced) {
  ServerProcess killed({Flag()});
  killed.Signal(SIGKILL);
  killed.Wait();
  ASSERT_TRUE(std::filesystem::exists(path_));
  const ServerProcess server({Flag()});
  EXPECT_TRUE(Attend(Address()).ok());
}

TEST_F(UnixSocketTest, ARunningServersSocketIsKept) {
  const ServerProcess server({Flag()});
  ExpectRefusal({Flag()}, 1, "another server");
  EXPECT_TRUE(Attend(Address()).ok());
}

TEST_F(UnixSocketTest, AnotherFileIsNotReplaced) {
  std::ofstream(path_) << "mine";
  ExpectRefusal({Flag()}, 1, "it is not a socket");
  EXPECT_EQ(std::filesystem::file_size(path_), 4u);
}

TEST_F(UnixSocketTest, RejectsAPathThatIsTooLong) {
  ExpectRefusal({absl::StrCat("--unix_socket=/", std::string(120, 'x'))}, 1, "107");
  ExpectRefusal({absl::StrCat("--unix_socket=", folder_.string(), "/none/socket")}, 1, "directory");
}

}  // namespace
}  // namespace rapt
