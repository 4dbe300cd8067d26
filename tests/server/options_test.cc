#include "server/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace rapt {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr HostLimits kHost{.cores = 6, .memory_bytes = 1000};

class OptionsTest : public ::testing::Test {
 protected:
  absl::StatusOr<Options> Parse(const std::vector<const char*>& arguments) {
    return ParseOn(kHost, arguments);
  }

  absl::StatusOr<Options> ParseOn(const HostLimits& host,
                                  const std::vector<const char*>& arguments) {
    std::vector<std::string> entries;
    for (const auto& [name, value] : environment_) entries.push_back(name + "=" + value);
    std::vector<const char*> environment;
    for (const std::string& entry : entries) environment.push_back(entry.c_str());
    return ParseOptions(arguments, environment, host);
  }

  std::map<std::string, std::string> environment_;
};

TEST_F(OptionsTest, DefaultsComeFromTheHost) {
  const absl::StatusOr<Options> options = Parse({});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->grpc.address, "127.0.0.1:8001");
  EXPECT_EQ(options->http.address, "127.0.0.1:8000");
  EXPECT_EQ(options->http.max_json_bytes, 8 << 20);
  EXPECT_EQ(options->metrics_address, "127.0.0.1:8002");
  EXPECT_EQ(options->compute.backend, "auto");
  EXPECT_EQ(options->compute.isa, "auto");
  EXPECT_EQ(options->compute.threads, 6);
  EXPECT_EQ(options->admission.memory_budget_bytes, 600);
  EXPECT_EQ(options->calls.max_message_bytes, 0) << "derived from the budget";
  EXPECT_EQ(options->calls.default_deadline, std::chrono::seconds(60));
  EXPECT_EQ(options->compute.stall_timeout, std::chrono::seconds(10));
  EXPECT_EQ(options->log.format, LogFormat::kText);
  EXPECT_EQ(options->log.slow_call, std::chrono::seconds(0)) << "slow calls are not logged";
  EXPECT_EQ(options->drain.grace_period, std::chrono::seconds(20));
  EXPECT_EQ(options->drain.pause, std::chrono::milliseconds(100));
  EXPECT_EQ(options->drain.refusal_time, std::chrono::milliseconds(200));
}

TEST(DefaultThreadsTest, LeaveCoresOfAQuotaToTheWire) {
  const auto threads_with = [](int quota) {
    const HostLimits host{.cores = quota, .has_cpu_quota = true, .memory_bytes = 1000};
    return ParseOptions({}, {}, host)->compute.threads;
  };
  EXPECT_EQ(threads_with(1), 1);
  EXPECT_EQ(threads_with(2), 1);
  EXPECT_EQ(threads_with(4), 3);
  EXPECT_EQ(threads_with(16), 13);
  for (int quota = 2; quota <= 1024; ++quota) {
    const int64_t threads = threads_with(quota);
    EXPECT_LE(threads + WireThreads(threads), quota);
    EXPECT_GE(threads + 1 + WireThreads(threads + 1), quota) << quota << " leaves a core unused";
  }
}

