#include "attention/cpu/backward.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "attention/cpu/flash_tasks.h"
#include "attention/cpu/instruction_sets.h"
#include "attention/cpu/kernels.h"
#include "attention/half.h"
#include "attention/mechanism/entmax/entmax.h"
#include "attention/rotary/rotate.h"
#include "attention/rotary/rotation.h"
#include "attention/score/relative_tables.h"
#include "attention/score/score_params.h"
#include "base/round_up.h"

namespace rapt::cpu {
namespace {

// The tasks of the main stage that a problem has at least, if its rows allow it: enough for the
// threads of most machines. More have more parts of dK and dV to add.
constexpr int64_t kTasks = 32;
// Queries and keys of a task that computes the gradient of a mask.
constexpr int64_t kMaskQueries = 96;
constexpr int64_t kMaskKeys = 512;
// Keys of a task that adds parts of dK and dV.
constexpr int64_t kSumKeys = 256;

bool Wants(const Problem& p, Role gradient) { return p.backward->gradients.contains(gradient); }

bool WantsKeys(const Problem& p) { return Wants(p, Role::kDK) || Wants(p, Role::kDPastKey); }

bool WantsValues(const Problem& p) {
  return Wants(p, Role::kDV) || Wants(p, Role::kDPastValue) || (p.values_in_keys && WantsKeys(p));
}

bool WantsDistances(const Problem& p) {
  return Wants(p, Role::kDAlibiSlopes) || Wants(p, Role::kDBiasTable) ||
         Wants(p, Role::kDRelativeBias);
}

bool WantsWeights(const Problem& p) { return Wants(p, Role::kDAdditiveWeight); }

Role DistanceGradient(const Problem& p) {
  if (p.bias_table) return Role::kDBiasTable;
  return p.relative_bias ? Role::kDRelativeBias : Role::kDAlibiSlopes;
}

Split SplitBackward(const Problem& p) {
  int64_t rows = kMaxQueryRows;
  while (rows > kRowBlock &&
         (AttentionTasks(p, SplitRows(p, rows)) < kTasks || HasTooManyCandidates(p, rows))) {
    rows /= 2;
  }
  return SplitRows(p, rows);
}

int64_t Align(int64_t bytes) { return RoundUp(bytes, kVectorBytes); }

// The first stages may be absent.
struct Stages {
  explicit Stages(const Problem& p)
      : rotation(p.has_rotary() ? 0 : -1),
        tables(p.has_relative() ? rotation + 1 : -1),
        rows(std::max(rotation, tables) + 1),
        sums(rows + 1) {}

  int rotation, tables, rows, sums;
};

// The tasks of the last stage, in this order.
struct SumTasks {
  explicit SumTasks(const Problem& p)
      : keys(WantsKeys(p) || WantsValues(p)
                 ? p.batch * p.kv_heads * CeilDiv(p.total_keys(), kSumKeys)
                 : 0),
        sinks(Wants(p, Role::kDHeadSink) ? p.query_heads : 0),
        weights(WantsWeights(p) ? p.additive_weight->heads : 0),
        distances(WantsDistances(p) ? DistanceTasks(p) : 0),
        mask(Wants(p, Role::kDMask) ? MaskTasks(p, *p.mask) : 0),
        bias(Wants(p, Role::kDBias) ? MaskTasks(p, *p.bias) : 0) {}

  // The heads of a table, and the batch rows of slopes.
  static int64_t DistanceTasks(const Problem& p) {
    if (p.relative_bias) return p.relative_bias->heads;
    return p.query_heads * (p.alibi_slopes ? p.alibi_slopes->batch : 1);
  }

  static int64_t MaskTasks(const Problem& p, const MaskShape& mask) {
    return mask.dims[0] * mask.dims[1] * QueryBlocks(p, mask) * KeyBlocks(mask);
  }

