// Calls of a layer that append to resident keys and values and attend to them.
#ifndef RAPT_SERVER_CACHE_CACHED_LAYER_H_
#define RAPT_SERVER_CACHE_CACHED_LAYER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/layer/layer.h"
#include "attention/tensor_operator.h"
#include "server/cache/cache_store.h"
#include "server/cache/cached_attention.h"
#include "server/request.h"

namespace rapt::cache {

struct LayerStep {
  std::shared_ptr<const Layer> layer;
  rapt::LayerCall call;  // that CachedAttentionOf() accepts
  InputBytes query;
};

// Returns what a step does to its cache: one item without the cache, whose tensors have no bytes
// yet. Errors of CachedAttentionOf().
absl::StatusOr<AttendCall> AttendCallOf(const LayerStep& step);

// From Start() until the response is encoded. Not thread-safe, except what the request does.
class CachedLayer final : public LayerCache {
 public:
  // As CachedAttention::Start(); but the tokens are appended by a task of the request, so that an
  // error of that is status(). REQUIRES: `attend` is AttendCallOf(step) with the cache.
  absl::StatusOr<Request> Start(CacheStore& store, const std::string& owner, LayerStep step,
                                AttendCall attend);

  // Of the append; OK before it. REQUIRES: the request has ended.
  const absl::Status& status() const { return status_; }
  // Returns the pages that only this call still holds.
  void Release() { attention_.Release(); }

  int64_t position() const override { return attention_.states().front().at; }
  int64_t append_bytes() const override { return attention_.append_bytes(); }
  void Append(const std::byte* keys, const std::byte* values,
              absl::Span<std::byte> workspace) override {
    status_ = attention_.AppendComputed(*store_, keys, values, workspace);
  }
  const TensorOperator& attention() const override { return *operator_; }

 private:
  CacheStore* store_ = nullptr;
  CachedAttention attention_;
  std::shared_ptr<const TensorOperator> operator_;
  absl::Status status_;
};

}  // namespace rapt::cache

#endif  // RAPT_SERVER_CACHE_CACHED_LAYER_H_
