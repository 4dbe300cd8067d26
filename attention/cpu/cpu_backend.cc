#include "attention/cpu/cpu_backend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <string>

#include "absl/strings/str_cat.h"
#include "attention/cpu/backward.h"
#include "attention/cpu/flash_tasks.h"
#include "attention/cpu/instruction_sets.h"
#include "attention/cpu/kernels.h"
#include "attention/cpu/vector_tables.h"
#include "attention/half.h"
#include "attention/mechanism/entmax/entmax.h"
#include "attention/mechanism/softmax/softmax_state.h"
#include "attention/philox.h"
#include "attention/present.h"
#include "attention/rotary/rotate.h"
#include "attention/rotary/rotation.h"
#include "attention/score/relative_tables.h"
#include "attention/score/score_params.h"
#include "base/round_up.h"

namespace rapt {
namespace cpu {

void DropoutKeepsOutOfLine(const FlashDropout& dropout, const FlashRow& row, int64_t begin,
                           int64_t count, bool* keep) {
  DropoutKeeps(dropout.probability, dropout.seed, dropout.batch, row.head, row.index,
               dropout.first_key + begin, count, keep);
}

namespace {

// Minimum number of tasks per thread, so that threads do not idle while the last tasks finish.
constexpr int64_t kTasksPerThread = 4;

// Shorter key splits cost more to merge than they gain.
constexpr int64_t kMinSplitKeys = 1024;

// Queries that select their keys are computed one by one, for all heads that share the keys.
Split SplitSelecting(const Problem& p, int threads) {
  Split split;
  split.heads_per_task = std::min(p.group_size(), kMaxQueryRows);
  split.head_tasks = CeilDiv(p.group_size(), split.heads_per_task);
  const int64_t most = kMaxQueryRows / split.heads_per_task;
  const int64_t others = p.batch * p.kv_heads * split.head_tasks;
  const int64_t wanted = CeilDiv(threads * kTasksPerThread, std::max<int64_t>(others, 1));
  split.queries_per_task = std::clamp<int64_t>(p.query_length / wanted, 1, most);
  split.query_tasks = CeilDiv(p.query_length, split.queries_per_task);
  return split;
}

// Large blocks pack K and V less often; small ones balance the load better.
int64_t ChooseQueryRows(const Problem& p, int threads) {
  int64_t rows = kMaxQueryRows;
  while (rows > kRowBlock && (AttentionTasks(p, SplitRows(p, rows)) < threads * kTasksPerThread ||
                              HasTooManyCandidates(p, rows))) {
    rows /= 2;
  }
  return rows;
}

// Split-KV: with fewer tasks than threads, as in decoding with few heads, the keys are split and
// the partial results are merged by their lse. Weights need the final lse before the first one can
// be written, so they are not split. Entmax has no lse.
int64_t ChooseKeySplits(const Problem& p, int64_t tasks, int threads) {
  if (tasks >= threads || Gathers(p) || IsEntmax(p) || p.score_output == ScoreOutput::kWeights) {
    return 1;
  }
  return std::clamp<int64_t>(p.total_keys() / kMinSplitKeys, 1, CeilDiv(2 * threads, tasks));
}

int64_t SplitKeys(const Problem& p, int64_t splits) {
  return RoundUp(CeilDiv(p.total_keys(), splits), kKeyBlock);
}

template <typename Real>
constexpr DType RealType() {
  return sizeof(Real) == 8 ? DType::kFloat64 : DType::kFloat32;
}

// The partial results of split keys, in the shared workspace: O and lse of each query row and part.
template <typename Real>
class Parts {
 public:
  Parts(const Problem& p, int64_t splits, std::byte* workspace)
      : splits_(splits),
        value_head_size_(p.value_head_size),
        lse_(reinterpret_cast<Real*>(workspace)),
        output_(lse_ + Rows(p) * splits) {}

