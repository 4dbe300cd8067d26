// The C interface: rapt/attention.h over attention.h.
#include <algorithm>
#include <array>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "attention/attention.h"
#include "attention/attributes.h"
#include "attention/c/include/rapt/attention.h"
#include "attention/mechanism/linear/linear_attention.h"
#include "attention/mechanism/lsh/lsh_attention.h"
#include "base/aligned_buffer.h"
#include "base/invalid.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"
#include "base/version.h"

struct rapt_context {
  explicit rapt_context(rapt::PlanOptions plan_options)
      : options(std::move(plan_options)), pool(options.threads) {}

  const rapt::PlanOptions options;
  rapt::Mutex running;                                          // held during a run
  rapt::AlignedBuffer workspace ABSL_GUARDED_BY(running) = {};  // grows to the largest plan
  rapt::ThreadPool pool;
};

// What a plan computes, and the function that runs it.
struct PlanKind {
  const char* name;
  const char* run;
};
static constexpr PlanKind kAttentionPlan = {"attention", "rapt_run"};
static constexpr PlanKind kLinearPlan = {"linear attention", "rapt_linear_run"};
static constexpr PlanKind kLshPlan = {"attention by hashing", "rapt_lsh_run"};

struct rapt_plan {
  rapt::Plan plan;
  std::string description;
  const PlanKind* kind = &kAttentionPlan;
  std::shared_ptr<const rapt::TensorOperator> op = nullptr;     // null: attention
  rapt::InputMap<std::optional<rapt::TensorSpec>> inputs = {};  // of op
};

