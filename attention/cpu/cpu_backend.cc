#include "attention/cpu/cpu_backend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <string>

#include "absl/strings/str_cat.h"
#include "attention/cpu/instruction_sets.h"
#include "attention/cpu/kernels.h"
#include "attention/half.h"
#include "attention/mechanism/softmax/softmax_state.h"
#include "attention/philox.h"
#include "attention/present.h"
#include "attention/score/relative_tables.h"
#include "attention/score/score_params.h"
#include "base/round_up.h"

namespace rapt {
namespace cpu {

void DropoutKeepsOutOfLine(double p, uint64_t seed, int64_t b, int64_t h, int64_t i, int64_t begin,
                           int64_t count, bool* keep) {
  DropoutKeeps(p, seed, b, h, i, begin, count, keep);
}

namespace {

// The rows of a task are a multiple of this, which is a multiple of every kernel's register block.
constexpr int64_t kRowStep = 12;
constexpr int64_t kMaxQueryRows = kMostRowBlocks * kRowBlock;
// Minimum number of tasks per thread, so that threads do not idle while the last tasks finish.
constexpr int64_t kTasksPerThread = 4;

// Shorter key splits cost more to merge than they gain.
constexpr int64_t kMinSplitKeys = 1024;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How the g * Sq query rows of a key/value head are divided into tasks: blocks of queries of one
// head, or for a short Sq several whole heads, so that K and V are read once for all of them.
struct Split {
  int64_t queries_per_task = 0;
  int64_t heads_per_task = 0;
  int64_t query_tasks = 0;
  int64_t head_tasks = 0;

