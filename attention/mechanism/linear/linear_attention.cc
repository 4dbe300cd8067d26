#include "attention/mechanism/linear/linear_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

#include "absl/types/span.h"
#include "attention/half.h"
#include "attention/mechanism/linear/linear_kernels.h"
#include "attention/mechanism/linear/projection.h"
#include "attention/mechanism/linear/recurrence.h"
#include "attention/score/score_params.h"
#include "base/invalid.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace rapt {
namespace linear {

absl::string_view NameOf(Slot slot) {
  for (const auto& tensors : {kLinearAttention.inputs, kLinearAttention.outputs}) {
    for (const TensorSchema& tensor : tensors) {
      if (tensor.slot == slot) return tensor.name;
    }
  }
  return "";
}

}  // namespace linear

namespace {

using linear::kBeta;
using linear::kDecay;
using linear::kPastNormalizer;
using linear::kPastState;
using linear::kPresentNormalizer;
using linear::kPresentState;
using linear::kProjection;
using linear::kRelativeError;

// Of d_k, d_v and the features.
constexpr int64_t kMostSize = 65536;
constexpr int64_t kMostHeads = 65536;
// More rows do not make a better estimate.
constexpr int64_t kMostErrorRows = 65536;
// Columns of the state that a task has at least; a line of the cache in fp32.
constexpr int64_t kLeastColumns = 16;

bool IsFavor(const LinearAttentionCall& call) { return call.feature_map == FeatureMap::kFavor; }
// Whether the output is divided by the sum of products with keys.
bool IsNormalized(const LinearAttentionCall& call) { return call.normalize || IsFavor(call); }
bool HasDecay(UpdateRule rule) {
  return rule == UpdateRule::kGated || rule == UpdateRule::kGatedDelta;
}
bool HasBeta(UpdateRule rule) {
  return rule == UpdateRule::kDelta || rule == UpdateRule::kGatedDelta;
}

struct Sizes {
  int64_t batch = 0;
  int64_t length = 0;  // T
  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  int64_t key_size = 0;
  int64_t value_size = 0;
  int64_t features = 0;
};

// ---- Validation ---------------------------------------------------------------------------------

absl::Status CheckPresence(const LinearAttentionCall& call) {
  for (Slot slot : kInputs) {
    const std::optional<TensorSpec>& spec = call.inputs[slot];
    if (!spec) continue;
    const absl::string_view name = linear::NameOf(slot);
    RAPT_RETURN_IF_ERROR(ByteSize(name, *spec).status());
    const bool is_length = slot == Role::kKeyLengths;
    if (is_length && spec->dtype != DType::kInt64) {
      return Invalid(name, " has type ", NameOf(spec->dtype), "; it must be INT64");
    }
    if (!is_length && !IsFloat(spec->dtype)) {
      return Invalid(name, " has type ", NameOf(spec->dtype),
                     "; it must be FP16, BF16, FP32 or FP64");
    }
  }
  for (Slot slot : {Role::kQ, Role::kK, Role::kV}) {
    const std::optional<TensorSpec>& spec = call.inputs[slot];
    const absl::string_view name = linear::NameOf(slot);
    if (!spec) return Invalid(name, " is missing");
    if (spec->shape.size() != 3) {
      return Invalid(name, " has shape ", ToString(spec->shape), "; it must be [B, T, H * d]");
    }
    if (spec->dtype != call.inputs[Role::kQ]->dtype) {
      return Invalid(name, " has type ", NameOf(spec->dtype), "; it must be query's, ",
                     NameOf(call.inputs[Role::kQ]->dtype));
    }
  }
  return absl::OkStatus();
}

// Returns the size of a head in the last axis.
absl::StatusOr<int64_t> HeadSize(const LinearAttentionCall& call, Slot slot, int64_t heads,
                                 absl::string_view attribute) {
  const Shape& shape = call.inputs[slot]->shape;
  if (heads < 1 || heads > kMostHeads || shape[2] % heads != 0 || shape[2] / heads < 1 ||
      shape[2] / heads > kMostSize) {
    return Invalid(attribute, " is ", heads, "; with ", linear::NameOf(slot), " ", ToString(shape),
                   " it must be from 1 to ", kMostHeads, " and divide ", shape[2],
                   " into heads of 1 to ", kMostSize);
  }
  return shape[2] / heads;
}

absl::StatusOr<Sizes> ReadSizes(const LinearAttentionCall& call) {
  const Shape& query = call.inputs[Role::kQ]->shape;
  Sizes sizes = {.batch = query[0],
                 .length = query[1],
                 .query_heads = call.q_num_heads,
                 .kv_heads = call.kv_num_heads};
  for (Slot slot : {Role::kK, Role::kV}) {
    const Shape& shape = call.inputs[slot]->shape;
    if (shape[0] == query[0] && shape[1] == query[1]) continue;
    return Invalid(linear::NameOf(slot), " has shape ", ToString(shape),
                   "; its first axes must be [", query[0], ", ", query[1], "], as query's");
  }
  RAPT_ASSIGN_OR_RETURN(const auto query_size,
                        HeadSize(call, Role::kQ, call.q_num_heads, "q_num_heads"));
  RAPT_ASSIGN_OR_RETURN(const auto key_size,
                        HeadSize(call, Role::kK, call.kv_num_heads, "kv_num_heads"));
  RAPT_ASSIGN_OR_RETURN(const auto value_size,
                        HeadSize(call, Role::kV, call.kv_num_heads, "kv_num_heads"));
  if (query_size != key_size) {
    return Invalid("key has heads of ", key_size, "; they must be as query's, ", query_size);
  }
  if (call.q_num_heads % call.kv_num_heads != 0) {
    return Invalid("q_num_heads is ", call.q_num_heads, "; it must be a multiple of kv_num_heads, ",
                   call.kv_num_heads);
  }
  sizes.key_size = key_size;
  sizes.value_size = value_size;
  return sizes;
}

absl::Status CheckShape(const LinearAttentionCall& call, Slot slot, const Shape& shape) {
  const std::optional<TensorSpec>& spec = call.inputs[slot];
  if (!spec || spec->shape == shape) return absl::OkStatus();
  return Invalid(linear::NameOf(slot), " has shape ", ToString(spec->shape), "; it must be ",
                 ToString(shape));
}

absl::Status CheckShapes(const LinearAttentionCall& call, const Sizes& s, Slot slot,
                         const Shape& shape, const Shape& other) {
  const std::optional<TensorSpec>& spec = call.inputs[slot];
  if (!spec || spec->shape == shape || spec->shape == other) return absl::OkStatus();
  return Invalid(linear::NameOf(slot), " has shape ", ToString(spec->shape), "; it must be ",
                 ToString(shape), " or ", ToString(other), ", with kv_num_heads ", s.kv_heads);
}

absl::Status CheckOtherShapes(const LinearAttentionCall& call, const Sizes& s) {
  const Shape tokens = {s.batch, s.length, s.kv_heads};
  RAPT_RETURN_IF_ERROR(
      CheckShapes(call, s, kDecay, tokens, {s.batch, s.length, s.kv_heads * s.key_size}));
  RAPT_RETURN_IF_ERROR(CheckShapes(call, s, kBeta, tokens, {s.batch, s.length, 1}));
  RAPT_RETURN_IF_ERROR(CheckShape(call, Role::kKeyLengths, {s.batch}));
  RAPT_RETURN_IF_ERROR(CheckShape(call, kProjection, {s.features, s.key_size}));
  RAPT_RETURN_IF_ERROR(
      CheckShape(call, kPastState, {s.batch, s.kv_heads, s.features, s.value_size}));
  return CheckShape(call, kPastNormalizer, {s.batch, s.kv_heads, s.features});
}

// A tensor that must be given if and only if the call needs it.
absl::Status CheckNeeded(const LinearAttentionCall& call, Slot slot, bool needed) {
  if (call.inputs[slot].has_value() == needed) return absl::OkStatus();
  return Invalid(linear::NameOf(slot), needed ? " is missing" : " is given", "; update_rule is ",
                 NameOf(call.update_rule),
                 needed ? ", which needs it" : ", which does not take it");
}

absl::Status CheckRule(const LinearAttentionCall& call) {
  RAPT_RETURN_IF_ERROR(CheckNeeded(call, kDecay, HasDecay(call.update_rule)));
  RAPT_RETURN_IF_ERROR(CheckNeeded(call, kBeta, HasBeta(call.update_rule)));
  if (call.update_rule == UpdateRule::kLinear) return absl::OkStatus();
  const absl::string_view what = !call.is_causal  ? "is_causal is false"
                                 : IsFavor(call)  ? "feature_map is favor"
                                 : call.normalize ? "normalize is true"
                                                  : "";
  if (what.empty()) return absl::OkStatus();
  return Invalid(what, "; with it, update_rule must be linear, not ", NameOf(call.update_rule));
}

absl::Status CheckAttributes(const LinearAttentionCall& call) {
  if (!(call.scale >= 0) || std::isinf(call.scale)) {
    return Invalid("scale is ", call.scale, "; it must be finite and at least 0");
  }
  if (call.chunk_size < 1) {
    return Invalid("chunk_size is ", call.chunk_size, "; it must be at least 1");
  }
  if (call.state_type && !IsFloat(*call.state_type)) {
    return Invalid("state_type is ", NameOf(*call.state_type),
                   "; it must be FP16, BF16, FP32 or FP64");
  }
  if (call.error_rows < 0 || call.error_rows > kMostErrorRows) {
    return Invalid("error_rows is ", call.error_rows, "; it must be from 0 to ", kMostErrorRows);
  }
  return absl::OkStatus();
}

absl::Status CheckFavor(const LinearAttentionCall& call) {
  const bool has_projection = call.inputs[kProjection].has_value();
  if (!IsFavor(call)) {
    const absl::string_view what = has_projection        ? "projection"
                                   : call.num_features   ? "num_features"
                                   : call.seed           ? "seed"
                                   : call.error_rows > 0 ? "error_rows"
                                                         : "";
    if (what.empty()) return absl::OkStatus();
    return Invalid(what, " is given; it needs feature_map favor");
  }
  if (has_projection && call.inputs[kProjection]->shape.size() != 2) {
    return Invalid("projection has shape ", ToString(call.inputs[kProjection]->shape),
                   "; it must be [num_features, d_k]");
  }
  if (has_projection && call.seed) {
    return Invalid("seed is given; it has no effect with projection");
  }
  if (call.error_rows > 0 && call.inputs[kPastState]) {
    return Invalid("error_rows is ", call.error_rows,
                   "; it must be 0 with past_state, as the keys before are not known");
  }
  return absl::OkStatus();
}

// The features of favor, if the call does not say.
int64_t UsualFeatures(int64_t key_size) {
  const auto size = static_cast<double>(key_size);
  return std::clamp<int64_t>(static_cast<int64_t>(size * std::log(size)), 1, kMostSize);
}

absl::StatusOr<int64_t> FeaturesOf(const LinearAttentionCall& call, int64_t key_size) {
  if (!IsFavor(call)) return key_size;
  const bool is_given = call.inputs[kProjection].has_value();
  const int64_t rows = is_given ? call.inputs[kProjection]->shape[0] : UsualFeatures(key_size);
  const int64_t features = call.num_features.value_or(rows);
  if (is_given && features != rows) {
    return Invalid("num_features is ", features, "; it must be the rows of projection, ", rows);
  }
  if (features >= 1 && features <= kMostSize) return features;
  return Invalid(is_given ? "projection has " : "num_features is ", features,
                 is_given ? " rows; it must have 1 to " : "; it must be from 1 to ", kMostSize);
}

// The normalizer of the past belongs to its state.
absl::Status CheckNormalizer(const LinearAttentionCall& call) {
  const bool is_normalized = IsNormalized(call);
  if (call.inputs[kPastNormalizer] && !is_normalized) {
    return Invalid("past_normalizer is given; it needs normalize or feature_map favor");
  }
  if (call.wants_present_normalizer && !is_normalized) {
    return Invalid("present_normalizer is requested; it needs normalize or feature_map favor");
  }
  if (is_normalized &&
      call.inputs[kPastNormalizer].has_value() != call.inputs[kPastState].has_value()) {
    return Invalid(
        "past_state and past_normalizer must be given both or neither, if the output is "
        "normalized");
  }
  return absl::OkStatus();
}

absl::StatusOr<Sizes> Check(const LinearAttentionCall& call) {
  RAPT_RETURN_IF_ERROR(CheckPresence(call));
  RAPT_RETURN_IF_ERROR(CheckAttributes(call));
  RAPT_RETURN_IF_ERROR(CheckRule(call));
  RAPT_RETURN_IF_ERROR(CheckFavor(call));
  RAPT_RETURN_IF_ERROR(CheckNormalizer(call));
  RAPT_ASSIGN_OR_RETURN(Sizes sizes, ReadSizes(call));
  RAPT_ASSIGN_OR_RETURN(sizes.features, FeaturesOf(call, sizes.key_size));
  RAPT_RETURN_IF_ERROR(CheckOtherShapes(call, sizes));
  return sizes;
}

// ---- The computation ----------------------------------------------------------------------------

LinearRows RowsOf(const std::byte* data, DType dtype, int64_t row_elements, int64_t first_row,
                  int64_t first_element) {
  const int64_t size = SizeOf(dtype);
  return {data + (first_row * row_elements + first_element) * size, row_elements * size,
          ElementOf(dtype)};
}

// The error of a sampled row: the squared norm of the difference and of the exact row.
struct RowError {
  double difference;
  double exact;
};

class LinearAttention final : public TensorOperator {
 public:
  LinearAttention(const LinearAttentionCall& call, const Sizes& sizes)
      : call_(call), s_(sizes), dtype_(call.inputs[Role::kQ]->dtype) {
    state_type_ =
        call.state_type.value_or(call.inputs[kPastState] ? call.inputs[kPastState]->dtype : dtype_);
    outputs_[Role::kY] = {dtype_, {s_.batch, s_.length, s_.query_heads * s_.value_size}};
    if (call.wants_present_state) outputs_[kPresentState] = StateSpec();
    if (call.wants_present_normalizer) {
      outputs_[kPresentNormalizer] = {state_type_, {s_.batch, s_.kv_heads, s_.features}};
    }
    if (call.error_rows > 0) outputs_[kRelativeError] = {DType::kFloat32, {1}};
  }