namespace {

using rapt::Alignment;
using rapt::DType;
using rapt::Invalid;
using rapt::Normalizer;
using rapt::ScoreFunction;
using rapt::ScoreOutput;

static_assert(RAPT_WORKSPACE_ALIGNMENT == rapt::AlignedBuffer::kAlignment);

using rapt::Role;

// The tensors of rapt_arguments; key_lengths is a plain pointer.
constexpr std::pair<Role, rapt_input rapt_arguments::*> kInputFields[] = {
    {Role::kQ, &rapt_arguments::query},
    {Role::kK, &rapt_arguments::key},
    {Role::kV, &rapt_arguments::value},
    {Role::kMask, &rapt_arguments::mask},
    {Role::kPastKey, &rapt_arguments::past_key},
    {Role::kPastValue, &rapt_arguments::past_value},
    {Role::kBias, &rapt_arguments::bias},
    {Role::kHeadSink, &rapt_arguments::head_sink},
    {Role::kAlibiSlopes, &rapt_arguments::alibi_slopes},
    {Role::kBiasTable, &rapt_arguments::bias_table},
    {Role::kRelativeBias, &rapt_arguments::relative_bias},
    {Role::kRelativeKeys, &rapt_arguments::relative_keys},
    {Role::kRelativeValues, &rapt_arguments::relative_values},
    {Role::kRelativeQuery, &rapt_arguments::relative_query},
    {Role::kCosCache, &rapt_arguments::cos_cache},
    {Role::kSinCache, &rapt_arguments::sin_cache},
    {Role::kPositionIds, &rapt_arguments::position_ids},
    {Role::kKeyPositionIds, &rapt_arguments::key_position_ids},
    {Role::kAdditiveWeight, &rapt_arguments::additive_weight},
    {Role::kAlpha, &rapt_arguments::head_alpha},
    {Role::kBlockMask, &rapt_arguments::block_mask},
    {Role::kSelectedIndices, &rapt_arguments::selected_indices},
    {Role::kGlobalMask, &rapt_arguments::global_mask},
    {Role::kOutputGradient, &rapt_arguments::output_gradient},
    {Role::kForwardOutput, &rapt_arguments::forward_output},
    {Role::kForwardLse, &rapt_arguments::forward_lse},
    {Role::kLseGradient, &rapt_arguments::lse_gradient},
};
constexpr std::pair<Role, rapt_output rapt_arguments::*> kOutputFields[] = {
    {Role::kY, &rapt_arguments::output},
    {Role::kLse, &rapt_arguments::lse},
    {Role::kScores, &rapt_arguments::scores},
    {Role::kPresentKey, &rapt_arguments::present_key},
    {Role::kPresentValue, &rapt_arguments::present_value},
    {Role::kDQ, &rapt_arguments::d_query},
    {Role::kDK, &rapt_arguments::d_key},
    {Role::kDV, &rapt_arguments::d_value},
    {Role::kDMask, &rapt_arguments::d_mask},
    {Role::kDPastKey, &rapt_arguments::d_past_key},
    {Role::kDPastValue, &rapt_arguments::d_past_value},
    {Role::kDBias, &rapt_arguments::d_bias},
    {Role::kDHeadSink, &rapt_arguments::d_head_sink},
    {Role::kDAlibiSlopes, &rapt_arguments::d_alibi_slopes},
    {Role::kDBiasTable, &rapt_arguments::d_bias_table},
    {Role::kDRelativeBias, &rapt_arguments::d_relative_bias},
    {Role::kDRelativeKeys, &rapt_arguments::d_relative_keys},
    {Role::kDRelativeValues, &rapt_arguments::d_relative_values},
    {Role::kDRelativeQuery, &rapt_arguments::d_relative_query},
    {Role::kDAdditiveWeight, &rapt_arguments::d_additive_weight},
};
static_assert(std::size(kInputFields) == rapt::kInputTensors.size() + rapt::kBackwardInputs.size(),
              "every input tensor has a row");
static_assert(std::size(kOutputFields) == rapt::kAllOutputs.size(), "every output has a row");

// The attributes of rapt_problem. `given`: 0 if the value is not to be read; null: it always is.
struct AttributeFields {
  rapt::Attribute attribute;
  std::variant<int32_t rapt_problem::*, int64_t rapt_problem::*, double rapt_problem::*> value;
  int32_t rapt_problem::*given = nullptr;
};
constexpr AttributeFields kAttributeFields[] = {
    {rapt::Attribute::kCausal, &rapt_problem::causal},
    {rapt::Attribute::kLeftWindow, &rapt_problem::left_window, &rapt_problem::has_left_window},
    {rapt::Attribute::kRightWindow, &rapt_problem::right_window, &rapt_problem::has_right_window},
    {rapt::Attribute::kScale, &rapt_problem::scale, &rapt_problem::has_scale},
    {rapt::Attribute::kSoftcap, &rapt_problem::softcap},
    {rapt::Attribute::kAlibi, &rapt_problem::alibi},
    {rapt::Attribute::kBidirectional, &rapt_problem::is_bidirectional},
    {rapt::Attribute::kMaxDistance, &rapt_problem::max_distance, &rapt_problem::has_max_distance},
    {rapt::Attribute::kInterleaved, &rapt_problem::interleaved},
    {rapt::Attribute::kRotaryDim, &rapt_problem::rotary_embedding_dim},
    {rapt::Attribute::kRopeTheta, &rapt_problem::rope_theta, &rapt_problem::has_rope_theta},
    {rapt::Attribute::kRotaryKeys, &rapt_problem::rotary_keys, &rapt_problem::has_rotary_keys},
    {rapt::Attribute::kScoreFunction, &rapt_problem::score_function},
    {rapt::Attribute::kNormalizer, &rapt_problem::normalizer},
    {rapt::Attribute::kAlpha, &rapt_problem::alpha, &rapt_problem::has_alpha},
    {rapt::Attribute::kBlockQ, &rapt_problem::block_q, &rapt_problem::has_block_mask},
    {rapt::Attribute::kBlockK, &rapt_problem::block_k, &rapt_problem::has_block_mask},
    {rapt::Attribute::kPrefixKeys, &rapt_problem::prefix_keys},
};
static_assert(
    std::size(kAttributeFields) == rapt::kAttributes - 4,
    "every attribute has a row, but the two numbers of heads and the value head size, which are "
    "axes here, and the probability of dropout");

// The codes are those of Abseil, which are gRPC's.
constexpr bool IsCode(rapt_code code, absl::StatusCode status) {
  return static_cast<int>(code) == static_cast<int>(status);
}
static_assert(IsCode(RAPT_OK, absl::StatusCode::kOk));
static_assert(IsCode(RAPT_INVALID_ARGUMENT, absl::StatusCode::kInvalidArgument));
static_assert(IsCode(RAPT_RESOURCE_EXHAUSTED, absl::StatusCode::kResourceExhausted));
static_assert(IsCode(RAPT_FAILED_PRECONDITION, absl::StatusCode::kFailedPrecondition));
static_assert(IsCode(RAPT_UNIMPLEMENTED, absl::StatusCode::kUnimplemented));

// The enumerations have the order of those of C, which begin at `first`.
template <typename Enum>
constexpr Enum FromC(int32_t value, int first) {
  return static_cast<Enum>(value - first);
}
static_assert(FromC<DType>(RAPT_FP32, RAPT_FP32) == DType::kFloat32);
static_assert(FromC<DType>(RAPT_FP16, RAPT_FP32) == DType::kFloat16);
static_assert(FromC<DType>(RAPT_BF16, RAPT_FP32) == DType::kBFloat16);
static_assert(FromC<DType>(RAPT_FP64, RAPT_FP32) == DType::kFloat64);
static_assert(FromC<DType>(RAPT_BOOL, RAPT_FP32) == DType::kBool);
static_assert(FromC<ScoreOutput>(RAPT_SCORES, RAPT_SCORES) == ScoreOutput::kScores);
static_assert(FromC<ScoreOutput>(RAPT_SOFTCAPPED, RAPT_SCORES) == ScoreOutput::kSoftcapped);
static_assert(FromC<ScoreOutput>(RAPT_BIASED, RAPT_SCORES) == ScoreOutput::kBiased);
static_assert(FromC<ScoreOutput>(RAPT_WEIGHTS, RAPT_SCORES) == ScoreOutput::kWeights);
static_assert(FromC<ScoreFunction>(RAPT_DOT_PRODUCT, 0) == ScoreFunction::kDotProduct);
static_assert(FromC<ScoreFunction>(RAPT_ADDITIVE, 0) == ScoreFunction::kAdditive);
static_assert(FromC<Normalizer>(RAPT_SOFTMAX, 0) == Normalizer::kSoftmax);
static_assert(FromC<Normalizer>(RAPT_SPARSEMAX, 0) == Normalizer::kSparsemax);
static_assert(FromC<Normalizer>(RAPT_ENTMAX15, 0) == Normalizer::kEntmax15);
static_assert(FromC<Normalizer>(RAPT_ENTMAX, 0) == Normalizer::kEntmax);
static_assert(FromC<Alignment>(RAPT_TOP_LEFT, RAPT_TOP_LEFT) == Alignment::kTopLeft);
static_assert(FromC<Alignment>(RAPT_BOTTOM_RIGHT, RAPT_TOP_LEFT) == Alignment::kBottomRight);
static_assert(FromC<Alignment>(RAPT_ONNX, RAPT_TOP_LEFT) == Alignment::kOnnx);

// The bits of rapt_gradient have the order of kGradients.
constexpr uint64_t BitOf(Role gradient) {
  return uint64_t{1} << (static_cast<int>(gradient) - static_cast<int>(Role::kDQ));
}
static_assert(BitOf(Role::kDQ) == RAPT_D_QUERY);
static_assert(BitOf(Role::kDK) == RAPT_D_KEY);
static_assert(BitOf(Role::kDV) == RAPT_D_VALUE);
static_assert(BitOf(Role::kDMask) == RAPT_D_MASK);
static_assert(BitOf(Role::kDPastKey) == RAPT_D_PAST_KEY);
static_assert(BitOf(Role::kDPastValue) == RAPT_D_PAST_VALUE);
static_assert(BitOf(Role::kDBias) == RAPT_D_BIAS);
static_assert(BitOf(Role::kDHeadSink) == RAPT_D_HEAD_SINK);
static_assert(BitOf(Role::kDAlibiSlopes) == RAPT_D_ALIBI_SLOPES);
static_assert(BitOf(Role::kDBiasTable) == RAPT_D_BIAS_TABLE);
static_assert(BitOf(Role::kDRelativeBias) == RAPT_D_RELATIVE_BIAS);
static_assert(BitOf(Role::kDRelativeKeys) == RAPT_D_RELATIVE_KEYS);
static_assert(BitOf(Role::kDRelativeValues) == RAPT_D_RELATIVE_VALUES);
static_assert(BitOf(Role::kDRelativeQuery) == RAPT_D_RELATIVE_QUERY);
static_assert(BitOf(Role::kDAdditiveWeight) == RAPT_D_ADDITIVE_WEIGHT);

constexpr int kMaxThreads = 1024;

rapt_code CodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return RAPT_OK;
    case absl::StatusCode::kResourceExhausted:
      return RAPT_RESOURCE_EXHAUSTED;
    case absl::StatusCode::kFailedPrecondition:
      return RAPT_FAILED_PRECONDITION;
    case absl::StatusCode::kUnimplemented:
      return RAPT_UNIMPLEMENTED;
    default:
      return RAPT_INVALID_ARGUMENT;
  }
}

