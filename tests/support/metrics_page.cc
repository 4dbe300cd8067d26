#include "tests/support/metrics_page.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "tests/support/loopback.h"

namespace rapt::test {

std::string ReadMetricsPage(const ServerProcess& server) {
  return HttpGet(server.metrics_address(), "/metrics");
}

double SumOnPage(const std::string& page, const std::string& name,
                 const std::map<std::string, std::string>& labels) {
  double sum = 0;
  bool found = false;
  for (const absl::string_view line : absl::StrSplit(page, '\n')) {
    if (!absl::StartsWith(line, absl::StrCat(name, "{")) &&
        !absl::StartsWith(line, absl::StrCat(name, " "))) {
      continue;
    }
    const bool matches = std::all_of(labels.begin(), labels.end(), [line](const auto& label) {
      const std::string pair = absl::StrCat(label.first, "=\"", label.second, "\"");
      return absl::StrContains(line, "{" + pair) || absl::StrContains(line, "," + pair);
    });
    if (!matches) continue;
    found = true;
    sum += std::atof(std::string(line.substr(line.rfind(' ') + 1)).c_str());
  }
  return found ? sum : -1;
}

double ReadMetric(const ServerProcess& server, const std::string& name,
                  const std::map<std::string, std::string>& labels) {
  return SumOnPage(ReadMetricsPage(server), name, labels);
}

void WaitForPage(const ServerProcess& server, const std::string& what,
                 absl::FunctionRef<bool(const std::string& page)> condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  for (;;) {
    const std::string page = ReadMetricsPage(server);
    if (condition(page)) return;
    if (std::chrono::steady_clock::now() > deadline) {
      ADD_FAILURE() << what << " did not occur:\n" << page;
      return;
    }
    // The server may share the machine's few cores with the test.
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void WaitForMetric(const ServerProcess& server, const std::string& name, double value,
                   const std::map<std::string, std::string>& labels) {
  WaitForPage(server, absl::StrCat(name, " == ", value),
              [&](const std::string& page) { return SumOnPage(page, name, labels) == value; });
}

void WaitUntilComputing(const ServerProcess& server) {
  // The canary keeps a thread busy, too, but reserves no memory of the budget.
  WaitForPage(server, "a request that is computed", [](const std::string& page) {
    return SumOnPage(page, "rapt_memory_reserved_bytes", {{"kind", "compute"}}) > 0 &&
           SumOnPage(page, "rapt_compute_threads_busy") > 0;
  });
}

void WaitUntilNothingIsHeld(const ServerProcess& server) {
  WaitForMetric(server, "rapt_open_calls", 0);
  WaitForMetric(server, "rapt_open_streams", 0);
  WaitForMetric(server, "rapt_memory_reserved_bytes", 0);
  WaitForMetric(server, "rapt_queue_depth", 0);
}

}  // namespace rapt::test
