#include "server/protocols/oip/json_codec.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "attention/half.h"
#include "base/checked_math.h"
#include "base/json_string.h"
#include "server/protocols/oip/parameters.h"
#include "server/rejection.h"

namespace rapt::oip {
namespace {

using InputTensor = inference::ModelInferRequest::InferInputTensor;
using OutputTensor = inference::ModelInferRequest::InferRequestedOutputTensor;
using Scalar = std::variant<bool, int64_t, uint64_t, double, absl::string_view>;

constexpr char kBinarySize[] = "binary_data_size";         // of an input or of an answer's output
constexpr char kBinary[] = "binary_data";                  // of a requested output
constexpr char kBinaryByDefault[] = "binary_data_output";  // of a request

constexpr int kMaxNesting = 16;  // of data
// Ample. Their places in memory are larger than their text.
constexpr int kMaxTensors = 64;
constexpr int kMaxParameters = 256;
constexpr int kMaxRank = 64;

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

std::string TextOf(const Scalar& value) {
  if (const bool* const flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* const text = std::get_if<absl::string_view>(&value)) {
    return absl::StrCat("'", text->substr(0, 64), "'");
  }
  if (const auto* const real = std::get_if<double>(&value)) return absl::StrCat(*real);
  if (const auto* const integer = std::get_if<int64_t>(&value)) return absl::StrCat(*integer);
  return absl::StrCat(std::get<uint64_t>(value));
}

// Returns the integer; nullopt if it is none or exceeds int64_t.
std::optional<int64_t> IntegerOf(const Scalar& value) {
  if (const auto* const integer = std::get_if<int64_t>(&value)) return *integer;
  const auto* const natural = std::get_if<uint64_t>(&value);
  if (natural == nullptr || *natural > std::numeric_limits<int64_t>::max()) return std::nullopt;
  return static_cast<int64_t>(*natural);
}

// Returns the real number, which may be "NaN", "Infinity" or "-Infinity", as in ProtoJSON.
std::optional<double> RealOf(const Scalar& value) {
  if (const auto* const real = std::get_if<double>(&value)) return *real;
  if (const auto* const integer = std::get_if<int64_t>(&value)) {
    return static_cast<double>(*integer);
  }
  if (const auto* const natural = std::get_if<uint64_t>(&value)) {
    return static_cast<double>(*natural);
  }
  const auto* const text = std::get_if<absl::string_view>(&value);
  if (text == nullptr) return std::nullopt;
  if (*text == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (*text == "Infinity") return std::numeric_limits<double>::infinity();
  if (*text == "-Infinity") return -std::numeric_limits<double>::infinity();
  return std::nullopt;
}

// Stores a value; returns false if the type does not have it.
using Store = bool (*)(const Scalar& value, std::byte* place);

template <typename T>
bool Put(T value, std::byte* place) {
  std::memcpy(place, &value, sizeof(value));
  return true;
}

template <typename Bits, Bits (*convert)(double), double (*back)(Bits)>
bool StoreReal(const Scalar& value, std::byte* place) {
  const std::optional<double> real = RealOf(value);
  if (!real) return false;
  const Bits bits = convert(*real);
  return std::isinf(back(bits)) == std::isinf(*real) && Put(bits, place);
}

float ToFloat(double value) {
  // A conversion of what no float rounds to is undefined.
  constexpr double kLargest = 0x1.ffffffp127;
  if (std::isfinite(value) && std::abs(value) >= kLargest) {
    return std::copysign(std::numeric_limits<float>::infinity(),
                         static_cast<float>(value > 0) - 0.5F);
  }
  return static_cast<float>(value);
}
double FromFloat(float value) { return value; }
double Same(double value) { return value; }

template <typename T>
bool StoreInteger(const Scalar& value, std::byte* place) {
  const std::optional<int64_t> integer = IntegerOf(value);
  if (!integer || *integer < std::numeric_limits<T>::min() ||
      *integer > std::numeric_limits<T>::max()) {
    return false;
  }
  return Put(static_cast<T>(*integer), place);
}

bool StoreBool(const Scalar& value, std::byte* place) {
  if (const bool* const flag = std::get_if<bool>(&value)) return Put<uint8_t>(*flag ? 1 : 0, place);
  const std::optional<int64_t> integer = IntegerOf(value);
  if (!integer || *integer < 0 || *integer > 1) return false;
  return Put(static_cast<uint8_t>(*integer), place);
}

struct NumberType {
  Store store;
  absl::string_view allowed;
};

NumberType NumberTypeOf(DType dtype) {
  constexpr absl::string_view kReal =
      R"(it must be a number within the type, "NaN", "Infinity" or "-Infinity")";
  constexpr absl::string_view kInteger = "it must be an integer within the type";
  switch (dtype) {
    case DType::kFloat32:
      return {StoreReal<float, ToFloat, FromFloat>, kReal};
    case DType::kFloat16:
      return {StoreReal<uint16_t, DoubleToHalf, HalfToDouble>, kReal};
    case DType::kBFloat16:
      return {StoreReal<uint16_t, DoubleToBFloat16, BFloat16ToDouble>, kReal};
    case DType::kFloat64:
      return {StoreReal<double, Same, Same>, kReal};
    case DType::kBool:
      return {StoreBool, "it must be true, false, 0 or 1"};
    case DType::kInt64:
      return {StoreInteger<int64_t>, kInteger};
    case DType::kInt32:
      return {StoreInteger<int32_t>, kInteger};
    case DType::kInt8:
      return {StoreInteger<int8_t>, kInteger};
  }
  return {};
}

// What is known of an input apart from its message.
struct InputState {
  bool has_shape = false;
  bool has_datatype = false;
  bool has_data = false;
  int64_t count = 0;   // values so far
  int64_t wanted = 0;  // by its shape
  std::optional<DType> dtype;
  PooledBuffer place;  // null: values are only counted
  std::optional<int64_t> binary_size;
};

// Reads the JSON. The numbers of an input are stored while they are read if its type and shape are
// known by then, from the text before them or from another Reader's pass.
class Reader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  Reader(int64_t json_bytes, BufferPool& pool, const inference::ModelInferRequest* known)
      : pool_(pool), known_(known), numbers_left_(json_bytes / 2) {}

  absl::Status Read(absl::string_view json) {
    nlohmann::json::sax_parse(json.begin(), json.end(), this);
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
      case Place::kParameters:
        return "a parameter";
      default:
        return "the request";
    }
  }
  bool WrongField() {
    absl::string_view fields = "id, parameters, inputs, outputs";
    if (place() == Place::kInput) fields = "name, shape, datatype, parameters, data";
    if (place() == Place::kOutput) fields = "name, parameters";
    return Fail(Invalid(Where(), " has a field '", absl::string_view(key_).substr(0, 64),
                        "' that is unknown or has the wrong type; the fields are ", fields));
  }