  static int64_t Bytes(const Problem& p, int64_t splits) {
    return RoundUp(Rows(p) * splits * (1 + p.value_head_size) * int64_t{sizeof(Real)},
                   kVectorBytes);
  }

  Real* Lse(int64_t row, int64_t part) const { return lse_ + row * splits_ + part; }
  Real* Output(int64_t row, int64_t part) const {
    return output_ + (row * splits_ + part) * value_head_size_;
  }

  // Merges the parts of a row into the first, and then the sink.
  void Merge(int64_t row, Real sink) const {
    const absl::Span<Real> first(Output(row, 0), value_head_size_);
    for (int64_t part = 1; part < splits_; ++part) {
      MergeInto(first, *Lse(row, 0), absl::Span<const Real>(Output(row, part), value_head_size_),
                *Lse(row, part));
    }
    MergeSink(first, *Lse(row, 0), sink);
  }

 private:
  static int64_t Rows(const Problem& p) { return p.batch * p.query_heads * p.query_length; }

  int64_t splits_;
  int64_t value_head_size_;
  Real* lse_;
  Real* output_;
};

template <typename Real>
void FoldRow(const Problem& p, const Arguments& a, int64_t b, int64_t h, int64_t i,
             const Real* output, Real lse) {
  const auto state = [&](const MutableTensorView& view) {
    return reinterpret_cast<Real*>(view.Row(b, h, i));
  };
  FoldInto(absl::Span<Real>(state(a.state.output), p.value_head_size), *state(a.state.max),
           *state(a.state.sum), absl::Span<const Real>(output, p.value_head_size), lse);
}

// The results of a task's rows in the worker's workspace, before they are folded into the state.
template <typename Real>
class Unfolded {
 public:
  Unfolded(const Problem& p, int64_t rows, std::byte* memory)
      : value_head_size_(p.value_head_size),
        lse_(reinterpret_cast<Real*>(memory)),
        output_(lse_ + rows) {}

  static int64_t Bytes(const Problem& p, int64_t rows) {
    return RoundUp(rows * (1 + p.value_head_size) * int64_t{sizeof(Real)}, kVectorBytes);
  }

  void Redirect(FlashRow& row, int64_t index) const {
    row.output = reinterpret_cast<std::byte*>(Output(index));
    row.lse = reinterpret_cast<std::byte*>(lse_ + index);
  }

  // REQUIRES: `rows` are the redirected ones, in order.
  void Fold(const Problem& p, const Arguments& a, int64_t b,
            absl::Span<const FlashRow> rows) const {
    const int64_t first_query = p.section ? p.section->first_query : 0;
    for (size_t n = 0; n < rows.size(); ++n) {
      FoldRow<Real>(p, a, b, rows[n].head, rows[n].index - first_query, Output(n), lse_[n]);
    }
  }

 private:
  Real* Output(int64_t index) const { return output_ + index * value_head_size_; }

