#include "server/wire/oip/codec.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/wire/oip/model.h"
#include "server/wire/oip/parameters.h"
#include "server/wire/response_size.h"

namespace rapt::oip {
namespace {

using inference::InferTensorContents;
using inference::ModelInferRequest;
using InputTensor = ModelInferRequest::InferInputTensor;
using Bytes = absl::Span<const std::byte>;

// Where an input belongs, by its ONNX name.
struct InputSlot {
  absl::string_view name;
  bool required;
  TensorSpec& (*spec)(OperatorCall& call);
  const std::byte* Inputs::*data;  // null for the key lengths, which are copied
};

constexpr InputSlot kInputSlots[] = {
    {"Q", true, [](OperatorCall& call) -> TensorSpec& { return call.q; }, &Inputs::query},
    {"K", true, [](OperatorCall& call) -> TensorSpec& { return call.k; }, &Inputs::key},
    {"V", true, [](OperatorCall& call) -> TensorSpec& { return call.v; }, &Inputs::value},
    {"attn_mask", false, [](OperatorCall& call) -> TensorSpec& { return call.attn_mask.emplace(); },
     &Inputs::mask},
    {"past_key", false, [](OperatorCall& call) -> TensorSpec& { return call.past_key.emplace(); },
     &Inputs::past_key},
    {"past_value", false,
     [](OperatorCall& call) -> TensorSpec& { return call.past_value.emplace(); },
     &Inputs::past_value},
    {"nonpad_kv_seqlen", false,
     [](OperatorCall& call) -> TensorSpec& { return call.nonpad_kv_seqlen.emplace(); }, nullptr},
};

const InputSlot* FindInput(absl::string_view name) {
  const auto slot = std::find_if(std::begin(kInputSlots), std::end(kInputSlots),
                                 [&](const InputSlot& slot) { return slot.name == name; });
  return slot == std::end(kInputSlots) ? nullptr : slot;
}

std::optional<DType> ParseDatatype(absl::string_view name) {
  for (DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64,
                     DType::kBool, DType::kInt64}) {
    if (name == NameOf(type)) return type;
  }
  return std::nullopt;
}

absl::StatusOr<TensorSpec> ReadSpec(const InputTensor& input) {
  const std::optional<DType> dtype = ParseDatatype(input.datatype());
  if (!dtype) {
    return absl::InvalidArgumentError(
        absl::StrCat("input ", input.name(), " has datatype '", input.datatype(),
                     "'; it must be FP32, FP16, BF16 or FP64, for a mask also BOOL, for ",
                     "nonpad_kv_seqlen INT64"));
  }
  return TensorSpec{*dtype, Shape(input.shape().begin(), input.shape().end())};
}

template <typename Field>
Bytes BytesOf(const Field& field) {
  return {reinterpret_cast<const std::byte*>(field.data()), field.size() * sizeof(*field.data())};
}

// The field of `contents` that fits the type, and its name.
struct TypedField {
  absl::string_view name;
  Bytes bytes;
  int count;
};

absl::StatusOr<TypedField> FieldOf(const InputTensor& input, DType dtype) {
  const InferTensorContents& c = input.contents();
  switch (dtype) {
    case DType::kFloat32:
      return TypedField{"fp32_contents", BytesOf(c.fp32_contents()), c.fp32_contents_size()};
    case DType::kFloat64:
      return TypedField{"fp64_contents", BytesOf(c.fp64_contents()), c.fp64_contents_size()};
    case DType::kBool:
      return TypedField{"bool_contents", BytesOf(c.bool_contents()), c.bool_contents_size()};
    case DType::kInt64:
      return TypedField{"int64_contents", BytesOf(c.int64_contents()), c.int64_contents_size()};
    case DType::kFloat16:
    case DType::kBFloat16:
      break;
  }
  return absl::InvalidArgumentError(absl::StrCat("input ", input.name(), " is ", NameOf(dtype),
                                                 ", which travels in raw_input_contents only"));
}

// How many values of whatever type are there.
int64_t CountOf(const InferTensorContents& c) {
  return int64_t{c.bool_contents_size()} + c.int_contents_size() + c.int64_contents_size() +
         c.uint_contents_size() + c.uint64_contents_size() + c.fp32_contents_size() +
         c.fp64_contents_size() + c.bytes_contents_size();
}

absl::StatusOr<Bytes> TypedBytes(const InputTensor& input, const TensorSpec& spec, int64_t bytes) {
  const absl::StatusOr<TypedField> field = FieldOf(input, spec.dtype);
  if (!field.ok()) return field.status();
  if (CountOf(input.contents()) != field->count) {
    return absl::InvalidArgumentError(absl::StrCat("input ", input.name(), " is ",
                                                   NameOf(spec.dtype), "; its contents must be in ",
                                                   field->name, " alone"));
  }
  const int64_t wanted = bytes / SizeOf(spec.dtype);
  if (field->count != wanted) {
    return absl::InvalidArgumentError(absl::StrCat("input ", input.name(), " has ", field->count,
                                                   " values in ", field->name, "; its shape ",
                                                   ToString(spec.shape), " needs ", wanted));
  }
  return field->bytes;
}

absl::StatusOr<Bytes> RawBytes(const InputTensor& input, const std::string& raw,
                               const TensorSpec& spec, int64_t bytes) {
  if (input.has_contents()) {
    return absl::InvalidArgumentError(
        absl::StrCat("input ", input.name(), " has contents although raw_input_contents is used"));
  }
  if (static_cast<int64_t>(raw.size()) != bytes) {
    return absl::InvalidArgumentError(absl::StrCat("input ", input.name(), " has ", raw.size(),
                                                   " bytes; its shape ", ToString(spec.shape),
                                                   " of ", NameOf(spec.dtype), " needs ", bytes));
  }
  return BytesOf(raw);
}

// `raw` is null where the message carries no raw contents.
absl::StatusOr<Bytes> ReadBytes(const InputTensor& input, const std::string* raw,
                                const TensorSpec& spec) {
  const absl::StatusOr<int64_t> bytes = ByteSize(absl::StrCat("input ", input.name()), spec);
  if (!bytes.ok()) return bytes.status();
  return raw != nullptr ? RawBytes(input, *raw, spec, *bytes) : TypedBytes(input, spec, *bytes);
}

absl::Status ReadInput(const InputTensor& input, const InputSlot& slot, const std::string* raw,
                       OperatorCall& call, Inputs& inputs) {
  absl::Status status =
      CheckTensorParameters(absl::StrCat("input ", input.name()), input.parameters());
  if (!status.ok()) return status;
  absl::StatusOr<TensorSpec> spec = ReadSpec(input);
  if (!spec.ok()) return spec.status();
  const absl::StatusOr<Bytes> bytes = ReadBytes(input, raw, *spec);
  if (!bytes.ok()) return bytes.status();
  if (slot.data != nullptr) {
    inputs.*slot.data = bytes->data();
  } else if (spec->dtype == DType::kInt64) {  // else Resolve() will complain
    inputs.key_lengths.resize(bytes->size() / sizeof(int64_t));
    std::copy_n(bytes->data(), bytes->size(),
                reinterpret_cast<std::byte*>(inputs.key_lengths.data()));
  }
  slot.spec(call) = *std::move(spec);
  return absl::OkStatus();
}

absl::Status ReadInputs(const ModelInferRequest& message, OperatorCall& call, Inputs& inputs) {
  const bool is_raw = message.raw_input_contents_size() > 0;
  std::set<const InputSlot*> seen;
  for (int i = 0; i < message.inputs_size(); ++i) {
    const InputTensor& input = message.inputs(i);
    const InputSlot* slot = FindInput(input.name());
    if (slot == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("there is no input ", input.name(),
                                                     "; the inputs are Q, K, V, attn_mask, ",
                                                     "past_key, past_value and nonpad_kv_seqlen"));
    }
    if (!seen.insert(slot).second) {
      return absl::InvalidArgumentError(absl::StrCat("input ", input.name(), " came twice"));
    }
    if (is_raw && i >= message.raw_input_contents_size()) break;  // the counts differ, see below
    const std::string* raw = is_raw ? &message.raw_input_contents(i) : nullptr;
    absl::Status status = ReadInput(input, *slot, raw, call, inputs);
    if (!status.ok()) return status;
  }
  if (is_raw && message.raw_input_contents_size() != message.inputs_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("raw_input_contents has ", message.raw_input_contents_size(),
                     " entries; there are ", message.inputs_size(), " inputs"));
  }
  for (const InputSlot& slot : kInputSlots) {
    if (slot.required && seen.count(&slot) == 0) {
      return absl::InvalidArgumentError(absl::StrCat("input ", slot.name, " is missing"));
    }
  }
  return absl::OkStatus();
}

