// Two results, as their JSON reports have them, beside each other.
#ifndef RAPT_CLIENT_LOAD_COMPARE_H_
#define RAPT_CLIENT_LOAD_COMPARE_H_

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace rapt::load {

// What a comparison needs of a report.
struct Recorded {
  std::string label;
  std::map<std::string, std::string> settings;
  std::map<std::string, double> figures;                 // of the whole run: "rate", "p99 ms"
  std::map<std::string, std::vector<double>> stretches;  // by the same names
};

// InvalidArgument where the text is no report of ours.
absl::StatusOr<Recorded> ReadReport(std::string_view json);

struct Comparison {
  std::string figure;
  double before = 0;
  double after = 0;
  double ratio = 0;  // after / before
  // Where the ratio lies in 95 of 100 runs, as far as the stretches tell: they are drawn again and
  // again at random. Equal to the ratio where there are fewer than two.
  double low = 0;
  double high = 0;
};
std::vector<Comparison> Compare(const Recorded& before, const Recorded& after);

// For terminals; names the settings that differ.
std::string Table(const Recorded& before, const Recorded& after);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_COMPARE_H_
