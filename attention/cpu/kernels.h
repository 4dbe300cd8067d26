// What the kernels of every instruction set take and give. Each set is one file, compiled with its
// own flags from the one source flash.inc, in a namespace of its own; AMX's adds a loop over tiles.
// They share nothing but these plain structs (an inline function of a header, compiled for AVX-512,
// could be the copy that the linker keeps for every machine).
#ifndef RAPT_ATTENTION_CPU_KERNELS_H_
#define RAPT_ATTENTION_CPU_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "attention/checkpoint.h"
#include "base/byte_slice.h"

namespace rapt::cpu {

enum class Element : uint8_t { kFloat32, kFloat16, kBFloat16, kFloat64, kBool };
enum class ScoreStage : uint8_t { kNone, kScores, kSoftcapped, kBiased, kWeights };

// Keys that a step folds in: K transposed, V and a block of scores stay in the first two cache
// levels.
inline constexpr int64_t kKeyBlock = 64;
// The same with tiles, whose sums wander between registers and memory once a step.
inline constexpr int64_t kTileKeyBlock = 128;
// Query rows that share one block of scores; a multiple of every kernel's register block.
inline constexpr int64_t kRowBlock = 48;
// The most query rows of a task, in row blocks: they share one packing of K and V. O of D 64 fills
// 96 KiB of L2.
inline constexpr int64_t kMostRowBlocks = 8;
// Up to so many rows of a task K and V are read in place rather than packed.
inline constexpr int64_t kFewRows = 8;
// Rows of K or V that are joined at a time, where slices part them; as many as the widest vector
// has lanes.
inline constexpr int64_t kJoinedRows = 16;
// O and V rows are padded to a whole number of the widest vector, 64 bytes.
inline constexpr int64_t kVectorBytes = 64;

// One query row of a task: where it comes from and goes to, and which keys it may see.
struct FlashRow {
  int64_t query;          // D elements, so many bytes into FlashTask::queries
  std::byte* output;      // Dv elements
  std::byte* lse;         // one element, or null
  std::byte* scores;      // T elements, or null
  const std::byte* mask;  // its mask row, or null
  int64_t begin;          // visible keys, before the mask
  int64_t end;
  int64_t head;  // h and i, counted in the whole problem, name the row to dropout
  int64_t index;
};

// Bytes in one piece, at `data`, or in slices, from `offset` on.
struct FlashBytes {
  const std::byte* data;  // null: in slices
  const ByteSlice* slices;
  int64_t slice_count;
  int64_t offset;
};

// Rows of K or V: the past's, then the new ones. Strides in bytes.
struct FlashKeys {
  FlashBytes past;
  int64_t past_stride;
  int64_t past_count;
  FlashBytes now;
  int64_t now_stride;
};

// Query rows of one batch row that read the same key/value head.
struct FlashTask {
  const FlashRow* rows;
  int64_t row_count;
  FlashBytes queries;
  FlashKeys keys;
  FlashKeys values;
  int64_t key_count;             // T
  int64_t part_begin, part_end;  // the keys that are this task's: all, or one split of them
  int64_t begin, end;            // the union of the rows' visible keys, within the part
  int64_t head_size;
  int64_t value_head_size;
  Element element;         // of Q, K, V and scores
  Element output_element;  // Q's, or the accumulator's for a part that is yet to be merged
  Element lse_element;     // kFloat32 or kFloat64

  double scale;
  double softcap;  // 0: none
  Element mask_element;
  int64_t mask_step;   // elements from one key's mask to the next; 0 where it broadcasts
  int64_t mask_count;  // keys beyond it are masked; T where it broadcasts
  ScoreStage score_stage;

  double dropout;  // 0: none
  uint64_t seed;
  int64_t batch;
  int64_t first_key;  // where the keys begin in the whole problem

  Checkpoint checkpoint;

  std::byte* scratch;       // FlashScratchBytes(), aligned to 64
  std::byte* tile_scratch;  // tile_scratch_bytes(), aligned to 64
};

// Row and key pairs that a task works on from one checkpoint to the next: some tens of
// microseconds.
inline constexpr int64_t kCheckpointPairs = 24 * 1024;

// The one thing that a kernel file exports.
struct KernelTable {
  // False where the checkpoint had the task given up.
  bool (*flash_fp32)(const FlashTask& task);  // accumulates in fp32
  bool (*flash_fp64)(const FlashTask& task);
  // What the first needs for tiles, of a task that is a problem's with so many rows; null where the
  // set has no tiles.
  int64_t (*tile_scratch_bytes)(const FlashTask& task);
};

extern const KernelTable kPortableKernels;
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
extern const KernelTable kAmxKernels;

// philox.h's DropoutKeeps, out of line.
void DropoutKeepsOutOfLine(double p, uint64_t seed, int64_t b, int64_t h, int64_t i, int64_t begin,
                           int64_t count, bool* keep);

}  // namespace rapt::cpu

#endif  // RAPT_ATTENTION_CPU_KERNELS_H_