struct MessageBuffer {
  char* text;
  size_t bytes;

  void Write(absl::string_view message) const {
    if (text == nullptr || bytes == 0) return;
    const size_t length = std::min(message.size(), bytes - 1);
    std::memcpy(text, message.data(), length);
    text[length] = '\0';
  }
};

// Runs the body of a C function. Exceptions must not propagate into C.
template <typename Body>
rapt_code Guarded(MessageBuffer message, Body body) {
  absl::Status status;
  try {
    status = body();
  } catch (const std::bad_alloc&) {
    message.Write("out of memory");
    return RAPT_RESOURCE_EXHAUSTED;
  } catch (const std::system_error& error) {
    message.Write(error.what());
    return RAPT_RESOURCE_EXHAUSTED;
  }
  if (!status.ok()) message.Write(status.message());
  return CodeOf(status);
}

absl::Status CheckNotNull(
    std::initializer_list<std::pair<absl::string_view, const void*>> pointers) {
  for (const auto& [name, pointer] : pointers) {
    if (pointer == nullptr) return Invalid(name, " is null");
  }
  return absl::OkStatus();
}

// Copies the caller's struct. A smaller struct comes from an older caller, and missing fields are
// 0. A larger one comes from a newer caller, and the fields unknown here must be 0.
template <typename Struct>
absl::Status Adopt(absl::string_view name, const Struct* theirs, Struct& ours) {
  RAPT_RETURN_IF_ERROR(CheckNotNull({{name, theirs}}));
  const size_t size = theirs->struct_size;
  constexpr size_t kLargest = 1 << 16;
  if (size < sizeof(size) || size > kLargest) {
    return Invalid(name, "->struct_size is ", size, "; it must be ", sizeof(Struct));
  }
  const char* bytes = reinterpret_cast<const char*>(theirs);
  const size_t known = std::min(size, sizeof(Struct));
  if (std::any_of(bytes + known, bytes + size, [](char byte) { return byte != 0; })) {
    return absl::UnimplementedError(absl::StrCat(name, " has fields that librapt_attention ",
                                                 rapt::Version(), " does not know"));
  }
  std::memcpy(&ours, bytes, known);
  return absl::OkStatus();
}

absl::Status CheckEnum(absl::string_view name, int32_t value, int32_t least, int32_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return Invalid(name, " is ", value, "; it must be from ", least, " to ", most);
}

// The type of a tensor that is absent if 0.
absl::Status CheckType(absl::string_view name, int32_t dtype, int32_t most = RAPT_FP64) {
  return CheckEnum(name, dtype, 0, most);
}

absl::Status CheckEnums(const rapt_problem& p) {
  RAPT_RETURN_IF_ERROR(CheckEnum("dtype", p.dtype, RAPT_FP32, RAPT_FP64));
  RAPT_RETURN_IF_ERROR(CheckEnum("alignment", p.alignment, RAPT_TOP_LEFT, RAPT_ONNX));
  RAPT_RETURN_IF_ERROR(CheckType("mask_dtype", p.mask_dtype, RAPT_BOOL));
  RAPT_RETURN_IF_ERROR(CheckType("bias_dtype", p.bias_dtype));
  RAPT_RETURN_IF_ERROR(CheckType("head_sink_dtype", p.head_sink_dtype));
  RAPT_RETURN_IF_ERROR(CheckType("alibi_slopes_dtype", p.alibi_slopes_dtype));
  RAPT_RETURN_IF_ERROR(CheckType("bias_table_dtype", p.bias_table_dtype));
  RAPT_RETURN_IF_ERROR(CheckType("relative_bias_dtype", p.relative_bias_dtype));
  RAPT_RETURN_IF_ERROR(CheckType("relative_keys_dtype", p.relative_keys_dtype));
  RAPT_RETURN_IF_ERROR(CheckType("relative_values_dtype", p.relative_values_dtype));
  RAPT_RETURN_IF_ERROR(CheckType("rotary_cache_dtype", p.rotary_cache_dtype));
  RAPT_RETURN_IF_ERROR(CheckType("additive_weight_dtype", p.additive_weight_dtype));
  RAPT_RETURN_IF_ERROR(CheckType("head_alpha_dtype", p.head_alpha_dtype));
  return CheckEnum("score_output", p.score_output, RAPT_NO_SCORES, RAPT_WEIGHTS);
}

DType TypeOf(int32_t dtype) { return FromC<DType>(dtype, RAPT_FP32); }

