#include "attention/mechanism/softmax/chunked.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "attention/attention.h"
#include "attention/half.h"
#include "attention/mechanism/softmax/softmax_state.h"
#include "attention/score/score_params.h"
#include "base/aligned_buffer.h"
#include "base/invalid.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

int64_t Aligned(int64_t bytes) { return RoundUp(bytes, AlignedBuffer::kAlignment); }

Problem ChunkProblem(const Problem& problem, Streaming streaming, RowRange chunk) {
  return streaming == Streaming::kKeys
             ? SectionOf(problem, {0, problem.query_length}, chunk, /*folds=*/true)
             : SectionOf(problem, chunk, {0, problem.total_keys()}, /*folds=*/false);
}

absl::Status CheckChunk(absl::string_view name, int64_t rows) {
  if (rows >= 1) return absl::OkStatus();
  return Invalid(name, " is ", rows, "; it must be at least 1");
}

absl::Status Check(const Problem& problem, const Chunking& chunking, const FieldNames& names) {
  RAPT_RETURN_IF_ERROR(Validate(problem, names));
  RAPT_RETURN_IF_ERROR(CheckChunk("query_chunk", chunking.query_chunk));
  RAPT_RETURN_IF_ERROR(CheckChunk("key_chunk", chunking.key_chunk));
  if (chunking.streaming == Streaming::kKeys && problem.score_output == ScoreOutput::kWeights) {
    return Invalid(
        "weights cannot be computed while keys stream, because they depend on the last key; stream "
        "the queries instead");
  }
  if (problem.has_position_ids || problem.has_key_position_ids) {
    const Role ids = problem.has_position_ids ? Role::kPositionIds : Role::kKeyPositionIds;
    return Invalid(names[ids], " is not supported in chunked calls");
  }
  if (problem.rotary_cache && !problem.rotary_cache->by_position()) {
    return Invalid(names[Role::kCosCache],
                   " must be [M, r/2] in chunked calls; it has a row for each token");
  }
  if (chunking.streaming == Streaming::kKeys && problem.normalizer != Normalizer::kSoftmax) {
    return Invalid(
        names[Attribute::kNormalizer], " is ", NameOf(problem.normalizer),
        ", which needs all keys at once, so keys cannot stream; stream the queries instead");
  }
  for (const auto& [role, mask] :
       {std::pair{Role::kMask, &problem.mask}, {Role::kBias, &problem.bias}}) {
    if (!*mask || (*mask)->dims[3] == 1 || (*mask)->dims[3] == problem.total_keys()) continue;
    return Invalid(names[role], " has ", (*mask)->dims[3],
                   " keys; a chunked call requires 1 or all ", problem.total_keys());
  }
  return absl::OkStatus();
}

int64_t StateRows(const Problem& p) { return p.batch * p.query_heads * p.query_length; }

// The offsets of the state's arrays max, sum and output, and the total size.
std::array<int64_t, 4> StatePlaces(const Problem& p, DType type) {
  const int64_t column = Aligned(StateRows(p) * SizeOf(type));
  return {0, column, 2 * column,
          2 * column + Aligned(StateRows(p) * p.value_head_size * SizeOf(type))};
}

template <typename Real>
Real* RowOf(const MutableTensorView& view, int64_t b, int64_t h, int64_t i) {
  return reinterpret_cast<Real*>(view.Row(b, h, i));
}

template <typename Real>
void Clear(const Arguments::State& state, RowRange rows, int64_t task) {
  const int64_t b = task / state.max.dims[1];
  const int64_t h = task % state.max.dims[1];
  std::fill_n(RowOf<Real>(state.max, b, h, rows.begin), rows.count,
              -std::numeric_limits<Real>::infinity());
  std::fill_n(RowOf<Real>(state.sum, b, h, rows.begin), rows.count, Real{0});
}

void Store16(uint16_t bits, std::byte* row, int64_t n) {
  std::memcpy(row + n * 2, &bits, sizeof(bits));
}

void Store(float value, DType dtype, std::byte* row, int64_t n) {
  switch (dtype) {
    case DType::kFloat16:
      return Store16(FloatToHalf(value), row, n);
    case DType::kBFloat16:
      return Store16(FloatToBFloat16(value), row, n);
    default:
      return StoreElement(row, dtype, n, value);
  }
}

void Store(double value, DType dtype, std::byte* row, int64_t n) {
  StoreElement(row, dtype, n, value);
}

template <typename Real>
void StoreScaled(absl::Span<const Real> values, Real factor, DType dtype, std::byte* row) {
  if (sizeof(Real) == 4 && dtype == DType::kFloat32) {
    for (size_t n = 0; n < values.size(); ++n) {
      const Real value = values[n] * factor;
      std::memcpy(row + n * sizeof(Real), &value, sizeof(Real));
    }
    return;
  }
  for (size_t n = 0; n < values.size(); ++n) Store(values[n] * factor, dtype, row, n);
}

