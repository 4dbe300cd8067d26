#include "client/cli/call_flags.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "client/cli/tensor_file.h"

namespace rapt {
namespace {

absl::Status SetHeads(const CallFlags& flags, client::AttendCall& call) {
  absl::Status status = CheckAtLeastOne("heads", flags.heads.value_or(1));
  if (status.ok()) status = CheckAtLeastOne("kv-heads", flags.kv_heads.value_or(1));
  if (!status.ok()) return status;
  if (flags.kv_heads && !flags.heads) {
    return absl::InvalidArgumentError("--kv-heads needs --heads as well");
  }
  call.query_heads = flags.heads.value_or(0);
  call.kv_heads = flags.kv_heads.value_or(call.query_heads);
  return absl::OkStatus();
}

absl::Status SetLayout(const CallFlags& flags, LoadedCall& loaded) {
  if (!flags.layout) return absl::OkStatus();
  if (*flags.layout != "bhsd" && *flags.layout != "bshd") {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--layout is '%s'; it takes bhsd ([B, H, S, D]) or bshd ([B, S, H, D])", *flags.layout));
  }
  if (loaded.q.shape.size() != 4) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--layout is about inputs of rank 4; q has shape %s", ToString(loaded.q.array.shape)));
  }
  loaded.attributes.layout =
      *flags.layout == "bhsd" ? client::Layout::kBhsd : client::Layout::kBshd;
  return absl::OkStatus();
}

absl::Status SetWindow(const std::vector<int64_t>& window, client::AttendCall& call) {
  if (window.empty()) return absl::OkStatus();
  if (window.size() != 2) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--window has %d numbers; it takes two, LEFT,RIGHT, where -1 is no limit", window.size()));
  }
  if (window[0] != -1) call.window.left = window[0];
  if (window[1] != -1) call.window.right = window[1];
  return absl::OkStatus();
}

absl::Status SetAttributes(const CallFlags& flags, LoadedCall& loaded) {
  client::AttendCall& call = loaded.attributes;
  call.causal = flags.causal;
  if (flags.bottom_right) call.alignment = client::Alignment::kBottomRight;
  call.softcap = flags.softcap;
  call.scale = flags.scale;
  call.priority = flags.priority;
  if (flags.dropout) call.dropout = client::Dropout{*flags.dropout, flags.seed};
  absl::Status status = SetHeads(flags, call);
  if (status.ok()) status = SetLayout(flags, loaded);
  if (status.ok()) status = SetWindow(flags.window, call);
  return status;
}

absl::Status CheckStream(const CallFlags& flags) {
  if (flags.chunk && !flags.stream) {
    return absl::InvalidArgumentError("--chunk is about --stream, which is not there");
  }
  if (flags.stream && flags.local) {
    return absl::InvalidArgumentError("--stream sends to a server; --local has none");
  }
  if (flags.priority != 0 && flags.local) {
    return absl::InvalidArgumentError("--priority orders a server's calls; --local has no server");
  }
  return CheckAtLeastOne("chunk", flags.chunk.value_or(1));
}

}  // namespace

std::vector<Flag> CallFlags::InputTable() {
  return {
      {"q", "FILE", "queries; alone they are keys and values as well", &sources.q},
      {"k", "FILE", "keys", &sources.k},
      {"v", "FILE", "values", &sources.v},
      {"mask", "FILE", "bool or integers 0 and 1 (1 = attend), or floats (added)", &sources.mask},
      {"past-key", "FILE", "keys that come before, [B, Hkv, P, D]", &sources.past_key},
      {"past-value", "FILE", "their values", &sources.past_value},
      {"key-lengths", "FILE", "how many keys of each batch row are real, [B]",
       &sources.key_lengths},
      {"dtype", "bf16", "what V2 in a file means, NumPy's name for bfloat16", &sources.dtype}};
}

std::vector<Flag> CallFlags::AttributeTable() {
  return {{"heads", "N", "query heads of inputs [S, H*D] or [B, S, H*D] (default: 1)", &heads},
          {"kv-heads", "N", "key and value heads (default: as many)", &kv_heads},
          {"layout", "NAME", "of inputs of rank 4: bhsd (the default) or bshd", &layout},
          {"causal", "", "no query sees a key after it", &causal},
          {"window", "L,R", "keys a query sees before and after it; -1 is no limit", &window},
          {"bottom-right", "", "the last query stands at the last key, not the first at the first",
           &bottom_right},
          {"scale", "X", "of the scores (default: 1/sqrt(D))", &scale},
          {"softcap", "X", "scores become X*tanh(score/X)", &softcap},
          {"dropout", "P", "share of weights to drop", &dropout},
          {"seed", "N", "of the dropout (default: 0)", &seed}};
}

std::vector<Flag> CallFlags::StreamTable() {
  return {{"stream", "", "send it in chunks, in bounded memory of the server's", &stream},
          {"chunk", "N", "rows in a chunk (default: about 8 MiB of them)", &chunk}};
}

std::vector<Flag> CallFlags::CallerTable() {
  std::vector<Flag> table = {{"local", "", "compute in this process, without a server", &local},
                             {"priority", "N", "1 is the most urgent (default: 0, which counts as 8)",
                              &priority}};
  for (const Flag& flag : server.Table()) table.push_back(flag);
  return table;
}

absl::StatusOr<LoadedCall> LoadCall(const CallFlags& flags) {
  if (absl::Status dtype = ValidateDTypeFlag(flags.sources.dtype); !dtype.ok()) return dtype;
  absl::StatusOr<LoadedCall> loaded = LoadCall(flags.sources);
  if (!loaded.ok()) return loaded;
  if (absl::Status set = SetAttributes(flags, *loaded); !set.ok()) return set;
  return loaded;
}

absl::StatusOr<std::unique_ptr<AttentionCaller>> NewCaller(const CallFlags& flags) {
  if (absl::Status checked = CheckStream(flags); !checked.ok()) return checked;
  if (flags.local) return NewLocalCaller();
  absl::StatusOr<std::unique_ptr<client::Client>> server = Connect(flags.server);
  if (!server.ok()) return server.status();
  if (flags.stream) return NewStreamCaller(*std::move(server), flags.chunk.value_or(0));
  return NewRemoteCaller(*std::move(server));
}

}  // namespace rapt
