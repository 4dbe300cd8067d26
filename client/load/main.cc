// rapt-load: the load tester.
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/synchronization/mutex.h"
#include "base/status_macros.h"
#include "base/version.h"
#include "client/console/command_line.h"
#include "client/console/exit_code.h"
#include "client/load/compare.h"
#include "client/load/live_view.h"
#include "client/load/result.h"
#include "client/load/run.h"
#include "client/load/search.h"
#include "client/load/settings.h"
#include "client/load/wire.h"

namespace rapt::load {
namespace {

using std::chrono::nanoseconds;

std::atomic<bool> interrupted{false};

constexpr std::chrono::seconds kConnectTimeout{5};

std::string NowUtc() {
  const time_t now = time(nullptr);
  tm utc;
  gmtime_r(&now, &utc);
  char text[32];
  strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

// The command line as a shell takes it.
std::string CommandText(absl::Span<const std::string> arguments) {
  constexpr char kPlain[] =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789%+,-./:=@_";
  std::string text = "rapt-load";
  for (const std::string& argument : arguments) {
    const bool is_plain =
        !argument.empty() && argument.find_first_not_of(kPlain) == std::string::npos;
    absl::StrAppend(&text, " ",
                    is_plain
                        ? argument
                        : absl::StrCat("'", absl::StrReplaceAll(argument, {{"'", "'\\''"}}), "'"));
  }
  return text;
}

// One server and the calls sent to it.
class Session {
 public:
  Session(const Settings& settings, std::unique_ptr<Workload> workload, bool is_quiet)
      : settings_(settings), is_quiet_(is_quiet), workload_(std::move(workload)) {}

  const std::vector<CallShape>& shapes() const { return workload_->shapes(); }

  absl::Status Connect() {
    const Interface& interface = settings_.load.interface;
    RAPT_ASSIGN_OR_RETURN(wire_,
                          interface.protocol == Protocol::kHttp
                              ? NewHttpWire(settings_.address, settings_.options)
                              : NewGrpcWire(settings_.address, settings_.options, interface));
    return wire_->WaitUntilReady(kConnectTimeout);
  }

  ServerIdentity identity() const { return wire_->FetchIdentity(); }

  absl::StatusOr<Run> RunOnce(const Load& load) {
    const bool has_end = load.duration < std::chrono::hours(24 * 365);
    LiveView view(!is_quiet_, has_end ? std::optional(load.duration) : std::nullopt);
    return RunLoad(
        load, *workload_, *wire_, [&view](const TimedInterval& interval) { view.Show(interval); },
        interrupted);
  }

  // Searches for the highest rate, then runs at that rate. Adds the trials to `result`.
  absl::StatusOr<Run> Search(Result& result) {
    constexpr double kPrecision = 0.05;
    Load closed = settings_.load;
    closed.duration = settings_.load.duration / 4;
    RAPT_ASSIGN_OR_RETURN(Run flat_out, RunOnce(closed));
    result.run = flat_out;
    const double capacity = Summarize(result).rate;
    if (!(capacity > 0)) return flat_out;  // it reports the failures
    result.is_open_loop = true;
    RAPT_ASSIGN_OR_RETURN(result.trials, SearchRate(capacity, kPrecision, [&](double rate) {
                            return Try(rate, closed, result);
                          }));
    const Trial* best = BestOf(result.trials);
    return RunOnce(AtRate(best == nullptr ? capacity * 0.01 : best->offered, settings_.load));
  }

 private:
  static Load AtRate(double rate, Load load) {
    load.arrivals = Arrivals::AtRandom({{load.warmup + load.duration, rate, rate}}, load.seed);
    return load;
  }

  absl::StatusOr<Trial> Try(double rate, const Load& load, Result& result) {
    RAPT_ASSIGN_OR_RETURN(result.run, RunOnce(AtRate(rate, load)));
    const Summary summary = Summarize(result);
    // If fewer calls finish than arrive, a queue grows and the percentile would keep rising.
    const bool keeps_up = summary.rate >= 0.9 * summary.offered_rate;
    return Trial{rate, summary.rate, Milliseconds(result.run.totals.latency.ValueAt(0.99)),
                 summary.error_share, summary.meets_objective && keeps_up && !interrupted.load()};
  }

  const Settings& settings_;
  const bool is_quiet_;
  std::unique_ptr<Wire> wire_;
  const std::unique_ptr<Workload> workload_;  // ends its calls over the wire
};

// --- Reports ---

bool WriteFile(const std::string& path, const std::string& text, std::ios::openmode mode) {
  if (path == "-") return std::fputs(text.c_str(), stdout) >= 0;
  std::ofstream file(path, std::ios::binary | mode);
  file << text;
  return static_cast<bool>(file.flush());
}

std::optional<ExitCode> WriteReports(const LoadFlags& flags, const Result& result) {
  const auto failed = [](const std::string& path) {
    return Fail(ExitCode::kUsage, absl::StrFormat("can't write %s", path));
  };
  if (flags.json && !WriteFile(*flags.json, Json(result), std::ios::trunc)) {
    return failed(*flags.json);
  }
  if (flags.csv) {
    std::ifstream before(*flags.csv);
    const bool is_new = before.peek() == std::ifstream::traits_type::eof();
    if (!WriteFile(*flags.csv, Csv(result, is_new), std::ios::app)) return failed(*flags.csv);
  }
  if (flags.html && !WriteFile(*flags.html, Html(result), std::ios::trunc)) {
    return failed(*flags.html);
  }
  return std::nullopt;
}

ExitCode ExitCodeFor(const Result& result) {
  const Summary summary = Summarize(result);
  if (summary.ok == 0 && !result.run.totals.failures.empty()) {
    const auto& [code, failures] = *result.run.totals.failures.begin();
    return FailCall(absl::Status(code, failures.example));
  }
  if (!result.run.wrong.empty()) return FailCall(result.run.wrong.front());
  if (!summary.meets_objective) return ExitCode::kCallFailed;
  return ExitCode::kOk;
}

ExitCode RunLoadCommand(absl::Span<const std::string> arguments) {
  LoadFlags flags;
  const CommandLine line{
      .usage = "rapt-load [flags] | rapt-load compare BEFORE.json AFTER.json",
      .summary =
          "Sends attention calls to a server and measures latency and throughput. In a closed "
          "loop, "
          "each response triggers the next call. In an open loop, calls are due at given times "
          "and latency counts from then. `between` in the table is service time outside the "
          "server: network, gRPC and this program.",
      .flags = flags.Table(),
      .examples = {"rapt-load -c 4 -d 3", "rapt-load --rate 20 --slo 200 -d 3",
                   "rapt-load --shape prefill-decode --dtype bf16 --rate 2..10/5 -d 3",
                   "rapt-load --shape '1x8x~256x64 causal, 8x8x1:512x64 weight=4' --html load.html",
                   "rapt-load --cache decode --shape 1x32/8x4096x128 --dtype bf16 -c 4 -d 3"}};
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return *done;
  const absl::StatusOr<Settings> settings = MakeSettings(flags);
  if (!settings.ok()) return FailUsage(settings.status());

  RAPT_ASSIGN_OR_EXIT(std::unique_ptr<Workload> workload, FailUsage, MakeWorkload(*settings));

  Session session(*settings, std::move(workload), flags.quiet);
  RAPT_EXIT_IF_ERROR(FailConnect, session.Connect());
  Result result{.started = NowUtc(),
                .command = CommandText(arguments),
                .address = settings->address,
                .label = flags.label,
                .scenario = settings->scenario,
                .settings = settings->display,
                .machine = ReadMachine(),
                .server = session.identity(),
                .is_open_loop = settings->load.arrivals.has_value(),
                .shapes = session.shapes(),
                .objective = settings->objective,
                .streams = settings->load.streams};
  absl::StatusOr<Run> run =
      settings->searches ? session.Search(result) : session.RunOnce(settings->load);
  if (!run.ok()) return FailCall(run.status());
  result.run = *std::move(run);
  if (flags.json != "-") std::fputs(Table(result).c_str(), stdout);
  if (const std::optional<ExitCode> failed = WriteReports(flags, result)) return *failed;
  return ExitCodeFor(result);
}

absl::StatusOr<Recorded> ReadReportFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrFormat("can't read %s", path));
  absl::StatusOr<Recorded> report =
      ReadReport(std::string(std::istreambuf_iterator<char>(file), {}));
  if (report.ok()) return report;
  return absl::InvalidArgumentError(absl::StrFormat("%s: %s", path, report.status().message()));
}

ExitCode RunCompareCommand(absl::Span<const std::string> arguments) {
  const CommandLine line{.usage = "rapt-load compare BEFORE.json AFTER.json",
                         .summary =
                             "Compares two reports of --json: the ratios of their figures and 95% "
                             "confidence intervals, "
                             "estimated from the variation within each run.",
                         .flags = {},
                         .examples = {"rapt-load compare before.json after.json"},
                         .max_operands = 2};
  std::vector<std::string> files;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &files)) return *done;
  if (files.size() != 2)
    return Fail(ExitCode::kUsage, "compare takes two files, BEFORE.json and AFTER.json");
  RAPT_ASSIGN_OR_EXIT(const Recorded before, FailUsage, ReadReportFile(files[0]));
  RAPT_ASSIGN_OR_EXIT(const Recorded after, FailUsage, ReadReportFile(files[1]));
  std::fputs(Table(before, after).c_str(), stdout);
  return ExitCode::kOk;
}

