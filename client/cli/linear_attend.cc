#include "client/cli/linear_attend.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/mechanism/linear/linear_attention.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "client/cli/attend_report.h"
#include "client/cli/caller_flags.h"
#include "client/cli/local_operator.h"
#include "client/cli/operator_inputs.h"
#include "client/cli/progress_bar.h"
#include "client/cli/tensor_file.h"

namespace rapt {
namespace {

using client::LinearCall;
using client::LinearResult;

constexpr int64_t kUsualChunkBytes = 8 << 20;

struct LinearFlags {
  LinearAttentionCall attributes;  // those set directly by a flag
  std::optional<std::string> q, k, v, decay, beta, past_state, past_normalizer, projection;
  std::optional<std::string> key_lengths, present_state, present_normalizer;
  std::optional<int64_t> kv_heads;
  std::string y, dtype;
  bool not_causal = false, json = false;
  CallerFlags caller;

  std::vector<Flag> Table() {
    LinearAttentionCall& a = attributes;
    std::vector<Flag> table = {
        {"linear", "RULE", "the update rule: linear, gated, delta or gated_delta",
         NamedChoice{kNamesOf<UpdateRule>,
                     [&a](size_t index) { a.update_rule = static_cast<UpdateRule>(index); }},
         '\0', true},
        {"q", "FILE", "[B, T, H*d_k]; without --k and --v also keys and values", &q, '\0', true},
        {"k", "FILE", "[B, T, Hkv*d_k]", &k},
        {"v", "FILE", "[B, T, Hkv*d_v]", &v},
        {"decay", "FILE", "logarithms, [B, T, Hkv] or [B, T, Hkv*d_k]; of gated rules", &decay},
        {"beta", "FILE", "[B, T, Hkv] or [B, T, 1]; of delta rules", &beta},
        {"past-state", "FILE", "the state before, [B, Hkv, features, d_v]", &past_state},
        {"past-normalizer", "FILE", "its normalizer, [B, Hkv, features]", &past_normalizer},
        {"projection", "FILE", "the directions of favor, [M, d_k]", &projection},
        {"key-lengths", "FILE", "integers [B]: later tokens do not count", &key_lengths},
        {"dtype", "bf16", "type of V2 arrays; NumPy stores bfloat16 as V2", &dtype},
        {"output", "FILE", "result: a .npy file, or member y of an .npz file", &y, 'o', true},
        {"present-state", "FILE", "the state after the last token", &present_state},
        {"present-normalizer", "FILE", "its normalizer", &present_normalizer},
        {"heads", "N", "query heads (default: 1)", &a.q_num_heads},
        {"kv-heads", "N", "key and value heads (default: --heads)", &kv_heads},
        {"scale", "X", "scale of the output (default: 1/sqrt(d_k))", &a.scale},
        {"chunk-size", "N", "tokens computed at once, a hint (default: 64)", &a.chunk_size},
        {"not-causal", "", "every query sees all tokens; of rule linear", &not_causal},
        {"feature-map", "NAME",
         "what stands for queries and keys: none, elu1, relu or favor (default: none)",
         NamedChoice{kNamesOf<FeatureMap>,
                     [&a](size_t index) { a.feature_map = static_cast<FeatureMap>(index); }}},
        {"normalize", "", "divide by the sum of the products with keys; of rule linear",
         &a.normalize},
        {"features", "M", "random features of favor (default: d_k ln d_k)", &a.num_features},
        {"seed", "N", "seed of the directions of favor (default: 0)", &a.seed},
        {"error-rows", "N", "measure the error of favor as an estimate of softmax over N rows",
         &a.error_rows},
        {"stream", "", "send the tokens in chunks; the server keeps the state", &caller.stream},
        {"chunk", "N", "tokens in a chunk (default: about 8 MiB)", &caller.chunk}};
    for (const Flag& flag : caller.Table()) table.push_back(flag);
    table.push_back({"json", "", "print a report as JSON", &json});
    return table;
  }
};

absl::Status CheckFlags(const LinearFlags& flags) {
  if (flags.k.has_value() != flags.v.has_value()) {
    return Invalid(flags.k ? "k is given without v" : "v is given without k",
                   "; give both, or neither for self-attention");
  }
  if (flags.caller.stream && flags.attributes.error_rows > 0) {
    return Invalid(
        "--stream and --error-rows are mutually exclusive; the exact rows need all keys");
  }
  if (flags.caller.stream && flags.not_causal) {
    return Invalid(
        "--stream and --not-causal are mutually exclusive; a chunk does not see later ones");
  }
  RAPT_RETURN_IF_ERROR(flags.caller.Check());
  RAPT_RETURN_IF_ERROR(ValidateDTypeFlag(flags.dtype));
  RAPT_RETURN_IF_ERROR(CheckAtLeastOne("heads", flags.attributes.q_num_heads));
  return CheckAtLeastOne("kv-heads", flags.kv_heads.value_or(1));
}

struct LoadedLinearCall {
  OperatorInputs inputs;
  LinearAttentionCall attributes;  // without inputs
  bool is_2d = false;              // read as [T, H*d], sent as [1, T, H*d]