TEST_F(OptionsTest, AFlagOverridesTheEnvironmentWhichOverridesTheDefault) {
  environment_ = {{"RAPT_THREADS", "3"}, {"RAPT_ISA", "avx2"}};
  const absl::StatusOr<Options> options = Parse({"--threads=4"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->compute.threads, 4);
  EXPECT_EQ(options->compute.isa, "avx2");
  EXPECT_EQ(options->compute.backend, "auto");
}

TEST_F(OptionsTest, EveryFlagHasAVariable) {
  environment_ = {{"RAPT_GRPC_ADDRESS", "0.0.0.0:1"},
                  {"RAPT_METRICS_ADDRESS", "[::1]:2"},
                  {"RAPT_BACKEND", "cpu"},
                  {"RAPT_ISA", "avx2"},
                  {"RAPT_CUDNN_LIBRARIES", "/opt/cuda:/opt/cudnn"},
                  {"RAPT_CUDNN_MEMORY_BYTES", "123456789"},
                  {"RAPT_CUDNN_KV_CACHE_BYTES", "234567"},
                  {"RAPT_CUDNN_MIN_FLOPS", "17"},
                  {"RAPT_CUDNN_PLAN_CACHE", "/var/cache/rapt"},
                  {"RAPT_CUDNN_WARM_PLANS", "1x8x64x64, 1x8x128x64 bf16"},
                  {"RAPT_THREADS", "3"},
                  {"RAPT_MEMORY_BUDGET_BYTES", "4"},
                  {"RAPT_MAX_MESSAGE_BYTES", "5"},
                  {"RAPT_GRACE_PERIOD", "6ms"},
                  {"RAPT_DRAIN_PAUSE", "0"},
                  {"RAPT_DRAIN_REFUSAL_TIME", "18ms"},
                  {"RAPT_STALL_TIMEOUT", "14s"},
                  {"RAPT_LOG_FORMAT", "json"},
                  {"RAPT_SLOW_CALL", "15ms"},
                  {"RAPT_MAX_OPEN_CALLS", "7"},
                  {"RAPT_MAX_CALLS_PER_CALLER", "8"},
                  {"RAPT_MAX_QUEUED_REQUESTS", "9"},
                  {"RAPT_MIN_RECEIVE_BYTES_PER_SECOND", "10"},
                  {"RAPT_MAX_QUEUE_DELAY", "11ms"},
                  {"RAPT_DEFAULT_DEADLINE", "12ms"},
                  {"RAPT_MAX_DEADLINE", "13ms"},
                  {"RAPT_UNIX_SOCKET", "/run/rapt.sock"},
                  {"RAPT_UNIX_SOCKET_MODE", "0660"},
                  {"RAPT_ALLOW_SHARED_MEMORY", "true"},
                  {"RAPT_SHARED_MEMORY_PREFIX", "mine"},
                  {"RAPT_MAX_CONNECTIONS", "14"},
                  {"RAPT_MAX_STREAMS_PER_CONNECTION", "15"},
                  {"RAPT_MAX_CONNECTION_IDLE", "16ms"},
                  {"RAPT_MAX_CONNECTION_AGE", "17ms"},
                  {"RAPT_REFLECTION", "false"},
                  {"RAPT_TLS_CERT", "cert"},
                  {"RAPT_TLS_KEY", "key"},
                  {"RAPT_TLS_CLIENT_CA", "ca"},
                  {"RAPT_TOKEN_FILE", "tokens"},
                  {"RAPT_INSECURE", "true"}};
  const absl::StatusOr<Options> options = Parse({});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->grpc.address, "0.0.0.0:1");
  EXPECT_EQ(options->metrics_address, "[::1]:2");
  EXPECT_EQ(options->compute.backend, "cpu");
  EXPECT_EQ(options->compute.isa, "avx2");
  EXPECT_EQ(options->cudnn.libraries, "/opt/cuda:/opt/cudnn");
  EXPECT_EQ(options->cudnn.memory_bytes, 123456789);
  EXPECT_EQ(options->cudnn.kv_cache_bytes, 234567);
  EXPECT_EQ(options->cudnn.min_flops, 17);
  EXPECT_EQ(options->cudnn.plan_cache, "/var/cache/rapt");
  ASSERT_EQ(options->cudnn.warm_plans.size(), 2);
  EXPECT_EQ(options->cudnn.warm_plans[1].dtype, DType::kBFloat16);
  EXPECT_EQ(options->cudnn.warm_plans[1].query_length, 128);
  EXPECT_EQ(options->compute.threads, 3);
  EXPECT_EQ(options->admission.memory_budget_bytes, 4);
  EXPECT_EQ(options->calls.max_message_bytes, 5);
  EXPECT_EQ(options->drain.grace_period, std::chrono::milliseconds(6));
  EXPECT_EQ(options->drain.pause, std::chrono::milliseconds(0));
  EXPECT_EQ(options->drain.refusal_time, std::chrono::milliseconds(18));
  EXPECT_EQ(options->compute.stall_timeout, std::chrono::seconds(14));
  EXPECT_EQ(options->log.format, LogFormat::kJson);
  EXPECT_EQ(options->log.slow_call, std::chrono::milliseconds(15));
  EXPECT_EQ(options->calls.max_open_calls, 7);
  EXPECT_EQ(options->calls.max_calls_per_caller, 8);
  EXPECT_EQ(options->admission.max_queued_requests, 9);
  EXPECT_EQ(options->calls.min_receive_bytes_per_second, 10);
  EXPECT_EQ(options->admission.max_queue_delay, std::chrono::milliseconds(11));
  EXPECT_EQ(options->calls.default_deadline, std::chrono::milliseconds(12));
  EXPECT_EQ(options->calls.max_deadline, std::chrono::milliseconds(13));
  EXPECT_EQ(options->grpc.unix_socket, "/run/rapt.sock");
  EXPECT_EQ(options->grpc.unix_socket_mode.bits, 0660);
  EXPECT_TRUE(options->shared_memory.allowed);
  EXPECT_EQ(options->shared_memory.prefix, "mine");
  EXPECT_EQ(options->grpc.max_connections, 14);
  EXPECT_EQ(options->grpc.max_streams_per_connection, 15);
  EXPECT_EQ(options->grpc.max_connection_idle, std::chrono::milliseconds(16));
  EXPECT_EQ(options->grpc.max_connection_age, std::chrono::milliseconds(17));
  EXPECT_FALSE(options->grpc.reflection);
  EXPECT_EQ(options->security.tls_cert, "cert");
  EXPECT_EQ(options->security.tls_key, "key");
  EXPECT_EQ(options->security.tls_client_ca, "ca");
  EXPECT_EQ(options->security.token_file, "tokens");
}

