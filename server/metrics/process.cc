#include "server/metrics/process.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace rapt {
namespace {

// The fields of /proc/self/stat that proc(5) numbers from 3: those after the name, which may
// contain spaces.
class StatFields {
 public:
  StatFields() {
    std::ifstream file("/proc/self/stat");
    text_.assign(std::istreambuf_iterator<char>(file), {});
    const size_t name_end = text_.rfind(')');
    if (name_end == std::string::npos) return;
    fields_ =
        absl::StrSplit(absl::string_view(text_).substr(name_end + 1), ' ', absl::SkipWhitespace());
  }

  int64_t Number(size_t proc5_number) const {
    int64_t number = 0;
    const size_t index = proc5_number - 3;
    if (index >= fields_.size() || !absl::SimpleAtoi(fields_[index], &number)) return 0;
    return number;
  }

 private:
  std::string text_;
  std::vector<absl::string_view> fields_;
};

// Returns when the system was started, in seconds since the epoch.
int64_t BootTime() {
  std::ifstream file("/proc/stat");
  for (std::string word; file >> word;) {
    int64_t seconds;
    if (word == "btime" && file >> seconds) return seconds;
  }
  return 0;
}

int64_t CountFiles(const char* directory) {
  std::error_code error;
  int64_t count = 0;
  for (std::filesystem::directory_iterator file(directory, error), end; !error && file != end;
       file.increment(error)) {
    ++count;
  }
  return count;
}

}  // namespace

ProcessState ReadProcessState() {
  const StatFields stat;
  const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  rlimit files = {};
  getrlimit(RLIMIT_NOFILE, &files);
  return {
      .cpu_seconds = static_cast<double>(stat.Number(14) + stat.Number(15)) / ticks,
      .start_time_seconds =
          static_cast<double>(BootTime()) + static_cast<double>(stat.Number(22)) / ticks,
      .resident_bytes = stat.Number(24) * sysconf(_SC_PAGE_SIZE),
      .virtual_bytes = stat.Number(23),
      .threads = stat.Number(20),
      .open_fds = CountFiles("/proc/self/fd"),
      .max_fds = static_cast<int64_t>(files.rlim_cur),
  };
}

void ExportProcess(MetricSink& sink) {
  const auto gauge = [&sink](const char* name, const char* help, auto member) {
    sink.AddGauge(name, help, {}, [member] { return ReadProcessState().*member; });
  };
  sink.AddCounter("process_cpu_seconds_total", "User and system CPU time spent, in seconds.", {},
                  [] { return ReadProcessState().cpu_seconds; });
  gauge("process_start_time_seconds", "Start time of the process since the epoch, in seconds.",
        &ProcessState::start_time_seconds);
  gauge("process_resident_memory_bytes", "Resident memory.", &ProcessState::resident_bytes);
  gauge("process_virtual_memory_bytes", "Virtual memory.", &ProcessState::virtual_bytes);
  gauge("process_threads", "Threads.", &ProcessState::threads);
  gauge("process_open_fds", "Open file descriptors.", &ProcessState::open_fds);
  gauge("process_max_fds", "Maximum number of open file descriptors.", &ProcessState::max_fds);
}

}  // namespace rapt
