// The tensors of an attention call, each a role: what every interface calls it, its axes and type.
// Everything that handles "all inputs" or "all outputs" iterates over this table.
#ifndef RAPT_ATTENTION_ROLES_H_
#define RAPT_ATTENTION_ROLES_H_

#include <array>
#include <cstddef>
#include <cstdint>

namespace rapt {

// Inputs first.
enum class Role : uint8_t {
  kQ,
  kK,
  kV,
  kMask,
  kPastKey,
  kPastValue,
  kKeyLengths,

  kY,
  kScores,
  kLse,
  kPresentKey,
  kPresentValue,
};

inline constexpr std::array kInputs = {
    Role::kQ, Role::kK, Role::kV, Role::kMask, Role::kPastKey, Role::kPastValue, Role::kKeyLengths};
inline constexpr std::array kOutputs = {Role::kY, Role::kScores, Role::kLse, Role::kPresentKey,
                                        Role::kPresentValue};

// A value for each of `kCount` consecutive roles, stored inline.
template <typename T, Role kFirst, size_t kCount>
class RoleRange {
 public:
  constexpr T& operator[](Role role) { return values_[IndexOf(role)]; }
  constexpr const T& operator[](Role role) const { return values_[IndexOf(role)]; }

  constexpr auto begin() { return values_.begin(); }
  constexpr auto begin() const { return values_.begin(); }
  constexpr auto end() { return values_.end(); }
  constexpr auto end() const { return values_.end(); }

 private:
  static constexpr size_t IndexOf(Role role) {
    return static_cast<size_t>(role) - static_cast<size_t>(kFirst);
  }

  std::array<T, kCount> values_ = {};
};

template <typename T>
using InputMap = RoleRange<T, kInputs.front(), kInputs.size()>;
template <typename T>
using OutputMap = RoleRange<T, kOutputs.front(), kOutputs.size()>;
template <typename T>
using RoleMap = RoleRange<T, kInputs.front(), kInputs.size() + kOutputs.size()>;

}  // namespace rapt

#endif  // RAPT_ATTENTION_ROLES_H_