  static int64_t MaskQueries(const Problem& p) {
    return std::min(SplitBackward(p).queries_per_task, kMaskQueries);
  }
  static int64_t QueryBlocks(const Problem& p, const MaskShape& mask) {
    return mask.dims[2] == 1 ? 1 : CeilDiv(mask.dims[2], MaskQueries(p));
  }
  static int64_t KeyBlocks(const MaskShape& mask) { return CeilDiv(mask.dims[3], kMaskKeys); }

  int64_t count() const { return keys + sinks + weights + distances + mask + bias; }

  int64_t keys, sinks, weights, distances, mask, bias;
};

// The bytes of each part of the shared workspace, in this order.
struct SharedLayout {
  int64_t relative = 0, rotation = 0, statistics = 0, entmax = 0, keys = 0, values = 0;
  int64_t distances = 0, weights = 0;

  int64_t rotation_begin() const { return relative; }
  int64_t statistics_begin() const { return rotation_begin() + rotation; }
  int64_t entmax_begin() const { return statistics_begin() + statistics; }
  int64_t keys_begin() const { return entmax_begin() + entmax; }
  int64_t values_begin() const { return keys_begin() + keys; }
  int64_t distances_begin() const { return values_begin() + values; }
  int64_t weights_begin() const { return distances_begin() + distances; }
  int64_t bytes() const { return weights_begin() + weights; }
};

// The same of a worker's workspace. `sums` is used by tasks of the first and the last stage, and
// has the rows of dQ that are rotated back.
struct WorkerLayout {
  int64_t rows = 0, backward_rows = 0, scratch = 0, selection = 0, queries = 0, sums = 0;

  int64_t backward_rows_begin() const { return rows; }
  int64_t scratch_begin() const { return backward_rows_begin() + backward_rows; }
  int64_t selection_begin() const { return scratch_begin() + scratch; }
  int64_t queries_begin() const { return selection_begin() + selection; }
  int64_t sums_begin() const { return queries_begin() + queries; }
  int64_t bytes() const { return sums_begin() + sums; }
};

class BackwardPlan final : public BackendPlan {
 public:
  BackwardPlan(const Problem& p, absl::string_view isa)
      : kernels(Kernels(isa)),
        fp64(AccumulatesInFp64(p)),
        real(fp64 ? 8 : 4),
        split(SplitBackward(p)),
        blocks(split.query_tasks * split.head_tasks),
        parts(std::clamp<int64_t>(CeilDiv(kTasks, p.batch * p.kv_heads), 1, blocks)),
        key_row(Align(p.head_size * real)),
        value_row(Align(p.value_head_size * real)),
        distance_row(Align((p.query_length + p.total_keys() + kSlack) * real)) {
    const int64_t rows = p.batch * p.query_heads * p.query_length;
    const int64_t part_rows = p.batch * p.kv_heads * parts * p.total_keys();
    if (p.has_relative()) {
      shared.relative =
          Align(fp64 ? RelativeTables<double>::Bytes(p) : RelativeTables<float>::Bytes(p));
    }
    if (p.has_rotary()) shared.rotation = Rotation::SharedBytes(p, KeyRotation::kOnRead);
    shared.statistics = Align(rows * static_cast<int64_t>(sizeof(RowStatistics)));
    if (IsEntmax(p)) shared.entmax = Align(rows * static_cast<int64_t>(sizeof(EntmaxRow)));
    if (WantsKeys(p)) shared.keys = part_rows * key_row;
    if (WantsValues(p)) shared.values = part_rows * value_row;
    if (WantsDistances(p)) shared.distances = p.batch * p.query_heads * parts * distance_row;

    if (WantsWeights(p)) {
      shared.weights = p.batch * p.query_heads * parts * key_row;
    }

    const int64_t task_rows = split.rows_per_task();
    const FlashTask task = LargestTask(p, split);
    worker = {.rows = RowTableBytes(p, task_rows),
              .backward_rows = Align(task_rows * static_cast<int64_t>(sizeof(BackwardRow))),
              .scratch = kernel().scratch_bytes({.task = &task}),
              .selection = SelectionBytes(p, split),
              .queries = p.has_rotary() ? Align(task_rows * p.head_size * SizeOf(p.dtype)) : 0,
              .sums = SumBytes(p)};
  }

