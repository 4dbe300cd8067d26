// The table of tensor roles: each input and output of an attention call, its name in every
// interface, its axes, type and whether a problem has it. Code that handles every input or every
// output iterates over the table, so that a new tensor is a row here.
#ifndef RAPT_ATTENTION_ROLES_H_
#define RAPT_ATTENTION_ROLES_H_

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "absl/strings/string_view.h"
#include "attention/tensor_view.h"

namespace rapt {

struct Problem;

// Inputs first. Inputs and outputs are each in the order of the ONNX operator, followed by
// extensions and by those of the backward pass, Problem::backward.
enum class Role : uint8_t {
  kQ,
  kK,
  kV,
  kMask,
  kPastKey,
  kPastValue,
  kKeyLengths,
  kBias,
  kHeadSink,
  kAlibiSlopes,
  kBiasTable,
  kRelativeBias,
  kRelativeKeys,
  kRelativeValues,
  kRelativeQuery,
  kCosCache,
  kSinCache,
  kPositionIds,
  kKeyPositionIds,
  kAdditiveWeight,
  kHeadAlpha,
  kBlockMask,
  kSelectedIndices,
  kGlobalMask,

  kOutputGradient,  // dY
  kForwardOutput,   // Y
  kForwardLse,      // lse
  kLseGradient,     // dlse

  kY,
  kPresentKey,
  kPresentValue,
  kScores,
  kLse,

  kDQ,
  kDK,
  kDV,
  kDMask,
  kDPastKey,
  kDPastValue,
  kDBias,
  kDHeadSink,
  kDAlibiSlopes,
  kDBiasTable,
  kDRelativeBias,
  kDRelativeKeys,
  kDRelativeValues,
  kDRelativeQuery,
  kDAdditiveWeight,

  kEnd,  // not a role
};

// The roles in [kBegin, kEnd).
template <Role kBegin, Role kEnd>
consteval auto RolesBetween() {
  constexpr auto kFirst = static_cast<size_t>(kBegin);
  std::array<Role, static_cast<size_t>(kEnd) - kFirst> roles;
  for (size_t n = 0; n < roles.size(); ++n) roles[n] = static_cast<Role>(kFirst + n);
  return roles;
}

// Of the forward pass.
inline constexpr std::array kInputs = RolesBetween<Role::kQ, Role::kOutputGradient>();
inline constexpr std::array kOutputs = RolesBetween<Role::kY, Role::kDQ>();
// Of the backward pass, which has the inputs of the forward pass, too.
inline constexpr std::array kBackwardInputs = RolesBetween<Role::kOutputGradient, Role::kY>();
inline constexpr std::array kGradients = RolesBetween<Role::kDQ, Role::kEnd>();
inline constexpr std::array kAllInputs = RolesBetween<Role::kQ, Role::kY>();
inline constexpr std::array kAllOutputs = RolesBetween<Role::kY, Role::kEnd>();
// kKeyLengths is not among the tensors: the library takes the lengths as a span of integers.
inline constexpr std::array kInputTensors = [] {
  std::array<Role, kInputs.size() - 1> tensors;
  std::remove_copy(kInputs.begin(), kInputs.end(), tensors.begin(), Role::kKeyLengths);
  return tensors;
}();

// The place of a tensor in the maps below. Attention's tensors are at their roles, also those that
// another operator has, such as Q and Y. Its own tensors are at Input(n) and Output(n).
class Slot {
 public:
  constexpr Slot(Role role) : index_(static_cast<uint8_t>(role)) {}  // NOLINT(*-explicit-*)
  static constexpr Slot Input(int n) { return Slot(static_cast<int>(Role::kBias) + n); }
  static constexpr Slot Output(int n) { return Slot(static_cast<int>(Role::kPresentKey) + n); }
  static constexpr Slot At(int index) { return Slot(index); }

  constexpr int index() const { return index_; }
  // REQUIRES: it is of a tensor of attention.
  constexpr Role role() const { return static_cast<Role>(index_); }
  bool operator==(const Slot&) const = default;

 private:
  constexpr explicit Slot(int index) : index_(static_cast<uint8_t>(index)) {}