absl::Status ReadAttribute(const AttributeFields& fields, const rapt_problem& c, rapt::Problem& p) {
  if (fields.given != nullptr && c.*fields.given == 0) return absl::OkStatus();
  const rapt::AttributeInfo& info = rapt::Attributes()[static_cast<size_t>(fields.attribute)];
  const auto read = [&](auto at, const auto& field) -> absl::Status {
    if (info.absent && c.*at <= *info.absent) {
      return Invalid(info.c, " is ", c.*at, "; it must be at least ", *info.absent + 1);
    }
    auto& out = p.*field.problem;
    using Value = std::decay_t<decltype(out)>;
    if constexpr (std::is_enum_v<Value>) {
      const auto value = static_cast<int64_t>(c.*at);
      if (value < 0 || value >= static_cast<int64_t>(info.choices.size())) {
        return Invalid(info.c, " is ", value, "; it must be from 0 to ", info.choices.size() - 1,
                       ", ", info.allowed);
      }
      out = static_cast<Value>(value);
    } else if constexpr (std::is_same_v<Value, std::optional<bool>>) {
      out = c.*at != 0;
    } else {
      out = c.*at;
    }
    return absl::OkStatus();
  };
  return std::visit(read, fields.value, info.field);
}

rapt::Problem ProblemOf(const rapt_problem& c) {
  rapt::Problem p;
  p.dtype = TypeOf(c.dtype);
  p.batch = c.batch;
  p.query_heads = c.query_heads;
  p.kv_heads = c.kv_heads;
  p.query_length = c.query_length;
  p.key_length = c.key_length;
  p.past_length = c.past_length;
  p.head_size = c.head_size;
  p.value_head_size = c.value_head_size;
  p.values_in_keys = c.values_in_keys != 0;
  p.alignment = FromC<Alignment>(c.alignment, RAPT_TOP_LEFT);
  if (c.mask_dtype != 0) {
    p.mask = rapt::MaskShape{.dtype = TypeOf(c.mask_dtype)};
    std::copy(c.mask_shape, c.mask_shape + 4, p.mask->dims.begin());
  }
  p.has_key_lengths = c.has_key_lengths != 0;
  p.softmax_in_fp64 = c.softmax_in_fp64 != 0;
  if (c.dropout_probability != 0) {
    p.dropout = rapt::Dropout{.probability = c.dropout_probability, .seed = c.dropout_seed};
  }
  if (c.score_output != RAPT_NO_SCORES) {
    p.score_output = FromC<ScoreOutput>(c.score_output, RAPT_SCORES);
  }
  p.wants_lse = c.wants_lse != 0;
  p.wants_present = c.wants_present != 0;
  if (c.bias_dtype != 0) {
    p.bias = rapt::MaskShape{.dtype = TypeOf(c.bias_dtype)};
    std::copy(c.bias_shape, c.bias_shape + 4, p.bias->dims.begin());
  }
  if (c.head_sink_dtype != 0) p.head_sink = TypeOf(c.head_sink_dtype);
  if (c.alibi_slopes_dtype != 0) {
    p.alibi_slopes = rapt::AlibiSlopes{TypeOf(c.alibi_slopes_dtype), c.alibi_slopes_batch};
  }
  if (c.bias_table_dtype != 0) {
    p.bias_table = rapt::BiasTable{TypeOf(c.bias_table_dtype), c.bias_table_buckets};
  }
  if (c.relative_bias_dtype != 0) {
    p.relative_bias = rapt::RelativeBias{TypeOf(c.relative_bias_dtype), c.relative_bias_heads,
                                         c.relative_bias_length};
  }
  if (c.relative_keys_dtype != 0) {
    p.relative_keys = rapt::RelativeVectors{TypeOf(c.relative_keys_dtype), c.relative_keys_heads,
                                            c.relative_keys_length};
  }
  if (c.relative_values_dtype != 0) {
    p.relative_values = rapt::RelativeVectors{TypeOf(c.relative_values_dtype),
                                              c.relative_values_heads, c.relative_values_length};
  }
  p.has_relative_query = c.has_relative_query != 0;
  if (c.rotary_cache_dtype != 0) {
    p.rotary_cache = rapt::RotaryCache{.dtype = TypeOf(c.rotary_cache_dtype),
                                       .rows = c.rotary_cache_rows,
                                       .pairs = c.rotary_cache_pairs};
    if (c.rotary_cache_batch != 0) p.rotary_cache->batch = c.rotary_cache_batch;
  }
  p.has_position_ids = c.has_position_ids != 0;
  p.has_key_position_ids = c.has_key_position_ids != 0;
  if (c.additive_weight_dtype != 0) {
    p.additive_weight =
        rapt::AdditiveWeight{TypeOf(c.additive_weight_dtype), c.additive_weight_heads};
  }
  if (c.head_alpha_dtype != 0) p.head_alpha = TypeOf(c.head_alpha_dtype);
  if (c.has_selected_indices != 0) {
    p.selected = rapt::SelectedIndices{c.selected_heads, c.selected_count};
  }
  p.has_global_mask = c.has_global_mask != 0;
  return p;
}

// REQUIRES: the attributes are read. Sizes of blocks that are not valid are refused later.
void SetBlockMask(const rapt_problem& c, rapt::Problem& p) {
  const auto blocks = [](int64_t length, int64_t size) {
    return size < 1 ? 0 : length / size + (length % size != 0 ? 1 : 0);
  };
  p.block_mask = {c.block_mask_batch, c.block_mask_heads, blocks(c.query_length, c.block_q),
                  blocks(p.total_keys(), c.block_k)};
}

absl::Status SetBackward(const rapt_problem& c, rapt::Problem& p) {
  constexpr uint64_t kAll = (uint64_t{1} << rapt::kGradients.size()) - 1;
  if ((c.gradients & ~kAll) != 0) {
    return Invalid("gradients is ", c.gradients, "; it must be bits of rapt_gradient, up to ",
                   kAll);
  }
  if (c.gradients == 0) {
    if (c.has_forward == 0 && c.has_lse_gradient == 0) return absl::OkStatus();
    return Invalid(c.has_forward != 0 ? "has_forward" : "has_lse_gradient",
                   " is set, but gradients is 0; only the backward pass has such an input");
  }
  rapt::Backward& backward = p.backward.emplace();
  backward.has_forward = c.has_forward != 0;
  backward.has_lse_gradient = c.has_lse_gradient != 0;
  for (Role gradient : rapt::kGradients) {
    backward.gradients.Add(gradient, (c.gradients & BitOf(gradient)) != 0);
  }
  return absl::OkStatus();
}

