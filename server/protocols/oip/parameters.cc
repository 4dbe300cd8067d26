#include "server/protocols/oip/parameters.h"

#include <algorithm>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt::oip {
namespace {

using inference::InferParameter;

// Returns nullopt if it is not set.
std::optional<GivenValue> GivenOf(const InferParameter& value) {
  switch (value.parameter_choice_case()) {
    case InferParameter::kBoolParam:
      return value.bool_param();
    case InferParameter::kInt64Param:
      return int64_t{value.int64_param()};
    case InferParameter::kStringParam:
      return absl::string_view(value.string_param());
    case InferParameter::kDoubleParam:
      return value.double_param();
    case InferParameter::kUint64Param:
      return uint64_t{value.uint64_param()};
    case InferParameter::PARAMETER_CHOICE_NOT_SET:
      break;
  }
  return std::nullopt;
}

absl::Status WrongValue(absl::string_view name, const InferParameter& value,
                        absl::string_view allowed) {
  const std::optional<GivenValue> given = GivenOf(value);
  return Invalid("parameter ", name, " is ", given ? ToString(*given) : "not set", "; it must be ",
                 allowed);
}

template <typename T>
absl::Status Read(absl::string_view name, const InferParameter& value, T& out) {
  const std::optional<GivenValue> given = GivenOf(value);
  if (given && ReadValue(*given, out)) return absl::OkStatus();
  return WrongValue(name, value, kAllowedValues<T>);
}

template <typename T>
absl::Status Read(absl::string_view name, const InferParameter& value, std::optional<T>& out) {
  return Read(name, value, out.emplace());
}

// One of an enumeration's names, which are in the order of its values.
template <typename Enum>
absl::Status ReadName(absl::string_view name, const InferParameter& value,
                      absl::Span<const absl::string_view> names, Enum& out) {
  const std::optional<GivenValue> given = GivenOf(value);
  uint8_t choice = 0;
  if (!given || !ReadValue(*given, names, choice)) {
    return WrongValue(name, value, AllowedValues(names));
  }
  out = static_cast<Enum>(choice);
  return absl::OkStatus();
}

absl::Status ReadTimeout(absl::string_view name, const InferParameter& value,
                         std::chrono::microseconds& out) {
  int64_t timeout_us = 0;
  if (!Read(name, value, timeout_us).ok() || timeout_us < 0) {
    return WrongValue(name, value, "a number of microseconds, at least 0");
  }
  out = std::chrono::microseconds(timeout_us);
  return absl::OkStatus();
}

absl::Status ReadPriority(absl::string_view name, const InferParameter& value, uint64_t& out) {
  int64_t priority = 0;
  if (!Read(name, value, priority).ok() || priority < 0) {
    return WrongValue(name, value, "0 (default), 1 (most urgent) or a larger integer");
  }
  out = static_cast<uint64_t>(priority);
  return absl::OkStatus();
}

// Reads a parameter into the field of its name.
class ParameterReader {
 public:
  // Appends every name that was compared without a match to `others`, if given.
  ParameterReader(absl::string_view name, const InferParameter& value, absl::Status& status,
                  std::vector<absl::string_view>* others = nullptr)
      : name_(name), value_(value), status_(status), others_(others) {}

  // Return false unless the parameter has this name.
  template <typename T>
  bool Is(absl::string_view name, T& out) const {
    if (!IsNamed(name)) return false;
    status_ = Read(name_, value_, out);
    return true;
  }
  template <typename Enum>
  bool Is(absl::string_view name, absl::Span<const absl::string_view> names, Enum& out) const {
    if (!IsNamed(name)) return false;
    status_ = ReadName(name_, value_, names, out);
    return true;
  }
  // `read` is called with the name, the value and `out`.
  template <typename Reader, typename T>
  bool IsBy(Reader read, absl::string_view name, T& out) const {
    if (!IsNamed(name)) return false;
    status_ = read(name_, value_, out);
    return true;
  }

 private:
  bool IsNamed(absl::string_view name) const {
    if (name_ == name) return true;
    if (others_ != nullptr) others_->push_back(name);
    return false;
  }