  // The sizes of the outputs overflow in few calls whose inputs do not.
  absl::Status CheckOutputs() const {
    for (const auto& [slot, spec] :
         {std::pair(Slot(Role::kY), *outputs_[Role::kY]), std::pair(kPresentState, StateSpec())}) {
      RAPT_RETURN_IF_ERROR(ByteSize(linear::NameOf(slot), spec).status());
    }
    return absl::OkStatus();
  }

  const OutputMap<std::optional<TensorSpec>>& outputs() const override { return outputs_; }

  bool checks_data() const override { return call_.inputs[Role::kKeyLengths].has_value(); }
  absl::Status CheckData(const Arguments& arguments) const override {
    if (!checks_data()) return absl::OkStatus();
    return CheckLengths(linear::NameOf(Role::kKeyLengths), arguments.key_lengths, s_.batch,
                        "length", s_.length);
  }

  void PlanTasks(Plan& plan) const override {
    if (is_empty()) {
      if (call_.error_rows > 0) plan.stages.push_back(1);
      return;
    }
    if (draws()) plan.stages.push_back((s_.features - 1) / s_.key_size + 1);
    plan.stages.push_back(s_.batch * s_.kv_heads * BlocksOf(plan));
    if (call_.error_rows > 0) {
      plan.stages.push_back(ErrorTasks());
      plan.stages.push_back(1);
    }
    plan.shared_workspace_bytes =
        RoundUp(ProjectionBytes() + ErrorTasks() * int64_t{sizeof(RowError)}, kWorkspaceAlignment);
    plan.worker_workspace_bytes = RoundUp(WorkerBytes(plan), kWorkspaceAlignment);
    const double tokens = static_cast<double>(s_.batch) * static_cast<double>(s_.length);
    plan.flops = tokens * FlopsOfToken();
  }

