// Any bytes as the problem of a C caller: rejected with a terminated message, or planned, and
// computed if small.
#include <rapt/attention.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "tests/fuzz/c_context.h"

namespace {

using Message = std::array<char, RAPT_MESSAGE_BYTES>;

void CheckRefusal(rapt_code code, const Message& message) {
  RAPT_CHECK(code != RAPT_OK, "no refusal");
  const void* const end = std::memchr(message.data(), '\0', message.size());
  RAPT_CHECK(end != nullptr && end != message.data(), "an error has no message");
}

size_t SizeOf(int32_t dtype) {
  switch (dtype) {
    case RAPT_FP64:
      return 8;
    case RAPT_FP32:
      return 4;
    case RAPT_BOOL:
      return 1;
    default:
      return 2;
  }
}

// Separate allocations with exactly the tensors' sizes.
class Tensors {
 public:
  void* Make(int32_t dtype, std::array<int64_t, 4> shape) {
    size_t bytes = SizeOf(dtype);
    for (const int64_t axis : shape) bytes *= static_cast<size_t>(axis);
    return tensors_.emplace_back(bytes, '\x3C').data();
  }

 private:
  std::vector<std::vector<char>> tensors_;
};

// Returns whether all tensors and the computation are small. REQUIRES: the problem is valid.
bool IsSmall(const rapt_problem& p) {
  double product = 1;
  for (const int64_t axis :
       {p.batch, p.query_heads, p.kv_heads, p.query_length, p.key_length + p.past_length,
        p.head_size + p.value_head_size, p.bias_table_buckets, p.relative_bias_length,
        p.relative_keys_length, p.relative_values_length, p.rotary_cache_rows, p.rotary_cache_batch,
        p.selected_count}) {
    product *= static_cast<double>(axis + 1);
  }
  return product < 1e6;
}

void Run(const rapt_problem& p, const rapt_plan& plan) {
  Tensors tensors;
  const int64_t b = p.batch, hq = p.query_heads, hkv = p.kv_heads, sq = p.query_length,
                sk = p.key_length, past = p.past_length, d = p.head_size, dv = p.value_head_size;
  const std::vector<int64_t> key_lengths(static_cast<size_t>(b), sk);
  rapt_arguments a = {};
  a.struct_size = sizeof(a);
  a.query.data = tensors.Make(p.dtype, {b, hq, sq, d});
  a.key.data = tensors.Make(p.dtype, {b, hkv, sk, d});
  a.value.data = tensors.Make(p.dtype, {b, hkv, sk, dv});
  a.mask.data = tensors.Make(p.mask_dtype,
                             {p.mask_shape[0], p.mask_shape[1], p.mask_shape[2], p.mask_shape[3]});
  a.bias.data = tensors.Make(p.bias_dtype,
                             {p.bias_shape[0], p.bias_shape[1], p.bias_shape[2], p.bias_shape[3]});
  a.alibi_slopes.data = tensors.Make(p.alibi_slopes_dtype, {p.alibi_slopes_batch, hq, 1, 1});
  a.bias_table.data = tensors.Make(p.bias_table_dtype, {p.bias_table_buckets, hq, 1, 1});
  a.relative_bias.data =
      tensors.Make(p.relative_bias_dtype, {p.relative_bias_heads, p.relative_bias_length, 1, 1});
  a.relative_keys.data =
      tensors.Make(p.relative_keys_dtype, {p.relative_keys_heads, p.relative_keys_length, d, 1});
  a.relative_values.data = tensors.Make(p.relative_values_dtype,
                                        {p.relative_values_heads, p.relative_values_length, dv, 1});
  a.relative_query.data = tensors.Make(p.dtype, {b, hq, sq, d});
  const int64_t cache_batch = p.rotary_cache_batch == 0 ? 1 : p.rotary_cache_batch;
  for (rapt_input* cache : {&a.cos_cache, &a.sin_cache}) {
    cache->data = tensors.Make(p.rotary_cache_dtype,
                               {cache_batch, p.rotary_cache_rows, p.rotary_cache_pairs, 1});
  }
  a.position_ids.data = tensors.Make(RAPT_FP64, {b, p.query_length, 1, 1});  // of 8 bytes, too
  a.key_position_ids.data = tensors.Make(RAPT_FP64, {b, p.key_length, 1, 1});
  a.additive_weight.data =
      tensors.Make(p.additive_weight_dtype, {p.additive_weight_heads, d, 1, 1});
  if (p.has_block_mask != 0) {
    const int64_t rows = (sq - 1) / p.block_q + 1, columns = (past + sk - 1) / p.block_k + 1;
    a.block_mask.data =
        tensors.Make(RAPT_BOOL, {p.block_mask_batch, p.block_mask_heads, rows, columns});
  }
  // As many bytes as INT32.
  a.selected_indices.data = tensors.Make(RAPT_FP32, {b, p.selected_heads, sq, p.selected_count});
  a.global_mask.data = tensors.Make(RAPT_BOOL, {b, past + sk, 1, 1});
  a.past_key.data = tensors.Make(p.dtype, {b, hkv, past, d});
  a.past_value.data = tensors.Make(p.dtype, {b, hkv, past, dv});
  a.key_lengths = key_lengths.data();
  a.output.data = tensors.Make(p.dtype, {b, hq, sq, dv});
  a.lse.data = tensors.Make(p.dtype == RAPT_FP64 ? RAPT_FP64 : RAPT_FP32, {b, hq, sq, 1});
  a.scores.data = tensors.Make(p.dtype, {b, hq, sq, past + sk});
  a.present_key.data = tensors.Make(p.dtype, {b, hkv, past + sk, d});
  a.present_value.data = tensors.Make(p.dtype, {b, hkv, past + sk, dv});
  Message message = {};
  const rapt_code code =
      rapt_run(&TheContext(), &plan, &a, nullptr, 0, message.data(), message.size());
  // An empty tensor has no address, which is rejected.
  if (code != RAPT_OK) CheckRefusal(code, message);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < sizeof(size_t)) return 0;
  // A caller's struct has the size that it states, also one of another version.
  std::vector<uint8_t> bytes(data, data + size);
  std::memcpy(bytes.data(), &size, sizeof(size));
  Message message = {};
  rapt_plan* plan = nullptr;
  const rapt_code code =
      rapt_plan_create(&TheContext(), reinterpret_cast<const rapt_problem*>(bytes.data()), &plan,
                       message.data(), message.size());
  if (code != RAPT_OK) {
    CheckRefusal(code, message);
    return 0;
  }
  rapt_problem problem = {};
  std::memcpy(&problem, bytes.data(), std::min(size, sizeof(problem)));
  if (problem.mask_dtype == 0) std::memset(problem.mask_shape, 0, sizeof(problem.mask_shape));
  if (problem.bias_dtype == 0) std::memset(problem.bias_shape, 0, sizeof(problem.bias_shape));
  if (problem.alibi_slopes_dtype == 0) problem.alibi_slopes_batch = 0;
  if (problem.bias_table_dtype == 0) problem.bias_table_buckets = 0;
  if (problem.relative_bias_dtype == 0) {
    problem.relative_bias_heads = problem.relative_bias_length = 0;
  }
  if (problem.relative_keys_dtype == 0) {
    problem.relative_keys_heads = problem.relative_keys_length = 0;
  }
  if (problem.relative_values_dtype == 0) {
    problem.relative_values_heads = problem.relative_values_length = 0;
  }
  if (problem.rotary_cache_dtype == 0) {
    problem.rotary_cache_batch = problem.rotary_cache_rows = problem.rotary_cache_pairs = 0;
  }
  if (problem.additive_weight_dtype == 0) problem.additive_weight_heads = 0;
  if (problem.has_selected_indices == 0) problem.selected_heads = problem.selected_count = 0;
  if (IsSmall(problem)) Run(problem, *plan);
  rapt_plan_destroy(plan);
  return 0;
}
