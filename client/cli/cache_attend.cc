// rapt cache append, rapt cache attend and rapt cache diagnose.
#include <cstdio>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "client/cli/attend_files.h"
#include "client/cli/attend_report.h"
#include "client/cli/cache_flags.h"
#include "client/cli/tensor_file.h"
#include "client/console/json.h"

namespace rapt {
namespace {

using client::CacheInfo;

void PrintAppended(const CacheInfo& cache, const ExpectedFlags& expected,
                   const client::CacheItemResult& result, bool as_json) {
  if (!as_json) {
    absl::PrintF("layer %d has %d token%s%s\n", expected.layer, result.length,
                 result.length == 1 ? "" : "s",
                 result.applied_before ? "; these were there already" : "");
    return;
  }
  JsonWriter json;
  json.BeginObject().Key("id").String(cache.id).Key("layer").Integer(expected.layer);
  json.Key("generation").Integer(static_cast<int64_t>(cache.generation));
  json.Key("length").Integer(result.length);
  json.Key("applied_before").Boolean(result.applied_before).EndObject();
  std::puts(json.Take().c_str());
}

// What `rapt cache attend` and `rapt cache diagnose` share: the query rows, and how they are
// scored.
struct CacheQueryFlags {
  CacheFlags flags;  // with two operands, the cache and the file of q
  ExpectedFlags expected;
  std::optional<std::string> head_sink;
  std::string dtype;
  client::CacheAttendCall call;  // without tensors and layer

  std::vector<Flag> Table() {
    return Joined(
        {expected.Table(),
         {{"position", "N", "position of the first row (default: the last row sees the last token)",
           &call.position},
          {"scale", "X", "scale of the scores (default: 1/sqrt(D))", &call.scale},
          {"softcap", "X", "bound of the scores: X tanh(score / X) (default: 0, none)",
           &call.softcap},
          {"window", "N", "tokens visible before the row's own (default: all)", &call.window.left},
          {"head-sink", "FILE", "one more score for each head, without a value, [Hq]", &head_sink},
          {"dtype", "bf16", "type of V2 arrays; NumPy stores bfloat16 as V2", &dtype},
          {"priority", "N", "1 is the most urgent (default: 0, which counts as 8)",
           &call.priority}}});
  }
};

// The tensors of a call.
struct CacheQuery {
  LoadedTensor q;
  std::optional<LoadedTensor> head_sink;
};

// Returns an error that names --dtype or the file.
absl::StatusOr<CacheQuery> LoadQuery(const CacheQueryFlags& flags) {
  RAPT_RETURN_IF_ERROR(ValidateDTypeFlag(flags.dtype));
  RAPT_ASSIGN_OR_RETURN(LoadedTensor q, LoadTensor(flags.flags.operands[1], "q", flags.dtype));
  CacheQuery query{.q = std::move(q), .head_sink = {}};
  if (!flags.head_sink) return query;
  RAPT_ASSIGN_OR_RETURN(query.head_sink, LoadTensor(*flags.head_sink, "head_sink", flags.dtype));
  return query;
}

// Returns the call, which refers to the tensors.
client::CacheAttendCall CallOf(const CacheQueryFlags& flags, const CacheQuery& query) {
  client::CacheAttendCall call = flags.call;
  call.layer = static_cast<int32_t>(flags.expected.layer);
  call.q = query.q.view();
  if (query.head_sink) call.head_sink = query.head_sink->view();
  return call;
}

struct AttendFlags {
  CacheQueryFlags query;
  std::optional<std::string> k, v, lse;
  std::string y;
  bool float_output = false;

  std::vector<Flag> Table() {
    return Joined(
        {{{"k", "FILE", "keys of new tokens, [n, Hkv, D], which are appended first", &k},
          {"v", "FILE", "their values, [n, Hkv, Dv]", &v},
          {"output", "FILE", "result, [R, Hq, Dv]: a .npy file, or member y of an .npz file", &y,
           'o', true},
          {"lse", "FILE", "logarithms of the sums of exponentials, [R, Hq]", &lse},
          {"float-output", "", "results in float32, for partial results", &float_output}},
         query.Table()});
  }
};

absl::Status Check(AttendFlags& flags) {
  if (flags.k.has_value() != flags.v.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--%s is given without --%s; give both, or neither to append nothing",
                        flags.k ? "k" : "v", flags.k ? "v" : "k"));
  }
  return NormalizeOutputFiles({{"output", &flags.y}, {"lse", PathIn(flags.lse)}});
}

// The tensors of a call. Views refer to it.
struct LoadedStep {
  CacheQuery query;
  std::optional<LoadedTensor> k, v;
};

absl::StatusOr<LoadedStep> Load(const AttendFlags& flags) {
  RAPT_ASSIGN_OR_RETURN(CacheQuery query, LoadQuery(flags.query));
  LoadedStep step{.query = std::move(query), .k = {}, .v = {}};
  for (const auto& [path, name, out] :
       {std::tuple(&flags.k, "k", &step.k), std::tuple(&flags.v, "v", &step.v)}) {
    if (!*path) continue;
    RAPT_ASSIGN_OR_RETURN(*out, LoadTensor(**path, name, flags.query.dtype));
  }
  return step;
}

absl::StatusOr<Report> Attend(const AttendFlags& flags, client::Cache& cache,
                              const client::CacheAttendCall& call) {
  RAPT_ASSIGN_OR_RETURN(const client::CacheAttendResult result, cache.Attend(call));
  Report report{.outputs = {{"y", flags.y, result.y, result.y.shape()}},
                .backend = result.backend,
                .plan = result.plan};
  if (flags.lse) report.outputs.push_back({"lse", *flags.lse, *result.lse, result.lse->shape()});
  return report;
}

