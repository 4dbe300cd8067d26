#include "server/wire/rapt/codec.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "server/base/check.h"
#include "server/base/checked_math.h"
#include "server/wire/response_size.h"

namespace rapt::native {
namespace {

constexpr FieldNames kFieldNames = {
    .q = "q",
    .k = "k",
    .v = "v",
    .y = "y",
    .mask = "mask",
    .past_key = "past_key",
    .past_value = "past_value",
    .key_lengths = "key_lengths",
    .query_heads = "attention.query_heads",
    .kv_heads = "attention.kv_heads",
    .scale = "attention.scale",
    .softcap = "attention.softcap",
    .left_window = "attention.window.left",
    .right_window = "attention.window.right",
    .dropout_probability = "attention.dropout.probability",
};

constexpr size_t kMaxRank = 4;

struct ElementType {
  v1::DataType code;
  int64_t bytes;
  std::optional<DType> dtype;  // none: integers, which the library reads as bool
};

constexpr ElementType kElementTypes[] = {
    {v1::FP32, 4, DType::kFloat32}, {v1::FP16, 2, DType::kFloat16}, {v1::BF16, 2, DType::kBFloat16},
    {v1::FP64, 8, DType::kFloat64}, {v1::BOOL, 1, DType::kBool},    {v1::INT8, 1, std::nullopt},
    {v1::UINT8, 1, std::nullopt},   {v1::INT32, 4, std::nullopt},   {v1::INT64, 8, std::nullopt},
};

const ElementType* FindElementType(v1::DataType code) {
  const auto type = std::find_if(std::begin(kElementTypes), std::end(kElementTypes),
                                 [&](const ElementType& t) { return t.code == code; });
  return type == std::end(kElementTypes) ? nullptr : type;
}

v1::DataType CodeOf(DType dtype) {
  const auto type = std::find_if(std::begin(kElementTypes), std::end(kElementTypes),
                                 [&](const ElementType& t) { return t.dtype == dtype; });
  RAPT_CHECK(type != std::end(kElementTypes), "the protocol has no such type");
  return type->code;
}

// "INT32", or the number of an enum value that this server does not know.
std::string NameOf(v1::DataType code) {
  const std::string& name = v1::DataType_Name(code);
  return name.empty() ? absl::StrCat(static_cast<int>(code)) : name;
}

struct InputSlot {
  absl::string_view name;
  bool required;
  bool (v1::AttendRequest::*is_there)() const;
  const v1::Tensor& (v1::AttendRequest::*tensor)() const;
  TensorSpec& (*spec)(OperatorCall& call);
  const std::byte* Inputs::*data;
};

using Message = v1::AttendRequest;
constexpr InputSlot kInputSlots[] = {
    {kFieldNames.q, true, &Message::has_q, &Message::q,
     [](OperatorCall& call) -> TensorSpec& { return call.q; }, &Inputs::query},
    {kFieldNames.k, true, &Message::has_k, &Message::k,
     [](OperatorCall& call) -> TensorSpec& { return call.k; }, &Inputs::key},
    {kFieldNames.v, true, &Message::has_v, &Message::v,
     [](OperatorCall& call) -> TensorSpec& { return call.v; }, &Inputs::value},
    {kFieldNames.mask, false, &Message::has_mask, &Message::mask,
     [](OperatorCall& call) -> TensorSpec& { return call.attn_mask.emplace(); }, &Inputs::mask},
    {kFieldNames.past_key, false, &Message::has_past_key, &Message::past_key,
     [](OperatorCall& call) -> TensorSpec& { return call.past_key.emplace(); }, &Inputs::past_key},
    {kFieldNames.past_value, false, &Message::has_past_value, &Message::past_value,
     [](OperatorCall& call) -> TensorSpec& { return call.past_value.emplace(); },
     &Inputs::past_value},
};

absl::StatusOr<const ElementType*> ReadType(const InputSlot& slot, v1::DataType code) {
  const bool is_mask = slot.name == kFieldNames.mask;
  const ElementType* type = FindElementType(code);
  if (type != nullptr && (type->dtype || is_mask)) return type;
  return absl::InvalidArgumentError(
      absl::StrCat(slot.name, " has dtype ", NameOf(code), "; it must be FP32, FP16, BF16 or FP64",
                   is_mask ? ", or BOOL, INT8, UINT8, INT32 or INT64 for a mask of 0 and 1" : ""));
}

absl::StatusOr<int64_t> CountBytes(absl::string_view name, const Shape& shape,
                                   const ElementType& type) {
  const absl::StatusOr<int64_t> count = ByteSize(name, {DType::kBool, shape});
  if (!count.ok()) return count.status();
  const std::optional<int64_t> bytes = CheckedMul(*count, type.bytes);
  if (bytes) return *bytes;
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has shape ", ToString(shape), "; its size overflows 64 bits"));
}

absl::Status ReadTensor(const InputSlot& slot, const v1::Tensor& tensor, OperatorCall& call,
                        Inputs& inputs) {
  const absl::StatusOr<const ElementType*> type = ReadType(slot, tensor.dtype());
  if (!type.ok()) return type.status();
  // Before it is copied and shown: it may be as long as a message.
  if (static_cast<size_t>(tensor.shape_size()) > kMaxRank) {
    return absl::InvalidArgumentError(absl::StrCat(slot.name, " has a shape of rank ",
                                                   tensor.shape_size(), "; it must be at most 4"));
  }
  const Shape shape(tensor.shape().begin(), tensor.shape().end());
  const absl::StatusOr<int64_t> bytes = CountBytes(slot.name, shape, **type);
  if (!bytes.ok()) return bytes.status();
  if (static_cast<int64_t>(tensor.data().size()) != *bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(slot.name, " has ", tensor.data().size(), " bytes of data; its shape ",
                     ToString(shape), " of ", NameOf(tensor.dtype()), " needs ", *bytes));
  }
  slot.spec(call) = {(*type)->dtype.value_or(DType::kBool), shape};
  inputs.*slot.data = reinterpret_cast<const std::byte*>(tensor.data().data());
  return absl::OkStatus();
}

absl::Status ReadTensors(const Message& message, OperatorCall& call, Inputs& inputs) {
  for (const InputSlot& slot : kInputSlots) {
    if (!(message.*slot.is_there)()) {
      if (!slot.required) continue;
      return absl::InvalidArgumentError(absl::StrCat(slot.name, " is missing"));
    }
    absl::Status status = ReadTensor(slot, (message.*slot.tensor)(), call, inputs);
    if (!status.ok()) return status;
  }
  if (message.key_lengths_size() > 0) {
    call.nonpad_kv_seqlen = {DType::kInt64, {message.key_lengths_size()}};
  }
  return absl::OkStatus();
}

absl::Status UnknownValue(absl::string_view field, int value, absl::string_view allowed) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; it must be ", allowed));
}

