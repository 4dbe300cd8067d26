// What MakeLayer() makes.
#ifndef RAPT_ATTENTION_LAYER_PACKED_LAYER_H_
#define RAPT_ATTENTION_LAYER_PACKED_LAYER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "attention/field_names.h"
#include "attention/layer/layer.h"
#include "attention/layer/packed_matrix.h"
#include "base/aligned_buffer.h"

namespace rapt {

enum class Matrix : uint8_t { kQuery, kKey, kValue, kOutput };
inline constexpr size_t kMatrices = 4;

enum class Vector : uint8_t {
  kQueryBias,  // those of the matrices, in their order
  kKeyBias,
  kValueBias,
  kOutputBias,
  kExtraKey,  // bias_k
  kExtraValue,
  kQueryNorm,
  kKeyNorm,
  kSinks,
  kRelativeBias,
  kAdditiveWeight,
};
inline constexpr size_t kVectors = 11;

// Numbers in FP32, or FP64 as in the file.
struct PackedVector {
  DType dtype = DType::kFloat32;
  Shape shape;  // empty: absent
  std::byte* data = nullptr;
};

// The names of a layer's inputs and settings, for errors.
const FieldNames& LayerNames();

// Non-owning.
struct PackedWeights {
  std::array<PackedMatrix, kMatrices> matrices;
  std::array<PackedVector, kVectors> vectors;

  const PackedMatrix& operator[](Matrix m) const { return matrices[static_cast<size_t>(m)]; }
  const PackedVector& operator[](Vector v) const { return vectors[static_cast<size_t>(v)]; }
  bool has(Matrix m) const { return (*this)[m].panels != nullptr; }
  bool has(Vector v) const { return !(*this)[v].shape.empty(); }
};

class PackedLayer final : public Layer {
 public:
  // REQUIRES: the configuration is complete, and the weights lie in the memory.
  PackedLayer(const LayerConfig& config, AlignedBuffer memory, const PackedWeights& weights)
      : config_(config), memory_(std::move(memory)), weights_(weights) {}

  const LayerConfig& config() const override { return config_; }
  int64_t output_size() const override;
  DType dtype() const override;
  bool is_fp64() const override;
  int64_t bytes() const override { return static_cast<int64_t>(memory_.size()); }

  const PackedWeights& weights() const { return weights_; }

 private:
  const LayerConfig config_;
  const AlignedBuffer memory_;
  const PackedWeights weights_;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_PACKED_LAYER_H_
