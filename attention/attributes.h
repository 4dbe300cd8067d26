// The table of scalar attributes: the names of each in every interface, the members of a call and
// its problem that hold it, and the allowed values.
#ifndef RAPT_ATTENTION_ATTRIBUTES_H_
#define RAPT_ATTENTION_ATTRIBUTES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "rapt/choices.h"

namespace rapt {

struct AttributeSchema;
struct OperatorCall;
struct Problem;

enum class Attribute : uint8_t {
  kQueryHeads,
  kKvHeads,
  kCausal,
  kLeftWindow,
  kRightWindow,
  kScale,
  kSoftcap,
  kDropoutProbability,
  kAlibi,
  kBidirectional,
  kMaxDistance,
  kValueHeadSize,
  kInterleaved,
  kRotaryDim,
  kRopeTheta,
  kRotaryKeys,
  kScoreFunction,
  kNormalizer,
  kAlpha,
  kBlockQ,
  kBlockK,
  kPrefixKeys,

  kEnd,  // not an attribute
};
inline constexpr auto kAttributes = static_cast<size_t>(Attribute::kEnd);

template <typename T>
class AttributeMap {
 public:
  constexpr T& operator[](Attribute attribute) { return values_[static_cast<size_t>(attribute)]; }
  constexpr const T& operator[](Attribute attribute) const {
    return values_[static_cast<size_t>(attribute)];
  }

 private:
  std::array<T, kAttributes> values_ = {};
};

// The members that hold an attribute. Both null: a member of Problem::dropout. `problem` alone is
// null for an attribute that only describes shapes.
template <typename T>
struct AttributeField {
  T OperatorCall::*call = nullptr;
  T Problem::*problem = nullptr;
};

struct AttributeInfo {
  Attribute attribute;
  // The parameter of the Open Inference Protocol: the ONNX operator's attribute. For an attribute
  // that the operator lacks, the same as `c`.
  absl::string_view onnx;
  absl::string_view native;  // the field of rapt.v1.AttendRequest
  absl::string_view c;       // the field of rapt_problem; also in the text of a problem
  std::variant<AttributeField<bool>, AttributeField<int64_t>, AttributeField<double>,
               AttributeField<std::optional<bool>>, AttributeField<std::optional<int64_t>>,
               AttributeField<std::optional<double>>, AttributeField<ScoreFunction>,
               AttributeField<Normalizer>>
      field = {};
  // Of an enumeration: the name of each value, in their order; the default is first.
  absl::Span<const absl::string_view> choices = {};
  // The range of the number in the problem, and the same in words: "it must be `allowed`".
  double least = 0;
  double most = 0;
  absl::string_view allowed = {};
  // The number that stands for absence. rapt.v1 and C, where a caller leaves the field out instead,
  // accept only larger ones.
  std::optional<int64_t> absent = std::nullopt;
  // The flag of `rapt attend`. Null: none, or one that client/cli defines itself.
  const char* flag = nullptr;
  const char* help = nullptr;  // of flags, also of `rapt run attention`
};

absl::Span<const AttributeInfo> Attributes();

// Those with a member of OperatorCall, in the table of the operator.
std::vector<AttributeSchema> AttentionAttributes();

}  // namespace rapt

#endif  // RAPT_ATTENTION_ATTRIBUTES_H_