  void RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace, int stage,
               int64_t task, int worker, const Checkpoint& checkpoint) const override {
    if (is_empty()) return SumErrors(arguments, nullptr);
    std::byte* const scratch =
        workspace + plan.shared_workspace_bytes + worker * plan.worker_workspace_bytes;
    if (!draws()) ++stage;
    switch (stage) {
      case 0:
        return Draw(workspace, scratch, task, checkpoint);
      case 1:
        return RunHead(plan, arguments, workspace, scratch, task, checkpoint);
      case 2:
        return MeasureError(arguments, ErrorsIn(workspace), scratch, task, checkpoint);
      default:
        return SumErrors(arguments, ErrorsIn(workspace));
    }
  }

 private:
  TensorSpec StateSpec() const {
    return {state_type_, {s_.batch, s_.kv_heads, s_.features, s_.value_size}};
  }

  // Whether no output but the error has numbers. Without tokens, the axis of batch rows is not
  // bounded by the size of any tensor.
  bool is_empty() const {
    return s_.batch == 0 ||
           (s_.length == 0 && !call_.wants_present_state && !call_.wants_present_normalizer);
  }
  bool draws() const { return IsFavor(call_) && !call_.inputs[kProjection]; }
  int64_t ProjectionBytes() const {
    return draws() ? s_.features * s_.key_size * int64_t{sizeof(double)} : 0;
  }
  double Scale() const {
    return call_.scale > 0 ? call_.scale : 1 / std::sqrt(static_cast<double>(s_.key_size));
  }
  int64_t Group() const { return s_.query_heads / s_.kv_heads; }

