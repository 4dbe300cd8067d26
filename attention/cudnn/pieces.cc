#include "attention/cudnn/pieces.h"

#include <algorithm>
#include <limits>

#include "attention/cudnn/device.h"
#include "attention/cudnn/graph.h"
#include "base/round_up.h"

namespace rapt::cudnn {
namespace {

// Smaller problems are sent as one piece: copying them takes a few hundred microseconds.
constexpr int64_t kMinPieceBytes = int64_t{8} << 20;

// The minimum rows of a split head. With fewer, launching the kernels costs more than running them.
constexpr int64_t kMinRows = 16;

// Keys beyond the columns of the mask are hidden from all queries.
int64_t KeysToSend(const Problem& p) {
  return p.mask && p.mask->dims[3] != 1 ? p.mask->dims[3] : p.total_keys();
}

int64_t PastToSend(const Problem& p) { return std::min(p.past_length, KeysToSend(p)); }

// Returns a problem as large as the largest piece.
Problem LargestPiece(const Problem& p, const Partition& partition) {
  Piece piece{0, partition.batch, 0, partition.kv_heads};
  if (!partition.splits_heads()) return ProblemOf(p, piece);
  piece.splits_head = true;
  piece.queries.count = std::min(partition.rows, p.query_length);
  piece.keys.count = std::min(partition.rows, KeysToSend(p));
  Problem largest = ProblemOf(p, piece);
  // Without a diagonal, which only hides rows and requires lengths.
  largest.causal = false;
  largest.left_window = largest.right_window = -1;
  largest.has_key_lengths = true;
  return largest;
}

int64_t BytesOf(const Problem& problem, const Partition& partition) {
  const Problem piece = LargestPiece(problem, partition);
  if (CropOf(piece).empty()) return 0;
  const SdpaGraph graph = GraphOf(piece);
  if (!graph.backward) return LayOut(graph).end;
  const int64_t workspace = BackwardWorkspaceBytes(graph);
  if (workspace > kMaxBackwardWorkspaceBytes) return std::numeric_limits<int64_t>::max();
  return LayOut(graph).end + workspace;
}

// Returns the smallest size that divides `total` into as many ranges as `size` does.
int64_t Even(int64_t total, int64_t size) { return CeilDiv(total, CeilDiv(total, size)); }

// Returns the part of a view. An axis that broadcasts has stride 0 and belongs to every part.
template <typename View>
View PartOf(View view, const Piece& piece, int64_t heads_per_kv_head) {
  if (view.data != nullptr) {
    view.data += view.RowOffset(piece.first_batch, piece.first_kv_head * heads_per_kv_head, 0);
  }
  if (view.dims[0] != 1) view.dims[0] = piece.batch;
  if (view.dims[1] != 1) view.dims[1] = piece.kv_heads * heads_per_kv_head;
  return view;
}

template <typename View>
View RowsOf(View view, RowRange rows) {
  if (view.data != nullptr) view.data += view.RowOffset(0, 0, rows.begin);
  if (view.dims[2] != 1) view.dims[2] = rows.count;
  return view;
}

TensorView ColumnsOf(TensorView mask, RowRange columns) {
  if (mask.data == nullptr || mask.dims[3] == 1) return mask;
  mask.data += columns.begin * mask.strides[3] * SizeOf(mask.dtype);
  mask.dims[3] = columns.count;
  return mask;
}

}  // namespace

int64_t Partition::task_count(const Problem& p) const {
  const int64_t query_ranges = splits_heads() ? CountChunks(p.query_length, rows) : 1;
  return CeilDiv(p.batch, batch) * CeilDiv(p.kv_heads, kv_heads) * query_ranges;
}

int64_t Partition::pieces_per_task(const Problem& p) const {
  if (!splits_heads()) return 1;
  const int64_t past = PastToSend(p);
  return CountChunks(past, rows) + CountChunks(KeysToSend(p) - past, rows);
}

Piece Partition::piece(const Problem& p, int64_t task, int64_t n) const {
  Piece piece;
  if (splits_heads()) {
    const int64_t query_ranges = CountChunks(p.query_length, rows);
    piece.splits_head = true;
    piece.queries = ChunkOf(p.query_length, rows, task % query_ranges);
    task /= query_ranges;
    const int64_t past = PastToSend(p);
    const int64_t past_ranges = CountChunks(past, rows);
    piece.keys = n < past_ranges ? ChunkOf(past, rows, n)
                                 : ChunkOf(KeysToSend(p) - past, rows, n - past_ranges);
    if (n >= past_ranges) piece.keys.begin += past;
  }
  const int64_t head_ranges = CeilDiv(p.kv_heads, kv_heads);
  piece.first_batch = task / head_ranges * batch;
  piece.batch = std::min(batch, p.batch - piece.first_batch);
  piece.first_kv_head = task % head_ranges * kv_heads;
  piece.kv_heads = std::min(kv_heads, p.kv_heads - piece.first_kv_head);
  return piece;
}

Partition MakePartition(const Problem& p, int64_t arena_bytes, int lanes) {
  const int64_t total_bytes = BytesOf(p, {p.batch, p.kv_heads});
  const int64_t target_bytes =
      std::min(arena_bytes, std::max(kMinPieceBytes, CeilDiv(total_bytes, lanes)));
  Partition partition{p.batch, p.kv_heads};
  while (partition.batch > 1 && BytesOf(p, partition) > target_bytes)
    partition.batch = CeilDiv(partition.batch, 2);
  while (partition.kv_heads > 1 && BytesOf(p, partition) > target_bytes)
    partition.kv_heads = CeilDiv(partition.kv_heads, 2);
  if (BytesOf(p, partition) > arena_bytes) {
    if (p.backward) return {};  // partial gradients cannot be merged
    partition.rows = PowerOfTwoFrom(std::max(p.query_length, p.total_keys()));
    while (partition.rows > kMinRows && BytesOf(p, partition) > target_bytes) partition.rows /= 2;
    if (BytesOf(p, partition) > arena_bytes) return {};
  }
  return {Even(p.batch, partition.batch), Even(p.kv_heads, partition.kv_heads), partition.rows};
}

Problem ProblemOf(const Problem& p, const Piece& piece) {
  Problem part = p;
  part.batch = piece.batch;
  part.kv_heads = piece.kv_heads;
  part.query_heads = piece.kv_heads * p.group_size();
  part.wants_present = false;  // the host makes this copy
  if (part.mask && part.mask->dims[0] != 1) part.mask->dims[0] = part.batch;
  if (part.mask && part.mask->dims[1] != 1) part.mask->dims[1] = part.query_heads;
  return piece.splits_head ? SectionOf(part, piece.queries, piece.keys, /*folds=*/true) : part;
}

PieceArguments::PieceArguments(const Arguments& arguments, const Problem& p, const Piece& piece)
    : arguments_(arguments) {
  const int64_t group = p.group_size();
  RowRange keys = piece.keys;
  if (piece.splits_head) {
    if (keys.begin < p.past_length) {
      arguments_.inputs[Role::kK] = arguments.inputs[Role::kPastKey];
      arguments_.inputs[Role::kV] = arguments.inputs[Role::kPastValue];
    } else {
      keys.begin -= p.past_length;
    }
    arguments_.inputs[Role::kPastKey] = arguments_.inputs[Role::kPastValue] = {};
    arguments_.inputs[Role::kMask] = ColumnsOf(arguments_.inputs[Role::kMask], piece.keys);
  }
  const auto of_queries = [&](auto& view) {
    view = PartOf(view, piece, group);
    if (piece.splits_head) view = RowsOf(view, piece.queries);
  };
  size_t used = 0;
  const auto read = [&](TensorView& view, int64_t heads_per_kv_head, RowRange rows) {
    if (!view.present()) return;
    if (view.slices != nullptr) {
      slices_[used] = *view.slices;
      slices_[used].offset +=
          view.RowOffset(piece.first_batch, piece.first_kv_head * heads_per_kv_head, rows.begin);
      view.slices = &slices_[used++];
    }
    view = PartOf(view, piece, heads_per_kv_head);
    if (piece.splits_head) view = RowsOf(view, rows);
  };
  read(arguments_.inputs[Role::kQ], group, piece.queries);
  read(arguments_.inputs[Role::kK], 1, keys);
  read(arguments_.inputs[Role::kV], 1, keys);
  read(arguments_.inputs[Role::kPastKey], 1, {});
  read(arguments_.inputs[Role::kPastValue], 1, {});
  for (Role role : {Role::kOutputGradient, Role::kForwardOutput, Role::kForwardLse}) {
    read(arguments_.inputs[role], group, piece.queries);
  }
  of_queries(arguments_.inputs[Role::kMask]);
  for (MutableTensorView* view :
       {&arguments_.outputs[Role::kY], &arguments_.outputs[Role::kLse], &arguments_.state.output,
        &arguments_.state.max, &arguments_.state.sum}) {
    of_queries(*view);
  }
  of_queries(arguments_.outputs[Role::kDQ]);
  for (Role role : {Role::kDK, Role::kDV, Role::kDPastKey, Role::kDPastValue}) {
    arguments_.outputs[role] = PartOf(arguments_.outputs[role], piece, 1);
  }
  if (!arguments.key_lengths.empty()) {
    arguments_.key_lengths = arguments.key_lengths.subspan(piece.first_batch, piece.batch);
  }
}

Arguments PieceArguments::FoldingInto(const Arguments::State& state) const {
  Arguments arguments = arguments_;
  arguments.state = state;
  return arguments;
}

}  // namespace rapt::cudnn
