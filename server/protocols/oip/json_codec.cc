#include "server/protocols/oip/json_codec.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "attention/half.h"
#include "base/checked_math.h"
#include "base/invalid.h"
#include "base/json_string.h"
#include "base/status_macros.h"
#include "base/strict_json.h"
#include "server/protocols/json_limits.h"
#include "server/protocols/json_numbers.h"
#include "server/protocols/oip/parameters.h"

namespace rapt::oip {
namespace {

using InputTensor = inference::ModelInferRequest::InferInputTensor;
using OutputTensor = inference::ModelInferRequest::InferRequestedOutputTensor;

constexpr char kBinarySize[] = "binary_data_size";         // of an input or of an answer's output
constexpr char kBinary[] = "binary_data";                  // of a requested output
constexpr char kBinaryByDefault[] = "binary_data_output";  // of a request

constexpr int kMaxNesting = 16;  // of data
// Ample. Their places in memory are larger than their text.
constexpr int kMaxTensors = 64;
constexpr int kMaxParameters = 256;
constexpr int kMaxRank = 64;

// A field of an object. The value of any other is skipped, as Triton does: clients add some.
struct Field {
  absl::string_view name;
  absl::string_view type;
};
constexpr Field kRequestFields[] = {{"id", "a string"},
                                    {"parameters", "an object"},
                                    {"inputs", "an array of objects"},
                                    {"outputs", "an array of objects"}};
constexpr Field kInputFields[] = {{"name", "a string"},
                                  {"datatype", "a string"},
                                  {"shape", "an array of integers"},
                                  {"data", "an array"},
                                  {"parameters", "an object"}};
constexpr Field kOutputFields[] = {{"name", "a string"}, {"parameters", "an object"}};

// What is known of an input apart from its message.
struct InputState {
  bool has_shape = false;
  bool has_datatype = false;
  bool has_data = false;
  std::optional<DType> dtype;
  JsonNumbers numbers;
  std::optional<int64_t> binary_size;
};

// Reads the JSON. The numbers of an input are stored while they are read if its type and shape are
// known by then, from the text before them or from another Reader's pass.
class Reader final : public JsonHandler {
 public:
  Reader(int64_t json_bytes, BufferPool& pool, const inference::ModelInferRequest* known)
      : pool_(pool), known_(known), numbers_left_(json_bytes / 2) {}

  absl::Status Read(absl::string_view json) {
    ReadStrictJson(json, *this);
    return status_;
  }

  bool needs_another_pass() const { return needs_another_pass_; }
  const inference::ModelInferRequest& message() const { return result_->message; }
  std::vector<InputState>& inputs() { return inputs_; }
  std::shared_ptr<JsonInfer> TakeResult() { return std::move(result_); }

 private:
  // What is being read.
  enum class Place : uint8_t {
    kNothing,
    kRequest,
    kInputs,
    kOutputs,
    kInput,
    kOutput,
    kParameters,
    kShape,
    kData,
  };

  Place place() const { return stack_.empty() ? Place::kNothing : stack_.back(); }
  bool Enter(Place place) {
    stack_.push_back(place);
    return true;
  }
  bool Leave() {
    stack_.pop_back();
    return true;
  }
  bool Fail(absl::Status status) {
    status_ = std::move(status);
    return false;
  }

  InputTensor& input() {
    return *result_->message.mutable_inputs(result_->message.inputs_size() - 1);
  }
  OutputTensor& output() {
    return *result_->message.mutable_outputs(result_->message.outputs_size() - 1);
  }
  std::string InputName() {
    if (!input().name().empty()) return absl::StrCat("input ", input().name());
    return absl::StrCat("input number ", result_->message.inputs_size());
  }
  // The object that a key belongs to.
  std::string Where() {
    switch (place()) {
      case Place::kInput:
        return InputName();
      case Place::kOutput:
        return absl::StrCat("output ", output().name());
      default:
        return "the request";
    }
  }
  // A value that its field, if there is one of this name, does not have.
  bool OnOtherField() {
    absl::Span<const Field> fields = kRequestFields;
    if (place() == Place::kInput) fields = kInputFields;
    if (place() == Place::kOutput) fields = kOutputFields;
    const auto field = std::find_if(fields.begin(), fields.end(),
                                    [&](const Field& known) { return known.name == key_; });
    if (field == fields.end()) return true;
    return Fail(
        Invalid(Where(), " has a field ", key_, " of the wrong type; it must be ", field->type));
  }
  bool InObject() const {
    return place() == Place::kRequest || place() == Place::kInput || place() == Place::kOutput;
  }
  // Whether the parameter at hand may have any value.
  bool IsIgnored() const {
    return stack_[stack_.size() - 2] != Place::kRequest || IsIgnoredParameter(key_);
  }
  // The parser begins, or ends, an object or array that means nothing.
  bool Skip() {
    ++skipped_;
    return true;
  }
  bool EndSkipped() {
    --skipped_;
    return true;
  }

