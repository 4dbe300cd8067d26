#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/cli/attend_files.h"
#include "client/cli/attention_caller.h"
#include "client/cli/commands.h"
#include "client/cli/json.h"
#include "client/cli/server_connection.h"
#include "client/cli/tensor_file.h"

namespace rapt {
namespace {

struct AttendFlags {
  AttendSources sources;
  std::string y;
  std::optional<std::string> weights, scores, lse;
  std::optional<int64_t> heads, kv_heads;
  std::optional<std::string> layout;
  bool causal = false;
  bool bottom_right = false;
  std::vector<int64_t> window;
  double softcap = 0;
  std::optional<double> scale, dropout;
  uint64_t seed = 0;
  bool local = false;
  bool json = false;
  ServerFlags server;
};

absl::Status SetLayout(const AttendFlags& flags, LoadedCall& loaded) {
  if (!flags.layout) return absl::OkStatus();
  if (*flags.layout != "bhsd" && *flags.layout != "bshd") {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--layout is '%s'; it takes bhsd ([B, H, S, D]) or bshd ([B, S, H, D])", *flags.layout));
  }
  if (loaded.q.shape.size() != 4) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--layout is about inputs of rank 4; q has shape %s", ToString(loaded.q.shape)));
  }
  loaded.call.layout = *flags.layout == "bhsd" ? Layout::kBhsd : Layout::kBshd;
  return absl::OkStatus();
}

absl::Status SetWindow(const std::vector<int64_t>& window, OperatorCall& call) {
  if (window.empty()) return absl::OkStatus();
  if (window.size() != 2) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--window has %d numbers; it takes two, LEFT,RIGHT, where -1 is no limit", window.size()));
  }
  call.left_window_size = window[0];
  call.right_window_size = window[1];
  return absl::OkStatus();
}

absl::Status SetScoreOutput(const AttendFlags& flags, OperatorCall& call) {
  if (flags.weights && flags.scores) {
    return absl::InvalidArgumentError("--weights and --scores: a call returns one of them");
  }
  if (flags.weights) call.score_output = ScoreOutput::kWeights;
  if (flags.scores) call.score_output = ScoreOutput::kScores;
  call.wants_lse = flags.lse.has_value();
  return absl::OkStatus();
}

absl::Status SetAttributes(const AttendFlags& flags, LoadedCall& loaded) {
  OperatorCall& call = loaded.call;
  if (flags.kv_heads && !flags.heads) {
    return absl::InvalidArgumentError("--kv-heads needs --heads as well");
  }
  call.q_num_heads = flags.heads;
  call.kv_num_heads = flags.kv_heads ? flags.kv_heads : flags.heads;
  call.is_causal = flags.causal;
  if (flags.bottom_right) call.alignment = Alignment::kBottomRight;
  call.softcap = flags.softcap;
  call.scale = flags.scale;
  if (flags.dropout) call.dropout = Dropout{*flags.dropout, flags.seed};
  absl::Status status = SetLayout(flags, loaded);
  if (status.ok()) status = SetWindow(flags.window, call);
  if (status.ok()) status = SetScoreOutput(flags, call);
  return status;
}

// One line of the report, and one array of a file.
struct Output {
  const char* name;
  std::string path;
  NpyType type;
  Shape shape;
  const std::string* bytes;
};

std::vector<Output> OutputsOf(const AttendFlags& flags, const AttentionReply& reply, bool is_2d) {
  std::vector<Output> outputs;
  const auto add = [&](const char* name, const std::string& path, const Tensor& tensor,
                       HeadAxis head_axis) {
    outputs.push_back({name, path, NpyTypeOf(tensor.spec.dtype),
                       ShapeInFile(tensor.spec.shape, head_axis, is_2d), &tensor.bytes});
  };
  add("y", flags.y, reply.y, HeadAxis::kNone);
  if (flags.weights) add("weights", *flags.weights, *reply.scores, HeadAxis::kSecond);
  if (flags.scores) add("scores", *flags.scores, *reply.scores, HeadAxis::kSecond);
  if (flags.lse) add("lse", *flags.lse, *reply.lse, HeadAxis::kSecond);
  return outputs;
}

absl::Status WriteOutputs(const std::vector<Output>& outputs) {
  ArrayWriter writer;
  for (const Output& output : outputs) {
    writer.Add(output.path, output.name, output.type, output.shape,
               {reinterpret_cast<const std::byte*>(output.bytes->data()), output.bytes->size()});
  }
  return writer.Write();
}

void Print(const std::vector<Output>& outputs, const AttentionReply& reply, double elapsed_ms) {
  for (const Output& output : outputs) {
    absl::PrintF("%-8s %s %s in %s\n", output.name, ToString(output.type), ToString(output.shape),
                 output.path);
  }
  absl::PrintF("plan     %s, %.1f ms\n", reply.plan, elapsed_ms);
}

void PrintJson(const std::vector<Output>& outputs, const AttentionReply& reply, double elapsed_ms) {
  JsonWriter json;
  json.BeginObject().Key("outputs").BeginArray();
  for (const Output& output : outputs) {
    json.BeginObject().Key("name").String(output.name).Key("file").String(output.path);
    json.Key("dtype").String(ToString(output.type)).Key("shape").Integers(output.shape).EndObject();
  }
  json.EndArray().Key("backend").String(reply.backend).Key("plan").String(reply.plan);
  json.Key("elapsed_ms").Number(elapsed_ms).EndObject();
  std::puts(json.Take().c_str());
}

