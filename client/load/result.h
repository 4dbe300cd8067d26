// A load and what came of it, as reports need it.
#ifndef RAPT_CLIENT_LOAD_RESULT_H_
#define RAPT_CLIENT_LOAD_RESULT_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/load/mix.h"
#include "client/load/run.h"

namespace rapt::load {

struct Machine {
  std::string cpu;
  int cores = 0;
  std::string kernel;
  std::string congestion_control;  // TCP's, of the whole machine
};
Machine ReadMachine();

// Who answered, as far as it says.
struct ServerIdentity {
  std::string name;  // "rapt-server", or what an OIP server calls itself
  std::string version;
  std::string isa;  // rapt's alone, as the next
  int compute_threads = 0;
};

// One step of a search for the highest rate.
struct Trial {
  double offered = 0;  // requests/s
  double achieved = 0;
  double p99_ms = 0;
  double error_share = 0;
  bool passed = false;
};

// What the figures are judged by.
struct Objective {
  double p99_ms = 0;
  double error_share = 0;
};

struct Result {
  std::string started;  // UTC, "2026-11-21T21:00:00Z"
  std::string label;
  std::string scenario;                                       // MLPerf's name of it, or empty
  std::vector<std::pair<std::string, std::string>> settings;  // name and value, for people
  Machine machine;
  ServerIdentity server;
  bool is_open_loop = false;
  std::vector<CallShape> shapes;
  std::optional<Objective> objective;
  std::vector<Trial> trials = {};  // of a search
  int streams = 0;
  Run run = {};
};

double Milliseconds(int64_t nanoseconds);

// Figures that several reports show. Rates are per second of the measured time.
struct Summary {
  double seconds = 0;
  int64_t ok = 0;
  int64_t failed = 0;
  int64_t dropped = 0;
  double rate = 0;             // of calls that ended well in the measured time
  double offered_rate = 0;     // open loop: of calls that became due
  double goodput = 0;          // of those that ended well within the objective
  double error_share = 0;      // failed and dropped, of all
  double gigabytes_per_s = 0;  // requests and answers
  bool meets_objective = true;
  std::vector<std::string> warnings;
};
Summary Summarize(const Result& result);

// The percentiles that tables show: "p50" and 0.5, to p99.99.
struct Percentile {
  const char* name;
  double share;
};
absl::Span<const Percentile> Percentiles();

// For terminals.
std::string Table(const Result& result);
// docs/load-testing.md describes it.
std::string Json(const Result& result);
// A line of figures; with the names of its columns before it where `with_header`.
std::string Csv(const Result& result, bool with_header);
// One file with its charts in it, without scripts.
std::string Html(const Result& result);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_RESULT_H_
