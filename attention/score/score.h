// The parameters of the score policies for a problem and a query row. Plain structs: kernels of
// every instruction set include this header, so it has no functions (docs/decisions/0001).
#ifndef RAPT_ATTENTION_SCORE_SCORE_H_
#define RAPT_ATTENTION_SCORE_SCORE_H_

#include <cstddef>
#include <cstdint>

namespace rapt {

enum class Element : uint8_t { kFloat32, kFloat16, kBFloat16, kFloat64, kBool };

// The stages of a row's scores that a caller may request.
enum class ScoreStage : uint8_t { kNone, kScores, kSoftcapped, kBiased, kWeights };

// Of attn_mask, attention_bias or the biases by distance.
struct MaskParams {
  Element element;
  int64_t step;   // elements from one key to the next; 0 if it broadcasts
  int64_t count;  // keys beyond it are hidden; T if it broadcasts
};

// Of the block mask and the global mask, in elements.
struct SparseParams {
  int64_t block_keys;   // keys of an entry of the block mask
  int64_t block_step;   // from one entry to the next
  int64_t global_step;  // from one key to the next
};

struct ScoreParams {
  double scale;
  double softcap;  // 0: none
  MaskParams mask;
  MaskParams bias;
  MaskParams relative;
  SparseParams sparse;
};

// Which keys in a ScoreRow's [begin, end) a row sees besides those that masks and biases hide.
struct SparseRow {
  int64_t window_begin;      // keys outside [window_begin, window_end) are hidden, except
  int64_t window_end;        //
  int64_t prefix_end;        // those before prefix_end
  const std::byte* global;   // and those with a nonzero byte here; or null
  const std::byte* blocks;   // a nonzero byte for each block of visible keys, or null
  const uint64_t* selected;  // a bit for each visible key, or null
};

struct ScoreRow {
  int64_t begin;  // keys visible by causality, window and lengths: [begin, end)
  int64_t end;
  const std::byte* mask;      // the row of the mask, or null
  const std::byte* bias;      // of a float type, or null
  const std::byte* relative;  // the bias of each key by distance, or null; a slice of a table
  const SparseRow* sparse;    // null: every key in [begin, end) is visible
  double sink;                // the score of one more key without a value; -inf: none
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_SCORE_SCORE_H_
