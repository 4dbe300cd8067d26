// Calls of sequences, of attention_session and of layers: their parameters and tensors, and the
// answers to them.
#ifndef RAPT_SERVER_PROTOCOLS_OIP_SESSION_H_
#define RAPT_SERVER_PROTOCOLS_OIP_SESSION_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/operator.h"
#include "server/cache/cached_attention.h"
#include "server/cache/cached_layer.h"
#include "server/cache/sequences.h"
#include "server/models/model_info.h"
#include "server/request.h"

namespace rapt::oip {

// How keys and values are stored; the names are those of the parameter `storage`.
enum class Storage : uint8_t { kPlain, kInt8 };
inline constexpr absl::string_view kStorageNames[] = {"plain", "int8"};

// The parameters of calls of sequences alone. A layer has neither `layer` nor `layers`.
struct SessionParameters {
  std::optional<cache::SequenceId> id = {};  // absent also for 0 and ""
  bool starts = false;
  bool ends = false;
  int64_t layer = 0;
  std::optional<int64_t> layers = {};
  std::optional<int64_t> position = {};
  Storage storage = Storage::kPlain;

  // Whether a call that may be one of a sequence is.
  bool given() const { return id || starts || ends || position || storage != Storage::kPlain; }
};

// A call before its sequence's turn has come.
struct SessionCall {
  cache::SequenceCall sequence = {};
  cache::AttendCall attend = {};  // of one item, without the id and generation of the cache
  std::optional<cache::LayerStep> layer = {};  // of a layer, whose tensors `attend` has no bytes of

  // Whether it only ends the sequence.
  bool is_empty() const { return !attend.q.spec && !attend.k.spec; }
};

// Reads a call of attention_session whose inputs were read into `read` and `inputs`.
// InvalidArgument names the parameter or the input.
absl::StatusOr<SessionCall> MakeSessionCall(const SessionParameters& parameters,
                                            const OperatorCall& read,
                                            const InputMap<InputBytes>& inputs);

// The same for a layer, whose outputs are requested already.
absl::StatusOr<SessionCall> MakeLayerSession(const SessionParameters& parameters,
                                             const ModelInfo& model, const LayerCall& read,
                                             const InputMap<InputBytes>& inputs);

// Returns an output as callers see it: Y in the layout of Q, lse as [1, Hq, S], those of a layer as
// they are. `computed` is the operator's.
TensorSpec SessionOutput(const SessionCall& call, Slot output, const TensorSpec& computed);

// Returns the error of a call as its caller knows it: a cache that is not found is a sequence that
// was not started, which has the text of Triton's error; the only item needs no number, and `at` is
// `position`.
absl::Status SessionError(const absl::Status& status, absl::string_view model,
                          const cache::SequenceId& id);

}  // namespace rapt::oip

#endif  // RAPT_SERVER_PROTOCOLS_OIP_SESSION_H_
