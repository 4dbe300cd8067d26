#include "attention/layer/packed_layer.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "attention/arena.h"
#include "attention/field_names.h"
#include "attention/half.h"
#include "attention/layer/layer_operator.h"
#include "attention/layer/layer_shape.h"
#include "base/checked_math.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

// A matrix and what it has to be.
struct MatrixSpec {
  const char* field;
  const LinearWeights& weights;
  int64_t depth;
  int64_t columns;
};

// A vector and what it has to be.
struct VectorSpec {
  const char* field;
  const std::optional<WeightTensor>& tensor;
  Shape shape;
  bool by_count = false;  // the file may have other axes for as many numbers
};

// The product; more than any axis if it overflows.
int64_t Product(int64_t a, int64_t b) { return CheckedMul(a, b).value_or(kMaxAxis + 1); }

// The tensors of a layer, in the order of Matrix and Vector.
class Specs {
 public:
  Specs(const LayerConfig& c, const LayerWeights& w)
      : query_size_(Product(c.query_heads, *c.head_size)),
        key_size_(Product(*c.kv_heads, *c.head_size)),
        value_size_(Product(*c.kv_heads, *c.value_head_size)),
        heads_size_(Product(c.query_heads, *c.value_head_size)),
        output_size_(OutputSize(w.o, heads_size_)),
        matrices{{{"q", w.q, c.embed_size, query_size_},
                  {"k", w.k, *c.key_embed_size, key_size_},
                  {"v", w.v, *c.value_embed_size, value_size_},
                  {"o", w.o, heads_size_, output_size_}}},
        vectors{{{"the bias of q", w.q.bias, {query_size_}},
                 {"the bias of k", w.k.bias, {key_size_}},
                 {"the bias of v", w.v.bias, {value_size_}},
                 {"the bias of o", w.o.bias, {output_size_}},
                 {"bias_k", w.bias_k, {key_size_}, true},
                 {"bias_v", w.bias_v, {value_size_}, true},
                 {"q_norm", w.q_norm, {*c.head_size}},
                 {"k_norm", w.k_norm, {*c.head_size}},
                 {"sinks", w.sinks, {c.query_heads}},
                 {"relative_attention_bias",
                  w.relative_attention_bias,
                  {FirstAxis(w.relative_attention_bias), c.query_heads}},
                 {"additive_weight", w.additive_weight, {*c.head_size}, true}}} {}

 private:
  static int64_t OutputSize(const LinearWeights& o, int64_t heads_size) {
    if (!o.matrix) return heads_size;
    return o.matrix->shape.size() == 2 ? o.matrix->shape[o.transposed ? 1 : 0] : 0;
  }
  static int64_t FirstAxis(const std::optional<WeightTensor>& tensor) {
    return tensor && !tensor->shape.empty() ? tensor->shape[0] : 0;
  }

  const int64_t query_size_, key_size_, value_size_, heads_size_, output_size_;

 public:
  const std::array<MatrixSpec, kMatrices> matrices;
  const std::array<VectorSpec, kVectors> vectors;
};

absl::Status CheckSize(const char* name, int64_t size) {
  if (size >= 1 && size <= kMaxAxis) return absl::OkStatus();
  return Invalid(name, " is ", size, "; it must be from 1 to 2^40");
}

absl::Status CheckWindow(const LayerConfig& c) {
  if (!c.sliding_window) return absl::OkStatus();
  const int64_t window = *c.sliding_window;
  if (window < 1 || window > kMaxAxis) {
    return Invalid("sliding_window is ", window, "; it must be from 1 to 2^40");
  }
  if (c.is_causal) return absl::OkStatus();
  return Invalid("sliding_window is ", window, ", but is_causal is false; it must be true");
}

// Sets the sizes that follow from others, and checks all.
absl::StatusOr<LayerConfig> Complete(LayerConfig c) {
  RAPT_RETURN_IF_ERROR(CheckSize("embed_size", c.embed_size));
  RAPT_RETURN_IF_ERROR(CheckSize("query_heads", c.query_heads));
  if (!c.head_size && c.embed_size % c.query_heads != 0) {
    return Invalid("head_size is missing, and embed_size ", c.embed_size,
                   " is not a multiple of query_heads ", c.query_heads);
  }
  if (!c.key_embed_size) c.key_embed_size = c.embed_size;
  if (!c.value_embed_size) c.value_embed_size = c.key_embed_size;
  if (!c.kv_heads) c.kv_heads = c.query_heads;
  if (!c.head_size) c.head_size = c.embed_size / c.query_heads;
  if (!c.value_head_size) c.value_head_size = c.head_size;
  for (const auto& [name, size] : {std::pair{"key_embed_size", *c.key_embed_size},
                                   {"value_embed_size", *c.value_embed_size},
                                   {"kv_heads", *c.kv_heads},
                                   {"head_size", *c.head_size},
                                   {"value_head_size", *c.value_head_size}}) {
    RAPT_RETURN_IF_ERROR(CheckSize(name, size));
  }
  if (c.query_heads % *c.kv_heads != 0) {
    return Invalid("kv_heads is ", *c.kv_heads, "; it must divide query_heads ", c.query_heads);
  }
  if (!(c.norm_epsilon >= 0) || !std::isfinite(c.norm_epsilon)) {
    return Invalid("norm_epsilon is ", c.norm_epsilon, "; it must be finite and at least 0");
  }
  const double base = c.positional_base.value_or(1);
  if (!(base > 0) || !std::isfinite(base)) {
    return Invalid("positional_base is ", base, "; it must be finite and positive");
  }
  RAPT_RETURN_IF_ERROR(CheckWindow(c));
  return c;
}

