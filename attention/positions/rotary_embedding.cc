#include "attention/positions/rotary_embedding.h"

#include <utility>

#include "attention/rotary/rotate.h"
#include "attention/rotary/rotation.h"
#include "base/invalid.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

// The operator's names of the tensors of KeyProblem().
const FieldNames& Names() {
  static const FieldNames names = [] {
    FieldNames names = kOnnxNames;
    names.tensors[Role::kQ] = names.tensors[Role::kK] = names.tensors[Role::kV] = "X";
    names.tensors[Role::kKeyPositionIds] = names.tensors[Role::kPositionIds];
    return names;
  }();
  return names;
}

// X as the keys of an attention without queries, which are rotated in the same way.
class RotaryEmbedding final : public TensorOperator {
 public:
  RotaryEmbedding(const Problem& keys, const TensorSpec& output)
      : keys_(keys), rank_(output.shape.size()) {
    outputs_[Role::kY] = output;
  }

  const OutputMap<std::optional<TensorSpec>>& outputs() const override { return outputs_; }

  bool checks_data() const override { return keys_.has_key_position_ids; }
  absl::Status CheckData(const Arguments& arguments) const override {
    return ValidatePositions(keys_, Views(arguments), Names());
  }

  SlotSet copied_inputs() const override { return {Role::kPositionIds}; }

  void PlanTasks(Plan& plan) const override {
    plan.stages = {Rotation::Tasks(keys_)};
    plan.worker_workspace_bytes = RoundUp(Rotation::WorkerBytes(keys_), kWorkspaceAlignment);
    plan.flops = Rotation::Flops(keys_);
  }

  void RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace, int /*stage*/,
               int64_t task, int worker, const Checkpoint& checkpoint) const override {
    MutableTensorView y{arguments.outputs[Role::kY].data, keys_.dtype, Dims(), Strides()};
    Rotation(keys_, y, FastestRotateRow())
        .RunTask(Views(arguments), task, workspace + worker * plan.worker_workspace_bytes,
                 checkpoint);
  }

 private:
  std::array<int64_t, 4> Dims() const {
    return {keys_.batch, keys_.kv_heads, keys_.key_length, keys_.head_size};
  }
  std::array<int64_t, 4> Strides() const {
    const auto [b, h, s, d] = Dims();
    if (rank_ == 4) return RowMajorStrides({b, h, s, d});
    return {s * h * d, d, h * d, 1};
  }

  Arguments Views(const Arguments& arguments) const {
    Arguments views;
    views.inputs[Role::kK] = {arguments.inputs[kTokens].data, keys_.dtype, Dims(), Strides()};
    for (const auto& [role, from] : {std::pair{Role::kCosCache, Role::kCosCache},
                                     {Role::kSinCache, Role::kSinCache},
                                     {Role::kKeyPositionIds, Role::kPositionIds}}) {
      const RoleInfo& info = InfoOf(role);
      if (!info.wanted(keys_)) continue;
      TensorView& view = views.inputs[role];
      view = {arguments.inputs[from].data, info.dtype(keys_), info.dims(keys_)};
      view.strides = RowMajorStrides(view.dims);
    }
    return views;
  }

  const Problem keys_;
  const size_t rank_;
  OutputMap<std::optional<TensorSpec>> outputs_;
};

absl::Status CheckPositionIds(const TensorSpec& ids, int64_t batch, int64_t length) {
  if (ids.dtype != DType::kInt64) {
    return Invalid("position_ids has type ", NameOf(ids.dtype), "; it must be INT64");
  }
  if (ids.shape == Shape{batch, length}) return absl::OkStatus();
  return Invalid("position_ids has shape ", ToString(ids.shape), "; it must be [", batch, ", ",
                 length, "], the batch and length of X");
}

absl::Status CheckInputs(const RotaryEmbeddingCall& call) {
  for (Role role : kInputs) {
    const std::optional<TensorSpec>& spec = call.inputs[role];
    if (!spec) continue;
    RAPT_RETURN_IF_ERROR(ByteSize(Names()[role], *spec).status());
  }
  if (!call.inputs[kTokens]) return Invalid("X is missing");
  if (call.inputs[Role::kCosCache].has_value() != call.inputs[Role::kSinCache].has_value()) {
    return Invalid("cos_cache and sin_cache must be given both or neither");
  }
  if (call.inputs[Role::kCosCache] || call.rope_theta) return absl::OkStatus();
  return Invalid("cos_cache is missing; it or rope_theta must be given");
}