  uint8_t index_;
};

// A value for each of `kCount` consecutive slots, stored inline.
template <typename T, Role kFirst, size_t kCount>
class RoleRange {
 public:
  constexpr T& operator[](Slot slot) { return values_[IndexOf(slot)]; }
  constexpr const T& operator[](Slot slot) const { return values_[IndexOf(slot)]; }

 private:
  static constexpr size_t IndexOf(Slot slot) {
    return static_cast<size_t>(slot.index()) - static_cast<size_t>(kFirst);
  }

  std::array<T, kCount> values_ = {};
};

template <typename T>
using InputMap = RoleRange<T, kAllInputs.front(), kAllInputs.size()>;
template <typename T>
using OutputMap = RoleRange<T, kAllOutputs.front(), kAllOutputs.size()>;
template <typename T>
using RoleMap = RoleRange<T, kAllInputs.front(), static_cast<size_t>(Role::kEnd)>;

// A set of roles or slots, iterated in their order.
template <typename T>
class SetOf {
 public:
  class Iterator {
   public:
    constexpr explicit Iterator(uint64_t rest) : rest_(rest) {}
    constexpr T operator*() const {
      const Slot slot = Slot::At(std::countr_zero(rest_));
      if constexpr (std::is_same_v<T, Role>) {
        return slot.role();
      } else {
        return slot;
      }
    }
    constexpr Iterator& operator++() {
      rest_ &= rest_ - 1;
      return *this;
    }
    bool operator==(const Iterator&) const = default;

   private:
    uint64_t rest_;
  };

  constexpr SetOf() = default;
  constexpr SetOf(std::initializer_list<T> members) {
    for (T member : members) Add(member);
  }
  // A set of roles is one of slots.
  template <std::same_as<Role> Other>
  constexpr SetOf(const SetOf<Other>& roles) : bits_(roles.bits()) {}  // NOLINT(*-explicit-*)

  constexpr void Add(T member, bool condition = true) {
    bits_ |= uint64_t{condition} << Slot(member).index();
  }
  constexpr void Add(const SetOf& other) { bits_ |= other.bits_; }
  constexpr bool contains(T member) const { return bits_ >> Slot(member).index() & 1; }
  constexpr bool empty() const { return bits_ == 0; }
  constexpr uint64_t bits() const { return bits_; }
  constexpr Iterator begin() const { return Iterator(bits_); }
  constexpr Iterator end() const { return Iterator(0); }

 private:
  static_assert(static_cast<int>(Role::kEnd) <= 64);
  uint64_t bits_ = 0;
};
using RoleSet = SetOf<Role>;
using SlotSet = SetOf<Slot>;

struct RoleInfo {
  Role role;
  absl::string_view onnx;      // also of the Open Inference Protocol
  absl::string_view native;    // the field in rapt.v1; also in the text of a problem
  absl::string_view c;         // the field of rapt_arguments
  const char* flag = nullptr;  // an input's flag of the command line; null: `native` with dashes
  const char* help = nullptr;  // of that flag
  bool required = false;       // V is not if it is a part of K
  // The axes of Q, K, V and Y are in the order of the call's Layout.
  bool has_layout = false;
  // Models do not list this input: tools that send every input that a model lists, such as
  // perf_analyzer with shared memory, could not call it, because not all of them go together.
  bool unlisted = false;
  // Each axis of size 1 is repeated, by a stride of 0. Such an input must be strided.
  bool broadcasts = false;
  // The last of the sources that it may have.
  Source source = Source::kStrided;
  // For external interfaces: the first `rank` axes; if several types are accepted, the one that
  // tools should use.
  int rank = 4;
  DType usual_dtype = DType::kFloat32;

  // REQUIRES (dtype, dims): wanted(problem). The axes are [batch, head, position, element].
  bool (*wanted)(const Problem& problem) = nullptr;
  DType (*dtype)(const Problem& problem) = nullptr;
  std::array<int64_t, 4> (*dims)(const Problem& problem) = nullptr;

  Role gradient_of = Role::kEnd;  // of a gradient: the input, whose axes and type it has
};

const RoleInfo& InfoOf(Role role);

// Returns those of kInputTensors and kBackwardInputs, or of kAllOutputs, that the problem has.
RoleSet InputTensorsOf(const Problem& problem);
RoleSet OutputsOf(const Problem& problem);

}  // namespace rapt

#endif  // RAPT_ATTENTION_ROLES_H_
