#include "server/cache/cached_layer.h"

#include <utility>

#include "attention/mechanism/softmax/ragged_attention.h"
#include "base/status_macros.h"

namespace rapt::cache {

absl::StatusOr<AttendCall> AttendCallOf(const LayerStep& step) {
  RAPT_ASSIGN_OR_RETURN(const RaggedCall ragged, CachedAttentionOf(step.layer, step.call));
  const RaggedItem& item = ragged.items.front();
  const int64_t rows = item.rows;
  const auto tensor = [&](int64_t heads, int64_t size) {
    return CallTensor{.name = "input query", .spec = TensorSpec{ragged.dtype, {rows, heads, size}}};
  };
  AttendCall attend;
  attend.items.push_back({.call = {.count = rows}, .rows = rows});
  attend.q = tensor(ragged.query_heads, ragged.head_size);
  attend.k = tensor(ragged.kv_heads, ragged.head_size);
  attend.v = tensor(ragged.kv_heads, ragged.value_head_size);
  if (ragged.head_sink) attend.head_sink.spec = TensorSpec{*ragged.head_sink, {ragged.query_heads}};
  attend.scale = ragged.scale;
  if (item.left_window >= 0) attend.left_window = item.left_window;
  attend.bias_table = ragged.bias_table;
  attend.max_distance = ragged.max_distance;
  attend.shares_prefixes = false;
  return attend;
}

absl::StatusOr<Request> CachedLayer::Start(CacheStore& store, const std::string& owner,
                                           LayerStep step, AttendCall attend) {
  store_ = &store;
  RAPT_ASSIGN_OR_RETURN(
      operator_, attention_.Open(store, owner, std::move(attend), CacheStore::Leases::kRenewed));
  step.call.cache = this;
  RAPT_ASSIGN_OR_RETURN(auto op, MakeLayerCall(std::move(step.layer), step.call));
  Request request;
  request.SetOperator(std::move(op));
  request.inputs[Role::kQ] = step.query;
  return request;
}

}  // namespace rapt::cache
