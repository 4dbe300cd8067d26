// The client library against a server whose faults are scripted. No test sleeps: backoffs are zero,
// or long enough that only a stop request ends them.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpc/grpc.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "rapt/client.h"
#include "tests/client/cpp/scripted_server.h"

namespace rapt::client {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using test::DeadAddress;
using test::Echo;
using test::Hang;
using test::ScriptedServer;
using testing::ElementsAre;
using testing::Gt;
using testing::HasSubstr;

constexpr RetryPolicy kNoBackoff{.initial_backoff = {}, .max_backoff = {}};
constexpr RetryPolicy kLongBackoff{.initial_backoff = hours(1), .max_backoff = hours(1)};
const CallOptions kPatient{.timeout = hours(10)};

// A call of one query and one key whose Q is `value`.
class Call {
 public:
  explicit Call(float value = 1) : value_(value) {}
  operator AttendCall() const {
    const TensorView tensor = View<float>({1, 1, 1, 1}, absl::MakeConstSpan(&value_, 1));
    return {.q = tensor, .k = tensor, .v = tensor};
  }

 private:
  float value_;
};

float ValueOf(const absl::StatusOr<AttendResult>& result) {
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? result->y.values<float>()[0] : 0;
}

std::unique_ptr<Client> ConnectTo(const std::string& address, const Options& options = {}) {
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(address, options);
  EXPECT_TRUE(client.ok()) << client.status();
  return client.ok() ? *std::move(client) : nullptr;
}

// Fails `times` times, then echoes.
ScriptedServer::Script FailFirst(int times, grpc::Status status) {
  auto left = std::make_shared<std::atomic<int>>(times);
  return [left, status](const v1::AttendRequest& request, v1::AttendResponse& response) {
    return left->fetch_sub(1) > 0 ? std::optional(status) : Echo(request, response);
  };
}

// Four floats that block readers until a point in time. One instance at a time.
class LateFloats {
 public:
  explicit LateFloats(std::chrono::steady_clock::time_point readable)
      : data_(mmap(nullptr, PageSize(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    readable_ = readable;
    page_ = data_;
    struct sigaction wait {};
    wait.sa_handler = [](int) {
      while (std::chrono::steady_clock::now() < readable_) {
      }
      mprotect(page_, PageSize(), PROT_READ);
    };
    wait.sa_flags = SA_RESETHAND;  // any other fault terminates the test
    sigaction(SIGSEGV, &wait, &before_);
  }
  ~LateFloats() {
    sigaction(SIGSEGV, &before_, nullptr);
    munmap(data_, PageSize());
  }
  LateFloats(const LateFloats&) = delete;
  LateFloats& operator=(const LateFloats&) = delete;

  absl::Span<const float> values() const { return {static_cast<const float*>(data_), 4}; }

 private:
  static size_t PageSize() { return sysconf(_SC_PAGESIZE); }

  // Read by the signal handler.
  static inline std::chrono::steady_clock::time_point readable_;
  static inline void* page_;

  void* const data_;
  struct sigaction before_;
};

// Accepts one connection, grants it the largest HTTP/2 windows, answers its first call, which is
// Health.Watch, with UNIMPLEMENTED, and then never reads again.
class StalledServer {
 public:
  StalledServer() : listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    // Never shut down: gRPC would wait 10 s for a poller that waits for the write.
    grpc_init();
    sockaddr_in name = {};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(name);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&name), size), 0);
    EXPECT_EQ(listen(listener_, 1), 0);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&name), &size);
    address_ = "127.0.0.1:" + std::to_string(ntohs(name.sin_port));
    thread_ = std::thread([this] {
      connection_ = accept(listener_, nullptr, nullptr);
      // SETTINGS with INITIAL_WINDOW_SIZE, and WINDOW_UPDATE of the connection.
      constexpr char kFrames[] =
          "\0\0\6\4\0\0\0\0\0\0\4\x7F\xFF\xFF\xFF"
          "\0\0\4\x8\0\0\0\0\0\x7F\xFF\0\0";
      EXPECT_GT(write(connection_, kFrames, sizeof(kFrames) - 1), 0);
      ReadUntilHeaders();
      // HEADERS with END_STREAM and END_HEADERS, of stream 1.
      constexpr char kUnimplemented[] =
          "\0\0\x24\1\5\0\0\0\1"
          "\x88"  // :status: 200
          "\x0F\x10\x10"
          "application/grpc"  // content-type
          "\0\x0B"
          "grpc-status"
          "\x02"
          "12";
      EXPECT_GT(write(connection_, kUnimplemented, sizeof(kUnimplemented) - 1), 0);
    });
  }
  ~StalledServer() { HangUp(); }

  const std::string& address() const { return address_; }

  void HangUp() {
    if (!thread_.joinable()) return;
    thread_.join();
    close(connection_);
    close(listener_);
  }

 private:
  void Read(size_t count, uint8_t* bytes) const {
    EXPECT_EQ(recv(connection_, bytes, count, MSG_WAITALL), static_cast<ssize_t>(count));
  }

  void ReadUntilHeaders() const {
    constexpr uint8_t kHeaders = 1;
    uint8_t preface[24];
    Read(sizeof(preface), preface);
    for (uint8_t head[9] = {}; head[3] != kHeaders;) {
      Read(sizeof(head), head);
      std::vector<uint8_t> payload((head[0] << 16) | (head[1] << 8) | head[2]);
      Read(payload.size(), payload.data());
    }
  }

  const int listener_;
  int connection_ = -1;
  std::string address_;
  std::thread thread_;
};

