#include "client/cli/call_flags.h"

#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "attention/attributes.h"
#include "base/check.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "client/cli/tensor_file.h"
#include "client/cpp/call_fields.h"

namespace rapt {
namespace {

absl::Status SetHeads(const CallFlags& flags, client::AttendCall& call) {
  RAPT_RETURN_IF_ERROR(CheckAtLeastOne("heads", flags.heads.value_or(1)));
  RAPT_RETURN_IF_ERROR(CheckAtLeastOne("kv-heads", flags.kv_heads.value_or(1)));
  if (flags.kv_heads && !flags.heads) {
    return Invalid("--kv-heads needs --heads");
  }
  call.query_heads = flags.heads.value_or(0);
  call.kv_heads = flags.kv_heads.value_or(call.query_heads);
  return absl::OkStatus();
}

absl::Status SetAlignment(const CallFlags& flags, client::AttendCall& call) {
  if (flags.bottom_right && flags.onnx_alignment) {
    return Invalid(
        "--bottom-right and --onnx-alignment are both given; queries have one alignment");
  }
  if (flags.bottom_right) call.alignment = client::Alignment::kBottomRight;
  if (flags.onnx_alignment) call.alignment = client::Alignment::kOnnx;
  return absl::OkStatus();
}

absl::Status SetLayout(const CallFlags& flags, LoadedCall& loaded) {
  if (!flags.layout) return absl::OkStatus();
  if (*flags.layout != "bhsd" && *flags.layout != "bshd") {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--layout is '%s'; it takes bhsd ([B, H, S, D]) or bshd ([B, S, H, D])", *flags.layout));
  }
  const LoadedTensor& q = *loaded.tensors[Role::kQ];
  if (q.shape.size() != 4) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--layout applies to inputs of rank 4; q has shape %s", ToString(q.array.shape)));
  }
  loaded.attributes.layout =
      *flags.layout == "bhsd" ? client::Layout::kBhsd : client::Layout::kBshd;
  return absl::OkStatus();
}

absl::Status SetWindow(const std::vector<int64_t>& window, client::AttendCall& call) {
  if (window.empty()) return absl::OkStatus();
  if (window.size() != 2) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--window has %d numbers; it takes two, LEFT,RIGHT; -1 means no limit", window.size()));
  }
  if (window[0] != -1) call.window.left = window[0];
  if (window[1] != -1) call.window.right = window[1];
  return absl::OkStatus();
}

// The mask of --pad-ids. REQUIRES: the layout is set.
absl::Status SetPadding(const CallFlags& flags, LoadedCall& loaded) {
  if (!flags.pad_ids) {
    return flags.pad_token ? Invalid("--pad-token needs --pad-ids") : absl::OkStatus();
  }
  if (loaded.tensors[Role::kMask]) {
    return Invalid(
        "a mask and --pad-ids are both given; give a mask that hides the padding as well");
  }
  RAPT_ASSIGN_OR_RETURN(const NpyArray ids, LoadArray(*flags.pad_ids, "ids"));
  const std::optional<LoadedTensor>& k = loaded.tensors[Role::kK];
  const Shape& shape = (k ? k : loaded.tensors[Role::kQ])->shape;
  if (shape.size() < 3) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--pad-ids needs keys of rank 2 to 4; they have shape %s", ToString(shape)));
  }
  const bool heads_first = shape.size() == 4 && loaded.attributes.layout != client::Layout::kBshd;
  int64_t keys = shape[heads_first ? 2 : 1];
  const std::optional<LoadedTensor>& past = loaded.tensors[Role::kPastKey];
  if (past && past->shape.size() == 4) keys += past->shape[2];
  RAPT_ASSIGN_OR_RETURN(LoadedTensor mask,
                        PaddingMask(ids, flags.pad_token.value_or(0), shape[0], keys));
  loaded.tensors[Role::kMask] = std::move(mask);
  return absl::OkStatus();
}