  const absl::string_view name_;
  const InferParameter& value_;
  absl::Status& status_;
  std::vector<absl::string_view>* const others_;
};

// Read the parameters of a model's call. They return false if the parameter is none of them.

bool ReadOf(const ParameterReader& parameter, std::optional<Dropout>& out) {
  Dropout dropout = out.value_or(Dropout{});
  const bool is_its = parameter.Is("dropout_probability", dropout.probability) ||
                      parameter.Is("dropout_seed", dropout.seed);
  if (is_its) out = dropout;
  return is_its;
}

absl::Status Set(const AttributeSchema& attribute, const InferParameter& value, SchemaCall& call) {
  const std::optional<GivenValue> given = GivenOf(value);
  if (!given) return WrongValue(attribute.name, value, AllowedValues(attribute));
  const absl::StatusOr<AttributeValue> read = ReadValue(attribute, *given);
  if (!read.ok()) return Invalid("parameter ", read.status().message());
  attribute.set(call, *read);
  return absl::OkStatus();
}

// Of an operator.
bool ReadOf(const ParameterReader& parameter, const OperatorSchema& schema, SchemaCall& call) {
  return std::any_of(schema.attributes.begin(), schema.attributes.end(), [&](const auto& row) {
    const auto set = [&row](absl::string_view /*name*/, const InferParameter& value,
                            SchemaCall& out) { return Set(row, value, out); };
    return parameter.IsBy(set, row.name, call);
  });
}

// Triton's longest one.
constexpr size_t kMaxSequenceIdBytes = 128;

// As in Triton, 0 and "" mean that there is none, and a negative number is that modulo 2^64.
absl::Status ReadSequenceId(absl::string_view name, const InferParameter& value,
                            std::optional<cache::SequenceId>& out) {
  if (value.has_string_param() && value.string_param().size() <= kMaxSequenceIdBytes) {
    if (!value.string_param().empty()) out.emplace(value.string_param());
    return absl::OkStatus();
  }
  if (!value.has_int64_param() && !value.has_uint64_param()) {
    return WrongValue(
        name, value,
        absl::StrCat("a 64-bit integer, or a string of at most ", kMaxSequenceIdBytes, " bytes"));
  }
  const uint64_t number =
      value.has_uint64_param() ? value.uint64_param() : static_cast<uint64_t>(value.int64_param());
  if (number != 0) out.emplace(number);
  return absl::OkStatus();
}

// Of every model with sequences.
bool ReadOf(const ParameterReader& parameter, SessionParameters& out) {
  return parameter.IsBy(ReadSequenceId, "sequence_id", out.id) ||
         parameter.Is("sequence_start", out.starts) || parameter.Is("sequence_end", out.ends) ||
         parameter.Is("position", out.position) ||
         parameter.Is("storage", kStorageNames, out.storage);
}

absl::Status ReadCausality(absl::string_view name, const InferParameter& value, bool& out) {
  absl::Status status = Read(name, value, out);
  if (!status.ok() || out) return status;
  return WrongValue(name, value, "true; attention_session is causal");
}

bool ReadOfSession(const ParameterReader& parameter, Calls& calls) {
  OperatorCall& attention = *calls.attention;
  return parameter.IsBy(ReadCausality, "is_causal", attention.is_causal) ||
         parameter.Is("scale", attention.scale) || parameter.Is("softcap", attention.softcap) ||
         parameter.Is("q_num_heads", attention.q_num_heads) ||
         parameter.Is("kv_num_heads", attention.kv_num_heads) ||
         parameter.Is("layer", calls.session.layer) ||
         parameter.Is("layers", calls.session.layers) || ReadOf(parameter, calls.session);
}

bool ReadOwn(const ParameterReader& parameter, const ModelId& model, Calls& calls) {
  if (calls.call != nullptr) return ReadOf(parameter, *model.schema, *calls.call);
  if (!calls.layer) return ReadOfSession(parameter, calls);
  return ReadOf(parameter, calls.layer->dropout) || ReadOf(parameter, calls.session) ||
         parameter.Is("is_causal", calls.layer->is_causal) ||
         parameter.Is("average_attn_weights", calls.average_attn_weights);
}

// The same with the parameters of every model.
bool ReadAny(const ParameterReader& parameter, const ModelId& model, Calls& calls,
             Parameters& parameters) {
  return ReadOwn(parameter, model, calls) ||
         parameter.IsBy(ReadTimeout, "timeout", parameters.timeout) ||
         parameter.IsBy(ReadPriority, "priority", parameters.priority);
}

absl::Status UnknownParameter(absl::string_view name, const InferParameter& value,
                              const ModelId& model) {
  absl::Status unused;
  Calls calls(model);
  Parameters parameters;
  std::vector<absl::string_view> names;
  ReadAny(ParameterReader(name, value, unused, &names), model, calls, parameters);
  return Invalid("unknown request parameter ", name, "; the parameters are ",
                 absl::StrJoin(names, ", "));
}

}  // namespace

bool IsIgnoredParameter(absl::string_view name) {
  constexpr absl::string_view kIgnored[] = {
      "sequence_id",       "sequence_start", "sequence_end", "headers",
      "content_type",         // of MLServer
      "binary_data_output"};  // KServe's client sends it over gRPC as well
  return std::find(std::begin(kIgnored), std::end(kIgnored), name) != std::end(kIgnored) ||
         absl::StartsWith(name, "triton_");
}

absl::StatusOr<Parameters> ReadParameters(const ParameterMap& map, const ModelId& model,
                                          Calls& calls) {
  Parameters parameters;
  for (const auto& [name, value] : map) {
    absl::Status status;
    if (!ReadAny(ParameterReader(name, value, status), model, calls, parameters) &&
        !IsIgnoredParameter(name)) {
      status = UnknownParameter(name, value, model);
    }
    if (!status.ok()) return status;
  }
  return parameters;
}

absl::StatusOr<std::optional<SharedReference>> ReadTensorParameters(const std::string& tensor,
                                                                    const ParameterMap& map) {
  SharedReference reference;
  bool is_shared = false;
  bool has_size = false;
  for (const auto& [name, value] : map) {
    absl::Status status;
    if (name == kRegionParameter && value.has_string_param()) {
      reference.region = value.string_param();
    } else if (name == kRegionParameter) {
      status = WrongValue(name, value, "a string");
    } else if (name == kRegionOffsetParameter) {
      status = Read(name, value, reference.offset);
    } else if (name == kRegionBytesParameter) {
      status = Read(name, value, reference.byte_size);
      has_size = true;
    } else {
      continue;
    }
    is_shared = true;
    if (!status.ok()) {
      return absl::Status(status.code(), absl::StrCat(tensor, ": ", status.message()));
    }
  }
  if (!is_shared) return std::nullopt;
  if (!reference.region.empty() && has_size) return reference;
  return Invalid(tensor, " is in shared memory; it needs both ", kRegionParameter, " and ",
                 kRegionBytesParameter);
}

}  // namespace rapt::oip
