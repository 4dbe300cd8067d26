#include "client/cpp/call_fields.h"

#include <algorithm>

namespace rapt::client {
namespace {

constexpr CallTensor kTensors[] = {
    {"q", &AttendCall::q},
    {"k", &AttendCall::k},
    {"v", &AttendCall::v},
    {"mask", &AttendCall::mask},
    {"past_key", &AttendCall::past_key},
    {"past_value", &AttendCall::past_value},
    {"attention_bias", &AttendCall::attention_bias},
    {"head_sink", &AttendCall::head_sink},
};

constexpr CallAttribute kAttributes[] = {
    {"attention.query_heads", &AttendCall::query_heads},
    {"attention.kv_heads", &AttendCall::kv_heads},
    {"attention.causal", &AttendCall::causal},
    {"attention.window.left", &Window::left},
    {"attention.window.right", &Window::right},
    {"attention.scale", &AttendCall::scale},
    {"attention.softcap", &AttendCall::softcap},
};

template <typename Row>
const Row* Find(absl::Span<const Row> rows, absl::string_view name) {
  const auto row =
      std::find_if(rows.begin(), rows.end(), [&](const Row& r) { return r.name == name; });
  return row == rows.end() ? nullptr : &*row;
}

}  // namespace

const TensorView* CallTensor::In(const AttendCall& call) const {
  if (const auto* always = std::get_if<TensorView AttendCall::*>(&member)) return &(call.**always);
  const auto& tensor = call.*std::get<std::optional<TensorView> AttendCall::*>(member);
  return tensor ? &*tensor : nullptr;
}

void CallTensor::Set(AttendCall& call, const TensorView& view) const {
  std::visit([&](auto at) { call.*at = view; }, member);
}

absl::Span<const CallTensor> CallTensors() { return kTensors; }
absl::Span<const CallAttribute> CallAttributes() { return kAttributes; }

const CallTensor* FindCallTensor(absl::string_view name) { return Find(CallTensors(), name); }
const CallAttribute* FindCallAttribute(absl::string_view name) {
  return Find(CallAttributes(), name);
}

}  // namespace rapt::client