  std::string Describe() const override {
    return absl::StrCat("backward q", split.rows_per_task(), " k", kKeyBlock, " s", parts);
  }

  const BackwardKernel& kernel() const {
    return fp64 ? kernels.backward_fp64 : kernels.backward_fp32;
  }

  const KernelTable& kernels;
  const bool fp64;       // accumulates in fp64
  const int64_t real;    // the size of an accumulator
  const Split split;     // of rows into blocks
  const int64_t blocks;  // of a key/value head
  const int64_t parts;   // of dK and dV; part n is of blocks n, n + parts, ...
  // Bytes from one row of accumulators to the next.
  const int64_t key_row, value_row, distance_row;
  SharedLayout shared;
  WorkerLayout worker;

 private:
  // Numbers after the last distance that kernels may write 0 to.
  static constexpr int64_t kSlack = kVectorBytes;

  int64_t SumBytes(const Problem& p) const {
    int64_t bytes = Align(key_row + value_row);
    if (p.has_rotary()) {
      bytes = std::max(
          {bytes, Rotation::WorkerBytes(p, KeyRotation::kOnRead), split.rows_per_task() * key_row});
    }
    if (WantsDistances(p)) {
      bytes = std::max(bytes, Align(RelativeEntries(p) * int64_t{sizeof(double)}));
    }
    if (Wants(p, Role::kDMask) || Wants(p, Role::kDBias)) {
      bytes = std::max(bytes, SumTasks::MaskQueries(p) * (kMaskKeys + kSlack) * real);
    }
    return bytes;
  }
};

template <typename Real>
class Backward {
 public:
  Backward(const Plan& plan, const Arguments& a, std::byte* workspace, int worker,
           const Checkpoint& checkpoint)
      : p_(plan.problem),
        a_(a),
        plan_(static_cast<const BackwardPlan&>(*plan.backend_plan)),
        shared_(workspace),
        own_(workspace + plan.shared_workspace_bytes + worker * plan.worker_workspace_bytes),
        checkpoint_(checkpoint),
        relative_(p_, workspace) {}

  void FillTable(int64_t task) const { relative_.Fill(a_, task); }

  Rotation GetRotation() const {
    return {p_, shared_ + plan_.shared.rotation_begin(), plan_.kernels.rotate,
            KeyRotation::kOnRead};
  }

  void Rotate(int64_t task) const { GetRotation().RunTask(a_, task, Sums(), checkpoint_); }

  // The blocks of one part of dK and dV of one key/value head.
  void RunRows(int64_t task) const {
    const int64_t part = task % plan_.parts;
    const int64_t head = task / plan_.parts;  // b * kv_heads + kv_head
    ClearPart(head, part);
    for (int64_t n = part; n < plan_.blocks; n += plan_.parts) {
      const TaskPlace place = PlaceOf(p_, plan_.split, 1, head * plan_.blocks + n);
      if (!RunBlock(place, head, part)) return;
    }
  }

  void RunSum(int64_t task) const {
    const SumTasks tasks(p_);
    if (task < tasks.keys) return SumKeys(task);
    task -= tasks.keys;
    if (task < tasks.sinks) return SumSink(task);
    task -= tasks.sinks;
    if (task < tasks.weights) return SumWeights(task);
    task -= tasks.weights;
    if (task < tasks.distances) return SumDistances(task);
    task -= tasks.distances;
    if (task < tasks.mask) return SumMask(Role::kDMask, *p_.mask, task);
    SumMask(Role::kDBias, *p_.bias, task - tasks.mask);
  }

 private:
  std::byte* Sums() const { return own_ + plan_.worker.sums_begin(); }

  RowStatistics* Statistics() const {
    return reinterpret_cast<RowStatistics*>(shared_ + plan_.shared.statistics_begin());
  }

  EntmaxRow* EntmaxRows() const {
    return reinterpret_cast<EntmaxRow*>(shared_ + plan_.shared.entmax_begin());
  }