absl::StatusOr<rapt::Problem> ValidProblem(const rapt_problem& c) {
  RAPT_RETURN_IF_ERROR(CheckEnums(c));
  rapt::Problem problem = ProblemOf(c);
  for (const AttributeFields& fields : kAttributeFields) {
    RAPT_RETURN_IF_ERROR(ReadAttribute(fields, c, problem));
  }
  RAPT_RETURN_IF_ERROR(SetBackward(c, problem));
  if (c.has_block_mask != 0) SetBlockMask(c, problem);
  RAPT_RETURN_IF_ERROR(Validate(problem, rapt::kCNames));
  return problem;
}

// REQUIRES: the problem wants the role.
template <typename View, typename CTensor>
View ViewOf(Role role, const rapt::Problem& p, const CTensor& tensor) {
  const rapt::RoleInfo& info = rapt::InfoOf(role);
  View view;
  view.data = static_cast<decltype(view.data)>(tensor.data);
  view.dtype = info.dtype(p);
  view.dims = info.dims(p);
  std::copy(tensor.strides, tensor.strides + 4, view.strides.begin());
  if (view.strides == std::array<int64_t, 4>{}) view.strides = rapt::RowMajorStrides(view.dims);
  for (int axis = 0; info.broadcasts && axis < 4; ++axis) {
    if (view.dims[axis] == 1) view.strides[axis] = 0;
  }
  return view;
}

rapt::Arguments ArgumentsOf(const rapt::Problem& p, const rapt_arguments& c) {
  rapt::Arguments a;
  const rapt::RoleSet inputs = rapt::InputTensorsOf(p);
  const rapt::RoleSet outputs = rapt::OutputsOf(p);
  for (const auto& [role, field] : kInputFields) {
    if (inputs.contains(role)) a.inputs[role] = ViewOf<rapt::TensorView>(role, p, c.*field);
  }
  for (const auto& [role, field] : kOutputFields) {
    if (!outputs.contains(role)) continue;
    a.outputs[role] = ViewOf<rapt::MutableTensorView>(role, p, c.*field);
  }
  if (p.has_key_lengths) a.key_lengths = {c.key_lengths, static_cast<size_t>(p.batch)};
  return a;
}

absl::StatusOr<rapt::PlanOptions> ValidOptions(const rapt_context_options& c) {
  if (c.threads < 1 || c.threads > kMaxThreads) {
    return Invalid("threads is ", c.threads, "; it must be from 1 to ", kMaxThreads);
  }
  rapt::PlanOptions options;
  options.threads = static_cast<int>(c.threads);
  if (c.backend != nullptr) options.backend = c.backend;
  if (c.isa != nullptr) options.isa = c.isa;
  RAPT_RETURN_IF_ERROR(Validate(options));
  return options;
}

absl::Status CreateContext(const rapt_context_options* theirs, rapt_context** context) {
  rapt_context_options c = {};
  RAPT_RETURN_IF_ERROR(Adopt("options", theirs, c));
  RAPT_RETURN_IF_ERROR(CheckNotNull({{"context", context}}));
  RAPT_ASSIGN_OR_RETURN(rapt::PlanOptions options, ValidOptions(c));
  *context = new rapt_context(std::move(options));
  return absl::OkStatus();
}

absl::Status CreatePlan(const rapt_context* context, const rapt_problem* theirs, rapt_plan** plan) {
  rapt_problem c = {};
  RAPT_RETURN_IF_ERROR(Adopt("problem", theirs, c));
  RAPT_RETURN_IF_ERROR(CheckNotNull({{"context", context}, {"plan", plan}}));
  RAPT_ASSIGN_OR_RETURN(const rapt::Problem problem, ValidProblem(c));
  RAPT_ASSIGN_OR_RETURN(rapt::Plan made, MakePlan(problem, context->options));
  std::string description = made.Describe();
  *plan = new rapt_plan{std::move(made), std::move(description)};
  return absl::OkStatus();
}

// The caller's workspace, or that of the context.
absl::Span<std::byte> WorkspaceOf(rapt_context* context, const rapt::Plan& plan, void* workspace,
                                  size_t workspace_bytes)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(context->running) {
  if (workspace != nullptr) return {static_cast<std::byte*>(workspace), workspace_bytes};
  const auto needed = static_cast<size_t>(plan.workspace_bytes());
  if (context->workspace.size() < needed) context->workspace = rapt::AlignedBuffer(needed);
  return context->workspace.span();
}

absl::Status CheckKind(const rapt_plan& plan, const PlanKind& kind) {
  if (plan.kind == &kind) return absl::OkStatus();
  return Invalid("plan is of ", plan.kind->name, "; ", plan.kind->run, " runs it");
}

absl::Status RunPlan(rapt_context* context, const rapt_plan* plan, const rapt_arguments* theirs,
                     void* workspace, size_t workspace_bytes) {
  rapt_arguments c = {};
  RAPT_RETURN_IF_ERROR(Adopt("arguments", theirs, c));
  RAPT_RETURN_IF_ERROR(CheckNotNull({{"context", context}, {"plan", plan}}));
  RAPT_RETURN_IF_ERROR(CheckKind(*plan, kAttentionPlan));
  const rapt::Problem& problem = plan->plan.problem;
  if (problem.has_key_lengths && problem.batch > 0) {
    RAPT_RETURN_IF_ERROR(CheckNotNull({{"key_lengths", c.key_lengths}}));
  }
  const rapt::Arguments arguments = ArgumentsOf(problem, c);
  // Run() checks them as well, but with the operator's names.
  RAPT_RETURN_IF_ERROR(Validate(problem, arguments, rapt::kCNames));
  rapt::MutexLock lock(context->running);
  return Run(plan->plan, arguments, WorkspaceOf(context, plan->plan, workspace, workspace_bytes),
             context->pool);
}