  int64_t value_head_size_;
  Real* lse_;
  Real* output_;
};

int64_t UnfoldedBytes(const Problem& p, int64_t rows) {
  return AccumulatesInFp64(p) ? Unfolded<double>::Bytes(p, rows) : Unfolded<float>::Bytes(p, rows);
}

// Restricts a row to the task's split of the keys and redirects its result to that split's buffers.
template <typename Real>
void Narrow(FlashRow& row, const FlashTask& task, const Parts<Real>& parts, int64_t index,
            int64_t part) {
  ScoreRow& keys = row.score;
  keys.sink = -std::numeric_limits<double>::infinity();  // merged once, by MergeHead()
  keys.begin = std::clamp(keys.begin, task.part.begin, task.part.end);
  keys.end = std::clamp(keys.end, keys.begin, task.part.end);
  row.output = reinterpret_cast<std::byte*>(parts.Output(index, part));
  row.lse = reinterpret_cast<std::byte*>(parts.Lse(index, part));
}

// Tasks rotate the keys that they read, unless others read the same keys, they are returned,
// threads would idle, or their angles need more memory.
KeyRotation ChooseKeyRotation(const Problem& p, const Split& split, int64_t key_splits,
                              int threads) {
  if (!p.rotates_keys()) return KeyRotation::kStored;
  const bool shared = split.query_tasks * split.head_tasks > 1 || Gathers(p);
  const bool on_read = !shared && !p.wants_present &&
                       AttentionTasks(p, split) * key_splits >= threads &&
                       Rotation::SharedBytes(p, KeyRotation::kOnRead) <= Rotation::SharedBytes(p);
  return on_read ? KeyRotation::kOnRead : KeyRotation::kStored;
}

// The rotated queries of a task, which follow the angles of a worker in the stage before.
int64_t RotatedQueryBytes(const Problem& p, int64_t rows, KeyRotation keys) {
  if (!p.has_rotary()) return 0;
  return std::max(Rotation::WorkerBytes(p, keys),
                  RoundUp(rows * p.head_size * SizeOf(p.dtype), kVectorBytes));
}

// The bytes of each part of the shared workspace, in this order.
struct SharedLayout {
  int64_t parts = 0, relative = 0, vectors = 0, rotation = 0;

  int64_t vectors_begin() const { return parts + relative; }
  int64_t rotation_begin() const { return vectors_begin() + vectors; }
  int64_t bytes() const { return rotation_begin() + rotation; }
};

// The bytes of each part of a worker's workspace, in this order.
struct WorkerLayout {
  int64_t rows = 0, scratch = 0, tile_scratch = 0, selection = 0, unfolded = 0, queries = 0;

  int64_t queries_begin() const { return rows + scratch + tile_scratch + selection + unfolded; }
  int64_t bytes() const { return queries_begin() + queries; }
};

// Depends only on the problem's shape, not on the position of a section in the full problem: the
// chunks of a ChunkedPlan share one.
class CpuPlan final : public BackendPlan {
 public:
  CpuPlan(const Problem& p, absl::string_view isa, int threads)
      : kernels(Kernels(isa)),
        fp64(AccumulatesInFp64(p)),
        query_block(ChooseQueryRows(p, threads)),
        split(Gathers(p) ? SplitSelecting(p, threads) : SplitRows(p, query_block)),
        key_splits(ChooseKeySplits(p, AttentionTasks(p, split), threads)),
        key_rotation(ChooseKeyRotation(p, split, key_splits, threads)) {
    const int64_t rows_per_task = split.rows_per_task();
    if (key_splits > 1) {
      shared.parts =
          fp64 ? Parts<double>::Bytes(p, key_splits) : Parts<float>::Bytes(p, key_splits);
    }
    if (p.has_relative()) {
      shared.relative = RoundUp(
          fp64 ? RelativeTables<double>::Bytes(p) : RelativeTables<float>::Bytes(p), kVectorBytes);
      fills_relative = threads == 1 && p.folds;
      if (!fills_relative) relative_tables = RelativeTables<float>::Count(p);
    }
    if (p.has_relative_vectors()) {
      shared.vectors = RoundUp(
          fp64 ? VectorTables<double>::Bytes(p) : VectorTables<float>::Bytes(p), kVectorBytes);
      vector_tables = VectorTables<float>::Count(p);
    }
    if (p.has_rotary()) shared.rotation = Rotation::SharedBytes(p, key_rotation);
    const FlashTask task = LargestTask(p, split);
    const bool has_tiles = kernels.tile_scratch_bytes != nullptr && !fp64;
    worker = {.rows = RowTableBytes(p, rows_per_task),
              .scratch = kernel().scratch_bytes(task),
              .tile_scratch = has_tiles ? kernels.tile_scratch_bytes(task) : 0,
              .selection = SelectionBytes(p, split),
              .unfolded = p.folds && key_splits == 1 ? UnfoldedBytes(p, rows_per_task) : 0,
              .queries = RotatedQueryBytes(p, rows_per_task, key_rotation)};
  }