  // Row j of a part of dK or dV of a key/value head.
  std::byte* KeyPart(int64_t head, int64_t part, int64_t j) const {
    return shared_ + plan_.shared.keys_begin() +
           ((head * plan_.parts + part) * p_.total_keys() + j) * plan_.key_row;
  }
  std::byte* ValuePart(int64_t head, int64_t part, int64_t j) const {
    return shared_ + plan_.shared.values_begin() +
           ((head * plan_.parts + part) * p_.total_keys() + j) * plan_.value_row;
  }
  // dX of a query head by distance.
  std::byte* DistancePart(int64_t b, int64_t h, int64_t part) const {
    return shared_ + plan_.shared.distances_begin() +
           ((b * p_.query_heads + h) * plan_.parts + part) * plan_.distance_row;
  }

  // Of additive_weight, of a query head.
  std::byte* WeightPart(int64_t b, int64_t h, int64_t part) const {
    return shared_ + plan_.shared.weights_begin() +
           ((b * p_.query_heads + h) * plan_.parts + part) * plan_.key_row;
  }

  void ClearPart(int64_t head, int64_t part) const {
    const int64_t t = p_.total_keys();
    if (WantsKeys(p_)) std::memset(KeyPart(head, part, 0), 0, t * plan_.key_row);
    if (WantsValues(p_)) std::memset(ValuePart(head, part, 0), 0, t * plan_.value_row);
    const int64_t b = head / p_.kv_heads;
    const int64_t first = head % p_.kv_heads * p_.group_size();
    for (int64_t h = first; h < first + p_.group_size(); ++h) {
      if (WantsDistances(p_)) std::memset(DistancePart(b, h, part), 0, plan_.distance_row);
      if (WantsWeights(p_)) std::memset(WeightPart(b, h, part), 0, plan_.key_row);
    }
  }

  // A task of the kernel, whose rows are in the worker's workspace.
  struct Block {
    FlashTask flash;
    FlashBackward backward;
    FlashRow* rows;
    BackwardRow* backward_rows;
  };

  // The rows of `place` against keys [begin, end).
  void MakeBlock(const TaskPlace& place, int64_t begin, int64_t end, Block& block) const {
    block.rows = reinterpret_cast<FlashRow*>(own_);
    block.backward_rows = reinterpret_cast<BackwardRow*>(own_ + plan_.worker.backward_rows_begin());
    FlashTask& flash = block.flash = TaskOf(p_, a_, place);
    flash.part = {begin, end};
    flash.rows = block.rows;
    flash.checkpoint = checkpoint_;
    flash.scratch = own_ + plan_.worker.scratch_begin();
    flash.visible = {end, begin};
    const SparseRows sparse_rows(p_, a_, place, block.rows, plan_.split.rows_per_task(),
                                 own_ + plan_.worker.selection_begin());
    flash.sparse = sparse_rows.exist();
    ForEachRow(place, /*by_query=*/false,
               [&](int64_t h, int64_t i) { AddRow(place.b, h, i, sparse_rows, block); });
    if (p_.has_rotary()) {
      cpu::Rotate(p_, a_, GetRotation(), place.b, own_ + plan_.worker.queries_begin(), flash,
                  block.rows);
    }
    block.backward = {.task = &block.flash,
                      .rows = block.backward_rows,
                      .output_gradients = BytesOf(a_.inputs[Role::kOutputGradient], 0),
                      .source = StatisticsSource::kKnown,
                      .gradient_element = ElementOf(p_.dtype)};
  }

  void AddRow(int64_t b, int64_t h, int64_t i, const SparseRows& sparse_rows, Block& block) const {
    FlashTask& flash = block.flash;
    const int64_t n = flash.row_count++;
    FlashRow& row = *new (&block.rows[n]) FlashRow(RowOf(p_, a_, b, h, i));
    if (p_.has_relative()) row.score.relative = relative_.Row(b, h, i);
    if (flash.sparse) row.score.sparse = sparse_rows.Make(n, h, i);
    row.score.begin = std::clamp(row.score.begin, flash.part.begin, flash.part.end);
    row.score.end = std::clamp(row.score.end, row.score.begin, flash.part.end);
    if (row.score.begin < row.score.end) {
      flash.visible.begin = std::min(flash.visible.begin, row.score.begin);
      flash.visible.end = std::max(flash.visible.end, row.score.end);
    }
    new (&block.backward_rows[n])
        BackwardRow{.output_gradient = a_.inputs[Role::kOutputGradient].RowOffset(b, h, i),
                    .statistics = Statistics() + RowIndex(p_, b, h, i),
                    .entmax = IsEntmax(p_) ? EntmaxRows() + RowIndex(p_, b, h, i) : nullptr};
  }

