// Compares two JSON reports.
#ifndef RAPT_CLIENT_LOAD_COMPARE_H_
#define RAPT_CLIENT_LOAD_COMPARE_H_

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace rapt::load {

// The parts of a report that a comparison needs.
struct Recorded {
  std::string label;
  std::map<std::string, std::string> settings;
  std::map<std::string, double> figures;                 // of the whole run: "rate", "p99 ms"
  std::map<std::string, std::vector<double>> intervals;  // by the same names, per interval
};

// InvalidArgument if the text is not a rapt-load report.
absl::StatusOr<Recorded> ReadReport(std::string_view text);

struct Comparison {
  std::string figure;
  double before = 0;
  double after = 0;
  double ratio = 0;  // after / before
  // 95 % confidence interval of the ratio, bootstrapped from the intervals of both runs. Equal to
  // the ratio if a run has fewer than two intervals.
  double low = 0;
  double high = 0;
};
std::vector<Comparison> Compare(const Recorded& before, const Recorded& after);

// Formats the comparison for a terminal. Lists the settings that differ.
std::string Table(const Recorded& before, const Recorded& after);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_COMPARE_H_
