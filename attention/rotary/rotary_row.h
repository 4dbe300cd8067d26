// One row to rotate. A plain struct: kernels of every instruction set include this header, so it
// has no functions (docs/decisions/0001).
#ifndef RAPT_ATTENTION_ROTARY_ROTARY_ROW_H_
#define RAPT_ATTENTION_ROTARY_ROTARY_ROW_H_

#include <cstddef>
#include <cstdint>

#include "attention/score/score.h"

namespace rapt {

struct RotaryRow {
  const std::byte* from;  // `size` elements with any alignment
  std::byte* to;          // the same; may be `from`
  const std::byte* cos;   // `pairs` numbers: double for kFloat64, otherwise float
  const std::byte* sin;
  int64_t pairs;
  int64_t size;      // at least 2 * pairs; the elements after the pairs are copied
  bool interleaved;  // pairs (2t, 2t + 1), otherwise (t, t + pairs)
  Element element;   // a float type
};

// Rotates each pair (x, y) to (x cos - y sin, y cos + x sin). All functions of this type return the
// same bits: they compute in double, in which the products of floats are exact, and round to float
// and then to the element. kFloat64 is rotated by RotateRow() alone.
using RotateFunction = void (*)(const RotaryRow& row);

// Keys of one batch row that a kernel rotates when it reads them.
struct RotaryKeys {
  RotateFunction rotate;  // null: none
  int64_t begin;          // the keys before it are rotated already
  RotaryRow row;          // of key `begin`, without `from` and `to`
  int64_t angles_step;    // bytes from one key's cosines, or sines, to the next one's
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_ROTARY_ROTARY_ROW_H_