  bool Run(const Block& block) const { return plan_.kernel().run(block.backward); }

  // Returns false if the checkpoint abandoned the task.
  bool RunBlock(const TaskPlace& place, int64_t head, int64_t part) const {
    Block block;
    MakeBlock(place, 0, p_.total_keys(), block);
    FlashBackward& backward = block.backward;
    backward.source = StatisticsSource::kForwardPass;
    if (p_.backward->has_forward) {
      backward.source = StatisticsSource::kForwardOutput;
      backward.forward_outputs = BytesOf(a_.inputs[Role::kForwardOutput], 0);
    }
    if (WantsKeys(p_)) backward.key_gradients = KeyPart(head, part, 0);
    if (WantsValues(p_)) backward.value_gradients = ValuePart(head, part, 0);
    if (p_.has_rotary()) backward.gradient_element = ElementOf(RealType());
    for (int64_t n = 0; n < block.flash.row_count; ++n) {
      const int64_t h = block.rows[n].head;
      const int64_t i = block.rows[n].index;
      BackwardRow& row = block.backward_rows[n];
      *row.statistics = GivenStatistics(place.b, h, i);
      if (p_.backward->has_forward) {
        row.forward_output = a_.inputs[Role::kForwardOutput].RowOffset(place.b, h, i);
      }
      if (Wants(p_, Role::kDQ)) {
        row.query_gradient =
            p_.has_rotary() ? Sums() + n * plan_.key_row : a_.outputs[Role::kDQ].Row(place.b, h, i);
      }
      if (WantsWeights(p_)) row.weight_gradient = WeightPart(place.b, h, part);
      if (WantsDistances(p_)) {
        row.distances = DistancePart(place.b, h, part) + (p_.query_length - 1 - i) * plan_.real;
      }
    }
    if (!Run(block)) return false;
    if (p_.has_rotary() && Wants(p_, Role::kDQ)) RotateQueriesBack(place.b, block);
    return true;
  }

  RowStatistics GivenStatistics(int64_t b, int64_t h, int64_t i) const {
    const auto load = [&](Role role) {
      return LoadElement(a_.inputs[role].Row(b, h, i), p_.lse_dtype(), 0);
    };
    return {.lse = p_.backward->has_forward ? load(Role::kForwardLse) : 0,
            .delta = p_.backward->has_lse_gradient ? -load(Role::kLseGradient) : 0};
  }

  static constexpr DType RealType() {
    return sizeof(Real) == 8 ? DType::kFloat64 : DType::kFloat32;
  }

  void RotateQueriesBack(int64_t b, const Block& block) const {
    const Rotation rotation = GetRotation();
    for (int64_t n = 0; n < block.flash.row_count; ++n) {
      const int64_t i = block.rows[n].index;
      auto* const gradient = reinterpret_cast<Real*>(Sums() + n * plan_.key_row);
      RotateBack(rotation.QueryAngles(b, i), gradient);
      StoreNumbers(gradient, p_.head_size, a_.outputs[Role::kDQ].Row(b, block.rows[n].head, i));
    }
  }

  void StoreNumbers(const Real* numbers, int64_t count, std::byte* out) const {
    if constexpr (sizeof(Real) == 8) {
      plan_.kernels.store_fp64(ElementOf(p_.dtype), numbers, count, out);
    } else {
      plan_.kernels.store_fp32(ElementOf(p_.dtype), numbers, count, out);
    }
  }

