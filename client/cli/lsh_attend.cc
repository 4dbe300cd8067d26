#include "client/cli/lsh_attend.h"

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/mechanism/lsh/lsh_attention.h"
#include "client/cli/attend_files.h"
#include "client/cli/attend_report.h"
#include "client/cli/library_types.h"
#include "client/cli/local_operator.h"
#include "client/cli/tensor_file.h"
#include "client/console/server_connection.h"

namespace rapt {
namespace {

using client::LshCall;
using client::LshForm;
using client::LshResult;

struct LshFlags {
  LshCall call;  // what is set directly by a flag
  std::optional<std::string> q, k, v, rotations, key_lengths, bucket_ids;
  std::optional<int64_t> seed;
  std::string y, dtype;
  bool json = false, local = false;
  ServerFlags server;

  std::vector<Flag> Table() {
    static constexpr absl::string_view kForms[] = {"reformer", "simple"};
    std::vector<Flag> table = {
        {"lsh", "FORM", "reformer: queries are keys; simple: as in tutorials",
         NamedChoice{kForms, [this](size_t index) { call.form = static_cast<LshForm>(index); }},
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
        {"seed", "N", "seed of the rotations, without --rotations (default: 0)", &seed},
        {"local", "", "compute in this process, without a server", &local},
        {"priority", "N", "1 is the most urgent (default: 0, which counts as 8)", &call.priority}};
    for (const Flag& flag : server.Table()) table.push_back(flag);
    table.push_back({"json", "", "print a report as JSON", &json});
    return table;
  }
};

absl::Status CheckFlags(LshFlags& flags) {
  if (flags.k && flags.call.form == LshForm::kReformer) {
    return absl::InvalidArgumentError("--k needs --lsh simple; --lsh reformer has --q for keys");
  }
  if (flags.call.priority != 0 && flags.local) {
    return absl::InvalidArgumentError(
        "--priority orders the calls of a server; --local has no server");
  }
  if (flags.seed.value_or(0) < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--seed is ", *flags.seed, "; it must be at least 0"));
  }
  absl::Status status = ValidateDTypeFlag(flags.dtype);
  if (!status.ok()) return status;
  return NormalizeOutputFiles({{"output", &flags.y}, {"bucket-ids", PathIn(flags.bucket_ids)}});
}

// The tensors of a call and the call, which refers to them.
struct LoadedLshCall {
  InputMap<std::optional<LoadedTensor>> tensors;
  LshCall call;
  bool is_2d = false;  // read as [S, D], sent as [1, 1, S, D]
};

absl::Status Load(const LshFlags& flags, LoadedLshCall& loaded) {
  const bool is_simple = flags.call.form == LshForm::kSimple;
  const auto or_q = [&](const std::optional<std::string>& path) { return path ? path : flags.q; };
  const std::tuple<Role, const char*, std::optional<std::string>> inputs[] = {
      {Role::kQ, "q", flags.q},
      {Role::kK, "k", is_simple ? or_q(flags.k) : std::nullopt},
      {Role::kV, "v", or_q(flags.v)},
      {kLshRotations, "rotations", flags.rotations}};
  for (const auto& [role, name, path] : inputs) {
    if (!path) continue;
    absl::StatusOr<LoadedTensor> tensor = LoadTensor(*path, name, flags.dtype);
    if (!tensor.ok()) return tensor.status();
    loaded.tensors[role] = *std::move(tensor);
  }
  loaded.is_2d = loaded.tensors[Role::kQ]->shape.size() == 2;
  for (Role role : {Role::kQ, Role::kK, Role::kV}) {
    if (!loaded.is_2d || !loaded.tensors[role]) continue;
    Shape& shape = loaded.tensors[role]->shape;
    shape.insert(shape.begin(), {1, 1});
  }
  const auto view = [&](Role role) {
    return loaded.tensors[role] ? std::optional(loaded.tensors[role]->view()) : std::nullopt;
  };
  LshCall& call = loaded.call = flags.call;
  call.q = *view(Role::kQ);
  call.k = view(Role::kK);
  call.v = *view(Role::kV);
  call.rotations = view(kLshRotations);
  call.wants_buckets = flags.bucket_ids.has_value();
  if (flags.seed || !flags.rotations) call.seed = static_cast<uint64_t>(flags.seed.value_or(0));
  if (!flags.key_lengths) return absl::OkStatus();
  absl::StatusOr<std::vector<int64_t>> lengths = LoadLengths(*flags.key_lengths, "key_lengths");
  if (lengths.ok()) call.key_lengths = *std::move(lengths);
  return lengths.status();
}

struct Computed {
  LshResult result;
  std::string backend, plan;  // empty if a server computed it
};

absl::StatusOr<Computed> ComputeHere(const LoadedLshCall& loaded) {
  const LshCall& call = loaded.call;
  LshAttentionCall in_library{.inputs = {},
                              .wants_buckets = call.wants_buckets,
                              .form = static_cast<rapt::LshForm>(call.form),
                              .num_hashes = call.num_hashes,
                              .num_buckets = call.num_buckets,
                              .chunk_length = call.chunk_length,
                              .chunks_before = call.chunks_before,
                              .chunks_after = call.chunks_after,
                              .is_causal = call.causal,
                              .scale = call.scale,
                              .seed = call.seed};
  Arguments arguments;
  for (Role role : kInputTensors) {
    if (!loaded.tensors[role]) continue;
    const client::TensorView view = loaded.tensors[role]->view();
    in_library.inputs[role] = TensorSpec{ToLibrary(view.dtype), view.shape};
    arguments.inputs[role].data = view.data.data();
  }
  if (!call.key_lengths.empty()) {
    in_library.inputs[Role::kKeyLengths] =
        TensorSpec{DType::kInt64, {static_cast<int64_t>(call.key_lengths.size())}};
  }
  arguments.key_lengths = call.key_lengths;
  const auto op = MakeLshAttention(in_library);
  if (!op.ok()) return op.status();
  absl::StatusOr<OperatorResult> result = RunHere(**op, arguments);
  if (!result.ok()) return result.status();
  return Computed{{*std::move(result->outputs[Role::kY]), std::move(result->outputs[kLshBuckets])},
                  result->backend,
                  result->plan};
}

absl::StatusOr<Computed> Send(const LoadedLshCall& loaded, client::Client& server) {
  absl::StatusOr<LshResult> result = server.LshAttend(loaded.call);
  if (!result.ok()) return result.status();
  return Computed{*std::move(result), "", ""};
}

ExitCode Attend(LshFlags flags) {
  if (absl::Status valid = CheckFlags(flags); !valid.ok()) return FailUsage(valid);
  LoadedLshCall loaded;
  if (absl::Status status = Load(flags, loaded); !status.ok()) return FailUsage(status);
  std::unique_ptr<client::Client> server;
  if (!flags.local) {
    absl::StatusOr<std::unique_ptr<client::Client>> connected = Connect(flags.server);
    if (!connected.ok()) return FailConnect(connected.status());
    server = *std::move(connected);
  }
  const auto start = std::chrono::steady_clock::now();
  const absl::StatusOr<Computed> computed =
      flags.local ? ComputeHere(loaded) : Send(loaded, *server);
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - start;
  if (!computed.ok()) return FailCall(computed.status());
  Report report{{}, computed->backend, computed->plan};
  const auto add = [&](const char* name, const std::string& path, const client::Tensor& tensor) {
    Shape shape = tensor.shape();
    if (loaded.is_2d) shape.erase(shape.begin(), shape.begin() + 2);
    report.outputs.push_back({name, path, tensor, std::move(shape)});
  };
  add("y", flags.y, computed->result.y);
  if (flags.bucket_ids) add("buckets", *flags.bucket_ids, *computed->result.buckets);
  return WriteAndPrint(report, elapsed.count(), flags.json);
}

}  // namespace

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