 public:
  // For the parser.
  // A field that is null is absent.
  bool null() override { return skipped_ > 0 || InObject() || OnOther("null"); }
  bool boolean(bool value) override { return OnScalar(value); }
  bool number_integer(int64_t value) override { return OnScalar(value); }
  bool number_unsigned(uint64_t value) override { return OnScalar(value); }
  bool number_float(double value, const std::string&) override { return OnScalar(value); }
  bool string(std::string& value) override { return OnScalar(absl::string_view(value)); }

 private:
  bool TooMany(int most, absl::string_view what) {
    return Fail(Invalid("the request has more than ", most, " ", what));
  }

  bool OnOther(absl::string_view what) {
    if (InObject()) return OnOtherField();
    if (place() == Place::kData || place() == Place::kShape) {
      return Fail(Invalid(InputName(), " has ", what,
                          place() == Place::kData ? " in data; it must have numbers"
                                                  : " in shape; it must have integers"));
    }
    if (place() == Place::kParameters) {
      if (IsIgnored()) return true;
      return Fail(Invalid("parameter ", key_.substr(0, 64), " is ", what,
                          "; it must be a bool, a number or a string"));
    }
    return Fail(Invalid("the JSON has ", what, " where an object or a field is expected"));
  }

  bool BeginData() {
    nesting_ = 0;
    InputState& state = inputs_.back();
    state.has_data = true;
    const InputTensor* spec = &input();
    if (known_ != nullptr) {
      spec = &known_->inputs(result_->message.inputs_size() - 1);
    } else if (!state.has_shape || !state.has_datatype) {
      needs_another_pass_ = true;
      return true;
    }
    state.dtype = DTypeNamed(spec->datatype());
    if (!state.dtype) return true;  // the codec's error names the types
    const Shape shape(spec->shape().begin(), spec->shape().end());
    status_ = state.numbers.Begin(InputName(), {*state.dtype, shape}, pool_, numbers_left_);
    return status_.ok();
  }

  bool OnScalar(const JsonScalar& value) {
    if (skipped_ > 0) return true;
    const auto* const text = std::get_if<absl::string_view>(&value);
    switch (place()) {
      case Place::kRequest:
        if (key_ != "id" || text == nullptr) return OnOtherField();
        result_->message.set_id(text->data(), text->size());
        return true;
      case Place::kInput:
        if (text == nullptr) return OnOtherField();
        if (key_ == "name") {
          input().set_name(text->data(), text->size());
        } else if (key_ == "datatype") {
          inputs_.back().has_datatype = true;
          input().set_datatype(text->data(), text->size());
        } else {
          return OnOtherField();
        }
        return true;
      case Place::kOutput:
        if (key_ != "name" || text == nullptr) return OnOtherField();
        output().set_name(text->data(), text->size());
        return true;
      case Place::kParameters:
        return OnParameter(value);
      case Place::kShape:
        return OnExtent(value);
      case Place::kData:
        return OnNumber(value);
      default:
        return OnOther("a value");
    }
  }

  bool OnExtent(const JsonScalar& value) {
    if (input().shape_size() == kMaxRank) return TooMany(kMaxRank, "extents in a shape");
    const std::optional<int64_t> extent = IntegerOf(value);
    if (!extent) {
      return Fail(Invalid(InputName(), " has ", TextOf(value), " in shape; it must have integers"));
    }
    input().add_shape(*extent);
    return true;
  }

  bool OnParameter(const JsonScalar& value) {
    const Place owner = stack_[stack_.size() - 2];
    if (owner == Place::kInput && key_ == kBinarySize) {
      const std::optional<int64_t> bytes = IntegerOf(value);
      if (!bytes || *bytes < 0) {
        return Fail(Invalid(InputName(), " has parameter ", kBinarySize, " ", TextOf(value),
                            "; it must be a number of bytes"));
      }
      inputs_.back().binary_size = *bytes;
      return true;
    }
    if ((owner == Place::kOutput && key_ == kBinary) ||
        (owner == Place::kRequest && key_ == kBinaryByDefault)) {
      const bool* const flag = std::get_if<bool>(&value);
      if (flag == nullptr) {
        return Fail(
            Invalid("parameter ", key_, " is ", TextOf(value), "; it must be true or false"));
      }
      if (owner == Place::kRequest) {
        result_->binary.all = *flag;
      } else {
        asked_.back() = *flag;
      }
      return true;
    }
    if (++parameters_ > kMaxParameters) return TooMany(kMaxParameters, "parameters");
    inference::InferParameter& parameter = (*ParametersOf(owner))[key_];
    if (const bool* const flag = std::get_if<bool>(&value)) {
      parameter.set_bool_param(*flag);
    } else if (const auto* const text = std::get_if<absl::string_view>(&value)) {
      parameter.set_string_param(text->data(), text->size());
    } else if (const auto* const real = std::get_if<double>(&value)) {
      parameter.set_double_param(*real);
    } else if (const std::optional<int64_t> integer = IntegerOf(value)) {
      parameter.set_int64_param(*integer);
    } else {
      parameter.set_uint64_param(std::get<uint64_t>(value));
    }
    return true;
  }

