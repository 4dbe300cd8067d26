// Any bytes as the files of a layer: what is accepted lies within the file, and small layers can be
// packed. The first two bytes are the length of config.json, which precedes model.safetensors.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "attention/half.h"
#include "attention/layer/files/layer_files.h"
#include "attention/layer/layer.h"
#include "base/check.h"
#include "base/thread_pool.h"

namespace rapt {
namespace {

constexpr int64_t kMaxPackedBytes = 1 << 22;

// Reads the last element, beyond which nothing is read.
void Touch(const std::optional<WeightTensor>& tensor) {
  if (!tensor) return;
  const bool is_matrix = tensor->shape.size() == 2 && tensor->row_stride > 0;
  int64_t count = 1;
  for (int64_t axis : tensor->shape) count *= axis;
  if (count == 0) return;
  const int64_t last =
      is_matrix ? (tensor->shape[0] - 1) * tensor->row_stride + tensor->shape[1] - 1 : count - 1;
  LoadElement(tensor->data, tensor->dtype, last);
}

void Run(absl::string_view config, absl::string_view weights) {
  absl::StatusOr<Safetensors> file = Safetensors::Parse(weights);
  if (!file.ok()) return;
  for (const auto& [name, tensor] : file->tensors()) {
    RAPT_CHECK(tensor.bytes.empty() ||
                   reinterpret_cast<const char*>(tensor.bytes.data() + tensor.bytes.size()) <=
                       weights.data() + weights.size(),
               "a tensor lies outside of the file");
  }
  const absl::StatusOr<LayerFiles> layer = ReadLayerFiles(config, *std::move(file));
  if (!layer.ok()) return;
  const LayerWeights& w = layer->weights;
  for (const LinearWeights* linear : {&w.q, &w.k, &w.v, &w.o}) {
    Touch(linear->matrix);
    Touch(linear->bias);
  }
  for (const auto* tensor : {&w.bias_k, &w.bias_v, &w.q_norm, &w.k_norm, &w.sinks,
                             &w.relative_attention_bias, &w.additive_weight}) {
    Touch(*tensor);
  }
  const absl::StatusOr<int64_t> bytes = LayerBytes(layer->config, w);
  if (!bytes.ok() || *bytes > kMaxPackedBytes) return;
  static ThreadPool pool(1);
  const auto packed = MakeLayer(layer->config, w, pool);
  RAPT_CHECK(packed.ok(), "a layer whose size is known can't be packed");
  RAPT_CHECK((*packed)->bytes() == *bytes, "a layer does not take the bytes that it states");
}

}  // namespace
}  // namespace rapt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const absl::string_view rest(reinterpret_cast<const char*>(data) + 2, size - 2);
  const size_t length = std::min<size_t>(data[0] | data[1] << 8, rest.size());
  rapt::Run(rest.substr(0, length), rest.substr(length));
  return 0;
}