TEST_F(OptionsTest, AnUnknownVariableIsToldWithTheNearest) {
  environment_ = {{"RAPT_THREDS", "3"}, {"RAPT_FROBNICATE", "x"}, {"RAPT_BACKEND", "cpu"},
                  {"RAPT_", "x"},       {"RAPT_EMPTY", ""},       {"MY_RAPT_THREADS", "3"}};
  const absl::StatusOr<Options> options = Parse({});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_THAT(options->warnings,
              ElementsAre("unknown variable RAPT_; --help lists the flags",
                          "unknown variable RAPT_FROBNICATE; --help lists the flags",
                          "unknown variable RAPT_THREDS; did you mean RAPT_THREADS?"));
}

// Of the clients, and of a service named rapt, as Kubernetes sets them in each pod.
TEST_F(OptionsTest, VariablesOfOthersAreNotTold) {
  environment_ = {{"RAPT_ADDRESS", "127.0.0.1:8001"},
                  {"RAPT_TLS_CA", "ca.crt"},
                  {"RAPT_LIBRARY", "librapt_attention.so"},
                  {"RAPT_SERVICE_HOST", "10.0.0.1"},
                  {"RAPT_SERVICE_PORT", "8001"},
                  {"RAPT_CLUSTER_IP_SERVICE_PORT_GRPC", "8001"},
                  {"RAPT_PORT", "tcp://10.0.0.1:8001"},
                  {"RAPT_CLUSTER_IP_PORT_8001_TCP_ADDR", "10.0.0.1"}};
  EXPECT_THAT(Parse({})->warnings, IsEmpty());
}

TEST_F(OptionsTest, BytesTakeSuffixes) {
  for (const auto& [text, bytes] :
       std::vector<std::pair<const char*, int64_t>>{{"5000000", 5000000},
                                                    {"4096K", int64_t{1} << 22},
                                                    {"4096kiB", int64_t{1} << 22},
                                                    {"512MiB", int64_t{1} << 29},
                                                    {"8G", int64_t{1} << 33},
                                                    {"8Gi", int64_t{1} << 33},
                                                    {"8GiB", int64_t{1} << 33},
                                                    {"1t", int64_t{1} << 40},
                                                    {"4194303T", int64_t{4194303} << 40}}) {
    const std::string flag = std::string("--kv_cache_bytes=") + text;
    const absl::StatusOr<Options> options = Parse({flag.c_str()});
    ASSERT_TRUE(options.ok()) << options.status();
    EXPECT_EQ(options->cache.bytes, bytes) << text;
  }
  for (const char* text : {"", "G", "8GB", "8kB", "8 G", "8.5G", "-8G", "8Gib", "8P", "8GiBs",
                           "0x8", "8388608T", "9223372036854775808", "99999999999999999999G"}) {
    const std::string flag = std::string("--kv_cache_bytes=") + text;
    EXPECT_EQ(Parse({flag.c_str()}).status().message(),
              std::string("--kv_cache_bytes is '") + text +
                  "'; it takes a number of bytes such as 8589934592, 8G or 512MiB");
  }
  EXPECT_EQ(Parse({"--kv_cache_bytes=4194304T"}).status().message(),
            "--kv_cache_bytes is 4611686018427387904; it must be from 0 to 4611686018427387903");
  environment_ = {{"RAPT_MEMORY_BUDGET_BYTES", "2G"}};
  EXPECT_EQ(Parse({})->admission.memory_budget_bytes, int64_t{2} << 30);
}