  // Blocks of columns of a head's state, if there are fewer heads than threads.
  int64_t BlocksOf(const Plan& plan) const {
    const int64_t heads = std::max<int64_t>(1, s_.batch * s_.kv_heads);
    const int64_t wanted = (plan.threads - 1) / heads + 1;
    const int64_t most = (s_.value_size - 1) / kLeastColumns + 1;
    const int64_t columns = ColumnsOfBlocks(std::min(wanted, most));
    return (s_.value_size - 1) / columns + 1;
  }
  int64_t ColumnsOfBlocks(int64_t blocks) const {
    return RoundUp((s_.value_size - 1) / blocks + 1, kLeastColumns);
  }

  const LinearKernel& KernelOf(const Plan& plan) const {
    if (plan.isa.empty()) return kRecurrence;
    return LinearKernelOf(plan.isa, dtype_ == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32);
  }

  int64_t WorkerBytes(const Plan& plan) const {
    LinearTask task = TaskOfSizes();
    task.columns = std::min(s_.value_size, ColumnsOfBlocks(BlocksOf(plan)));
    int64_t bytes = KernelOf(plan).scratch_bytes(task);
    if (draws()) {
      const int64_t block = s_.key_size * s_.key_size;
      bytes = std::max(bytes, (ProjectionWorkspace(s_.key_size) + block) * int64_t{sizeof(double)});
    }
    if (call_.error_rows > 0) {
      bytes = std::max(bytes, (s_.key_size + s_.value_size) * int64_t{sizeof(double)});
    }
    return bytes;
  }