absl::Status SetAttributes(const CallFlags& flags, LoadedCall& loaded) {
  client::AttendCall& call = loaded.attributes;
  call = flags.attributes;
  call.priority = flags.caller.priority;
  if (flags.only_queries_rotate) call.rotary_keys = false;
  if (flags.dropout) call.dropout = client::Dropout{*flags.dropout, flags.seed};
  RAPT_RETURN_IF_ERROR(SetAlignment(flags, call));
  RAPT_RETURN_IF_ERROR(SetHeads(flags, call));
  RAPT_RETURN_IF_ERROR(SetLayout(flags, loaded));
  RAPT_RETURN_IF_ERROR(SetWindow(flags.window, call));
  return SetPadding(flags, loaded);
}

// A flag that would have no effect is an error.
absl::Status CheckUsed(const CallFlags& flags, const LoadedCall& loaded) {
  const client::AttendCall& call = loaded.attributes;
  const bool rotates = loaded.tensors[Role::kCosCache] || call.rope_theta;
  const bool has_blocks = loaded.tensors[Role::kBlockMask].has_value();
  const bool has_buckets = loaded.tensors[Role::kBiasTable].has_value();
  const char* const rotation = "--cos-cache and --sin-cache, or --rope-theta";
  const struct {
    const char* flag;
    bool given, used;
    const char* needed;
  } rows[] = {{"interleaved", call.interleaved, rotates, rotation},
              {"rotary-embedding-dim", call.rotary_embedding_dim != 0, rotates, rotation},
              {"rotary-queries-only", flags.only_queries_rotate, rotates, rotation},
              {"block-q", call.block_q.has_value(), has_blocks, "--block-mask"},
              {"block-k", call.block_k.has_value(), has_blocks, "--block-mask"},
              {"bidirectional", call.is_bidirectional, has_buckets, "--bias-table"},
              {"max-distance", call.max_distance.has_value(), has_buckets, "--bias-table"}};
  for (const auto& row : rows) {
    if (row.given && !row.used) {
      return absl::InvalidArgumentError(absl::StrFormat("--%s needs %s", row.flag, row.needed));
    }
  }
  return absl::OkStatus();
}

// The names of --gradients, which the client library checks.
void SetGradients(const CallFlags& flags, LoadedCall& loaded) {
  if (flags.gradients) loaded.gradients = absl::StrSplit(*flags.gradients, ',');
}

Flag FileFlag(Role role, CallSources& sources) {
  return {FlagNameOf(role), "FILE", InfoOf(role).help, &sources.files[role]};
}

template <typename T>
constexpr std::string_view PlaceholderOf() {
  if constexpr (std::is_same_v<T, bool>) return "";
  return std::is_same_v<T, double> || std::is_same_v<T, std::optional<double>> ? "X" : "N";
}

Flag FlagOf(const AttributeInfo& info, client::AttendCall& call) {
  return client::FindCallAttribute(info.native)->Visit(call, [&](auto& value) -> Flag {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_enum_v<Value>) {
      const auto set = [&value](size_t index) { value = static_cast<Value>(index); };
      return {info.flag, "NAME", info.help, NamedChoice{info.choices, set}};
    } else if constexpr (std::is_constructible_v<FlagTarget, Value*>) {
      return {info.flag, PlaceholderOf<Value>(), info.help, &value};
    } else {
      RAPT_CHECK(false, "an attribute of this type has no flag");
    }
  });
}

}  // namespace

const std::string& FlagNameOf(Role input) {
  static const auto* const names = [] {
    auto* result = new InputMap<std::string>;
    for (Role role : kAllInputs) {
      const char* const flag = InfoOf(role).flag;
      (*result)[role] = flag != nullptr ? flag : absl::StrReplaceAll(NameOf(role), {{"_", "-"}});
    }
    return result;
  }();
  return (*names)[input];
}

std::vector<Flag> CallFlags::InputTable() {
  std::vector<Flag> table;
  table.reserve(kInputs.size() + 3);
  for (Role role : kInputs) table.push_back(FileFlag(role, sources));
  table.push_back(
      {"pad-ids", "FILE", "hides padding: the token of each key, [T] or [B, T]", &pad_ids});
  table.push_back(
      {"pad-token", "N", "the token of --pad-ids that is padding (default: 0)", &pad_token});
  table.push_back(
      {"dtype", "bf16", "type of V2 arrays; NumPy stores bfloat16 as V2", &sources.dtype});
  return table;
}