absl::Status ReadLayout(v1::Layout layout, Layout& out) {
  switch (layout) {
    case v1::LAYOUT_UNSPECIFIED:
      out = Layout::kByRank;
      return absl::OkStatus();
    case v1::BHSD:
      out = Layout::kBhsd;
      return absl::OkStatus();
    case v1::BSHD:
      out = Layout::kBshd;
      return absl::OkStatus();
    case v1::BSE:
      out = Layout::kBse;
      return absl::OkStatus();
    default:
      return UnknownValue("attention.layout", layout,
                          "LAYOUT_UNSPECIFIED (0), BHSD (1), BSHD (2) or BSE (3)");
  }
}

absl::Status ReadAlignment(v1::Alignment alignment, Alignment& out) {
  switch (alignment) {
    case v1::TOP_LEFT:
      out = Alignment::kTopLeft;
      return absl::OkStatus();
    case v1::BOTTOM_RIGHT:
      out = Alignment::kBottomRight;
      return absl::OkStatus();
    default:
      return UnknownValue("attention.alignment", alignment, "TOP_LEFT (0) or BOTTOM_RIGHT (1)");
  }
}

absl::Status ReadScoreOutput(v1::ScoreOutput output, std::optional<ScoreOutput>& out) {
  switch (output) {
    case v1::SCORE_OUTPUT_NONE:
      return absl::OkStatus();
    case v1::SCORES:
      out = ScoreOutput::kScores;
      return absl::OkStatus();
    case v1::SOFTCAPPED:
      out = ScoreOutput::kSoftcapped;
      return absl::OkStatus();
    case v1::BIASED:
      out = ScoreOutput::kBiased;
      return absl::OkStatus();
    case v1::WEIGHTS:
      out = ScoreOutput::kWeights;
      return absl::OkStatus();
    default:
      return UnknownValue(
          "score_output", output,
          "SCORE_OUTPUT_NONE (0), SCORES (1), SOFTCAPPED (2), BIASED (3) or WEIGHTS (4)");
  }
}