  std::string Describe() const override {
    const int64_t key_block = worker.tile_scratch > 0 ? kTileKeyBlock : kKeyBlock;
    return absl::StrCat("q", query_block, " k", key_block, " s", key_splits);
  }

  const FlashKernel& kernel() const { return fp64 ? kernels.flash_fp64 : kernels.flash_fp32; }

  // The number of tasks of the first stage; 0: there is no such stage.
  int64_t tables() const { return relative_tables + vector_tables; }

  const KernelTable& kernels;
  const bool fp64;            // accumulates in fp64
  const int64_t query_block;  // maximum query rows of a task
  const Split split;
  const int64_t key_splits;
  const KeyRotation key_rotation;
  // Whether tasks fill the tables of their heads themselves. No other thread reads them, and a part
  // of the keys is computed without those of other heads.
  bool fills_relative = false;
  // Filled by the first stage, in this order.
  int64_t relative_tables = 0;
  int64_t vector_tables = 0;
  SharedLayout shared;
  WorkerLayout worker;
};

const CpuPlan& CpuPlanOf(const Plan& plan) {
  return static_cast<const CpuPlan&>(*plan.backend_plan);
}

template <typename Real>
void MergeHead(const Plan& plan, const Arguments& a, std::byte* workspace, int64_t task) {
  const Problem& p = plan.problem;
  const Parts<Real> parts(p, CpuPlanOf(plan).key_splits, workspace);
  const int64_t b = task / p.query_heads;
  const int64_t h = task % p.query_heads;
  for (int64_t i = 0; i < p.query_length; ++i) {
    const int64_t row = RowIndex(p, b, h, i);
    parts.Merge(row, static_cast<Real>(SinkOf(p, a, h)));
    if (p.folds) {
      FoldRow<Real>(p, a, b, h, i, parts.Output(row, 0), *parts.Lse(row, 0));
      continue;
    }
    for (int64_t d = 0; d < p.value_head_size; ++d) {
      StoreElement(a.outputs[Role::kY].Row(b, h, i), p.dtype, d, parts.Output(row, 0)[d]);
    }
    if (p.wants_lse) {
      StoreElement(a.outputs[Role::kLse].Row(b, h, i), p.lse_dtype(), 0, *parts.Lse(row, 0));
    }
  }
}

Rotation RotationOf(const Plan& plan, std::byte* workspace) {
  const CpuPlan& cpu = CpuPlanOf(plan);
  return {plan.problem, workspace + cpu.shared.rotation_begin(), cpu.kernels.rotate,
          cpu.key_rotation};
}

// The worker's part of the workspace.
std::byte* OwnPart(const Plan& plan, std::byte* workspace, int worker) {
  return workspace + plan.shared_workspace_bytes + worker * plan.worker_workspace_bytes;
}

FlashSelection SelectionOf(const Problem& p, const Arguments& a, const TaskPlace& place) {
  const TensorView& indices = a.inputs[Role::kSelectedIndices];
  const int64_t head = p.selected->heads == 1 ? 0 : place.kv_head;
  return {
      .rows = place.end_head - place.first_head,
      .indices = p.selected->count == 0 ? nullptr : indices.Row(place.b, head, place.first_query),
      .count = p.selected->count,
      .step = indices.strides[3],
      .query_bytes = indices.strides[2] * SizeOf(DType::kInt32)};
}

template <typename Real>
void RunFlash(const Plan& plan, const Arguments& a, std::byte* workspace, int64_t task, int worker,
              const Checkpoint& checkpoint) {
  const Problem& p = plan.problem;
  const CpuPlan& cpu = CpuPlanOf(plan);
  const int64_t splits = cpu.key_splits;
  const TaskPlace place = PlaceOf(p, cpu.split, splits, task);
  const Parts<Real> parts(p, splits, workspace);
  const RelativeTables<Real> relative(p, workspace + cpu.shared.parts);
  std::byte* const begin = OwnPart(plan, workspace, worker);
  auto* rows = reinterpret_cast<FlashRow*>(begin);

  FlashTask flash = TaskOf(p, a, place);
  flash.part.begin = std::min(place.part * SplitKeys(p, splits), p.total_keys());
  flash.part.end = std::min(flash.part.begin + SplitKeys(p, splits), p.total_keys());
  flash.rows = rows;
  flash.checkpoint = checkpoint;
  flash.scratch = begin + cpu.worker.rows;
  flash.tile_scratch = flash.scratch + cpu.worker.scratch;
  if (p.has_relative_vectors()) {
    flash.vectors = VectorTables<Real>(p, workspace + cpu.shared.vectors_begin()).For(a, place.b);
  }
  std::byte* const selection = flash.tile_scratch + cpu.worker.tile_scratch;
  flash.visible = {flash.part.end, flash.part.begin};
  const Unfolded<Real> unfolded(p, cpu.split.rows_per_task(), selection + cpu.worker.selection);
  const bool folds_here = p.folds && splits == 1;
  if (splits > 1 || p.folds) {
    flash.outputs.element = flash.outputs.lse_element = ElementOf(RealType<Real>());
  }
  const SparseRows sparse_rows(p, a, place, rows, cpu.split.rows_per_task(), selection);
  flash.sparse = sparse_rows.exist();
  const auto add_row = [&](int64_t h, int64_t i) {
    FlashRow& row = *new (&rows[flash.row_count]) FlashRow(RowOf(p, a, place.b, h, i));
    if (p.has_relative()) row.score.relative = relative.Row(place.b, h, i);
    if (flash.sparse) row.score.sparse = sparse_rows.Make(flash.row_count, h, i);
    if (folds_here) unfolded.Redirect(row, flash.row_count);
    ++flash.row_count;
    if (splits > 1) Narrow(row, flash, parts, RowIndex(p, place.b, h, i), place.part);
    if (row.score.begin == row.score.end) return;
    flash.visible.begin = std::min(flash.visible.begin, row.score.begin);
    flash.visible.end = std::max(flash.visible.end, row.score.end);
  };
  const bool gathers = Gathers(p);
  ForEachRow(place, gathers, add_row);
  if (gathers) flash.selection = SelectionOf(p, a, place);
  // Nothing to fold: these rows see no key of the chunk.
  if (folds_here && !p.score_output && flash.visible.begin >= flash.visible.end) return;
  for (int64_t h = place.first_head; cpu.fills_relative && h < place.end_head; ++h) {
    relative.Fill(a, relative.TableOf(place.b, h));
  }
  if (p.has_rotary()) {
    Rotate(p, a, RotationOf(plan, workspace), place.b, begin + cpu.worker.queries_begin(), flash,
           rows);
  }
  const bool done = cpu.kernel().run(flash);
  if (done && folds_here) {
    unfolded.Fold(p, a, place.b, {rows, static_cast<size_t>(flash.row_count)});
  }
}

// Fills a table of biases or vectors by distance.
template <typename Real>
void FillTable(const Plan& plan, const Arguments& a, std::byte* workspace, int64_t task) {
  const CpuPlan& cpu = CpuPlanOf(plan);
  if (task < cpu.relative_tables) {
    return RelativeTables<Real>(plan.problem, workspace + cpu.shared.parts).Fill(a, task);
  }
  VectorTables<Real>(plan.problem, workspace + cpu.shared.vectors_begin())
      .Fill(a, task - cpu.relative_tables);
}

class Cpu final : public Backend {
 public:
  absl::string_view name() const override { return "cpu"; }
  absl::Span<const InstructionSet> instruction_sets() const override { return InstructionSets(); }
  bool Reads(Source) const override { return true; }
  absl::Status Supports(const Problem& p) const override {
    return p.backward ? SupportsBackward(p) : absl::OkStatus();
  }