  double FlopsOfToken() const {
    const double features = static_cast<double>(s_.features);
    const double values = static_cast<double>(s_.value_size);
    const double reads = static_cast<double>(s_.query_heads) +
                         (HasBeta(call_.update_rule) ? static_cast<double>(s_.kv_heads) : 0);
    const double writes = static_cast<double>(s_.kv_heads);
    const double maps = IsFavor(call_) ? static_cast<double>(s_.query_heads + s_.kv_heads) : 0;
    return 2 * features * ((reads + writes) * values + maps * static_cast<double>(s_.key_size));
  }

  void Draw(std::byte* workspace, std::byte* scratch, int64_t block,
            const Checkpoint& checkpoint) const {
    auto* const numbers = reinterpret_cast<double*>(scratch);
    const int64_t used = ProjectionWorkspace(s_.key_size);
    const int64_t size = s_.key_size * s_.key_size;
    const absl::Span<double> drawn(numbers + used, size);
    DrawProjectionBlock(call_.seed.value_or(0), block, s_.features, s_.key_size,
                        {numbers, static_cast<size_t>(used)}, drawn, checkpoint);
    const int64_t rows = std::min(s_.key_size, s_.features - block * s_.key_size);
    std::copy_n(drawn.begin(), rows * s_.key_size,
                reinterpret_cast<double*>(workspace) + block * size);
  }

  LinearTask TaskOfSizes() const {
    LinearTask task = {};
    task.output_element = ElementOf(dtype_);
    task.state_stride = s_.value_size;
    task.group = Group();
    task.length = task.tokens = s_.length;
    task.key_size = s_.key_size;
    task.features = s_.features;
    task.value_size = s_.value_size;
    task.chunk = std::clamp<int64_t>(std::min(call_.chunk_size, s_.length), 1, kMostChunk);
    task.is_causal = call_.is_causal;
    task.is_delta = HasBeta(call_.update_rule);
    const std::optional<TensorSpec>& decay = call_.inputs[kDecay];
    task.decay_kind = !decay                           ? DecayKind::kNone
                      : decay->shape[2] == s_.kv_heads ? DecayKind::kPerHead
                                                       : DecayKind::kPerKey;
    task.is_normalized = IsNormalized(call_);
    task.feature_map = call_.feature_map;
    task.scale = Scale();
    return task;
  }

