// Calls that append to resident keys and values and attend to them, independent of the protocol.
#ifndef RAPT_SERVER_CACHE_CACHED_ATTENTION_H_
#define RAPT_SERVER_CACHE_CACHED_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/mechanism/softmax/ragged_attention.h"
#include "attention/operator.h"
#include "server/cache/cache_store.h"
#include "server/request.h"

namespace rapt::cache {

inline constexpr size_t kMaxItems = 1024;

// A tensor of a call, in memory that outlives it.
struct CallTensor {
  absl::string_view name;               // for errors
  std::optional<TensorSpec> spec = {};  // absent: not given
  InputBytes bytes = {};
  // The bytes are [heads, rows or tokens, size], not [rows or tokens, heads, size] as `spec` is.
  bool heads_first = false;
};

// One cache's part of a call.
struct AttendItem {
  LayerCall call;
  int64_t rows = 0;                      // of Q
  std::optional<int64_t> position = {};  // of the first row; absent: bottom-right
};

// Appends the new tokens to a layer of each item's cache, then attends with the rows to it. Only
// with one item may heads come first; y then has the layout of q.
struct AttendCall {
  std::vector<AttendItem> items = {};
  CallTensor q = {"q"};  // [sum of rows, Hq, D]
  CallTensor k = {"k"};  // [sum of new tokens, Hkv, D]
  CallTensor v = {"v"};  // [sum of new tokens, Hkv, Dv]
  CallTensor head_sink = {"head_sink"};
  std::optional<double> scale = {};
  double softcap = 0;
  std::optional<BiasTable> bias_table = {};  // with one item alone
  std::optional<int64_t> max_distance = {};  // of it
  std::optional<int64_t> left_window = {};
  bool wants_lse = false;
  bool lse_heads_first = false;  // lse is [Hq, R], not [R, Hq]
  std::optional<DType> output = {};
  bool shares_prefixes = true;
  // An error of one item fails that item alone. INVALID_ARGUMENT always fails the call.
  bool partial = false;
};

// From Start() until the response is encoded. Not thread-safe, except what the request does.
class CachedAttention final : public RaggedSource {
 public:
  // Checks the call and returns its request, which borrows this: the caches are found now, tokens
  // are appended when it runs. InvalidArgument names the item or the tensor; otherwise the statuses
  // of CacheStore. REQUIRES: called once; `store` outlives this.
  absl::StatusOr<Request> Start(CacheStore& store, const std::string& owner, AttendCall call);

  // The part of Start() that does nothing to the caches but renew their leases, if at all: checks
  // the call, finds the caches and returns the operator, which runs only after Start().
  absl::StatusOr<std::shared_ptr<const TensorOperator>> Open(CacheStore& store,
                                                             const std::string& owner,
                                                             AttendCall call,
                                                             CacheStore::Leases leases);
  // After Open(), for k and v that the request's own tasks compute, in the layouts of the call:
  // appends them, before the operator runs. An error fails every item. `memory` has append_bytes().
  absl::Status AppendComputed(CacheStore& store, const std::byte* k, const std::byte* v,
                              absl::Span<std::byte> memory);
  int64_t append_bytes() const;
  // The call after Open(), and what it found.
  const AttendCall& call() const { return call_; }
  const RaggedCall& ragged() const { return ragged_; }
  absl::Span<const LayerState> states() const { return batch_->states(); }

  // Of each item, once the request has succeeded.
  absl::Span<const AppendResult> results() const { return results_; }
  // Returns the pages that only this call still holds.
  void Release() { results_.clear(); }

  TensorView keys(int64_t item) const override { return results_[item].snapshot->keys(); }
  TensorView values(int64_t item) const override { return results_[item].snapshot->values(); }
  bool has_failed(int64_t item) const override { return !results_[item].status.ok(); }
  absl::Span<const uint64_t> page_ids(int64_t item) const override {
    return results_[item].snapshot->page_ids();
  }

 private:
  absl::Status Check(absl::Span<const LayerState> states);
  absl::Status CheckShapes(absl::Span<const LayerState> states);
  absl::Status CheckTensor(const CallTensor& tensor, const Shape& shape) const;
  void SetItem(size_t n, const LayerState& state);
  void FindPrefixes(absl::Span<const LayerState> states);
  void CountRead(CacheStore& store) const;
  absl::Status Append(CacheStore& store, absl::Span<std::byte> memory);

  AttendCall call_;
  RaggedCall ragged_;
  TokenShape token_;  // of the caches
  std::optional<CacheStore::Batch> batch_;
  std::vector<NewTokens> tokens_;  // without bytes until the request runs
  std::vector<AppendResult> results_;
};

// New tokens of one layer: k [n, Hkv, D] and v [n, Hkv, Dv].
struct AppendPart {
  LayerCall call;
  CallTensor k = {"k"};
  CallTensor v = {"v"};
};

// Appends to several layers, without queries.
class CachedAppend {
 public:
  // As CachedAttention::Start().
  absl::StatusOr<Request> Start(CacheStore& store, const std::string& owner,
                                std::vector<AppendPart> parts, bool partial);

  absl::Span<const AppendResult> results() const { return results_; }
  void Release() { results_.clear(); }

 private:
  absl::Status Append(CacheStore& store, bool partial, absl::Span<std::byte> memory);

  std::optional<CacheStore::Batch> batch_;
  std::vector<AppendPart> parts_;
  std::vector<AppendResult> results_;
};

}  // namespace rapt::cache

#endif  // RAPT_SERVER_CACHE_CACHED_ATTENTION_H_
