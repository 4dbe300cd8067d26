// An operator as a table: its names, tensors and attributes. Interfaces read and describe its calls
// by the table.
#ifndef RAPT_ATTENTION_OPERATOR_SCHEMA_H_
#define RAPT_ATTENTION_OPERATOR_SCHEMA_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/attribute_value.h"
#include "attention/bound_call.h"
#include "attention/roles.h"
#include "rapt/choices.h"

namespace rapt {

// A call of an operator, before it is checked.
class SchemaCall {
 public:
  virtual ~SchemaCall() = default;

  virtual InputMap<std::optional<TensorSpec>>& inputs() = 0;
  // Checks the call. InvalidArgument as the operator's function has it.
  virtual absl::StatusOr<BoundCall> Bind() const = 0;
};

// With the struct of the operator.
template <typename Call>
class TypedCall : public SchemaCall {
 public:
  InputMap<std::optional<TensorSpec>>& inputs() final { return call.inputs; }

  Call call;
};

struct TensorSchema {
  absl::string_view name;
  Slot slot = Role::kQ;  // in Arguments
  DType dtype;           // if several are accepted, the one that tools should use
  int rank;              // likewise
  bool required = false;
  bool unlisted = false;  // as RoleInfo::unlisted
  int64_t size = -1;      // of the last axis; -1: any
  // Of an output that a call has only if it is asked for: asks for it.
  void (*want)(SchemaCall&) = nullptr;
  // Of one that an attribute asks for: the attribute.
  absl::string_view follows = {};
  absl::string_view help = {};
  bool any_rank = false;  // not only `rank`
  // The attribute with which a required input, or an output, is absent.
  absl::string_view replaced_by = {};
  // Of an operator with a state, whose calls may come as streams of messages: each message has its
  // own part of this input, whose axis 1 is of tokens, or of key lengths those of its tokens.
  bool per_token = false;
  // Of an output that is the state after the tokens: the input that continues from it.
  std::optional<Slot> next_input = std::nullopt;
};

// A choice is the index of its name, uint8_t.
using AttributeValue = std::variant<bool, int64_t, uint64_t, double, DType, uint8_t>;

struct AttributeSchema {
  absl::string_view name;
  AttributeValue kind;  // a value of the attribute's type
  absl::Span<const absl::string_view> choices;
  void (*set)(SchemaCall&, const AttributeValue&);  // REQUIRES: a value of that type
  absl::string_view help;
  bool required = false;
  bool takes_value = false;  // of a bool: absent is not false
  // Of a whole number: the range, and the same in words.
  int64_t least = std::numeric_limits<int64_t>::min();
  int64_t most = std::numeric_limits<int64_t>::max();
  absl::string_view allowed = {};
  // Why values other than the default are not for streams, which see no tokens but their own.
  absl::string_view needs_all = {};
};

struct OperatorSchema {
  absl::string_view name;
  // Of rapt.v1.AttentionService. Empty: attention and its backward pass, which have a codec of
  // their own.
  absl::string_view method;
  absl::string_view help;  // a sentence
  absl::Span<const TensorSchema> inputs, outputs;
  absl::Span<const AttributeSchema> attributes;
  std::unique_ptr<SchemaCall> (*new_call)();
  // Asks for the outputs that are the state of the call. Null: the operator has no state.
  void (*want_state)(SchemaCall&) = nullptr;
};

absl::Span<const OperatorSchema* const> OperatorSchemas();

// Their names: "rotary_embedding, positional_encoding, ..."
std::string OperatorNames();

// Returns null if there is none of this name.
const OperatorSchema* FindOperator(absl::string_view name);

// "a whole number of 64 bits", "reformer or simple"
std::string AllowedValues(const AttributeSchema& attribute);

// Returns the value as one of the attribute. InvalidArgument names the attribute, `given` and the
// allowed values.
absl::StatusOr<AttributeValue> ReadValue(const AttributeSchema& attribute, const GivenValue& given);

// The error of a call that asks for an output but does not have it.
absl::Status NoOutput(const TensorSchema& output);

// --- Rows of the tables ---

constexpr TensorSchema TensorRow(absl::string_view name, Slot slot, int rank,
                                 absl::string_view help, DType dtype = DType::kFloat32) {
  TensorSchema row = {name, slot, dtype, rank};
  row.help = help;
  return row;
}
template <typename Row>
constexpr Row Required(Row row) {
  row.required = true;
  return row;
}
constexpr AttributeSchema OnByDefault(AttributeSchema row) {
  row.takes_value = true;
  return row;
}
constexpr TensorSchema PerToken(TensorSchema row) {
  row.per_token = true;
  return row;
}
constexpr TensorSchema StateFor(Slot next_input, TensorSchema row) {
  row.next_input = next_input;
  return row;
}
constexpr AttributeSchema NeedsAll(absl::string_view why, AttributeSchema row) {
  row.needs_all = why;
  return row;
}
constexpr TensorSchema OfAnyRank(TensorSchema row) {
  row.any_rank = true;
  return row;
}

template <typename Call, typename T>
Call CallOfMember(T Call::*);
template <typename Call, typename T>
T TypeOfMember(T Call::*);
template <typename T>
T WithoutOptional(const T&);
template <typename T>
T WithoutOptional(const std::optional<T>&);

template <auto kMember>
constexpr AttributeSchema AttributeOf(absl::string_view name, absl::string_view help) {
  using Call = decltype(CallOfMember(kMember));
  using Type = decltype(WithoutOptional(TypeOfMember(kMember)));
  constexpr bool kIsChoice = std::is_enum_v<Type> && !std::is_same_v<Type, DType>;
  using Value = std::conditional_t<kIsChoice, uint8_t, Type>;
  AttributeSchema row = {name,
                         Value(),
                         {},
                         [](SchemaCall& call, const AttributeValue& value) {
                           static_cast<TypedCall<Call>&>(call).call.*kMember =
                               static_cast<Type>(std::get<Value>(value));
                         },
                         help};
  if constexpr (kIsChoice) row.choices = kNamesOf<Type>;
  return row;
}

// Makes calls that `kMake` checks.
template <typename Call, auto kMake>
std::unique_ptr<SchemaCall> NewCall() {
  class Made final : public TypedCall<Call> {
    absl::StatusOr<BoundCall> Bind() const override {
      absl::StatusOr<std::shared_ptr<const TensorOperator>> op = kMake(this->call);
      if (!op.ok()) return op.status();
      return BoundCall(*std::move(op));
    }
  };
  return std::make_unique<Made>();
}

// An output that a call has if this member is true.
template <auto kMember>
constexpr TensorSchema WantedBy(TensorSchema row) {
  row.want = [](SchemaCall& call) {
    static_cast<TypedCall<decltype(CallOfMember(kMember))>&>(call).call.*kMember = true;
  };
  return row;
}

}  // namespace rapt

#endif  // RAPT_ATTENTION_OPERATOR_SCHEMA_H_