  // Adds the parts of dK and dV of some keys.
  void SumKeys(int64_t task) const {
    const int64_t blocks = CeilDiv(p_.total_keys(), kSumKeys);
    const int64_t head = task / blocks;
    const int64_t first = task % blocks * kSumKeys;
    for (int64_t j = first; j < std::min(first + kSumKeys, p_.total_keys()); ++j) {
      if (WantsValues(p_)) SumParts(ValuePart(head, 0, j), plan_.value_row, p_.value_head_size);
      if (WantsKeys(p_)) SumParts(KeyPart(head, 0, j), plan_.key_row, p_.head_size);
      StoreKey(head, j);
    }
  }

  // Adds the other parts to the first.
  void SumParts(std::byte* row, int64_t row_bytes, int64_t count) const {
    const int64_t step = p_.total_keys() * row_bytes;
    auto* const sums = reinterpret_cast<Real*>(row);
    for (int64_t part = 1; part < plan_.parts; ++part) {
      const auto* const numbers = reinterpret_cast<const Real*>(row + part * step);
      for (int64_t n = 0; n < count; ++n) sums[n] += numbers[n];
    }
  }

  void StoreKey(int64_t head, int64_t j) const {
    const int64_t b = head / p_.kv_heads;
    const int64_t h = head % p_.kv_heads;
    const bool past = j < p_.past_length;
    const int64_t row = past ? j : j - p_.past_length;
    const auto store = [&](Role role, const Real* numbers, int64_t count) {
      if (Wants(p_, role)) StoreNumbers(numbers, count, a_.outputs[role].Row(b, h, row));
    };
    auto* const values = reinterpret_cast<Real*>(ValuePart(head, 0, j));
    store(past ? Role::kDPastValue : Role::kDV, values, p_.value_head_size);
    if (!WantsKeys(p_)) return;
    auto* const keys = reinterpret_cast<Real*>(KeyPart(head, 0, j));
    if (!past && p_.rotates_keys()) RotateBack(GetRotation().KeyAngles(b, row), keys);
    for (int64_t d = 0; p_.values_in_keys && d < p_.value_head_size; ++d) keys[d] += values[d];
    store(past ? Role::kDPastKey : Role::kDK, keys, p_.head_size);
  }

  void SumSink(int64_t h) const {
    const double sink = SinkOf(p_, a_, h);
    double sum = 0;
    for (int64_t b = 0; b < p_.batch && sink > -std::numeric_limits<double>::infinity(); ++b) {
      for (int64_t i = 0; i < p_.query_length; ++i) {
        const RowStatistics& row = Statistics()[RowIndex(p_, b, h, i)];
        sum -= std::exp(sink - row.lse) * row.delta;
      }
    }
    StoreElement(a_.outputs[Role::kDHeadSink].Row(h, 0, 0), *p_.head_sink, 0, sum);
  }

  // One head of additive_weight.
  void SumWeights(int64_t head) const {
    const bool one = p_.additive_weight->heads == 1;
    const MutableTensorView& out = a_.outputs[Role::kDAdditiveWeight];
    for (int64_t d = 0; d < p_.head_size; ++d) {
      double sum = 0;
      for (int64_t b = 0; b < p_.batch; ++b) {
        for (int64_t h = one ? 0 : head; h < (one ? p_.query_heads : head + 1); ++h) {
          for (int64_t part = 0; part < plan_.parts; ++part) {
            sum += static_cast<double>(reinterpret_cast<const Real*>(WeightPart(b, h, part))[d]);
          }
        }
      }
      StoreElement(out.Row(head, d, 0), out.dtype, 0, sum);
    }
  }

