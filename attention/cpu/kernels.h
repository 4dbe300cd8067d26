// The interface of the kernels. Each instruction set is one file, compiled with its own flags from
// the one source kernels.inc; kernels_amx.cc and kernels_avx512_bf16.cc add the loop over tiles of
// tile_flash.inc, the latter also a loop by dot products for a few rows. They share only these
// plain structs: the linker could keep the AVX-512 copy of a shared inline function for every
// machine.
#ifndef RAPT_ATTENTION_CPU_KERNELS_H_
#define RAPT_ATTENTION_CPU_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "attention/checkpoint.h"
#include "attention/mechanism/linear/linear_task.h"
#include "attention/rotary/rotary_row.h"
#include "attention/score/score.h"
#include "base/byte_slice.h"

namespace rapt::cpu {

// Keys per step: K transposed, V and a block of scores fit into the first two cache levels.
inline constexpr int64_t kKeyBlock = 64;
// The same for tiles, whose sums move between registers and memory once per step.
inline constexpr int64_t kTileKeyBlock = 128;
// A tile: rows, or columns, of 16 pairs of bf16 numbers.
inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kTileRowBytes = 64;
inline constexpr int64_t kTileBytes = kTileRows * kTileRowBytes;
// Query rows that share one block of scores; a multiple of every kernel's register block.
inline constexpr int64_t kRowBlock = 48;
// The maximum number of row blocks of a task, which share one packing of K and V. O of D 64 then
// fills 96 KiB of L2.
inline constexpr int64_t kMostRowBlocks = 8;
// With a block mask, row blocks end where a block of queries does if that is at a multiple of this.
// FoldSoftmax() needs a multiple of the lanes of the widest vector.
inline constexpr int64_t kSparseRows = 16;
// A task of at most this many rows reads K and V without packing them.
inline constexpr int64_t kFewRows = 8;
// Rows of K or V gathered at a time if they cross a boundary of slices, pages or sources: the
// number of lanes of the widest vector.
inline constexpr int64_t kGatheredRows = 16;
// Query rows that are multiplied with vectors by distance at once; a multiple of every kernel's
// register block. More rows have more distances to a block of keys, of which each needs one part.
inline constexpr int64_t kDistanceRows = 12;
// At least their number of distances, rounded up to vectors.
inline constexpr int64_t kDistances = kKeyBlock + 16;
// Numbers by distance of a row, with one for each key before and after them.
inline constexpr int64_t kPaddedDistances = kDistances + 2 * kKeyBlock;
// O and V rows are padded to a multiple of the widest vector, 64 bytes.
inline constexpr int64_t kVectorBytes = 64;

// One query row of a task.
struct FlashRow {
  int64_t query;           // D elements, at this byte offset into FlashTask::queries
  int64_t relative_query;  // D elements, at this byte offset into FlashVectors::queries
  std::byte* output;       // Dv elements, or null
  std::byte* lse;          // one element, or null
  std::byte* scores;       // T elements, or null
  ScoreRow score;
  int64_t head;  // h and i in the full problem, for dropout
  int64_t index;
};

// Contiguous bytes at `data`, or bytes in slices starting at `offset`.
struct FlashBytes {
  const std::byte* data;  // null: in slices
  const ByteSlice* slices;
  int64_t slice_count;
  int64_t offset;
};

// Rows [begin, end) of K or V, `stride` bytes apart: strided in contiguous bytes, sliced, or paged.
struct KeyValueSource {
  int64_t begin, end;
  int64_t stride;
  FlashBytes bytes;  // from row `begin` on; in pages only `offset`, from a page to its first row
  const std::byte* const* pages;  // null: strided or sliced
  int64_t page_rows;              // rows per page
  int64_t first_row;              // of the first page, where `begin` is
};

// All rows of K or V, in the order of their sources: past and new ones.
struct FlashKeys {
  KeyValueSource sources[2];
};

// Vectors of the accumulator's type for distances [first, last]; those beyond have the same ones.
struct FlashVectorTable {
  const std::byte* data;  // null: none
  int64_t head_step;      // elements from one head's table to the next; 0: all heads share one
  int64_t step;           // elements from one row to the next
  int64_t first, last;
};

// relative_keys and relative_values, see vector_tables.h.
struct FlashVectors {
  bool exist;                    // keys, values or both
  FlashVectorTable keys;         // transposed: a row has all distances
  FlashVectorTable values;       // a row is a vector, padded to vectors of registers
  const int64_t* values_finite;  // of each table of values
  FlashBytes queries;            // relative_query, if has_queries; otherwise Q multiplies the keys
  bool has_queries;
  int64_t first_position;  // among the task's keys, of query 0 of the full problem
};

// additive_weight, for additive scores. Strides in bytes.
struct FlashAdditive {
  int64_t heads;             // of the task's rows; 0: scores are dot products
  const std::byte* weights;  // of head 0
  int64_t head_stride;       // 0: the same for all heads
  int64_t stride;
  Element element;
};

// selected_indices: consecutive rows of a task are the heads of one query and share its keys.
struct FlashSelection {
  int64_t rows;              // of each query; 0: rows see intervals of keys
  const std::byte* indices;  // INT32, of the task's first query
  int64_t count;             // of a query
  int64_t step;              // elements from one index to the next
  int64_t query_bytes;       // from one query's indices to the next one's
};

// [begin, end) of the keys of a task.
struct FlashSpan {
  int64_t begin, end;
};

// What is written.
struct FlashOutputs {
  Element element;      // of FlashRow::output: Q's, or the accumulator's for a partial result
  Element lse_element;  // kFloat32 or kFloat64
  ScoreStage scores;    // which ones the caller wants
};

// Dropout of weights, which depends on their places in the full problem.
struct FlashDropout {
  double probability;  // 0: none
  uint64_t seed;
  int64_t batch;
  int64_t first_key;  // position of the task's first key
};

struct FlashEntmax {
  // 0: softmax. Above 1: entmax. 1: softmax in a problem where other heads may have entmax.
  double alpha;
  int64_t candidate_stride;  // candidates of a row, at most; more than the keys it sees by a vector
};

// Query rows of one batch row that read the same key/value head.
struct FlashTask {
  const FlashRow* rows;
  int64_t row_count;
  FlashBytes queries;
  FlashKeys keys;
  FlashKeys values;
  int64_t key_count;  // T
  FlashSpan part;     // all keys, or one split
  FlashSpan visible;  // the union of the rows' visible keys, within the part
  int64_t head_size;
  int64_t value_head_size;
  Element element;  // of Q, K, V and scores
  bool q8_0;        // rows of K and V are those of attention/q8_0.h
  FlashOutputs outputs;