struct OutputSlot {
  const char* name;
  TensorSpec ResolvedCall::*spec;
  OutputBuffer Result::*buffer;
};

constexpr OutputSlot kY = {"Y", &ResolvedCall::y, &Result::y};
constexpr OutputSlot kPresentKey = {"present_key", &ResolvedCall::present_key,
                                    &Result::present_key};
constexpr OutputSlot kPresentValue = {"present_value", &ResolvedCall::present_value,
                                      &Result::present_value};
constexpr OutputSlot kScores = {"qk_matmul_output", &ResolvedCall::scores, &Result::scores};
constexpr OutputSlot kLse = {"lse", &ResolvedCall::lse, &Result::lse};
constexpr const OutputSlot* kOutputSlots[] = {&kY, &kPresentKey, &kPresentValue, &kScores, &kLse};

absl::StatusOr<std::vector<const OutputSlot*>> ReadOutputs(const ModelInferRequest& message) {
  if (message.outputs_size() == 0) return std::vector<const OutputSlot*>{&kY};
  std::vector<const OutputSlot*> asked;
  for (const auto& output : message.outputs()) {
    const auto slot = std::find_if(std::begin(kOutputSlots), std::end(kOutputSlots),
                                   [&](const OutputSlot* s) { return s->name == output.name(); });
    if (slot == std::end(kOutputSlots)) {
      return absl::InvalidArgumentError(absl::StrCat("there is no output ", output.name(),
                                                     "; the outputs are Y, present_key, ",
                                                     "present_value, qk_matmul_output and lse"));
    }
    if (std::find(asked.begin(), asked.end(), *slot) != asked.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("output ", output.name(), " was asked for twice"));
    }
    absl::Status status =
        CheckTensorParameters(absl::StrCat("output ", output.name()), output.parameters());
    if (!status.ok()) return status;
    asked.push_back(*slot);
  }
  return asked;
}