  // One head of a table of biases by distance, or one slope.
  void SumDistances(int64_t task) const {
    auto* const sums = reinterpret_cast<double*>(Sums());
    std::fill(sums, sums + RelativeEntries(p_), 0.0);
    const bool by_batch = p_.alibi_slopes && p_.alibi_slopes->batch != 1;
    const bool one_table = p_.relative_bias && p_.relative_bias->heads == 1;
    const int64_t head = task % p_.query_heads;
    for (int64_t b = 0; b < p_.batch; ++b) {
      if (by_batch && b != task / p_.query_heads) continue;
      for (int64_t h = 0; h < p_.query_heads; ++h) {
        if (one_table || h == head) AddDistances(b, h, sums);
      }
    }
    const Role gradient = DistanceGradient(p_);
    for (int64_t n = 0; n < RelativeEntries(p_); ++n) {
      const MutableTensorView& out = a_.outputs[gradient];
      StoreElement(RelativeElement(p_, out, task / p_.query_heads, head, n), out.dtype, 0, sums[n]);
    }
  }

  void AddDistances(int64_t b, int64_t h, double* sums) const {
    const int64_t first = -DiagonalKey(p_, a_.key_lengths, b, p_.query_length - 1);
    for (int64_t part = 0; part < plan_.parts; ++part) {
      const auto* const numbers = reinterpret_cast<const Real*>(DistancePart(b, h, part));
      for (int64_t n = 0; n < p_.query_length + p_.total_keys() - 1; ++n) {
        const RelativeEntry entry = RelativeEntryOf(p_, first + n);
        sums[entry.index] += entry.factor * static_cast<double>(numbers[n]);
      }
    }
  }

  // dX, summed over the axes that the mask broadcasts, for a block of its queries and keys.
  void SumMask(Role gradient, const MaskShape& mask, int64_t task) const {
    const int64_t key_blocks = SumTasks::KeyBlocks(mask);
    const int64_t query_blocks = SumTasks::QueryBlocks(p_, mask);
    const int64_t first_key = task % key_blocks * kMaskKeys;
    task /= key_blocks;
    const int64_t most = SumTasks::MaskQueries(p_);
    const bool one_query = mask.dims[2] == 1;
    const int64_t first = task % query_blocks * most;
    task /= query_blocks;
    const int64_t head = task % mask.dims[1];
    const int64_t batch = task / mask.dims[1];

    const int64_t queries = one_query ? 1 : std::min(most, p_.query_length - first);
    auto* const sums = reinterpret_cast<Real*>(Sums());
    const int64_t stride = kMaskKeys + kVectorBytes;
    const bool one_key = mask.dims[3] == 1;
    const int64_t end_key = one_key ? p_.total_keys() : mask.dims[3];
    for (int64_t i = 0; one_key && i < queries; ++i) {
      StoreElement(a_.outputs[gradient].Row(batch, head, first + i), mask.dtype, 0, 0);
    }
    for (int64_t k = first_key; k < end_key; k += kMaskKeys) {
      const int64_t keys = std::min(kMaskKeys, end_key - k);
      std::fill(sums, sums + queries * stride, Real{0});
      const int64_t end_b = mask.dims[0] == 1 ? p_.batch : batch + 1;
      const int64_t end_h = mask.dims[1] == 1 ? p_.query_heads : head + 1;
      for (int64_t b = mask.dims[0] == 1 ? 0 : batch; b < end_b; ++b) {
        for (int64_t h = mask.dims[1] == 1 ? 0 : head; h < end_h; ++h) {
          const int64_t end = one_query ? p_.query_length : first + queries;
          for (int64_t i = first; i < end; i += most) {
            if (!AddMaskBlock(b, h, i, std::min(i + most, end), k, keys, one_query, sums)) return;
          }
        }
      }
      StoreMask(gradient, mask, batch, head, first, queries, k, keys, sums);
      if (!one_key) return;
    }
  }

  bool AddMaskBlock(int64_t b, int64_t h, int64_t begin, int64_t end, int64_t first_key,
                    int64_t keys, bool one_query, Real* sums) const {
    const TaskPlace place = {.b = b,
                             .kv_head = h / p_.group_size(),
                             .first_head = h,
                             .end_head = h + 1,
                             .first_query = begin,
                             .end_query = end,
                             .part = 0};
    Block block;
    MakeBlock(place, first_key, first_key + keys, block);
    for (int64_t n = 0; n < block.flash.row_count; ++n) {
      block.backward_rows[n].mask_gradient =
          reinterpret_cast<std::byte*>(sums + (one_query ? 0 : n * (kMaskKeys + kVectorBytes)));
    }
    return block.flash.visible.begin >= block.flash.visible.end || Run(block);
  }

