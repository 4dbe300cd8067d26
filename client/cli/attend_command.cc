#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "client/cli/attend_files.h"
#include "client/cli/attention_caller.h"
#include "client/cli/call_flags.h"
#include "client/cli/commands.h"
#include "client/cli/gradients.h"
#include "client/cli/library_types.h"
#include "client/cli/tensor_file.h"
#include "client/console/json.h"
#include "client/cpp/call_fields.h"

namespace rapt {
namespace {

struct AttendFlags {
  CallFlags call;
  std::string y;
  std::optional<std::string> weights, scores, lse;
  bool json = false;

  std::vector<Flag> OutputTable() {
    return {{"output", "FILE",
             "result: a .npy file, or member y of an .npz file; with --grad the gradients, in an "
             ".npz file if there are several",
             &y, 'o', true},
            {"weights", "FILE", "attention weights; outputs may share an .npz file", &weights},
            {"scores", "FILE", "scaled scores, before softcap and mask", &scores},
            {"lse", "FILE", "log-sum-exp of each row", &lse}};
  }

  bool is_backward() const { return call.sources.files[Role::kOutputGradient].has_value(); }
};

// Normalizes the paths, so that different names of a file compare equal. Only an archive may
// contain several outputs.
absl::Status CheckFiles(AttendFlags& flags) {
  flags.y = std::filesystem::path(flags.y).lexically_normal().string();
  std::map<std::string, const char*> names = {{flags.y, "output"}};
  for (const auto& [name, path] :
       {std::pair{"weights", &flags.weights}, {"scores", &flags.scores}, {"lse", &flags.lse}}) {
    if (!*path) continue;
    **path = std::filesystem::path(**path).lexically_normal().string();
    const auto [other, is_new] = names.emplace(**path, name);
    if (is_new || absl::EndsWith(**path, ".npz")) continue;
    return absl::InvalidArgumentError(absl::StrCat("--", other->second, " and --", name,
                                                   " both name ", **path,
                                                   "; only an .npz can contain several arrays"));
  }
  return absl::OkStatus();
}

// The forward and the backward pass have flags of their own.
absl::Status CheckPass(const AttendFlags& flags) {
  const InputMap<std::optional<std::string>>& files = flags.call.sources.files;
  const bool is_backward = flags.is_backward();
  const std::pair<const char*, bool> excluded[] = {{"weights", is_backward && flags.weights},
                                                   {"scores", is_backward && flags.scores},
                                                   {"lse", is_backward && flags.lse},
                                                   {"stream", is_backward && flags.call.stream}};
  for (const auto& [name, is_set] : excluded) {
    if (!is_set) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--", name,
                     " and --grad are mutually exclusive; --grad computes gradients "
                     "only, in one message"));
  }
  const std::pair<const char*, bool> dependent[] = {
      {"forward-output", files[Role::kForwardOutput].has_value()},
      {"forward-lse", files[Role::kForwardLse].has_value()},
      {"lse-grad", files[Role::kLseGradient].has_value()},
      {"gradients", flags.call.gradients.has_value()}};
  for (const auto& [name, is_set] : dependent) {
    if (!is_set || is_backward) continue;
    return absl::InvalidArgumentError(absl::StrCat("--", name, " needs --grad"));
  }
  return absl::OkStatus();
}

absl::Status SelectOutputs(const AttendFlags& flags, client::AttendCall& call) {
  if (flags.weights && flags.scores) {
    return absl::InvalidArgumentError(
        "--weights and --scores are mutually exclusive; a call returns one of them");
  }
  if (flags.weights) call.score_output = client::ScoreOutput::kWeights;
  if (flags.scores) call.score_output = client::ScoreOutput::kScores;
  call.wants_lse = flags.lse.has_value();
  return absl::OkStatus();
}

// InvalidArgument for an unknown gradient, or for several in a file of one array.
absl::Status CheckGradients(const AttendFlags& flags, const client::BackwardCall& call) {
  if (absl::Status status = client::CheckGradients(call); !status.ok()) return status;
  const size_t count = client::GradientsWantedBy(call).size();
  if (count == 1 || absl::EndsWith(flags.y, ".npz")) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--output is ", flags.y, ", but there are ", count,
                   " gradients; only an .npz can contain several arrays"));
}

// An output array, its file, and its line in the report.
struct Output {
  const char* name;
  std::string path;
  client::Tensor tensor;
  Shape shape;  // in the file
  std::optional<double> norm = std::nullopt;

  NpyType type() const { return NpyTypeOf(ToLibrary(tensor.dtype())); }
};

struct Report {
  std::vector<Output> outputs;
  std::string backend, plan;
  client::Path path = client::Path::kMessage;
};