  ParameterMap* ParametersOf(Place owner) {
    if (owner == Place::kInput) return input().mutable_parameters();
    if (owner == Place::kOutput) return output().mutable_parameters();
    return result_->message.mutable_parameters();
  }

  bool OnNumber(const JsonScalar& value) {
    InputState& state = inputs_.back();
    if (state.numbers.Add(value)) return true;
    return Fail(Invalid(InputName(), " has ", TextOf(value), " in data of ", NameOf(*state.dtype),
                        "; ", state.numbers.allowed));
  }

 public:
  // For the parser.
  bool key(std::string& name) override {
    key_ = std::move(name);
    return true;
  }

  bool start_object(size_t) override {
    if (skipped_ > 0) return Skip();
    switch (place()) {
      case Place::kNothing:
        return Enter(Place::kRequest);
      case Place::kInputs:
        if (inputs_.size() == kMaxTensors) return TooMany(kMaxTensors, "inputs");
        result_->message.add_inputs();
        inputs_.emplace_back();
        return Enter(Place::kInput);
      case Place::kOutputs:
        if (asked_.size() == kMaxTensors) return TooMany(kMaxTensors, "outputs");
        result_->message.add_outputs();
        asked_.emplace_back();
        return Enter(Place::kOutput);
      case Place::kRequest:
      case Place::kInput:
      case Place::kOutput:
        if (key_ == "parameters") return Enter(Place::kParameters);
        return OnOtherField() && Skip();
      default:
        return OnOther("an object") && Skip();
    }
  }

  bool end_object() override {
    if (skipped_ > 0) return EndSkipped();
    if (place() == Place::kRequest) {
      for (const std::optional<bool>& asked : asked_) {
        result_->binary.named.push_back(asked.value_or(result_->binary.all));
      }
    }
    return Leave();
  }

  bool start_array(size_t) override {
    if (skipped_ > 0) return Skip();
    if (place() == Place::kRequest && key_ == "inputs") return Enter(Place::kInputs);
    if (place() == Place::kRequest && key_ == "outputs") return Enter(Place::kOutputs);
    if (place() == Place::kInput && key_ == "shape") {
      inputs_.back().has_shape = true;
      return Enter(Place::kShape);
    }
    if (place() == Place::kInput && key_ == "data") {
      return BeginData() && Enter(Place::kData);
    }
    if (place() != Place::kData) return OnOther("an array") && Skip();
    if (++nesting_ < kMaxNesting) return Enter(Place::kData);
    return Fail(Invalid(InputName(), " has data in more than ", kMaxNesting, " levels of arrays"));
  }

  bool end_array() override {
    if (skipped_ > 0) return EndSkipped();
    const Place left = place();
    Leave();
    if (left == Place::kData && place() == Place::kData) --nesting_;
    return true;
  }

  void OnInvalid(absl::string_view why) override {
    Fail(place() == Place::kData ? Invalid(InputName(), " has invalid data: ", why)
                                 : Invalid("the JSON is invalid: ", why));
  }

