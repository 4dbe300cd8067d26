#include "tests/support/padding.h"

#include <algorithm>
#include <optional>

#include "base/round_up.h"

namespace rapt::test {
namespace {

// Returns the first positions of the axis; all of an axis that broadcasts.
Tensor FirstOf(const Tensor& tensor, int axis, int64_t count) {
  return SliceAxis(tensor, axis, 0, std::min(count, tensor.dims()[axis]));
}

// Keeps batch row b and the first positions of up to two axes of a tensor that is given.
struct Cut {
  int64_t b;

  void operator()(std::optional<Tensor>& tensor) const {
    if (tensor) tensor = SliceAxis(*tensor, 0, b, 1);
  }
  void operator()(std::optional<Tensor>& tensor, int axis, int64_t count) const {
    (*this)(tensor);
    if (tensor) tensor = FirstOf(*tensor, axis, count);
  }
  void operator()(std::optional<Tensor>& tensor, int64_t queries, int64_t keys) const {
    (*this)(tensor, 2, queries);
    if (tensor) tensor = FirstOf(*tensor, 3, keys);
  }
};

}  // namespace

Tensor RowsOf(const Tensor& output, int64_t b, int64_t count) {
  return FirstOf(SliceAxis(output, 0, b, 1), 2, count);
}

RowAlone AloneOf(const Problem& problem, const Inputs& inputs, int64_t b) {
  RowAlone alone{problem, inputs};
  Problem& p = alone.problem;
  Inputs& in = alone.inputs;
  p.batch = 1;
  p.has_key_lengths = p.wants_present = false;
  p.score_output.reset();
  p.backward.reset();
  p.key_length = inputs.key_lengths[b];
  p.query_length = std::min(problem.query_length, p.key_length);
  in.key_lengths.clear();
  in.query = RowsOf(inputs.query, b, p.query_length);
  in.key = RowsOf(inputs.key, b, p.key_length);
  if (!p.values_in_keys) in.value = RowsOf(inputs.value, b, p.key_length);
  const Cut cut{b};
  cut(in.past_key);
  cut(in.past_value);
  cut(in.relative_query, 2, p.query_length);
  cut(in.position_ids, 1, p.query_length);
  cut(in.key_position_ids, 1, p.key_length);
  cut(in.global_mask, 1, p.total_keys());
  cut(in.selected, 2, p.query_length);
  cut(in.mask, p.query_length, p.total_keys());
  cut(in.bias, p.query_length, p.total_keys());
  if (p.mask) p.mask->dims = in.mask->dims();
  if (p.bias) p.bias->dims = in.bias->dims();
  if (p.block_mask) {
    cut(in.block_mask, CeilDiv(p.query_length, *p.block_q), CeilDiv(p.total_keys(), *p.block_k));
    p.block_mask = in.block_mask->dims();
  }
  if (p.alibi_slopes) {
    cut(in.alibi_slopes);
    p.alibi_slopes->batch = 1;
  }
  if (p.rotary_cache && !p.rotary_cache->by_position()) {
    cut(in.cos_cache, 1, p.query_length);
    cut(in.sin_cache, 1, p.query_length);
    p.rotary_cache->batch = 1;
    p.rotary_cache->rows = p.query_length;
  }
  return alone;
}

}  // namespace rapt::test