absl::Status CheckType(const WeightTensor& tensor) {
  if (IsFloat(tensor.dtype)) return absl::OkStatus();
  return Invalid(tensor.name, " has type ", NameOf(tensor.dtype),
                 "; it must be FP32, FP16, BF16 or FP64");
}

absl::Status CheckMatrix(const MatrixSpec& spec) {
  const LinearWeights& weights = spec.weights;
  if (!weights.matrix) {
    if (weights.bias) {
      return Invalid(weights.bias->name, " is given, but the matrix of ", spec.field, " is not");
    }
    if (spec.depth == spec.columns) return absl::OkStatus();
    return Invalid("the matrix of ", spec.field, " is missing; without it the input's size, ",
                   spec.depth, ", must be that of the heads, ", spec.columns);
  }
  const WeightTensor& w = *weights.matrix;
  RAPT_RETURN_IF_ERROR(CheckType(w));
  Shape want = {spec.columns, spec.depth};
  if (weights.transposed) std::swap(want[0], want[1]);
  if (w.shape != want || spec.columns < 1) {
    return Invalid(w.name, " has shape ", ToString(w.shape), "; it must be ", ToString(want));
  }
  if (w.row_stride == 0 || w.row_stride >= want[1]) return absl::OkStatus();
  return Invalid(w.name, " has rows ", w.row_stride, " numbers apart; they have ", want[1]);
}

absl::Status CheckVector(const VectorSpec& spec) {
  if (!spec.tensor) return absl::OkStatus();
  const WeightTensor& tensor = *spec.tensor;
  RAPT_RETURN_IF_ERROR(CheckType(tensor));
  const bool negative =
      std::any_of(tensor.shape.begin(), tensor.shape.end(), [](int64_t axis) { return axis < 0; });
  const auto count = negative ? std::nullopt : CheckedProduct(tensor.shape);
  if (spec.by_count ? count == spec.shape[0] : tensor.shape == spec.shape) return absl::OkStatus();
  if (spec.by_count) {
    return Invalid(tensor.name, " has shape ", ToString(tensor.shape), "; it must have ",
                   spec.shape[0], " numbers");
  }
  return Invalid(tensor.name, " has shape ", ToString(tensor.shape), "; it must be ",
                 ToString(spec.shape));
}

// Which tensors go together.
absl::Status CheckTogether(const LayerConfig& c, const LayerWeights& w) {
  if (w.bias_k.has_value() != w.bias_v.has_value()) {
    return Invalid(w.bias_k ? w.bias_k->name : w.bias_v->name,
                   " is given alone; bias_k and bias_v must be given together");
  }
  const struct {
    const std::optional<WeightTensor>& tensor;
    bool allowed;
    const char* reason;
  } rules[] = {
      {w.bias_k, w.k.matrix && w.v.matrix, "it needs the matrices of k and v"},
      {w.bias_k, !w.k_norm && !c.rope_theta && !w.relative_attention_bias,
       "k_norm, rope_theta and relative_attention_bias do not say what they do with its key"},
      {w.bias_k, !c.sliding_window, "sliding_window does not say whether it hides its key"},
      {w.q_norm, w.q.matrix.has_value(), "it needs the matrix of q"},
      {w.k_norm, w.k.matrix.has_value(), "it needs the matrix of k"},
  };
  for (const auto& [tensor, allowed, reason] : rules) {
    if (tensor && !allowed) return Invalid(tensor->name, " is given; ", reason);
  }
  return absl::OkStatus();
}

absl::Status Check(const LayerConfig& config, const LayerWeights& weights, const Specs& specs) {
  for (const MatrixSpec& spec : specs.matrices) {
    RAPT_RETURN_IF_ERROR(CheckMatrix(spec));
  }
  for (const VectorSpec& spec : specs.vectors) {
    RAPT_RETURN_IF_ERROR(CheckVector(spec));
  }
  return CheckTogether(config, weights);
}