  // Tasks are in the order of batch rows, heads and blocks of columns.
  void RunHead(const Plan& plan, const Arguments& a, const std::byte* workspace, std::byte* scratch,
               int64_t index, const Checkpoint& checkpoint) const {
    const int64_t blocks = BlocksOf(plan);
    const int64_t block = index % blocks;
    const int64_t head = index / blocks % s_.kv_heads;
    const int64_t b = index / blocks / s_.kv_heads;
    const int64_t columns = ColumnsOfBlocks(blocks);
    const int64_t first = block * columns;
    LinearTask task = TaskOfSizes();
    task.columns = std::min(columns, s_.value_size - first);
    const auto rows = [&](Slot slot, int64_t size, int64_t offset) {
      const TensorSpec& spec = *call_.inputs[slot];
      return RowsOf(a.inputs[slot].data, spec.dtype, spec.shape[2], b * s_.length,
                    spec.shape[2] == 1 ? 0 : head * size + offset);
    };
    task.query = rows(Role::kQ, Group() * s_.key_size, 0);
    task.key = rows(Role::kK, s_.key_size, 0);
    task.value = rows(Role::kV, s_.value_size, first);
    if (task.decay_kind != DecayKind::kNone) {
      task.decay = rows(kDecay, task.decay_kind == DecayKind::kPerKey ? s_.key_size : 1, 0);
    }
    if (task.is_delta) task.beta = rows(kBeta, 1, 0);
    if (draws()) {
      task.projection = RowsOf(workspace, DType::kFloat64, s_.key_size, 0, 0);
    } else if (IsFavor(call_)) {
      task.projection =
          RowsOf(a.inputs[kProjection].data, call_.inputs[kProjection]->dtype, s_.key_size, 0, 0);
    }
    if (!a.key_lengths.empty()) task.tokens = a.key_lengths[b];
    SetOutputs(a, b, head, first, task);
    task.checkpoint = checkpoint;
    task.scratch = scratch;
    KernelOf(plan).run(task);
  }

  void SetOutputs(const Arguments& a, int64_t b, int64_t head, int64_t first,
                  LinearTask& task) const {
    const int64_t size = SizeOf(dtype_);
    task.output_stride = s_.query_heads * s_.value_size * size;
    task.output = a.outputs[Role::kY].data + b * s_.length * task.output_stride +
                  (head * Group() * s_.value_size + first) * size;
    const int64_t row = (b * s_.kv_heads + head) * s_.features;
    if (call_.inputs[kPastState]) {
      const DType dtype = call_.inputs[kPastState]->dtype;
      task.past.rows = a.inputs[kPastState].data + (row * s_.value_size + first) * SizeOf(dtype);
      task.past.element = ElementOf(dtype);
    }
    if (call_.inputs[kPastNormalizer]) {
      const DType dtype = call_.inputs[kPastNormalizer]->dtype;
      task.past.normalizer = a.inputs[kPastNormalizer].data + row * SizeOf(dtype);
      task.past.normalizer_element = ElementOf(dtype);
    }
    task.present.element = ElementOf(state_type_);
    if (outputs_[kPresentState]) {
      task.present.rows =
          a.outputs[kPresentState].data + (row * s_.value_size + first) * SizeOf(state_type_);
    }
    if (outputs_[kPresentNormalizer] && first == 0) {
      task.present.normalizer = a.outputs[kPresentNormalizer].data + row * SizeOf(state_type_);
    }
  }

  // ---- The error of sampled rows ----------------------------------------------------------------

  int64_t ErrorTasks() const {
    return std::min(call_.error_rows, s_.batch * s_.query_heads * s_.length);
  }

  RowError* ErrorsIn(std::byte* workspace) const {
    return reinterpret_cast<RowError*>(workspace + ProjectionBytes());
  }

  // Spreads the samples evenly: multiples of the golden ratio, modulo 1.
  int64_t SampledRow(int64_t n) const {
    constexpr double kGoldenRatio = 0.6180339887498949;
    const int64_t rows = s_.batch * s_.query_heads * s_.length;
    if (call_.error_rows >= rows) return n;
    const double place = std::fmod((static_cast<double>(n) + 0.5) * kGoldenRatio, 1);
    return std::min(static_cast<int64_t>(place * static_cast<double>(rows)), rows - 1);
  }

