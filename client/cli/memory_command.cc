#include <cstdio>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "client/cli/commands.h"
#include "client/cli/local_memory.h"
#include "client/console/json.h"
#include "client/console/server_connection.h"
#include "client/console/text.h"

namespace rapt {
namespace {

struct MemoryFlags {
  int64_t batch = 1;
  int64_t heads = 8;
  std::optional<int64_t> kv_heads;
  std::vector<int64_t> lengths = DoubledLengths();
  int64_t head_size = 64;
  std::optional<std::string> dtype;
  std::optional<std::string> model;
  client::CompactInputs inputs;
  client::LinearTimeOptions linear_time;
  std::optional<std::string> address;
  ServerFlags server;  // its address is not used
  bool json = false;
};

absl::StatusOr<client::DType> ParseDType(const std::string& name) {
  if (name == "fp32") return client::DType::kFloat32;
  if (name == "fp16") return client::DType::kFloat16;
  if (name == "bf16") return client::DType::kBFloat16;
  if (name == "fp64") return client::DType::kFloat64;
  return absl::InvalidArgumentError(
      absl::StrFormat("--dtype is '%s'; it takes fp32, fp16, bf16 or fp64", name));
}

// The usual type of a question without a layer.
std::string TypeOf(const MemoryFlags& flags) { return flags.dtype.value_or("fp32"); }

absl::StatusOr<client::MemoryQuestion> QuestionOf(const MemoryFlags& flags) {
  RAPT_ASSIGN_OR_RETURN(const client::DType dtype, ParseDType(TypeOf(flags)));
  RAPT_RETURN_IF_ERROR(CheckAtLeastOne("batch", flags.batch));
  RAPT_RETURN_IF_ERROR(CheckAtLeastOne("heads", flags.heads));
  RAPT_RETURN_IF_ERROR(CheckAtLeastOne("kv-heads", flags.kv_heads.value_or(1)));
  RAPT_RETURN_IF_ERROR(CheckAtLeastOne("head-size", flags.head_size));
  RAPT_RETURN_IF_ERROR(CheckAtLeastOne("hashes", flags.linear_time.lsh_hashes));
  RAPT_RETURN_IF_ERROR(CheckAtLeastOne("chunk-length", flags.linear_time.lsh_chunk_length));
  for (const int64_t length : flags.lengths) RAPT_RETURN_IF_ERROR(CheckAtLeastOne("seq", length));
  return client::MemoryQuestion{.batch = flags.batch,
                                .query_heads = flags.heads,
                                .kv_heads = flags.kv_heads.value_or(flags.heads),
                                .lengths = flags.lengths,
                                .head_size = flags.head_size,
                                .value_head_size = flags.head_size,
                                .dtype = dtype,
                                .inputs = flags.inputs,
                                .linear_time = flags.linear_time};
}

absl::StatusOr<client::LayerMemoryQuestion> LayerQuestionOf(const MemoryFlags& flags) {
  const MemoryFlags usual;
  if (flags.heads != usual.heads || flags.kv_heads || flags.head_size != usual.head_size ||
      flags.inputs != usual.inputs || flags.linear_time != usual.linear_time) {
    return Invalid(
        "--model is given: a layer has sizes of its own; only --batch, --seq and --dtype go with "
        "it");
  }
  client::LayerMemoryQuestion question{
      .model = *flags.model, .batch = flags.batch, .lengths = flags.lengths};
  RAPT_RETURN_IF_ERROR(CheckAtLeastOne("batch", flags.batch));
  for (const int64_t length : flags.lengths) RAPT_RETURN_IF_ERROR(CheckAtLeastOne("seq", length));
  if (!flags.dtype) return question;
  RAPT_ASSIGN_OR_RETURN(question.dtype, ParseDType(*flags.dtype));
  return question;
}

// "-" if the operator does not take the sizes.
std::string Cell(const client::OperatorEstimate& estimate) {
  return estimate.refusal.empty() ? HumanBytes(estimate.workspace_bytes + estimate.state_bytes)
                                  : "-";
}

// The plan of the longest estimate, or why there is none.
std::string PlanOf(const client::OperatorEstimate& estimate) {
  return estimate.refusal.empty() ? estimate.plan : estimate.refusal;
}

void Print(const MemoryFlags& flags, const client::MemoryEstimates& estimates) {
  absl::PrintF("batch %d, %d heads, head size %d, %s; memory in addition to Q, K, V and Y:\n\n",
               flags.batch, flags.heads, flags.head_size, TypeOf(flags));
  absl::PrintF("%8s  %12s  %12s  %12s  %12s  %12s  %12s", "length", "Q, K, V, Y", "standard",
               "chunked", "fused", "LSH", "linear");
  for (const client::InputEstimate& input : estimates.estimates.front().inputs) {
    absl::PrintF("  %16s  %12s", input.name, "saved");
  }
  absl::PrintF("\n");
  for (const client::MemoryEstimate& estimate : estimates.estimates) {
    absl::PrintF("%8d  %12s  %12s  %12s  %12s  %12s  %12s", estimate.length,
                 HumanBytes(estimate.tensor_bytes), HumanBytes(estimate.standard_bytes),
                 HumanBytes(estimate.chunked_bytes), HumanBytes(estimate.fused_bytes),
                 Cell(estimate.lsh), Cell(estimate.linear));
    for (const client::InputEstimate& input : estimate.inputs) {
      absl::PrintF("  %16s  %12s", HumanBytes(input.bytes), HumanBytes(input.saved_bytes));
    }
    absl::PrintF("\n");
  }
  const client::MemoryEstimate& longest = estimates.estimates.back();
  absl::PrintF(
      "\nstandard  the full score matrix, heads x length x length\n"
      "chunked   scores of %d keys at a time, by online softmax\n"
      "fused     the exact workspace of the plan of %s: %s\n"
      "LSH       the same by hashing, %d rounds, chunks of %d: %s\n"
      "linear    the same with FAVOR+ and its state, at any length: %s\n",
      estimates.chunk, flags.address.value_or("this machine"), longest.plan,
      flags.linear_time.lsh_hashes, flags.linear_time.lsh_chunk_length, PlanOf(longest.lsh),
      PlanOf(longest.linear));
  if (estimates.estimates.front().inputs.empty()) return;
  absl::PrintF(
      "saved     what the input before it takes less than the mask or bias of length x length\n");
}

void WriteOperator(const char* name, const client::OperatorEstimate& estimate, JsonWriter& json) {
  json.Key(name).BeginObject().Key("workspace_bytes").Integer(estimate.workspace_bytes);
  json.Key("state_bytes").Integer(estimate.state_bytes).Key("plan").String(estimate.plan);
  json.Key("refusal").String(estimate.refusal).EndObject();
}

void PrintJson(const MemoryFlags& flags, const client::MemoryEstimates& estimates) {
  JsonWriter json;
  json.BeginObject().Key("batch").Integer(flags.batch).Key("heads").Integer(flags.heads);
  json.Key("head_size").Integer(flags.head_size).Key("dtype").String(TypeOf(flags));
  json.Key("chunk").Integer(estimates.chunk).Key("lengths").BeginArray();
  for (const client::MemoryEstimate& estimate : estimates.estimates) {
    json.BeginObject().Key("length").Integer(estimate.length);
    json.Key("tensor_bytes").Integer(estimate.tensor_bytes);
    json.Key("standard_bytes").Integer(estimate.standard_bytes);
    json.Key("chunked_bytes").Integer(estimate.chunked_bytes);
    json.Key("fused_bytes").Integer(estimate.fused_bytes);
    json.Key("plan").String(estimate.plan).Key("inputs").BeginArray();
    for (const client::InputEstimate& input : estimate.inputs) {
      json.BeginObject().Key("name").String(input.name).Key("bytes").Integer(input.bytes);
      json.Key("saved_bytes").Integer(input.saved_bytes).EndObject();
    }
    json.EndArray();
    WriteOperator("lsh", estimate.lsh, json);
    WriteOperator("linear", estimate.linear, json);
    json.EndObject();
  }
  json.EndArray().EndObject();
  std::puts(json.Take().c_str());
}

void PrintLayer(const MemoryFlags& flags, const client::MemoryEstimates& estimates) {
  absl::PrintF("layer %s, packed weights %s; memory of a call with batch %d:\n\n", *flags.model,
               HumanBytes(estimates.estimates.front().layer->weight_bytes), flags.batch);
  absl::PrintF("%8s  %12s  %12s  %12s\n", "length", "inputs, Y", "workspace", "charged");
  for (const client::MemoryEstimate& estimate : estimates.estimates) {
    absl::PrintF("%8d  %12s  %12s  %12s\n", estimate.length, HumanBytes(estimate.tensor_bytes),
                 HumanBytes(estimate.fused_bytes), HumanBytes(estimate.layer->charged_bytes));
  }
  absl::PrintF(
      "\nworkspace  the exact workspace of the plan of %s: %s\n"
      "charged    what a server reserves of its memory budget: Y and workspace, in pooled "
      "buffers\n",
      flags.address.value_or("this machine"), estimates.estimates.back().plan);
}

void PrintLayerJson(const MemoryFlags& flags, const client::MemoryEstimates& estimates) {
  JsonWriter json;
  json.BeginObject().Key("model").String(*flags.model).Key("batch").Integer(flags.batch);
  json.Key("weight_bytes").Integer(estimates.estimates.front().layer->weight_bytes);
  json.Key("lengths").BeginArray();
  for (const client::MemoryEstimate& estimate : estimates.estimates) {
    json.BeginObject().Key("length").Integer(estimate.length);
    json.Key("tensor_bytes").Integer(estimate.tensor_bytes);
    json.Key("fused_bytes").Integer(estimate.fused_bytes);
    json.Key("charged_bytes").Integer(estimate.layer->charged_bytes);
    json.Key("plan").String(estimate.plan).EndObject();
  }
  json.EndArray().EndObject();
  std::puts(json.Take().c_str());
}

absl::StatusOr<client::MemoryEstimates> Ask(client::Client& server,
                                            const client::MemoryQuestion& question) {
  return server.EstimateMemory(question);
}

absl::StatusOr<client::MemoryEstimates> Ask(client::Client& server,
                                            const client::LayerMemoryQuestion& question) {
  return server.EstimateLayerMemory(question);
}

// Asks the server at the address, or this machine.
template <typename Question>
ExitCode Estimate(const MemoryFlags& flags, const absl::StatusOr<Question>& question,
                  void (*print)(const MemoryFlags&, const client::MemoryEstimates&)) {
  if (!question.ok()) return FailUsage(question.status());
  absl::StatusOr<client::MemoryEstimates> estimates;
  if (flags.address) {
    ServerFlags at_address = flags.server;
    at_address.address = *flags.address;
    RAPT_ASSIGN_OR_EXIT(const auto server, FailConnect, Connect(at_address));
    estimates = Ask(*server, *question);
    if (!estimates.ok()) return FailCall(estimates.status());
  } else {
    estimates = EstimateMemoryHere(*question);
    if (!estimates.ok()) return FailUsage(estimates.status());
  }
  print(flags, *estimates);
  return ExitCode::kOk;
}

}  // namespace

ExitCode RunMemoryCommand(CommandArguments arguments) {
  MemoryFlags flags;
  CommandLine line{
      .usage = "rapt memory [flags]",
      .summary =
          "Estimates the memory that self-attention needs in addition to its tensors, at several "
          "lengths: with the full score matrix, in chunks of keys, and fused as in rapt; by "
          "hashing and with random features, which take time linear in the length; and what is "
          "saved by inputs that replace a mask or bias of length x length. Needs no server unless "
          "--address is set.",
      .flags =
          {{"batch", "N", "batch size (default: 1)", &flags.batch},
           {"heads", "N", "query heads (default: 8)", &flags.heads},
           {"kv-heads", "N", "key and value heads (default: --heads)", &flags.kv_heads},
           {"seq", "LIST", "lengths (default: 128 to 32768, doubling)", &flags.lengths},
           {"head-size", "N", "head size (default: 64)", &flags.head_size},
           {"dtype", "TYPE", "fp32, fp16, bf16 or fp64 (default: fp32, or the type of the layer)",
            &flags.dtype},
           {"model", "NAME",
            "a layer with its weights: a model of the server, or without --address a folder "
            "with config.json and model.safetensors",
            &flags.model},
           {"block-q", "N", "a block_mask with N queries in an entry; with --block-k",
            &flags.inputs.block_q},
           {"block-k", "N", "keys in an entry of the block_mask", &flags.inputs.block_k},
           {"selected-indices", "N", "selected_indices with N keys for each query",
            &flags.inputs.selected_indices},
           {"alibi", "", "a bias by distance with the slopes of ALiBi", &flags.inputs.alibi},
           {"bias-table", "N", "a bias_table with N buckets", &flags.inputs.bias_table},
           {"relative-bias", "N", "a relative_bias with N distances, odd",
            &flags.inputs.relative_bias},
           {"per-head", "", "block_mask, selected_indices and relative_bias differ between heads",
            &flags.inputs.per_head},
           {"hashes", "N", "rounds of hashing of LSH (default: 4)", &flags.linear_time.lsh_hashes},
           {"chunk-length", "N", "tokens in a chunk of LSH (default: 64)",
            &flags.linear_time.lsh_chunk_length},
           {"features", "N", "random features of FAVOR+ (default: floor(D ln D))",
            &flags.linear_time.favor_features},
           {"address", "HOST:PORT", "use the plans of this server (default: of this machine)",
            &flags.address},
           {"json", "", "print the bytes as JSON", &flags.json}},
      .examples = {"rapt memory --batch 32 --heads 8 --seq 512,1024,2048,4096,8192,16384",
                   "rapt memory --heads 32 --kv-heads 8 --head-size 128 --dtype bf16 --json",
                   "rapt memory --heads 32 --per-head --block-q 64 --block-k 64",
                   "rapt memory --heads 32 --address 127.0.0.1:8001",
                   "rapt memory --model models/torch_block --seq 512,2048"}};
  for (const Flag& flag : flags.server.Table()) {
    if (flag.name != "address") line.flags.push_back(flag);
  }
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments)) return *done;
  if (flags.model) {
    return Estimate(flags, LayerQuestionOf(flags), flags.json ? PrintLayerJson : PrintLayer);
  }
  return Estimate(flags, QuestionOf(flags), flags.json ? PrintJson : Print);
}

}  // namespace rapt
