// The tables of a call's input tensors, scalar attributes and outputs: the name of each in rapt.v1,
// and the member of AttendCall or AttendResult that holds it. Code that handles every tensor,
// attribute or output iterates over them.
//
// They repeat a column of attention/roles.h and attention/attributes.h, because this library is
// installed without the attention library; tests/client/cpp/call_fields_test.cc compares them.
#ifndef RAPT_CLIENT_CPP_CALL_FIELDS_H_
#define RAPT_CLIENT_CPP_CALL_FIELDS_H_

#include <cstdint>
#include <optional>
#include <variant>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
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
               std::optional<bool> AttendCall::*, std::optional<double> AttendCall::*,
               std::optional<int64_t> AttendCall::*, std::optional<int64_t> Window::*,
               ScoreFunction AttendCall::*, Normalizer AttendCall::*>
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

struct CallOutput {
  const char* name;  // the field of AttendResponse
  std::variant<Tensor AttendResult::*, std::optional<Tensor> AttendResult::*> member;
  bool (*wanted)(const AttendCall& call);

  // Returns null if the result has no such tensor.
  const Tensor* In(const AttendResult& result) const;
  void Set(AttendResult& result, Tensor tensor) const;
};

// A tensor of the backward pass besides those of its AttendCall.
struct BackwardTensor {
  const char* name;  // the field of AttendBackwardRequest
  std::variant<TensorView BackwardCall::*, std::optional<TensorView> BackwardCall::*> member;

  // Returns null if the call has no such tensor.
  const TensorView* In(const BackwardCall& call) const;
  void Set(BackwardCall& call, const TensorView& view) const;
};

struct GradientField {
  const char* name;  // the field of AttendBackwardResponse
  std::optional<Tensor> BackwardResult::*member;
};

// Tensors are in the order of their fields in AttendRequest, without key_lengths; attributes are
// those of one number, bool or enumeration with a name for each value. Outputs are in the order of
// the ONNX operator, then extensions. Gradients are in the order of their inputs.
absl::Span<const CallTensor> CallTensors();
absl::Span<const CallAttribute> CallAttributes();
absl::Span<const CallOutput> CallOutputs();
absl::Span<const BackwardTensor> BackwardTensors();
absl::Span<const GradientField> Gradients();

// Return null if no row has this name.
const CallTensor* FindCallTensor(absl::string_view name);
const CallAttribute* FindCallAttribute(absl::string_view name);
const CallOutput* FindCallOutput(absl::string_view name);
const BackwardTensor* FindBackwardTensor(absl::string_view name);
const GradientField* FindGradient(absl::string_view name);

// InvalidArgument, with the name, for a gradient that does not exist.
absl::Status CheckGradients(const BackwardCall& call);

// The gradients that a call requests. REQUIRES: CheckGradients() accepts them.
using WantedGradients = absl::InlinedVector<const GradientField*, 3>;
WantedGradients GradientsWantedBy(const BackwardCall& call);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_CALL_FIELDS_H_