  void StoreMask(Role gradient, const MaskShape& mask, int64_t b, int64_t h, int64_t first,
                 int64_t queries, int64_t first_key, int64_t keys, const Real* sums) const {
    for (int64_t i = 0; i < queries; ++i) {
      std::byte* const out = a_.outputs[gradient].Row(b, h, first + i);
      const Real* const row = sums + i * (kMaskKeys + kVectorBytes);
      if (mask.dims[3] != 1) {
        for (int64_t k = 0; k < keys; ++k) StoreElement(out, mask.dtype, first_key + k, row[k]);
        continue;
      }
      double sum = LoadElement(out, mask.dtype, 0);
      for (int64_t k = 0; k < keys; ++k) sum += static_cast<double>(row[k]);
      StoreElement(out, mask.dtype, 0, sum);
    }
  }

  const Problem& p_;
  const Arguments& a_;
  const BackwardPlan& plan_;
  std::byte* shared_;
  std::byte* own_;
  Checkpoint checkpoint_;
  RelativeTables<Real> relative_;
};

// Of a problem without queries: all gradients are 0.
void ClearGradients(const Problem& p, const Arguments& a) {
  for (Role role : p.backward->gradients) {
    const MutableTensorView& out = a.outputs[role];
    for (int64_t b = 0; b < out.dims[0]; ++b) {
      for (int64_t h = 0; h < out.dims[1]; ++h) {
        for (int64_t s = 0; s < out.dims[2]; ++s) {
          for (int64_t d = 0; d < out.dims[3]; ++d) {
            StoreElement(out.Row(b, h, s), out.dtype, d, 0);
          }
        }
      }
    }
  }
}

template <typename Real>
void RunStage(const Plan& plan, const Arguments& a, std::byte* workspace, int stage, int64_t task,
              int worker, const Checkpoint& checkpoint) {
  const Stages stages(plan.problem);
  const Backward<Real> backward(plan, a, workspace, worker, checkpoint);
  if (stage == stages.rotation) return backward.Rotate(task);
  if (stage == stages.tables) return backward.FillTable(task);
  if (stage == stages.rows) return backward.RunRows(task);
  backward.RunSum(task);
}

}  // namespace

absl::Status SupportsBackward(const Problem& p) {
  if (!p.has_relative_vectors()) return absl::OkStatus();
  return absl::UnimplementedError("it does not compute gradients of vectors by distance");
}

void PlanBackward(Plan& plan) {
  const Problem& p = plan.problem;
  if (p.empty()) {
    plan.stages.push_back(1);
    return;
  }
  const auto backward = std::make_shared<const BackwardPlan>(p, plan.isa);
  if (p.has_rotary()) plan.stages.push_back(Rotation::Tasks(p, KeyRotation::kOnRead));
  if (p.has_relative()) plan.stages.push_back(RelativeTables<float>::Count(p));
  plan.stages.push_back(p.batch * p.kv_heads * backward->parts);
  if (const int64_t sums = SumTasks(p).count(); sums > 0) plan.stages.push_back(sums);
  plan.shared_workspace_bytes = backward->shared.bytes();
  plan.worker_workspace_bytes = backward->worker.bytes();
  plan.flops = CountFlops(p) * (p.backward->has_forward ? 2.5 : 3.5);
  plan.backend_plan = backward;
}

void RunBackwardTask(const Plan& plan, const Arguments& a, std::byte* workspace, int stage,
                     int64_t task, int worker, const Checkpoint& checkpoint) {
  const Problem& p = plan.problem;
  if (p.empty()) return ClearGradients(p, a);
  AccumulatesInFp64(p) ? RunStage<double>(plan, a, workspace, stage, task, worker, checkpoint)
                       : RunStage<float>(plan, a, workspace, stage, task, worker, checkpoint);
}

}  // namespace rapt::cpu