// The library's -1 is an absent side here, so it must not pass as a size.
absl::Status ReadWindowSide(absl::string_view field, bool is_there, int64_t size, int64_t& out) {
  if (!is_there) return absl::OkStatus();
  if (size < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        field, " is ", size, "; it must be at least 0, or absent for no bound on that side"));
  }
  out = size;
  return absl::OkStatus();
}

std::optional<int64_t> UnlessZero(int64_t heads) {
  if (heads == 0) return std::nullopt;
  return heads;
}

absl::Status ReadAttention(const v1::Attention& attention, OperatorCall& call) {
  absl::Status status = ReadLayout(attention.layout(), call.layout);
  if (status.ok()) status = ReadAlignment(attention.alignment(), call.alignment);
  const v1::Window& window = attention.window();
  if (status.ok()) {
    status = ReadWindowSide(kFieldNames.left_window, window.has_left(), window.left(),
                            call.left_window_size);
  }
  if (status.ok()) {
    status = ReadWindowSide(kFieldNames.right_window, window.has_right(), window.right(),
                            call.right_window_size);
  }
  if (!status.ok()) return status;
  call.q_num_heads = UnlessZero(attention.query_heads());
  call.kv_num_heads = UnlessZero(attention.kv_heads());
  if (attention.has_scale()) call.scale = attention.scale();
  call.softcap = attention.softcap();
  call.is_causal = attention.causal();
  call.softmax_in_fp64 = attention.softmax_in_fp64();
  if (attention.has_dropout()) {
    call.dropout = {attention.dropout().probability(), attention.dropout().seed()};
  }
  return absl::OkStatus();
}

// "[0, 2, 1]": where the element at `index` is.
std::string PlaceOf(int64_t index, const v1::Tensor& tensor) {
  Shape place(tensor.shape_size());
  for (int axis = tensor.shape_size() - 1; axis >= 0; --axis) {
    place[axis] = index % tensor.shape(axis);
    index /= tensor.shape(axis);
  }
  return ToString(place);
}

template <typename Int>
absl::Status ConvertToBool(const v1::Tensor& mask, absl::Span<std::byte> bools) {
  for (size_t n = 0; n < bools.size(); ++n) {
    Int value;
    std::memcpy(&value, mask.data().data() + n * sizeof(Int), sizeof(Int));
    if (value != 0 && value != 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          kFieldNames.mask, PlaceOf(static_cast<int64_t>(n), mask), " is ", int64_t{value}, "; ",
          NameOf(mask.dtype()), " masks hold only 0 (hidden) and 1 (visible)"));
    }
    bools[n] = static_cast<std::byte>(value);
  }
  return absl::OkStatus();
}

absl::Status ConvertMask(const v1::Tensor& mask, absl::Span<std::byte> bools) {
  switch (mask.dtype()) {
    case v1::INT8:
      return ConvertToBool<int8_t>(mask, bools);
    case v1::UINT8:
      return ConvertToBool<uint8_t>(mask, bools);
    case v1::INT32:
      return ConvertToBool<int32_t>(mask, bools);
    default:
      return ConvertToBool<int64_t>(mask, bools);
  }
}

// Points the request to a copy of its mask that the library understands, where it needs one.
absl::Status ReplaceIntegerMask(const Message& message, AllocateInput allocate, Request& request) {
  const ElementType* type = FindElementType(message.mask().dtype());
  if (!message.has_mask() || type->dtype) return absl::OkStatus();
  absl::StatusOr<InputBuffer> bools =
      allocate(static_cast<int64_t>(message.mask().data().size()) / type->bytes);
  if (!bools.ok()) return bools.status();
  absl::Status status = ConvertMask(message.mask(), bools->bytes);
  if (!status.ok()) return status;
  request.inputs.mask = bools->bytes.data();
  request.owner = std::move(bools->owner);
  return absl::OkStatus();
}

