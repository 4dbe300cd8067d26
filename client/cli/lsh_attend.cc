#include "client/cli/lsh_attend.h"

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "attention/mechanism/lsh/lsh_attention.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "client/cli/attend_report.h"
#include "client/cli/caller_flags.h"
#include "client/cli/local_operator.h"
#include "client/cli/operator_inputs.h"
#include "client/cli/tensor_file.h"

namespace rapt {
namespace {

using client::LshCall;
using client::LshForm;
using client::LshResult;

struct LshFlags {
  LshCall call;  // what is set directly by a flag
  std::optional<std::string> q, k, v, rotations, key_lengths, bucket_ids;
  std::string y, dtype;
  bool json = false;
  CallerFlags caller;

  std::vector<Flag> Table() {
    std::vector<Flag> table = {
        {"lsh", "FORM", "reformer: queries are keys; simple: as in tutorials",
         NamedChoice{kNamesOf<LshForm>,
                     [this](size_t index) { call.form = static_cast<LshForm>(index); }},
         '\0', true},
        {"q", "FILE", "[S, D] or [B, H, S, D]: queries, and keys unless --lsh simple", &q, '\0',
         true},
        {"k", "FILE", "keys of --lsh simple, as --q (default: --q)", &k},
        {"v", "FILE", "values (default: --q)", &v},
        {"rotations", "FILE", "[H or 1, D, hashes, buckets/2]; of simple [H or 1, D, hashes, D]",
         &rotations},
        {"key-lengths", "FILE", "integers [B]: later tokens do not count", &key_lengths},
        {"dtype", "bf16", "type of V2 arrays; NumPy stores bfloat16 as V2", &dtype},
        {"output", "FILE", "result: a .npy file, or member y of an .npz file", &y, 'o', true},
        {"bucket-ids", "FILE", "the bucket of each token, [B, H, hashes, S]", &bucket_ids},
        {"hashes", "N", "rounds of hashing (default: 1)", &call.num_hashes},
        {"buckets", "N", "buckets of a round, even (default: the power of two up to 2S/chunk)",
         &call.num_buckets},
        {"chunk-length", "N", "tokens of a chunk, a divisor of S", &call.chunk_length, '\0', true},
        {"chunks-before", "N", "chunks that a chunk sees before itself (default: 1; simple: 0)",
         &call.chunks_before},
        {"chunks-after", "N", "and after itself (default: 0)", &call.chunks_after},
        {"causal", "", "a token sees only itself and those before it", &call.causal},
        {"scale", "X", "factor of the scores (default: 1/sqrt(D))", &call.scale},
        {"seed", "N", "seed of the rotations, without --rotations (default: 0)", &call.seed}};
    for (const Flag& flag : caller.Table()) table.push_back(flag);
    table.push_back({"json", "", "print a report as JSON", &json});
    return table;
  }
};

absl::Status CheckFlags(LshFlags& flags) {
  if (flags.k && flags.call.form == LshForm::kReformer) {
    return Invalid("--k needs --lsh simple; --lsh reformer has --q for keys");
  }
  RAPT_RETURN_IF_ERROR(flags.caller.Check());
  RAPT_RETURN_IF_ERROR(ValidateDTypeFlag(flags.dtype));
  return NormalizeOutputFiles({{"output", &flags.y}, {"bucket-ids", PathIn(flags.bucket_ids)}});
}

// The inputs of a call and the call, which refers to them.
struct LoadedLshCall {
  OperatorInputs inputs;
  LshCall call;
  bool is_2d = false;  // read as [S, D], sent as [1, 1, S, D]
};

absl::Status Load(const LshFlags& flags, LoadedLshCall& loaded) {
  const bool is_simple = flags.call.form == LshForm::kSimple;
  const auto or_q = [&](const std::optional<std::string>& path) { return path ? path : flags.q; };
  RAPT_ASSIGN_OR_RETURN(loaded.inputs,
                        LoadInputs({{Role::kQ, "q", flags.q},
                                    {Role::kK, "k", is_simple ? or_q(flags.k) : std::nullopt},
                                    {Role::kV, "v", or_q(flags.v)},
                                    {kLshRotations, "rotations", flags.rotations}},
                                   flags.key_lengths, flags.dtype));
  auto& tensors = loaded.inputs.tensors;
  loaded.is_2d = tensors[Role::kQ]->shape.size() == 2;
  for (Role role : {Role::kQ, Role::kK, Role::kV}) {
    if (!loaded.is_2d || !tensors[role]) continue;
    Shape& shape = tensors[role]->shape;
    shape.insert(shape.begin(), {1, 1});
  }
  LshCall& call = loaded.call = flags.call;
  call.q = *loaded.inputs.View(Role::kQ);
  call.k = loaded.inputs.View(Role::kK);
  call.v = *loaded.inputs.View(Role::kV);
  call.rotations = loaded.inputs.View(kLshRotations);
  call.key_lengths = loaded.inputs.key_lengths;
  call.wants_buckets = flags.bucket_ids.has_value();
  call.priority = flags.caller.priority;
  if (!flags.rotations && !call.seed) call.seed = 0;
  return absl::OkStatus();
}

Report ReportOf(const LshFlags& flags, bool is_2d, const LshResult& result) {
  Report report;
  const auto add = [&](const char* name, const std::string& path, const client::Tensor& tensor) {
    Shape shape = tensor.shape();
    if (is_2d) shape.erase(shape.begin(), shape.begin() + 2);
    report.outputs.push_back({name, path, tensor, std::move(shape)});
  };
  add("y", flags.y, result.y);
  if (flags.bucket_ids) add("buckets", *flags.bucket_ids, *result.buckets);
  return report;
}

absl::StatusOr<Report> ComputeHere(const LshFlags& flags, const LoadedLshCall& loaded) {
  const LshCall& call = loaded.call;
  const auto op = MakeLshAttention({.inputs = loaded.inputs.Specs(),
                                    .wants_buckets = call.wants_buckets,
                                    .form = static_cast<rapt::LshForm>(call.form),
                                    .num_hashes = call.num_hashes,
                                    .num_buckets = call.num_buckets,
                                    .chunk_length = call.chunk_length,
                                    .chunks_before = call.chunks_before,
                                    .chunks_after = call.chunks_after,
                                    .is_causal = call.causal,
                                    .scale = call.scale,
                                    .seed = call.seed});
  if (!op.ok()) return op.status();
  RAPT_ASSIGN_OR_RETURN(OperatorResult computed, RunHere(**op, loaded.inputs.ToArguments()));
  const LshResult result{*std::move(computed.outputs[Role::kY]),
                         std::move(computed.outputs[kLshBuckets])};
  Report report = ReportOf(flags, loaded.is_2d, result);
  report.backend = computed.backend;
  report.plan = computed.plan;
  return report;
}

absl::StatusOr<Report> Send(const LshFlags& flags, const LoadedLshCall& loaded,
                            client::Client& server) {
  RAPT_ASSIGN_OR_RETURN(const LshResult result, server.LshAttend(loaded.call));
  return ReportOf(flags, loaded.is_2d, result);
}

ExitCode Attend(LshFlags flags) {
  if (absl::Status valid = CheckFlags(flags); !valid.ok()) return FailUsage(valid);
  LoadedLshCall loaded;
  if (absl::Status status = Load(flags, loaded); !status.ok()) return FailUsage(status);
  const absl::StatusOr<std::unique_ptr<client::Client>> server = flags.caller.Connect();
  if (!server.ok()) return FailConnect(server.status());
  const auto compute = [&] {
    return flags.caller.local ? ComputeHere(flags, loaded) : Send(flags, loaded, **server);
  };
  return ComputeAndReport(compute, flags.json);
}

}  // namespace

std::vector<std::string_view> LshFlagNames() { return NamesOf(LshFlags().Table()); }

ExitCode RunLshAttend(CommandArguments arguments) {
  LshFlags flags;
  const CommandLine line{
      .usage = "rapt attend --lsh FORM --q FILE [--v FILE] --chunk-length N -o FILE [flags]",
      .summary =
          "Computes attention by locality-sensitive hashing (Reformer) over NumPy arrays of "
          "float32, float16, float64 or bfloat16, [S, D] or [B, H, S, D]: tokens are sorted by "
          "their hash and cut into chunks; each chunk sees itself and its neighbours.",
      .flags = flags.Table(),
      .examples = {"rapt attend --lsh reformer --q x.npy --v v.npy --hashes 4 --chunk-length 64 "
                   "--causal -o y.npy",
                   "rapt attend --lsh simple --q q.npy --k k.npy --v v.npy --hashes 2 "
                   "--chunk-length 64 -o y.npy --bucket-ids b.npy --local"}};
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return *done;
  return Attend(std::move(flags));
}

}  // namespace rapt
