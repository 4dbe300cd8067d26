// A load and its results, for reports.
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
  std::string congestion_control;  // of TCP, system-wide
};
Machine ReadMachine();

// One step of a search for the highest rate.
struct Trial {
  double offered = 0;  // requests/s
  double achieved = 0;
  double p99_ms = 0;
  double error_share = 0;
  bool passed = false;
};

// The service level objective.
struct Objective {
  double p99_ms = 0;
  double error_share = 0;
};

struct Result {
  std::string started;  // UTC, "2026-11-21T21:00:00Z"
  std::string command;  // as a shell takes it
  std::string address;
  std::string label;
  std::string scenario;                                       // MLPerf's name, or empty
  std::vector<std::pair<std::string, std::string>> settings;  // name and value, for display
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

// Formats milliseconds of a histogram for tables, "-" if it is empty.
std::string MillisecondsAt(const Histogram& histogram, double share);
std::string MeanMilliseconds(const Histogram& histogram);

// Figures used by several reports. Rates are per second of measured time.
struct Summary {
  double seconds = 0;
  int64_t ok = 0;  // these three: of the calls due in the measured time
  int64_t failed = 0;
  int64_t dropped = 0;
  int64_t ended_after = 0;     // the measured time; the rates leave them out
  double rate = 0;             // of calls that succeeded in the measured time
  double offered_rate = 0;     // open loop: of calls that became due
  double goodput = 0;          // of calls that succeeded within the objective
  double error_share = 0;      // share of failed and dropped calls
  double gigabytes_per_s = 0;  // requests and responses
  bool meets_objective = true;
  std::vector<std::string> warnings;
};
Summary Summarize(const Result& result);

// The percentiles shown in tables, from p50 to p99.99.
struct Percentile {
  const char* name;
  double share;
};
absl::Span<const Percentile> Percentiles();

// Formats the result for a terminal.
std::string Table(const Result& result);
// Described in docs/load-testing.md.
std::string Json(const Result& result);
// Returns a line of figures, preceded by a header line if `with_header`.
std::string Csv(const Result& result, bool with_header);
// Returns one self-contained page with charts, without scripts.
std::string Html(const Result& result);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_RESULT_H_