  void PlanTasks(Plan& plan) const override {
    const Problem& p = plan.problem;
    if (p.backward) return PlanBackward(plan);
    if (p.has_rotary()) plan.present_stage = 1;
    if (p.empty()) {
      if (p.has_rotary()) {
        plan.stages.push_back(Rotation::Tasks(p));
        plan.shared_workspace_bytes = Rotation::SharedBytes(p);
        plan.worker_workspace_bytes = Rotation::WorkerBytes(p);
      }
      plan.stages.push_back(PresentTasks(p));
      return;
    }
    const auto cpu = std::make_shared<const CpuPlan>(p, plan.isa, plan.threads);
    if (p.has_rotary()) plan.stages.push_back(Rotation::Tasks(p, cpu->key_rotation));
    if (cpu->tables() > 0) plan.stages.push_back(cpu->tables());
    plan.stages.push_back(AttentionTasks(p, cpu->split) * cpu->key_splits);
    if (cpu->key_splits > 1) plan.stages.push_back(p.batch * p.query_heads);
    plan.stages[plan.present_stage] += PresentTasks(p);
    plan.shared_workspace_bytes = cpu->shared.bytes();
    plan.worker_workspace_bytes = cpu->worker.bytes();
    plan.state_dtype = cpu->fp64 ? DType::kFloat64 : DType::kFloat32;
    plan.flops = CountFlops(p);
    plan.backend_plan = cpu;
  }

