// Splits a request into pieces that fit a lane: ranges of batch rows, of one row's heads, or of one
// head's queries against ranges of its keys.
#ifndef RAPT_ATTENTION_CUDNN_PIECES_H_
#define RAPT_ATTENTION_CUDNN_PIECES_H_

#include <array>
#include <cstdint>

#include "attention/mechanism/softmax/chunked.h"
#include "attention/problem.h"

namespace rapt::cudnn {

struct Piece {
  int64_t first_batch = 0;
  int64_t batch = 0;
  int64_t first_kv_head = 0;
  int64_t kv_heads = 0;
  // If a head is split: these queries against these keys, which are all past or all new.
  bool splits_head = false;
  RowRange queries = {};
  RowRange keys = {};  // counted from the first past key
};

// The size of the pieces: whole batch rows, or heads of one batch row, or rows of a single head.
struct Partition {
  int64_t batch = 0;     // batch rows per piece; the last piece may have fewer
  int64_t kv_heads = 0;  // heads per piece; the last may have fewer; all of them if batch > 1
  // Queries, and keys, per piece of a split head; 0 if heads are not split. Equal for both, so that
  // the diagonal has few positions, each of which needs its own kernels.
  int64_t rows = 0;

  bool splits_heads() const { return rows > 0; }

  // The number of tasks, which write disjoint ranges of the outputs. If heads are split, each task
  // computes pieces_per_task() pieces and merges their results.
  int64_t task_count(const Problem& problem) const;
  int64_t pieces_per_task(const Problem& problem) const;
  Piece piece(const Problem& problem, int64_t task, int64_t n) const;
};

// Returns pieces of similar size that take at most `arena_bytes` of a lane each. Large problems get
// one piece per lane, so that one is copied while another is computed. Returns 0 batch rows if
// even a few rows of a head do not fit, or with gradients a whole head. REQUIRES: the problem is
// supported and not empty.
Partition MakePartition(const Problem& problem, int64_t arena_bytes, int lanes);

// Returns the piece as a separate problem. It folds if the piece splits a head.
Problem ProblemOf(const Problem& problem, const Piece& piece);

// The tensors of a piece. Borrows what `arguments` borrows.
class PieceArguments {
 public:
  PieceArguments(const Arguments& arguments, const Problem& problem, const Piece& piece);
  PieceArguments(const PieceArguments&) = delete;
  PieceArguments& operator=(const PieceArguments&) = delete;

  const Arguments& arguments() const { return arguments_; }
  // The same, but folding into `state`, which is that of the piece's queries.
  Arguments FoldingInto(const Arguments::State& state) const;

 private:
  Arguments arguments_;
  std::array<SlicedBytes, 8> slices_;  // referenced by the sliced views
};

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_PIECES_H_