enum class Method { kSync, kAsync, kBackwardSync, kBackwardAsync };

// dq as Y.
absl::StatusOr<AttendResult> ToAttend(absl::StatusOr<BackwardResult> result) {
  if (!result.ok()) return result.status();
  AttendResult attend;
  attend.y = *std::move(result->dq);
  return attend;
}

// Attend(), AttendAsync(), AttendBackward() and AttendBackwardAsync() have the same contract: each
// test runs with all.
class AttendFaultsTest : public testing::TestWithParam<Method> {
 protected:
  bool IsBackward() const { return GetParam() >= Method::kBackwardSync; }

  // Starts a call, or its backward pass with Q as dY, and returns its future result.
  std::future<absl::StatusOr<AttendResult>> Start(Client& client, const AttendCall& call,
                                                  const CallOptions& options = {}) {
    const BackwardCall backward = {.call = call, .dy = call.q, .gradients = {"dq"}};
    switch (GetParam()) {
      case Method::kAsync:
        return StartAsync(client, call, options);
      case Method::kBackwardSync:
        return std::async(std::launch::async, [&client, backward, options] {
          return ToAttend(client.AttendBackward(backward, options));
        });
      case Method::kBackwardAsync:
        return StartBackwardAsync(client, backward, options);
      default:
        return std::async(std::launch::async,
                          [&client, call, options] { return client.Attend(call, options); });
    }
  }

  absl::StatusOr<AttendResult> Attend(Client& client, const AttendCall& call,
                                      const CallOptions& options = {}) {
    return Start(client, call, options).get();
  }

  static std::future<absl::StatusOr<AttendResult>> StartAsync(Client& client,
                                                              const AttendCall& call,
                                                              const CallOptions& options) {
    std::promise<absl::StatusOr<AttendResult>> promise;
    std::future<absl::StatusOr<AttendResult>> future = promise.get_future();
    client.AttendAsync(call, options,
                       [promise = std::move(promise)](absl::StatusOr<AttendResult> result) mutable {
                         promise.set_value(std::move(result));
                       });
    return future;
  }

  static std::future<absl::StatusOr<AttendResult>> StartBackwardAsync(Client& client,
                                                                      const BackwardCall& call,
                                                                      const CallOptions& options) {
    std::promise<absl::StatusOr<AttendResult>> promise;
    std::future<absl::StatusOr<AttendResult>> future = promise.get_future();
    client.AttendBackwardAsync(
        call, options,
        [promise = std::move(promise)](absl::StatusOr<BackwardResult> result) mutable {
          promise.set_value(ToAttend(std::move(result)));
        });
    return future;
  }
};