  LinearAttentionCall InLibrary() const {
    LinearAttentionCall call = attributes;
    call.inputs = inputs.Specs();
    return call;
  }

  // Refers to this object.
  LinearCall ForServer(uint64_t priority) const {
    const LinearAttentionCall& a = attributes;
    return {.query = *inputs.View(Role::kQ),
            .key = *inputs.View(Role::kK),
            .value = *inputs.View(Role::kV),
            .past_state = inputs.View(linear::kPastState),
            .decay = inputs.View(linear::kDecay),
            .beta = inputs.View(linear::kBeta),
            .projection = inputs.View(linear::kProjection),
            .past_normalizer = inputs.View(linear::kPastNormalizer),
            .key_lengths = inputs.key_lengths,
            .query_heads = a.q_num_heads,
            .kv_heads = a.kv_num_heads,
            .update_rule = a.update_rule,
            .scale = a.scale,
            .chunk_size = a.chunk_size,
            .causal = a.is_causal,
            .feature_map = a.feature_map,
            .normalize = a.normalize,
            .num_features = a.num_features,
            .seed = a.seed,
            .error_rows = a.error_rows,
            .want_present_state = a.wants_present_state,
            .want_present_normalizer = a.wants_present_normalizer,
            .priority = priority};
  }
};

absl::StatusOr<LoadedLinearCall> Load(const LinearFlags& flags) {
  absl::StatusOr<OperatorInputs> inputs =
      LoadInputs({{Role::kQ, "q", flags.q},
                  {Role::kK, "k", flags.k ? flags.k : flags.q},
                  {Role::kV, "v", flags.v ? flags.v : flags.q},
                  {linear::kDecay, "decay", flags.decay},
                  {linear::kBeta, "beta", flags.beta},
                  {linear::kPastState, "past_state", flags.past_state},
                  {linear::kPastNormalizer, "past_normalizer", flags.past_normalizer},
                  {linear::kProjection, "projection", flags.projection}},
                 flags.key_lengths, flags.dtype);
  if (!inputs.ok()) return inputs.status();
  LoadedLinearCall loaded{.inputs = *std::move(inputs), .attributes = flags.attributes};
  auto& tensors = loaded.inputs.tensors;
  loaded.is_2d = tensors[Role::kQ]->shape.size() == 2;
  for (Role role : kInputTensors) {
    if (!loaded.is_2d || !tensors[role] || role == linear::kProjection) continue;
    tensors[role]->shape.insert(tensors[role]->shape.begin(), 1);
  }
  LinearAttentionCall& a = loaded.attributes;
  a.kv_num_heads = flags.kv_heads.value_or(a.q_num_heads);
  a.is_causal = !flags.not_causal;
  a.wants_present_state = flags.present_state.has_value();
  a.wants_present_normalizer = flags.present_normalizer.has_value();
  return loaded;
}

absl::StatusOr<LinearResult> ComputeHere(const LoadedLinearCall& loaded) {
  RAPT_ASSIGN_OR_RETURN(const auto op, MakeLinearAttention(loaded.InLibrary()));
  RAPT_ASSIGN_OR_RETURN(OperatorResult computed, RunHere(*op, loaded.inputs.ToArguments()));
  LinearResult result;
  result.output = *std::move(computed.outputs[Role::kY]);
  result.present_state = std::move(computed.outputs[linear::kPresentState]);
  result.present_normalizer = std::move(computed.outputs[linear::kPresentNormalizer]);
  result.backend = computed.backend;
  result.plan = computed.plan;
  const std::optional<client::Tensor>& error = computed.outputs[linear::kRelativeError];
  if (error) result.relative_error = error->values<float>()[0];
  return result;
}

// Tokens [begin, begin + count) of a tensor [B, T, ...].
LoadedTensor TokensOf(const LoadedTensor& tensor, int64_t begin, int64_t count) {
  const int64_t tokens = tensor.shape[1];
  const auto token_bytes =
      static_cast<size_t>(tensor.array.size() / std::max<int64_t>(1, tensor.shape[0] * tokens) *
                          tensor.array.type.bytes);
  const auto* const from = reinterpret_cast<const char*>(tensor.array.bytes().data());
  std::string bytes;
  for (int64_t b = 0; b < tensor.shape[0]; ++b) {
    bytes.append(from + static_cast<size_t>(b * tokens + begin) * token_bytes,
                 static_cast<size_t>(count) * token_bytes);
  }
  Shape shape = tensor.shape;
  shape[1] = count;
  return {NpyArray{tensor.array.type, shape, std::move(bytes)}, tensor.dtype, shape};
}

// Joins outputs [B, T, E] of consecutive tokens.
class Outputs {
 public:
  void Add(const client::Tensor& output) {
    const Shape& shape = output.shape();
    rows_.resize(static_cast<size_t>(shape[0]));
    const size_t row = output.bytes().size() / std::max<size_t>(1, rows_.size());
    for (size_t b = 0; b < rows_.size(); ++b) {
      rows_[b].append(reinterpret_cast<const char*>(output.bytes().data()) + b * row, row);
    }
    dtype_ = output.dtype();
    shape_ = {shape[0], shape_.empty() ? shape[1] : shape_[1] + shape[1], shape[2]};
  }

