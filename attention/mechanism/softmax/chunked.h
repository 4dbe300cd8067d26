// Attention whose keys, or whose queries, come in chunks: what is held is a matter of the chunks'
// size, not of how many there are.
//
//     absl::StatusOr<ChunkedPlan> plan = MakeChunkedPlan(problem, chunking, options);
//     ClearState(state);
//     for (int64_t n = 0; n < plan->chunks(); ++n) Run(plan->PlanOf(n), ...);
//     for (...) FinishRows(problem, state, first, output, lse, task);
//
// Where keys stream, each chunk is folded into the running softmax of every query row, and rows are
// finished after the last one. Where queries stream, a chunk's results are final, and there is no
// state.
#ifndef RAPT_ATTENTION_MECHANISM_SOFTMAX_CHUNKED_H_
#define RAPT_ATTENTION_MECHANISM_SOFTMAX_CHUNKED_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/field_names.h"
#include "attention/plan.h"
#include "attention/problem.h"

namespace rapt {

enum class Streaming : uint8_t { kKeys, kQueries };

// Rows in a chunk, at least 1; the last chunk has those that are left.
struct Chunking {
  Streaming streaming = Streaming::kKeys;
  int64_t query_chunk = 0;
  int64_t key_chunk = 0;
};

// A run of rows.
struct RowRange {
  int64_t begin = 0;
  int64_t count = 0;
};

// Chunk n of `length` rows; there are CountChunks() of them.
RowRange ChunkOf(int64_t length, int64_t chunk, int64_t n);
int64_t CountChunks(int64_t length, int64_t chunk);

// Those queries against those keys, the past's counted first, as a problem with no past of its own.
// `whole` may be such a part itself.
Problem SectionOf(const Problem& whole, RowRange queries, RowRange keys, bool folds);

// A function of problem, chunking and options alone. Immutable; may be shared by threads.
struct ChunkedPlan {
  Problem whole;
  Chunking chunking;  // chunks are no larger than what there is to cut
  Plan full;          // of a chunk of that size
  Plan last;          // of the last one, which may be smaller

  int64_t state_bytes = 0;      // of the running softmax; 0 where queries stream
  int64_t workspace_bytes = 0;  // enough for either plan

  bool keys_stream() const { return chunking.streaming == Streaming::kKeys; }
  // How many chunks stream.
  int64_t chunks() const;
  RowRange Chunk(int64_t n) const;
  // How the n-th of them is computed. Keys and queries, mask and outputs are the chunk's alone.
  Plan PlanOf(int64_t n) const;
};

// As MakePlan(); InvalidArgument, too, for a chunk of no rows, and for weights where keys stream.
// The problem is no section, has all outputs but present, and a mask whose last axis is 1 or T.
absl::StatusOr<ChunkedPlan> MakeChunkedPlan(const Problem& whole, const Chunking& chunking,
                                            const PlanOptions& options,
                                            const FieldNames& names = kOnnxNames);

// The running softmax of a problem's query rows in a type, Plan::state_dtype, and in so many bytes
// of memory, aligned to 64.
int64_t StateBytes(const Problem& problem, DType type);
Arguments::State StateIn(const Problem& problem, DType type, std::byte* memory);
// StateIn()'s, before the first chunk. A task for each of the B * Hq heads, of whose query rows it
// clears these; or all at once.
void ClearRows(const Arguments::State& state, RowRange rows, int64_t task);
void ClearState(const Arguments::State& state);

// Writes what the state has come to for query rows [first, first + count): `output` is
// [B, Hq, count, Dv] in the problem's type, `lse` [B, Hq, count, 1] where it is wanted. A task for
// each of the B * Hq heads; they may run at once.
void FinishRows(const Problem& problem, const Arguments::State& state, int64_t first,
                const MutableTensorView& output, const MutableTensorView& lse, int64_t task);

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_SOFTMAX_CHUNKED_H_