// ---- Operators other than attention -------------------------------------------------------------

constexpr int64_t kMostSize = 65536;
constexpr int64_t kMostCount = int64_t{1} << 31;

// A size, of which products must not overflow, or an enumeration.
struct Number {
  const char* name;
  int64_t value, least, most;
};

absl::Status CheckNumbers(std::initializer_list<Number> numbers) {
  for (const auto& [name, value, least, most] : numbers) {
    if (value >= least && value <= most) continue;
    return Invalid(name, " is ", value, "; it must be from ", least, " to ", most);
  }
  return absl::OkStatus();
}

// `op`: of `call`, or why it is invalid.
template <typename Call>
absl::Status CreateOperatorPlan(const rapt_context& context, const PlanKind& kind, const Call& call,
                                absl::StatusOr<std::shared_ptr<const rapt::TensorOperator>> op,
                                rapt_plan** plan) {
  if (!op.ok()) return op.status();
  RAPT_ASSIGN_OR_RETURN(rapt::Plan made, MakePlan(**op, context.options));
  std::string description = made.Describe();
  *plan =
      new rapt_plan{std::move(made), std::move(description), &kind, *std::move(op), call.inputs};
  return absl::OkStatus();
}

// Whether the call has numbers at all; otherwise its tensors may be null.
bool HasElements(const rapt::TensorSpec& spec) {
  return std::find(spec.shape.begin(), spec.shape.end(), 0) == spec.shape.end();
}

// Collects the tensors of an operator.
class OperatorArguments {
 public:
  explicit OperatorArguments(const rapt_plan& plan) : plan_(plan) {}

  void Add(Role input, absl::string_view name, const void* data) {
    Check(plan_.inputs[input], name, data);
    arguments_.inputs[input].data = static_cast<const std::byte*>(data);
  }
  void AddOutput(Role output, absl::string_view name, void* data) {
    Check(plan_.op->outputs()[output], name, data);
    arguments_.outputs[output].data = static_cast<std::byte*>(data);
  }
  void AddLengths(absl::string_view name, const int64_t* lengths) {
    const auto& spec = plan_.inputs[Role::kKeyLengths];
    Check(spec, name, lengths);
    if (spec) arguments_.key_lengths = {lengths, static_cast<size_t>(spec->shape[0])};
  }

  absl::Status Run(rapt_context* context, void* workspace, size_t workspace_bytes) const {
    if (!status_.ok()) return status_;
    rapt::MutexLock lock(context->running);
    return rapt::Run(*plan_.op, plan_.plan, arguments_,
                     WorkspaceOf(context, plan_.plan, workspace, workspace_bytes), context->pool);
  }

 private:
  void Check(const std::optional<rapt::TensorSpec>& spec, absl::string_view name,
             const void* data) {
    if (!spec || !HasElements(*spec) || data != nullptr || !status_.ok()) return;
    status_ = Invalid(name, " is null");
  }

  const rapt_plan& plan_;
  rapt::Arguments arguments_;
  absl::Status status_;
};

// ---- Linear attention ---------------------------------------------------------------------------

// The tensors of rapt_linear_arguments.
constexpr std::pair<Role, const void * rapt_linear_arguments::*> kLinearInputs[] = {
    {Role::kQ, &rapt_linear_arguments::query},
    {Role::kK, &rapt_linear_arguments::key},
    {Role::kV, &rapt_linear_arguments::value},
    {rapt::linear::kPastState, &rapt_linear_arguments::past_state},
    {rapt::linear::kPastNormalizer, &rapt_linear_arguments::past_normalizer},
    {rapt::linear::kDecay, &rapt_linear_arguments::decay},
    {rapt::linear::kBeta, &rapt_linear_arguments::beta},
    {rapt::linear::kProjection, &rapt_linear_arguments::projection},
};
constexpr std::pair<Role, void * rapt_linear_arguments::*> kLinearOutputs[] = {
    {Role::kY, &rapt_linear_arguments::output},
    {rapt::linear::kPresentState, &rapt_linear_arguments::present_state},
    {rapt::linear::kPresentNormalizer, &rapt_linear_arguments::present_normalizer},
};

absl::Status CheckLinearNumbers(const rapt_linear_problem& c) {
  RAPT_RETURN_IF_ERROR(CheckNumbers({
      {"dtype", c.dtype, RAPT_FP32, RAPT_FP64},
      {"update_rule", c.update_rule, RAPT_GATED_DELTA, RAPT_DELTA},
      {"batch", c.batch, 0, kMostCount},
      {"query_heads", c.query_heads, 1, kMostSize},
      {"kv_heads", c.kv_heads, 1, kMostSize},
      {"tokens", c.tokens, 0, kMostCount},
      {"key_size", c.key_size, 1, kMostSize},
      {"value_size", c.value_size, 1, kMostSize},
      {"decay_dtype", c.decay_dtype, 0, RAPT_FP64},
      {"beta_dtype", c.beta_dtype, 0, RAPT_FP64},
      {"past_dtype", c.past_dtype, 0, RAPT_FP64},
      {"state_dtype", c.state_dtype, 0, RAPT_FP64},
      {"feature_map", c.feature_map, RAPT_NO_FEATURE_MAP, RAPT_FAVOR},
      {"projection_dtype", c.projection_dtype, 0, RAPT_FP64},
      {"reserved", c.reserved, 0, 0},
      {"num_features", c.num_features, 0, kMostSize},
  }));
  // CheckNumbers() has refused 0. NOLINTNEXTLINE(clang-analyzer-core.DivideZero)
  if (c.query_heads % c.kv_heads == 0) return absl::OkStatus();
  return Invalid("query_heads is ", c.query_heads, "; it must be a multiple of kv_heads, ",
                 c.kv_heads);
}

