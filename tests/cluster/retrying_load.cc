// Callers that repeat one call through rapt's client, with its default retries, until SIGINT.
// Prints the number of answered calls every half second, then {"ok": N, "failed": N, "causes":
// {MESSAGE: N}, "slowest": SECONDS}. Usage: retrying_load ADDRESS CALLERS [CA_FILE]
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "client/console/json.h"
#include "rapt/client.h"

namespace rapt::client {
namespace {

using std::chrono::steady_clock;

std::atomic<bool> interrupted{false};

struct Counts {
  absl::Mutex mutex;
  int64_t ok = 0;
  int64_t failed = 0;
  std::map<std::string, int64_t> causes;
  double slowest = 0;
};

void Repeat(Client& client, Counts& counts) {
  const std::vector<float> x(1 * 4 * 64 * 32, 0.5f);
  const auto tensor = View<float>({1, 4, 64, 32}, x);
  while (!interrupted) {
    const auto begin = steady_clock::now();
    const auto result = client.Attend({.q = tensor, .k = tensor, .v = tensor});
    const std::chrono::duration<double> took = steady_clock::now() - begin;
    absl::MutexLock lock(&counts.mutex);
    counts.slowest = std::max(counts.slowest, took.count());
    if (result.ok()) {
      ++counts.ok;
    } else {
      ++counts.failed;
      ++counts.causes[result.status().ToString()];
    }
  }
}

void PrintProgress(Counts& counts) {
  absl::MutexLock lock(&counts.mutex);
  std::printf("%lld\n", static_cast<long long>(counts.ok));
  std::fflush(stdout);
}

void PrintReport(Counts& counts) {
  absl::MutexLock lock(&counts.mutex);
  JsonWriter json;
  json.BeginObject().Key("ok").Integer(counts.ok).Key("failed").Integer(counts.failed);
  json.Key("causes").BeginObject();
  for (const auto& [cause, count] : counts.causes) json.Key(cause).Integer(count);
  json.EndObject().Key("slowest").Number(counts.slowest).EndObject();
  std::printf("%s\n", json.Take().c_str());
}

int Main(const std::string& address, int callers, const char* ca_file) {
  Options options;
  if (ca_file != nullptr) options.tls = TlsOptions{.ca_file = ca_file};
  const auto client = Client::Connect(address, options);
  if (!client.ok()) {
    std::fprintf(stderr, "retrying_load: %s\n", client.status().ToString().c_str());
    return 1;
  }
  Counts counts;
  std::vector<std::jthread> threads;
  for (int i = 0; i < callers; ++i) {
    threads.emplace_back([&] { Repeat(**client, counts); });
  }
  while (!interrupted) {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    PrintProgress(counts);
  }
  threads.clear();
  PrintReport(counts);
  return 0;
}

}  // namespace
}  // namespace rapt::client

int main(int argc, char** argv) {
  if (argc < 3 || argc > 4) {
    std::fprintf(stderr, "usage: retrying_load ADDRESS CALLERS [CA_FILE]\n");
    return 2;
  }
  struct sigaction interrupt {};
  interrupt.sa_handler = [](int) { rapt::client::interrupted = true; };
  sigaction(SIGINT, &interrupt, nullptr);
  return rapt::client::Main(argv[1], std::stoi(argv[2]), argc == 4 ? argv[3] : nullptr);
}
