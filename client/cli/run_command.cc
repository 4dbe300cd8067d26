// rapt run: any operator, with flags from its table.
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "attention/operator_schema.h"
#include "base/arguments.h"
#include "base/host_limits.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"
#include "client/cli/attend_report.h"
#include "client/cli/call_flags.h"
#include "client/cli/commands.h"
#include "client/cli/operator_call.h"
#include "client/cli/operator_stream.h"
#include "client/cli/tensor_file.h"

namespace rapt {
namespace {

using client::ModelCall;

constexpr std::string_view kExamples[] = {
    ("rapt run attention --q q.npy --k k.npy --v v.npy --q-num-heads 8 --kv-num-heads 2 "
     "--is-causal -o y.npy --lse lse.npy"),
    "rapt run rotary_embedding --x q.npy --num-heads 8 --rope-theta 10000 -o rotated.npy",
    "rapt run positional_encoding --local --x x.npy -o y.npy",
    ("rapt run linear_attention --query q.npy --key k.npy --value v.npy --q-num-heads 8 "
     "--kv-num-heads 2 --update-rule gated --decay g.npy -o y.npy --present-state s.npy"),
    ("rapt run linear_attention --query q.npy --key q.npy --value q.npy --q-num-heads 8 "
     "--kv-num-heads 8 --update-rule linear --stream --chunk 2 -o y.npy"),
    "rapt run lsh_attention --q x.npy --v x.npy --chunk-length 3 --seed 1 -o y.npy",
};

std::string_view Std(absl::string_view text) { return {text.data(), text.size()}; }
absl::string_view Absl(std::string_view text) { return {text.data(), text.size()}; }

// "q" of Q, "present-state" of present_state.
std::string FlagOf(absl::string_view name) {
  return absl::StrReplaceAll(absl::AsciiStrToLower(name), {{"_", "-"}});
}

// Whether every call has the tensor.
bool IsRequired(const TensorSchema& input) { return input.required && input.replaced_by.empty(); }

// The name of a tensor in archives.
std::string MemberOf(const TensorSchema& tensor) { return absl::AsciiStrToLower(tensor.name); }

// The flags of an operator, and the call that they make. Not movable: the table refers to it.
class OperatorFlags {
 public:
  explicit OperatorFlags(const OperatorSchema& schema)
      : schema(schema),
        inputs(schema.inputs.size()),
        outputs(schema.outputs.size()),
        call(schema.new_call()) {}
  OperatorFlags(const OperatorFlags&) = delete;

  std::vector<Flag> Table();

  const OperatorSchema& schema;
  // By the rows of the table.
  std::vector<std::optional<std::string>> inputs, outputs;
  const std::unique_ptr<SchemaCall> call;
  std::map<std::string, ModelCall::Value> parameters;
  std::string dtype;
  bool json = false;
  CallerFlags caller;

 private:
  Flag AttributeFlag(const AttributeSchema& attribute);
  std::string_view Keep(std::string text) { return texts_.emplace_back(std::move(text)); }

