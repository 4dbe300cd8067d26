// The outputs of `rapt attend` and `rapt run`: their files and the report that it prints.
#ifndef RAPT_CLIENT_CLI_ATTEND_REPORT_H_
#define RAPT_CLIENT_CLI_ATTEND_REPORT_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/tensor_file.h"
#include "client/console/exit_code.h"
#include "rapt/client.h"
#include "rapt/reports.h"

namespace rapt {

// An output array, its file, and its line in the report.
struct Output {
  std::string name;
  std::string path;
  client::Tensor tensor;
  Shape shape;  // in the file
  std::optional<double> norm = std::nullopt;

  NpyType type() const { return NpyTypeOf(tensor.dtype()); }
};

struct Report {
  std::vector<Output> outputs;
  std::string backend, plan;  // empty if not known
  client::Path path = client::Path::kMessage;
  std::optional<double> relative_error = std::nullopt;  // of an estimate
};

// An output flag and its path; null if the flag was not given.
using OutputFile = std::pair<const char*, std::string*>;
inline std::string* PathIn(std::optional<std::string>& flag) { return flag ? &*flag : nullptr; }

// Normalizes the paths, so that different names of a file compare equal. InvalidArgument if several
// outputs have the same file, which is not an archive.
absl::Status NormalizeOutputFiles(const std::vector<OutputFile>& files);

// Computes, writes the outputs, then prints the report with the time of `compute`, as JSON if
// `json`.
ExitCode ComputeAndReport(absl::FunctionRef<absl::StatusOr<Report>()> compute, bool json);

// Prints the report of `rapt diagnose` and `rapt cache diagnose`.
void PrintDiagnosis(const client::Diagnosis& diagnosis, bool json);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_ATTEND_REPORT_H_