// Sets the axes of X.
absl::Status ReadTokens(const RotaryEmbeddingCall& call, Problem& p) {
  const TensorSpec& x = *call.inputs[kTokens];
  p.dtype = x.dtype;
  if (x.shape.size() == 4) {
    if (call.num_heads != 0 && call.num_heads != x.shape[1]) {
      return Invalid("num_heads is ", call.num_heads, ", but X ", ToString(x.shape), " has ",
                     x.shape[1], " heads; they must be equal");
    }
    p.batch = x.shape[0];
    p.kv_heads = x.shape[1];
    p.key_length = x.shape[2];
    p.head_size = x.shape[3];
    return absl::OkStatus();
  }
  if (x.shape.size() != 3) {
    return Invalid("X has shape ", ToString(x.shape),
                   "; it must be [B, H, S, D], or [B, S, H * D]");
  }
  if (call.num_heads < 1 || x.shape[2] % call.num_heads != 0) {
    return Invalid("num_heads is ", call.num_heads, "; with X ", ToString(x.shape),
                   " of rank 3 it must be at least 1 and a divisor of ", x.shape[2]);
  }
  p.batch = x.shape[0];
  p.kv_heads = call.num_heads;
  p.key_length = x.shape[1];
  p.head_size = x.shape[2] / call.num_heads;
  return absl::OkStatus();
}

absl::Status ReadCaches(const RotaryEmbeddingCall& call, Problem& p) {
  const std::optional<TensorSpec>& cos = call.inputs[Role::kCosCache];
  if (!cos) return absl::OkStatus();
  const TensorSpec& sin = *call.inputs[Role::kSinCache];
  const Shape& s = cos->shape;
  if ((s.size() != 2 && s.size() != 3) || sin.shape != s || sin.dtype != cos->dtype) {
    return Invalid("cos_cache is ", NameOf(cos->dtype), " ", ToString(s), ", sin_cache is ",
                   NameOf(sin.dtype), " ", ToString(sin.shape),
                   "; they must be equal, [M, r / 2] or [B, S, r / 2]");
  }
  p.rotary_cache = RotaryCache{.dtype = cos->dtype, .rows = s[s.size() - 2], .pairs = s.back()};
  if (s.size() == 3) p.rotary_cache->batch = s[0];
  return absl::OkStatus();
}

// --- The table ---

// The caches are listed as a caller with ids sends them.
constexpr TensorSchema kRotaryInputs[] = {
    OfAnyRank(Required(TensorRow("X", kTokens, 4, "[B, H, S, D], or [B, S, H*D] with num_heads"))),
    OfAnyRank(
        TensorRow("cos_cache", Role::kCosCache, 2, "cosines by position, [M, r/2] or [B, S, r/2]")),
    OfAnyRank(TensorRow("sin_cache", Role::kSinCache, 2, "sines, as cos_cache")),
    TensorRow("position_ids", Role::kPositionIds, 2,
              "integer positions, [B, S] (default: 0, 1, ...)", DType::kInt64)};
constexpr TensorSchema kRotaryOutputs[] = {Required(TensorRow("Y", Role::kY, 4, "as X"))};
constexpr AttributeSchema kRotaryAttributes[] = {
    AttributeOf<&RotaryEmbeddingCall::interleaved>("interleaved",
                                                   "rotate neighbours, not the two halves"),
    AttributeOf<&RotaryEmbeddingCall::num_heads>("num_heads", "heads of an X of rank 3"),
    AttributeOf<&RotaryEmbeddingCall::rotary_embedding_dim>(
        "rotary_embedding_dim", "r: rotate the first N numbers of each head (default: all)"),
    AttributeOf<&RotaryEmbeddingCall::rope_theta>(
        "rope_theta", "angles position * X^(-2t/r), without cos_cache")};

}  // namespace

const OperatorSchema kRotaryEmbedding = {"rotary_embedding",
                                         "RotaryEmbed",
                                         "The ONNX operator RotaryEmbedding: rotates X by the "
                                         "angles of its positions, as attention does with Q and K.",
                                         kRotaryInputs,
                                         kRotaryOutputs,
                                         kRotaryAttributes,
                                         NewCall<RotaryEmbeddingCall, MakeRotaryEmbedding>};

absl::StatusOr<std::shared_ptr<const TensorOperator>> MakeRotaryEmbedding(
    const RotaryEmbeddingCall& call) {
  Problem keys;
  RAPT_RETURN_IF_ERROR(CheckInputs(call));
  RAPT_RETURN_IF_ERROR(ReadTokens(call, keys));
  RAPT_RETURN_IF_ERROR(ReadCaches(call, keys));
  if (const std::optional<TensorSpec>& ids = call.inputs[Role::kPositionIds]) {
    RAPT_RETURN_IF_ERROR(CheckPositionIds(*ids, keys.batch, keys.key_length));
    keys.has_key_position_ids = true;
  }
  keys.value_head_size = keys.head_size;
  keys.interleaved = call.interleaved;
  keys.rotary_embedding_dim = call.rotary_embedding_dim;
  keys.rope_theta = call.rope_theta;
  keys.rope_scaling = call.rope_scaling;
  if (call.first_position > 0) {
    keys.section = Section{.first_key = call.first_position,
                           .key_length = call.first_position + keys.key_length};
  }
  RAPT_RETURN_IF_ERROR(Validate(keys, Names()));
  return std::shared_ptr<const TensorOperator>(
      std::make_shared<const RotaryEmbedding>(keys, *call.inputs[kTokens]));
}

}  // namespace rapt