  int64_t rows_per_task() const { return queries_per_task * heads_per_task; }
};

Split SplitRows(const Problem& p, int64_t query_rows) {
  Split split;
  // Tasks of about equal size.
  const int64_t blocks = CeilDiv(p.query_length, query_rows);
  split.queries_per_task =
      std::min(p.query_length, RoundUp(CeilDiv(p.query_length, blocks), kRowStep));
  split.heads_per_task =
      std::clamp<int64_t>(query_rows / split.queries_per_task, 1, p.group_size());
  split.query_tasks = CeilDiv(p.query_length, split.queries_per_task);
  split.head_tasks = CeilDiv(p.group_size(), split.heads_per_task);
  return split;
}

int64_t AttentionTasks(const Problem& p, const Split& split) {
  return p.empty() ? 0 : p.batch * p.kv_heads * split.query_tasks * split.head_tasks;
}

// Large blocks pack K and V less often; small ones balance the load better.
int64_t ChooseQueryRows(const Problem& p, int threads) {
  int64_t rows = kMaxQueryRows;
  while (rows > kRowBlock && AttentionTasks(p, SplitRows(p, rows)) < threads * kTasksPerThread) {
    rows /= 2;
  }
  return rows;
}

// Split-KV: with fewer tasks than threads, as in decoding with few heads, the keys are split and
// the partial results are merged by their lse. Weights need the final lse before the first one can
// be written, so they are not split.
int64_t ChooseKeySplits(const Problem& p, int64_t tasks, int threads) {
  if (tasks >= threads || p.score_output == ScoreOutput::kWeights) return 1;
  return std::clamp<int64_t>(p.total_keys() / kMinSplitKeys, 1, CeilDiv(2 * threads, tasks));
}

int64_t SplitKeys(const Problem& p, int64_t splits) {
  return RoundUp(CeilDiv(p.total_keys(), splits), kKeyBlock);
}

// A scale, softcap, mask or bias outside fp32's range needs fp64 for the whole softmax: a finite
// mask must not become -inf.
bool AccumulatesInFp64(const Problem& p) {
  const auto beyond_fp32 = [](double x) {
    return x != 0 && (std::fabs(x) > 1e30 || std::fabs(x) < 1e-30);
  };
  return p.accumulator() == DType::kFloat64 || beyond_fp32(p.effective_scale()) ||
         beyond_fp32(p.softcap) || (p.mask && p.mask->dtype == DType::kFloat64) ||
         (p.bias && p.bias->dtype == DType::kFloat64);
}

DType AccumulatorOf(const Problem& p) {
  return AccumulatesInFp64(p) ? DType::kFloat64 : DType::kFloat32;
}

// Must match the layout in Flash's constructor.
int64_t FlashScratchBytes(const Problem& p, int64_t rows) {
  const int64_t real = AccumulatesInFp64(p) ? 8 : 4;
  const int64_t lanes_dv = RoundUp(p.value_head_size, kVectorBytes / real);
  const int64_t lanes_d = RoundUp(p.head_size, kVectorBytes / real);
  const int64_t arrays[] = {rows * lanes_d,
                            rows * lanes_dv,
                            rows,
                            rows,
                            p.head_size * kKeyBlock,
                            kKeyBlock * lanes_dv,
                            kRowBlock * kKeyBlock,
                            kRowBlock,
                            kFewRows * lanes_dv};
  int64_t bytes = 0;
  for (int64_t count : arrays) bytes += RoundUp(count * real, kVectorBytes);
  // Plus the buffer in which rows that are not contiguous are gathered.
  return bytes +
         RoundUp((1 + kGatheredRows) * std::max(p.head_size, p.value_head_size) * SizeOf(p.dtype),
                 kVectorBytes);
}

int64_t RowTableBytes(int64_t rows) {
  return RoundUp(rows * static_cast<int64_t>(sizeof(FlashRow)), kVectorBytes);
}

template <typename Real>
constexpr DType RealType() {
  return sizeof(Real) == 8 ? DType::kFloat64 : DType::kFloat32;
}

ScoreStage StageOf(std::optional<ScoreOutput> output) {
  if (!output) return ScoreStage::kNone;
  switch (*output) {
    case ScoreOutput::kScores:
      return ScoreStage::kScores;
    case ScoreOutput::kSoftcapped:
      return ScoreStage::kSoftcapped;
    case ScoreOutput::kBiased:
      return ScoreStage::kBiased;
    default:
      return ScoreStage::kWeights;
  }
}

// Returns the tensor's bytes starting at `offset`.
FlashBytes BytesOf(const TensorView& view, int64_t offset) {
  if (view.slices == nullptr) return {view.data + offset, nullptr, 0, 0};
  const SlicedBytes& sliced = *view.slices;
  return {nullptr, sliced.slices.data(), static_cast<int64_t>(sliced.slices.size()),
          sliced.offset + offset};
}

// Sources and rows are built in place: a copy of one that was just written would wait for its
// stores, which tiny problems feel.

// The rows of head (b, h), as rows from `begin` on. REQUIRES: `source` is all zeros.
void SetSource(const TensorView& view, int64_t b, int64_t h, int64_t begin,
               KeyValueSource& source) {
  source.begin = begin;
  source.end = begin + view.dims[2];
  source.stride = view.strides[2] * SizeOf(view.dtype);
  if (view.pages == nullptr) {
    source.bytes = BytesOf(view, view.RowOffset(b, h, 0));
    return;
  }
  const PagedRows& paged = *view.pages;
  source.bytes.offset = paged.offset + view.RowOffset(0, h, 0);
  source.pages = paged.pages.data() + b * paged.batch_pages;
  source.page_rows = paged.page_rows;
  source.first_row = paged.first_row;
}

// Past and new rows. REQUIRES: `keys` is all zeros.
void SetKeys(const TensorView& past, int64_t past_count, const TensorView& now, int64_t b,
             int64_t h, FlashKeys& keys) {
  KeyValueSource* next = keys.sources;
  if (past_count > 0) SetSource(past, b, h, 0, *next++);
  if (now.dims[2] > 0) SetSource(now, b, h, past_count, *next);
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

int64_t RowIndex(const Problem& p, int64_t b, int64_t h, int64_t i) {
  return (b * p.query_heads + h) * p.query_length + i;
}

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
  void Fold(const Problem& p, const Arguments& a, int64_t b, absl::Span<const FlashRow> rows,
            int64_t first_query) const {
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

FlashRow RowOf(const Problem& p, const Arguments& a, int64_t b, int64_t h, int64_t i) {
  return {
      .query = a.inputs[Role::kQ].RowOffset(b, h, i),
      .output = p.folds ? nullptr : a.outputs[Role::kY].Row(b, h, i),
      .lse = p.wants_lse && !p.folds ? a.outputs[Role::kLse].Row(b, h, i) : nullptr,
      .scores = p.score_output ? a.outputs[Role::kScores].Row(b, h, i) : nullptr,
      .score = ScoreRowOf(p, a, b, h, i),
      .head = h,
      .index = i + (p.section ? p.section->first_query : 0),
  };
}

// Restricts a row to the task's split of the keys and redirects its result to that split's buffers.
template <typename Real>
void Narrow(FlashRow& row, const FlashTask& task, const Parts<Real>& parts, int64_t index,
            int64_t part) {
  ScoreRow& keys = row.score;
  keys.sink = -std::numeric_limits<double>::infinity();  // merged once, by MergeHead()
  keys.begin = std::clamp(keys.begin, task.part_begin, task.part_end);
  keys.end = std::clamp(keys.end, keys.begin, task.part_end);
  row.output = reinterpret_cast<std::byte*>(parts.Output(index, part));
  row.lse = reinterpret_cast<std::byte*>(parts.Lse(index, part));
}

// The fields of a task that depend only on the problem.
FlashTask ShapeOf(const Problem& p) {
  FlashTask task = {};
  task.key_count = p.total_keys();
  task.head_size = p.head_size;
  task.value_head_size = p.value_head_size;
  task.element = ElementOf(p.dtype);
  task.output_element = task.element;
  task.lse_element = ElementOf(p.lse_dtype());
  task.score_stage = StageOf(p.score_output);
  if (p.dropout) {
    task.dropout = p.dropout->probability;
    task.seed = p.dropout->seed;
  }
  return task;
}

// The fields of a task that are the same for every block of rows.
FlashTask TaskOf(const Problem& p, const Arguments& a, int64_t b, int64_t kv_head) {
  FlashTask task = ShapeOf(p);
  task.queries = BytesOf(a.inputs[Role::kQ], 0);
  SetKeys(a.inputs[Role::kPastKey], p.past_length, a.inputs[Role::kK], b, kv_head, task.keys);
  SetKeys(PastValuesOf(p, a), p.past_length, ValuesOf(p, a), b, kv_head, task.values);
  task.score = ScoreParamsOf(p, a, AccumulatorOf(p));
  task.batch = b;
  task.first_key = p.section ? p.section->first_key : 0;
  return task;
}

int64_t TileScratchBytes(const Problem& p, const KernelTable& kernels, int64_t rows) {
  if (kernels.tile_scratch_bytes == nullptr || AccumulatesInFp64(p)) return 0;
  FlashTask task = ShapeOf(p);
  task.score = ScoreParamsOf(p, {}, AccumulatorOf(p));
  task.row_count = rows;
  return kernels.tile_scratch_bytes(task);
}

// The bytes of each part of the shared workspace, in this order.
struct SharedLayout {
  int64_t parts = 0, relative = 0;

  int64_t bytes() const { return parts + RoundUp(relative, kVectorBytes); }
};

// The bytes of each part of a worker's workspace, in this order.
struct WorkerLayout {
  int64_t rows = 0, scratch = 0, tile_scratch = 0, unfolded = 0;

  int64_t bytes() const { return rows + scratch + tile_scratch + unfolded; }
};

// Depends only on the problem's shape, not on the position of a section in the full problem: the
// chunks of a ChunkedPlan share one.
class CpuPlan final : public BackendPlan {
 public:
  CpuPlan(const Problem& p, absl::string_view isa, int threads)
      : kernels(Kernels(isa)),
        fp64(AccumulatesInFp64(p)),
        query_block(ChooseQueryRows(p, threads)),
        split(SplitRows(p, query_block)),
        key_splits(ChooseKeySplits(p, AttentionTasks(p, split), threads)) {
    const int64_t rows_per_task = split.rows_per_task();
    if (key_splits > 1) {
      shared.parts =
          fp64 ? Parts<double>::Bytes(p, key_splits) : Parts<float>::Bytes(p, key_splits);
    }
    if (p.has_relative()) {
      shared.relative = fp64 ? RelativeTables<double>::Bytes(p) : RelativeTables<float>::Bytes(p);
      relative_tables = RelativeTables<float>::Count(p);
    }
    worker = {.rows = RowTableBytes(rows_per_task),
              .scratch = FlashScratchBytes(p, rows_per_task),
              .tile_scratch = TileScratchBytes(p, kernels, rows_per_task),
              .unfolded = p.folds && key_splits == 1 ? UnfoldedBytes(p, rows_per_task) : 0};
  }

  std::string Describe() const override {
    const int64_t key_block = worker.tile_scratch > 0 ? kTileKeyBlock : kKeyBlock;
    return absl::StrCat("q", query_block, " k", key_block, " s", key_splits);
  }

  const KernelTable& kernels;
  const bool fp64;            // accumulates in fp64
  const int64_t query_block;  // maximum query rows of a task
  const Split split;
  const int64_t key_splits;
  int64_t relative_tables = 0;
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

// Counts all visible pairs. Key lengths are not known yet and assumed to be full.
double CountFlops(const Problem& p) {
  const int64_t key_length = p.section ? p.section->key_length : p.key_length;
  double pairs = 0;
  // The visible range moves by one key per query, so sampling it is accurate enough.
  const int64_t step = std::max<int64_t>(1, p.query_length / 64);
  for (int64_t i = 0; i < p.query_length; i += step) {
    const KeyRange range = VisibleKeys(p, {&key_length, 1}, 0, i);
    pairs += static_cast<double>(range.end - range.begin) *
             static_cast<double>(std::min(step, p.query_length - i));
  }
  return 2.0 * static_cast<double>(p.batch) * static_cast<double>(p.query_heads) * pairs *
         static_cast<double>(p.head_size + p.value_head_size);
}

// The rows and keys of a task of the first stage.
struct TaskPlace {
  int64_t b, kv_head, first_head, end_head, first_query, end_query, part;
};

TaskPlace PlaceOf(const Problem& p, const Split& split, int64_t key_splits, int64_t task) {
  TaskPlace place;
  place.part = task % key_splits;
  task /= key_splits;
  // The last queries go first: under a causal mask they see the most keys and take longest.
  const int64_t query_task = split.query_tasks - 1 - task % split.query_tasks;
  task /= split.query_tasks;
  const int64_t head_task = task % split.head_tasks;
  task /= split.head_tasks;
  place.kv_head = task % p.kv_heads;
  place.b = task / p.kv_heads;
  const int64_t group_begin = place.kv_head * p.group_size();
  place.first_head = group_begin + head_task * split.heads_per_task;
  place.end_head = std::min(place.first_head + split.heads_per_task, group_begin + p.group_size());
  place.first_query = query_task * split.queries_per_task;
  place.end_query = std::min(place.first_query + split.queries_per_task, p.query_length);
  return place;
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
  std::byte* begin = workspace + plan.shared_workspace_bytes + worker * plan.worker_workspace_bytes;
  auto* rows = reinterpret_cast<FlashRow*>(begin);

  FlashTask flash = TaskOf(p, a, place.b, place.kv_head);
  flash.part_begin = std::min(place.part * SplitKeys(p, splits), p.total_keys());
  flash.part_end = std::min(flash.part_begin + SplitKeys(p, splits), p.total_keys());
  flash.rows = rows;
  flash.checkpoint = checkpoint;
  flash.scratch = begin + cpu.worker.rows;
  flash.tile_scratch = flash.scratch + cpu.worker.scratch;
  flash.begin = flash.part_end;
  flash.end = flash.part_begin;
  const Unfolded<Real> unfolded(p, cpu.split.rows_per_task(),
                                flash.tile_scratch + cpu.worker.tile_scratch);
  const bool folds_here = p.folds && splits == 1;
  if (splits > 1 || p.folds) flash.output_element = flash.lse_element = ElementOf(RealType<Real>());
  for (int64_t h = place.first_head; h < place.end_head; ++h) {
    for (int64_t i = place.first_query; i < place.end_query; ++i) {
      FlashRow& row = *new (&rows[flash.row_count]) FlashRow(RowOf(p, a, place.b, h, i));
      if (p.has_relative()) row.score.relative = relative.Row(place.b, h, i);
      if (folds_here) unfolded.Redirect(row, flash.row_count);
      ++flash.row_count;
      if (splits > 1) Narrow(row, flash, parts, RowIndex(p, place.b, h, i), place.part);
      if (row.score.begin == row.score.end) continue;
      flash.begin = std::min(flash.begin, row.score.begin);
      flash.end = std::max(flash.end, row.score.end);
    }
  }
  // Nothing to fold: these rows see no key of the chunk.
  if (folds_here && !p.score_output && flash.begin >= flash.end) return;
  const bool done = (sizeof(Real) == 8 ? cpu.kernels.flash_fp64 : cpu.kernels.flash_fp32)(flash);
  if (done && folds_here) {
    unfolded.Fold(p, a, place.b, {rows, static_cast<size_t>(flash.row_count)},
                  p.section ? p.section->first_query : 0);
  }
}

class Cpu final : public Backend {
 public:
  absl::string_view name() const override { return "cpu"; }
  absl::Span<const InstructionSet> instruction_sets() const override { return InstructionSets(); }
  bool Reads(Source) const override { return true; }
  absl::Status Supports(const Problem&) const override { return absl::OkStatus(); }

  void PlanTasks(Plan& plan) const override {
    const Problem& p = plan.problem;
    if (p.empty()) {
      plan.stages = {PresentTasks(p)};
      return;
    }
    const auto cpu = std::make_shared<const CpuPlan>(p, plan.isa, plan.threads);
    if (p.has_relative()) plan.stages.push_back(cpu->relative_tables);
    plan.stages.push_back(AttentionTasks(p, cpu->split) * cpu->key_splits);
    if (cpu->key_splits > 1) plan.stages.push_back(p.batch * p.query_heads);
    plan.stages[0] += PresentTasks(p);
    plan.shared_workspace_bytes = cpu->shared.bytes();
    plan.worker_workspace_bytes = cpu->worker.bytes();
    plan.state_dtype = cpu->fp64 ? DType::kFloat64 : DType::kFloat32;
    plan.flops = CountFlops(p);
    plan.backend_plan = cpu;
  }

  void RunTask(const Plan& plan, const Arguments& a, std::byte* workspace, int stage, int64_t task,
               int worker, const Checkpoint& checkpoint) const override {
    const Problem& p = plan.problem;
    if (stage == 0) {
      const int64_t present_tasks = PresentTasks(p);
      if (task < present_tasks) return RunPresentTask(p, a, task);
      task -= present_tasks;
    }
    CpuPlanOf(plan).fp64 ? RunStage<double>(plan, a, workspace, stage, task, worker, checkpoint)
                         : RunStage<float>(plan, a, workspace, stage, task, worker, checkpoint);
  }

 private:
  // The tables of biases by distance, if the problem has them; attention; the merge of split keys.
  template <typename Real>
  static void RunStage(const Plan& plan, const Arguments& a, std::byte* workspace, int stage,
                       int64_t task, int worker, const Checkpoint& checkpoint) {
    const Problem& p = plan.problem;
    if (p.has_relative() && stage-- == 0) {
      return RelativeTables<Real>(p, workspace + CpuPlanOf(plan).shared.parts).Fill(a, task);
    }
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
