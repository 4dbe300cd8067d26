// rapt cache diagnose.
#include "client/cli/cache_flags.h"
#include "client/cli/cache_query.h"
#include "client/cli/diagnosis_report.h"

namespace rapt {

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
  (flags.flags.json ? PrintJson : Print)(diagnosis);
  return ExitCode::kOk;
}

}  // namespace rapt