  FlashVectors vectors;
  FlashAdditive additive;
  RotaryKeys rotary;  // keys that are rotated when they are read
  bool sparse;        // rows have a SparseRow
  FlashSelection selection;
  ScoreParams score;
  FlashDropout dropout;
  FlashEntmax entmax;

  Checkpoint checkpoint;
  std::byte* scratch;       // scratch_bytes(), aligned to 64
  std::byte* tile_scratch;  // tile_scratch_bytes(), aligned to 64
};

// lse and delta = sum dY Y - dlse of a query row; lse is -inf if no key is visible.
struct RowStatistics {
  double lse;
  double delta;
};

// The weights of a row of entmax, see entmax.inc. Written by the backward pass, which reads them
// again for the gradient of a mask.
struct EntmaxRow {
  double level, level_rest, threshold;  // as those of CandidateRow
  double inverse;                       // 1 / the sum of the weights
  bool ties;                            // all candidates weigh the same
};

// The backward pass of a FlashRow.
struct BackwardRow {
  int64_t output_gradient =
      0;  // Dv elements, at this byte offset into FlashBackward::output_gradients
  int64_t forward_output = 0;  // the same in forward_outputs, if the statistics come from them
  // In: lse, if given; delta, if both are known, otherwise -dlse. Out: both.
  RowStatistics* statistics = nullptr;
  EntmaxRow* entmax = nullptr;          // of entmax, which has no lse
  std::byte* query_gradient = nullptr;  // D elements, or null
  // Reals to which dX of key j is added, or null: by distance at index j, of the mask at index
  // j - part_begin.
  std::byte* distances = nullptr;
  std::byte* mask_gradient = nullptr;
  std::byte* weight_gradient =
      nullptr;  // D Reals to which that of additive_weight is added, or null
};

// Where the statistics of rows come from.
enum class StatisticsSource : uint8_t {
  kForwardPass,    // which the task computes first
  kForwardOutput,  // lse and Y are given
  kKnown,
};

// The backward pass of a FlashTask, whose output, lse and scores are not used.
struct FlashBackward {
  const FlashTask* task = nullptr;
  const BackwardRow* rows = nullptr;
  FlashBytes output_gradients = {};
  FlashBytes forward_outputs = {};
  StatisticsSource source = StatisticsSource::kKnown;
  Element gradient_element = Element::kFloat32;  // of query_gradient
  // Reals to which dK and dV of the T keys are added, or null. Rows are padded to vectors of
  // kVectorBytes.
  std::byte* key_gradients = nullptr;
  std::byte* value_gradients = nullptr;
};

// The time of a pair of row and key, relative to the forward pass.
inline constexpr int64_t kBackwardCost = 3;

// The time of an element of an additive score, relative to a product of two elements.
inline constexpr int64_t kAdditiveCost = 8;
// Row and key pairs between two checkpoints: tens of microseconds.
inline constexpr int64_t kCheckpointPairs = 24 * 1024;

// `scratch_bytes` returns the size of FlashTask::scratch. It reads only what LargestTask() of
// flash_tasks.h sets. `run` returns false if the checkpoint abandoned the task.
struct FlashKernel {
  int64_t (*scratch_bytes)(const FlashTask& task);
  bool (*run)(const FlashTask& task);
};
struct BackwardKernel {
  int64_t (*scratch_bytes)(const FlashBackward& backward);
  bool (*run)(const FlashBackward& backward);
};

// The only symbol that a kernel file exports.
struct KernelTable {
  FlashKernel flash_fp32;  // accumulates in fp32
  FlashKernel flash_fp64;
  // The size of FlashTask::tile_scratch for flash_fp32. Null if the set has no tiles.
  int64_t (*tile_scratch_bytes)(const FlashTask& task);
  RotateFunction rotate;
  BackwardKernel backward_fp32;
  BackwardKernel backward_fp64;
  // Store a row of accumulators as elements.
  void (*store_fp32)(Element element, const float* values, int64_t count, std::byte* row);
  void (*store_fp64)(Element element, const double* values, int64_t count, std::byte* row);
  LinearKernel linear_fp32;  // sums in fp32
  LinearKernel linear_fp64;
};

extern const KernelTable kPortableKernels;
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
extern const KernelTable kAvx512Bf16Kernels;
extern const KernelTable kAmxKernels;

// philox.h's DropoutKeeps for keys [begin, begin + count) of the task, out of line.
void DropoutKeepsOutOfLine(const FlashDropout& dropout, const FlashRow& row, int64_t begin,
                           int64_t count, bool* keep);

}  // namespace rapt::cpu

#endif  // RAPT_ATTENTION_CPU_KERNELS_H_
