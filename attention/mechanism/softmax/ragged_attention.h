// Attention of many sequences in one call, over keys and values that stay in pages.
#ifndef RAPT_ATTENTION_MECHANISM_SOFTMAX_RAGGED_ATTENTION_H_
#define RAPT_ATTENTION_MECHANISM_SOFTMAX_RAGGED_ATTENTION_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/problem.h"
#include "attention/tensor_operator.h"
#include "attention/tensor_view.h"

namespace rapt {

// One sequence's part of a call. Tokens and positions count from the sequence's first token.
struct RaggedItem {
  int64_t rows = 0;      // of Q
  int64_t keys = 0;      // the tokens that may be seen: [0, keys)
  int64_t position = 0;  // of the first row; may be negative or beyond the keys
  // Row r, at p = position + r, sees token t if t <= p, and if t < first_keys or p - t <= window.
  int64_t first_keys = 0;
  int64_t left_window = -1;  // -1: all
};

// Tokens [begin, end) of a sequence.
struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;

  bool empty() const { return begin >= end; }
  bool Overlaps(const TokenRange& other) const {
    return std::max(begin, other.begin) < std::min(end, other.end);
  }
};

// The tokens that some row of an item may see: among the first ones, and within the windows.
// Disjoint, in order; either may be empty. Tokens outside of them are not read.
struct VisibleTokens {
  TokenRange first;
  TokenRange recent;
};
VisibleTokens VisibleTokensOf(const RaggedItem& item);

// Whether every row of the item sees all of the first `tokens` tokens.
bool SeesAll(const RaggedItem& item, int64_t tokens);

// Items whose first tokens have the same keys and values in memory, which are read once for the
// rows of all of them.
struct SharedPrefix {
  int64_t tokens = 0;
  std::vector<int64_t> items = {};  // each sees all of the tokens, and is in no other prefix
};

// The keys and values of a call's items, known when its tasks run.
class RaggedSource {
 public:
  virtual ~RaggedSource() = default;

  // Return views [1, Hkv, keys, D] and [1, Hkv, keys, Dv] of an item, strided or paged. With
  // RaggedCall::q8_0 they are of INT8, and the last axis is a row of q8_0.h. Thread-safe. REQUIRES:
  // the item has keys and has not failed.
  virtual TensorView keys(int64_t item) const = 0;
  virtual TensorView values(int64_t item) const = 0;
  // Returns whether the item's keys are not available: its outputs are then 0, its lse -inf.
  virtual bool has_failed(int64_t item) const = 0;
  // Returns a number for each page of a paged item, which has keys and values in the same pages. A
  // number stands for one content in this process: rows may be added to it, but none changes.
  // REQUIRES: RaggedCall::page_rows is set, and as for keys().
  virtual absl::Span<const uint64_t> page_ids(int64_t /*item*/) const { return {}; }
};

// The same for all items.
struct RaggedCall {
  std::vector<RaggedItem> items = {};
  std::vector<SharedPrefix> prefixes = {};
  DType dtype = DType::kFloat32;  // of Q, K and V
  bool q8_0 = false;              // K and V are in 8 bits; not for FP64
  int64_t query_heads = 0;        // Hq, a multiple of Hkv
  int64_t kv_heads = 0;
  int64_t head_size = 0;
  int64_t value_head_size = 0;
  std::optional<double> scale = {};  // absent: 1 / sqrt(D)
  double softcap = 0;                // 0: none
  std::optional<DType> head_sink = {};
  std::optional<BiasTable> bias_table = {};  // of the tokens before a row; not with prefixes
  std::optional<int64_t> max_distance = {};  // of bias_table
  std::optional<DType> output = {};          // of Y; absent: dtype
  bool wants_lse = false;
  // If all items lie in pages of this many tokens that have numbers, see page_ids(); else 0, and
  // no device computes the call.
  int64_t page_rows = 0;
  // The layouts of a single item: Q and Y are [Hq, rows, size], lse is [Hq, rows].
  bool heads_first = false;
  bool lse_heads_first = false;
};

// Returns what an item means as a problem of its own: Q [1, Hq, rows, D] over all keys, [1, Hkv,
// keys, D] and [1, Hkv, keys, Dv]. Its section has the position of the first row.
Problem ProblemOf(const RaggedCall& call, const RaggedItem& item);

// The longest run of keys that one task computes. A row's keys are divided at multiples of it, and
// the parts merged in order, so that a row's bits depend on neither the other items nor the
// threads.
inline constexpr int64_t kRaggedChunk = 2048;

// Returns the operator: kQ [sum of rows, Hq, D], kHeadSink [Hq] and kBiasTable [N, Hq] give kY [sum
// of rows, Hq, Dv] and kLse [sum of rows, Hq]. A row that sees nothing gives zeros and -inf, or the
// sink as lse. InvalidArgument for a scale or softcap that is not allowed; ResourceExhausted if
// sizes overflow 64 bits. A device computes it if its backend has a RaggedDevice that supports it.
// REQUIRES: counts are at least 0, head sizes and heads at least 1; heads come first with one item
// alone; a bias table is valid; `source` outlives all runs.
absl::StatusOr<std::shared_ptr<const TensorOperator>> MakeRaggedAttention(
    RaggedCall call, const RaggedSource& source);

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_SOFTMAX_RAGGED_ATTENTION_H_
