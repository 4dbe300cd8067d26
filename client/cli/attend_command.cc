#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
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
#include "client/cli/library_types.h"
#include "client/cli/tensor_file.h"
#include "client/console/json.h"

namespace rapt {
namespace {

struct AttendFlags {
  CallFlags call;
  std::string y;
  std::optional<std::string> weights, scores, lse;
  bool json = false;

  std::vector<Flag> OutputTable() {
    return {{"output", "FILE", "result: a .npy file, or member y of an .npz file", &y, 'o', true},
            {"weights", "FILE", "attention weights; outputs may share an .npz file", &weights},
            {"scores", "FILE", "scaled scores, before softcap and mask", &scores},
            {"lse", "FILE", "log-sum-exp of each row", &lse}};
  }
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

// An output array, its file, and its line in the report.
struct Output {
  const char* name;
  std::string path;
  NpyType type;
  Shape shape;
  absl::Span<const std::byte> bytes;
};

std::vector<Output> OutputsOf(const AttendFlags& flags, const client::AttendResult& result,
                              bool is_2d) {
  std::vector<Output> outputs;
  const auto add = [&](const char* name, const std::string& path, const client::Tensor& tensor,
                       HeadAxis head_axis) {
    outputs.push_back({name, path, NpyTypeOf(ToLibrary(tensor.dtype())),
                       ShapeInFile(tensor.shape(), head_axis, is_2d), tensor.bytes()});
  };
  add("y", flags.y, result.y, HeadAxis::kNone);
  if (flags.weights) add("weights", *flags.weights, *result.scores, HeadAxis::kSecond);
  if (flags.scores) add("scores", *flags.scores, *result.scores, HeadAxis::kSecond);
  if (flags.lse) add("lse", *flags.lse, *result.lse, HeadAxis::kSecond);
  return outputs;
}

absl::Status WriteOutputs(const std::vector<Output>& outputs) {
  ArrayWriter writer;
  for (const Output& output : outputs) {
    writer.Add(output.path, output.name, output.type, output.shape, output.bytes);
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

void Print(const std::vector<Output>& outputs, const client::AttendResult& result,
           double elapsed_ms) {
  for (const Output& output : outputs) {
    absl::PrintF("%-8s %s %s in %s\n", output.name, ToString(output.type), ToString(output.shape),
                 output.path);
  }
  absl::PrintF("plan     %s, %.1f ms\n", result.plan, elapsed_ms);
  if (result.path != client::Path::kMessage) absl::PrintF("path     %s\n", NameOf(result.path));
}

void PrintJson(const std::vector<Output>& outputs, const client::AttendResult& result,
               double elapsed_ms) {
  JsonWriter json;
  json.BeginObject().Key("outputs").BeginArray();
  for (const Output& output : outputs) {
    json.BeginObject().Key("name").String(output.name).Key("file").String(output.path);
    json.Key("dtype").String(ToString(output.type)).Key("shape").Integers(output.shape).EndObject();
  }
  json.EndArray().Key("backend").String(result.backend).Key("plan").String(result.plan);
  json.Key("path").String(absl::StrReplaceAll(NameOf(result.path), {{" ", "_"}}));
  json.Key("elapsed_ms").Number(elapsed_ms).EndObject();
  std::puts(json.Take().c_str());
}

ExitCode Attend(AttendFlags flags) {
  if (absl::Status status = CheckFiles(flags); !status.ok()) return FailUsage(status);
  absl::StatusOr<LoadedCall> loaded = LoadCall(flags.call);
  if (!loaded.ok()) return FailUsage(loaded.status());
  absl::Status selected = SelectOutputs(flags, loaded->attributes);
  if (!selected.ok()) return FailUsage(selected);
  const absl::StatusOr<std::unique_ptr<AttentionCaller>> caller = NewCaller(flags.call);
  if (!caller.ok()) return FailConnect(caller.status());

  const auto start = std::chrono::steady_clock::now();
  const absl::StatusOr<client::AttendResult> result = (*caller)->Attend(loaded->call());
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - start;
  if (!result.ok()) return FailCall(result.status());

  const std::vector<Output> outputs = OutputsOf(flags, *result, loaded->is_2d);
  if (absl::Status written = WriteOutputs(outputs); !written.ok()) return FailUsage(written);
  (flags.json ? PrintJson : Print)(outputs, *result, elapsed.count());
  return ExitCode::kOk;
}

std::vector<Flag> Table(AttendFlags& flags) {
  std::vector<Flag> table = flags.call.InputTable();
  for (const std::vector<Flag>& part : {flags.OutputTable(), flags.call.AttributeTable(),
                                        flags.call.StreamTable(), flags.call.CallerTable()}) {
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
      names, ".");
  const CommandLine line{
      .usage = "rapt attend [ARCHIVE.npz] [--q FILE ...] -o FILE [flags]",
      .summary = summary,
      .flags = Table(flags),
      .examples = {"rapt attend --q q.npy --k k.npy --v v.npy -o y.npy",
                   "rapt attend --q x.npy --causal -o y.npy --weights w.npy --local",
                   "rapt attend --q q.npy --k k.npy --v v.npy -o y.npy --stream --chunk 1024",
                   "rapt attend --q q.npy --k k.npy --v v.npy --heads 8 --kv-heads 2 -o y.npy",
                   "rapt attend in.npz --window 128,0 -o out.npz --weights out.npz --lse out.npz"},
      .max_operands = 1};
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return *done;
  if (!operands.empty()) flags.call.sources.archive = operands.front();
  return Attend(flags);
}

}  // namespace rapt
