#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "client/cli/attend_files.h"
#include "client/cli/attend_report.h"
#include "client/cli/attention_caller.h"
#include "client/cli/call_flags.h"
#include "client/cli/commands.h"
#include "client/cli/gradients.h"
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

// The forward and the backward pass have flags of their own.
absl::Status CheckPass(const AttendFlags& flags) {
  const InputMap<std::optional<std::string>>& files = flags.call.sources.files;
  const bool is_backward = flags.is_backward();
  const std::pair<const char*, bool> excluded[] = {
      {"weights", is_backward && flags.weights},
      {"scores", is_backward && flags.scores},
      {"lse", is_backward && flags.lse},
      {"stream", is_backward && flags.call.caller.stream}};
  for (const auto& [name, is_set] : excluded) {
    if (!is_set) continue;
    return Invalid("--", name,
                   " and --grad are mutually exclusive; --grad computes gradients "
                   "only, in one message");
  }
  const std::pair<const char*, bool> dependent[] = {
      {"forward-output", files[Role::kForwardOutput].has_value()},
      {"forward-lse", files[Role::kForwardLse].has_value()},
      {"lse-grad", files[Role::kLseGradient].has_value()},
      {"gradients", flags.call.gradients.has_value()}};
  for (const auto& [name, is_set] : dependent) {
    if (!is_set || is_backward) continue;
    return Invalid("--", name, " needs --grad");
  }
  return absl::OkStatus();
}

absl::Status SelectOutputs(const AttendFlags& flags, client::AttendCall& call) {
  if (flags.weights && flags.scores) {
    return Invalid("--weights and --scores are mutually exclusive; a call returns one of them");
  }
  if (flags.weights) call.score_output = client::ScoreOutput::kWeights;
  if (flags.scores) call.score_output = client::ScoreOutput::kScores;
  call.wants_lse = flags.lse.has_value();
  return absl::OkStatus();
}

// InvalidArgument for an unknown gradient, or for several in a file of one array.
absl::Status CheckGradients(const AttendFlags& flags, const client::BackwardCall& call) {
  RAPT_RETURN_IF_ERROR(client::CheckGradients(call));
  const size_t count = client::GradientsWantedBy(call).size();
  if (count == 1 || absl::EndsWith(flags.y, ".npz")) return absl::OkStatus();
  return Invalid("--output is ", flags.y, ", but there are ", count,
                 " gradients; only an .npz can contain several arrays");
}

absl::StatusOr<Report> Forward(const AttendFlags& flags, const LoadedCall& loaded,
                               AttentionCaller& caller) {
  RAPT_ASSIGN_OR_RETURN(const client::AttendResult result, caller.Attend(loaded.call()));
  Report report{{}, result.backend, result.plan, result.path};
  const auto add = [&](const char* name, const std::string& path, const client::Tensor& tensor,
                       HeadAxis head_axis) {
    report.outputs.push_back(
        {name, path, tensor, ShapeInFile(tensor.shape(), head_axis, loaded.is_2d)});
  };
  add("y", flags.y, result.y, HeadAxis::kNone);
  if (flags.weights) add("weights", *flags.weights, *result.scores, HeadAxis::kSecond);
  if (flags.scores) add("scores", *flags.scores, *result.scores, HeadAxis::kSecond);
  if (flags.lse) add("lse", *flags.lse, *result.lse, HeadAxis::kSecond);
  return report;
}

// The gradients have the shapes of their inputs' files.
absl::StatusOr<Report> Backward(const AttendFlags& flags, const LoadedCall& loaded,
                                AttentionCaller& caller) {
  RAPT_ASSIGN_OR_RETURN(const client::BackwardResult result,
                        caller.AttendBackward(loaded.backward()));
  Report report{{}, result.backend, result.plan};
  for (const GradientRef& gradient : GradientsIn(result)) {
    report.outputs.push_back({gradient.name, flags.y, *gradient.tensor,
                              loaded.InputOf(gradient.input).array.shape,
                              NormOf(*gradient.tensor)});
  }
  return report;
}

