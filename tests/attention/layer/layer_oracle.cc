#include "tests/attention/layer/layer_oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "tests/support/oracle.h"

namespace rapt::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::optional<WeightTensor> Weight(bool given, const char* name, const Tensor& tensor,
                                   Shape shape) {
  if (!given) return std::nullopt;
  return WeightTensor{
      .name = name, .dtype = tensor.dtype(), .shape = shape, .data = tensor.View().data};
}

LinearWeights Linear(const LayerCase& c, bool given, const char* name, const char* bias_name,
                     const Tensor& matrix, const Tensor& bias) {
  if (!given) return {};
  const Shape shape = {matrix.dims()[2], matrix.dims()[3]};
  const int64_t columns = shape[c.transposed ? 1 : 0];
  return {.matrix = Weight(true, name, matrix, shape),
          .transposed = c.transposed,
          .bias = Weight(c.has_biases, bias_name, bias, {columns})};
}

// x + PE, rounded.
Tensor Encoded(const LayerCase& c, const Tensor& x) {
  if (!c.config.positional_base) return x;
  Tensor y = x;
  const auto [one, batch, length, size] = x.dims();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t s = 0; s < length; ++s) {
      for (int64_t n = 0; n < size; ++n) {
        const double exponent = -2.0 * static_cast<double>(n / 2) / static_cast<double>(size);
        const double angle = static_cast<double>(s) * std::pow(*c.config.positional_base, exponent);
        y.Set(0, b, s, n, x.At(0, b, s, n) + (n % 2 == 0 ? std::sin(angle) : std::cos(angle)));
      }
    }
  }
  return y;
}

// x Wᵀ + b for a row of x, rounded by the tensor that it is stored in.
double Product(const LayerCase& c, const Tensor& x, int64_t b, int64_t s, const Tensor& w,
               const Tensor& bias, int64_t n) {
  double sum = c.has_biases ? bias.At(0, 0, 0, n) : 0;
  for (int64_t k = 0; k < x.dims()[3]; ++k) {
    sum += x.At(0, b, s, k) * (c.transposed ? w.At(0, 0, k, n) : w.At(0, 0, n, k));
  }
  return sum;
}

// [B, heads, length, size], of which the last row is `extra` if it is given.
Tensor Heads(const LayerCase& c, bool projects, const Tensor& x, const Tensor& w,
             const Tensor& bias, int64_t heads, int64_t size, const Tensor* extra) {
  const int64_t length = x.dims()[2];
  Tensor out(c.dtype, {c.batch, heads, length + (extra != nullptr ? 1 : 0), size});
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t d = 0; d < size; ++d) {
        const int64_t n = h * size + d;
        for (int64_t s = 0; s < length; ++s) {
          out.Set(b, h, s, d, projects ? Product(c, x, b, s, w, bias, n) : x.At(0, b, s, n));
        }
        if (extra != nullptr) out.Set(b, h, length, d, extra->At(0, 0, 0, n));
      }
    }
  }
  return out;
}

void Normalize(const LayerCase& c, const Tensor& weights, Tensor& x) {
  const auto [batch, heads, length, size] = x.dims();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t s = 0; s < length; ++s) {
        double squares = 0;
        for (int64_t d = 0; d < size; ++d) squares += std::pow(x.At(b, h, s, d), 2);
        const double root = std::sqrt(squares / static_cast<double>(size) + c.config.norm_epsilon);
        for (int64_t d = 0; d < size; ++d) {
          x.Set(b, h, s, d, x.At(b, h, s, d) / root * weights.At(0, 0, 0, d));
        }
      }
    }
  }
}

// Element (b, h, i, j) of attn_mask: 1 and 0, or what is added.
double MaskAt(const LayerCase& c, const LayerTensors& t, int64_t b, int64_t h, int64_t i,
              int64_t j) {
  const int64_t last = c.mask_shape.back();
  if (last != 1 && j >= last) return *c.mask == DType::kBool ? 0 : -kInfinity;
  return t.mask.At(b, h, i, j);
}

bool IsVisible(const LayerCase& c, const LayerTensors& t, int64_t b, int64_t h, int64_t i,
               int64_t j) {
  if (j == c.sk()) return true;  // of bias_k
  if (c.is_causal && j > i) return false;
  if (c.config.sliding_window && j <= i - *c.config.sliding_window) return false;
  if (!c.lengths.empty() && j >= c.lengths[b]) return false;
  if (c.has_ids && t.ids.At(0, 0, b, j) == static_cast<double>(*c.config.pad_token_id)) {
    return false;
  }
  return c.mask != DType::kBool || MaskAt(c, t, b, h, i, j) != 0;
}

Tensor Filled(DType dtype, Dims dims, Rng& rng, double magnitude) {
  return Tensor(dtype, dims, Storage::kMisaligned).FillUniform(rng, -magnitude, magnitude);
}

}  // namespace