rapt::UpdateRule RuleOf(int32_t rule) {
  switch (rule) {
    case RAPT_LINEAR:
      return rapt::UpdateRule::kLinear;
    case RAPT_GATED:
      return rapt::UpdateRule::kGated;
    case RAPT_DELTA:
      return rapt::UpdateRule::kDelta;
    default:
      return rapt::UpdateRule::kGatedDelta;
  }
}

// REQUIRES: the sizes are valid.
rapt::LinearAttentionCall LinearCallOf(const rapt_linear_problem& c) {
  rapt::LinearAttentionCall call;
  const auto add = [&](Role role, int32_t type, const rapt::Shape& shape) {
    if (type != 0) call.inputs[role] = rapt::TensorSpec{TypeOf(type), shape};
  };
  call.feature_map = static_cast<rapt::FeatureMap>(c.feature_map);
  call.normalize = c.normalize != 0;
  const bool is_favor = c.feature_map == RAPT_FAVOR;
  const int64_t features = !is_favor            ? c.key_size
                           : c.num_features > 0 ? c.num_features
                                                : rapt::UsualFeatures(c.key_size);
  const auto heads = [&](int64_t count, int64_t size) {
    return rapt::Shape{c.batch, c.tokens, count * size};
  };
  add(Role::kQ, c.dtype, heads(c.query_heads, c.key_size));
  add(Role::kK, c.dtype, heads(c.kv_heads, c.key_size));
  add(Role::kV, c.dtype, heads(c.kv_heads, c.value_size));
  add(rapt::linear::kPastState, c.past_dtype, {c.batch, c.kv_heads, features, c.value_size});
  if (is_favor || call.normalize) {
    add(rapt::linear::kPastNormalizer, c.past_dtype, {c.batch, c.kv_heads, features});
  }
  add(rapt::linear::kDecay, c.decay_dtype,
      heads(c.kv_heads, c.has_key_decays != 0 ? c.key_size : 1));
  add(rapt::linear::kBeta, c.beta_dtype, heads(c.has_one_beta != 0 ? 1 : c.kv_heads, 1));
  add(rapt::linear::kProjection, c.projection_dtype, {features, c.key_size});
  if (c.has_key_lengths != 0) {
    call.inputs[Role::kKeyLengths] = rapt::TensorSpec{DType::kInt64, {c.batch}};
  }
  call.wants_present_state = c.wants_present_state != 0;
  call.wants_present_normalizer = c.wants_present_normalizer != 0;
  call.q_num_heads = c.query_heads;
  call.kv_num_heads = c.kv_heads;
  call.update_rule = RuleOf(c.update_rule);
  call.scale = c.scale;
  if (c.chunk_size != 0) call.chunk_size = c.chunk_size;
  call.is_causal = c.bidirectional == 0;
  if (c.num_features != 0) call.num_features = c.num_features;
  if (c.seed != 0) call.seed = c.seed;
  if (c.state_dtype != 0) call.state_type = TypeOf(c.state_dtype);
  call.error_rows = c.error_rows;
  return call;
}

absl::Status CreateLinearPlan(const rapt_context* context, const rapt_linear_problem* theirs,
                              rapt_plan** plan) {
  rapt_linear_problem c = {};
  RAPT_RETURN_IF_ERROR(Adopt("problem", theirs, c));
  RAPT_RETURN_IF_ERROR(CheckNotNull({{"context", context}, {"plan", plan}}));
  RAPT_RETURN_IF_ERROR(CheckLinearNumbers(c));
  const rapt::LinearAttentionCall call = LinearCallOf(c);
  return CreateOperatorPlan(*context, kLinearPlan, call, MakeLinearAttention(call), plan);
}

absl::Status RunLinearPlan(rapt_context* context, const rapt_plan* plan,
                           const rapt_linear_arguments* theirs, void* workspace,
                           size_t workspace_bytes) {
  rapt_linear_arguments c = {};
  RAPT_RETURN_IF_ERROR(Adopt("arguments", theirs, c));
  RAPT_RETURN_IF_ERROR(CheckNotNull({{"context", context}, {"plan", plan}}));
  RAPT_RETURN_IF_ERROR(CheckKind(*plan, kLinearPlan));
  OperatorArguments tensors(*plan);
  const auto name = rapt::linear::NameOf;
  for (const auto& [role, field] : kLinearInputs) tensors.Add(role, name(role), c.*field);
  for (const auto& [role, field] : kLinearOutputs) tensors.AddOutput(role, name(role), c.*field);
  tensors.AddOutput(rapt::linear::kRelativeError, name(rapt::linear::kRelativeError),
                    c.relative_error);
  tensors.AddLengths(name(Role::kKeyLengths), c.key_lengths);
  return tensors.Run(context, workspace, workspace_bytes);
}

// ---- Attention by hashing -----------------------------------------------------------------------

absl::Status CheckLshNumbers(const rapt_lsh_problem& c) {
  return CheckNumbers({
      {"dtype", c.dtype, RAPT_FP32, RAPT_FP64},
      {"form", c.form, RAPT_REFORMER, RAPT_SIMPLE},
      {"batch", c.batch, 0, kMostCount},
      {"heads", c.heads, 0, kMostSize},
      {"length", c.length, 0, kMostCount},
      {"head_size", c.head_size, 1, kMostSize},
      {"value_head_size", c.value_head_size, 1, kMostSize},
      {"rotations_dtype", c.rotations_dtype, 0, RAPT_FP64},
      {"num_hashes", c.num_hashes, 0, rapt::kMostHashes},
      // The rotations' last axis follows from it.
      {"num_buckets", c.num_buckets, c.rotations_dtype != 0 && c.form == RAPT_REFORMER ? 2 : 0,
       kMostCount},
  });
}

