#include "client/cli/linear_stream.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/invalid.h"
#include "base/status_macros.h"
#include "client/cli/progress_bar.h"

namespace rapt {
namespace {

using client::LinearCall;
using client::LinearResult;

constexpr int64_t kUsualChunkBytes = 8 << 20;

struct LoadedLinearCall {
  OperatorInputs inputs;
  LinearAttentionCall attributes;  // without inputs

  // Refers to this object.
  LinearCall ForServer(uint64_t priority) const {
    const LinearAttentionCall& a = attributes;
    return {.query = *inputs.View(Role::kQ),
            .key = *inputs.View(Role::kK),
            .value = *inputs.View(Role::kV),
            .past_state = inputs.View(linear::kPastState),
            .decay = inputs.View(linear::kDecay),
            .beta = inputs.View(linear::kBeta),
            .projection = inputs.View(linear::kProjection),
            .past_normalizer = inputs.View(linear::kPastNormalizer),
            .key_lengths = inputs.key_lengths,
            .query_heads = a.q_num_heads,
            .kv_heads = a.kv_num_heads,
            .update_rule = a.update_rule,
            .scale = a.scale,
            .chunk_size = a.chunk_size,
            .causal = a.is_causal,
            .feature_map = a.feature_map,
            .normalize = a.normalize,
            .num_features = a.num_features,
            .seed = a.seed,
            .state_type = a.state_type,
            .want_present_state = a.wants_present_state,
            .want_present_normalizer = a.wants_present_normalizer,
            .priority = priority};
  }
};

// Tokens [begin, begin + count) of a tensor [B, T, ...].
LoadedTensor TokensOf(const LoadedTensor& tensor, int64_t begin, int64_t count) {
  const int64_t tokens = tensor.shape[1];
  const auto token_bytes =
      static_cast<size_t>(tensor.array.size() / std::max<int64_t>(1, tensor.shape[0] * tokens) *
                          tensor.array.type.bytes);
  const auto* const from = reinterpret_cast<const char*>(tensor.array.bytes().data());
  std::string bytes;
  for (int64_t b = 0; b < tensor.shape[0]; ++b) {
    bytes.append(from + static_cast<size_t>(b * tokens + begin) * token_bytes,
                 static_cast<size_t>(count) * token_bytes);
  }
  Shape shape = tensor.shape;
  shape[1] = count;
  return {NpyArray{tensor.array.type, shape, std::move(bytes)}, tensor.dtype, shape};
}

// Joins outputs [B, T, E] of consecutive tokens.
class Outputs {
 public:
  void Add(const client::Tensor& output) {
    const Shape& shape = output.shape();
    rows_.resize(static_cast<size_t>(shape[0]));
    const size_t row = output.bytes().size() / std::max<size_t>(1, rows_.size());
    for (size_t b = 0; b < rows_.size(); ++b) {
      rows_[b].append(reinterpret_cast<const char*>(output.bytes().data()) + b * row, row);
    }
    dtype_ = output.dtype();
    shape_ = {shape[0], shape_.empty() ? shape[1] : shape_[1] + shape[1], shape[2]};
  }

  client::Tensor Join() const {
    std::string bytes;
    for (const std::string& row : rows_) bytes += row;
    return {dtype_, shape_, std::move(bytes)};
  }

 private:
  std::vector<std::string> rows_;  // of each batch row
  client::DType dtype_ = client::DType::kFloat32;
  Shape shape_;
};

// Whether the tensor has a row for each token.
bool HasTokens(Slot slot) {
  return slot == Role::kQ || slot == Role::kK || slot == Role::kV || slot == linear::kDecay ||
         slot == linear::kBeta;
}

// The part of a call with the tokens [begin, begin + count).
LoadedLinearCall PartOf(const OperatorInputs& inputs, const LinearAttentionCall& attributes,
                        int64_t begin, int64_t count) {
  LoadedLinearCall part{.inputs = {}, .attributes = attributes};
  for (Slot slot : kInputTensors) {
    const std::optional<LoadedTensor>& tensor = inputs.tensors[slot];
    if (!tensor) continue;
    if (HasTokens(slot)) {
      part.inputs.tensors[slot] = TokensOf(*tensor, begin, count);
    } else if (begin == 0) {  // the server keeps it
      part.inputs.tensors[slot] = tensor;
    }
  }
  part.inputs.key_lengths = inputs.key_lengths;
  for (int64_t& length : part.inputs.key_lengths) {
    length = std::clamp<int64_t>(length - begin, 0, count);
  }
  const bool is_last = begin + count == inputs.tensors[Role::kQ]->shape[1];
  part.attributes.wants_present_state &= is_last;
  part.attributes.wants_present_normalizer &= is_last;
  return part;
}

int64_t BytesOfTokens(const OperatorInputs& inputs) {
  int64_t bytes = 0;
  for (Slot slot : kInputTensors) {
    if (!HasTokens(slot) || !inputs.tensors[slot]) continue;
    bytes += static_cast<int64_t>(inputs.View(slot)->data.size());
  }
  return bytes;
}

// Of the whole; those of a chunk are always in range.
absl::Status CheckLengths(const OperatorInputs& inputs, int64_t tokens) {
  for (size_t b = 0; b < inputs.key_lengths.size(); ++b) {
    const int64_t length = inputs.key_lengths[b];
    if (length >= 0 && length <= tokens) continue;
    return Invalid("nonpad_kv_seqlen[", b, "] is ", length, "; it must be from 0 to the length ",
                   tokens);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckStreamed(const LinearAttentionCall& call) {
  if (call.error_rows > 0) {
    return Invalid(
        "--stream and --error-rows are mutually exclusive; the exact rows need all keys");
  }
  if (!call.is_causal) {
    return Invalid(
        "--stream and --is-causal=false are mutually exclusive; a chunk does not see later ones");
  }
  return absl::OkStatus();
}

absl::StatusOr<LinearResult> StreamTokens(const OperatorInputs& inputs,
                                          const LinearAttentionCall& attributes,
                                          const CallerFlags& flags, client::Client& server) {
  const int64_t length = inputs.tensors[Role::kQ]->shape[1];
  RAPT_RETURN_IF_ERROR(CheckLengths(inputs, length));
  const int64_t bytes = BytesOfTokens(inputs);
  const int64_t token_bytes = std::max<int64_t>(1, bytes / std::max<int64_t>(1, length));
  const int64_t chunk = flags.chunk.value_or(std::max<int64_t>(1, kUsualChunkBytes / token_bytes));
  const std::unique_ptr<client::LinearStream> stream = server.LinearAttendStream();
  ProgressBar bar;
  Outputs outputs;
  absl::StatusOr<LinearResult> last;
  int64_t begin = 0;
  do {
    const int64_t count = std::min(chunk, length - begin);
    last = stream->Attend(PartOf(inputs, attributes, begin, count).ForServer(flags.priority));
    if (!last.ok()) return last;
    outputs.Add(last->output);
    begin += count;
    bar.Show(begin * token_bytes, bytes);
  } while (begin < length);
  RAPT_RETURN_IF_ERROR(stream->Finish());
  last->output = outputs.Join();
  return last;
}

}  // namespace rapt