 private:
  BufferPool& pool_;
  const inference::ModelInferRequest* const known_;  // of another pass
  std::shared_ptr<JsonInfer> result_ = std::make_shared<JsonInfer>();
  std::vector<InputState> inputs_;
  std::vector<std::optional<bool>> asked_;  // by output, whether it is to be binary
  std::vector<Place> stack_;
  std::string key_;
  // That the rest of the JSON may have. A number and what separates it from the next take 2 bytes.
  int64_t numbers_left_;
  int nesting_ = 0;      // of data
  int64_t skipped_ = 0;  // objects and arrays around what is read that mean nothing
  int parameters_ = 0;
  bool needs_another_pass_ = false;
  absl::Status status_;
};

absl::Status CheckCount(const InputTensor& input, const InputState& state) {
  const JsonNumbers& numbers = state.numbers;
  if (!state.dtype || numbers.count == numbers.wanted) return absl::OkStatus();
  return Invalid("input ", input.name(), " has ", numbers.count, " values in data; its shape ",
                 ToString(Shape(input.shape().begin(), input.shape().end())), " needs ",
                 numbers.wanted);
}

// Sets the bytes of all inputs that are not in shared memory.
absl::Status Locate(const MessageBytes& body, int64_t json_bytes, std::vector<InputState>& states,
                    JsonInfer& fields) {
  int64_t end = json_bytes;
  for (int i = 0; i < fields.message.inputs_size(); ++i) {
    const InputTensor& input = fields.message.inputs(i);
    InputState& state = states[static_cast<size_t>(i)];
    const int places = (state.has_data ? 1 : 0) + (state.binary_size ? 1 : 0) +
                       static_cast<int>(input.parameters().count(kRegionParameter));
    if (places != 1) {
      return Invalid("input ", input.name(), " has ", places, " of data, parameter ", kBinarySize,
                     " and parameter ", kRegionParameter, "; it must have one");
    }
    if (state.has_data) {
      RAPT_RETURN_IF_ERROR(CheckCount(input, state));
      PooledBuffer& place = state.numbers.place;
      fields.raw.emplace_back(place.data(), place.size());
      fields.numbers.push_back(std::move(place));
    } else if (state.binary_size) {
      if (*state.binary_size > body.size - end) {
        return Invalid("input ", input.name(), " has ", kBinarySize, " ", *state.binary_size,
                       "; the body has ", body.size - end, " more bytes");
      }
      fields.raw.push_back(body.Part(end, *state.binary_size));
      end += *state.binary_size;
    }
  }
  if (end == body.size) return absl::OkStatus();
  return Invalid("the body has ", body.size - end, " bytes after the data of the inputs");
}

// --- Answers -------------------------------------------------------------------------------------

template <typename T>
void AppendNumber(T value, std::string& out) {
  if constexpr (std::is_floating_point_v<T>) {
    if (!std::isfinite(value)) {
      out += std::isnan(value) ? "\"NaN\"" : value > 0 ? "\"Infinity\"" : "\"-Infinity\"";
      return;
    }
  }
  char text[32];
  out.append(text, std::to_chars(text, text + sizeof(text), value).ptr);
}

void AppendElement(DType dtype, const std::byte* data, int64_t index, std::string& out) {
  switch (dtype) {
    case DType::kFloat32:
      return AppendNumber(LoadAs<float>(data, index), out);
    case DType::kFloat16:
      return AppendNumber(static_cast<float>(HalfToDouble(LoadAs<uint16_t>(data, index))), out);
    case DType::kBFloat16:
      return AppendNumber(static_cast<float>(BFloat16ToDouble(LoadAs<uint16_t>(data, index))), out);
    case DType::kFloat64:
      return AppendNumber(LoadAs<double>(data, index), out);
    case DType::kBool:
      out += LoadAs<uint8_t>(data, index) != 0 ? "true" : "false";
      return;
    case DType::kInt64:
      return AppendNumber(LoadAs<int64_t>(data, index), out);
    case DType::kInt32:
      return AppendNumber(LoadAs<int32_t>(data, index), out);
    case DType::kInt8:
      return AppendNumber(LoadAs<int8_t>(data, index), out);
    case DType::kUint8:
      return AppendNumber(LoadAs<uint8_t>(data, index), out);
  }
}

// Bytes of JSON for a number of the type and what separates it from the next, at most.
int64_t MaxTextBytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:  // -1.7976931348623157e+308
      return 25;
    case DType::kInt64:
      return 21;
    case DType::kFloat32:
    case DType::kFloat16:
    case DType::kBFloat16:  // -1.00000384e+36
      return 16;
    case DType::kInt32:
      return 12;
    case DType::kBool:
      return 6;
    case DType::kInt8:
    case DType::kUint8:
      return 5;
  }
  return 0;
}
constexpr int64_t kLeastTextBytes = 2;  // "0,"

// Ample for an answer without outputs and its id, and for an output without its numbers.
constexpr int64_t kMaxFieldBytes = 1024;
constexpr int64_t kMaxEscapedBytes = 6;  // of a byte: "\u0000"

