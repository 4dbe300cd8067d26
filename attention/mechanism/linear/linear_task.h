// The interface between the operator and what computes it: the recurrence in float64 and the
// kernels of each instruction set. Plain structs without functions, because kernels of every
// instruction set include this header (docs/decisions/0001).
#ifndef RAPT_ATTENTION_MECHANISM_LINEAR_LINEAR_TASK_H_
#define RAPT_ATTENTION_MECHANISM_LINEAR_LINEAR_TASK_H_

#include <cstddef>
#include <cstdint>

#include "attention/checkpoint.h"
#include "attention/score/score.h"
#include "rapt/choices.h"

namespace rapt {

enum class DecayKind : uint8_t {
  kNone,
  kPerHead,
  kPerKey,  // a number for each of the key_size numbers of a key
};

// The most tokens that a kernel computes at once. More of them cost more for the products among
// themselves than they save in reading the state: 24 takes 0.9 of the time of 64 at 128 x 128.
inline constexpr int64_t kMostChunk = 24;

// Rows of a tensor, `stride` bytes apart; null: absent.
struct LinearRows {
  const std::byte* data;
  int64_t stride;
  Element element;
};

// The state of a key/value head, or a block of its columns: a row of value columns and a sum of
// features for each feature. Null: absent.
struct LinearState {
  const std::byte* rows;
  Element element;
  const std::byte* normalizer;
  Element normalizer_element;
};
struct LinearPresent {
  std::byte* rows;
  std::byte* normalizer;
  Element element;
};

// A key/value head of a batch row with its group of query heads, or a block of the head's value
// columns, which are independent of each other.
struct LinearTask {
  // A row for each token. `query` and `output` are of the group's first head.
  LinearRows query;  // the next head is key_size elements further
  LinearRows key;
  LinearRows value;
  LinearRows decay;       // if decay_kind says so
  LinearRows beta;        // one number, if is_delta
  LinearRows projection;  // a row for each feature
  std::byte* output;      // the next head is value_size elements further
  int64_t output_stride;
  Element output_element;

  LinearState past;
  LinearPresent present;
  int64_t state_stride;  // elements from one row of a state to the next

  int64_t group;       // query heads
  int64_t length;      // of the output; what is beyond `tokens` is 0
  int64_t tokens;      // that count
  int64_t key_size;    // d_k
  int64_t features;    // d_k, or m
  int64_t value_size;  // d_v
  int64_t columns;     // of this task
  int64_t chunk;       // tokens computed at once, at most kMostChunk

  bool is_causal;  // false: every query sees all tokens; without decay and delta rule
  bool is_delta;   // has beta
  DecayKind decay_kind;
  bool is_normalized;
  FeatureMap feature_map;
  double scale;

  Checkpoint checkpoint;
  std::byte* scratch;  // scratch_bytes(), aligned to 64
};

struct LinearKernel {
  // Reads no pointers.
  int64_t (*scratch_bytes)(const LinearTask& task);
  // Returns false if the checkpoint abandoned the task.
  bool (*run)(const LinearTask& task);
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_LINEAR_LINEAR_TASK_H_