ExitCode Main(absl::Span<const std::string> arguments) {
  if (!arguments.empty() && arguments.front() == "--version") {
    absl::PrintF("rapt-load %s\n", Version());
    return ExitCode::kOk;
  }
  // The first signal ends the load with a report; the second one ends the program.
  struct sigaction interrupt {};
  interrupt.sa_handler = [](int) { interrupted = true; };
  interrupt.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &interrupt, nullptr);
  try {
    if (!arguments.empty() && arguments.front() == "compare") {
      return RunCompareCommand(arguments.subspan(1));
    }
    return RunLoadCommand(arguments);
  } catch (const std::bad_alloc&) {
    return Fail(ExitCode::kCallFailed, "out of memory");
  }
}

}  // namespace
}  // namespace rapt::load

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);  // OpenSSL writes without MSG_NOSIGNAL
  // Debian's Abseil detects deadlocks, whose cost would count as latency.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  // Errors are told once, by the program. gRPC reads it when it starts.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  rapt::ExitCode code = rapt::load::Main(arguments);
  // Output may have failed, e.g. because the disk is full.
  if (std::fflush(stdout) != 0 && code == rapt::ExitCode::kOk) {
    code = rapt::Fail(rapt::ExitCode::kUsage, "can't write to standard output");
  }
  return static_cast<int>(code);
}
