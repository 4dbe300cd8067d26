// The flags of rapt-load, and the load they describe.
#ifndef RAPT_CLIENT_LOAD_SETTINGS_H_
#define RAPT_CLIENT_LOAD_SETTINGS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/console/command_line.h"
#include "client/console/server_connection.h"
#include "client/load/mix.h"
#include "client/load/result.h"
#include "client/load/run.h"
#include "client/load/sequences.h"

namespace rapt::load {

// Flags as given. Defaults of absent ones depend on the scenario.
struct LoadFlags {
  ServerFlags server;
  std::string protocol = "rapt";
  std::string model = "attention";
  bool shared_memory = false;
  bool stream = false;

  std::string shapes = "1x8x1024x64";
  std::string dtype = "fp32";
  std::string mask = "none";
  bool causal = false;
  bool ragged = false;
  int64_t variants = 8;

  std::string scenario;
  std::optional<std::string> cache;
  int64_t steps = 128;
  std::optional<int64_t> concurrency;
  std::optional<std::string> rate;
  std::string arrivals = "poisson";
  std::optional<std::string> trace;
  std::optional<int64_t> connections;
  int64_t threads = 1;

  double duration_s = 10;
  double warmup_s = 1;
  int64_t requests = 0;
  double deadline_ms = 60'000;
  uint64_t seed = 0;

  std::optional<double> slo_ms;
  double max_errors = 0;
  bool search = false;

  std::string label;
  std::optional<std::string> json, csv, html;
  bool quiet = false;

  std::vector<Flag> Table();
};

// A load that is ready to run.
struct Settings {
  std::string address;
  client::Options options = {};
  Load load = {};
  std::vector<CallShape> shapes;
  std::optional<CacheScenario> cache = {};
  int64_t steps = 0;  // of a sequence
  std::optional<Objective> objective = {};
  bool searches = false;
  std::string scenario;  // MLPerf's name
  std::vector<std::pair<std::string, std::string>> display = {};
};

// Checks the flags and reads their files. InvalidArgument or NotFound names the flag.
absl::StatusOr<Settings> MakeSettings(const LoadFlags& flags);

// Returns what the load sends. InvalidArgument for shapes that caches cannot have.
absl::StatusOr<std::unique_ptr<Workload>> MakeWorkload(const Settings& settings);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_SETTINGS_H_
