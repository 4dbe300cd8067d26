#include "server/attention/cudnn/pieces.h"

#include <algorithm>

#include "server/attention/cudnn/device.h"
#include "server/attention/cudnn/graph.h"

namespace rapt::cudnn {
namespace {

// Less than this is sent in one piece: some hundreds of microseconds of copying.
constexpr int64_t kLeastPieceBytes = int64_t{8} << 20;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t BytesOf(const Problem& problem, const Cut& cut) {
  const Problem piece = ProblemOf(problem, {0, cut.batch, 0, cut.kv_heads});
  return CropOf(piece).empty() ? 0 : LayOut(GraphOf(piece)).end;
}

// As few of `total` in a run as make the number of runs the same.
int64_t Even(int64_t total, int64_t run) { return CeilDiv(total, CeilDiv(total, run)); }

// The part of a view; an axis that broadcasts has stride 0 and is in every part.
template <typename View>
View PartOf(View view, int64_t b, int64_t batch, int64_t h, int64_t heads) {
  if (view.data != nullptr) view.data += view.RowOffset(b, h, 0);
  if (view.dims[0] != 1) view.dims[0] = batch;
  if (view.dims[1] != 1) view.dims[1] = heads;
  return view;
}

}  // namespace

int64_t Cut::pieces(const Problem& p) const {
  return CeilDiv(p.batch, batch) * CeilDiv(p.kv_heads, kv_heads);
}

Piece Cut::piece(const Problem& p, int64_t n) const {
  const int64_t head_runs = CeilDiv(p.kv_heads, kv_heads);
  const int64_t b = n / head_runs * batch;
  const int64_t h = n % head_runs * kv_heads;
  return {b, std::min(batch, p.batch - b), h, std::min(kv_heads, p.kv_heads - h)};
}

Cut CutFor(const Problem& p, int64_t arena_bytes, int lanes) {
  const int64_t whole = BytesOf(p, {p.batch, p.kv_heads});
  const int64_t wanted = std::max(kLeastPieceBytes, CeilDiv(whole, lanes));
  const int64_t room = std::min(arena_bytes, wanted);
  Cut cut{p.batch, p.kv_heads};
  while (cut.batch > 1 && BytesOf(p, cut) > room) cut.batch = CeilDiv(cut.batch, 2);
  while (cut.kv_heads > 1 && BytesOf(p, cut) > room) cut.kv_heads = CeilDiv(cut.kv_heads, 2);
  if (BytesOf(p, cut) > arena_bytes) return {};
  return {Even(p.batch, cut.batch), Even(p.kv_heads, cut.kv_heads)};
}

Problem ProblemOf(const Problem& p, const Piece& piece) {
  Problem part = p;
  part.batch = piece.batch;
  part.kv_heads = piece.kv_heads;
  part.query_heads = piece.kv_heads * p.group_size();
  part.wants_present = false;  // that is a copy, and the host's
  if (part.mask && part.mask->dims[0] != 1) part.mask->dims[0] = part.batch;
  if (part.mask && part.mask->dims[1] != 1) part.mask->dims[1] = part.query_heads;
  return part;
}

PieceArguments::PieceArguments(const Arguments& whole, const Problem& p, const Piece& piece)
    : arguments_(whole) {
  const int64_t group = p.group_size();
  const auto of_queries = [&](auto& view) {
    view = PartOf(view, piece.first_batch, piece.batch, piece.first_kv_head * group,
                  piece.kv_heads * group);
  };
  size_t used = 0;
  const auto read = [&](TensorView& view, int64_t heads_per_kv_head) {
    if (!view.present()) return;
    const int64_t h = piece.first_kv_head * heads_per_kv_head;
    if (view.slices != nullptr) {
      slices_[used] = *view.slices;
      slices_[used].offset += view.RowOffset(piece.first_batch, h, 0);
      view.slices = &slices_[used++];
    }
    view = PartOf(view, piece.first_batch, piece.batch, h, piece.kv_heads * heads_per_kv_head);
  };
  read(arguments_.query, group);
  read(arguments_.key, 1);
  read(arguments_.value, 1);
  read(arguments_.past_key, 1);
  read(arguments_.past_value, 1);
  of_queries(arguments_.mask);
  for (MutableTensorView* view : {&arguments_.output, &arguments_.lse, &arguments_.state.output,
                                  &arguments_.state.max, &arguments_.state.sum}) {
    of_queries(*view);
  }
  if (!whole.key_lengths.empty()) {
    arguments_.key_lengths = whole.key_lengths.subspan(piece.first_batch, piece.batch);
  }
}

}  // namespace rapt::cudnn
