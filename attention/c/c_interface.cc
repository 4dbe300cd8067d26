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
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "attention/attention.h"
#include "attention/attributes.h"
#include "attention/c/include/rapt/attention.h"
#include "attention/operator_schema.h"
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

struct rapt_call {
  const rapt::OperatorSchema& schema;
  std::unique_ptr<rapt::SchemaCall> call = schema.new_call();
  std::vector<const rapt::TensorSchema*> wanted = {};
};

struct rapt_plan {
  rapt::Plan plan;
  std::string description;
  const rapt::OperatorSchema* schema = nullptr;                 // null: of a rapt_problem
  std::optional<rapt::BoundCall> call = {};                     // of the schema
  rapt::InputMap<std::optional<rapt::TensorSpec>> inputs = {};  // likewise
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
    {Role::kHeadAlpha, &rapt_arguments::head_alpha},
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
static_assert(FromC<DType>(RAPT_INT32, RAPT_FP32) == DType::kInt32);
static_assert(FromC<DType>(RAPT_INT64, RAPT_FP32) == DType::kInt64);
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

// Sets a tensor of the problem, which is absent if its type is 0.
template <typename Tensor, typename... Shape>
void SetTensor(int32_t dtype, std::optional<Tensor>& tensor, const Shape&... shape) {
  if (dtype != 0) tensor = Tensor{TypeOf(dtype), shape...};
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
  SetTensor(c.mask_dtype, p.mask, std::to_array(c.mask_shape));
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
  SetTensor(c.bias_dtype, p.bias, std::to_array(c.bias_shape));
  SetTensor(c.head_sink_dtype, p.head_sink);
  SetTensor(c.alibi_slopes_dtype, p.alibi_slopes, c.alibi_slopes_batch);
  SetTensor(c.bias_table_dtype, p.bias_table, c.bias_table_buckets);
  SetTensor(c.relative_bias_dtype, p.relative_bias, c.relative_bias_heads, c.relative_bias_length);
  SetTensor(c.relative_keys_dtype, p.relative_keys, c.relative_keys_heads, c.relative_keys_length);
  SetTensor(c.relative_values_dtype, p.relative_values, c.relative_values_heads,
            c.relative_values_length);
  p.has_relative_query = c.has_relative_query != 0;
  const auto batch = c.rotary_cache_batch != 0 ? std::optional(c.rotary_cache_batch) : std::nullopt;
  SetTensor(c.rotary_cache_dtype, p.rotary_cache, batch, c.rotary_cache_rows, c.rotary_cache_pairs);
  p.has_position_ids = c.has_position_ids != 0;
  p.has_key_position_ids = c.has_key_position_ids != 0;
  SetTensor(c.additive_weight_dtype, p.additive_weight, c.additive_weight_heads);
  SetTensor(c.head_alpha_dtype, p.head_alpha);
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

absl::Status RunPlan(rapt_context* context, const rapt_plan* plan, const rapt_arguments* theirs,
                     void* workspace, size_t workspace_bytes) {
  rapt_arguments c = {};
  RAPT_RETURN_IF_ERROR(Adopt("arguments", theirs, c));
  RAPT_RETURN_IF_ERROR(CheckNotNull({{"context", context}, {"plan", plan}}));
  if (plan->schema != nullptr) {
    return Invalid("plan is of ", plan->schema->name, "; rapt_call_run runs it");
  }
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

// ---- Operators by their names -------------------------------------------------------------------

template <typename Rows>
std::string NamesOf(const Rows& rows) {
  std::string names;
  for (const auto& row : rows) absl::StrAppend(&names, names.empty() ? "" : ", ", row.name);
  return names;
}

// Finds a row of a schema by its name. InvalidArgument lists the names.
template <typename Row>
absl::StatusOr<const Row*> FindRow(const rapt::OperatorSchema& schema, absl::string_view kind,
                                   absl::Span<const Row> rows, const char* name) {
  RAPT_RETURN_IF_ERROR(CheckNotNull({{"name", name}}));
  const auto row =
      std::find_if(rows.begin(), rows.end(), [&](const Row& r) { return r.name == name; });
  if (row != rows.end()) return &*row;
  return Invalid(schema.name, " has no ", kind, " '", name, "'; it has ", NamesOf(rows));
}

absl::Status CreateCall(const char* op, rapt_call** call) {
  RAPT_RETURN_IF_ERROR(CheckNotNull({{"op", op}, {"call", call}}));
  const rapt::OperatorSchema* const schema = rapt::FindOperator(op);
  if (schema == nullptr) {
    return Invalid("op is '", op, "'; it must be one of ", rapt::OperatorNames());
  }
  *call = new rapt_call{*schema};
  return absl::OkStatus();
}

absl::Status SetInput(rapt_call* call, const char* name, int32_t dtype, int32_t rank,
                      const int64_t* shape) {
  RAPT_RETURN_IF_ERROR(CheckNotNull({{"call", call}}));
  RAPT_ASSIGN_OR_RETURN(const rapt::TensorSchema* input,
                        FindRow(call->schema, "input", call->schema.inputs, name));
  constexpr int32_t kTypes[] = {RAPT_FP32, RAPT_FP16,  RAPT_BF16, RAPT_FP64,
                                RAPT_BOOL, RAPT_INT32, RAPT_INT64};
  if (std::find(std::begin(kTypes), std::end(kTypes), dtype) == std::end(kTypes)) {
    return Invalid(name, " has dtype ", dtype, "; it must be one of rapt_dtype");
  }
  if (rank < 0 || rank > RAPT_MAX_RANK) {
    return Invalid(name, " has rank ", rank, "; it must be from 0 to ", RAPT_MAX_RANK);
  }
  if (rank > 0) RAPT_RETURN_IF_ERROR(CheckNotNull({{"shape", shape}}));
  call->call->inputs()[input->slot] =
      rapt::TensorSpec{TypeOf(dtype), rapt::Shape(shape, shape + rank)};
  return absl::OkStatus();
}

absl::Status SetAttribute(rapt_call* call, const char* name, const rapt::GivenValue& given) {
  RAPT_RETURN_IF_ERROR(CheckNotNull({{"call", call}}));
  RAPT_ASSIGN_OR_RETURN(const rapt::AttributeSchema* attribute,
                        FindRow(call->schema, "attribute", call->schema.attributes, name));
  RAPT_ASSIGN_OR_RETURN(const rapt::AttributeValue value, ReadValue(*attribute, given));
  attribute->set(*call->call, value);
  return absl::OkStatus();
}

absl::Status WantOutput(rapt_call* call, const char* name) {
  RAPT_RETURN_IF_ERROR(CheckNotNull({{"call", call}}));
  RAPT_ASSIGN_OR_RETURN(const rapt::TensorSchema* output,
                        FindRow(call->schema, "output", call->schema.outputs, name));
  if (output->want != nullptr) output->want(*call->call);
  call->wanted.push_back(output);
  return absl::OkStatus();
}

absl::Status PlanCall(const rapt_context* context, const rapt_call* call, rapt_plan** plan) {
  RAPT_RETURN_IF_ERROR(CheckNotNull({{"context", context}, {"call", call}, {"plan", plan}}));
  RAPT_ASSIGN_OR_RETURN(rapt::BoundCall bound, call->call->Bind());
  for (const rapt::TensorSchema* output : call->wanted) {
    if (!bound.outputs()[output->slot]) return NoOutput(*output);
  }
  RAPT_ASSIGN_OR_RETURN(rapt::Plan made, bound.MakePlan(context->options));
  std::string description = made.Describe();
  *plan = new rapt_plan{std::move(made), std::move(description), &call->schema, std::move(bound),
                        call->call->inputs()};
  return absl::OkStatus();
}

absl::Status CheckIsOfCall(const rapt_plan& plan) {
  if (plan.schema != nullptr) return absl::OkStatus();
  return Invalid("plan is of rapt_problem; rapt_run runs it");
}

absl::Status DescribeOutput(const rapt_plan* plan, const char* name, int32_t* dtype, int32_t* rank,
                            int64_t* shape) {
  RAPT_RETURN_IF_ERROR(
      CheckNotNull({{"plan", plan}, {"dtype", dtype}, {"rank", rank}, {"shape", shape}}));
  RAPT_RETURN_IF_ERROR(CheckIsOfCall(*plan));
  RAPT_ASSIGN_OR_RETURN(const rapt::TensorSchema* output,
                        FindRow(*plan->schema, "output", plan->schema->outputs, name));
  const std::optional<rapt::TensorSpec>& spec = plan->call->outputs()[output->slot];
  if (!spec) return Invalid("the plan does not have output ", name);
  *dtype = RAPT_FP32 + static_cast<int32_t>(spec->dtype);
  *rank = static_cast<int32_t>(spec->shape.size());
  std::copy(spec->shape.begin(), spec->shape.end(), shape);
  return absl::OkStatus();
}

// Whether a call has the tensor, with numbers.
bool HasElements(const std::optional<rapt::TensorSpec>& spec) {
  return spec && std::find(spec->shape.begin(), spec->shape.end(), 0) == spec->shape.end();
}

// Sets the data of a tensor by its name; of one that the call does not have it does not matter.
absl::Status AddTensor(const rapt_plan& plan, const rapt_tensor& tensor,
                       rapt::Arguments& arguments) {
  RAPT_RETURN_IF_ERROR(CheckNotNull({{"name", tensor.name}}));
  const rapt::OperatorSchema& schema = *plan.schema;
  const auto is_named = [&](const rapt::TensorSchema& row) { return row.name == tensor.name; };
  const auto* const output = std::find_if(schema.outputs.begin(), schema.outputs.end(), is_named);
  if (output != schema.outputs.end()) {
    arguments.outputs[output->slot].data = static_cast<std::byte*>(tensor.data);
    return absl::OkStatus();
  }
  const auto* const input = std::find_if(schema.inputs.begin(), schema.inputs.end(), is_named);
  if (input == schema.inputs.end()) {
    return Invalid(schema.name, " has no tensor '", tensor.name, "'; it has ",
                   NamesOf(schema.inputs), ", ", NamesOf(schema.outputs));
  }
  if (input->slot != Role::kKeyLengths) {
    arguments.inputs[input->slot].data = static_cast<const std::byte*>(tensor.data);
  } else if (const auto& lengths = plan.inputs[Role::kKeyLengths]; HasElements(lengths)) {
    arguments.key_lengths = {static_cast<const int64_t*>(tensor.data),
                             static_cast<size_t>(lengths->shape[0])};
  }
  return absl::OkStatus();
}

absl::Status CheckComplete(const rapt_plan& plan, const rapt::Arguments& arguments) {
  for (const rapt::TensorSchema& input : plan.schema->inputs) {
    const void* const data = input.slot == Role::kKeyLengths
                                 ? static_cast<const void*>(arguments.key_lengths.data())
                                 : arguments.inputs[input.slot].data;
    if (HasElements(plan.inputs[input.slot]) && data == nullptr) {
      return Invalid(input.name, " is missing or null");
    }
  }
  for (const rapt::TensorSchema& output : plan.schema->outputs) {
    if (HasElements(plan.call->outputs()[output.slot]) &&
        arguments.outputs[output.slot].data == nullptr) {
      return Invalid(output.name, " is missing or null");
    }
  }
  return absl::OkStatus();
}

absl::Status RunCall(rapt_context* context, const rapt_plan* plan, const rapt_tensor* tensors,
                     size_t count, void* workspace, size_t workspace_bytes) {
  RAPT_RETURN_IF_ERROR(CheckNotNull({{"context", context}, {"plan", plan}}));
  if (count > 0) RAPT_RETURN_IF_ERROR(CheckNotNull({{"tensors", tensors}}));
  RAPT_RETURN_IF_ERROR(CheckIsOfCall(*plan));
  rapt::Arguments arguments;
  for (const rapt_tensor& tensor : absl::MakeConstSpan(tensors, count)) {
    RAPT_RETURN_IF_ERROR(AddTensor(*plan, tensor, arguments));
  }
  RAPT_RETURN_IF_ERROR(CheckComplete(*plan, arguments));
  rapt::MutexLock lock(context->running);
  return plan->call->Run(plan->plan, arguments,
                         WorkspaceOf(context, plan->plan, workspace, workspace_bytes),
                         context->pool);
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

rapt_code rapt_call_create(const char* op, rapt_call** call, char* message, size_t message_bytes) {
  return Guarded({message, message_bytes}, [&] { return CreateCall(op, call); });
}

void rapt_call_destroy(rapt_call* call) { delete call; }

rapt_code rapt_call_set_input(rapt_call* call, const char* name, int32_t dtype, int32_t rank,
                              const int64_t* shape, char* message, size_t message_bytes) {
  return Guarded({message, message_bytes},
                 [&] { return SetInput(call, name, dtype, rank, shape); });
}

rapt_code rapt_call_set_integer(rapt_call* call, const char* name, int64_t value, char* message,
                                size_t message_bytes) {
  return Guarded({message, message_bytes}, [&] { return SetAttribute(call, name, value); });
}

rapt_code rapt_call_set_number(rapt_call* call, const char* name, double value, char* message,
                               size_t message_bytes) {
  return Guarded({message, message_bytes}, [&] { return SetAttribute(call, name, value); });
}

rapt_code rapt_call_set_text(rapt_call* call, const char* name, const char* value, char* message,
                             size_t message_bytes) {
  return Guarded({message, message_bytes}, [&]() -> absl::Status {
    RAPT_RETURN_IF_ERROR(CheckNotNull({{"value", value}}));
    return SetAttribute(call, name, absl::string_view(value));
  });
}

rapt_code rapt_call_want(rapt_call* call, const char* output, char* message, size_t message_bytes) {
  return Guarded({message, message_bytes}, [&] { return WantOutput(call, output); });
}

rapt_code rapt_call_plan(const rapt_context* context, const rapt_call* call, rapt_plan** plan,
                         char* message, size_t message_bytes) {
  return Guarded({message, message_bytes}, [&] { return PlanCall(context, call, plan); });
}

rapt_code rapt_plan_output(const rapt_plan* plan, const char* name, int32_t* dtype, int32_t* rank,
                           int64_t shape[RAPT_MAX_RANK], char* message, size_t message_bytes) {
  return Guarded({message, message_bytes},
                 [&] { return DescribeOutput(plan, name, dtype, rank, shape); });
}

rapt_code rapt_call_run(rapt_context* context, const rapt_plan* plan, const rapt_tensor* tensors,
                        size_t count, void* workspace, size_t workspace_bytes, char* message,
                        size_t message_bytes) {
  return Guarded({message, message_bytes}, [&] {
    return RunCall(context, plan, tensors, count, workspace, workspace_bytes);
  });
}

const char* rapt_version(void) {
  static const std::string version(rapt::Version());
  return version.c_str();
}

}  // extern "C"