TEST_F(OptionsTest, EveryFlagOfBytesTakesSuffixes) {
  const std::string help = Parse({"--help"})->text_to_print;
  int flags = 0;
  for (absl::string_view line : absl::StrSplit(help, '\n')) {
    line = absl::StripLeadingAsciiWhitespace(line);
    const absl::string_view flag = line.substr(0, line.find('='));
    if (!absl::StartsWith(flag, "--") || !absl::StrContains(flag, "bytes")) continue;
    ++flags;
    const std::string argument = absl::StrCat(flag, "=64M");
    const absl::Status status = Parse({"--backend=cudnn", argument.c_str()}).status();
    EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_GE(flags, 8);
}

TEST_F(OptionsTest, HostsThatTlsIgnoresAreTold) {
  EXPECT_THAT(Parse({"--http_hosts=rapt,*.example.org"})->warnings, IsEmpty());
  EXPECT_THAT(Parse({"--http_hosts=rapt", "--tls_cert=cert", "--tls_key=key"})->warnings,
              ElementsAre("--http_hosts is ignored with --tls_cert; clients check the name against "
                          "the certificate"));
}

TEST_F(OptionsTest, MoreMemoryThanTheHostHasIsTold) {
  const HostLimits host{.cores = 2, .memory_bytes = int64_t{8} << 30};
  EXPECT_THAT(ParseOn(host, {})->warnings, IsEmpty());
  EXPECT_THAT(ParseOn(host, {"--memory_budget_bytes=8G"})->warnings, IsEmpty());
  EXPECT_THAT(ParseOn(host, {"--memory_budget_bytes=9G"})->warnings,
              ElementsAre("--memory_budget_bytes=9663676416: this machine or its cgroup has only "
                          "8589934592 bytes of memory"));
  EXPECT_THAT(
      ParseOn(host, {"--memory_budget_bytes=5G", "--kv_cache_bytes=4G"})->warnings,
      ElementsAre(HasSubstr("--memory_budget_bytes=5368709120 and --kv_cache_bytes=4294967296")));
  EXPECT_THAT(ParseOn(host, {"--memory_budget_bytes=5G", "--cudnn_memory_bytes=4G"})->warnings,
              ElementsAre(HasSubstr("--cudnn_memory_bytes=4294967296")));
  EXPECT_THAT(
      ParseOn(host, {"--memory_budget_bytes=4194303T", "--kv_cache_bytes=4194303T"})->warnings,
      ElementsAre(HasSubstr("--kv_cache_bytes")))
      << "the largest budgets";
  EXPECT_THAT(ParseOn({}, {"--memory_budget_bytes=9G"})->warnings, IsEmpty()) << "unknown";
}

TEST_F(OptionsTest, ConnectionsFitTheLimitOfDescriptors) {
  const auto host = [](int64_t descriptors) {
    return HostLimits{.cores = 2, .memory_bytes = 1000, .descriptors = descriptors};
  };
  EXPECT_EQ(ParseOn(host(1 << 20), {})->grpc.max_connections, 4096);
  EXPECT_THAT(ParseOn(host(1 << 20), {})->warnings, IsEmpty());

  const absl::StatusOr<Options> few = ParseOn(host(1024), {});
  ASSERT_TRUE(few.ok()) << few.status();
  EXPECT_GE(few->grpc.max_connections, 256);
  EXPECT_LE(2 * few->grpc.max_connections + kProbeConnections, 1024);
  EXPECT_THAT(few->warnings, ElementsAre(AllOf(HasSubstr("--max_connections is 4096"),
                                               HasSubstr("(ulimit -n), 1024"))));
  EXPECT_EQ(ParseOn(host(1024), {"--max_connections=100"})->grpc.max_connections, 100);
  EXPECT_THAT(ParseOn(host(1024), {"--max_connections=100"})->warnings, IsEmpty());
  EXPECT_GT(ParseOn(host(1024), {"--http_address="})->grpc.max_connections,
            few->grpc.max_connections)
      << "one address has more";
  EXPECT_LT(ParseOn(host(1024), {"--unix_socket=s"})->grpc.max_connections,
            few->grpc.max_connections)
      << "three have less";
  EXPECT_THAT(std::string(ParseOn(host(256), {}).status().message()),
              AllOf(HasSubstr("(ulimit -n) is 256"), HasSubstr("must be at least")));
}

TEST_F(OptionsTest, TheGpuIsNotUsedByDefault) {
  EXPECT_EQ(Parse({})->cudnn.memory_bytes, 0);
  EXPECT_EQ(Parse({"--backend=cudnn"})->cudnn.memory_bytes, int64_t{4} << 30);
  EXPECT_EQ(Parse({"--cudnn_memory_bytes=1"}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Parse({"--backend=cudnn"})->cudnn.kv_cache_bytes, 0);
  EXPECT_TRUE(Parse({"--backend=cudnn", "--cudnn_kv_cache_bytes=1"}).ok());
  EXPECT_THAT(std::string(Parse({"--cudnn_kv_cache_bytes=1"}).status().message()),
              HasSubstr("--cudnn_kv_cache_bytes needs --cudnn_memory_bytes"));
}

TEST_F(OptionsTest, TheOffloadThresholdIsMeasuredUnlessSet) {
  EXPECT_EQ(Parse({})->cudnn.min_flops, std::nullopt);
  EXPECT_EQ(Parse({"--cudnn_min_flops=0"})->cudnn.min_flops, 0);
  EXPECT_EQ(Parse({"--cudnn_min_flops=-1"}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(OptionsTest, WarmPlansNeedAGpuAndValidShapes) {
  const auto error = [&](const std::vector<const char*>& flags) {
    return std::string(Parse(flags).status().message());
  };
  EXPECT_TRUE(Parse({})->cudnn.warm_plans.empty());
  EXPECT_THAT(error({"--backend=cudnn", "--cudnn_warm_plans=1x8x64"}),
              HasSubstr("--cudnn_warm_plans: '1x8x64' has 3 axes"));
  EXPECT_THAT(error({"--backend=cpu", "--cudnn_warm_plans=1x8x64x64"}),
              HasSubstr("--cudnn_warm_plans needs"));
}

TEST_F(OptionsTest, AnEmptyVariableCountsAsNotSet) {
  environment_ = {{"RAPT_THREADS", ""}};
  const absl::StatusOr<Options> options = Parse({});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->compute.threads, 6);
}

TEST_F(OptionsTest, AValueMayFollowItsFlagAndTheLastOneWins) {
  const absl::StatusOr<Options> options =
      Parse({"--threads", "2", "--insecure", "--grpc_address", "10.0.0.1:80", "--threads=5"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->compute.threads, 5);
  EXPECT_EQ(options->grpc.address, "10.0.0.1:80");
}

TEST_F(OptionsTest, AValueMayBeEmptyOrBeginWithDashes) {
  const absl::StatusOr<Options> options =
      Parse({"--grpc_address=", "--unix_socket", "-s", "--shared_memory_prefix=--p", "--isa=a=b",
             "--cudnn_min_flops=7", "--cudnn_min_flops=", "--reflection=false"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->grpc.address, "");
  EXPECT_EQ(options->grpc.unix_socket, "-s");
  EXPECT_EQ(options->shared_memory.prefix, "--p");
  EXPECT_EQ(options->compute.isa, "a=b");
  EXPECT_EQ(options->cudnn.min_flops, std::nullopt);
  EXPECT_FALSE(options->grpc.reflection);
  EXPECT_EQ(Parse({"--shared_memory_prefix", ""})->shared_memory.prefix, "");
}

TEST_F(OptionsTest, ASwitchTakesNoValueFromTheNextArgument) {
  EXPECT_THAT(std::string(Parse({"--insecure", "false"}).status().message()),
              HasSubstr("unexpected argument 'false'"));
}

TEST_F(OptionsTest, AFlagDoesNotExcuseABadVariableOrItsOwnFirstValue) {
  EXPECT_THAT(std::string(Parse({"--threads=many", "--threads=4"}).status().message()),
              HasSubstr("'many'"));
  environment_ = {{"RAPT_THREADS", "none"}};
  EXPECT_THAT(std::string(Parse({"--threads=4"}).status().message()), HasSubstr("'none'"));
}

TEST_F(OptionsTest, LoopbackNeedsNoPermission) {
  for (const char* address : {"127.0.0.1:0", "127.8.9.10:1", "localhost:2", "[::1]:3"}) {
    EXPECT_TRUE(Parse({"--grpc_address", address}).ok()) << address;
  }
}

TEST_F(OptionsTest, TlsNeedsNoPermissionAnywhereButMetricsDo) {
  EXPECT_TRUE(Parse({"--grpc_address=0.0.0.0:1", "--tls_cert=c", "--tls_key=k"}).ok());
  EXPECT_FALSE(Parse({"--metrics_address=0.0.0.0:2"}).ok());
}

// A flag file, removed on destruction.
class FlagFile {
 public:
  explicit FlagFile(const std::string& text) {
    const int descriptor = mkstemp(path_.data());
    close(descriptor);
    std::ofstream(path_) << text;
  }
  ~FlagFile() { std::remove(path_.c_str()); }
  std::string flag() const { return "--flagfile=" + path_; }
  const char* path() const { return path_.c_str(); }

 private:
  std::string path_ = testing::TempDir() + "/flags-XXXXXX";
};

TEST_F(OptionsTest, AFlagFileIsReplacedByItsFlags) {
  environment_ = {{"RAPT_ISA", "avx2"}, {"RAPT_THREADS", "2"}};
  const FlagFile file("# Two of them:\n\n  --threads=3\r\n--backend=cpu");
  for (const auto& [arguments, threads] : std::vector<std::pair<std::vector<const char*>, int>>{
           {{"--flagfile", file.path()}, 3},
           {{"--threads=4", "--flagfile", file.path()}, 3},
           {{"--flagfile", file.path(), "--threads=4"}, 4}}) {
    const absl::StatusOr<Options> options = Parse(arguments);
    ASSERT_TRUE(options.ok()) << options.status();
    EXPECT_EQ(options->compute.threads, threads);
    EXPECT_EQ(options->compute.backend, "cpu");
    EXPECT_EQ(options->compute.isa, "avx2");
  }
}

TEST_F(OptionsTest, ErrorsInAFlagFileNameTheLine) {
  for (const auto& [text, fragment] : std::vector<std::pair<std::string, std::string>>{
           {"--threads=3\nthreads=4", "line 2 of --flagfile"},
           {"--flagfile=again", "line 1 of --flagfile"},
           {"\n--flagfile\nagain", "line 2 of --flagfile"},
           {"--threads 3", "unknown flag --threads 3"},
           {"--threads\n--isa=avx2", "--threads needs a value"},
           {"--threads", "--threads"},
           {"--", "unexpected argument '--'"},
           {"--help", "unknown flag --help"},
           {"--version", "unknown flag --version"},
           {"--threads=3\r\n--isa=avx2\r\nx\r\n", "line 3 of --flagfile"},
           {std::string("--thr\0eads=3", 13), "unknown flag --thr"},
           {std::string("--threads=\0", 11), "--threads"},
           {"--threds=3", "--threds"},
           {"--threads=many", "'many'"},
           {"--grpc_address=0.0.0.0:1", "--insecure"}}) {
    const FlagFile file(text);
    const absl::Status status = Parse({file.flag().c_str()}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(fragment));
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr(file.path())));
  }
}

TEST_F(OptionsTest, HelpListsEveryFlagAndOverridesErrors) {
  const absl::StatusOr<Options> options = Parse({"--nonsense", "--help"});
  ASSERT_TRUE(options.ok()) << options.status();
  for (const char* flag :
       {"--grpc_address=127.0.0.1:8001\n", "--metrics_address", "--threads=0\n", "--backend=auto\n",
        "--isa=auto\n", "--unix_socket_mode=0600\n", "--max_connection_idle=30m\n",
        "--max_connection_age=0\n", "--log_format=text\n", "--reflection=true\n",
        "--cudnn_min_flops=\n", "--cudnn_warm_plans=\n", "--max_message_bytes", "--insecure"}) {
    EXPECT_THAT(options->text_to_print, HasSubstr(flag));
  }
}

TEST_F(OptionsTest, HelpWinsOverABadVariable) {
  environment_ = {{"RAPT_THREADS", "many"}};
  EXPECT_THAT(Parse({"--help"})->text_to_print, HasSubstr("--threads"));
  EXPECT_THAT(Parse({"--version"})->text_to_print, HasSubstr("rapt-server"));
}

TEST_F(OptionsTest, VersionIsOneLine) {
  const absl::StatusOr<Options> options = Parse({"--version"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_THAT(options->text_to_print, ::testing::MatchesRegex("rapt-server [0-9.]+\n"));
}

struct BadLine {
  const char* name;
  std::vector<const char*> arguments;
  std::map<std::string, std::string> environment;
  std::vector<const char*> fragments;
};

const BadLine kBadLines[] = {
    {"UnknownFlag", {"--threds=3"}, {}, {"--threds"}},
    {"Stray", {"serve"}, {}, {"'serve'"}},
    {"SingleDash", {"-threads=3"}, {}, {"unknown flag -threads", "--threads"}},
    {"SingleDashAlone", {"-"}, {}, {"'-'"}},
    {"StrayAfterDoubleDash", {"--", "serve"}, {}, {"'--'"}},
    {"Misspelt", {"--max_message-bytes=3"}, {}, {"did you mean --max_message_bytes?"}},
    {"NoName", {"--=3"}, {}, {"unknown flag --;"}},
    {"VersionWithValue", {"--version=false"}, {}, {"--version"}},
    {"ModeOfMinusZero", {"--unix_socket_mode=-0"}, {}, {"--unix_socket_mode", "'-0'"}},
    {"ModeEmpty", {"--unix_socket_mode="}, {}, {"--unix_socket_mode", "''"}},
    {"ModeBeyondAnyNumber", {"--unix_socket_mode=77777777777777"}, {}, {"0777"}},
    {"EmptyNumber", {"--threads="}, {}, {"--threads is ''", "whole number"}},
    {"EmptyBool", {"--insecure="}, {}, {"--insecure is ''", "true or false"}},
    {"FlagAsValue", {"--threads", "--insecure"}, {}, {"--threads needs a value"}},
    {"DashesAsValue", {"--threads=--x"}, {}, {"--threads is '--x'", "whole number"}},
    {"DashAsValue", {"--threads", "-x"}, {}, {"--threads is '-x'", "whole number"}},
    {"NegativeAfterItsFlag", {"--threads", "-1"}, {}, {"--threads is -1", "1024"}},
    {"TooLargeForAnyNumber", {"--threads=9223372036854775808"}, {}, {"whole number"}},
    {"DoubleDashAlone", {"--"}, {}, {"'--'"}},
    {"NoValue", {"--threads"}, {}, {"--threads", "value"}},
    {"NotANumber", {"--threads=many"}, {}, {"--threads", "'many'", "whole number"}},
    {"NoAddress", {"--grpc_address="}, {}, {"--grpc_address", "host:port"}},
    {"ModeOfNine", {"--unix_socket_mode=0690"}, {}, {"--unix_socket_mode", "'0690'", "0777"}},
    {"ModeTooLong", {"--unix_socket_mode=1600"}, {}, {"--unix_socket_mode", "'1600'", "0777"}},
    {"NotABool", {"--insecure=perhaps"}, {}, {"--insecure", "'perhaps'", "true or false"}},
    {"LessThanAMillisecond", {"--slow_call=1us"}, {}, {"--slow_call", "'1us'", "milliseconds"}},
    {"LessThanAnyClock", {"--max_connection_age=0.1ns"}, {}, {"'0.1ns'", "milliseconds"}},
    {"PartsOfAMillisecond", {"--max_queue_delay=1.5ms"}, {}, {"'1.5ms'", "milliseconds"}},
    {"HostWithPort", {"--http_hosts=a,b:80"}, {}, {"--http_hosts", "'b:80'", "without port"}},
    {"HostWithFinalDot", {"--http_hosts=a.b."}, {}, {"--http_hosts", "'a.b.'", "final dot"}},
    {"HostWithEmptyLabel", {"--http_hosts=*..b"}, {}, {"--http_hosts", "'*..b'"}},
    {"HostOfStars", {"--http_hosts=*.*"}, {}, {"--http_hosts", "'*.*'"}},
    {"OriginOfAnyPage", {"--http_allow_origin=*"}, {}, {"--http_allow_origin", "'*'"}},
    {"OriginNull", {"--http_allow_origin=null"}, {}, {"--http_allow_origin", "'null'"}},
    {"OriginWithPath", {"--http_allow_origin=https://a/"}, {}, {"'https://a/'", "without path"}},
    {"OriginInCapitals", {"--http_allow_origin=https://A"}, {}, {"'https://A'", "lower case"}},
    {"OriginWithDefaultPort", {"--http_allow_origin=http://a:80"}, {}, {"'http://a:80'", "port"}},
    {"OriginPort", {"--http_allow_origin=http://a:99999"}, {}, {"'http://a:99999'"}},
    {"OriginWithoutScheme", {"--http_allow_origin=a.example"}, {}, {"'a.example'", "https://"}},
    {"OriginWithSpace", {"--http_allow_origin=http://a, http://b"}, {}, {"' http://b'"}},
    {"NotADuration", {"--grace_period=20"}, {}, {"--grace_period", "'20'", "20s"}},
    {"Variable", {}, {{"RAPT_THREADS", "many"}}, {"RAPT_THREADS", "'many'"}},
    {"ThreadsNegative", {"--threads=-1"}, {}, {"--threads", "-1", "1024"}},
    {"ThreadsTooMany", {"--threads=1025"}, {}, {"--threads", "1025", "1024"}},
    {"BudgetNegative", {"--memory_budget_bytes=-1"}, {}, {"--memory_budget_bytes", "-1"}},
    {"MessageTooLarge", {"--max_message_bytes=2147483648"}, {}, {"2147483648", "2147483647"}},
    {"MessageNegative", {"--max_message_bytes=-1"}, {}, {"--max_message_bytes", "-1"}},
    {"NoOpenCalls", {"--max_open_calls=0"}, {}, {"--max_open_calls", "0"}},
    {"NoCallsPerCaller", {"--max_calls_per_caller=0"}, {}, {"--max_calls_per_caller", "0"}},
    {"NoConnections", {"--max_connections=0"}, {}, {"--max_connections", "0"}},
    {"NoStreams", {"--max_streams_per_connection=0"}, {}, {"--max_streams_per_connection", "0"}},
    {"NoIdleTime", {"--max_connection_idle=0"}, {}, {"--max_connection_idle", "0", "1ms"}},
    {"AgeNegative", {"--max_connection_age=-1s"}, {}, {"--max_connection_age", "-1s"}},
    {"QueueNegative", {"--max_queued_requests=-1"}, {}, {"--max_queued_requests", "-1"}},
    {"RateZero", {"--min_receive_bytes_per_second=0"}, {}, {"--min_receive_bytes", "0"}},
    {"DelayTooLong", {"--max_queue_delay=25h"}, {}, {"--max_queue_delay", "25h", "24h"}},
    {"NoDeadline", {"--default_deadline=0"}, {}, {"--default_deadline", "0", "1ms"}},
    {"NoLongestDeadline", {"--max_deadline=0"}, {}, {"--max_deadline", "0", "1ms"}},
    {"StallTimeoutTooShort", {"--stall_timeout=99ms"}, {}, {"--stall_timeout", "99ms", "100ms"}},
    {"SlowCallNegative", {"--slow_call=-1s"}, {}, {"--slow_call", "-1s"}},
    {"LogFormat", {"--log_format=xml"}, {}, {"--log_format", "'xml'", "json"}},
    {"GraceNegative", {"--grace_period=-1s"}, {}, {"--grace_period", "-1s"}},
    {"DrainPauseNegative", {"--drain_pause=-1s"}, {}, {"--drain_pause", "-1s"}},
    {"RefusalTooLong", {"--drain_refusal_time=25h"}, {}, {"--drain_refusal_time", "25h", "24h"}},
    {"NoPort", {"--grpc_address=127.0.0.1"}, {}, {"--grpc_address", "'127.0.0.1'", "host:port"}},
    {"PortTooLarge", {"--grpc_address=127.0.0.1:65536"}, {}, {"65536", "65535"}},
    {"PortWithSpace", {"--grpc_address=127.0.0.1: 1"}, {}, {"'127.0.0.1: 1'", "host:port"}},
    {"HostWithUser", {"--grpc_address=a@localhost:1", "--insecure"}, {}, {"'a@localhost:1'"}},
    {"Ipv6WithoutBrackets", {"--grpc_address=::1:1", "--insecure"}, {}, {"'::1:1'", "brackets"}},
    {"OriginOfNoIpv6", {"--http_allow_origin=http://[1:2]"}, {}, {"'http://[1:2]'"}},
    {"OriginWithPortZero", {"--http_allow_origin=http://a:0"}, {}, {"'http://a:0'"}},
    {"OriginWithPortInLongForm", {"--http_allow_origin=http://a:081"}, {}, {"'http://a:081'"}},
    {"OriginWithEmptyPort", {"--http_allow_origin=http://a:"}, {}, {"'http://a:'"}},
    {"NoHost", {"--metrics_address=:80"}, {}, {"--metrics_address", "':80'"}},
    {"NotLoopback", {"--grpc_address=0.0.0.0:1"}, {}, {"--grpc_address", "--insecure"}},
    {"MetricsNotLoopback", {"--metrics_address=[::]:1"}, {}, {"--metrics_address", "--insecure"}},
    {"CertWithoutKey", {"--tls_cert=c"}, {}, {"--tls_cert", "--tls_key"}},
    {"KeyWithoutCert", {"--tls_key=k"}, {}, {"--tls_cert", "--tls_key"}},
    {"ClientCaWithoutCert", {"--tls_client_ca=c"}, {}, {"--tls_client_ca", "--tls_cert"}},
    {"CertForNoAddress",
     {"--tls_cert=c", "--tls_key=k", "--grpc_address=", "--http_address=", "--unix_socket=s"},
     {},
     {"--tls_cert", "--grpc_address"}},
    {"HttpNotLoopback", {"--http_address=[::]:1"}, {}, {"--http_address", "--insecure"}},
    {"NoJson", {"--max_json_bytes=0"}, {}, {"--max_json_bytes", "0"}},
    {"TokensInPlainTextOverHttp",
     {"--token_file=t", "--grpc_address=", "--unix_socket=s"},
     {},
     {"--token_file", "--http_address"}},
    {"TokensInPlainText", {"--token_file=t"}, {}, {"--token_file", "--tls_cert"}},
    {"TokensInPlainTextDespitePermission",
     {"--token_file=t", "--insecure", "--unix_socket=s"},
     {},
     {"--token_file", "--tls_cert"}},
    {"NoFlagFile", {"--flagfile=/nonexistent/flags"}, {}, {"--flagfile", "can't be read"}},
    {"FlagFileWithoutAName", {"--flagfile"}, {}, {"--flagfile", "value"}},
    {"AlmostLoopback", {"--grpc_address=127.0.0.1.example.org:1"}, {}, {"--insecure"}},
};

class BadLineTest : public OptionsTest, public ::testing::WithParamInterface<BadLine> {};

TEST_P(BadLineTest, GetsOneLineThatNamesTheError) {
  environment_ = GetParam().environment;
  const absl::Status status = Parse(GetParam().arguments).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  const std::string message(status.message());
  EXPECT_THAT(message, Not(HasSubstr("\n")));
  for (const char* fragment : GetParam().fragments) EXPECT_THAT(message, HasSubstr(fragment));
}

INSTANTIATE_TEST_SUITE_P(All, BadLineTest, ::testing::ValuesIn(kBadLines),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace rapt