  void MeasureError(const Arguments& a, RowError* errors, std::byte* scratch, int64_t n,
                    const Checkpoint& checkpoint) const {
    errors[n] = {};
    const int64_t row = SampledRow(n);
    const int64_t head = row / s_.length % s_.query_heads;
    const int64_t b = row / s_.length / s_.query_heads;
    const int64_t tokens = a.key_lengths.empty() ? s_.length : a.key_lengths[b];
    if (tokens == 0) return;
    const int64_t t = row % s_.length % tokens;
    const absl::Span<double> query(reinterpret_cast<double*>(scratch), s_.key_size);
    const absl::Span<double> exact(query.data() + s_.key_size, s_.value_size);
    const int64_t first = head * s_.key_size;
    for (int64_t d = 0; d < s_.key_size; ++d) {
      query[d] = Scale() * Number(a, Role::kQ, b, t, first + d);
    }
    const int64_t keys = call_.is_causal ? t + 1 : tokens;
    if (!ComputeSoftmaxRow(a, b, head / Group(), keys, query, exact, checkpoint)) return;
    const std::byte* const output = a.outputs[Role::kY].data;
    const int64_t at = ((b * s_.length + t) * s_.query_heads + head) * s_.value_size;
    for (int64_t c = 0; c < s_.value_size; ++c) {
      const double difference = LoadElement(output, dtype_, at + c) - exact[c];
      errors[n].difference += difference * difference;
      errors[n].exact += exact[c] * exact[c];
    }
  }

  // Number `n` of a token of Q, K or V.
  double Number(const Arguments& a, Slot slot, int64_t b, int64_t t, int64_t n) const {
    const int64_t width = call_.inputs[slot]->shape[2];
    return LoadElement(a.inputs[slot].data, dtype_, (b * s_.length + t) * width + n);
  }

  // Sets `output` to softmax(query . K) V over the first `keys` tokens, in float64. Returns false
  // if the checkpoint abandoned the task.
  bool ComputeSoftmaxRow(const Arguments& a, int64_t b, int64_t kv_head, int64_t keys,
                         absl::Span<const double> query, absl::Span<double> output,
                         const Checkpoint& checkpoint) const {
    constexpr int64_t kKeysPerCheckpoint = 64;
    std::fill(output.begin(), output.end(), 0);
    double most = -std::numeric_limits<double>::infinity();
    double sum = 0;
    for (int64_t j = 0; j < keys; ++j) {
      const bool passes = checkpoint.go_on != nullptr && j % kKeysPerCheckpoint == 0;
      if (passes && !checkpoint.go_on(checkpoint.context)) return false;
      double score = 0;
      for (int64_t d = 0; d < s_.key_size; ++d) {
        score += query[d] * Number(a, Role::kK, b, j, kv_head * s_.key_size + d);
      }
      const double before = score > most ? std::exp(most - score) : 1;
      most = std::max(most, score);
      const double weight = std::exp(score - most);
      sum = sum * before + weight;
      for (int64_t c = 0; c < s_.value_size; ++c) {
        const double value = Number(a, Role::kV, b, j, kv_head * s_.value_size + c);
        output[c] = output[c] * before + weight * value;
      }
    }
    for (double& o : output) o /= sum;
    return true;
  }

  void SumErrors(const Arguments& a, const RowError* errors) const {
    RowError sum = {};
    for (int64_t n = 0; n < ErrorTasks(); ++n) {
      sum.difference += errors[n].difference;
      sum.exact += errors[n].exact;
    }
    const double ratio = sum.difference == 0 ? 0 : std::sqrt(sum.difference / sum.exact);
    StoreElement(a.outputs[kRelativeError].data, DType::kFloat32, 0, ratio);
  }

  const LinearAttentionCall call_;
  const Sizes s_;
  const DType dtype_;
  DType state_type_;
  OutputMap<std::optional<TensorSpec>> outputs_;
};

// --- The table ---

