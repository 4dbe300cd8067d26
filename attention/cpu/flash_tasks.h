// What the tasks of the forward and the backward pass have in common: how query rows are divided
// into tasks, and how the kernels' structs are filled for one. Not thread-safe structures: each
// worker fills its own.
#ifndef RAPT_ATTENTION_CPU_FLASH_TASKS_H_
#define RAPT_ATTENTION_CPU_FLASH_TASKS_H_

#include <cstddef>
#include <cstdint>
#include <new>

#include "attention/cpu/kernels.h"
#include "attention/problem.h"
#include "attention/rotary/rotation.h"
#include "attention/score/score_params.h"
#include "base/round_up.h"

namespace rapt::cpu {

inline constexpr int64_t kMaxQueryRows = kMostRowBlocks * kRowBlock;

// How the g * Sq query rows of a key/value head are divided into tasks: blocks of queries of one
// head, or for a short Sq several whole heads, so that K and V are read once for all of them.
struct Split {
  int64_t queries_per_task = 0;
  int64_t heads_per_task = 0;
  int64_t query_tasks = 0;
  int64_t head_tasks = 0;

  int64_t rows_per_task() const { return queries_per_task * heads_per_task; }
};

inline bool IsEntmax(const Problem& p) { return p.normalizer != Normalizer::kSoftmax; }

// Divides the rows into tasks of at most about `query_rows`.
Split SplitRows(const Problem& problem, int64_t query_rows);

// Whether the rows of the selected keys are gathered. Score outputs cover all keys; for these, for
// entmax, additive scores, vectors by distance and the backward pass, the selection is one of the
// things that hide keys.
bool Gathers(const Problem& problem);

int64_t AttentionTasks(const Problem& problem, const Split& split);

// A scale, softcap, mask or bias outside fp32's range needs fp64 for the whole softmax: a finite
// mask must not become -inf.
bool AccumulatesInFp64(const Problem& problem);
DType AccumulatorOf(const Problem& problem);

// Of the memory of a task: its rows, and the SparseRow of each if the kernel needs it; the bits of
// the selected keys of each query and key/value head, unless they are gathered.
int64_t RowTableBytes(const Problem& problem, int64_t rows);
int64_t SelectionBytes(const Problem& problem, const Split& split);

// Whether the candidates of entmax of a task would take too much memory.
bool HasTooManyCandidates(const Problem& problem, int64_t rows);

// The rows and keys of a task.
struct TaskPlace {
  int64_t b, kv_head, first_head, end_head, first_query, end_query, part;
};

TaskPlace PlaceOf(const Problem& problem, const Split& split, int64_t key_splits, int64_t task);

// Calls `visit(h, i)` for each row of a task. `by_query`: the heads of a query follow one another.
template <typename Visit>
void ForEachRow(const TaskPlace& place, bool by_query, const Visit& visit) {
  for (int64_t i = place.first_query; by_query && i < place.end_query; ++i) {
    for (int64_t h = place.first_head; h < place.end_head; ++h) visit(h, i);
  }
  for (int64_t h = place.first_head; !by_query && h < place.end_head; ++h) {
    for (int64_t i = place.first_query; i < place.end_query; ++i) visit(h, i);
  }
}

// Returns the tensor's bytes starting at `offset`.
FlashBytes BytesOf(const TensorView& view, int64_t offset);

// The fields of a task that depend only on the problem, and those that are the same for every block
// of rows.
FlashTask ShapeOf(const Problem& problem);
// The largest task, as far as the sizes of its memory depend on it. Has no data.
FlashTask LargestTask(const Problem& problem, const Split& split);
FlashTask TaskOf(const Problem& problem, const Arguments& arguments, const TaskPlace& place);

FlashRow RowOf(const Problem& problem, const Arguments& arguments, int64_t b, int64_t h, int64_t i);

inline int64_t RowIndex(const Problem& p, int64_t b, int64_t h, int64_t i) {
  return (b * p.query_heads + h) * p.query_length + i;
}

// Lets the rows of a task read rotated queries at `queries`, and the kernel rotate keys.
void Rotate(const Problem& problem, const Arguments& arguments, const Rotation& rotation, int64_t b,
            std::byte* queries, FlashTask& flash, FlashRow* rows);

// The SparseRows of a task, after its FlashRows in the worker's workspace.
class SparseRows {
 public:
  // `bits`: the memory of the selection if it is not gathered.
  SparseRows(const Problem& p, const Arguments& a, const TaskPlace& place, FlashRow* flash_rows,
             int64_t most_rows, std::byte* bits)
      : p_(p),
        a_(a),
        place_(place),
        rows_(reinterpret_cast<SparseRow*>(
            reinterpret_cast<std::byte*>(flash_rows) +
            RoundUp(most_rows * static_cast<int64_t>(sizeof(FlashRow)), kVectorBytes))),
        bits_(p.selected && !Gathers(p) ? reinterpret_cast<uint64_t*>(bits) : nullptr) {
    if (bits_ == nullptr) return;
    for (int64_t i = place.first_query; i < place.end_query; ++i) {
      SetSelectedBits(p, a, place.b, place.first_head, i, BitsOf(i));
    }
  }

  bool exist() const { return p_.block_mask || p_.has_exemptions() || bits_ != nullptr; }

  const SparseRow* Make(int64_t row, int64_t h, int64_t i) const {
    auto* const sparse = new (&rows_[row]) SparseRow(SparseRowOf(p_, a_, place_.b, h, i));
    if (bits_ != nullptr) sparse->selected = BitsOf(i);
    return sparse;
  }

 private:
  uint64_t* BitsOf(int64_t i) const { return bits_ + (i - place_.first_query) * SelectedWords(p_); }

  const Problem& p_;
  const Arguments& a_;
  const TaskPlace& place_;
  SparseRow* rows_;
  uint64_t* bits_;
};

// Counts the products of all visible pairs, as far as the shapes tell: a block mask and global keys
// are not known, and key lengths are assumed to be full.
double CountFlops(const Problem& problem);

}  // namespace rapt::cpu

#endif  // RAPT_ATTENTION_CPU_FLASH_TASKS_H_