bool Contains(const std::vector<const OutputSlot*>& asked, const OutputSlot& slot) {
  return std::find(asked.begin(), asked.end(), &slot) != asked.end();
}

Instant DeadlineFor(std::chrono::microseconds timeout, Instant now) {
  // In whole microseconds: the sum of any timeout with `now` need not fit into nanoseconds.
  const auto longest = std::chrono::duration_cast<std::chrono::microseconds>(Instant::max() - now);
  if (timeout.count() == 0 || timeout >= longest) return Instant::max();
  return now + timeout;
}

}  // namespace

absl::StatusOr<DecodedInfer> DecodeInfer(const ModelInferRequest& message, Instant now) {
  absl::Status status = CheckModel(message.model_name(), message.model_version());
  if (!status.ok()) return status;
  OperatorCall call;
  const absl::StatusOr<Parameters> parameters = ReadParameters(message.parameters(), call);
  if (!parameters.ok()) return parameters.status();
  const absl::StatusOr<std::vector<const OutputSlot*>> asked = ReadOutputs(message);
  if (!asked.ok()) return asked.status();
  if (Contains(*asked, kScores)) call.score_output = parameters->score_output;
  call.wants_lse = Contains(*asked, kLse);
  call.wants_present = Contains(*asked, kPresentKey) || Contains(*asked, kPresentValue);

  DecodedInfer decoded;
  status = ReadInputs(message, call, decoded.request.inputs);
  if (!status.ok()) return status;
  absl::StatusOr<ResolvedCall> resolved = Resolve(call);
  if (!resolved.ok()) return resolved.status();
  std::vector<const TensorSpec*> specs;
  for (const OutputSlot* slot : *asked) {
    const TensorSpec& spec = *resolved.*slot->spec;
    specs.push_back(&spec);
    decoded.outputs.push_back({slot->name, spec, slot->buffer});
  }
  status = CheckResponseSize(specs);
  if (!status.ok()) return status;
  decoded.request.call = *std::move(resolved);
  decoded.request.deadline = DeadlineFor(parameters->timeout, now);
  decoded.request.priority = parameters->priority;
  return decoded;
}

void EncodeInfer(const ModelInferRequest& asked, absl::Span<const AskedOutput> outputs,
                 const Result& result, inference::ModelInferResponse& response) {
  response.set_model_name(kModelName);
  response.set_model_version(kModelVersion);
  response.set_id(asked.id());
  for (const AskedOutput& output : outputs) {
    auto& tensor = *response.add_outputs();
    tensor.set_name(output.name);
    const absl::string_view datatype = NameOf(output.spec.dtype);
    tensor.set_datatype(datatype.data(), datatype.size());
    tensor.mutable_shape()->Assign(output.spec.shape.begin(), output.spec.shape.end());
    const absl::Span<const std::byte> bytes = (result.*output.buffer).bytes;
    response.add_raw_output_contents(bytes.data(), bytes.size());
  }
}

}  // namespace rapt::oip