std::vector<Flag> CallFlags::AttributeTable() {
  std::vector<Flag> table = {
      {"heads", "N", "query heads, for inputs [S, H*D] or [B, S, H*D] (default: 1)", &heads},
      {"kv-heads", "N", "key and value heads (default: --heads)", &kv_heads},
      {"layout", "NAME", "layout of inputs of rank 4: bhsd or bshd (default: bhsd)", &layout},
      {"window", "L,R", "keys visible before and after the query; -1: no limit", &window},
      {"bottom-right", "",
       "align the last query with the last key of its batch row; otherwise query 0 is at key 0 of "
       "the new ones, so that one causal query sees one of five keys",
       &bottom_right},
      {"onnx-alignment", "",
       "as the ONNX operator: without a past, --key-lengths L moves the queries by L - Sq",
       &onnx_alignment},
      {"rotary-queries-only", "", "rotary embedding: rotate Q and leave K as it is",
       &only_queries_rotate},
      {"dropout", "P", "fraction of the weights to drop", &dropout},
      {"seed", "N", "seed of --dropout (default: 0)", &seed}};
  for (const AttributeInfo& info : Attributes()) {
    if (info.flag != nullptr) table.push_back(FlagOf(info, attributes));
  }
  return table;
}

Flag CallFlags::OutputGradientFlag() { return FileFlag(Role::kOutputGradient, sources); }

std::vector<Flag> CallFlags::GradientTable() {
  return {OutputGradientFlag(),
          FileFlag(Role::kLseGradient, sources),
          {"gradients", "LIST", "the gradients to compute, such as dq,d_head_sink", &gradients}};
}

std::vector<Flag> CallFlags::ForwardTable() {
  return {FileFlag(Role::kForwardOutput, sources), FileFlag(Role::kForwardLse, sources)};
}

std::vector<Flag> CallFlags::StreamTable() {
  return {{"stream", "", "send the call in chunks; bounds the server's memory", &caller.stream},
          {"chunk", "N", "rows in a chunk (default: about 8 MiB)", &caller.chunk}};
}

std::vector<Flag> CallFlags::CallerTable() { return caller.Table(); }

absl::StatusOr<LoadedCall> LoadCall(const CallFlags& flags) {
  RAPT_RETURN_IF_ERROR(ValidateDTypeFlag(flags.sources.dtype));
  CallSources sources = flags.sources;
  sources.values_in_keys = flags.attributes.v_head_size.has_value();
  RAPT_ASSIGN_OR_RETURN(LoadedCall loaded, LoadCall(sources));
  RAPT_RETURN_IF_ERROR(SetAttributes(flags, loaded));
  RAPT_RETURN_IF_ERROR(CheckUsed(flags, loaded));
  SetGradients(flags, loaded);
  return loaded;
}

absl::StatusOr<std::unique_ptr<AttentionCaller>> NewCaller(const CallFlags& flags) {
  RAPT_ASSIGN_OR_RETURN(std::unique_ptr<client::Client> server, flags.caller.Connect());
  if (server == nullptr) return NewLocalCaller();
  if (!flags.caller.stream) return NewRemoteCaller(std::move(server));
  return NewRemoteCaller(std::move(server), flags.caller.chunk.value_or(0));
}

std::vector<Flag> CallerFlags::Table() {
  return Joined(
      {{{"local", "", "compute in this process, without a server", &local},
        {"priority", "N", "1 is the most urgent (default: 0, which counts as 8)", &priority}},
       server.Table()});
}

absl::Status CallerFlags::Check() const {
  if (chunk && !stream) return Invalid("--chunk needs --stream");
  if (stream && local) {
    return Invalid("--stream and --local are mutually exclusive; --stream needs a server");
  }
  if (priority != 0 && local) {
    return Invalid("--priority orders the calls of a server; --local has no server");
  }
  return CheckAtLeastOne("chunk", chunk.value_or(1));
}

absl::StatusOr<std::unique_ptr<client::Client>> CallerFlags::Connect() const {
  RAPT_RETURN_IF_ERROR(Check());
  if (local) return std::unique_ptr<client::Client>();
  return rapt::Connect(server);
}

}  // namespace rapt
