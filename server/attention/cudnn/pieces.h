// A request falls into pieces that a lane has room for: runs of batch rows, or of one row's heads.
#ifndef RAPT_SERVER_ATTENTION_CUDNN_PIECES_H_
#define RAPT_SERVER_ATTENTION_CUDNN_PIECES_H_

#include <array>
#include <cstdint>

#include "server/attention/problem.h"

namespace rapt::cudnn {

struct Piece {
  int64_t first_batch = 0;
  int64_t batch = 0;
  int64_t first_kv_head = 0;
  int64_t kv_heads = 0;
};

// How a problem is cut: whole batch rows, several at once, or heads of one, several at once.
struct Cut {
  int64_t batch = 0;     // rows in a piece; the last piece has those that are left
  int64_t kv_heads = 0;  // heads of a piece, likewise; all of them where batch > 1

  int64_t pieces(const Problem& problem) const;
  Piece piece(const Problem& problem, int64_t n) const;
};

// Pieces of about one size, each of which takes at most `arena_bytes` in a lane; as many as there
// are lanes where they are large enough for it, so that one is copied while another is computed. 0
// rows where not even one head fits. The problem is supported and not empty.
Cut CutFor(const Problem& problem, int64_t arena_bytes, int lanes);

// The piece as a problem of its own.
Problem ProblemOf(const Problem& problem, const Piece& piece);

// Its tensors. Borrows what `arguments` borrows.
class PieceArguments {
 public:
  PieceArguments(const Arguments& arguments, const Problem& problem, const Piece& piece);
  PieceArguments(const PieceArguments&) = delete;
  PieceArguments& operator=(const PieceArguments&) = delete;

  const Arguments& arguments() const { return arguments_; }

 private:
  Arguments arguments_;
  std::array<SlicedBytes, 5> slices_;  // that views of slices point to
};

}  // namespace rapt::cudnn

#endif  // RAPT_SERVER_ATTENTION_CUDNN_PIECES_H_