constexpr TensorSchema kLinearInputs[] = {
    PerToken(Required(TensorRow("query", Role::kQ, 3, "[B, T, Hq*d_k]"))),
    PerToken(Required(TensorRow("key", Role::kK, 3, "[B, T, Hkv*d_k]"))),
    PerToken(Required(TensorRow("value", Role::kV, 3, "[B, T, Hkv*d_v]"))),
    TensorRow("past_state", linear::kPastState, 4, "the state before, [B, Hkv, features, d_v]"),
    PerToken(TensorRow("decay", linear::kDecay, 3,
                       "logarithms, [B, T, Hkv] or [B, T, Hkv*d_k]; of gated rules")),
    PerToken(TensorRow("beta", linear::kBeta, 3, "[B, T, Hkv] or [B, T, 1]; of delta rules")),
    PerToken(TensorRow("nonpad_kv_seqlen", Role::kKeyLengths, 1,
                       "integers [B]: later tokens do not count", DType::kInt64)),
    TensorRow("projection", linear::kProjection, 2, "the directions of favor, [num_features, d_k]"),
    TensorRow("past_normalizer", linear::kPastNormalizer, 3,
              "of past_state, [B, Hkv, features], if the output is normalized")};
constexpr TensorSchema kLinearOutputs[] = {
    Required(TensorRow("output", Role::kY, 3, "[B, T, Hq*d_v]")),
    WantedBy<&LinearAttentionCall::wants_present_state>(
        StateFor(kPastState, TensorRow("present_state", kPresentState, 4,
                                       "the state after the last token, as past_state"))),
    WantedBy<&LinearAttentionCall::wants_present_normalizer>(
        StateFor(kPastNormalizer, TensorRow("present_normalizer", kPresentNormalizer, 3,
                                            "its normalizer, as past_normalizer"))),
    {.name = "relative_error",
     .slot = linear::kRelativeError,
     .dtype = DType::kFloat32,
     .rank = 1,
     .follows = "error_rows",
     .help = "the error of favor as an estimate of softmax"}};
constexpr AttributeSchema kLinearAttributes[] = {
    AttributeOf<&LinearAttentionCall::update_rule>(
        "update_rule", "what a token adds to the state (default: gated_delta)"),
    AttributeOf<&LinearAttentionCall::feature_map>(
        "feature_map", "what stands for queries and keys, by default nothing"),
    AttributeOf<&LinearAttentionCall::state_type>(
        "state_type", "of present_state (default: past_state's, or query's)"),
    Required(AttributeOf<&LinearAttentionCall::q_num_heads>("q_num_heads", "query heads")),
    Required(
        AttributeOf<&LinearAttentionCall::kv_num_heads>("kv_num_heads", "key and value heads")),
    AttributeOf<&LinearAttentionCall::scale>("scale", "scale of the output (default: 1/sqrt(d_k))"),
    AttributeOf<&LinearAttentionCall::chunk_size>("chunk_size",
                                                  "tokens computed at once, a hint (default: 64)"),
    NeedsAll(
        "a chunk does not see later ones",
        OnByDefault(AttributeOf<&LinearAttentionCall::is_causal>(
            "is_causal", "no token sees later ones (default: true); false is of rule linear"))),
    AttributeOf<&LinearAttentionCall::normalize>(
        "normalize", "divide by the sum of the products with keys; of rule linear"),
    AttributeOf<&LinearAttentionCall::num_features>(
        "num_features", "random features of favor (default: d_k ln d_k)"),
    AttributeOf<&LinearAttentionCall::seed>("seed", "of the directions of favor (default: 0)"),
    NeedsAll("the exact rows need all keys",
             AttributeOf<&LinearAttentionCall::error_rows>(
                 "error_rows", "measure the error of favor over N rows (default: 0)"))};

void WantState(SchemaCall& made) {
  LinearAttentionCall& call = static_cast<TypedCall<LinearAttentionCall>&>(made).call;
  call.wants_present_state = true;
  if (IsNormalized(call)) call.wants_present_normalizer = true;
}

}  // namespace

const OperatorSchema kLinearAttention = {
    "linear_attention",
    "LinearAttend",
    "Linear attention, the ONNX operator LinearAttention: a state instead of keys.",
    kLinearInputs,
    kLinearOutputs,
    kLinearAttributes,
    NewCall<LinearAttentionCall, MakeLinearAttention>,
    WantState};

absl::StatusOr<std::shared_ptr<const TensorOperator>> MakeLinearAttention(
    const LinearAttentionCall& call) {
  RAPT_ASSIGN_OR_RETURN(const Sizes sizes, Check(call));
  auto made = std::make_shared<const LinearAttention>(call, sizes);
  RAPT_RETURN_IF_ERROR(made->CheckOutputs());
  return std::shared_ptr<const TensorOperator>(std::move(made));
}

}  // namespace rapt
