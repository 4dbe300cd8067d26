#include "server/protocols/oip/codec.h"

#include <google/protobuf/arena.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "proto/inference/grpc_service.pb.h"
#include "server/protocols/bounds.h"
#include "server/protocols/integer_mask.h"
#include "server/protocols/oip/model.h"
#include "server/protocols/oip/parameters.h"
#include "server/protocols/response_size.h"
#include "server/protocols/shared_tensors.h"

namespace rapt::oip {
namespace {

using inference::InferTensorContents;
using inference::ModelInferRequest;
using InputTensor = ModelInferRequest::InferInputTensor;

// Field numbers of ModelInferRequest, ModelInferResponse, InferInputTensor and InferTensorContents.
constexpr int kInputsField = 5;
constexpr int kRawInputField = 7;
constexpr int kRawOutputField = 6;
constexpr int kContentsField = 5;
constexpr int kBoolField = 1;
constexpr int kInt64Field = 3;
constexpr int kFp32Field = 6;
constexpr int kFp64Field = 7;

// Packed values of these types; every generated client packs them.
constexpr wire::PayloadField kContentsFields[] = {
    {kBoolField, nullptr}, {kInt64Field, nullptr}, {kFp32Field, nullptr}, {kFp64Field, nullptr}};
constexpr wire::MessageSchema kContentsSchema = {kContentsFields};
constexpr wire::PayloadField kInputFields[] = {{kContentsField, &kContentsSchema}};
constexpr wire::MessageSchema kInputSchema = {kInputFields};
constexpr wire::PayloadField kInferFields[] = {{kInputsField, &kInputSchema},
                                               {kRawInputField, nullptr}};
constexpr wire::MessageSchema kInferSchema = {kInferFields};

// Typed contents up to here are parsed by generated code; larger ones are read in place.
constexpr int64_t kParsedContentsBytes = 64 * 1024;

// Of a requested output: Triton would answer the largest elements, as text.
constexpr char kClassificationParameter[] = "classification";

// Of a response in a stream: no further one follows for its request.
constexpr char kFinalParameter[] = "triton_final_response";

// nonpad_kv_seqlen is copied without a reservation, hence bounded.
constexpr int64_t kMaxKeyLengths = 64 * 1024;

// Their maximum size in bytes as varints.
constexpr int64_t kMaxIntegerBytes = kMaxKeyLengths * 10;

using Fields = InferFields;
using LargeContents = InferFields::LargeContents;

// The number of values of any type.
int64_t CountOf(const InferTensorContents& c) {
  return int64_t{c.bool_contents_size()} + c.int_contents_size() + c.int64_contents_size() +
         c.uint_contents_size() + c.uint64_contents_size() + c.fp32_contents_size() +
         c.fp64_contents_size() + c.bytes_contents_size();
}

// The number of values of a field that can be a payload.
int CountOf(const InferTensorContents& c, int field) {
  switch (field) {
    case kBoolField:
      return c.bool_contents_size();
    case kInt64Field:
      return c.int64_contents_size();
    case kFp32Field:
      return c.fp32_contents_size();
    default:
      return c.fp64_contents_size();
  }
}

absl::Status TooManyPieces(const InputTensor& input) {
  return Invalid("input ", input.name(), " has contents in several pieces; more than ",
                 kParsedContentsBytes, " bytes of contents must be packed into one field");
}

absl::Status MixedContents(const InputTensor& input) {
  return Invalid("input ", input.name(),
                 " has contents partly packed and partly not; they must be one or the other");
}

absl::Status TooManyIntegers(const InputTensor& input) {
  return Invalid("input ", input.name(), " has more than ", kMaxIntegerBytes,
                 " bytes of int64_contents");
}

// Merges a payload back into the parsed message.
absl::Status PutBack(const MessageBytes& bytes, const wire::Payload& payload, InputTensor& input) {
  std::string field;
  wire::AppendFieldHeader(payload.path.back(), payload.size, field);
  const size_t header_size = field.size();
  field.resize(header_size + static_cast<size_t>(payload.size));
  bytes.bytes.Copy(payload.begin, payload.size,
                   reinterpret_cast<std::byte*>(field.data() + header_size));
  if (input.mutable_contents()->MergeFromString(field)) return absl::OkStatus();
  return Invalid("input ", input.name(), " has malformed contents");
}

absl::Status ReadFields(const MessageBytes& bytes, Fields& fields) {
  RAPT_ASSIGN_OR_RETURN(wire::SplitMessage split,
                        wire::Split(bytes.bytes, bytes.size, kInferSchema));
  RAPT_RETURN_IF_ERROR(ParseRequest(split.rest, fields.message));
  // Values of a fixed size can be read in place; integers must be parsed.
  int64_t fixed_size_bytes = 0;
  int64_t integer_bytes = 0;
  for (const wire::Payload& payload : split.payloads) {
    if (payload.path[0] != kInputsField) continue;
    (payload.path.back() == kInt64Field ? integer_bytes : fixed_size_bytes) += payload.size;
  }
  std::set<std::pair<int, int>> refilled;  // inputs and their fields
  for (const wire::Payload& payload : split.payloads) {
    const InputBytes part = bytes.Part(payload.begin, payload.size);
    if (payload.path[0] == kRawInputField) {
      fields.raw.push_back(part);
      continue;
    }
    InputTensor& input = *fields.message.mutable_inputs(payload.index);
    absl::Status status;
    const bool is_integer = payload.path.back() == kInt64Field;
    if (is_integer ? integer_bytes <= kMaxIntegerBytes : fixed_size_bytes <= kParsedContentsBytes) {
      // Unpacked values are in the message already; their order relative to these is lost.
      const bool is_mixed = refilled.insert({payload.index, payload.path.back()}).second &&
                            CountOf(input.contents(), payload.path.back()) > 0;
      status = is_mixed ? MixedContents(input) : PutBack(bytes, payload, input);
    } else if (is_integer) {
      status = TooManyIntegers(input);
    } else if (!fields.contents.emplace(payload.index, LargeContents{payload.path.back(), part})
                    .second) {
      status = TooManyPieces(input);
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Finds an input or output of a model by its name; null if there is none.
const ModelTensor* FindTensor(absl::Span<const ModelTensor> tensors, absl::string_view name) {
  const auto tensor = std::find_if(tensors.begin(), tensors.end(),
                                   [&](const ModelTensor& t) { return t.name == name; });
  return tensor == tensors.end() ? nullptr : &*tensor;
}

std::string NamesOf(absl::Span<const ModelTensor> tensors) {
  return absl::StrJoin(tensors, ", ", [](std::string* out, const ModelTensor& tensor) {
    absl::StrAppend(out, tensor.name);
  });
}

absl::StatusOr<TensorSpec> ReadSpec(const InputTensor& input) {
  const std::optional<DType> dtype = DTypeNamed(input.datatype());
  if (!dtype) {
    return Invalid("input ", input.name(), " has datatype '", input.datatype(),
                   "'; it must be FP32, FP16, BF16 or FP64, for a mask also BOOL or integers, for ",
                   "lengths and positions INT64, for selected_indices INT32");
  }
  return TensorSpec{*dtype, Shape(input.shape().begin(), input.shape().end())};
}

template <typename Field>
InputBytes BytesOf(const Field& field) {
  return {reinterpret_cast<const std::byte*>(field.data()),
          static_cast<int64_t>(field.size() * sizeof(*field.data()))};
}

// The field of `contents` for a type: its number, its name, and the values that generated code
// parsed.
struct TypedField {
  int number;
  absl::string_view name;
  InputBytes bytes;
};

absl::StatusOr<TypedField> FieldOf(const InputTensor& input, DType dtype) {
  const InferTensorContents& c = input.contents();
  switch (dtype) {
    case DType::kFloat32:
      return TypedField{kFp32Field, "fp32_contents", BytesOf(c.fp32_contents())};
    case DType::kFloat64:
      return TypedField{kFp64Field, "fp64_contents", BytesOf(c.fp64_contents())};
    case DType::kBool:
      return TypedField{kBoolField, "bool_contents", BytesOf(c.bool_contents())};
    case DType::kInt64:
      return TypedField{kInt64Field, "int64_contents", BytesOf(c.int64_contents())};
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt32:
    case DType::kInt8:
    case DType::kUint8:
      break;
  }
  return Invalid("input ", input.name(), " is ", NameOf(dtype),
                 ", which is accepted in raw_input_contents only");
}

absl::Status WrongCount(const InputTensor& input, const TypedField& field, int64_t count,
                        const TensorSpec& spec, int64_t wanted) {
  return Invalid("input ", input.name(), " has ", count, " values in ", field.name, "; its shape ",
                 ToString(spec.shape), " needs ", wanted);
}

// `large` is null if generated code parsed the contents.
absl::StatusOr<InputBytes> TypedBytes(const InputTensor& input, const LargeContents* large,
                                      const TensorSpec& spec, int64_t bytes) {
  RAPT_ASSIGN_OR_RETURN(const TypedField field, FieldOf(input, spec.dtype));
  const int64_t size = SizeOf(spec.dtype);
  const int64_t parsed = field.bytes.size / size;
  if (CountOf(input.contents()) != parsed || (large != nullptr && large->field != field.number)) {
    return Invalid("input ", input.name(), " is ", NameOf(spec.dtype), "; its contents must be in ",
                   field.name, " alone");
  }
  if (large == nullptr) {
    if (field.bytes.size != bytes) return WrongCount(input, field, parsed, spec, bytes / size);
    return field.bytes;
  }
  if (parsed > 0 || spec.dtype == DType::kInt64) return TooManyPieces(input);
  if (large->bytes.size != bytes) {
    return WrongCount(input, field, large->bytes.size / size, spec, bytes / size);
  }
  return large->bytes;
}

absl::StatusOr<InputBytes> RawBytes(const InputTensor& input, const InputBytes& raw,
                                    const TensorSpec& spec, int64_t bytes) {
  if (input.has_contents()) {
    return Invalid("input ", input.name(), " has contents although raw_input_contents is used");
  }
  if (raw.size != bytes) {
    return Invalid("input ", input.name(), " has ", raw.size, " bytes; its shape ",
                   ToString(spec.shape), " of ", NameOf(spec.dtype), " needs ", bytes);
  }
  return raw;
}

// State while the inputs of a message are read in order.
struct InputReading {
  const Fields& fields;
  SharedTensors& shared_tensors;
  size_t raw_used = 0;  // consumed entries of raw_input_contents
};

// raw_input_contents must have an entry for each input that is not in shared memory, and no others.
absl::Status WrongRawCount(const Fields& fields, size_t needed) {
  return Invalid("raw_input_contents has ", fields.raw.size(), " entries; there are ", needed,
                 " inputs that are not in shared memory");
}

absl::StatusOr<InputBytes> ReadBytes(InputReading& reading, int index, const TensorSpec& spec,
                                     const std::optional<SharedReference>& shared) {
  const Fields& fields = reading.fields;
  const InputTensor& input = fields.message.inputs(index);
  const std::string name = absl::StrCat("input ", input.name());
  RAPT_ASSIGN_OR_RETURN(const int64_t bytes, ByteSize(name, spec));
  if (shared && fields.HasContents(index)) {
    return Invalid(name, " has contents although it is in shared memory");
  }
  if (shared) return reading.shared_tensors.FindInput(name, *shared, bytes);
  if (!fields.raw.empty()) return RawBytes(input, fields.raw[reading.raw_used++], spec, bytes);
  const auto large = fields.contents.find(index);
  return TypedBytes(input, large == fields.contents.end() ? nullptr : &large->second, spec, bytes);
}

absl::StatusOr<std::vector<int64_t>> ReadKeyLengths(const InputBytes& bytes) {
  const int64_t count = bytes.size / int64_t{sizeof(int64_t)};
  if (count > kMaxKeyLengths) {
    return Invalid("input nonpad_kv_seqlen has ", count, " values; at most ", kMaxKeyLengths,
                   " are allowed");
  }
  std::vector<int64_t> lengths(count);
  RAPT_RETURN_IF_ERROR(bytes.Fetch(0, bytes.size, reinterpret_cast<std::byte*>(lengths.data())));
  return lengths;
}

absl::Status ReadInput(InputReading& reading, int index, Slot slot,
                       const std::optional<SharedReference>& shared,
                       InputMap<std::optional<TensorSpec>>& specs, Request& request) {
  RAPT_ASSIGN_OR_RETURN(TensorSpec spec, ReadSpec(reading.fields.message.inputs(index)));
  RAPT_ASSIGN_OR_RETURN(InputBytes bytes, ReadBytes(reading, index, spec, shared));
  if (slot != Role::kKeyLengths) {
    request.inputs[slot] = bytes;
    if (slot == Role::kMask && IsInteger(spec.dtype) && IsAttention(request.model)) {
      ConvertIntegerMask(absl::StrCat("input ", reading.fields.message.inputs(index).name()), spec,
                         request);
      spec.dtype = DType::kBool;
    }
  } else if (spec.dtype == DType::kInt64) {  // otherwise Resolve() rejects it
    RAPT_ASSIGN_OR_RETURN(request.key_lengths, ReadKeyLengths(bytes));
  }
  specs[slot] = std::move(spec);
  return absl::OkStatus();
}

using Slots = absl::InlinedVector<Slot, 4>;

// `seen` are the slots of the preceding inputs.
absl::StatusOr<Slot> SlotOf(const InputTensor& input, const ModelInfo& model, const Slots& seen) {
  const ModelTensor* const tensor = FindTensor(model.inputs, input.name());
  if (tensor == nullptr) {
    return Invalid("unknown input ", input.name(), "; the inputs are ", NamesOf(model.inputs));
  }
  if (std::find(seen.begin(), seen.end(), tensor->slot) != seen.end()) {
    return Invalid("input ", input.name(), " is given twice");
  }
  return tensor->slot;
}

// Returns the shared memory reference of each input.
using References = absl::InlinedVector<std::optional<SharedReference>, 4>;

absl::StatusOr<References> ReadReferences(const ModelInferRequest& message) {
  References references;
  for (const InputTensor& input : message.inputs()) {
    RAPT_ASSIGN_OR_RETURN(auto reference, ReadTensorParameters(absl::StrCat("input ", input.name()),
                                                               input.parameters()));
    references.push_back(std::move(reference));
  }
  return references;
}

absl::Status ReadInputs(const Fields& fields, const ModelInfo& model, SharedTensors& shared_tensors,
                        InputMap<std::optional<TensorSpec>>& specs, Request& request) {
  const ModelInferRequest& message = fields.message;
  Slots slots;
  for (const InputTensor& input : message.inputs()) {
    RAPT_ASSIGN_OR_RETURN(const Slot slot, SlotOf(input, model, slots));
    slots.push_back(slot);
  }
  RAPT_ASSIGN_OR_RETURN(const auto references, ReadReferences(message));
  const auto in_message =
      static_cast<size_t>(std::count(references.begin(), references.end(), std::nullopt));
  InputReading reading{fields, shared_tensors};
  for (int i = 0; i < message.inputs_size(); ++i) {
    if (!fields.raw.empty() && reading.raw_used == fields.raw.size() && !references[i]) {
      return WrongRawCount(fields, in_message);
    }
    RAPT_RETURN_IF_ERROR(ReadInput(reading, i, slots[i], references[i], specs, request));
  }
  if (reading.raw_used != fields.raw.size()) return WrongRawCount(fields, in_message);
  return absl::OkStatus();
}

// An output that the message requests.
struct OutputRequest {
  absl::string_view name;
  Slot slot;
  std::optional<SharedReference> shared;
};

using OutputRequests = absl::InlinedVector<OutputRequest, 1>;

bool Contains(const OutputRequests& all, Slot slot) {
  return std::any_of(all.begin(), all.end(),
                     [&](const OutputRequest& request) { return request.slot == slot; });
}

// Those of a message that requests none.
OutputRequests UsualOutputs(const ModelInfo& model, const Calls& calls) {
  SlotSet usual = {Role::kY};
  if (model.model == Model::kAttentionBackward) usual = UsualGradients(AttentionOf(*calls.call));
  OutputRequests all;
  for (const ModelTensor& output : model.outputs) {
    if (usual.contains(output.slot)) all.push_back({output.name, output.slot, std::nullopt});
  }
  return all;
}

absl::StatusOr<OutputRequests> ReadOutputs(const ModelInferRequest& message,
                                           const ModelInfo& model) {
  OutputRequests all;
  for (const auto& output : message.outputs()) {
    const ModelTensor* const tensor = FindTensor(model.outputs, output.name());
    if (tensor == nullptr) {
      return Invalid("unknown output ", output.name(), "; the outputs are ",
                     NamesOf(model.outputs));
    }
    if (Contains(all, tensor->slot)) {
      return Invalid("output ", output.name(), " is requested twice");
    }
    if (output.parameters().count(kClassificationParameter) > 0) {
      return Invalid("output ", output.name(), " has parameter ", kClassificationParameter,
                     ", which is not supported");
    }
    RAPT_ASSIGN_OR_RETURN(auto shared, ReadTensorParameters(absl::StrCat("output ", output.name()),
                                                            output.parameters()));
    all.push_back({tensor->name, tensor->slot, std::move(shared)});
  }
  return all;
}

// Sets what a call of a layer computes: the weights of each head or their mean.
void RequestOutputs(OutputRequests& all, Calls& calls) {
  for (OutputRequest& request : all) {
    if (request.slot != kLayerWeights) continue;
    if (calls.average_attn_weights) request.slot = kAveragedWeights;
    calls.layer->wants_weights = !calls.average_attn_weights;
    calls.layer->wants_averaged_weights = calls.average_attn_weights;
  }
}

// Sets what the call computes.
void RequestOutputs(const ModelId& model, OutputRequests& all, Calls& calls) {
  if (model == Model::kLayer) return RequestOutputs(all, calls);
  if (model.schema != nullptr) {
    for (const TensorSchema& output : model.schema->outputs) {
      if (output.want != nullptr && Contains(all, output.slot)) output.want(*calls.call);
    }
    return;
  }
  calls.attention->wants_lse = Contains(all, Role::kLse);
}

// Sets the shapes and destinations of the outputs. REQUIRES: the call is resolved.
absl::Status PlaceOutputs(const InferFields& fields, SharedTensors& shared_tensors,
                          DecodedInfer& decoded) {
  absl::InlinedVector<const TensorSpec*, 5> in_message, all;
  const SlotSet available = decoded.request.Outputs();
  for (RequestedOutput& output : decoded.outputs) {
    if (!available.contains(output.slot)) {
      const OperatorSchema* const schema = decoded.model.schema;
      return schema != nullptr ? NoOutput(*FindTensor(schema->outputs, output.name))
                               : Invalid("output ", output.name, " is not one of this call");
    }
    output.spec = decoded.request.call.outputs[output.slot];
    if (decoded.session) output.spec = SessionOutput(*decoded.session, output.slot, output.spec);
    all.push_back(output.shared ? nullptr : &output.spec);
    if (!output.shared) {
      in_message.push_back(&output.spec);
      continue;
    }
    RAPT_ASSIGN_OR_RETURN(decoded.request.places[output.slot],
                          shared_tensors.FindOutput(absl::StrCat("output ", output.name),
                                                    *output.shared, output.spec));
  }
  RAPT_ASSIGN_OR_RETURN(const int64_t encoding, fields.EncodingBytes(all));
  decoded.request.encoding_bytes = decoded.encoding_bytes = encoding;
  return CheckResponseSize(in_message);
}

absl::StatusOr<SessionCall> MakeSession(const ModelInfo& model, const ModelContext& context,
                                        Calls& calls, const InputMap<InputBytes>& inputs) {
  if (model.layer == nullptr) return MakeSessionCall(calls.session, *calls.attention, inputs);
  if (!context.sequence_lease) {
    return absl::UnimplementedError("not supported: sequences need --kv_cache_bytes");
  }
  return MakeLayerSession(calls.session, model, *calls.layer, inputs);
}

// Reads a call of a sequence. Without queries it has no outputs.
absl::Status ReadSession(const ModelInferRequest& message, const ModelInfo& model,
                         const ModelContext& context, Calls& calls, DecodedInfer& decoded) {
  RAPT_ASSIGN_OR_RETURN(SessionCall session,
                        MakeSession(model, context, calls, decoded.request.inputs));
  if (!session.attend.q.spec) {
    if (message.outputs_size() > 0) {
      return Invalid("output ", message.outputs(0).name(), " is requested; it needs input ",
                     model.inputs.front().name);
    }
    decoded.outputs.clear();
  }
  decoded.session = std::move(session);
  return absl::OkStatus();
}

// Checks the call and sets what the request computes.
absl::Status ResolveCall(const ModelInfo& model, Calls& calls, Request& request) {
  if (IsAttention(request.model)) {
    RAPT_ASSIGN_OR_RETURN(request.call, ResolveAttention(*calls.call));
  } else if (model.layer == nullptr) {
    RAPT_ASSIGN_OR_RETURN(const BoundCall bound, calls.call->Bind());
    request.SetOperator(bound.tensor_operator());
  } else {
    RAPT_ASSIGN_OR_RETURN(auto made, MakeLayerCall(model.layer, *calls.layer));
    request.SetOperator(std::move(made));
  }
  return absl::OkStatus();
}

Instant DeadlineFor(std::chrono::microseconds timeout, Instant now) {
  // In whole microseconds: the sum of any timeout with `now` need not fit into nanoseconds.
  const auto longest = std::chrono::duration_cast<std::chrono::microseconds>(Instant::max() - now);
  if (timeout.count() == 0 || timeout >= longest) return Instant::max();
  return now + timeout;
}

absl::Status Decode(std::shared_ptr<const InferFields> fields, const ModelInfo& info, Instant now,
                    const SharedMemory& shared_memory, const ModelContext& context,
                    DecodedInfer& decoded) {
  const ModelInferRequest& message = fields->message;
  const ModelId& model = info.model;
  Calls calls(model);
  RAPT_ASSIGN_OR_RETURN(const Parameters parameters,
                        ReadParameters(message.parameters(), model, calls));
  RAPT_ASSIGN_OR_RETURN(OutputRequests requested, ReadOutputs(message, info));
  if (requested.empty()) requested = UsualOutputs(info, calls);
  RequestOutputs(model, requested, calls);

  decoded.model = decoded.request.model = model;
  for (const OutputRequest& output : requested) {
    decoded.outputs.push_back({output.name, output.slot, {}, output.shared});
  }
  SharedTensors shared_tensors(shared_memory);
  absl::Status status = ReadInputs(*fields, info, shared_tensors, calls.inputs(), decoded.request);
  decoded.request.owner = fields;  // the request reads small typed contents in it
  const bool is_session =
      model == Model::kAttentionSession || (model == Model::kLayer && calls.session.given());
  if (status.ok() && is_session) {
    status = ReadSession(message, info, context, calls, decoded);
    decoded.fields = std::move(fields);
    decoded.shared_tensors = std::make_unique<SharedTensors>(std::move(shared_tensors));
  } else if (status.ok()) {
    status = ResolveCall(info, calls, decoded.request);
    if (status.ok()) status = PlaceOutputs(*fields, shared_tensors, decoded);
    std::move(shared_tensors).TransferTo(decoded.request);
  }
  if (!status.ok()) return status;
  decoded.request.deadline = DeadlineFor(parameters.timeout, now);
  decoded.request.priority = parameters.priority;
  decoded.id = message.id();
  return absl::OkStatus();
}

}  // namespace

const wire::MessageSchema& InferSchema() { return kInferSchema; }

absl::StatusOr<DecodedInfer> DecodeInfer(const MessageBytes& bytes, Instant now,
                                         const SharedMemory& shared_memory, ModelId* reported,
                                         const ModelContext& context, std::string* id) {
  const auto fields = std::make_shared<Fields>();
  RAPT_RETURN_IF_ERROR(ReadFields(bytes, *fields));
  const ModelInferRequest& message = fields->message;
  if (id != nullptr) *id = message.id();
  RAPT_ASSIGN_OR_RETURN(const auto model,
                        FindModel(message.model_name(), message.model_version(), context));
  if (reported != nullptr) *reported = model->model;
  return DecodeInfer(fields, *model, now, shared_memory, context);
}

absl::StatusOr<DecodedInfer> DecodeInfer(std::shared_ptr<const InferFields> fields,
                                         const ModelInfo& model, Instant now,
                                         const SharedMemory& shared_memory,
                                         const ModelContext& context) {
  // In its place, because it is large.
  absl::StatusOr<DecodedInfer> decoded(absl::in_place);
  absl::Status status = Decode(std::move(fields), model, now, shared_memory, context, *decoded);
  if (!status.ok()) decoded = std::move(status);
  return decoded;
}

absl::Status CompleteSession(Request started, DecodedInfer& decoded) {
  const Request& read = decoded.request;
  started.model = read.model;
  started.owner = read.owner;
  started.deadline = read.deadline;
  started.priority = read.priority;
  decoded.request = std::move(started);
  absl::Status status = PlaceOutputs(*decoded.fields, *decoded.shared_tensors, decoded);
  decoded.fields = nullptr;
  std::move(*decoded.shared_tensors).TransferTo(decoded.request);
  return status;
}

namespace {

ResponseMessage Encode(const DecodedInfer& decoded, const Result& result, bool in_stream) {
  alignas(8) char block[1024];  // few responses need more
  google::protobuf::Arena arena(block, sizeof(block));
  auto& fields = *google::protobuf::Arena::CreateMessage<inference::ModelInferResponse>(&arena);
  fields.set_model_name(std::string(decoded.model.name()));
  fields.set_model_version(kModelVersion);
  fields.set_id(decoded.id);
  if (in_stream) (*fields.mutable_parameters())[kFinalParameter].set_bool_param(true);
  for (const RequestedOutput& output : decoded.outputs) {
    auto& tensor = *fields.add_outputs();
    tensor.set_name(output.name.data(), output.name.size());
    const absl::string_view datatype = NameOf(output.spec.dtype);
    tensor.set_datatype(datatype.data(), datatype.size());
    tensor.mutable_shape()->Assign(output.spec.shape.begin(), output.spec.shape.end());
    if (!output.shared) continue;
    ParameterMap& parameters = *tensor.mutable_parameters();
    parameters[kRegionParameter].set_string_param(output.shared->region);
    parameters[kRegionOffsetParameter].set_int64_param(output.shared->offset);
    parameters[kRegionBytesParameter].set_int64_param(
        static_cast<int64_t>(result.outputs[output.slot].bytes.size()));
  }
  ResponseMessage response;
  std::string header = fields.SerializeAsString();
  for (const RequestedOutput& output : decoded.outputs) {
    // Clients expect an entry for each output; it is empty for outputs in shared memory.
    const OutputBuffer payload = output.shared ? OutputBuffer{} : result.outputs[output.slot];
    wire::AppendFieldHeader(kRawOutputField, static_cast<int64_t>(payload.bytes.size()), header);
    response.Append(std::exchange(header, {}));
    response.Append(payload);
  }
  return response;
}

}  // namespace

ResponseMessage EncodeInfer(const DecodedInfer& decoded, const Result& result) {
  return Encode(decoded, result, /*in_stream=*/false);
}

ResponseMessage EncodeStreamInfer(const DecodedInfer& decoded, const Result& result) {
  const ResponseMessage::Pieces pieces = Encode(decoded, result, /*in_stream=*/true).TakePieces();
  size_t size = 0;
  for (const ResponseMessage::Piece& piece : pieces) {
    size += piece.bytes.size() + piece.payload.bytes.size();
  }
  std::string header;
  wire::AppendFieldHeader(inference::ModelStreamInferResponse::kInferResponseFieldNumber,
                          static_cast<int64_t>(size), header);
  ResponseMessage response;
  response.Append(header);
  for (const ResponseMessage::Piece& piece : pieces) {
    response.Append(piece.bytes);
    response.Append(piece.payload);
  }
  return response;
}

ResponseMessage EncodeStreamError(const std::string& id, const absl::Status& status) {
  inference::ModelStreamInferResponse fields;
  // The response has no other field for the code.
  fields.set_error_message(
      absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message()));
  inference::ModelInferResponse& response_fields = *fields.mutable_infer_response();
  response_fields.set_id(id);
  (*response_fields.mutable_parameters())[kFinalParameter].set_bool_param(true);
  ResponseMessage response;
  response.Append(fields.SerializeAsString());
  return response;
}

}  // namespace rapt::oip
