// The service under floods: others' small calls, probes and the server's memory while a peer
// without a token sends frames that cost the server more than the peer. Each flood has a server of
// its own. The whole run takes five minutes; `--filter REGEX` runs only floods whose names match.
// Prints Markdown for RESULTS.md.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <regex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/descriptor.h"
#include "bench/attack.h"
#include "bench/infer_call.h"
#include "bench/server_process.h"
#include "proto/inference/grpc_service.pb.h"
#include "tests/support/raw_http2.h"

namespace rapt::bench {
namespace {

using std::chrono::milliseconds;
using test::BigEndian;
using test::CallHeaders;
using test::Frame;
using test::HeaderBlock;
using test::Preface;
using test::Prefixed;
using Clock = std::chrono::steady_clock;

constexpr int64_t kBudget = 256 * kMiB;
constexpr Seconds kWithout{2}, kDuring{6}, kAfter{5};

// The bounds.
constexpr double kMostP99Ms = 50;
constexpr double kLeastAnswered = 0.999;
constexpr int64_t kMostResident = kBudget / 4 * 5 + 64 * kMiB;
constexpr int64_t kMostKept = 16 * kMiB;  // of the memory during the flood, 5 s later

// --- Floods --------------------------------------------------------------------------------------

constexpr char kInfer[] = "/inference.GRPCInferenceService/ModelInfer";
constexpr char kTraceSetting[] = "/inference.GRPCInferenceService/TraceSetting";
constexpr char kCheck[] = "/grpc.health.v1.Health/Check";
constexpr char kWatch[] = "/grpc.health.v1.Health/Watch";
constexpr size_t kFrameBytes = 16 * 1024;

std::string Repeat(const std::string& text, int count) {
  std::string all;
  for (int n = 0; n < count; ++n) all += text;
  return all;
}

// The frames of `count` streams.
std::string Streams(int count, absl::FunctionRef<std::string(uint32_t stream)> frames) {
  std::string all;
  for (int n = 0; n < count; ++n) all += frames(static_cast<uint32_t>(2 * n + 1));
  return all;
}

std::string Head(uint32_t stream, const char* path) {
  return Frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, stream, HeaderBlock(CallHeaders(path)));
}

// A header block in frames without its end.
std::string OpenHead(const std::string& block) {
  std::string frames;
  for (size_t place = 0; place < block.size(); place += kFrameBytes) {
    frames += Frame(place == 0 ? NGHTTP2_HEADERS : NGHTTP2_CONTINUATION, 0, 1,
                    block.substr(place, kFrameBytes));
  }
  return frames;
}

std::string Data(uint32_t stream, const std::string& bytes, uint8_t flags = NGHTTP2_FLAG_NONE) {
  std::string frames;
  for (size_t place = 0; place < bytes.size(); place += kFrameBytes) {
    const bool is_last = place + kFrameBytes >= bytes.size();
    frames +=
        Frame(NGHTTP2_DATA, is_last ? flags : uint8_t{0}, stream, bytes.substr(place, kFrameBytes));
  }
  return frames;
}

// A call with a message of no bytes.
std::string EmptyCall(uint32_t stream, const char* path) {
  return Head(stream, path) + Data(stream, Prefixed(""), NGHTTP2_FLAG_END_STREAM);
}

// The window of each response.
std::string Window(uint32_t bytes) {
  return Frame(NGHTTP2_SETTINGS, 0, 0, std::string("\0\4", 2) + BigEndian(bytes));
}
std::string LargestWindows() {
  return Window(0x7FFFFFFF) + Frame(NGHTTP2_WINDOW_UPDATE, 0, 0, BigEndian(0x7FFF0000));
}

// Almost as large as a method without tensors may receive. Takes 20 times the memory once parsed.
std::string EmptyStrings() {
  inference::TraceSettingRequest request;
  auto& setting = (*request.mutable_settings())["trace_level"];
  for (int n = 0; n < 29'000; ++n) setting.add_value();
  return Prefixed(request.SerializeAsString());
}

// A call of 18 KiB whose response has 8 MiB.
std::string CallOfLargeResponse(uint32_t stream) {
  constexpr int64_t kQueries = 4096, kValues = 512;
  inference::ModelInferRequest request;
  request.set_model_name("attention");
  const auto add = [&request](const char* name, int64_t rows, int64_t size) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype("FP32");
    for (const int64_t axis : {int64_t{1}, int64_t{1}, rows, size}) input.add_shape(axis);
    request.add_raw_input_contents(std::string(static_cast<size_t>(rows * size * 4), '\0'));
  };
  add("Q", kQueries, 1);
  add("K", 1, 1);
  add("V", 1, kValues);
  return Head(stream, kInfer) +
         Data(stream, Prefixed(request.SerializeAsString()), NGHTTP2_FLAG_END_STREAM);
}

// The same frame over and over, on 4 connections.
Flood OfFrames(const char* name, const std::string& frame, const std::string& before = "") {
  return {.name = absl::StrCat("D11 ", name),
          .once = Preface() + before,
          .repeated = Repeat(frame, 1000),
          .connections = 4};
}

std::vector<Flood> FramesWithoutUse() {
  const std::string call = Head(1, kInfer) + Data(1, Prefixed("", kMiB));
  return {
      OfFrames("empty DATA", Frame(NGHTTP2_DATA, 0, 1, ""), call),
      OfFrames("DATA of 1 byte", Frame(NGHTTP2_DATA, 0, 1, "x"), call),
      OfFrames("WINDOW_UPDATE", Frame(NGHTTP2_WINDOW_UPDATE, 0, 0, BigEndian(1))),
      OfFrames("PING", Frame(NGHTTP2_PING, 0, 0, "12345678")),
      OfFrames("SETTINGS", Frame(NGHTTP2_SETTINGS, 0, 0, "")),
      OfFrames("GOAWAY", Frame(NGHTTP2_GOAWAY, 0, 0, std::string(8, '\0'))),
      OfFrames("empty CONTINUATION", Frame(NGHTTP2_CONTINUATION, 0, 1, ""),
               OpenHead(HeaderBlock(CallHeaders(kInfer)))),
  };
}

// Calls that cost memory before, or instead of, their computation.
std::vector<Flood> CallsThatCost() {
  const std::string large_header =
      HeaderBlock(CallHeaders(kInfer, {{"x", std::string(20 * kMiB, 'x')}}));
  const std::string start_of_large = Prefixed("", 64 * kMiB) + std::string(kFrameBytes, '\n');
  const std::string strings = EmptyStrings();
  const auto reset = [](uint32_t stream) {
    return Frame(NGHTTP2_RST_STREAM, 0, stream, BigEndian(NGHTTP2_CANCEL));
  };
  return {
      {.name = "D1 header of 20 MiB in CONTINUATION",
       .once = Preface() + OpenHead(large_header),
       .connections = 40},
      {.name = "D2 rapid reset",
       .once =
           Preface() +
           Streams(20'000, [&](uint32_t stream) { return Head(stream, kInfer) + reset(stream); }),
       .connections = 8},
      {.name = "D3 TraceSetting of 64 MiB",
       .once = Preface() + Streams(40,
                                   [&](uint32_t stream) {
                                     return Head(stream, kTraceSetting) +
                                            Data(stream, start_of_large);
                                   }),
       .connections = 8,
       .keep = milliseconds(20)},
      {.name = "D3 TraceSetting of 29,000 empty strings",
       .once = Preface() + Streams(16,
                                   [&](uint32_t stream) {
                                     return Head(stream, kTraceSetting) +
                                            Data(stream, strings, NGHTTP2_FLAG_END_STREAM);
                                   }),
       .connections = 8,
       .keep = milliseconds(20)},
      {.name = "D5 calls that announce 100 MiB and send nothing",
       .once = Preface() + Streams(30,
                                   [](uint32_t stream) {
                                     return Head(stream, kInfer) +
                                            Data(stream, Prefixed("", 100 * kMiB));
                                   }),
       .connections = 4,
       .keep = milliseconds(1500)},  // less than the time after which the server ends the calls
  };
}

std::vector<Flood> ManyAtOnce() {
  const std::string checks =
      Streams(20'000, [](uint32_t stream) { return EmptyCall(stream, kCheck); });
  return {
      {.name = "D4 health calls, window 0",
       .once = Preface() + Window(0) +
               Streams(256, [](uint32_t stream) { return EmptyCall(stream, kCheck); }),
       .connections = 8,
       .reads = false,
       .keep = milliseconds(2000)},
      {.name = "D4 health calls, responses not read",
       .once = Preface() + checks,
       .connections = 16,
       .reads = false},
      {.name = "D5 responses of 8 MiB, not read",
       .once = Preface() + LargestWindows() + Streams(3, CallOfLargeResponse),
       .connections = 16,
       .reads = false},
      {.name = "D4 health calls on 1000 connections, responses not read",
       .once = Preface() + checks,
       .connections = 1000,
       .reads = false},
      {.name = "D4 the same, from the address of the others",
       .once = Preface() + checks,
       .connections = 1000,
       .reads = false,
       .from = "127.0.0.1"},
      {.name = "D7 slow POSTs to the metrics port",
       .once = "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n",
       .repeated = "x",
       .connections = 16,
       .pace = milliseconds(500),
       .is_http = true},
      {.name = "D7 slow heads to the metrics port",
       .once = "GET /readyz HTTP/1.1\r\n",
       .repeated = "x",
       .connections = 200,
       .pace = milliseconds(500),
       .pause = milliseconds(100),
       .is_http = true},
      {.name = "D9 40,000 watches",
       .once = Preface() + Streams(1000, [](uint32_t stream) { return EmptyCall(stream, kWatch); }),
       .connections = 40,
       .keep = milliseconds(2000)},
      {.name = "D10 4096 connections of one address",
       .once = Preface(),
       .connections = 4096,
       .pause = milliseconds(100)},
  };
}

std::vector<Flood> AllFloods() {
  std::vector<Flood> all = CallsThatCost();
  for (Flood& flood : ManyAtOnce()) all.push_back(std::move(flood));
  for (Flood& flood : FramesWithoutUse()) all.push_back(std::move(flood));
  return all;
}

// --- Others --------------------------------------------------------------------------------------

// Small calls, one after the other.
struct SmallCalls {
  std::vector<double> ms = {};  // of those that succeeded
  int failed = 0;

  SmallCalls(InferCaller& caller, Seconds time) {
    const std::string message = SerializedInfer({.queries = 16, .keys = 16});
    const grpc::ByteBuffer request = BufferOf(message);
    const auto begin = Clock::now();
    while (Since(begin) < time) {
      caller.Start(request);
      const InferCaller::Ended ended = caller.WaitForOne();
      if (ended.status.ok()) {
        ms.push_back(1e3 * ended.took.count());
      } else {
        ++failed;
      }
    }
  }
};

// Asks for /readyz, on a new connection each time, every 20 ms until Stop().
class Prober {
 public:
  explicit Prober(int port) : thread_([this, port] { Run(port); }) {}
  ~Prober() { Stop(); }
  Prober(const Prober&) = delete;
  Prober& operator=(const Prober&) = delete;

  // Returns the share of probes that were answered in time.
  double Stop() {
    stopping_ = true;
    if (thread_.joinable()) thread_.join();
    return static_cast<double>(answered_) / std::max(sent_, 1);
  }

 private:
  void Run(int port) {
    for (auto next = Clock::now(); !stopping_; std::this_thread::sleep_until(next)) {
      ++sent_;
      if (IsReady(port)) ++answered_;
      next = std::max(next + milliseconds(20), Clock::now());
    }
  }

  // Waits for a second, like a kubelet.
  static bool IsReady(int port) {
    constexpr absl::string_view kRequest = "GET /readyz HTTP/1.0\r\n\r\n";
    const Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const timeval patience = {1, 0};
    setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    sockaddr_in name = {};
    name.sin_family = AF_INET;
    name.sin_port = htons(static_cast<uint16_t>(port));
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0) {
      return false;
    }
    send(socket.get(), kRequest.data(), kRequest.size(), MSG_NOSIGNAL);
    std::string response(64, '\0');
    const ssize_t size = recv(socket.get(), response.data(), response.size(), 0);
    return size > 0 && absl::StrContains(response, " 200 ");
  }

  std::atomic<bool> stopping_{false};
  int sent_ = 0, answered_ = 0;
  std::thread thread_;
};

// --- Measurement ---------------------------------------------------------------------------------

struct Row {
  Attack::Reached reached;
  std::vector<double> without_ms, during_ms;
  int failed = 0;
  double answered = 0;                      // the share of probes
  int64_t before = 0, peak = 0, after = 0;  // bytes resident
};

Row Measure(const Flood& flood, const Server& server) {
  Row row;
  InferCaller caller(server.address());
  row.without_ms = SmallCalls(caller, kWithout).ms;
  row.before = RssAnonBytes(server.pid);
  {
    const PeakMemory memory(server.pid);
    Prober prober(server.metrics_port);
    Attack attack(flood, flood.is_http ? server.metrics_port : server.port);
    SmallCalls during(caller, kDuring);
    row.reached = attack.Stop();
    row.answered = prober.Stop();
    row.during_ms = std::move(during.ms);
    row.failed = during.failed;
    row.peak = memory.bytes();
  }
  std::this_thread::sleep_for(kAfter);
  row.after = RssAnonBytes(server.pid);
  RAPT_CHECK(!row.without_ms.empty() && !row.during_ms.empty(), "no call succeeded");
  return row;
}

// Bold if it is outside of its bound.
std::string Bounded(bool is_within, const std::string& text) {
  return is_within ? text : absl::StrCat("**", text, "**");
}

std::string Mib(int64_t bytes) {
  return absl::StrFormat("%.0f", static_cast<double>(bytes) / kMiB);
}

void PrintHead() {
  std::printf(
      "Each flood runs for %.0f s against a server of its own with --memory_budget_bytes=%ld. It\n"
      "comes from 127.0.0.2 unless stated. Connections that the server ends are opened again at "
      "once; after\n"
      "0.1 s for slow heads and for 4096 connections. Others, at 127.0.0.1: a gRPC client makes\n"
      "small calls (1x1x16x64), one at a time, and a client requests /readyz every 20 ms on a new\n"
      "connection. Server, clients and attacker share the cores; the attacker's thread has nice\n"
      "%d. Bounds: no call fails, p99 at most %.0f ms, %.1f %% of probes answered within a "
      "second,\n"
      "at most %s MiB resident (RssAnon; 1.25 times the budget and 64 MiB), %.0f s later at most\n"
      "%s MiB more than before. A value outside its bound is **bold**.\n\n"
      "| flood | connections at a time | ended by the server | frames sent | MiB sent | small "
      "calls | "
      "failed | p50 ms | p99 | p99 without | probes answered %% | MiB before | peak | after |\n"
      "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
      kDuring.count(), static_cast<long>(kBudget), Attack::kNice, kMostP99Ms, 100 * kLeastAnswered,
      Mib(kMostResident).c_str(), kAfter.count(), Mib(kMostKept).c_str());
}

void Print(const Flood& flood, const Row& row) {
  const double p99 = Quantile(row.during_ms, 0.99);
  const std::string cells[] = {
      flood.name,
      absl::StrCat(flood.connections),
      absl::StrCat(row.reached.ended),
      flood.is_http ? "" : absl::StrCat(row.reached.frames),
      absl::StrFormat("%.3g", static_cast<double>(row.reached.bytes) / kMiB),
      absl::StrCat(row.during_ms.size()),
      Bounded(row.failed == 0, absl::StrCat(row.failed)),
      absl::StrFormat("%.2f", Median(row.during_ms)),
      Bounded(p99 <= kMostP99Ms, absl::StrFormat("%.2f", p99)),
      absl::StrFormat("%.2f", Quantile(row.without_ms, 0.99)),
      Bounded(row.answered >= kLeastAnswered, absl::StrFormat("%.1f", 100 * row.answered)),
      Mib(row.before),
      Bounded(row.peak <= kMostResident, Mib(row.peak)),
      Bounded(row.after <= row.before + kMostKept, Mib(row.after)),
  };
  for (const std::string& cell : cells) std::printf("| %s ", cell.c_str());
  std::printf("|\n");
  std::fflush(stdout);
}

// An attack of thousands of connections needs as many descriptors, here and in the server.
void AllowManyDescriptors() {
  rlimit limit;
  RAPT_CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0, "no limit");
  limit.rlim_cur = limit.rlim_max;
  RAPT_CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0, "the limit is not raised");
}

std::vector<Flood> FloodsOf(const std::regex& filter) {
  std::vector<Flood> floods = AllFloods();
  floods.erase(std::remove_if(floods.begin(), floods.end(),
                              [&](const Flood& f) { return !std::regex_search(f.name, filter); }),
               floods.end());
  return floods;
}

int Main(int argc, char** argv) {
  const bool has_filter = argc == 3 && std::strcmp(argv[1], "--filter") == 0;
  RAPT_CHECK(argc == 1 || has_filter, "usage: flood_bench [--filter REGEX]");
  AllowManyDescriptors();
  const std::vector<Flood> floods = FloodsOf(std::regex(has_filter ? argv[2] : ""));
  // All before the first client's threads start: Fork() requires it.
  std::vector<Server> servers;
  for (size_t n = 0; n < floods.size(); ++n) {
    servers.push_back(StartRapt({absl::StrCat("--memory_budget_bytes=", kBudget)}));
  }
  PrintHead();
  for (size_t n = 0; n < floods.size(); ++n) {
    Print(floods[n], Measure(floods[n], servers[n]));
    Stop(servers[n]);
  }
  return 0;
}

}  // namespace
}  // namespace rapt::bench

int main(int argc, char** argv) { return rapt::bench::Main(argc, argv); }