 public:
  // For the parser.
  bool null() override { return OnOther("null"); }
  bool boolean(bool value) override { return OnScalar(value); }
  bool number_integer(int64_t value) override { return OnScalar(value); }
  bool number_unsigned(uint64_t value) override { return OnScalar(value); }
  bool number_float(double value, const std::string&) override { return OnScalar(value); }
  bool string(std::string& value) override { return OnScalar(absl::string_view(value)); }
  bool binary(binary_t&) override { return false; }  // not in JSON

 private:
  bool Twice() { return Fail(Invalid(InputName(), " has ", key_, " twice")); }

  bool TooMany(int most, absl::string_view what) {
    return Fail(Invalid("the request has more than ", most, " ", what));
  }

  bool OnOther(absl::string_view what) {
    if (place() == Place::kRequest || place() == Place::kInput || place() == Place::kOutput) {
      return WrongField();
    }
    if (place() == Place::kData || place() == Place::kShape) {
      return Fail(Invalid(InputName(), " has ", what,
                          place() == Place::kData ? " in data; it must have numbers"
                                                  : " in shape; it must have integers"));
    }
    if (place() == Place::kParameters) {
      return Fail(Invalid("parameter ", key_.substr(0, 64), " is ", what,
                          "; it must be a bool, a number or a string"));
    }
    return Fail(Invalid("the JSON has ", what, " where an object or a field is expected"));
  }

  bool BeginData() {
    nesting_ = 0;
    InputState& state = inputs_.back();
    if (std::exchange(state.has_data, true)) return Twice();
    const InputTensor* spec = &input();
    if (known_ != nullptr) {
      spec = &known_->inputs(result_->message.inputs_size() - 1);
    } else if (!state.has_shape || !state.has_datatype) {
      needs_another_pass_ = true;
      return true;
    }
    state.dtype = ParseDatatype(spec->datatype());
    if (!state.dtype) return true;  // the codec's error names the types
    const absl::StatusOr<int64_t> bytes =
        ByteSize(InputName(), {*state.dtype, Shape(spec->shape().begin(), spec->shape().end())});
    if (!bytes.ok()) return Fail(bytes.status());
    state.wanted = *bytes / SizeOf(*state.dtype);
    // If the JSON has not that many numbers, the count of an input is wrong.
    if (state.wanted > numbers_left_) return true;
    numbers_left_ -= state.wanted;
    state.place = pool_.Take(*bytes);
    return true;
  }