absl::StatusOr<Report> Forward(const AttendFlags& flags, const LoadedCall& loaded,
                               AttentionCaller& caller) {
  const absl::StatusOr<client::AttendResult> result = caller.Attend(loaded.call());
  if (!result.ok()) return result.status();
  Report report{{}, result->backend, result->plan, result->path};
  const auto add = [&](const char* name, const std::string& path, const client::Tensor& tensor,
                       HeadAxis head_axis) {
    report.outputs.push_back(
        {name, path, tensor, ShapeInFile(tensor.shape(), head_axis, loaded.is_2d)});
  };
  add("y", flags.y, result->y, HeadAxis::kNone);
  if (flags.weights) add("weights", *flags.weights, *result->scores, HeadAxis::kSecond);
  if (flags.scores) add("scores", *flags.scores, *result->scores, HeadAxis::kSecond);
  if (flags.lse) add("lse", *flags.lse, *result->lse, HeadAxis::kSecond);
  return report;
}

// The gradients have the shapes of their inputs' files.
absl::StatusOr<Report> Backward(const AttendFlags& flags, const LoadedCall& loaded,
                                AttentionCaller& caller) {
  const absl::StatusOr<client::BackwardResult> result = caller.AttendBackward(loaded.backward());
  if (!result.ok()) return result.status();
  Report report{{}, result->backend, result->plan};
  for (const GradientRef& gradient : GradientsIn(*result)) {
    report.outputs.push_back({gradient.name, flags.y, *gradient.tensor,
                              loaded.InputOf(gradient.input).array.shape,
                              NormOf(*gradient.tensor)});
  }
  return report;
}

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
  absl::PrintF("plan     %s, %.1f ms\n", report.plan, elapsed_ms);
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
  json.Key("elapsed_ms").Number(elapsed_ms).EndObject();
  std::puts(json.Take().c_str());
}

ExitCode Attend(AttendFlags flags) {
  absl::Status valid = CheckFiles(flags);
  if (valid.ok()) valid = CheckPass(flags);
  if (!valid.ok()) return FailUsage(valid);
  absl::StatusOr<LoadedCall> loaded = LoadCall(flags.call);
  if (!loaded.ok()) return FailUsage(loaded.status());
  valid = flags.is_backward() ? CheckGradients(flags, loaded->backward())
                              : SelectOutputs(flags, loaded->attributes);
  if (!valid.ok()) return FailUsage(valid);
  const absl::StatusOr<std::unique_ptr<AttentionCaller>> caller = NewCaller(flags.call);
  if (!caller.ok()) return FailConnect(caller.status());

  const auto start = std::chrono::steady_clock::now();
  const auto compute = flags.is_backward() ? Backward : Forward;
  const absl::StatusOr<Report> report = compute(flags, *loaded, **caller);
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - start;
  if (!report.ok()) return FailCall(report.status());

  if (absl::Status written = WriteOutputs(report->outputs); !written.ok()) {
    return FailUsage(written);
  }
  (flags.json ? PrintJson : Print)(*report, elapsed.count());
  return ExitCode::kOk;
}

std::vector<Flag> Table(AttendFlags& flags) {
  std::vector<Flag> table = flags.call.InputTable();
  for (const std::vector<Flag>& part :
       {flags.OutputTable(), flags.call.GradientTable(), flags.call.ForwardTable(),
        flags.call.AttributeTable(), flags.call.StreamTable(), flags.call.CallerTable()}) {
    table.insert(table.end(), part.begin(), part.end());
  }
  table.push_back({"json", "", "print a report as JSON", &flags.json});
  return table;
}

}  // namespace

ExitCode RunAttendCommand(CommandArguments arguments) {
  AttendFlags flags;
  const std::string names = absl::StrJoin(
      kInputs, ", ", [](std::string* out, Role role) { absl::StrAppend(out, NameOf(role)); });
  const std::string summary = absl::StrCat(
      "Computes attention over NumPy arrays of float32, float16, float64 or bfloat16: [S, D], "
      "[B, S, H*D] or [B, H, S, D]. A FILE is a .npy file, or a member of an archive such as "
      "in.npz:q. ARCHIVE.npz contains any of ",
      names, ". With --grad, computes gradients of the inputs instead.");
  const CommandLine line{
      .usage = "rapt attend [ARCHIVE.npz] [--q FILE ...] -o FILE [flags]",
      .summary = summary,
      .flags = Table(flags),
      .examples = {"rapt attend --q q.npy --k k.npy --v v.npy -o y.npy",
                   "rapt attend --q x.npy --causal -o y.npy --weights w.npy --local",
                   "rapt attend --q q.npy --k k.npy --v v.npy -o y.npy --stream --chunk 1024",
                   "rapt attend --q q.npy --k k.npy --v v.npy --heads 8 --kv-heads 2 -o y.npy",
                   "rapt attend --q q.npy --k k.npy --v v.npy --grad dy.npy -o gradients.npz",
                   "rapt attend in.npz --window 128,0 -o out.npz --weights out.npz --lse out.npz"},
      .max_operands = 1};
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return *done;
  if (!operands.empty()) flags.call.sources.archive = operands.front();
  return Attend(flags);
}

}  // namespace rapt
