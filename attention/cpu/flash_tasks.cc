#include "attention/cpu/flash_tasks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "attention/mechanism/entmax/entmax.h"
#include "base/round_up.h"

namespace rapt::cpu {
namespace {

// Scores and keys of the candidates of a task's rows, unless those of one block of rows take more.
// Few of these bytes are used if few keys have a weight.
constexpr int64_t kMostCandidateBytes = 4 << 20;

// The rows of a task are a multiple of this, which is a multiple of every kernel's register block.
constexpr int64_t kRowStep = 12;
// The queries of a task are a multiple of this. Tasks should not divide the blocks of a mask.
int64_t StepOf(const Problem& p, int64_t query_rows) {
  if (!p.block_mask || query_rows % *p.block_q != 0) return kRowStep;
  return *p.block_q % kSparseRows == 0 ? *p.block_q : kRowStep;
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

FlashAdditive AdditiveOf(const Problem& p, const Arguments& a, int64_t heads) {
  if (!p.is_additive()) return {};
  const TensorView& weight = a.inputs[Role::kAdditiveWeight];
  const int64_t size = SizeOf(weight.dtype);
  return {.heads = heads,
          .weights = weight.data,
          .head_stride = weight.strides[0] * size,
          .stride = weight.strides[1] * size,
          .element = ElementOf(weight.dtype)};
}

// The keys that query i sees by position, all or a part of which are selected.
int64_t CountKeys(const Problem& p, absl::Span<const int64_t> key_lengths, int64_t i) {
  const KeyRange range = VisibleKeys(p, key_lengths, 0, i);
  int64_t keys = range.end - range.begin;
  if (p.has_exemptions() && !p.has_global_mask) {
    const KeyRange window = WindowKeys(p, key_lengths, 0, i);
    keys = std::min(keys, window.end - window.begin + p.prefix_keys);
  }
  return p.selected ? std::min(keys, p.selected->count) : keys;
}

// All visible keys, and space for the vector that a kernel writes at their end.
int64_t CandidateStride(const Problem& p) {
  int64_t keys = p.total_keys();
  const int64_t right = p.causal ? 0 : p.right_window;
  if (p.left_window >= 0 && right >= 0 && !p.has_exemptions()) {
    keys = std::min(keys, std::min(p.left_window, keys) + std::min(right, keys) + 1);
  }
  return RoundUp(keys, kVectorBytes) + kVectorBytes;
}

}  // namespace

Split SplitRows(const Problem& p, int64_t query_rows) {
  Split split;
  // Tasks of about equal size.
  const int64_t blocks = CeilDiv(p.query_length, query_rows);
  split.queries_per_task =
      std::min(p.query_length, RoundUp(CeilDiv(p.query_length, blocks), StepOf(p, query_rows)));
  // A task has one alpha.
  split.heads_per_task =
      p.head_alpha ? 1
                   : std::clamp<int64_t>(query_rows / split.queries_per_task, 1, p.group_size());
  split.query_tasks = CeilDiv(p.query_length, split.queries_per_task);
  split.head_tasks = CeilDiv(p.group_size(), split.heads_per_task);
  return split;
}

bool Gathers(const Problem& p) {
  return p.selected && !p.score_output && !IsEntmax(p) && !p.is_additive() &&
         !p.has_relative_vectors() && !p.backward;
}

bool HasTooManyCandidates(const Problem& p, int64_t rows) {
  const int64_t bytes = SizeOf(AccumulatorOf(p)) + int64_t{sizeof(int32_t)};
  return IsEntmax(p) && rows * CandidateStride(p) * bytes > kMostCandidateBytes;
}

int64_t AttentionTasks(const Problem& p, const Split& split) {
  return p.empty() ? 0 : p.batch * p.kv_heads * split.query_tasks * split.head_tasks;
}

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

int64_t RowTableBytes(const Problem& p, int64_t rows) {
  return RoundUp(rows * static_cast<int64_t>(sizeof(FlashRow)), kVectorBytes) +
         (p.is_sparse() ? RoundUp(rows * static_cast<int64_t>(sizeof(SparseRow)), kVectorBytes)
                        : 0);
}

int64_t SelectionBytes(const Problem& p, const Split& split) {
  if (!p.selected || Gathers(p)) return 0;
  return RoundUp(split.queries_per_task * SelectedWords(p) * static_cast<int64_t>(sizeof(uint64_t)),
                 kVectorBytes);
}

FlashBytes BytesOf(const TensorView& view, int64_t offset) {
  if (view.slices == nullptr) return {view.data + offset, nullptr, 0, 0};
  const SlicedBytes& sliced = *view.slices;
  return {nullptr, sliced.slices.data(), static_cast<int64_t>(sliced.slices.size()),
          sliced.offset + offset};
}

FlashTask ShapeOf(const Problem& p) {
  FlashTask task = {};
  task.key_count = p.total_keys();
  task.head_size = p.head_size;
  task.value_head_size = p.value_head_size;
  task.element = ElementOf(p.dtype);
  task.q8_0 = p.q8_0;
  task.outputs.element = task.element;
  task.outputs.lse_element = ElementOf(p.lse_dtype());
  task.outputs.scores = StageOf(p.score_output);
  if (IsEntmax(p)) {
    task.entmax.alpha = 1;
    task.entmax.candidate_stride = CandidateStride(p);
  }
  if (p.dropout) {
    task.dropout.probability = p.dropout->probability;
    task.dropout.seed = p.dropout->seed;
  }
  return task;
}

FlashTask LargestTask(const Problem& p, const Split& split) {
  FlashTask task = ShapeOf(p);
  task.row_count = split.rows_per_task();
  task.vectors.exist = p.has_relative_vectors();
  task.vectors.has_queries = p.has_relative_query;
  if (p.is_additive()) task.additive.heads = split.heads_per_task;
  task.sparse = p.is_sparse();
  if (Gathers(p)) {
    task.selection.rows = split.heads_per_task;
    task.selection.count = p.selected->count;
  }
  task.score.scale = p.effective_scale();
  return task;
}

FlashTask TaskOf(const Problem& p, const Arguments& a, const TaskPlace& place) {
  FlashTask task = ShapeOf(p);
  task.queries = BytesOf(a.inputs[Role::kQ], 0);
  SetKeys(a.inputs[Role::kPastKey], p.past_length, a.inputs[Role::kK], place.b, place.kv_head,
          task.keys);
  SetKeys(PastValuesOf(p, a), p.past_length, ValuesOf(p, a), place.b, place.kv_head, task.values);
  task.additive = AdditiveOf(p, a, place.end_head - place.first_head);
  task.score = ScoreParamsOf(p, a, AccumulatorOf(p));
  if (IsEntmax(p)) task.entmax.alpha = AlphaOf(p, a, place.first_head);
  task.dropout.batch = place.b;
  task.dropout.first_key = p.section ? p.section->first_key : 0;
  return task;
}

FlashRow RowOf(const Problem& p, const Arguments& a, int64_t b, int64_t h, int64_t i) {
  return {
      .query = a.inputs[Role::kQ].RowOffset(b, h, i),
      .relative_query =
          p.has_relative_query ? a.inputs[Role::kRelativeQuery].RowOffset(b, h, i) : 0,
      .output = p.folds || p.backward ? nullptr : a.outputs[Role::kY].Row(b, h, i),
      .lse = p.wants_lse && !p.folds ? a.outputs[Role::kLse].Row(b, h, i) : nullptr,
      .scores = p.score_output ? a.outputs[Role::kScores].Row(b, h, i) : nullptr,
      .score = ScoreRowOf(p, a, b, h, i),
      .head = h,
      .index = i + (p.section ? p.section->first_query : 0),
  };
}

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

void Rotate(const Problem& p, const Arguments& a, const Rotation& rotation, int64_t b,
            std::byte* queries, FlashTask& flash, FlashRow* rows) {
  const int64_t first_query = p.section ? p.section->first_query : 0;
  flash.queries = {queries, nullptr, 0, 0};
  flash.rotary = rotation.KeysToRotate(b);
  const int64_t row_bytes = p.head_size * SizeOf(p.dtype);
  for (int64_t n = 0; n < flash.row_count; ++n) {
    rows[n].query = n * row_bytes;
    if (rows[n].score.begin == rows[n].score.end && !rows[n].scores) {
      // It may have no angle. Kernels choose how to compute by the numbers of all rows.
      std::memset(queries + rows[n].query, 0, row_bytes);
      continue;
    }
    rotation.RotateQuery(a, b, rows[n].head, rows[n].index - first_query, queries + rows[n].query);
  }
}

double CountFlops(const Problem& p) {
  const int64_t key_length = p.section ? p.section->key_length : p.key_length;
  double pairs = 0;
  // The visible range moves by one key per query, so sampling it is accurate enough.
  const int64_t step = std::max<int64_t>(1, p.query_length / 64);
  for (int64_t i = 0; i < p.query_length; i += step) {
    pairs += static_cast<double>(CountKeys(p, {&key_length, 1}, i)) *
             static_cast<double>(std::min(step, p.query_length - i));
  }
  const int64_t size =
      p.head_size * ((p.is_additive() ? kAdditiveCost : 1) + (p.relative_keys ? 1 : 0)) +
      p.value_head_size * (p.relative_values ? 2 : 1);
  const double products = 2.0 * static_cast<double>(p.batch) * static_cast<double>(p.query_heads) *
                          pairs * static_cast<double>(size);
  return p.has_rotary() ? products + Rotation::Flops(p) : products;
}

}  // namespace rapt::cpu