  bool OnScalar(const Scalar& value) {
    const auto* const text = std::get_if<absl::string_view>(&value);
    switch (place()) {
      case Place::kRequest:
        if (key_ != "id" || text == nullptr) return WrongField();
        result_->message.set_id(text->data(), text->size());
        return true;
      case Place::kInput:
        if (text == nullptr) return WrongField();
        if (key_ == "name") {
          input().set_name(text->data(), text->size());
        } else if (key_ == "datatype") {
          if (std::exchange(inputs_.back().has_datatype, true)) return Twice();
          input().set_datatype(text->data(), text->size());
        } else {
          return WrongField();
        }
        return true;
      case Place::kOutput:
        if (key_ != "name" || text == nullptr) return WrongField();
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

  bool OnExtent(const Scalar& value) {
    if (input().shape_size() == kMaxRank) return TooMany(kMaxRank, "extents in a shape");
    const std::optional<int64_t> extent = IntegerOf(value);
    if (!extent) {
      return Fail(Invalid(InputName(), " has ", TextOf(value), " in shape; it must have integers"));
    }
    input().add_shape(*extent);
    return true;
  }

  bool OnParameter(const Scalar& value) {
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

  bool OnNumber(const Scalar& value) {
    InputState& state = inputs_.back();
    ++state.count;
    if (state.place.data() == nullptr || state.count > state.wanted) return true;
    const NumberType type = NumberTypeOf(*state.dtype);
    if (type.store(value, state.place.data() + (state.count - 1) * SizeOf(*state.dtype)))
      return true;
    return Fail(Invalid(InputName(), " has ", TextOf(value), " in data of ", NameOf(*state.dtype),
                        "; ", type.allowed));
  }

 public:
  // For the parser.
  bool key(std::string& name) override {
    key_ = std::move(name);
    return true;
  }

  bool start_object(size_t) override {
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
        return key_ == "parameters" ? Enter(Place::kParameters) : WrongField();
      default:
        return OnOther("an object");
    }
  }

  bool end_object() override {
    if (place() == Place::kRequest) {
      for (const std::optional<bool>& asked : asked_) {
        result_->binary.named.push_back(asked.value_or(result_->binary.all));
      }
    }
    return Leave();
  }

  bool start_array(size_t) override {
    if (place() == Place::kRequest && key_ == "inputs") return Enter(Place::kInputs);
    if (place() == Place::kRequest && key_ == "outputs") return Enter(Place::kOutputs);
    if (place() == Place::kInput && key_ == "shape") {
      if (std::exchange(inputs_.back().has_shape, true)) return Twice();
      return Enter(Place::kShape);
    }
    if (place() == Place::kInput && key_ == "data") {
      return BeginData() && Enter(Place::kData);
    }
    if (place() != Place::kData) return OnOther("an array");
    if (++nesting_ < kMaxNesting) return Enter(Place::kData);
    return Fail(Invalid(InputName(), " has data in more than ", kMaxNesting, " levels of arrays"));
  }

  bool end_array() override {
    const Place left = place();
    Leave();
    if (left == Place::kData && place() == Place::kData) --nesting_;
    return true;
  }

  bool parse_error(size_t, const std::string&,
                   const nlohmann::json::exception& exception) override {
    absl::string_view what = exception.what();
    // "[json.exception.out_of_range.406] number overflow parsing '1e400'"
    what = what.substr(what.find("] ") + 2);
    return Fail(place() == Place::kData ? Invalid(InputName(), " has invalid data: ", what)
                                        : Invalid("the JSON is invalid: ", what));
  }

 private:
  BufferPool& pool_;
  const inference::ModelInferRequest* const known_;  // of another pass
  std::shared_ptr<JsonInfer> result_ = std::make_shared<JsonInfer>();
  std::vector<InputState> inputs_;
  std::vector<std::optional<bool>> asked_;  // by output, whether it is to be binary
  std::vector<Place> stack_;
  std::string key_;
  // That may still get places. A number and what separates it from the next take 2 bytes.
  int64_t numbers_left_;
  int nesting_ = 0;  // of data
  int parameters_ = 0;
  bool needs_another_pass_ = false;
  absl::Status status_;
};

absl::Status CheckCount(const InputTensor& input, const InputState& state) {
  if (!state.dtype || state.count == state.wanted) return absl::OkStatus();
  return Invalid("input ", input.name(), " has ", state.count, " values in data; its shape ",
                 ToString(Shape(input.shape().begin(), input.shape().end())), " needs ",
                 state.wanted);
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
      if (absl::Status status = CheckCount(input, state); !status.ok()) return status;
      fields.raw.emplace_back(state.place.data(), state.place.size());
      fields.numbers.push_back(std::move(state.place));
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
  }
}

absl::Status TooMuchJson(int64_t most) {
  return Reject(Rejection::kTooLarge, absl::StatusCode::kResourceExhausted,
                absl::StrCat("the answer has more than ", most,
                             " bytes of JSON, the limit of --max_json_bytes; ask for binary data"));
}

absl::Status AppendData(const OutputBuffer& output, DType dtype, int64_t most, std::string& out) {
  const auto count = static_cast<int64_t>(output.bytes.size()) / SizeOf(dtype);
  for (int64_t i = 0; i < count; ++i) {
    if (i > 0) out += ',';
    AppendElement(dtype, output.bytes.data(), i, out);
    if (static_cast<int64_t>(out.size()) > most) return TooMuchJson(most);
  }
  return absl::OkStatus();
}

void AppendParameters(const SharedReference& shared, int64_t bytes, std::string& out) {
  absl::StrAppend(&out, ",\"parameters\":{\"", kRegionParameter, "\":");
  AppendJsonString(shared.region, out);
  absl::StrAppend(&out, ",\"", kRegionOffsetParameter, "\":", shared.offset, ",\"",
                  kRegionBytesParameter, "\":", bytes, "}");
}

}  // namespace

absl::StatusOr<std::shared_ptr<JsonInfer>> ReadJsonInfer(const MessageBytes& body,
                                                         int64_t json_bytes, BufferPool& pool) {
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
  absl::Status status = first.Read(json);
  if (!status.ok()) return status;
  std::optional<Reader> second;
  if (first.needs_another_pass()) {
    for (InputState& state : first.inputs()) state.place = {};
    status = second.emplace(json_bytes, pool, &first.message()).Read(json);
    if (!status.ok()) return status;
  }
  Reader& last = second ? *second : first;
  std::shared_ptr<JsonInfer> result = last.TakeResult();
  status = Locate(body, json_bytes, last.inputs(), *result);
  if (!status.ok()) return status;
  return result;
}

absl::StatusOr<JsonAnswer> EncodeJsonInfer(const BinaryOutputs& binary, const DecodedInfer& decoded,
                                           const Result& result, int64_t max_json_bytes) {
  JsonAnswer answer;
  std::string& json = answer.json;
  json = "{";
  if (!decoded.id.empty()) {
    json += "\"id\":";
    AppendJsonString(decoded.id, json);
    json += ',';
  }
  absl::StrAppend(&json, "\"model_name\":\"", NameOf(decoded.model), "\",\"model_version\":\"",
                  kModelVersion, "\",\"outputs\":[");
  for (size_t i = 0; i < decoded.outputs.size(); ++i) {
    const RequestedOutput& output = decoded.outputs[i];
    const OutputBuffer& buffer = result.outputs[output.role];
    const auto bytes = static_cast<int64_t>(buffer.bytes.size());
    absl::StrAppend(&json, i > 0 ? "," : "", "{\"name\":\"", output.name, "\",\"datatype\":\"",
                    NameOf(output.spec.dtype), "\",\"shape\":[",
                    absl::StrJoin(output.spec.shape, ","), "]");
    if (output.shared) {
      AppendParameters(*output.shared, bytes, json);
    } else if (binary.IsBinary(i)) {
      absl::StrAppend(&json, ",\"parameters\":{\"", kBinarySize, "\":", bytes, "}");
      answer.binary.push_back(buffer);
    } else {
      json += ",\"data\":[";
      absl::Status status = AppendData(buffer, output.spec.dtype, max_json_bytes, json);
      if (!status.ok()) return status;
      json += ']';
    }
    json += '}';
  }
  json += "]}";
  if (static_cast<int64_t>(json.size()) > max_json_bytes) return TooMuchJson(max_json_bytes);
  return answer;
}

}  // namespace rapt::oip
