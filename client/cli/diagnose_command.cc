#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/cli/attend_report.h"
#include "client/cli/attention_caller.h"
#include "client/cli/call_flags.h"
#include "client/cli/commands.h"

namespace rapt {

ExitCode RunDiagnoseCommand(CommandArguments arguments) {
  CallFlags flags;
  bool as_json = false;
  const CommandLine line{
      .usage = "rapt diagnose [ARCHIVE.npz] [--q FILE ...] [flags]",
      .summary =
          "Explains a call whose result looks wrong. Shows NaN and infinities in the inputs, the "
          "range of every step, the masked pairs and their causes, the backend that would run, "
          "and why the others would not. Takes the files and flags of rapt attend. With --grad "
          "also shows how the gradient flows to Q, K and V: norms, positions without gradient, "
          "vanishing and exploding gradients.",
      .flags = Joined({flags.InputTable(),
                       {flags.OutputGradientFlag()},
                       flags.AttributeTable(),
                       flags.CallerTable(),
                       {{"json", "", "print the report as JSON", &as_json}}}),
      .examples = {"rapt diagnose --q q.npy --k k.npy --v v.npy",
                   "rapt diagnose --q x.npy --causal --local",
                   "rapt diagnose in.npz --heads 8 --kv-heads 2 --json",
                   "rapt diagnose --q q.npy --k k.npy --v v.npy --grad dy.npy"},
      .max_operands = 1};
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return *done;
  if (!operands.empty()) flags.sources.archive = operands.front();

  RAPT_ASSIGN_OR_EXIT(const LoadedCall loaded, FailUsage, LoadCall(flags));
  RAPT_ASSIGN_OR_EXIT(const std::unique_ptr<AttentionCaller> caller, FailConnect, NewCaller(flags));
  const bool is_backward = flags.sources.files[Role::kOutputGradient].has_value();
  RAPT_ASSIGN_OR_EXIT(
      const client::Diagnosis diagnosis, FailCall,
      is_backward ? caller->Diagnose(loaded.backward()) : caller->Diagnose(loaded.call()));
  PrintDiagnosis(diagnosis, as_json);
  return ExitCode::kOk;
}

}  // namespace rapt
