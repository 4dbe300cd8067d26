#include "server/protocols/oip/session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "server/cache/reason.h"

namespace rapt::oip {
namespace {

// One sequence's tensor.
struct Axes {
  int64_t heads = 0;
  int64_t length = 0;
  int64_t size = 0;  // of a head
  bool heads_first = false;
};

// `parameter` is the name of the number of heads, which may be absent.
absl::StatusOr<Axes> AxesOf(absl::string_view input, const TensorSpec& spec,
                            absl::string_view parameter, const std::optional<int64_t>& heads) {
  const Shape& s = spec.shape;
  const auto fails = [&](const auto&... text) {
    return Invalid("input ", input, " has shape ", ToString(s), text...);
  };
  if (!IsFloat(spec.dtype)) {
    return Invalid("input ", input, " is ", NameOf(spec.dtype),
                   "; it must be FP32, FP16, BF16 or FP64");
  }
  if ((s.size() != 3 && s.size() != 4) || s[0] != 1) {
    return fails("; it must be [1, heads, length, head size] or [1, length, heads * head size]");
  }
  if (s.size() == 3) {
    const int64_t count = heads.value_or(1);
    if (count < 1 || s[2] < count || s[2] % count != 0) {
      return fails("; its last axis must be a positive multiple of ", parameter, ", which is ",
                   count);
    }
    return Axes{.heads = count, .length = s[1], .size = s[2] / count};
  }
  if (heads && *heads != s[1]) {
    return fails(" and thus ", s[1], " heads; ", parameter, " is ", *heads,
                 ", and they must be equal");
  }
  if (s[1] < 1 || s[3] < 1) return fails("; it must have at least 1 head of at least 1 element");
  return Axes{.heads = s[1], .length = s[2], .size = s[3], .heads_first = true};
}

void SetTensor(const Axes& axes, DType dtype, const InputBytes& bytes, cache::CallTensor& tensor) {
  tensor.spec = TensorSpec{dtype, {axes.length, axes.heads, axes.size}};
  tensor.bytes = bytes;
  tensor.heads_first = axes.heads_first;
}

absl::Status ReadKeysAndValues(const OperatorCall& read, const InputMap<InputBytes>& inputs,
                               cache::TokenShape& token, SessionCall& call) {
  const std::optional<TensorSpec>& k = read.inputs[Role::kK];
  const std::optional<TensorSpec>& v = read.inputs[Role::kV];
  if (k.has_value() != v.has_value()) {
    return Invalid("input ", k ? "K" : "V", " is set but ", k ? "V" : "K",
                   " is not; set both or neither");
  }
  if (!k) return absl::OkStatus();
  RAPT_ASSIGN_OR_RETURN(const auto keys, AxesOf("K", *k, "kv_num_heads", read.kv_num_heads));
  RAPT_ASSIGN_OR_RETURN(const auto values, AxesOf("V", *v, "kv_num_heads", read.kv_num_heads));
  if (v->dtype != k->dtype || values.heads != keys.heads || values.length != keys.length) {
    return Invalid("input V is ", NameOf(v->dtype), " ", ToString(v->shape), ", input K is ",
                   NameOf(k->dtype), " ", ToString(k->shape),
                   "; type, heads and length must be equal");
  }
  token = {.kv_heads = keys.heads,
           .head_size = keys.size,
           .value_head_size = values.size,
           .dtype = k->dtype};
  call.attend.items[0].call.count = keys.length;
  SetTensor(keys, k->dtype, inputs[Role::kK], call.attend.k);
  SetTensor(values, v->dtype, inputs[Role::kV], call.attend.v);
  return absl::OkStatus();
}

absl::Status ReadQueries(const OperatorCall& read, const InputMap<InputBytes>& inputs,
                         SessionCall& call) {
  const std::optional<TensorSpec>& q = read.inputs[Role::kQ];
  if (!q) return absl::OkStatus();
  RAPT_ASSIGN_OR_RETURN(const auto axes, AxesOf("Q", *q, "q_num_heads", read.q_num_heads));
  SetTensor(axes, q->dtype, inputs[Role::kQ], call.attend.q);
  call.attend.items[0].rows = axes.length;
  return absl::OkStatus();
}

absl::StatusOr<cache::SequenceCall> ReadSequence(const SessionParameters& parameters,
                                                 absl::string_view model) {
  if (!parameters.id) {
    return Invalid("inference request to model '", model,
                   "' must specify a non-zero or non-empty correlation ID");
  }
  return cache::SequenceCall{
      .id = *parameters.id, .starts = parameters.starts, .ends = parameters.ends};
}

// The cache of a call that starts.
absl::Status ReadSpec(const SessionParameters& parameters, cache::LayerShape shape,
                      SessionCall& call) {
  if (!parameters.starts) {
    const auto fails = [](const auto&... parameter) {
      return Invalid("parameter ", parameter..., "; it is allowed with sequence_start only");
    };
    if (parameters.layers) return fails("layers is ", *parameters.layers);
    if (parameters.storage != Storage::kPlain) return fails("storage is int8");
    return absl::OkStatus();
  }
  const int64_t layers = parameters.layers.value_or(1);
  if (layers < 1 || layers > cache::kMaxLayers) {
    return Invalid("parameter layers is ", layers, "; it must be from 1 to ", cache::kMaxLayers);
  }
  if (!call.attend.k.spec) {
    return Invalid("inputs K and V are absent; a call with sequence_start needs them");
  }
  shape.layers = layers;
  shape.token.q8_0 = parameters.storage == Storage::kInt8;
  call.sequence.spec.shapes.push_back(shape);
  return absl::OkStatus();
}

// A call that only ends its sequence has no tokens that a position could be that of.
absl::Status CheckEndAlone(const SessionParameters& parameters) {
  if (!parameters.position) return absl::OkStatus();
  return Invalid("parameter position is ", *parameters.position,
                 "; it is allowed with inputs only");
}

// The call of a layer with a query of one token.
cache::LayerStep OneTokenStep(const ModelInfo& model, const LayerCall& read) {
  cache::LayerStep step = {model.layer, read, {}};
  const Layer& layer = *model.layer;
  step.call.inputs[Role::kQ] = TensorSpec{layer.dtype(), {1, 1, layer.config().embed_size}};
  step.call.is_causal = read.is_causal.value_or(true);
  return step;
}

// Replaces the message, and keeps the reason.
absl::Status WithMessage(const absl::Status& status, absl::string_view message) {
  absl::Status changed(status.code(), message);
  status.ForEachPayload([&](absl::string_view type, const absl::Cord& payload) {
    changed.SetPayload(type, payload);
  });
  return changed;
}

}  // namespace

absl::StatusOr<SessionCall> MakeSessionCall(const SessionParameters& parameters,
                                            const OperatorCall& read,
                                            const InputMap<InputBytes>& inputs) {
  RAPT_ASSIGN_OR_RETURN(cache::SequenceCall sequence,
                        ReadSequence(parameters, ModelId(Model::kAttentionSession).name()));
  SessionCall call{.sequence = std::move(sequence)};
  cache::AttendCall& attend = call.attend;
  attend.q.name = "input Q";
  attend.k.name = "input K";
  attend.v.name = "input V";
  attend.scale = read.scale;
  attend.softcap = read.softcap;
  attend.wants_lse = read.wants_lse;
  attend.lse_heads_first = true;
  cache::LayerCall& layer = attend.items.emplace_back().call;
  layer.layer = parameters.layer;
  layer.at = parameters.position;
  cache::TokenShape token;
  RAPT_RETURN_IF_ERROR(ReadKeysAndValues(read, inputs, token, call));
  RAPT_RETURN_IF_ERROR(ReadQueries(read, inputs, call));
  RAPT_RETURN_IF_ERROR(ReadSpec(parameters, {.token = token}, call));
  if (layer.count > 0 || attend.items[0].rows > 0) return call;
  if (!call.is_empty() || !parameters.ends) {
    return Invalid(
        "inputs Q, K and V have no tokens; a call needs some, or sequence_end without inputs");
  }
  RAPT_RETURN_IF_ERROR(CheckEndAlone(parameters));
  return call;
}

absl::StatusOr<SessionCall> MakeLayerSession(const SessionParameters& parameters,
                                             const ModelInfo& model, const LayerCall& read,
                                             const InputMap<InputBytes>& inputs) {
  RAPT_ASSIGN_OR_RETURN(cache::SequenceCall sequence, ReadSequence(parameters, model.name()));
  SessionCall call{.sequence = std::move(sequence)};
  call.sequence.scope = model.has_ended;
  const bool has_inputs = std::any_of(kInputs.begin(), kInputs.end(),
                                      [&](Role role) { return read.inputs[role].has_value(); });
  if (!has_inputs && parameters.ends && !parameters.starts) {
    // What the layer and its other parameters may be does not depend on the tokens.
    RAPT_RETURN_IF_ERROR(cache::AttendCallOf(OneTokenStep(model, read)).status());
    RAPT_RETURN_IF_ERROR(ReadSpec(parameters, {}, call));
    RAPT_RETURN_IF_ERROR(CheckEndAlone(parameters));
    return call;
  }
  call.layer = {model.layer, read, inputs[Role::kQ]};
  RAPT_ASSIGN_OR_RETURN(call.attend, cache::AttendCallOf(*call.layer));
  call.attend.items.front().call.at = parameters.position;
  const Shape& k = call.attend.k.spec->shape;
  const cache::LayerShape shape = {.token = {.kv_heads = k[1],
                                             .head_size = k[2],
                                             .value_head_size = call.attend.v.spec->shape[2],
                                             .dtype = call.attend.k.spec->dtype},
                                   .keep_last = model.layer->config().sliding_window.value_or(0)};
  RAPT_RETURN_IF_ERROR(ReadSpec(parameters, shape, call));
  return call;
}

TensorSpec SessionOutput(const SessionCall& call, Slot output, const TensorSpec& computed) {
  if (call.layer) return computed;
  const Shape& s = computed.shape;
  if (output == Role::kLse || call.attend.q.heads_first) {
    Shape shape = {1};
    shape.insert(shape.end(), s.begin(), s.end());
    return {computed.dtype, shape};
  }
  return {computed.dtype, {1, s[0], s[1] * s[2]}};
}

absl::Status SessionError(const absl::Status& status, absl::string_view model,
                          const cache::SequenceId& id) {
  if (status.ok()) return status;
  if (absl::IsNotFound(status) && cache::ReasonOf(status) != cache::Reason::kNone) {
    return Invalid("inference request for sequence ", cache::ToString(id), " to model '", model,
                   "' must specify the START flag on the first request of the sequence");
  }
  absl::string_view message = absl::StripPrefix(status.message(), "items[0]: ");
  if (absl::ConsumePrefix(&message, "at is ")) {
    return WithMessage(status, absl::StrCat("parameter position is ", message));
  }
  return WithMessage(status, message);
}

}  // namespace rapt::oip
