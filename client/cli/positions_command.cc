// rapt rotary and rapt positions: positions outside of attention.
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "attention/positions/positional_encoding.h"
#include "attention/positions/rotary_embedding.h"
#include "base/status_macros.h"
#include "client/cli/attend_files.h"
#include "client/cli/commands.h"
#include "client/cli/local_operator.h"
#include "client/cli/tensor_file.h"
#include "client/console/server_connection.h"

namespace rapt {
namespace {

// A file of a call and the place of its view.
struct Source {
  std::string_view name;
  Role role;
  const std::optional<std::string>& path;
  std::optional<client::TensorView>& view;
};

struct PositionsFlags {
  std::string x, y, dtype;
  bool local = false;
  ServerFlags server;

  std::vector<Flag> Table() {
    std::vector<Flag> table = {
        {"output", "FILE", "result: a .npy file, or member y of an .npz file", &y, 'o', true},
        {"dtype", "bf16", "type of V2 arrays; NumPy stores bfloat16 as V2", &dtype},
        {"local", "", "compute in this process, without a server", &local}};
    for (const Flag& flag : server.Table()) table.push_back(flag);
    return table;
  }
};

// Loads the files, computes and writes the result.
template <typename Call, typename Make, typename Send>
ExitCode Compute(const PositionsFlags& flags, Call& call, const std::vector<Source>& sources,
                 Make make, Send send) {
  if (absl::Status status = ValidateDTypeFlag(flags.dtype); !status.ok()) return FailUsage(status);
  std::vector<LoadedTensor> loaded;
  loaded.reserve(sources.size() + 1);  // views refer to them
  InputMap<std::optional<TensorSpec>> specs;
  Arguments inputs;
  const auto load = [&](const std::string& path, std::string_view name, Role role,
                        auto& view) -> absl::Status {
    RAPT_ASSIGN_OR_RETURN(LoadedTensor tensor, LoadTensor(path, name, flags.dtype));
    view = loaded.emplace_back(std::move(tensor)).view();
    const client::TensorView& own = loaded.back().view();
    specs[role] = TensorSpec{own.dtype, own.shape};
    inputs.inputs[role].data = own.data.data();
    return absl::OkStatus();
  };
  absl::Status status = load(flags.x, "x", kTokens, call.x);
  for (const Source& source : sources) {
    if (status.ok() && source.path) {
      status = load(*source.path, source.name, source.role, source.view);
    }
  }
  if (!status.ok()) return FailUsage(status);
  absl::StatusOr<client::Tensor> y;
  if (flags.local) {
    const auto op = make(specs);
    auto result = op.ok() ? RunHere(**op, inputs) : op.status();
    y = result.ok() ? *std::move(result->outputs[Role::kY])
                    : absl::StatusOr<client::Tensor>(result.status());
  } else {
    const auto server = Connect(flags.server);
    if (!server.ok()) return FailConnect(server.status());
    y = send(**server);
  }
  if (!y.ok()) return FailCall(y.status());
  ArrayWriter files;
  files.Add(flags.y, "y", NpyTypeOf(y->dtype()), y->shape(), y->bytes());
  status = files.Write();
  return status.ok() ? ExitCode::kOk : FailUsage(status);
}

}  // namespace

ExitCode RunRotaryCommand(CommandArguments arguments) {
  PositionsFlags flags;
  client::RotaryCall call;
  std::optional<std::string> cos, sin, ids;
  CommandLine line{
      .usage = "rapt rotary --x X.npy -o Y.npy [flags]",
      .summary =
          "Rotates X, [B, H, S, D] or [B, S, H*D] with --num-heads, by the angles of its "
          "positions: the ONNX operator RotaryEmbedding. `rapt attend` does the same to Q "
          "and K with the same flags.",
      .flags = {{"x", "FILE", "the tensor to rotate", &flags.x, '\0', true},
                {"cos-cache", "FILE", "cosines by position, [M, r/2] or [B, S, r/2]", &cos},
                {"sin-cache", "FILE", "sines, as --cos-cache", &sin},
                {"position-ids", "FILE", "integer positions, [B, S] (default: 0, 1, ...)", &ids},
                {"rope-theta", "X", "angles position * X^(-2t/r), without --cos-cache",
                 &call.rope_theta},
                {"interleaved", "", "rotate neighbours, not the two halves", &call.interleaved},
                {"num-heads", "N", "heads of an X of rank 3", &call.num_heads},
                {"rotary-embedding-dim", "N",
                 "rotate the first N numbers of each head (default: all)",
                 &call.rotary_embedding_dim}},
      .examples = {"rapt rotary --x q.npy --num-heads 8 --rope-theta 10000 -o rotated.npy",
                   "rapt rotary --local --x q.npy --num-heads 8 --rope-theta 10000 --interleaved "
                   "-o rotated.npy"}};
  for (const Flag& flag : flags.Table()) line.flags.push_back(flag);
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return *done;
  const auto make = [&](const auto& specs) {
    return MakeRotaryEmbedding({.inputs = specs,
                                .interleaved = call.interleaved,
                                .num_heads = call.num_heads,
                                .rotary_embedding_dim = call.rotary_embedding_dim,
                                .rope_theta = call.rope_theta});
  };
  return Compute(flags, call,
                 {{"cos_cache", Role::kCosCache, cos, call.cos_cache},
                  {"sin_cache", Role::kSinCache, sin, call.sin_cache},
                  {"position_ids", Role::kPositionIds, ids, call.position_ids}},
                 make, [&](client::Client& server) { return server.RotaryEmbedding(call); });
}

ExitCode RunPositionsCommand(CommandArguments arguments) {
  PositionsFlags flags;
  client::PositionalEncodingCall call;
  std::optional<std::string> table;
  CommandLine line{
      .usage = "rapt positions --x X.npy -o Y.npy [flags]",
      .summary =
          "Adds an encoding of the positions to X, [..., S, E]: sines and cosines, or the "
          "rows of a table. With an X of zeros, the result is the encoding, which `rapt "
          "plot` draws.",
      .flags = {{"x", "FILE", "the tensor to add to", &flags.x, '\0', true},
                {"table", "FILE", "learned encodings, [M, E]", &table},
                {"base", "X", "base of the wave lengths (default: 10000)", &call.base}},
      .examples = {"rapt positions --x x.npy -o y.npy",
                   "rapt positions --local --x x.npy --table table.npy -o y.npy"}};
  for (const Flag& flag : flags.Table()) line.flags.push_back(flag);
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return *done;
  const auto make = [&](const auto& specs) {
    return MakePositionalEncoding({.inputs = specs, .base = call.base});
  };
  return Compute(flags, call, {{"table", kTokenTable, table, call.table}}, make,
                 [&](client::Client& server) { return server.PositionalEncoding(call); });
}

}  // namespace rapt