std::string NameOf(const testing::TestParamInfo<Method>& info) {
  constexpr const char* kNames[] = {"Sync", "Async", "BackwardSync", "BackwardAsync"};
  return kNames[static_cast<int>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(, AttendFaultsTest,
                         testing::Values(Method::kSync, Method::kAsync, Method::kBackwardSync,
                                         Method::kBackwardAsync),
                         NameOf);

TEST_P(AttendFaultsTest, ReturnsTheResponse) {
  ScriptedServer server(Echo);
  const auto client = ConnectTo(server.address());
  const Call call(42);
  EXPECT_EQ(ValueOf(Attend(*client, call)), 42);
}

TEST_P(AttendFaultsTest, UnavailableIsRetried) {
  ScriptedServer server(FailFirst(2, {grpc::UNAVAILABLE, "draining"}));
  const auto client = ConnectTo(server.address(), {.retries = kNoBackoff});
  const Call call(7);
  EXPECT_EQ(ValueOf(Attend(*client, call)), 7);
  EXPECT_EQ(server.calls(), 3);
}

TEST_P(AttendFaultsTest, AnUnrequestedCancellationIsRetried) {
  ScriptedServer server(FailFirst(1, {grpc::CANCELLED, "CANCELLED"}));
  const auto client = ConnectTo(server.address(), {.retries = kNoBackoff});
  const Call call(7);
  EXPECT_EQ(ValueOf(Attend(*client, call)), 7);
  EXPECT_EQ(server.calls(), 2);
}

TEST_P(AttendFaultsTest, RetriesAreLimited) {
  ScriptedServer server(FailFirst(100, {grpc::UNAVAILABLE, "draining"}));
  const auto client = ConnectTo(server.address(), {.retries = kNoBackoff});
  const Call call;
  EXPECT_EQ(Attend(*client, call).status(),
            absl::UnavailableError(server.address() + ": draining"));
  EXPECT_EQ(server.calls(), kNoBackoff.max_attempts);
}

TEST_P(AttendFaultsTest, OtherErrorsAreReturnedWithoutRetries) {
  for (const grpc::StatusCode code :
       {grpc::INVALID_ARGUMENT, grpc::RESOURCE_EXHAUSTED, grpc::DEADLINE_EXCEEDED,
        grpc::UNIMPLEMENTED, grpc::INTERNAL, grpc::UNKNOWN, grpc::NOT_FOUND, grpc::ABORTED}) {
    ScriptedServer server(FailFirst(100, {code, "k has head size 64"}));
    const auto client = ConnectTo(server.address(), {.retries = kNoBackoff});
    const Call call;
    EXPECT_EQ(Attend(*client, call).status(),
              absl::Status(static_cast<absl::StatusCode>(code), "k has head size 64"));
    EXPECT_EQ(server.calls(), 1) << code;
  }
}

TEST_P(AttendFaultsTest, ResourceExhaustedIsRetriedOnRequest) {
  ScriptedServer server(FailFirst(1, {grpc::RESOURCE_EXHAUSTED, "over the budget"}));
  RetryPolicy retries = kNoBackoff;
  retries.retries_resource_exhausted = true;
  const auto client = ConnectTo(server.address(), {.retries = retries});
  const Call call(3);
  EXPECT_EQ(ValueOf(Attend(*client, call)), 3);
  EXPECT_EQ(server.calls(), 2);
}

TEST_P(AttendFaultsTest, NoBackoffPastTheDeadline) {
  ScriptedServer server(FailFirst(100, {grpc::UNAVAILABLE, "draining"}));
  const auto client = ConnectTo(server.address(), {.retries = kLongBackoff});
  const Call call;
  EXPECT_EQ(Attend(*client, call, {.timeout = std::chrono::minutes(10)}).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(server.calls(), 1);
}

TEST_P(AttendFaultsTest, TheDeadlineEndsAnUnansweredCall) {
  ScriptedServer server(Hang);
  const auto client = ConnectTo(server.address());
  const Call call;
  EXPECT_EQ(Attend(*client, call, {.timeout = milliseconds(50)}).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  server.WaitForCancellations(server.calls());  // the server sees the cancellation
}

TEST_P(AttendFaultsTest, AnExpiredTimeoutEndsTheCallAtOnce) {
  ScriptedServer server(Hang);
  const auto client = ConnectTo(server.address());
  const Call call;
  for (const auto timeout : {std::chrono::nanoseconds(0), std::chrono::nanoseconds::min()}) {
    EXPECT_EQ(Attend(*client, call, {.timeout = timeout}).status().code(),
              absl::StatusCode::kDeadlineExceeded);
  }
}

TEST_P(AttendFaultsTest, TheTimeoutIncludesEncoding) {
  ScriptedServer server(Echo);
  const auto client = ConnectTo(server.address());
  const milliseconds timeout(300);
  const LateFloats late(std::chrono::steady_clock::now() + 2 * timeout);
  const TensorView tensor = View<float>({1, 1, 1, 4}, late.values());
  const Call owner;  // owns the bytes of the other views
  AttendCall call = owner;
  call.q = tensor;
  EXPECT_EQ(Attend(*client, call, {.timeout = timeout}).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(server.calls(), 0);
}

TEST_P(AttendFaultsTest, EveryAttemptSendsTheWholeMessage) {
  ScriptedServer server(FailFirst(1, {grpc::UNAVAILABLE, "draining"}));
  const auto client = ConnectTo(server.address(), {.retries = kNoBackoff});
  const std::vector<float> values(1000);
  const TensorView tensor = View<float>({1, 1, 1000, 1}, values);
  ASSERT_TRUE(Attend(*client, {.q = tensor, .k = tensor, .v = tensor}).ok());
  EXPECT_THAT(server.message_bytes(), ElementsAre(Gt(12'000u), Gt(12'000u)));
}

TEST_P(AttendFaultsTest, LargeTensorsAreResentIntact) {
  ScriptedServer server(FailFirst(1, {grpc::UNAVAILABLE, "draining"}));
  const auto client = ConnectTo(server.address(), {.retries = kNoBackoff});
  std::vector<float> values(2'000'000);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const TensorView tensor = View<float>({1, 2'000'000}, values);
  const absl::StatusOr<AttendResult> result =
      Attend(*client, {.q = tensor, .k = tensor, .v = tensor});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->y.shape(), tensor.shape);
  EXPECT_EQ(result->y.bytes(), tensor.data);
  EXPECT_EQ(server.calls(), 2);
}

TEST_P(AttendFaultsTest, ACallEndsOnceGrpcReleasesItsBytes) {
  StalledServer server;
  const auto client = ConnectTo(
      server.address(), {.max_message_bytes = int64_t{1} << 30, .retries = {.max_attempts = 1}});
  auto values = std::make_unique<std::vector<float>>(16 << 20);
  const TensorView tensor = View<float>({16, 1 << 20}, *values);
  auto result =
      Start(*client, {.q = tensor, .k = tensor, .v = tensor}, {.timeout = milliseconds(50)});
  // The deadline has passed, but the bytes are still being written: the call cannot end.
  EXPECT_EQ(result.wait_for(milliseconds(300)), std::future_status::timeout);
  server.HangUp();
  EXPECT_EQ(result.get().status().code(), absl::StatusCode::kDeadlineExceeded);
  values.reset();
}

TEST_P(AttendFaultsTest, TheLongestTimeoutIsValid) {
  ScriptedServer server(Echo);
  const auto client = ConnectTo(server.address());
  const Call call(5);
  EXPECT_EQ(ValueOf(Attend(*client, call, {.timeout = std::chrono::nanoseconds::max()})), 5);
}

TEST_P(AttendFaultsTest, AStopEndsACallInFlight) {
  ScriptedServer server(Hang);
  const auto client = ConnectTo(server.address());
  const Call call;
  std::stop_source stop;
  auto result = Start(*client, call, {.timeout = hours(1), .stop = stop.get_token()});
  server.WaitForCalls(1);
  stop.request_stop();
  EXPECT_EQ(result.get().status().code(), absl::StatusCode::kCancelled);
  server.WaitForCancellations(1);
}

TEST_P(AttendFaultsTest, AStopEndsABackoff) {
  ScriptedServer server(FailFirst(100, {grpc::UNAVAILABLE, "draining"}));
  const auto client = ConnectTo(server.address(), {.retries = kLongBackoff});
  const Call call;
  std::stop_source stop;
  auto result = Start(*client, call, {.timeout = kPatient.timeout, .stop = stop.get_token()});
  server.WaitForCalls(1);
  stop.request_stop();
  EXPECT_EQ(result.get().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(server.calls(), 1);
}

TEST_P(AttendFaultsTest, AStopBeforeTheStartEndsTheCall) {
  ScriptedServer server(Hang);
  const auto client = ConnectTo(server.address());
  const Call call;
  std::stop_source stop;
  stop.request_stop();
  EXPECT_EQ(Attend(*client, call, {.stop = stop.get_token()}).status().code(),
            absl::StatusCode::kCancelled);
}

TEST_P(AttendFaultsTest, StopsThatRaceWithResponsesEndEveryCallOnce) {
  ScriptedServer server(FailFirst(100, {grpc::UNAVAILABLE, "draining"}));
  const auto client = ConnectTo(server.address(), {.retries = kNoBackoff});
  const Call call(9);
  for (int i = 0; i < 200; ++i) {
    std::stop_source stop;
    auto result = Start(*client, call, {.stop = stop.get_token()});
    if (i % 2 == 0) server.WaitForCalls(server.calls() > 0 ? 1 : 0);
    stop.request_stop();
    const absl::StatusCode code = result.get().status().code();
    EXPECT_TRUE(code == absl::StatusCode::kCancelled || code == absl::StatusCode::kOk ||
                code == absl::StatusCode::kUnavailable)
        << absl::StatusCodeToString(code) << " in call " << i;
  }
}

TEST_P(AttendFaultsTest, AHugeResponseIsRejected) {
  ScriptedServer server([](const v1::AttendRequest&, v1::AttendResponse& response) {
    response.mutable_y()->set_dtype(v1::UINT8);
    response.mutable_y()->add_shape(5 << 20);
    response.mutable_y()->mutable_data()->resize(5 << 20);
    return std::optional(grpc::Status::OK);
  });
  const auto client = ConnectTo(server.address(), {.max_message_bytes = 1 << 20});
  const Call call;
  EXPECT_EQ(Attend(*client, call).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(server.calls(), 1);
}

TEST_P(AttendFaultsTest, AHugeCallIsNotSent) {
  ScriptedServer server(Echo);
  const auto client = ConnectTo(server.address(), {.max_message_bytes = 100});
  const std::vector<float> q(100);
  const TensorView tensor = View<float>({1, 1, 100, 1}, q);
  EXPECT_EQ(Attend(*client, {.q = tensor, .k = tensor, .v = tensor}).status(),
            absl::ResourceExhaustedError("the request takes 1244 bytes; max_message_bytes is 100"));
  EXPECT_EQ(server.calls(), 0);
}

TEST_P(AttendFaultsTest, AnInvalidCallIsNotSent) {
  ScriptedServer server(Echo);
  const auto client = ConnectTo(server.address());
  const Call owner;  // owns the bytes of the views
  AttendCall call = owner;
  call.v.shape = {1, 1, 1, 2};
  const absl::Status status = Attend(*client, call).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("v has shape [1, 1, 1, 2] of FP32, which is 8 bytes"));
  EXPECT_EQ(server.calls(), 0);
}

TEST_P(AttendFaultsTest, AnInconsistentResponseIsInternal) {
  ScriptedServer server([](const v1::AttendRequest&, v1::AttendResponse&) {
    return std::optional(grpc::Status::OK);
  });
  const auto client = ConnectTo(server.address());
  const Call call;
  EXPECT_EQ(Attend(*client, call).status(),
            absl::InternalError(
                absl::StrCat("malformed response from server: no ", IsBackward() ? "dq" : "y")));
}

TEST_P(AttendFaultsTest, AnAddressWithoutAServerIsUnavailable) {
  const std::string address = DeadAddress();
  const auto client = ConnectTo(address, {.connect_timeout = {}, .retries = {.max_attempts = 1}});
  const Call call;
  const absl::Status status = Attend(*client, call).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr(address));
}

TEST(ConnectTest, NamesTheAddressThatDoesNotAnswer) {
  const std::string address = DeadAddress();
  EXPECT_EQ(Client::Connect(address).status(),
            absl::UnavailableError("no server is ready at " + address));
}

TEST(ConnectTest, RejectsInvalidAddressesAndOptions) {
  EXPECT_EQ(Client::Connect("").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Client::Connect("no such host:port").status().code(), absl::StatusCode::kUnavailable);
  const Options wrong[] = {{.connect_timeout = milliseconds(-1)},
                           {.max_message_bytes = 0},
                           {.max_message_bytes = int64_t{1} << 31},
                           {.max_silence = milliseconds(999)},
                           {.max_silence = hours(25)},
                           {.connections = 0},
                           {.retries = {.max_attempts = 0}}};
  for (const Options& options : wrong) {
    const absl::Status status = Client::Connect("127.0.0.1:1", options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  }
}

TEST(ConnectionsTest, SequentialCallsStayOnOneConnection) {
  ScriptedServer server(Echo);
  const auto client = ConnectTo(server.address(), {.connections = 4});
  const Call call;
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(client->Attend(call).ok());
  EXPECT_EQ(server.peers().size(), 1u);
}

TEST(ConnectionsTest, ConcurrentCallsSpreadOverAllConnections) {
  ScriptedServer server(Hang);
  auto client = ConnectTo(server.address(), {.connections = 4});
  const Call call;
  for (int i = 0; i < 8; ++i) {
    client->AttendAsync(call, kPatient, [](const absl::StatusOr<AttendResult>&) {});
  }
  server.WaitForCalls(8);
  EXPECT_EQ(server.peers().size(), 4u);
}

TEST(AttendAsyncTest, TheCallbackNeverRunsInsideTheCall) {
  ScriptedServer server(Echo);
  const auto client = ConnectTo(server.address());
  const Call owner;
  AttendCall wrong = owner;
  wrong.q.shape = {1, 1, 1, 2};
  std::promise<std::thread::id> thread;
  client->AttendAsync(wrong, {}, [&thread](const absl::StatusOr<AttendResult>& result) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    thread.set_value(std::this_thread::get_id());
  });
  EXPECT_NE(thread.get_future().get(), std::this_thread::get_id());
}

TEST(AttendAsyncTest, ACallbackMayCallAgain) {
  ScriptedServer server(Echo);
  const auto client = ConnectTo(server.address());
  const Call first(1), second(2);
  std::promise<float> last;
  client->AttendAsync(first, {}, [&](const absl::StatusOr<AttendResult>& result) {
    EXPECT_EQ(ValueOf(result), 1);
    client->AttendAsync(second, {}, [&](const absl::StatusOr<AttendResult>& again) {
      last.set_value(ValueOf(again));
    });
  });
  EXPECT_EQ(last.get_future().get(), 2);
}

TEST(AttendAsyncTest, ACallbackMayRequestItsOwnStop) {
  ScriptedServer server(Echo);
  const auto client = ConnectTo(server.address());
  const Call call;
  std::stop_source stop;
  std::promise<bool> ok;
  client->AttendAsync(call, {.stop = stop.get_token()},
                      [&](const absl::StatusOr<AttendResult>& result) {
                        stop.request_stop();
                        ok.set_value(result.ok());
                      });
  EXPECT_TRUE(ok.get_future().get());
}

TEST(AttendAsyncTest, TheDestructorCancelsAndWaits) {
  ScriptedServer server(Hang);
  auto client = ConnectTo(server.address());
  const Call call;
  std::vector<absl::StatusCode> codes;  // ordered only by the destructor
  std::mutex mutex;
  for (int i = 0; i < 3; ++i) {
    client->AttendAsync(call, kPatient, [&](const absl::StatusOr<AttendResult>& result) {
      const std::lock_guard<std::mutex> lock(mutex);
      codes.push_back(result.status().code());
    });
  }
  client.reset();
  EXPECT_THAT(codes, ElementsAre(absl::StatusCode::kCancelled, absl::StatusCode::kCancelled,
                                 absl::StatusCode::kCancelled));
}

TEST(AttendAsyncTest, TheDestructorEndsABackoff) {
  ScriptedServer server(FailFirst(100, {grpc::UNAVAILABLE, "draining"}));
  auto client = ConnectTo(server.address(), {.retries = kLongBackoff});
  const Call call;
  absl::StatusCode code = absl::StatusCode::kOk;
  client->AttendAsync(call, kPatient, [&](const absl::StatusOr<AttendResult>& result) {
    code = result.status().code();
  });
  server.WaitForCalls(1);
  client.reset();
  EXPECT_EQ(code, absl::StatusCode::kCancelled);
}

// Returns the number of attempts of a 256 KiB call, which starts with shared memory, to a server
// that is always unavailable.
int CountAttempts(const RetryPolicy& policy) {
  const auto unavailable = [](const v1::AttendRequest&, v1::AttendResponse&) {
    return std::optional(grpc::Status(grpc::StatusCode::UNAVAILABLE, "try later"));
  };
  const ScriptedServer server(unavailable, ScriptedServer::SharedMemory::kRegistered);
  const auto client = ConnectTo(server.address(), {.retries = policy});
  const std::vector<float> x(64 * 1024);
  const TensorView tensor = View<float>({1, 1, 1024, 64}, x);
  const auto result = client->Attend({.q = tensor, .k = tensor, .v = tensor}, kPatient);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  const std::vector<size_t> messages = server.message_bytes();
  EXPECT_LT(messages.at(0), 1024u) << "the first attempt did not use shared memory";
  for (size_t n = 1; n < messages.size(); ++n) EXPECT_GT(messages[n], 3 * 256 * 1024u) << n;
  return server.calls();
}

TEST(SharedMemoryRetryTest, ASharedMemoryAttemptCounts) {
  for (const int max_attempts : {1, 2, 4}) {
    RetryPolicy policy = kNoBackoff;
    policy.max_attempts = max_attempts;
    EXPECT_EQ(CountAttempts(policy), max_attempts);
  }
}

TEST(SharedMemoryRetryTest, ABackoffFollowsASharedMemoryAttempt) {
  RetryPolicy policy;  // a backoff past the deadline, so there is no retry
  policy.initial_backoff = policy.max_backoff = hours(100);
  EXPECT_EQ(CountAttempts(policy), 1);
}

TEST(ClientTest, ManyThreadsShareOneClient) {
  ScriptedServer server(Echo);
  const auto client = ConnectTo(server.address());
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&client, thread] {
      for (int i = 0; i < 50; ++i) {
        const Call call(static_cast<float>(1000 * thread + i));
        EXPECT_EQ(ValueOf(client->Attend(call)), 1000 * thread + i);
      }
    });
  }
}

TEST(ClientTest, AMissingMethodIsUnimplemented) {
  ScriptedServer server(Echo);
  const auto client = ConnectTo(server.address());
  const Call call;
  EXPECT_EQ(client->Diagnose(call).status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(client->EstimateMemory({.lengths = {1}}).status().code(),
            absl::StatusCode::kUnimplemented);
  EXPECT_EQ(client->GetServerInfo().status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(client->CheckHealth().status().code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace rapt::client
