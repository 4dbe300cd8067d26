// What cuDNN is asked for to compute a problem. Nothing here needs cuDNN: the rules of what it
// takes are a table of ours, which tests/attention/cudnn holds against the real library.
#ifndef RAPT_ATTENTION_CUDNN_GRAPH_H_
#define RAPT_ATTENTION_CUDNN_GRAPH_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "attention/problem.h"

namespace rapt::cudnn {

// One scaled dot product attention over packed row-major tensors Q [B, Hq, Sq, D], K [B, Hkv, Sk,
// D], V [B, Hkv, Sk, Dv] and O [B, Hq, Sq, Dv], beside it an LSE in FP32 [B, Hq, Sq, 1]. The first
// four may be ragged.
struct SdpaGraph {
  DType dtype = DType::kFloat32;
  int64_t batch = 0;
  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  int64_t query_length = 0;
  int64_t key_length = 0;
  int64_t head_size = 0;  // this and the next: multiples of 8
  int64_t value_head_size = 0;

  double scale = 1;    // given when it runs, not compiled in
  double softcap = 0;  // 0: none

  // Where the diagonal lies: key i + offset is query i's. The offset is 0, or with bottom_right, of
  // each batch row, its key length less its query length.
  bool bottom_right = false;
  // Query i sees keys beyond its diagonal less left_bound, and up to its diagonal plus right_bound;
  // without a bound all on that side.
  std::optional<int64_t> left_bound = std::nullopt;   // at least 1
  std::optional<int64_t> right_bound = std::nullopt;  // at least 0

  // Query and key lengths are given, INT32 [B, 1, 1, 1] each, at least 1; what lies beyond is not
  // looked at, rows of the outputs beyond hold anything.
  bool has_lengths = false;
  // With lengths and no bias: Q, K, V and O hold nothing beyond the lengths, but the tokens of one
  // batch row behind those of the row before it, [tokens, H, D]. Where each row begins, and the
  // last one ends, is given for each of the four in elements, INT64 [B + 1, 1, 1, 1].
  bool ragged = false;
  // A tensor of a float type that is added to the scores after the softcap; axes of 1 broadcast.
  std::optional<MaskShape> bias = std::nullopt;

  // All of it on one line: equal graphs have equal keys, and a plan serves every graph of its key.
  std::string Key() const;
};

// The queries that see a key by position, and the keys that one of them sees, where that does not
// depend on the data. What is outside is not sent to the device.
struct Crop {
  int64_t first_query = 0;
  int64_t queries = 0;
  int64_t first_key = 0;  // of the past and the new ones, one after the other
  int64_t keys = 0;

  bool empty() const { return queries == 0 || keys == 0; }
};

// OK, or why cuDNN can't compute the problem. `problem` is valid.
absl::Status Supports(const Problem& problem);

// Of a supported problem.
Crop CropOf(const Problem& problem);

// The keys of batch row b that are sent: key n of the graph is key first + n of the problem. The
// lengths are the problem's, in range, and empty where it has none.
struct KeyRun {
  int64_t first = 0;
  int64_t count = 0;  // 0: none of the row's queries sees a key
};
KeyRun KeysOf(const Problem& problem, absl::Span<const int64_t> key_lengths, int64_t b);

// The graph of a supported problem whose crop is not empty. Lengths are rounded up, so that the
// graphs of a service that sees every length are few.
SdpaGraph GraphOf(const Problem& problem);

// Whether cuDNN computes such a graph over ragged tensors, too.
bool MayBeRagged(const SdpaGraph& graph);

// The graph over ragged tensors with at least so many batch rows, of lengths up to these at least.
// All are rounded up a long way: what is not there is neither sent nor computed, and the graphs of
// requests in any company are few.
SdpaGraph RaggedOf(SdpaGraph graph, int64_t batch, int64_t queries, int64_t keys);

// `length` or a little more, a multiple of 8: lengths up to twice as large share eight values.
int64_t RoundUpLength(int64_t length);

// `n` or the next power of two.
int64_t PowerOfTwoFrom(int64_t n);

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_GRAPH_H_