struct OutputSlot {
  TensorSpec ResolvedCall::*spec;
  OutputBuffer Result::*buffer;
  v1::Tensor* (v1::AttendResponse::*field)();
};

constexpr OutputSlot kY = {&ResolvedCall::y, &Result::y, &v1::AttendResponse::mutable_y};
constexpr OutputSlot kScores = {&ResolvedCall::scores, &Result::scores,
                                &v1::AttendResponse::mutable_scores};
constexpr OutputSlot kLse = {&ResolvedCall::lse, &Result::lse, &v1::AttendResponse::mutable_lse};
constexpr OutputSlot kPresentKey = {&ResolvedCall::present_key, &Result::present_key,
                                    &v1::AttendResponse::mutable_present_key};
constexpr OutputSlot kPresentValue = {&ResolvedCall::present_value, &Result::present_value,
                                      &v1::AttendResponse::mutable_present_value};

std::vector<const OutputSlot*> WantedOutputs(const Problem& problem) {
  std::vector<const OutputSlot*> wanted = {&kY};
  if (problem.score_output) wanted.push_back(&kScores);
  if (problem.wants_lse) wanted.push_back(&kLse);
  if (problem.wants_present) wanted.insert(wanted.end(), {&kPresentKey, &kPresentValue});
  return wanted;
}

int64_t Microseconds(std::chrono::nanoseconds time) {
  return std::chrono::duration_cast<std::chrono::microseconds>(time).count();
}

}  // namespace

absl::StatusOr<Request> DecodeCall(const Message& message, AllocateInput allocate) {
  OperatorCall call;
  Request request;
  absl::Status status = ReadTensors(message, call, request.inputs);
  if (status.ok()) status = ReadAttention(message.attention(), call);
  if (status.ok()) status = ReadScoreOutput(message.score_output(), call.score_output);
  if (!status.ok()) return status;
  call.wants_lse = message.want_lse();
  call.wants_present = message.want_present();
  absl::StatusOr<ResolvedCall> resolved = Resolve(call, kFieldNames);
  if (!resolved.ok()) return resolved.status();
  request.call = *std::move(resolved);
  request.inputs.key_lengths.assign(message.key_lengths().begin(), message.key_lengths().end());
  status = ReplaceIntegerMask(message, allocate, request);
  if (!status.ok()) return status;
  return request;
}

absl::Status CheckAnswerSize(const ResolvedCall& call) {
  std::vector<const TensorSpec*> outputs;
  for (const OutputSlot* slot : WantedOutputs(call.problem)) outputs.push_back(&(call.*slot->spec));
  return CheckResponseSize(outputs);
}

void EncodeResult(const ResolvedCall& call, const Result& result, v1::AttendResponse& response) {
  for (const OutputSlot* slot : WantedOutputs(call.problem)) {
    const TensorSpec& spec = call.*slot->spec;
    const absl::Span<const std::byte> bytes = (result.*slot->buffer).bytes;
    v1::Tensor& tensor = *(response.*slot->field)();
    tensor.set_dtype(CodeOf(spec.dtype));
    tensor.mutable_shape()->Assign(spec.shape.begin(), spec.shape.end());
    tensor.set_data(bytes.data(), bytes.size());
  }
  response.set_backend(result.backend);
  response.set_plan(result.plan);
  response.mutable_timing()->set_queue_us(Microseconds(result.queue_time));
  response.mutable_timing()->set_compute_us(Microseconds(result.compute_time));
}

const v1::Tensor& FindTensor(const Message& message, absl::string_view name) {
  const auto slot = std::find_if(std::begin(kInputSlots), std::end(kInputSlots),
                                 [&](const InputSlot& s) { return s.name == name; });
  RAPT_CHECK(slot != std::end(kInputSlots), "the request has no such tensor");
  return (message.*slot->tensor)();
}

std::optional<DType> ToDType(v1::DataType code) {
  const ElementType* type = FindElementType(code);
  return type == nullptr ? std::nullopt : type->dtype;
}

}  // namespace rapt::native
