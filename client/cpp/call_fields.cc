#include "client/cpp/call_fields.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_join.h"
#include "base/invalid.h"

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
    {"alibi_slopes", &AttendCall::alibi_slopes},
    {"bias_table", &AttendCall::bias_table},
    {"relative_bias", &AttendCall::relative_bias},
    {"relative_keys", &AttendCall::relative_keys},
    {"relative_values", &AttendCall::relative_values},
    {"relative_query", &AttendCall::relative_query},
    {"cos_cache", &AttendCall::cos_cache},
    {"sin_cache", &AttendCall::sin_cache},
    {"position_ids", &AttendCall::position_ids},
    {"key_position_ids", &AttendCall::key_position_ids},
    {"additive_weight", &AttendCall::additive_weight},
    {"head_alpha", &AttendCall::head_alpha},
    {"block_mask", &AttendCall::block_mask},
    {"selected_indices", &AttendCall::selected_indices},
    {"global_mask", &AttendCall::global_mask},
};

constexpr CallAttribute kAttributes[] = {
    {"attention.query_heads", &AttendCall::query_heads},
    {"attention.kv_heads", &AttendCall::kv_heads},
    {"attention.causal", &AttendCall::causal},
    {"attention.window.left", &Window::left},
    {"attention.window.right", &Window::right},
    {"attention.scale", &AttendCall::scale},
    {"attention.softcap", &AttendCall::softcap},
    {"attention.alibi", &AttendCall::alibi},
    {"attention.is_bidirectional", &AttendCall::is_bidirectional},
    {"attention.max_distance", &AttendCall::max_distance},
    {"attention.v_head_size", &AttendCall::v_head_size},
    {"attention.interleaved", &AttendCall::interleaved},
    {"attention.rotary_embedding_dim", &AttendCall::rotary_embedding_dim},
    {"attention.rope_theta", &AttendCall::rope_theta},
    {"attention.rotary_keys", &AttendCall::rotary_keys},
    {"attention.score_function", &AttendCall::score_function},
    {"attention.normalizer", &AttendCall::normalizer},
    {"attention.alpha", &AttendCall::alpha},
    {"attention.block_q", &AttendCall::block_q},
    {"attention.block_k", &AttendCall::block_k},
    {"attention.prefix_keys", &AttendCall::prefix_keys},
};

constexpr CallOutput kOutputs[] = {
    {"y", &AttendResult::y, [](const AttendCall&) { return true; }},
    {"present_key", &AttendResult::present_key,
     [](const AttendCall& c) { return c.wants_present; }},
    {"present_value", &AttendResult::present_value,
     [](const AttendCall& c) { return c.wants_present && !c.v_head_size; }},
    {"scores", &AttendResult::scores,
     [](const AttendCall& c) { return c.score_output.has_value(); }},
    {"lse", &AttendResult::lse, [](const AttendCall& c) { return c.wants_lse; }},
};

constexpr BackwardTensor kBackwardTensors[] = {
    {"dy", &BackwardCall::dy},
    {"y", &BackwardCall::y},
    {"lse", &BackwardCall::lse},
    {"dlse", &BackwardCall::dlse},
};

constexpr GradientField kGradients[] = {
    {"dq", &BackwardResult::dq},
    {"dk", &BackwardResult::dk},
    {"dv", &BackwardResult::dv},
    {"d_mask", &BackwardResult::d_mask},
    {"d_past_key", &BackwardResult::d_past_key},
    {"d_past_value", &BackwardResult::d_past_value},
    {"d_attention_bias", &BackwardResult::d_attention_bias},
    {"d_head_sink", &BackwardResult::d_head_sink},
    {"d_alibi_slopes", &BackwardResult::d_alibi_slopes},
    {"d_bias_table", &BackwardResult::d_bias_table},
    {"d_relative_bias", &BackwardResult::d_relative_bias},
    {"d_relative_keys", &BackwardResult::d_relative_keys},
    {"d_relative_values", &BackwardResult::d_relative_values},
    {"d_relative_query", &BackwardResult::d_relative_query},
    {"d_additive_weight", &BackwardResult::d_additive_weight},
};

// Returns the object in `member` of `object`, or null if it is an optional without a value.
template <typename T, typename Object>
const T* MemberOf(const Object& object,
                  const std::variant<T Object::*, std::optional<T> Object::*>& member) {
  if (const auto* always = std::get_if<T Object::*>(&member)) return &(object.**always);
  const std::optional<T>& value = object.*std::get<std::optional<T> Object::*>(member);
  return value ? &*value : nullptr;
}

template <typename Row>
const Row* Find(absl::Span<const Row> rows, absl::string_view name) {
  const auto row =
      std::find_if(rows.begin(), rows.end(), [&](const Row& r) { return r.name == name; });
  return row == rows.end() ? nullptr : &*row;
}

}  // namespace

const TensorView* CallTensor::In(const AttendCall& call) const {
  const TensorView* view = MemberOf(call, member);
  const bool is_value = view == &call.v;
  return is_value && call.v_head_size && view->shape.empty() ? nullptr : view;
}

void CallTensor::Set(AttendCall& call, const TensorView& view) const {
  std::visit([&](auto at) { call.*at = view; }, member);
}

const Tensor* CallOutput::In(const AttendResult& result) const { return MemberOf(result, member); }

void CallOutput::Set(AttendResult& result, Tensor tensor) const {
  std::visit([&](auto at) { result.*at = std::move(tensor); }, member);
}

const TensorView* BackwardTensor::In(const BackwardCall& call) const {
  return MemberOf(call, member);
}

void BackwardTensor::Set(BackwardCall& call, const TensorView& view) const {
  std::visit([&](auto at) { call.*at = view; }, member);
}

absl::Span<const CallTensor> CallTensors() { return kTensors; }
absl::Span<const CallAttribute> CallAttributes() { return kAttributes; }
absl::Span<const CallOutput> CallOutputs() { return kOutputs; }
absl::Span<const BackwardTensor> BackwardTensors() { return kBackwardTensors; }
absl::Span<const GradientField> Gradients() { return kGradients; }

const CallTensor* FindCallTensor(absl::string_view name) { return Find(CallTensors(), name); }
const CallAttribute* FindCallAttribute(absl::string_view name) {
  return Find(CallAttributes(), name);
}
const CallOutput* FindCallOutput(absl::string_view name) { return Find(CallOutputs(), name); }
const BackwardTensor* FindBackwardTensor(absl::string_view name) {
  return Find(BackwardTensors(), name);
}
const GradientField* FindGradient(absl::string_view name) { return Find(Gradients(), name); }

absl::Status CheckGradients(const BackwardCall& call) {
  for (const std::string& name : call.gradients) {
    if (FindGradient(name) != nullptr) continue;
    const auto append = [](std::string* out, const GradientField& row) { *out += row.name; };
    return Invalid("gradients has '", name, "'; it takes any of ",
                   absl::StrJoin(Gradients(), ", ", append));
  }
  return absl::OkStatus();
}

WantedGradients GradientsWantedBy(const BackwardCall& call) {
  WantedGradients wanted;
  for (const std::string& name : call.gradients) wanted.push_back(FindGradient(name));
  if (!wanted.empty()) return wanted;
  wanted = {FindGradient("dq"), FindGradient("dk")};
  if (!call.call.v_head_size) wanted.push_back(FindGradient("dv"));
  return wanted;
}

}  // namespace rapt::client