LayerTensors RandomLayer(const LayerCase& c, uint64_t seed) {
  Rng rng(seed);
  const auto matrix = [&](int64_t out, int64_t in) {
    const double magnitude = 2 / std::sqrt(static_cast<double>(in));
    const Dims dims = c.transposed ? Dims{1, 1, in, out} : Dims{1, 1, out, in};
    return Filled(c.weight, dims, rng, magnitude);
  };
  const auto vector = [&](int64_t count, double magnitude) {
    return Filled(c.weight, {1, 1, 1, count}, rng, magnitude);
  };
  const int64_t q = c.heads() * c.head_size();
  const int64_t k = c.kv_heads() * c.head_size();
  const int64_t v = c.kv_heads() * c.value_head_size();
  const int64_t o = c.heads() * c.value_head_size();
  LayerTensors t;
  t.wq = matrix(q, c.config.embed_size);
  t.wk = matrix(k, c.key_embed());
  t.wv = matrix(v, c.value_embed());
  t.wo = matrix(c.y_size(), o);
  t.bq = vector(q, 1);
  t.bk = vector(k, 1);
  t.bv = vector(v, 1);
  t.bo = vector(c.y_size(), 1);
  t.extra_k = vector(k, 2);
  t.extra_v = vector(v, 2);
  t.q_norm = vector(c.head_size(), 2);
  t.k_norm = vector(c.head_size(), 2);
  t.sinks = vector(c.heads(), 2);
  t.additive = vector(c.head_size(), 1);
  t.table = Filled(c.weight, {1, 1, std::max<int64_t>(c.buckets, 1), c.heads()}, rng, 2);
  t.query = Filled(c.dtype, {1, c.batch, c.queries, c.config.embed_size}, rng, 2);
  t.key = Filled(c.dtype, {1, c.batch, c.sk(), c.key_embed()}, rng, 2);
  t.value = Filled(c.dtype, {1, c.batch, c.sk(), c.value_embed()}, rng, 2);
  t.ids = Tensor(DType::kInt64, {1, 1, c.batch, c.sk()}, Storage::kMisaligned);
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t j = 0; j < c.sk(); ++j) {
      t.ids.Set(0, 0, b, j, static_cast<double>(UniformInt(rng, 0, 2)));
    }
  }
  if (!c.mask) return t;
  Dims dims = {1, 1, 1, 1};
  std::copy_backward(c.mask_shape.begin(), c.mask_shape.end(), dims.end());
  t.mask = Tensor(*c.mask, dims);
  *c.mask == DType::kBool ? t.mask.FillBool(rng, 0.6) : t.mask.FillUniform(rng, -2, 2);
  return t;
}

LayerWeights WeightsOf(const LayerCase& c, const LayerTensors& t) {
  const auto vector = [](bool given, const char* name, const Tensor& tensor) {
    return Weight(given, name, tensor, {tensor.dims()[3]});
  };
  const bool additive = c.config.score_function == ScoreFunction::kAdditive;
  return {
      .q = Linear(c, c.has_q, "wq", "bq", t.wq, t.bq),
      .k = Linear(c, c.has_k, "wk", "bk", t.wk, t.bk),
      .v = Linear(c, c.has_v, "wv", "bv", t.wv, t.bv),
      .o = Linear(c, c.has_o, "wo", "bo", t.wo, t.bo),
      .bias_k = vector(c.has_extra_key, "bias_k", t.extra_k),
      .bias_v = vector(c.has_extra_key, "bias_v", t.extra_v),
      .q_norm = vector(c.has_norms, "q_norm", t.q_norm),
      .k_norm = vector(c.has_norms, "k_norm", t.k_norm),
      .sinks = vector(c.has_sinks, "sinks", t.sinks),
      .relative_attention_bias = Weight(c.buckets > 0, "table", t.table, {c.buckets, c.heads()}),
      .additive_weight = vector(additive, "additive", t.additive)};
}

LayerCall CallOf(const LayerCase& c) {
  LayerCall call;
  call.inputs[Role::kQ] = TensorSpec{c.dtype, {c.batch, c.queries, c.config.embed_size}};
  if (c.tokens) call.inputs[Role::kK] = TensorSpec{c.dtype, {c.batch, c.sk(), c.key_embed()}};
  if (c.has_value) {
    call.inputs[Role::kV] = TensorSpec{c.dtype, {c.batch, c.sk(), c.value_embed()}};
  }
  if (c.mask) call.inputs[Role::kMask] = TensorSpec{*c.mask, c.mask_shape};
  if (!c.lengths.empty()) call.inputs[Role::kKeyLengths] = TensorSpec{DType::kInt64, {c.batch}};
  if (c.has_ids) call.inputs[kInputIds] = TensorSpec{DType::kInt64, {c.batch, c.sk()}};
  call.is_causal = c.is_causal;
  call.dropout = c.dropout;
  call.wants_weights = c.wants_weights;
  call.wants_averaged_weights = c.wants_averaged_weights;
  return call;
}