absl::Status AppendData(const OutputBuffer& output, DType dtype, int64_t most, std::string& out) {
  const auto count = static_cast<int64_t>(output.bytes.size()) / SizeOf(dtype);
  for (int64_t i = 0; i < count; ++i) {
    if (i > 0) out += ',';
    AppendElement(dtype, output.bytes.data(), i, out);
    if (static_cast<int64_t>(out.size()) > most) return AnswerHasTooMuchJson(most);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<JsonInfer>> ReadJsonInfer(const MessageBytes& body,
                                                         int64_t json_bytes, int64_t max_json_bytes,
                                                         BufferPool& pool) {
  const InputBytes part = body.Part(0, json_bytes);
  std::string copy;
  if (part.in_slices()) {
    copy.resize(static_cast<size_t>(json_bytes));
    part.Copy(0, json_bytes, reinterpret_cast<std::byte*>(copy.data()));
  }
  const absl::string_view json = part.in_slices()
                                     ? absl::string_view(copy)
                                     : absl::string_view(reinterpret_cast<const char*>(part.data),
                                                         static_cast<size_t>(json_bytes));
  Reader first(json_bytes, pool, nullptr);
  RAPT_RETURN_IF_ERROR(first.Read(json));
  std::optional<Reader> second;
  if (first.needs_another_pass()) {
    for (InputState& state : first.inputs()) state.numbers = {};
    RAPT_RETURN_IF_ERROR(second.emplace(json_bytes, pool, &first.message()).Read(json));
  }
  Reader& last = second ? *second : first;
  std::shared_ptr<JsonInfer> result = last.TakeResult();
  result->max_json_bytes = max_json_bytes;
  RAPT_RETURN_IF_ERROR(Locate(body, json_bytes, last.inputs(), *result));
  return result;
}

// An answer that is too large for sure is refused before it is computed.
absl::StatusOr<int64_t> JsonInfer::EncodingBytes(
    absl::Span<const TensorSpec* const> outputs) const {
  std::optional<int64_t> least = 0;
  std::optional<int64_t> most = (static_cast<int64_t>(outputs.size()) + 1) * kMaxFieldBytes +
                                static_cast<int64_t>(message.id().size()) * kMaxEscapedBytes;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i] == nullptr || binary.IsBinary(i)) continue;
    RAPT_ASSIGN_OR_RETURN(const int64_t bytes, ByteSize("an output", *outputs[i]));
    const DType dtype = outputs[i]->dtype;
    const int64_t count = bytes / SizeOf(dtype);
    const std::optional<int64_t> text = CheckedMul(count, MaxTextBytes(dtype));
    most = most && text ? CheckedAdd(*most, *text) : std::nullopt;
    least = least ? CheckedAdd(*least, count) : std::nullopt;
  }
  if (!least || *least > max_json_bytes / kLeastTextBytes) {
    return AnswerHasTooMuchJson(max_json_bytes);
  }
  const int64_t limit = max_json_bytes + kMaxFieldBytes;  // EncodeJsonInfer() checks after a field
  return std::min(most.value_or(limit), limit);
}

absl::StatusOr<JsonAnswer> EncodeJsonInfer(const BinaryOutputs& binary, const DecodedInfer& decoded,
                                           const Result& result, int64_t max_json_bytes) {
  JsonAnswer answer;
  std::string& json = answer.json;
  json.reserve(static_cast<size_t>(decoded.encoding_bytes));
  json = "{";
  if (!decoded.id.empty()) {
    json += "\"id\":";
    AppendJsonString(decoded.id, json);
    json += ',';
  }
  absl::StrAppend(&json, "\"model_name\":\"", decoded.model.name(), "\",\"model_version\":\"",
                  kModelVersion, "\",\"outputs\":[");
  for (size_t i = 0; i < decoded.outputs.size(); ++i) {
    const RequestedOutput& output = decoded.outputs[i];
    const OutputBuffer& buffer = result.outputs[output.slot];
    absl::StrAppend(&json, i > 0 ? "," : "", "{\"name\":\"", output.name, "\",\"datatype\":\"",
                    NameOf(output.spec.dtype), "\",\"shape\":[",
                    absl::StrJoin(output.spec.shape, ","), "]");
    if (output.shared) {
      // No parameters, as in Triton: its C++ client takes any for those of binary data.
    } else if (binary.IsBinary(i)) {
      absl::StrAppend(&json, ",\"parameters\":{\"", kBinarySize, "\":", buffer.bytes.size(), "}");
      answer.binary.push_back(buffer);
    } else {
      json += ",\"data\":[";
      RAPT_RETURN_IF_ERROR(AppendData(buffer, output.spec.dtype, max_json_bytes, json));
      json += ']';
    }
    json += '}';
  }
  json += "]}";
  if (static_cast<int64_t>(json.size()) > max_json_bytes) {
    return AnswerHasTooMuchJson(max_json_bytes);
  }
  return answer;
}

}  // namespace rapt::oip
