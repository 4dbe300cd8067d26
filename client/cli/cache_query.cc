#include "client/cli/cache_query.h"

#include <utility>

#include "base/status_macros.h"
#include "client/cli/tensor_file.h"

namespace rapt {

std::vector<Flag> CacheQueryFlags::Table() {
  std::vector<Flag> table = expected.Table();
  for (const Flag& flag : std::vector<Flag>{
           {"position", "N",
            "position of the first row (default: the last row sees the last token)",
            &call.position},
           {"scale", "X", "scale of the scores (default: 1/sqrt(D))", &call.scale},
           {"softcap", "X", "bound of the scores: X tanh(score / X) (default: 0, none)",
            &call.softcap},
           {"window", "N", "tokens visible before the row's own (default: all)", &call.window.left},
           {"head-sink", "FILE", "one more score for each head, without a value, [Hq]", &head_sink},
           {"dtype", "bf16", "type of V2 arrays; NumPy stores bfloat16 as V2", &dtype},
           {"priority", "N", "1 is the most urgent (default: 0, which counts as 8)",
            &call.priority}}) {
    table.push_back(flag);
  }
  return table;
}

absl::StatusOr<CacheQuery> LoadQuery(const CacheQueryFlags& flags) {
  RAPT_RETURN_IF_ERROR(ValidateDTypeFlag(flags.dtype));
  RAPT_ASSIGN_OR_RETURN(LoadedTensor q, LoadTensor(flags.flags.operands[1], "q", flags.dtype));
  CacheQuery query{.q = std::move(q), .head_sink = {}};
  if (!flags.head_sink) return query;
  RAPT_ASSIGN_OR_RETURN(query.head_sink, LoadTensor(*flags.head_sink, "head_sink", flags.dtype));
  return query;
}

client::CacheAttendCall CallOf(const CacheQueryFlags& flags, const CacheQuery& query) {
  client::CacheAttendCall call = flags.call;
  call.layer = static_cast<int32_t>(flags.expected.layer);
  call.q = query.q.view();
  if (query.head_sink) call.head_sink = query.head_sink->view();
  return call;
}

}  // namespace rapt