  void RunTask(const Plan& plan, const Arguments& a, std::byte* workspace, int stage, int64_t task,
               int worker, const Checkpoint& checkpoint) const override {
    const Problem& p = plan.problem;
    if (p.backward) {
      return RunBackwardTask(plan, a, workspace, stage, task, worker, checkpoint);
    }
    if (!p.has_rotary()) {
      return RunTaskAfterRotation(plan, a, workspace, stage, task, worker, checkpoint);
    }
    const Rotation rotation =
        p.empty() ? Rotation(p, workspace, RotateRow) : RotationOf(plan, workspace);
    if (stage > 0) {
      const Arguments rotated = rotation.WithKeys(a);
      return RunTaskAfterRotation(plan, rotated, workspace, stage - 1, task, worker, checkpoint);
    }
    std::byte* const own = OwnPart(plan, workspace, worker);
    rotation.RunTask(a, task, p.empty() ? own : own + CpuPlanOf(plan).worker.queries_begin(),
                     checkpoint);
  }

 private:
  static void RunTaskAfterRotation(const Plan& plan, const Arguments& a, std::byte* workspace,
                                   int stage, int64_t task, int worker,
                                   const Checkpoint& checkpoint) {
    const Problem& p = plan.problem;
    if (stage == 0) {
      const int64_t present_tasks = PresentTasks(p);
      if (task < present_tasks) return RunPresentTask(p, a, task);
      task -= present_tasks;
    }
    CpuPlanOf(plan).fp64 ? RunStage<double>(plan, a, workspace, stage, task, worker, checkpoint)
                         : RunStage<float>(plan, a, workspace, stage, task, worker, checkpoint);
  }

  // The tables by distance, if the problem has them; attention; the merge of split keys.
  template <typename Real>
  static void RunStage(const Plan& plan, const Arguments& a, std::byte* workspace, int stage,
                       int64_t task, int worker, const Checkpoint& checkpoint) {
    if (CpuPlanOf(plan).tables() > 0 && stage-- == 0)
      return FillTable<Real>(plan, a, workspace, task);
    if (stage == 0) return RunFlash<Real>(plan, a, workspace, task, worker, checkpoint);
    MergeHead<Real>(plan, a, workspace, task);
  }
};

}  // namespace
}  // namespace cpu

const Backend& CpuBackend() {
  static const cpu::Cpu backend;
  return backend;
}

}  // namespace rapt
