#include "attention/layer/layer_mask.h"

#include <algorithm>
#include <limits>

#include "attention/half.h"
#include "base/round_up.h"

namespace rapt {
namespace {

// Keys of a task, approximately.
constexpr int64_t kTaskKeys = 64 * 1024;

int64_t RowsOf(const MaskShape& shape) { return shape.dims[0] * shape.dims[1] * shape.dims[2]; }

}  // namespace

TensorView MaskView(const MaskShape& shape, const std::byte* data) {
  TensorView view = {data, shape.dtype, shape.dims, RowMajorStrides(shape.dims)};
  for (size_t axis = 0; axis < view.dims.size(); ++axis) {
    if (view.dims[axis] == 1) view.strides[axis] = 0;
  }
  return view;
}

LayerMask::LayerMask(const LayerShape& shape) : shape_(shape) {
  const bool pads = shape.has_lengths || shape.has_ids;
  const bool is_bool = shape.mask && shape.mask->dtype == DType::kBool;
  const bool has_extra = shape.has_extra_key();
  if (shape.mask) (is_bool ? mask_ : bias_) = shape.mask;
  writes_bias_ = bias_ && has_extra;
  if (writes_bias_) bias_->dims[3] = shape.keys();
  writes_mask_ = pads || (has_extra && (is_bool || shape.is_causal));
  if (!writes_mask_) return;
  if (!mask_) mask_.emplace();
  if (pads) mask_->dims[0] = shape.batch;
  if (has_extra && shape.is_causal) mask_->dims[2] = shape.queries;
  mask_->dims[3] = shape.keys();
}

int64_t LayerMask::RowsOfTask() const {
  return std::max<int64_t>(kTaskKeys / std::max<int64_t>(shape_.keys(), 1), 1);
}

int64_t LayerMask::TasksOf(const MaskShape& shape) const {
  return CeilDiv(RowsOf(shape), RowsOfTask());
}

void LayerMask::Write(const Arguments& arguments, int64_t task, std::byte* mask,
                      std::byte* bias) const {
  const bool is_bias = task >= MaskTasks();
  if (is_bias) task -= MaskTasks();
  const MaskShape& shape = is_bias ? *bias_ : *mask_;
  const int64_t end = std::min((task + 1) * RowsOfTask(), RowsOf(shape));
  for (int64_t row = task * RowsOfTask(); row < end; ++row) {
    const int64_t i = row % shape.dims[2];
    const int64_t h = row / shape.dims[2] % shape.dims[1];
    const int64_t b = row / shape.dims[2] / shape.dims[1];
    const int64_t offset = row * shape.dims[3] * SizeOf(shape.dtype);
    is_bias ? WriteBiasRow(arguments, b, h, i, bias + offset)
            : WriteMaskRow(arguments, b, h, i, mask + offset);
  }
}

void LayerMask::WriteMaskRow(const Arguments& arguments, int64_t b, int64_t h, int64_t i,
                             std::byte* row) const {
  int64_t end = shape_.tokens;
  if (shape_.has_lengths) end = std::min(end, arguments.key_lengths[b]);
  if (shape_.has_extra_key() && shape_.is_causal) end = std::min(end, i + 1);
  const bool has_mask = shape_.mask && shape_.mask->dtype == DType::kBool;
  const TensorView given =
      has_mask ? MaskView(*shape_.mask, arguments.inputs[Role::kMask].data) : TensorView();
  if (has_mask && given.dims[3] != 1) end = std::min(end, given.dims[3]);
  const std::byte* const attends = has_mask ? given.Row(b, h, i) : nullptr;
  const std::byte* const ids = arguments.inputs[kInputIds].data;
  for (int64_t j = 0; j < shape_.tokens; ++j) {
    bool sees = j < end;
    if (sees && has_mask) sees = attends[j * given.strides[3]] != std::byte{0};
    if (sees && shape_.has_ids) {
      sees = LoadAs<int64_t>(ids, b * shape_.tokens + j) != *shape_.config().pad_token_id;
    }
    row[j] = std::byte{sees};
  }
  if (shape_.has_extra_key()) row[shape_.tokens] = std::byte{1};
}

void LayerMask::WriteBiasRow(const Arguments& arguments, int64_t b, int64_t h, int64_t i,
                             std::byte* row) const {
  const TensorView given = MaskView(*shape_.mask, arguments.inputs[Role::kMask].data);
  const std::byte* const from = given.Row(b, h, i);
  for (int64_t j = 0; j < shape_.tokens; ++j) {
    const bool has = given.dims[3] == 1 || j < given.dims[3];
    StoreElement(row, given.dtype, j,
                 has ? LoadElement(from, given.dtype, j * given.strides[3])
                     : -std::numeric_limits<double>::infinity());
  }
  StoreElement(row, given.dtype, shape_.tokens, 0);
}

}  // namespace rapt
