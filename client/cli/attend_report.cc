#include "client/cli/attend_report.h"

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "base/invalid.h"
#include "client/cli/commands.h"
#include "client/console/json.h"

namespace rapt {
namespace {

absl::Status WriteOutputs(const std::vector<Output>& outputs) {
  ArrayWriter writer;
  for (const Output& output : outputs) {
    writer.Add(output.path, output.name, output.type(), output.shape, output.tensor.bytes());
  }
  return writer.Write();
}

absl::string_view NameOf(client::Path path) {
  switch (path) {
    case client::Path::kSharedMemory:
      return "shared memory";
    case client::Path::kStream:
      return "stream";
    default:
      return "message";
  }
}

void Print(const Report& report, double elapsed_ms) {
  for (const Output& output : report.outputs) {
    absl::PrintF("%-8s %s %s in %s", output.name, ToString(output.type()), ToString(output.shape),
                 output.path);
    if (output.norm) absl::PrintF(", norm %.4g", *output.norm);
    std::puts("");
  }
  if (report.relative_error)
    absl::PrintF("error    %.3g of the exact rows\n", *report.relative_error);
  if (report.plan.empty()) {
    absl::PrintF("time     %.1f ms\n", elapsed_ms);
  } else {
    absl::PrintF("plan     %s, %.1f ms\n", report.plan, elapsed_ms);
  }
  if (report.path != client::Path::kMessage) absl::PrintF("path     %s\n", NameOf(report.path));
}

void PrintJson(const Report& report, double elapsed_ms) {
  JsonWriter json;
  json.BeginObject().Key("outputs").BeginArray();
  for (const Output& output : report.outputs) {
    json.BeginObject().Key("name").String(output.name).Key("file").String(output.path);
    json.Key("dtype").String(ToString(output.type())).Key("shape").Integers(output.shape);
    if (output.norm) json.Key("norm").Number(*output.norm);
    json.EndObject();
  }
  json.EndArray().Key("backend").String(report.backend).Key("plan").String(report.plan);
  json.Key("path").String(absl::StrReplaceAll(NameOf(report.path), {{" ", "_"}}));
  if (report.relative_error) json.Key("relative_error").Number(*report.relative_error);
  json.Key("elapsed_ms").Number(elapsed_ms).EndObject();
  std::puts(json.Take().c_str());
}

}  // namespace

absl::Status NormalizeOutputFiles(const std::vector<OutputFile>& files) {
  std::map<std::string, const char*> names;
  for (const auto& [name, path] : files) {
    if (path == nullptr) continue;
    *path = std::filesystem::path(*path).lexically_normal().string();
    if (absl::StrContains(*path, ".npz:")) {
      return Invalid("--", name, " is ", *path,
                     "; it must be a .npy file or an .npz archive, whose members are named as the ",
                     "outputs");
    }
    const auto [other, is_new] = names.emplace(*path, name);
    if (is_new || absl::EndsWith(*path, ".npz")) continue;
    return Invalid("--", other->second, " and --", name, " both name ", *path,
                   "; only an .npz can contain several arrays");
  }
  return absl::OkStatus();
}

ExitCode ComputeAndReport(absl::FunctionRef<absl::StatusOr<Report>()> compute, bool json) {
  const auto start = std::chrono::steady_clock::now();
  const absl::StatusOr<Report> report = compute();
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - start;
  if (!report.ok()) return FailCall(report.status());
  RAPT_EXIT_IF_ERROR(FailUsage, WriteOutputs(report->outputs));
  (json ? PrintJson : Print)(*report, elapsed.count());
  return ExitCode::kOk;
}

}  // namespace rapt
