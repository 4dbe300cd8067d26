// Attention over keys or queries that arrive in chunks. Memory depends on the size of the chunks,
// not on their number.
//
//     absl::StatusOr<ChunkedPlan> plan = MakeChunkedPlan(problem, chunking, options);
//     ClearState(state);
//     for (int64_t n = 0; n < plan->chunks(); ++n) Run(plan->PlanOf(n), ...);
//     for (...) FinishRows(problem, arguments, first, output, lse, task);
//
// If keys stream, each chunk is folded into the running softmax of every query row, and rows are
// finished after the last chunk. If queries stream, the results of a chunk are final and there is
// no state.
#ifndef RAPT_ATTENTION_MECHANISM_SOFTMAX_CHUNKED_H_
#define RAPT_ATTENTION_MECHANISM_SOFTMAX_CHUNKED_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/field_names.h"
#include "attention/plan.h"
#include "attention/problem.h"
#include "rapt/choices.h"

namespace rapt {

// Rows per chunk, at least 1; the last chunk has the remainder.
struct Chunking {
  Streaming streaming = Streaming::kKeys;
  int64_t query_chunk = 0;
  int64_t key_chunk = 0;
};

// Consecutive rows.
struct RowRange {
  int64_t begin = 0;
  int64_t count = 0;
};

// Returns chunk n of `length` rows; there are CountChunks() chunks.
RowRange ChunkOf(int64_t length, int64_t chunk, int64_t n);
int64_t CountChunks(int64_t length, int64_t chunk);

// Returns these queries against these keys, counted from the first past key, as a problem without a
// past. `problem` may itself be a section.
Problem SectionOf(const Problem& problem, RowRange queries, RowRange keys, bool folds);

// Depends only on problem, chunking and options. Immutable; may be shared by threads.
struct ChunkedPlan {
  Problem problem;
  Chunking chunking;  // chunks are no longer than the problem
  Plan full;          // the plan of a full chunk
  Plan last;          // the plan of the last chunk, which may be smaller

  int64_t state_bytes = 0;      // of the running softmax; 0 if queries stream
  int64_t workspace_bytes = 0;  // enough for either plan

  bool keys_stream() const { return chunking.streaming == Streaming::kKeys; }
  // The number of streamed chunks.
  int64_t chunks() const;
  RowRange Chunk(int64_t n) const;
  // Returns the plan of chunk n. Its arguments are only the keys or queries, mask and outputs of
  // that chunk.
  Plan PlanOf(int64_t n) const;
};

// Returns the errors of MakePlan(), and InvalidArgument for a chunk without rows, for weights when
// keys stream, and for a mask or bias whose last axis is neither 1 nor T. REQUIRES: the problem is
// not a section and does not want present outputs.
absl::StatusOr<ChunkedPlan> MakeChunkedPlan(const Problem& problem, const Chunking& chunking,
                                            const PlanOptions& options,
                                            const FieldNames& names = kOnnxNames);

// The size and the layout of the running softmax of a problem's query rows. `type` is
// Plan::state_dtype; `memory` has StateBytes() bytes, aligned to 64.
int64_t StateBytes(const Problem& problem, DType type);
Arguments::State StateIn(const Problem& problem, DType type, std::byte* memory);
// Initialize a state before the first chunk. ClearRows() clears these query rows of one of the B *
// Hq heads, ClearState() everything.
void ClearRows(const Arguments::State& state, RowRange rows, int64_t task);
void ClearState(const Arguments::State& state);

// Merges the sink into the state and writes the results of query rows [first, first + count) of one
// of the B * Hq heads. Reads only arguments.state and head_sink. `output` is [B, Hq, count, Dv] in
// the problem's type, `lse` [B, Hq, count, 1] if the problem wants it. Heads may be finished
// concurrently.
void FinishRows(const Problem& problem, const Arguments& arguments, int64_t first,
                const MutableTensorView& output, const MutableTensorView& lse, int64_t task);

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_SOFTMAX_CHUNKED_H_