// REQUIRES: the numbers are valid.
rapt::LshAttentionCall LshCallOf(const rapt_lsh_problem& c) {
  rapt::LshAttentionCall call;
  call.form = static_cast<rapt::LshForm>(c.form);
  call.wants_buckets = c.wants_buckets != 0;
  if (c.num_hashes != 0) call.num_hashes = c.num_hashes;
  call.num_buckets = c.num_buckets;
  call.chunk_length = c.chunk_length;
  if (c.has_chunks_before != 0) call.chunks_before = c.chunks_before;
  if (c.chunks_after != 0) call.chunks_after = c.chunks_after;
  call.is_causal = c.causal != 0;
  if (c.scale != 0) call.scale = c.scale;
  const auto add = [&](Role role, int32_t type, const rapt::Shape& shape) {
    call.inputs[role] = rapt::TensorSpec{TypeOf(type), shape};
  };
  const rapt::Shape keys = {c.batch, c.heads, c.length, c.head_size};
  add(Role::kQ, c.dtype, keys);
  if (c.form == RAPT_SIMPLE) add(Role::kK, c.dtype, keys);
  add(Role::kV, c.dtype, {c.batch, c.heads, c.length, c.value_head_size});
  if (c.rotations_dtype != 0) {
    add(rapt::kLshRotations, c.rotations_dtype,
        {c.has_head_rotations != 0 ? c.heads : 1, c.head_size, call.num_hashes,
         c.form == RAPT_SIMPLE ? c.head_size : c.num_buckets / 2});
  } else {
    call.seed = c.seed;
  }
  if (c.has_key_lengths != 0) {
    call.inputs[Role::kKeyLengths] = rapt::TensorSpec{DType::kInt64, {c.batch}};
  }
  return call;
}

absl::Status CreateLshPlan(const rapt_context* context, const rapt_lsh_problem* theirs,
                           rapt_plan** plan) {
  rapt_lsh_problem c = {};
  RAPT_RETURN_IF_ERROR(Adopt("problem", theirs, c));
  RAPT_RETURN_IF_ERROR(CheckNotNull({{"context", context}, {"plan", plan}}));
  RAPT_RETURN_IF_ERROR(CheckLshNumbers(c));
  const rapt::LshAttentionCall call = LshCallOf(c);
  return CreateOperatorPlan(*context, kLshPlan, call, MakeLshAttention(call), plan);
}

absl::Status RunLshPlan(rapt_context* context, const rapt_plan* plan,
                        const rapt_lsh_arguments* theirs, void* workspace, size_t workspace_bytes) {
  rapt_lsh_arguments c = {};
  RAPT_RETURN_IF_ERROR(Adopt("arguments", theirs, c));
  RAPT_RETURN_IF_ERROR(CheckNotNull({{"context", context}, {"plan", plan}}));
  RAPT_RETURN_IF_ERROR(CheckKind(*plan, kLshPlan));
  OperatorArguments tensors(*plan);
  tensors.Add(Role::kQ, "query", c.query);
  tensors.Add(Role::kK, "key", c.key);
  tensors.Add(Role::kV, "value", c.value);
  tensors.Add(rapt::kLshRotations, "rotations", c.rotations);
  tensors.AddLengths("key_lengths", c.key_lengths);
  tensors.AddOutput(Role::kY, "output", c.output);
  tensors.AddOutput(rapt::kLshBuckets, "buckets", c.buckets);
  return tensors.Run(context, workspace, workspace_bytes);
}

}  // namespace

extern "C" {

rapt_code rapt_context_create(const rapt_context_options* options, rapt_context** context,
                              char* message, size_t message_bytes) {
  return Guarded({message, message_bytes}, [&] { return CreateContext(options, context); });
}

void rapt_context_destroy(rapt_context* context) { delete context; }

rapt_code rapt_plan_create(const rapt_context* context, const rapt_problem* problem,
                           rapt_plan** plan, char* message, size_t message_bytes) {
  return Guarded({message, message_bytes}, [&] { return CreatePlan(context, problem, plan); });
}

void rapt_plan_destroy(rapt_plan* plan) { delete plan; }

size_t rapt_plan_workspace_bytes(const rapt_plan* plan) {
  return static_cast<size_t>(plan->plan.workspace_bytes());
}

const char* rapt_plan_description(const rapt_plan* plan) { return plan->description.c_str(); }

rapt_code rapt_run(rapt_context* context, const rapt_plan* plan, const rapt_arguments* arguments,
                   void* workspace, size_t workspace_bytes, char* message, size_t message_bytes) {
  return Guarded({message, message_bytes},
                 [&] { return RunPlan(context, plan, arguments, workspace, workspace_bytes); });
}

rapt_code rapt_linear_plan_create(const rapt_context* context, const rapt_linear_problem* problem,
                                  rapt_plan** plan, char* message, size_t message_bytes) {
  return Guarded({message, message_bytes},
                 [&] { return CreateLinearPlan(context, problem, plan); });
}

rapt_code rapt_linear_run(rapt_context* context, const rapt_plan* plan,
                          const rapt_linear_arguments* arguments, void* workspace,
                          size_t workspace_bytes, char* message, size_t message_bytes) {
  return Guarded({message, message_bytes}, [&] {
    return RunLinearPlan(context, plan, arguments, workspace, workspace_bytes);
  });
}

rapt_code rapt_lsh_plan_create(const rapt_context* context, const rapt_lsh_problem* problem,
                               rapt_plan** plan, char* message, size_t message_bytes) {
  return Guarded({message, message_bytes}, [&] { return CreateLshPlan(context, problem, plan); });
}

rapt_code rapt_lsh_run(rapt_context* context, const rapt_plan* plan,
                       const rapt_lsh_arguments* arguments, void* workspace, size_t workspace_bytes,
                       char* message, size_t message_bytes) {
  return Guarded({message, message_bytes},
                 [&] { return RunLshPlan(context, plan, arguments, workspace, workspace_bytes); });
}

const char* rapt_version(void) {
  static const std::string version(rapt::Version());
  return version.c_str();
}

}  // extern "C"
