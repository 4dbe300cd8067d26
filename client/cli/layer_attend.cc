// rapt attend --model.
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "attention/layer/files/layer_files.h"
#include "attention/layer/layer.h"
#include "base/host_limits.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"
#include "client/cli/attend_files.h"
#include "client/cli/attend_report.h"
#include "client/cli/call_flags.h"
#include "client/cli/commands.h"
#include "client/cli/operator_call.h"
#include "client/cli/tensor_file.h"

namespace rapt {
namespace {

struct LayerFlags {
  std::string model;
  std::optional<std::string> query, key, value, mask, key_lengths, input_ids, weights;
  std::optional<double> dropout;
  uint64_t seed = 0;
  bool causal = false, average = false, json = false;
  std::string y, dtype;
  CallerFlags caller;

  std::vector<Flag> Table() {
    return Joined(
        {{{"model", "NAME", "a layer of the server's repository; with --local its folder", &model,
           '\0', true},
          {"query", "FILE", "[S, E] or [B, S, E]", &query, '\0', true},
          {"key", "FILE", "[S, Ek] or [B, S, Ek] (default: --query)", &key},
          {"value", "FILE", "[S, Ev] or [B, S, Ev] (default: --key)", &value},
          {"mask", "FILE", "bool, true attends, or a number to add; broadcast to [B, H, Sq, Sk]",
           &mask},
          {"key-lengths", "FILE", "integers [B]: later keys are hidden", &key_lengths},
          {"input-ids", "FILE", "integers [S] or [B, S]: keys of the layer's pad token are hidden",
           &input_ids},
          {"dtype", "bf16", "type of V2 arrays; NumPy stores bfloat16 as V2", &dtype},
          {"output", "FILE", "result: a .npy file, or member y of an .npz file", &y, 'o', true},
          {"weights", "FILE", "attention weights of each head", &weights},
          {"average", "", "--weights are averaged over the heads", &average},
          {"causal", "", "a query sees the keys up to its position (default: as configured)",
           &causal},
          {"dropout", "P", "fraction of the weights to drop", &dropout},
          {"seed", "N", "seed of --dropout (default: 0)", &seed}},
         caller.Table(),
         {{"json", "", "print a report as JSON", &json}}});
  }
};

absl::Status CheckFlags(LayerFlags& flags) {
  RAPT_RETURN_IF_ERROR(flags.caller.Check());
  RAPT_RETURN_IF_ERROR(ValidateDTypeFlag(flags.dtype));
  if (flags.average && !flags.weights) return Invalid("--average needs --weights");
  return NormalizeOutputFiles({{"output", &flags.y}, {"weights", PathIn(flags.weights)}});
}

struct LoadedInputs {
  OperatorInputs inputs;
  bool is_2d = false;  // read as [S, E], sent as [1, S, E]
};

absl::StatusOr<LoadedInputs> Load(const LayerFlags& flags) {
  absl::StatusOr<OperatorInputs> inputs =
      LoadInputs({{Role::kQ, "query", flags.query},
                  {Role::kK, "key", flags.key},
                  {Role::kV, "value", flags.value},
                  {Role::kMask, "mask", flags.mask, DType::kBool},
                  {kInputIds, "input_ids", flags.input_ids, DType::kInt64}},
                 flags.key_lengths, flags.dtype);
  if (!inputs.ok()) return inputs.status();
  LoadedInputs loaded{*std::move(inputs)};
  auto& tensors = loaded.inputs.tensors;
  loaded.is_2d = tensors[Role::kQ]->shape.size() == 2;
  for (Slot slot : {Slot(Role::kQ), Slot(Role::kK), Slot(Role::kV), kInputIds}) {
    if (!loaded.is_2d || !tensors[slot]) continue;
    Shape& shape = tensors[slot]->shape;
    shape.insert(shape.begin(), 1);
  }
  return loaded;
}

Report ReportOf(const LayerFlags& flags, bool is_2d, const client::Tensor& y,
                const std::optional<client::Tensor>& weights) {
  Report report;
  const auto add = [&](const char* name, const std::string& path, const client::Tensor& tensor) {
    report.outputs.push_back(
        {name, path, tensor, ShapeInFile(tensor.shape(), HeadAxis::kNone, is_2d)});
  };
  add("y", flags.y, y);
  if (flags.weights) add("weights", *flags.weights, *weights);
  return report;
}

absl::StatusOr<Report> ComputeHere(const LayerFlags& flags, const LoadedInputs& loaded) {
  RAPT_ASSIGN_OR_RETURN(const LayerFiles files, ReadLayerFiles(flags.model));
  ThreadPool pool(ReadHostLimits().cores);
  RAPT_ASSIGN_OR_RETURN(std::shared_ptr<const Layer> layer, MakeLayer(files, pool));
  LayerCall call{.inputs = loaded.inputs.Specs(),
                 .wants_weights = flags.weights && !flags.average,
                 .wants_averaged_weights = flags.average};
  if (flags.causal) call.is_causal = true;
  if (flags.dropout) call.dropout = Dropout{*flags.dropout, flags.seed};
  RAPT_ASSIGN_OR_RETURN(const auto op, MakeLayerCall(std::move(layer), call));
  RAPT_ASSIGN_OR_RETURN(const OperatorResult computed,
                        RunHere(BoundCall(op), loaded.inputs.ToArguments(), pool));
  Report report = ReportOf(flags, loaded.is_2d, *computed.outputs[Role::kY],
                           computed.outputs[flags.average ? kAveragedWeights : kLayerWeights]);
  report.backend = computed.backend;
  report.plan = computed.plan;
  return report;
}

absl::StatusOr<Report> Send(const LayerFlags& flags, const LoadedInputs& loaded,
                            client::Client& server) {
  client::ModelCall call{.model = flags.model, .outputs = {"Y"}};
  for (const auto& [slot, name] : {std::pair(Slot(Role::kQ), "query"),
                                   {Role::kK, "key"},
                                   {Role::kV, "value"},
                                   {Role::kMask, "attn_mask"},
                                   {kInputIds, "input_ids"},
                                   {Role::kKeyLengths, "nonpad_kv_seqlen"}}) {
    if (const auto view = loaded.inputs.View(slot)) call.inputs.emplace_back(name, *view);
  }
  if (flags.causal) call.parameters["is_causal"] = true;
  if (flags.dropout) {
    call.parameters["dropout_probability"] = *flags.dropout;
    call.parameters["dropout_seed"] = flags.seed;
  }
  if (flags.average) call.parameters["average_attn_weights"] = true;
  if (flags.caller.priority != 0) call.parameters["priority"] = flags.caller.priority;
  if (flags.weights) call.outputs.emplace_back("weights");
  RAPT_ASSIGN_OR_RETURN(client::ModelResult result, server.Infer(call));
  return ReportOf(flags, loaded.is_2d, result.outputs["Y"], result.outputs["weights"]);
}

ExitCode Attend(LayerFlags flags) {
  RAPT_EXIT_IF_ERROR(FailUsage, CheckFlags(flags));
  RAPT_ASSIGN_OR_EXIT(const LoadedInputs loaded, FailUsage, Load(flags));
  RAPT_ASSIGN_OR_EXIT(const std::unique_ptr<client::Client> server, FailConnect,
                      flags.caller.Connect());
  const auto compute = [&] {
    return flags.caller.local ? ComputeHere(flags, loaded) : Send(flags, loaded, *server);
  };
  return ComputeAndReport(compute, flags.json);
}

}  // namespace

std::vector<std::string_view> LayerFlagNames() { return NamesOf(LayerFlags().Table()); }

ExitCode RunLayerAttend(CommandArguments arguments) {
  LayerFlags flags;
  const CommandLine line{
      .usage = "rapt attend --model NAME --query FILE [--key FILE] -o FILE [flags]",
      .summary =
          "Computes attention with the projections of a layer, which the server has loaded with "
          "--model_repository, over NumPy arrays of float32, float16, float64 or bfloat16, [S, E] "
          "or [B, S, E].",
      .flags = flags.Table(),
      .examples = {"rapt attend --model torch_block --query x.npy -o y.npy --weights w.npy",
                   "rapt attend --model bahdanau --query state.npy --key encoder.npy -o y.npy",
                   "rapt attend --model models/torch_block --local --query x.npy -o y.npy"}};
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments)) return *done;
  return Attend(std::move(flags));
}

}  // namespace rapt