ExitCode Attend(AttendFlags flags) {
  absl::Status valid = NormalizeOutputFiles({{"output", &flags.y},
                                             {"weights", PathIn(flags.weights)},
                                             {"scores", PathIn(flags.scores)},
                                             {"lse", PathIn(flags.lse)}});
  if (valid.ok()) valid = CheckPass(flags);
  if (!valid.ok()) return FailUsage(valid);
  RAPT_ASSIGN_OR_EXIT(LoadedCall loaded, FailUsage, LoadCall(flags.call));
  valid = flags.is_backward() ? CheckGradients(flags, loaded.backward())
                              : SelectOutputs(flags, loaded.attributes);
  if (!valid.ok()) return FailUsage(valid);
  RAPT_ASSIGN_OR_EXIT(const std::unique_ptr<AttentionCaller> caller, FailConnect,
                      NewCaller(flags.call));
  const auto compute = flags.is_backward() ? Backward : Forward;
  return ComputeAndReport([&] { return compute(flags, loaded, *caller); }, flags.json);
}

std::vector<Flag> Table(AttendFlags& flags) {
  return Joined({flags.call.InputTable(),
                 flags.OutputTable(),
                 flags.call.GradientTable(),
                 flags.call.ForwardTable(),
                 flags.call.AttributeTable(),
                 flags.call.StreamTable(),
                 flags.call.CallerTable(),
                 {{"json", "", "print a report as JSON", &flags.json}}});
}

std::vector<std::string_view> ExactFlagNames() {
  AttendFlags flags;
  return NamesOf(Table(flags));
}

ExitCode RunExactAttend(CommandArguments arguments) {
  AttendFlags flags;
  const std::string names = absl::StrJoin(
      kInputs, ", ", [](std::string* out, Role role) { absl::StrAppend(out, NameOf(role)); });
  const std::string summary = absl::StrCat(
      "Computes attention over NumPy arrays of float32, float16, float64 or bfloat16: [S, D], "
      "[B, S, H*D] or [B, H, S, D]. A FILE is a .npy file, or a member of an archive such as "
      "in.npz:q. ARCHIVE.npz contains any of ",
      names,
      ". With --grad, computes gradients of the inputs instead. Layers have flags of their own: "
      "rapt attend --model --help. `rapt run` computes linear attention, attention by hashing and "
      "other operators.");
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

// A kind of attention. Each has flags of its own, one of which chooses it.
struct Kind {
  std::string_view flag;  // empty: none chooses it
  std::vector<std::string_view> (*flag_names)();
  ExitCode (*run)(CommandArguments arguments);

  bool Has(std::string_view name) const { return absl::c_linear_search(flag_names(), name); }
};
constexpr Kind kKinds[] = {{"", ExactFlagNames, RunExactAttend},
                           {"model", LayerFlagNames, RunLayerAttend}};

// The names of the flags among the arguments, also of unknown ones.
std::vector<std::string_view> GivenNames(CommandArguments arguments) {
  std::vector<std::string_view> names;
  for (std::string_view argument : arguments) {
    if (argument == "--") break;
    if (!argument.starts_with("--")) continue;
    names.push_back(argument.substr(2, argument.find('=') - 2));
  }
  return names;
}

// Refuses the flags of other kinds. The parser refuses those that no kind has.
absl::Status CheckKind(const Kind& kind, const std::vector<std::string_view>& names) {
  for (const std::string_view name : names) {
    if (kind.Has(name)) continue;
    const auto* const other = absl::c_find_if(kKinds, [&](const Kind& k) { return k.Has(name); });
    if (other == std::end(kKinds)) continue;
    return absl::InvalidArgumentError(
        kind.flag.empty()
            ? absl::StrFormat("--%s needs --%s", name, other->flag)
            : absl::StrFormat("--%s and --%s are mutually exclusive; rapt attend --%s --help lists "
                              "its flags",
                              kind.flag, name, kind.flag));
  }
  return absl::OkStatus();
}

}  // namespace

ExitCode RunAttendCommand(CommandArguments arguments) {
  const std::vector<std::string_view> names = GivenNames(arguments);
  const Kind* kind = absl::c_find_if(kKinds, [&](const Kind& k) {
    return !k.flag.empty() && absl::c_linear_search(names, k.flag);
  });
  if (kind == std::end(kKinds)) kind = &kKinds[0];
  if (absl::c_linear_search(names, "help")) {
    const std::string help = "--help";  // alone: the flag that chooses the kind may have no value
    return kind->run({&help, 1});
  }
  RAPT_EXIT_IF_ERROR(FailUsage, CheckKind(*kind, names));
  return kind->run(arguments);
}

}  // namespace rapt