ExitCode Attend(const AttendFlags& flags) {
  if (absl::Status dtype = ValidateDTypeFlag(flags.sources.dtype); !dtype.ok()) {
    return FailUsage(dtype);
  }
  absl::StatusOr<LoadedCall> loaded = LoadCall(flags.sources);
  if (!loaded.ok()) return FailUsage(loaded.status());
  if (absl::Status set = SetAttributes(flags, *loaded); !set.ok()) return FailUsage(set);

  std::unique_ptr<AttentionCaller> caller;
  if (flags.local) {
    caller = NewLocalCaller();
  } else {
    const auto channel = Connect(flags.server);
    if (!channel.ok()) return FailConnect(channel.status());
    caller = NewRemoteCaller(*channel, flags.server.timeout());
  }
  const absl::StatusOr<AttentionReply> reply = caller->Attend(loaded->call, loaded->inputs());
  if (!reply.ok()) return FailCall(reply.status());

  const std::vector<Output> outputs = OutputsOf(flags, *reply, loaded->is_2d);
  if (absl::Status written = WriteOutputs(outputs); !written.ok()) return FailUsage(written);
  const double elapsed_ms = std::chrono::duration<double, std::milli>(reply->elapsed).count();
  (flags.json ? PrintJson : Print)(outputs, *reply, elapsed_ms);
  return ExitCode::kOk;
}

std::vector<Flag> Table(AttendFlags& flags) {
  AttendSources& sources = flags.sources;
  std::vector<Flag> table = {
      {"q", "FILE", "queries; alone they are keys and values as well", &sources.q},
      {"k", "FILE", "keys", &sources.k},
      {"v", "FILE", "values", &sources.v},
      {"mask", "FILE", "bool or integers 0 and 1 (1 = attend), or floats (added)", &sources.mask},
      {"past-key", "FILE", "keys that come before, [B, Hkv, P, D]", &sources.past_key},
      {"past-value", "FILE", "their values", &sources.past_value},
      {"key-lengths", "FILE", "how many keys of each batch row are real, [B]",
       &sources.key_lengths},
      {"output", "FILE", "where the result goes: .npy, or .npz as member y", &flags.y, 'o', true},
      {"weights", "FILE", "where the weights go; the same .npz as another output's is shared",
       &flags.weights},
      {"scores", "FILE", "where the scaled scores go, before softcap and mask", &flags.scores},
      {"lse", "FILE", "where the rows' log-sum-exp goes", &flags.lse},
      {"heads", "N", "query heads of inputs [S, H*D] or [B, S, H*D] (default: 1)", &flags.heads},
      {"kv-heads", "N", "key and value heads (default: as many)", &flags.kv_heads},
      {"layout", "NAME", "of inputs of rank 4: bhsd (the default) or bshd", &flags.layout},
      {"causal", "", "no query sees a key after it", &flags.causal},
      {"window", "L,R", "keys a query sees before and after it; -1 is no limit", &flags.window},
      {"bottom-right", "", "the last query stands at the last key, not the first at the first",
       &flags.bottom_right},
      {"scale", "X", "of the scores (default: 1/sqrt(D))", &flags.scale},
      {"softcap", "X", "scores become X*tanh(score/X)", &flags.softcap},
      {"dropout", "P", "share of weights to drop", &flags.dropout},
      {"seed", "N", "of the dropout (default: 0)", &flags.seed},
      {"dtype", "bf16", "what V2 in a file means, NumPy's name for bfloat16", &sources.dtype},
      {"local", "", "compute in this process, without a server", &flags.local},
  };
  for (const Flag& flag : flags.server.Table()) table.push_back(flag);
  table.push_back({"json", "", "print what was written as JSON", &flags.json});
  return table;
}

}  // namespace

ExitCode RunAttendCommand(CommandArguments arguments) {
  AttendFlags flags;
  const CommandLine line{
      .usage = "rapt attend [ARCHIVE.npz] [--q FILE ...] -o FILE [flags]",
      .summary =
          "Computes attention over NumPy arrays of float32, float16, float64 or bfloat16: "
          "[S, D], [B, S, H*D] or [B, H, S, D]. A FILE is a .npy, or a member of an archive "
          "as in.npz:q. ARCHIVE.npz holds any of q, k, v, mask, past_key, past_value, "
          "key_lengths.",
      .flags = Table(flags),
      .examples = {"rapt attend --q q.npy --k k.npy --v v.npy -o y.npy",
                   "rapt attend --q x.npy --causal -o y.npy --weights w.npy --local",
                   "rapt attend --q q.npy --k k.npy --v v.npy --heads 8 --kv-heads 2 -o y.npy",
                   "rapt attend in.npz --window 128,0 -o out.npz --weights out.npz --lse out.npz"},
      .max_operands = 1};
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return *done;
  if (!operands.empty()) flags.sources.archive = operands.front();
  return Attend(flags);
}

}  // namespace rapt