  client::Tensor Join() const {
    std::string bytes;
    for (const std::string& row : rows_) bytes += row;
    return {dtype_, shape_, std::move(bytes)};
  }

 private:
  std::vector<std::string> rows_;  // of each batch row
  client::DType dtype_ = client::DType::kFloat32;
  Shape shape_;
};

// Whether the tensor has a row for each token.
bool HasTokens(Role role) {
  return role == Role::kQ || role == Role::kK || role == Role::kV || role == linear::kDecay ||
         role == linear::kBeta;
}

// The part of a call with the tokens [begin, begin + count).
LoadedLinearCall PartOf(const LoadedLinearCall& loaded, int64_t begin, int64_t count) {
  LoadedLinearCall part{.inputs = {}, .attributes = loaded.attributes};
  for (Role role : kInputTensors) {
    const std::optional<LoadedTensor>& tensor = loaded.inputs.tensors[role];
    if (!tensor) continue;
    if (HasTokens(role)) {
      part.inputs.tensors[role] = TokensOf(*tensor, begin, count);
    } else if (begin == 0) {  // the server keeps it
      part.inputs.tensors[role] = tensor;
    }
  }
  part.inputs.key_lengths = loaded.inputs.key_lengths;
  for (int64_t& length : part.inputs.key_lengths) {
    length = std::clamp<int64_t>(length - begin, 0, count);
  }
  const bool is_last = begin + count == loaded.inputs.tensors[Role::kQ]->shape[1];
  part.attributes.wants_present_state &= is_last;
  part.attributes.wants_present_normalizer &= is_last;
  return part;
}

int64_t BytesOfTokens(const OperatorInputs& inputs) {
  int64_t bytes = 0;
  for (Role role : kInputTensors) {
    if (!HasTokens(role) || !inputs.tensors[role]) continue;
    bytes += static_cast<int64_t>(inputs.View(role)->data.size());
  }
  return bytes;
}

// Sends the tokens in chunks.
absl::StatusOr<LinearResult> Stream(const LoadedLinearCall& loaded, const CallerFlags& flags,
                                    client::Client& server) {
  // Before anything is cut into chunks.
  RAPT_RETURN_IF_ERROR(MakeLinearAttention(loaded.InLibrary()).status());
  const int64_t length = loaded.inputs.tensors[Role::kQ]->shape[1];
  const int64_t bytes = BytesOfTokens(loaded.inputs);
  const int64_t token_bytes = std::max<int64_t>(1, bytes / std::max<int64_t>(1, length));
  const int64_t chunk = flags.chunk.value_or(std::max<int64_t>(1, kUsualChunkBytes / token_bytes));
  const std::unique_ptr<client::LinearStream> stream = server.LinearAttendStream();
  ProgressBar bar;
  Outputs outputs;
  absl::StatusOr<LinearResult> last;
  int64_t begin = 0;
  do {
    const int64_t count = std::min(chunk, length - begin);
    last = stream->Attend(PartOf(loaded, begin, count).ForServer(flags.priority));
    if (!last.ok()) return last;
    outputs.Add(last->output);
    begin += count;
    bar.Show(begin * token_bytes, bytes);
  } while (begin < length);
  RAPT_RETURN_IF_ERROR(stream->Finish());
  last->output = outputs.Join();
  return last;
}

absl::StatusOr<Report> Compute(const LinearFlags& flags, const LoadedLinearCall& loaded,
                               client::Client* server) {
  const absl::StatusOr<LinearResult> result =
      flags.caller.local    ? ComputeHere(loaded)
      : flags.caller.stream ? Stream(loaded, flags.caller, *server)
                            : server->LinearAttend(loaded.ForServer(flags.caller.priority));
  if (!result.ok()) return result.status();
  Report report{.outputs = {},
                .backend = result->backend,
                .plan = result->plan,
                .path = flags.caller.stream ? client::Path::kStream : client::Path::kMessage,
                .relative_error = result->relative_error};
  const auto add = [&](const char* name, const std::string& path, const client::Tensor& tensor) {
    report.outputs.push_back(
        {name, path, tensor, ShapeInFile(tensor.shape(), HeadAxis::kNone, loaded.is_2d)});
  };
  add("y", flags.y, result->output);
  if (flags.present_state) add("present_state", *flags.present_state, *result->present_state);
  if (flags.present_normalizer) {
    add("present_normalizer", *flags.present_normalizer, *result->present_normalizer);
  }
  return report;
}

ExitCode Attend(LinearFlags flags) {
  absl::Status valid = CheckFlags(flags);
  if (valid.ok()) {
    valid = NormalizeOutputFiles({{"output", &flags.y},
                                  {"present-state", PathIn(flags.present_state)},
                                  {"present-normalizer", PathIn(flags.present_normalizer)}});
  }
  if (!valid.ok()) return FailUsage(valid);
  const absl::StatusOr<LoadedLinearCall> loaded = Load(flags);
  if (!loaded.ok()) return FailUsage(loaded.status());
  const absl::StatusOr<std::unique_ptr<client::Client>> server = flags.caller.Connect();
  if (!server.ok()) return FailConnect(server.status());
  return ComputeAndReport([&] { return Compute(flags, *loaded, server->get()); }, flags.json);
}

}  // namespace

std::vector<std::string_view> LinearFlagNames() { return NamesOf(LinearFlags().Table()); }

ExitCode RunLinearAttend(CommandArguments arguments) {
  LinearFlags flags;
  flags.attributes.q_num_heads = 1;
  const CommandLine line{
      .usage = "rapt attend --linear RULE --q FILE [--k FILE --v FILE] -o FILE [flags]",
      .summary =
          "Computes linear attention, the ONNX operator LinearAttention, over NumPy arrays of "
          "float32, float16, float64 or bfloat16: [T, H*d], or [B, T, H*d]. For each token, "
          "S = e^decay S + k u^T and y = scale S^T q, where u is v, or by the delta rules "
          "beta (v - (e^decay S)^T k).",
      .flags = flags.Table(),
      .examples = {
          "rapt attend --linear gated --q q.npy --k k.npy --v v.npy --decay g.npy -o y.npy",
          "rapt attend --linear gated_delta --q q.npy --k k.npy --v v.npy --decay g.npy --beta "
          "b.npy --heads 8 --kv-heads 2 -o y.npy --present-state state.npy --stream",
          "rapt attend --linear linear --feature-map favor --features 256 --error-rows 64 --q "
          "q.npy --k k.npy --v v.npy -o y.npy --local"}};
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return *done;
  return Attend(std::move(flags));
}

}  // namespace rapt
