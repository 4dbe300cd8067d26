// A request falls into pieces that a lane has room for: runs of batch rows, or of one row's heads,
// or of one head's queries against runs of its keys.
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
  // Of a head that is parted: these queries against these keys, which are all past ones or all new.
  bool parts_head = false;
  RowRange queries = {};
  RowRange keys = {};  // counted from the first past one
};

// How a problem is cut: whole batch rows, several at once, or heads of one, several at once, or
// rows of a single head.
struct Cut {
  int64_t batch = 0;     // rows in a piece; the last piece has those that are left
  int64_t kv_heads = 0;  // heads of a piece, likewise; all of them where batch > 1
  // Queries in a piece, and keys, likewise, where a head is parted; else 0. As many of either, so
  // that the diagonal lies in a few places, each of which has kernels of its own.
  int64_t rows = 0;

  bool parts_heads() const { return rows > 0; }

  // Runs of a problem that share no output. Where heads are parted, each is as many pieces as there
  // are key runs, whose results are folded.
  int64_t runs(const Problem& problem) const;
  int64_t key_runs(const Problem& problem) const;
  Piece piece(const Problem& problem, int64_t run, int64_t key_run) const;
};

// Pieces of about one size, each of which takes at most `arena_bytes` in a lane; as many as there
// are lanes where they are large enough for it, so that one is copied while another is computed. 0
// batch rows where not even some rows of a head fit. The problem is supported and not empty.
Cut CutFor(const Problem& problem, int64_t arena_bytes, int lanes);

// The piece as a problem of its own. It folds where a head is parted.
Problem ProblemOf(const Problem& problem, const Piece& piece);

// Its tensors. Borrows what `arguments` borrows.
class PieceArguments {
 public:
  PieceArguments(const Arguments& arguments, const Problem& problem, const Piece& piece);
  PieceArguments(const PieceArguments&) = delete;
  PieceArguments& operator=(const PieceArguments&) = delete;

  const Arguments& arguments() const { return arguments_; }
  // The same, folding into that state, of the piece's queries.
  Arguments FoldingInto(const Arguments::State& state) const;

 private:
  Arguments arguments_;
  std::array<SlicedBytes, 5> slices_;  // that views of slices point to
};

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_PIECES_H_