ExitCode Attend(AttendFlags& flags) {
  RAPT_EXIT_IF_ERROR(FailUsage, Check(flags));
  RAPT_ASSIGN_OR_EXIT(const LoadedStep step, FailUsage, Load(flags));
  const CacheFlags& common = flags.query.flags;
  RAPT_ASSIGN_OR_EXIT(const auto server, FailConnect, Connect(common.server));
  RAPT_ASSIGN_OR_EXIT(const CacheInfo info, FailCall,
                      FindCache(*server, common.operands[0], flags.query.expected));
  client::CacheAttendCall call = CallOf(flags.query, step.query);
  if (step.k) call.k = step.k->view();
  if (step.v) call.v = step.v->view();
  call.wants_lse = flags.lse.has_value();
  if (flags.float_output) call.output = client::DType::kFloat32;
  client::Cache cache = client::BorrowCache(*server, info);
  return ComputeAndReport([&] { return Attend(flags, cache, call); }, common.json);
}

}  // namespace

ExitCode RunCacheAppend(CommandArguments arguments) {
  CacheFlags flags;
  ExpectedFlags expected;
  std::string dtype;
  const CommandLine line{
      .usage = "rapt cache append ID K.npy V.npy [flags]",
      .summary = "Appends keys, [n, Hkv, D], and values, [n, Hkv, Dv], of n tokens to a layer.",
      .flags =
          Joined({expected.Table(),
                  {{"dtype", "bf16", "type of V2 arrays; NumPy stores bfloat16 as V2", &dtype}}}),
      .examples = {"rapt cache append $ID k.npy v.npy",
                   "rapt cache append $ID k.npy v.npy --layer 1 --at 0 --generation 1 --json"},
      .max_operands = 3};
  if (const auto done = flags.Parse(line, arguments, 3)) return *done;
  RAPT_EXIT_IF_ERROR(FailUsage, ValidateDTypeFlag(dtype));
  RAPT_ASSIGN_OR_EXIT(const LoadedTensor k, FailUsage, LoadTensor(flags.operands[1], "k", dtype));
  RAPT_ASSIGN_OR_EXIT(const LoadedTensor v, FailUsage, LoadTensor(flags.operands[2], "v", dtype));
  RAPT_ASSIGN_OR_EXIT(const auto server, FailConnect, Connect(flags.server));
  RAPT_ASSIGN_OR_EXIT(const CacheInfo info, FailCall,
                      FindCache(*server, flags.operands[0], expected));
  RAPT_ASSIGN_OR_EXIT(const client::CacheItemResult result, FailCall,
                      client::BorrowCache(*server, info)
                          .Append(static_cast<int32_t>(expected.layer), k.view(), v.view()));
  PrintAppended(info, expected, result, flags.json);
  return ExitCode::kOk;
}

ExitCode RunCacheAttend(CommandArguments arguments) {
  AttendFlags flags;
  const CommandLine line{
      .usage = "rapt cache attend ID Q.npy -o Y.npy [flags]",
      .summary =
          "Attends with R query rows, [R, Hq, D], over the tokens of a layer. Row by row, a "
          "query sees the tokens up to its own position. --k and --v append tokens first.",
      .flags = flags.Table(),
      .examples = {"rapt cache attend $ID q.npy -o y.npy",
                   "rapt cache attend $ID q.npy --k k.npy --v v.npy --layer 1 -o y.npy",
                   "rapt cache attend $ID q.npy --k k.npy --v v.npy --at 0 --window 128 --lse "
                   "lse.npy -o y.npy --json"},
      .max_operands = 2};
  if (const auto done = flags.query.flags.Parse(line, arguments, 2)) return *done;
  return Attend(flags);
}

ExitCode RunCacheDiagnose(CommandArguments arguments) {
  CacheQueryFlags flags;
  const CommandLine line{
      .usage = "rapt cache diagnose ID Q.npy [flags]",
      .summary =
          "Explains a `rapt cache attend` whose result looks wrong, as `rapt diagnose`: the rows "
          "[R, Hq, D] and the resident keys and values of a layer, the range of every step, the "
          "hidden pairs, the backend that runs. Appends nothing and does not renew the lease. "
          "Of a layer that has evicted tokens, nothing can be said.",
      .flags = flags.Table(),
      .examples = {"rapt cache diagnose $ID q.npy",
                   "rapt cache diagnose $ID q.npy --layer 1 --at 2 --json"},
      .max_operands = 2};
  if (const auto done = flags.flags.Parse(line, arguments, 2)) return *done;
  RAPT_ASSIGN_OR_EXIT(const CacheQuery query, FailUsage, LoadQuery(flags));
  RAPT_ASSIGN_OR_EXIT(const auto server, FailConnect, Connect(flags.flags.server));
  RAPT_ASSIGN_OR_EXIT(const client::CacheInfo info, FailCall,
                      FindCache(*server, flags.flags.operands[0], flags.expected));
  RAPT_ASSIGN_OR_EXIT(const client::Diagnosis diagnosis, FailCall,
                      client::BorrowCache(*server, info).Diagnose(CallOf(flags, query)));
  PrintDiagnosis(diagnosis, flags.flags.json);
  return ExitCode::kOk;
}

}  // namespace rapt
