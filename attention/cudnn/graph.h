// The cuDNN graph that computes a problem. Does not depend on cuDNN: Supports() restates the
// library's rules, and tests/attention/cudnn checks it against the library.
#ifndef RAPT_ATTENTION_CUDNN_GRAPH_H_
#define RAPT_ATTENTION_CUDNN_GRAPH_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "attention/mechanism/softmax/ragged_attention.h"
#include "attention/problem.h"

namespace rapt::cudnn {

// Pages of device memory. Each has `rows` consecutive keys of every head, [Hkv, rows, D], then
// their values, [Hkv, rows, Dv].
struct GraphPages {
  int64_t rows = 0;   // of each head; a power of two
  int64_t count = 0;  // that the memory holds
};

// One scaled dot product attention over packed row-major tensors Q [B, Hq, Sq, D], K [B, Hkv, Sk,
// D], V [B, Hkv, Sk, Dv] and O [B, Hq, Sq, Dv], with an FP32 LSE [B, Hq, Sq, 1]. The first four may
// be ragged.
struct SdpaGraph {
  DType dtype = DType::kFloat32;
  int64_t batch = 0;
  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  int64_t query_length = 0;
  int64_t key_length = 0;
  int64_t head_size = 0;  // both head sizes are multiples of 8
  int64_t value_head_size = 0;

  double scale = 1;    // an argument at run time, not compiled in
  double softcap = 0;  // 0: none

  // Query i's diagonal is key i + offset. The offset is 0, or with bottom_right, each batch row's
  // key length minus its query length.
  bool bottom_right = false;
  // Query i sees keys in (diagonal - left_bound, diagonal + right_bound]; without a bound, all keys
  // on that side.
  std::optional<int64_t> left_bound = std::nullopt;   // at least 1
  std::optional<int64_t> right_bound = std::nullopt;  // at least 0

  // Query and key lengths are given, INT32 [B, 1, 1, 1] each, at least 1. Input rows beyond them
  // are ignored; output rows beyond them are undefined.
  bool has_lengths = false;
  // Requires lengths and no bias. Q, K, V and O have no padding: the tokens of all batch rows are
  // contiguous, [tokens, H, D]. Each tensor has offsets, INT64 [B + 1, 1, 1, 1] in elements: the
  // start of each row and the end of the last one.
  bool ragged = false;
  // Requires lengths, and excludes ragged tensors, bias, softcap and the backward pass. K and V are
  // in pages, which the batch rows may share. The table of a batch row, INT32 [key_length / rows],
  // has the numbers of its pages in order; each is valid, also beyond the row's keys.
  std::optional<GraphPages> pages = std::nullopt;
  // A tensor of a float type that is added to the scores after the softcap; axes of 1 broadcast.
  std::optional<MaskShape> bias = std::nullopt;

  // Computes the backward pass: O and LSE are inputs, as is the gradient dO of O, and the gradients
  // dQ, dK and dV, packed as Q, K and V, are the outputs. FP16 or BF16, neither ragged nor with a
  // softcap. Every run returns the same bits.
  bool backward = false;

  // All fields on one line. Equal graphs have equal keys; a plan serves every graph of its key.
  std::string Key() const;
};

// The queries that see a key by position, and the keys that some query sees, if this does not
// depend on the data. Rows outside are not sent to the device.
struct Crop {
  int64_t first_query = 0;
  int64_t queries = 0;
  int64_t first_key = 0;  // counted over past keys, then new ones
  int64_t keys = 0;

  bool empty() const { return queries == 0 || keys == 0; }
};

// Returns OK, or why cuDNN cannot compute the problem. REQUIRES: `problem` is valid.
absl::Status Supports(const Problem& problem);

// REQUIRES: the problem is supported.
Crop CropOf(const Problem& problem);

// The keys of a batch row that are sent to the device. Key n of the graph is key first + n of the
// problem.
struct SentKeys {
  int64_t first = 0;
  int64_t count = 0;  // 0: none of the row's queries sees a key
};
// REQUIRES: the lengths are the problem's and in range; empty if it has none.
SentKeys KeysOf(const Problem& problem, absl::Span<const int64_t> key_lengths, int64_t b);

// Returns the graph of a problem. Lengths are rounded up, so that a service that receives arbitrary
// lengths needs few graphs. REQUIRES: the problem is supported and its crop is not empty.
SdpaGraph GraphOf(const Problem& problem);

// cuDNN's limit for the workspace of a deterministic backward pass.
inline constexpr int64_t kMaxBackwardWorkspaceBytes = int64_t{256} << 20;

// Returns an upper bound of the workspace that the kernels of a backward graph need.
int64_t BackwardWorkspaceBytes(const SdpaGraph& graph);

// Returns whether cuDNN can also compute the graph over ragged tensors.
bool MayBeRagged(const SdpaGraph& graph);

// Returns the graph over ragged tensors that holds at least these batch rows and lengths. All are
// rounded up generously: missing tokens are neither sent nor computed, and few graphs serve all
// batches.
SdpaGraph RaggedOf(SdpaGraph graph, int64_t batch, int64_t queries, int64_t keys);

// Returns OK, or why cuDNN cannot compute a call over pages of `page_rows` tokens.
absl::Status Supports(const RaggedCall& call, int64_t page_rows);

// Returns the item's window; nullopt if it hides no token.
std::optional<int64_t> WindowOf(const RaggedItem& item);
// Returns the tokens that some row of a supported item sees.
TokenRange SeenBy(const RaggedItem& item);

// The largest sizes of a run's items.
struct PagedSizes {
  int64_t items = 0;
  int64_t rows = 0;                    // of an item
  int64_t tokens = 0;                  // of an item, from its first one
  std::optional<int64_t> window = {};  // of all items
};

// Returns the graph of some items of a call. Sizes are rounded up, tokens generously, as missing
// ones are not read. REQUIRES: the call is supported.
SdpaGraph PagedGraphOf(const RaggedCall& call, const GraphPages& pages, const PagedSizes& sizes);

// Returns the bytes of one of the graph's pages, and those of the keys, which precede the values.
int64_t PageKeyBytes(const SdpaGraph& graph);
int64_t PageBytes(const SdpaGraph& graph);
// Of the graphs of a call.
int64_t PageBytes(const RaggedCall& call);

// Rounds up to one of eight values per octave, all multiples of 8.
int64_t RoundUpLength(int64_t length);

// Rounds up to a power of two.
int64_t PowerOfTwoFrom(int64_t n);

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_GRAPH_H_