template <typename Real>
void Finish(const Problem& p, const Arguments& a, int64_t first, const MutableTensorView& output,
            const MutableTensorView& lse, int64_t task) {
  const int64_t b = task / p.query_heads;
  const int64_t h = task % p.query_heads;
  const Arguments::State& state = a.state;
  const Real sink = static_cast<Real>(SinkOf(p, a, h));
  const int64_t row_bytes = p.value_head_size * SizeOf(p.dtype);
  for (int64_t i = 0; i < output.dims[2]; ++i) {
    const Real max = *RowOf<Real>(state.max, b, h, first + i);
    const Real sum = *RowOf<Real>(state.sum, b, h, first + i);
    const bool empty = max == -std::numeric_limits<Real>::infinity();
    Real lse_of_row = empty ? max : max + std::log(sum);
    Real factor = empty ? 0 : 1 / sum;
    MergeSink(absl::MakeSpan(&factor, 1), lse_of_row, sink);
    if (empty) {
      std::memset(output.Row(b, h, i), 0, static_cast<size_t>(row_bytes));
    } else {
      const absl::Span<const Real> values(RowOf<Real>(state.output, b, h, first + i),
                                          p.value_head_size);
      StoreScaled(values, factor, p.dtype, output.Row(b, h, i));
    }
    if (p.wants_lse) StoreElement(lse.Row(b, h, i), p.lse_dtype(), 0, lse_of_row);
  }
}

}  // namespace

RowRange ChunkOf(int64_t length, int64_t chunk, int64_t n) {
  return {n * chunk, std::min(chunk, length - n * chunk)};
}

Problem SectionOf(const Problem& problem, RowRange queries, RowRange keys, bool folds) {
  Problem section = problem;
  section.section = SectionOrFull(problem);
  section.section->first_query += queries.begin;
  section.section->first_key += keys.begin;
  section.query_length = queries.count;
  section.key_length = keys.count;
  section.past_length = 0;
  section.folds = folds;
  if (folds) section.head_sink = std::nullopt;  // merged once, by FinishRows()
  for (std::optional<MaskShape>* mask : {&section.mask, &section.bias}) {
    if (!*mask) continue;
    std::array<int64_t, 4>& dims = (*mask)->dims;
    if (dims[2] != 1) dims[2] = queries.count;
    if (dims[3] != 1) dims[3] = keys.count;
  }
  return section;
}

int64_t CountChunks(int64_t length, int64_t chunk) { return (length + chunk - 1) / chunk; }

int64_t ChunkedPlan::chunks() const {
  return keys_stream() ? CountChunks(problem.total_keys(), chunking.key_chunk)
                       : CountChunks(problem.query_length, chunking.query_chunk);
}

RowRange ChunkedPlan::Chunk(int64_t n) const {
  return keys_stream() ? ChunkOf(problem.total_keys(), chunking.key_chunk, n)
                       : ChunkOf(problem.query_length, chunking.query_chunk, n);
}

Plan ChunkedPlan::PlanOf(int64_t n) const {
  Plan plan = n + 1 == chunks() ? last : full;
  plan.problem = ChunkProblem(problem, chunking.streaming, Chunk(n));
  if (plan.problem.empty()) return plan;
  Plan planned = plan;  // only the flops depend on the chunk's position
  plan.routing.backend->PlanTasks(planned);
  plan.flops = planned.flops;
  return plan;
}

absl::StatusOr<ChunkedPlan> MakeChunkedPlan(const Problem& problem, const Chunking& chunking,
                                            const PlanOptions& options, const FieldNames& names) {
  RAPT_RETURN_IF_ERROR(Check(problem, chunking, names));
  ChunkedPlan chunked;
  chunked.problem = problem;
  chunked.chunking = chunking;
  chunked.chunking.query_chunk =
      std::min(chunking.query_chunk, std::max<int64_t>(problem.query_length, 1));
  chunked.chunking.key_chunk =
      std::min(chunking.key_chunk, std::max<int64_t>(problem.total_keys(), 1));
  const int64_t chunks = chunked.chunks();
  for (const auto& [n, plan] : {std::pair<int64_t, Plan*>{0, &chunked.full},
                                {std::max<int64_t>(chunks - 1, 0), &chunked.last}}) {
    const RowRange chunk = chunks == 0 ? RowRange{} : chunked.Chunk(n);
    RAPT_ASSIGN_OR_RETURN(*plan,
                          MakePlan(ChunkProblem(problem, chunking.streaming, chunk), options));
    chunked.workspace_bytes = std::max(chunked.workspace_bytes, plan->workspace_bytes());
  }
  if (chunked.keys_stream()) {
    chunked.state_bytes = StateBytes(problem, chunked.full.state_dtype);
  }
  return chunked;
}

int64_t StateBytes(const Problem& p, DType type) { return StatePlaces(p, type)[3]; }

Arguments::State StateIn(const Problem& p, DType type, std::byte* memory) {
  const std::array<int64_t, 4> places = StatePlaces(p, type);
  const auto view = [&](int64_t place, int64_t size) {
    const std::array<int64_t, 4> dims = {p.batch, p.query_heads, p.query_length, size};
    return MutableTensorView{memory + place, type, dims, RowMajorStrides(dims)};
  };
  return {.output = view(places[2], p.value_head_size),
          .max = view(places[0], 1),
          .sum = view(places[1], 1)};
}

void ClearRows(const Arguments::State& state, RowRange rows, int64_t task) {
  state.max.dtype == DType::kFloat64 ? Clear<double>(state, rows, task)
                                     : Clear<float>(state, rows, task);
}

void ClearState(const Arguments::State& state) {
  const std::array<int64_t, 4>& dims = state.max.dims;
  for (int64_t head = 0; head < dims[0] * dims[1]; ++head) ClearRows(state, {0, dims[2]}, head);
}

void FinishRows(const Problem& problem, const Arguments& arguments, int64_t first,
                const MutableTensorView& output, const MutableTensorView& lse, int64_t task) {
  arguments.state.max.dtype == DType::kFloat64
      ? Finish<double>(problem, arguments, first, output, lse, task)
      : Finish<float>(problem, arguments, first, output, lse, task);
}

}  // namespace rapt