  std::deque<std::string> texts_;  // names and texts of flags
};

// The value as a parameter of the model.
ModelCall::Value ParameterOf(const AttributeSchema& attribute, const AttributeValue& value) {
  return std::visit(
      [&](auto v) -> ModelCall::Value {
        if constexpr (std::is_same_v<decltype(v), DType>) {
          return int64_t{InfoOf(v).onnx};
        } else if constexpr (std::is_same_v<decltype(v), uint8_t>) {
          return std::string(attribute.choices[v]);
        } else {
          return v;
        }
      },
      value);
}

Flag OperatorFlags::AttributeFlag(const AttributeSchema& attribute) {
  constexpr std::string_view kPlaceholders[] = {"BOOL", "N", "N", "X", "TYPE", "NAME"};
  const bool is_switch = attribute.kind == AttributeValue(false) && !attribute.takes_value;
  std::string help(attribute.help);
  if (!attribute.choices.empty()) {
    absl::StrAppend(&help, "; ", absl::StrJoin(attribute.choices, ", "));
  }
  const FlagReader read = [this, &attribute](std::string_view flag,
                                             const std::string& text) -> absl::Status {
    const bool is_type = std::holds_alternative<DType>(attribute.kind);
    const std::string given = is_type ? absl::AsciiStrToUpper(text) : text;
    const auto value = ReadValue(attribute, GivenValue(given));
    if (!value.ok()) {
      return Invalid(Absl(flag), " is '", text, "'; it takes ", AllowedValues(attribute));
    }
    attribute.set(*call, *value);
    parameters[std::string(attribute.name)] = ParameterOf(attribute, *value);
    return absl::OkStatus();
  };
  std::string_view placeholder = is_switch ? "" : kPlaceholders[attribute.kind.index()];
  if (!attribute.allowed.empty()) {
    placeholder = Keep(absl::StrCat(attribute.least, "..", attribute.most));
  }
  return {Keep(FlagOf(attribute.name)),
          placeholder,
          Keep(std::move(help)),
          read,
          '\0',
          attribute.required};
}

std::vector<Flag> OperatorFlags::Table() {
  std::vector<Flag> table;
  for (size_t n = 0; n < inputs.size(); ++n) {
    const TensorSchema& input = schema.inputs[n];
    table.push_back(
        {Keep(FlagOf(input.name)), "FILE", Std(input.help), &inputs[n], '\0', IsRequired(input)});
  }
  table.push_back({"dtype", "bf16", "type of V2 arrays; NumPy stores bfloat16 as V2", &dtype});
  for (size_t n = 0; n < outputs.size(); ++n) {
    const TensorSchema& output = schema.outputs[n];
    if (n == 0) {
      table.push_back({"output", "FILE",
                       Keep(absl::StrCat("result, ", output.help, ": a .npy file, or member ",
                                         MemberOf(output), " of an .npz file")),
                       &outputs[n], 'o', true});
    } else if (output.follows.empty()) {
      table.push_back({Keep(FlagOf(output.name)), "FILE", Std(output.help), &outputs[n]});
    }
  }
  for (const AttributeSchema& attribute : schema.attributes) {
    table.push_back(AttributeFlag(attribute));
  }
  if (schema.want_state != nullptr) {
    table.push_back(
        {"stream", "", "send the tokens in chunks; the server keeps the state", &caller.stream});
    table.push_back({"chunk", "N", "tokens in a chunk (default: about 8 MiB)", &caller.chunk});
  }
  return Joined({table, caller.Table(), {{"json", "", "print a report as JSON", &json}}});
}

// Refuses attributes of a stream that need all tokens.
absl::Status CheckStreamed(const OperatorFlags& flags) {
  for (const AttributeSchema& attribute : flags.schema.attributes) {
    const auto given = flags.parameters.find(std::string(attribute.name));
    if (attribute.needs_all.empty() || given == flags.parameters.end()) continue;
    const bool is_switch = attribute.takes_value;
    const ModelCall::Value usual = is_switch ? ModelCall::Value(true) : int64_t{0};
    if (given->second == usual) continue;
    return Invalid("--stream and --", FlagOf(attribute.name), is_switch ? "=false" : "",
                   " are mutually exclusive; ", attribute.needs_all);
  }
  return absl::OkStatus();
}

absl::Status CheckFlags(OperatorFlags& flags) {
  RAPT_RETURN_IF_ERROR(flags.caller.Check());
  RAPT_RETURN_IF_ERROR(ValidateDTypeFlag(flags.dtype));
  if (flags.caller.stream) RAPT_RETURN_IF_ERROR(CheckStreamed(flags));
  std::deque<std::string> names;
  std::vector<OutputFile> files;
  for (size_t n = 0; n < flags.outputs.size(); ++n) {
    names.push_back(n == 0 ? "output" : FlagOf(flags.schema.outputs[n].name));
    files.emplace_back(names.back().c_str(), PathIn(flags.outputs[n]));
  }
  return NormalizeOutputFiles(files);
}

struct LoadedInputs {
  OperatorInputs inputs;
  int added_axes = 0;  // of size 1, before those of the first input's file
};

// A file may lack the first axes of a tensor, [S, D] for [B, H, S, D], but not the last two.
constexpr int kLeastRank = 2;

absl::Status Load(const OperatorFlags& flags, LoadedInputs& loaded) {
  for (size_t n = 0; n < flags.inputs.size(); ++n) {
    const TensorSchema& row = flags.schema.inputs[n];
    if (!flags.inputs[n]) continue;
    if (row.slot == Role::kKeyLengths) {
      RAPT_ASSIGN_OR_RETURN(loaded.inputs.key_lengths,
                            LoadLengths(*flags.inputs[n], MemberOf(row)));
      continue;
    }
    const DType usual = row.slot == Role::kMask ? DType::kBool : row.dtype;
    RAPT_ASSIGN_OR_RETURN(LoadedTensor tensor,
                          LoadTensor(*flags.inputs[n], MemberOf(row), flags.dtype, usual));
    const auto rank = static_cast<int>(tensor.shape.size());
    if (!row.any_rank && rank >= kLeastRank && rank < row.rank) {
      if (n == 0) loaded.added_axes = row.rank - rank;
      tensor.shape.insert(tensor.shape.begin(), row.rank - rank, 1);
    }
    loaded.inputs.tensors[row.slot] = std::move(tensor);
  }
  return absl::OkStatus();
}

// Whether the call returns the output.
bool IsWanted(const OperatorFlags& flags, size_t output) {
  const absl::string_view follows = flags.schema.outputs[output].follows;
  if (follows.empty()) return flags.outputs[output].has_value();
  const auto parameter = flags.parameters.find(std::string(follows));
  return parameter != flags.parameters.end() && parameter->second != ModelCall::Value(int64_t{0});
}

// Adds an output to the report: its file, or for one without a flag its number.
absl::Status AddOutput(const OperatorFlags& flags, size_t n, int added_axes,
                       const client::Tensor& tensor, Report& report) {
  const TensorSchema& row = flags.schema.outputs[n];
  if (!row.follows.empty()) {
    if (tensor.dtype() != row.dtype || tensor.shape() != Shape{1}) {
      return absl::InternalError(
          absl::StrCat("malformed response from server: ", row.name, " must be one FP32"));
    }
    report.relative_error = tensor.values<float>()[0];
    return absl::OkStatus();
  }
  // The added axes have size 1, unless the output has others in their place.
  Shape shape = tensor.shape();
  for (int axis = 0; axis < added_axes && !shape.empty() && shape.front() == 1; ++axis) {
    shape.erase(shape.begin());
  }
  report.outputs.push_back({MemberOf(row), *flags.outputs[n], tensor, std::move(shape)});
  return absl::OkStatus();
}

// Sets the inputs and wanted outputs of the call, and checks it.
absl::StatusOr<BoundCall> Check(const OperatorFlags& flags, const LoadedInputs& loaded) {
  flags.call->inputs() = loaded.inputs.Specs();
  for (size_t n = 0; n < flags.outputs.size(); ++n) {
    const TensorSchema& row = flags.schema.outputs[n];
    if (row.want != nullptr && IsWanted(flags, n)) row.want(*flags.call);
  }
  RAPT_ASSIGN_OR_RETURN(BoundCall bound, flags.call->Bind());
  for (size_t n = 0; n < flags.outputs.size(); ++n) {
    const TensorSchema& row = flags.schema.outputs[n];
    if (IsWanted(flags, n) && !bound.outputs()[row.slot]) return NoOutput(row);
  }
  return bound;
}

absl::StatusOr<Report> ComputeHere(const OperatorFlags& flags, const LoadedInputs& loaded) {
  RAPT_ASSIGN_OR_RETURN(const BoundCall call, Check(flags, loaded));
  ThreadPool pool(ReadHostLimits().cores);
  RAPT_ASSIGN_OR_RETURN(const OperatorResult computed,
                        RunHere(call, loaded.inputs.ToArguments(), pool));
  Report report{.outputs = {}, .backend = computed.backend, .plan = computed.plan};
  for (size_t n = 0; n < flags.outputs.size(); ++n) {
    if (!IsWanted(flags, n)) continue;
    const client::Tensor& output = *computed.outputs[flags.schema.outputs[n].slot];
    RAPT_RETURN_IF_ERROR(AddOutput(flags, n, loaded.added_axes, output, report));
  }
  return report;
}

// Refers to the inputs.
ModelCall CallOf(const OperatorFlags& flags, const LoadedInputs& loaded) {
  ModelCall call{.model = std::string(flags.schema.name), .parameters = flags.parameters};
  for (const TensorSchema& row : flags.schema.inputs) {
    const auto view = loaded.inputs.View(row.slot);
    if (view) call.inputs.emplace_back(row.name, *view);
  }
  if (flags.caller.priority != 0) call.parameters["priority"] = flags.caller.priority;
  for (size_t n = 0; n < flags.outputs.size(); ++n) {
    if (IsWanted(flags, n)) call.outputs.emplace_back(flags.schema.outputs[n].name);
  }
  return call;
}

absl::StatusOr<Report> Send(const OperatorFlags& flags, const LoadedInputs& loaded,
                            client::Client& server) {
  const ModelCall call = CallOf(flags, loaded);
  Report report;
  client::ModelResult result;
  if (flags.caller.stream) {
    // Before anything is cut into chunks, whose lengths are always in range.
    RAPT_ASSIGN_OR_RETURN(const BoundCall bound, Check(flags, loaded));
    RAPT_RETURN_IF_ERROR(bound.tensor_operator()->CheckData(loaded.inputs.ToArguments()));
    RAPT_ASSIGN_OR_RETURN(result, StreamTokens(flags.schema, call, flags.caller, server));
    report.path = client::Path::kStream;
  } else {
    RAPT_ASSIGN_OR_RETURN(result, server.Infer(call));
  }
  report.backend = result.backend;
  report.plan = result.plan;
  for (size_t n = 0; n < flags.outputs.size(); ++n) {
    const auto output = result.outputs.find(std::string(flags.schema.outputs[n].name));
    if (output == result.outputs.end()) continue;
    RAPT_RETURN_IF_ERROR(AddOutput(flags, n, loaded.added_axes, output->second, report));
  }
  return report;
}

ExitCode Run(OperatorFlags& flags) {
  RAPT_EXIT_IF_ERROR(FailUsage, CheckFlags(flags));
  LoadedInputs loaded;
  RAPT_EXIT_IF_ERROR(FailUsage, Load(flags, loaded));
  RAPT_ASSIGN_OR_EXIT(const std::unique_ptr<client::Client> server, FailConnect,
                      flags.caller.Connect());
  const auto compute = [&] {
    return flags.caller.local ? ComputeHere(flags, loaded) : Send(flags, loaded, *server);
  };
  return ComputeAndReport(compute, flags.json);
}

void PrintOperators() {
  std::puts(
      "usage: rapt run OPERATOR --INPUT FILE ... -o FILE [flags]\n\n"
      "Computes an operator, by its names in the Open Inference Protocol, over NumPy arrays\n"
      "of float32, float16, float64 or bfloat16. A FILE is a .npy file, or a member of an\n"
      "archive such as in.npz:x.\n");
  for (const OperatorSchema* schema : OperatorSchemas()) {
    absl::PrintF("  %-20s %s\n", schema->name, schema->help);
  }
  std::puts("\n`rapt run OPERATOR --help` shows the flags of an operator.\n\nexamples:");
  for (const std::string_view example : kExamples) absl::PrintF("  %s\n", example);
}

}  // namespace

ExitCode RunRunCommand(CommandArguments arguments) {
  const std::string name = arguments.empty() ? "" : arguments.front();
  if (name == "--help" || name == "-h") {
    PrintOperators();
    return ExitCode::kOk;
  }
  const OperatorSchema* const schema = FindOperator(name);
  if (schema == nullptr) {
    return Fail(ExitCode::kUsage,
                absl::StrFormat("%s; the operators are %s",
                                name.empty() ? "no operator given"
                                             : absl::StrFormat("unknown operator '%s'", name),
                                OperatorNames()));
  }
  OperatorFlags flags(*schema);
  std::string usage = absl::StrCat("rapt run ", name);
  for (const TensorSchema& input : schema->inputs) {
    if (IsRequired(input)) absl::StrAppend(&usage, " --", FlagOf(input.name), " FILE");
  }
  for (const AttributeSchema& attribute : schema->attributes) {
    if (attribute.required) absl::StrAppend(&usage, " --", FlagOf(attribute.name), " N");
  }
  absl::StrAppend(&usage, " -o FILE [flags]");
  std::vector<std::string_view> examples;
  for (const std::string_view example : kExamples) {
    if (example.starts_with(absl::StrCat("rapt run ", name, " "))) examples.push_back(example);
  }
  const CommandLine line{
      .usage = usage, .summary = Std(schema->help), .flags = flags.Table(), .examples = examples};
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments.subspan(1), &operands)) {
    return *done;
  }
  return Run(flags);
}

}  // namespace rapt
