// The tables of a call's input tensors and scalar attributes: the name of each in rapt.v1, and the
// member of AttendCall that holds it. Code that handles every tensor or attribute iterates over
// them.
//
// They repeat a column of attention/roles.h and attention/attributes.h, because this library is
// installed without the attention library; tests/client/cpp/call_fields_test.cc compares them.
#ifndef RAPT_CLIENT_CPP_CALL_FIELDS_H_
#define RAPT_CLIENT_CPP_CALL_FIELDS_H_

#include <cstdint>
#include <optional>
#include <variant>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "rapt/attend.h"

namespace rapt::client {

struct CallTensor {
  const char* name;  // the field of AttendRequest
  std::variant<TensorView AttendCall::*, std::optional<TensorView> AttendCall::*> member;

  // Returns null if the call has no such tensor.
  const TensorView* In(const AttendCall& call) const;
  void Set(AttendCall& call, const TensorView& view) const;
};

struct CallAttribute {
  const char* name;  // the path of the field in AttendRequest
  std::variant<bool AttendCall::*, int64_t AttendCall::*, double AttendCall::*,
               std::optional<double> AttendCall::*, std::optional<int64_t> Window::*>
      member;

  // Calls `function` with a reference to the value in `call`.
  template <typename Call, typename Function>
  auto Visit(Call& call, Function function) const {
    const auto visit = [&](auto at) {
      if constexpr (requires { call.*at; }) {
        return function(call.*at);
      } else {
        return function(call.window.*at);
      }
    };
    return std::visit(visit, member);
  }
};

// Tensors are in the order of their fields in AttendRequest, without key_lengths; attributes are
// those of one number or bool.
absl::Span<const CallTensor> CallTensors();
absl::Span<const CallAttribute> CallAttributes();

// Return null if no row has this name.
const CallTensor* FindCallTensor(absl::string_view name);
const CallAttribute* FindCallAttribute(absl::string_view name);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_CALL_FIELDS_H_