LayerWant WantOf(const LayerCase& c, const LayerTensors& t) {
  const Tensor query = Encoded(c, t.query);
  const Tensor key = c.tokens ? Encoded(c, t.key) : query;
  const Tensor value = c.has_value ? Encoded(c, t.value) : key;
  Inputs in;
  in.query = Heads(c, c.has_q, query, t.wq, t.bq, c.heads(), c.head_size(), nullptr);
  in.key = Heads(c, c.has_k, key, t.wk, t.bk, c.kv_heads(), c.head_size(),
                 c.has_extra_key ? &t.extra_k : nullptr);
  in.value = Heads(c, c.has_v, value, t.wv, t.bv, c.kv_heads(), c.value_head_size(),
                   c.has_extra_key ? &t.extra_v : nullptr);
  if (c.has_norms) {
    Normalize(c, t.q_norm, in.query);
    Normalize(c, t.k_norm, in.key);
  }
  const Dims pairs = {c.batch, c.heads(), c.queries, c.keys()};
  in.mask = Tensor(DType::kBool, pairs);
  const bool adds = c.mask && *c.mask != DType::kBool;
  if (adds) in.bias = Tensor(*c.mask, pairs);
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.heads(); ++h) {
      for (int64_t i = 0; i < c.queries; ++i) {
        for (int64_t j = 0; j < c.keys(); ++j) {
          in.mask->Set(b, h, i, j, IsVisible(c, t, b, h, i, j) ? 1 : 0);
          if (adds) in.bias->Set(b, h, i, j, j == c.sk() ? 0 : MaskAt(c, t, b, h, i, j));
        }
      }
    }
  }
  // FP32 or the type of Q, as attention's small tensors are.
  const auto vector = [&](const Tensor& from, Dims dims) {
    Tensor out(c.weight == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32, dims);
    const std::vector<double> numbers = from.ToVector();
    for (int64_t n = 0; n < dims[0] * dims[1]; ++n) {
      out.Set(n / dims[1], n % dims[1], 0, 0, numbers[n]);
    }
    return out;
  };
  Problem p{.dtype = c.dtype,
            .batch = c.batch,
            .query_heads = c.heads(),
            .kv_heads = c.kv_heads(),
            .query_length = c.queries,
            .key_length = c.keys(),
            .head_size = c.head_size(),
            .value_head_size = c.value_head_size(),
            .scale = c.config.scale,
            .mask = MaskShape{DType::kBool, pairs},
            .dropout = c.dropout,
            .interleaved = c.config.interleaved,
            .rotary_embedding_dim = c.config.rotary_embedding_dim,
            .rope_theta = c.config.rope_theta,
            .rope_scaling = c.config.rope_scaling,
            .score_function = c.config.score_function,
            .score_output = ScoreOutput::kWeights};
  if (adds) p.bias = MaskShape{*c.mask, pairs};
  if (c.has_sinks) {
    in.head_sink = vector(t.sinks, {c.heads(), 1, 1, 1});
    p.head_sink = in.head_sink->dtype();
  }
  if (c.buckets > 0) {
    in.bias_table = vector(t.table, {c.buckets, c.heads(), 1, 1});
    p.bias_table = BiasTable{in.bias_table->dtype(), c.buckets};
    p.is_bidirectional = !c.is_causal;
    p.max_distance = c.config.max_distance;
  }
  if (p.is_additive()) {
    in.additive_weight = vector(t.additive, {1, c.head_size(), 1, 1});
    p.additive_weight = AdditiveWeight{in.additive_weight->dtype(), 1};
  }
  const Expected expected = Attend(p, in);
  LayerWant want;
  for (const double score : expected.row_max_score) {
    want.most_score = std::max(want.most_score, score);
  }
  for (const double sum : expected.row_weight_sum) {
    want.most_score = std::max(want.most_score, sum);
  }
  want.weights = expected.scores;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t n = 0; n < c.queries * c.keys(); ++n) {
      double sum = 0;
      for (int64_t h = 0; h < c.heads(); ++h) {
        sum += RoundTo(c.dtype, want.weights[(b * c.heads() + h) * c.queries * c.keys() + n]);
      }
      want.averaged.push_back(sum / static_cast<double>(c.heads()));
    }
  }
  // The heads side by side.
  Tensor rows(c.dtype, {1, c.batch, c.queries, c.heads() * c.value_head_size()});
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.heads(); ++h) {
      for (int64_t i = 0; i < c.queries; ++i) {
        for (int64_t d = 0; d < c.value_head_size(); ++d) {
          const int64_t from = ((b * c.heads() + h) * c.queries + i) * c.value_head_size() + d;
          rows.Set(0, b, i, h * c.value_head_size() + d, expected.output[from]);
        }
      }
    }
  }
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t i = 0; i < c.queries; ++i) {
      for (int64_t n = 0; n < c.y_size(); ++n) {
        want.y.push_back(c.has_o ? Product(c, rows, b, i, t.wo, t.bo, n) : rows.At(0, b, i, n));
      }
    }
  }
  return want;
}

}  // namespace rapt::test