DType PackedType(DType file) { return file == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

// Divides the memory; without it, only counts its bytes.
PackedWeights Place(const Specs& specs, std::byte* memory, Arena& arena) {
  PackedWeights packed;
  const auto take = [&](std::initializer_list<int64_t> factors) {
    const ArrayAt<std::byte> array = arena.Take<std::byte>(factors);
    return memory == nullptr ? nullptr : array.In(memory);
  };
  for (size_t m = 0; m < kMatrices; ++m) {
    const MatrixSpec& spec = specs.matrices[m];
    PackedMatrix& matrix = packed.matrices[m];
    matrix.depth = spec.depth;
    matrix.columns = spec.columns;
    if (!spec.weights.matrix) continue;
    matrix.dtype = spec.weights.matrix->dtype;
    matrix.panels =
        take({matrix.panel_count(), kPanelColumns, matrix.panel_depth(), SizeOf(matrix.dtype)});
  }
  for (size_t v = 0; v < kVectors; ++v) {
    const VectorSpec& spec = specs.vectors[v];
    if (!spec.tensor) continue;
    PackedVector& vector = packed.vectors[v];
    vector.dtype = PackedType(spec.tensor->dtype);
    vector.shape = spec.shape;
    const int64_t rows = spec.shape.size() == 2 ? spec.shape[1] : 1;
    vector.data = take({spec.shape[0], rows, SizeOf(vector.dtype)});
  }
  return packed;
}

void PackVector(const WeightTensor& tensor, const PackedVector& to) {
  int64_t count = 1;
  for (const int64_t axis : to.shape) count *= axis;
  for (int64_t n = 0; n < count; ++n) {
    StoreElement(to.data, to.dtype, n, LoadElement(tensor.data, tensor.dtype, n));
  }
}

void Pack(const Specs& specs, const PackedWeights& packed, ThreadPool& pool) {
  for (size_t m = 0; m < kMatrices; ++m) {
    const PackedMatrix& matrix = packed.matrices[m];
    if (matrix.panels == nullptr) continue;
    pool.ParallelFor(matrix.panel_count(), [&](int64_t panel, int) {
      PackPanel(specs.matrices[m].weights, panel, matrix);
    });
  }
  for (size_t v = 0; v < kVectors; ++v) {
    if (specs.vectors[v].tensor) PackVector(*specs.vectors[v].tensor, packed.vectors[v]);
  }
}

// Checks a call of one token that does not say whether it is causal, so that settings with which
// such calls fail are errors of the layer. `weights` need no memory.
absl::Status CheckUsualCall(const LayerConfig& config, const PackedWeights& weights) {
  LayerShape call{.layer = std::make_shared<const PackedLayer>(config, AlignedBuffer(), weights),
                  .batch = 1,
                  .queries = 1,
                  .tokens = 1,
                  .is_causal = config.is_causal};
  if (call.layer->is_fp64()) call.dtype = DType::kFloat64;
  return Validate(AttentionOf(call), LayerNames());
}

// A layer before its weights are packed.
struct Draft {
  LayerConfig config;
  int64_t bytes;
};

absl::StatusOr<Draft> DraftOf(const LayerConfig& given, const LayerWeights& weights) {
  RAPT_ASSIGN_OR_RETURN(const LayerConfig config, Complete(given));
  const Specs specs(config, weights);
  RAPT_RETURN_IF_ERROR(Check(config, weights, specs));
  Arena arena;
  const PackedWeights placed = Place(specs, nullptr, arena);
  if (!arena.fits()) return Invalid("the weights need more than 2^50 bytes of memory");
  RAPT_RETURN_IF_ERROR(CheckUsualCall(config, placed));
  return Draft{config, arena.bytes()};
}

}  // namespace

const FieldNames& LayerNames() {
  static const auto* const names = [] {
    auto* const own = new FieldNames(kOnnxNames);
    own->tensors[Role::kQ] = "query";
    own->tensors[Role::kBiasTable] = "relative_attention_bias";
    own->attributes[Attribute::kMaxDistance] = "relative_attention_max_distance";
    return own;
  }();
  return *names;
}

int64_t PackedLayer::output_size() const { return weights_[Matrix::kOutput].columns; }

DType PackedLayer::dtype() const {
  for (const PackedMatrix& matrix : weights_.matrices) {
    if (matrix.panels != nullptr) return matrix.dtype;
  }
  return is_fp64() ? DType::kFloat64 : DType::kFloat32;
}

bool PackedLayer::is_fp64() const {
  const auto is_fp64 = [](const auto& tensor) { return tensor.dtype == DType::kFloat64; };
  return std::any_of(weights_.matrices.begin(), weights_.matrices.end(), is_fp64) ||
         std::any_of(weights_.vectors.begin(), weights_.vectors.end(), is_fp64);
}

absl::StatusOr<int64_t> LayerBytes(const LayerConfig& config, const LayerWeights& weights) {
  RAPT_ASSIGN_OR_RETURN(const Draft draft, DraftOf(config, weights));
  return draft.bytes;
}

absl::StatusOr<std::shared_ptr<const Layer>> MakeLayer(const LayerConfig& config,
                                                       const LayerWeights& weights,
                                                       ThreadPool& pool) {
  RAPT_ASSIGN_OR_RETURN(const Draft draft, DraftOf(config, weights));
  AlignedBuffer memory = MemoryForWeights(draft.bytes);
  const Specs specs(draft.config, weights);
  Arena arena;
  const PackedWeights packed = Place(specs, memory.data(), arena);
  Pack(specs, packed, pool);
  return std::shared_ptr<const Layer>(
      std::make_shared<const PackedLayer>(draft.config, std::move(memory), packed));
}

}  // namespace rapt
