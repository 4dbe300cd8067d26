#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "attention/half.h"
#include "base/status_macros.h"
#include "client/cli/attend_files.h"
#include "client/cli/attention_caller.h"
#include "client/cli/call_flags.h"
#include "client/cli/commands.h"
#include "client/cli/gradients.h"
#include "client/console/json.h"
#include "client/cpp/call_fields.h"

namespace rapt {
namespace {

constexpr NpyType kDouble = {'f', 8};

struct GradcheckFlags {
  CallFlags call;
  int64_t batch = 1, seq = 8, head_size = 8;
  uint64_t draw = 0;
  bool all = false;
  bool json = false;
};

// Draws an array, uniform in [-1, 1]. InvalidArgument for a shape whose size overflows.
absl::StatusOr<NpyArray> Draw(const Shape& shape, std::mt19937_64& random) {
  RAPT_ASSIGN_OR_RETURN(const int64_t bytes, ByteSize("a drawn tensor", {DType::kFloat64, shape}));
  NpyArray array{kDouble, shape, std::string(static_cast<size_t>(bytes), '\0')};
  for (size_t at = 0; at < array.storage.size(); at += sizeof(double)) {
    const double value = 2 * std::generate_canonical<double, 53>(random) - 1;
    std::memcpy(array.storage.data() + at, &value, sizeof(value));
  }
  return array;
}

absl::Status DrawTensor(const Shape& shape, std::mt19937_64& random,
                        std::optional<LoadedTensor>* tensor) {
  RAPT_ASSIGN_OR_RETURN(NpyArray array, Draw(shape, random));
  *tensor = LoadedTensor{std::move(array), client::DType::kFloat64, shape};
  return absl::OkStatus();
}

// Without a file of Q, draws Q, K and V.
absl::Status DrawInputs(const GradcheckFlags& flags, std::mt19937_64& random,
                        CallSources* sources) {
  if (sources->archive || sources->files[Role::kQ]) return absl::OkStatus();
  for (const auto& [name, value] : {std::pair{"batch", flags.batch},
                                    {"seq", flags.seq},
                                    {"head-size", flags.head_size},
                                    {"heads", flags.call.heads.value_or(1)},
                                    {"kv-heads", flags.call.kv_heads.value_or(1)}}) {
    RAPT_RETURN_IF_ERROR(CheckAtLeastOne(name, value));
  }
  const int64_t heads = flags.call.heads.value_or(2);
  const int64_t kv_heads = flags.call.kv_heads.value_or(heads);
  for (const auto& [role, count] :
       {std::pair{Role::kQ, heads}, {Role::kK, kv_heads}, {Role::kV, kv_heads}}) {
    if (role == Role::kV && flags.call.attributes.v_head_size) continue;
    RAPT_ASSIGN_OR_RETURN(sources->arrays[role],
                          Draw({flags.batch, count, flags.seq, flags.head_size}, random));
  }
  return absl::OkStatus();
}

bool IsFloat(const LoadedTensor& tensor) { return tensor.dtype <= client::DType::kFloat64; }

void ConvertToDouble(LoadedTensor& tensor) {
  const DType dtype = tensor.dtype;
  std::string doubles(static_cast<size_t>(tensor.array.size()) * sizeof(double), '\0');
  for (int64_t n = 0; n < tensor.array.size(); ++n) {
    StoreElement(reinterpret_cast<std::byte*>(doubles.data()), DType::kFloat64, n,
                 LoadElement(tensor.array.bytes().data(), dtype, n));
  }
  tensor.array = NpyArray{kDouble, tensor.array.shape, std::move(doubles)};
  tensor.dtype = client::DType::kFloat64;
}

// Makes each input a tensor of its own, so that they can be moved one by one, in FP64.
void MakeMovable(LoadedCall& call) {
  for (Role role : {Role::kK, Role::kV}) {
    const bool exists = role == Role::kK || !call.attributes.v_head_size;
    if (exists && !call.tensors[role]) call.tensors[role] = call.tensors[Role::kQ];
  }
  for (Role role : kAllInputs) {
    if (call.tensors[role] && IsFloat(*call.tensors[role])) ConvertToDouble(*call.tensors[role]);
  }
}

// Without --gradients, those of all inputs.
void SelectGradients(LoadedCall& call) {
  if (!call.gradients.empty()) return;
  for (Role role : kGradients) {
    const std::optional<LoadedTensor>& input = call.tensors[InfoOf(role).gradient_of];
    if (input && IsFloat(*input)) call.gradients.emplace_back(NameOf(role));
  }
}

// Without --grad, draws dY, and dlse where there is lse.
absl::Status DrawOutputGradients(LoadedCall& call, std::mt19937_64& random,
                                 AttentionCaller& caller) {
  if (call.tensors[Role::kOutputGradient]) return absl::OkStatus();
  client::AttendCall forward = call.call();
  forward.wants_lse = forward.normalizer == client::Normalizer::kSoftmax;
  RAPT_ASSIGN_OR_RETURN(const client::AttendResult result, caller.Attend(forward));
  absl::Status drawn = DrawTensor(result.y.shape(), random, &call.tensors[Role::kOutputGradient]);
  if (!drawn.ok() || !result.lse || call.tensors[Role::kLseGradient]) return drawn;
  return DrawTensor(result.lse->shape(), random, &call.tensors[Role::kLseGradient]);
}

void Print(const std::vector<GradientCheck>& checks, bool has_elements) {
  absl::PrintF("%-19s %15s %15s  %10s\n", "gradient", "slope", "computed", "difference");
  for (const GradientCheck& check : checks) {
    absl::PrintF("%-19s %15.8g %15.8g  %10.2g  %s", check.name, check.slope, check.gradient,
                 check.difference, check.passed ? "PASS" : "FAIL");
    if (has_elements) absl::PrintF("  at element %d", check.element);
    std::puts("");
  }
}

void PrintJson(const std::vector<GradientCheck>& checks, bool has_elements) {
  JsonWriter json;
  json.BeginObject().Key("gradients").BeginArray();
  for (const GradientCheck& check : checks) {
    json.BeginObject().Key("name").String(check.name).Key("slope").Number(check.slope);
    json.Key("computed").Number(check.gradient).Key("difference").Number(check.difference);
    if (has_elements) json.Key("element").Integer(check.element);
    json.Key("passed").Boolean(check.passed).EndObject();
  }
  json.EndArray().EndObject();
  std::puts(json.Take().c_str());
}

ExitCode Gradcheck(const GradcheckFlags& flags) {
  CallFlags call = flags.call;
  std::mt19937_64 random(flags.draw);
  RAPT_EXIT_IF_ERROR(FailUsage, DrawInputs(flags, random, &call.sources));
  RAPT_ASSIGN_OR_EXIT(LoadedCall loaded, FailUsage, LoadCall(call));
  MakeMovable(loaded);
  SelectGradients(loaded);
  RAPT_EXIT_IF_ERROR(FailUsage, CheckGradients(loaded.backward()));
  RAPT_ASSIGN_OR_EXIT(const std::unique_ptr<AttentionCaller> caller, FailConnect, NewCaller(call));
  RAPT_EXIT_IF_ERROR(FailCall, DrawOutputGradients(loaded, random, *caller));

  RAPT_ASSIGN_OR_EXIT(const auto checks, FailCall,
                      flags.all ? CheckElements(*caller, loaded.backward())
                                : CheckDirections(*caller, loaded.backward(), random));
  (flags.json ? PrintJson : Print)(checks, flags.all);
  const bool passed = std::all_of(checks.begin(), checks.end(),
                                  [](const GradientCheck& check) { return check.passed; });
  return passed ? ExitCode::kOk
                : Fail(ExitCode::kCallFailed, "a gradient is not the slope of the forward pass");
}

std::vector<Flag> Table(GradcheckFlags& flags) {
  return Joined(
      {{{"all", "", "compare every element: two calls for each; h = 1e-6, within 1e-4", &flags.all},
        {"batch", "N", "without --q: batch rows to draw (default: 1)", &flags.batch},
        {"seq", "N", "without --q: queries and keys to draw (default: 8)", &flags.seq},
        {"head-size", "N", "without --q: head size to draw (default: 8)", &flags.head_size},
        {"draw", "N", "seed of the direction and of drawn tensors (default: 0)", &flags.draw},
        {"json", "", "print a report as JSON", &flags.json}},
       flags.call.InputTable(),
       flags.call.GradientTable(),
       flags.call.AttributeTable(),
       flags.call.CallerTable()});
}

}  // namespace

ExitCode RunGradcheckCommand(CommandArguments arguments) {
  GradcheckFlags flags;
  const CommandLine line{
      .usage = "rapt gradcheck [ARCHIVE.npz] [--q FILE ...] [flags]",
      .summary =
          "Checks gradients against the forward pass, in FP64: for L = sum(dY * Y) + "
          "sum(dlse * lse) and a random direction u over an input, and one over all inputs, "
          "(L(x + hu) - L(x - hu)) / 2h with h = 1e-5 must be the sum of gradient * u, within "
          "1e-7 * max(1, |slope|). Inputs are those of `rapt attend`, converted to FP64; without "
          "--q, Q, K and V [batch, heads, seq, head-size] are drawn, by default 2 heads; without "
          "--grad, dY and dlse are drawn. Exits with 1 if a gradient differs.",
      .flags = Table(flags),
      .examples = {"rapt gradcheck --local --causal --softcap 20",
                   "rapt gradcheck --heads 4 --kv-heads 2 --seq 33 --window 8,0",
                   "rapt gradcheck --q q.npy --k k.npy --v v.npy --head-sink sink.npy --all"},
      .max_operands = 1};
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return *done;
  if (!operands.empty()) flags.call.sources.archive = operands.front();
  return Gradcheck(flags);
}

}  // namespace rapt
