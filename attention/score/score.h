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

struct ScoreParams {
  double scale;
  double softcap;  // 0: none
  MaskParams mask;
  MaskParams bias;
  MaskParams relative;
};

struct ScoreRow {
  int64_t begin;  // keys visible by causality, window and lengths: [begin, end)
  int64_t end;
  const std::byte* mask;      // the row of the mask, or null
  const std::byte* bias;      // of a float type, or null
  const std::byte* relative;  // the bias of each key by distance, or null; a slice of a table
  double sink;                // the score of one more key without a value; -inf: none
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_SCORE_SCORE_H_
