// Which mask and bias attention gets for a call of a layer. Lengths and ids hide keys by a mask, so
// that they move neither causality nor positions. The key of bias_k is visible whatever hides
// others; so causality, which would hide it, is then a part of the mask.
#ifndef RAPT_ATTENTION_LAYER_LAYER_MASK_H_
#define RAPT_ATTENTION_LAYER_LAYER_MASK_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "attention/layer/layer_shape.h"
#include "attention/problem.h"

namespace rapt {

class LayerMask {
 public:
  explicit LayerMask(const LayerShape& shape);

  // Absent: attention has none.
  const std::optional<MaskShape>& mask() const { return mask_; }
  const std::optional<MaskShape>& bias() const { return bias_; }
  // Whether they have to be written; otherwise they are attn_mask.
  bool writes_mask() const { return writes_mask_; }
  bool writes_bias() const { return writes_bias_; }
  // Whether attention hides later keys.
  bool causal() const { return shape_.is_causal && !shape_.has_extra_key(); }

  int64_t tasks() const { return MaskTasks() + BiasTasks(); }
  // Writes a part of the row-major mask or bias.
  void Write(const Arguments& arguments, int64_t task, std::byte* mask, std::byte* bias) const;

 private:
  int64_t MaskTasks() const { return writes_mask_ ? TasksOf(*mask_) : 0; }
  int64_t BiasTasks() const { return writes_bias_ ? TasksOf(*bias_) : 0; }
  int64_t TasksOf(const MaskShape& shape) const;
  int64_t RowsOfTask() const;
  void WriteMaskRow(const Arguments& arguments, int64_t b, int64_t h, int64_t i,
                    std::byte* row) const;
  void WriteBiasRow(const Arguments& arguments, int64_t b, int64_t h, int64_t i,
                    std::byte* row) const;

  const LayerShape& shape_;
  std::optional<MaskShape> mask_;
  std::optional<MaskShape> bias_;
  bool writes_mask_ = false;
  bool writes_bias_ = false;
};

// Returns the view of a row-major mask or bias, in which axes of 1 broadcast.
TensorView MaskView(const MaskShape& shape, const std::byte* data);

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_LAYER_MASK_H_
