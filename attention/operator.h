// The attention operator as callers specify it: tensors of rank 3 or 4 and ONNX attributes.
// Resolve() converts them to a Problem and the layout of each tensor. Every protocol and the
// command line use it, so they accept and reject the same calls.
#ifndef RAPT_ATTENTION_OPERATOR_H_
#define RAPT_ATTENTION_OPERATOR_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/field_names.h"
#include "attention/problem.h"
#include "attention/roles.h"
#include "attention/tensor_view.h"

namespace rapt {

using Shape = absl::InlinedVector<int64_t, 4>;

// "[2, 8, 128, 64]"
std::string ToString(const Shape& shape);
// "[0, 2, 1]": the position of an element of a row-major tensor. REQUIRES: it has that many.
std::string PositionIn(const Shape& shape, int64_t element);

struct TensorSpec {
  DType dtype = DType::kFloat32;
  Shape shape;
};

struct OperatorCall {
  InputMap<std::optional<TensorSpec>> inputs;

  Layout layout = Layout::kByRank;
  std::optional<int64_t> q_num_heads = std::nullopt;
  std::optional<int64_t> kv_num_heads = std::nullopt;
  std::optional<double> scale = std::nullopt;
  double softcap = 0;
  bool is_causal = false;
  Alignment alignment = Alignment::kTopLeft;
  int64_t left_window_size = -1;
  int64_t right_window_size = -1;
  bool softmax_in_fp64 = false;
  std::optional<Dropout> dropout = std::nullopt;
  std::optional<int64_t> v_head_size = std::nullopt;  // V is in K
  bool alibi = false;
  bool is_bidirectional = false;
  std::optional<int64_t> max_distance = std::nullopt;
  bool interleaved = false;
  int64_t rotary_embedding_dim = 0;
  std::optional<double> rope_theta = std::nullopt;
  std::optional<bool> rotary_keys = std::nullopt;
  ScoreFunction score_function = ScoreFunction::kDotProduct;
  Normalizer normalizer = Normalizer::kSoftmax;
  std::optional<double> alpha = std::nullopt;
  std::optional<int64_t> block_q = std::nullopt;
  std::optional<int64_t> block_k = std::nullopt;
  int64_t prefix_keys = 0;

  std::optional<ScoreOutput> score_output = std::nullopt;
  bool wants_lse = false;
  bool wants_present = false;

  // Set: the backward pass, which has kBackwardInputs and returns these gradients.
  std::optional<RoleSet> gradients = std::nullopt;
};

// A valid call. Thread-compatible value type.
struct ResolvedCall {
  Problem problem;
  Layout layout = Layout::kBhsd;          // never kByRank
  const FieldNames* names = &kOnnxNames;  // also for errors about the data

  OutputMap<TensorSpec>
      outputs;  // as the caller sees them: Y has Q's layout and rank, a gradient its input's

  // Return views of row-major bytes in the caller's layout. REQUIRES: the problem wants the role.
  TensorView Input(Role role, const std::byte* data) const;
  MutableTensorView Output(Role role, std::byte* data) const;
};

// Returns InvalidArgument with the tensor or attribute, its value and the allowed values. REQUIRES:
// `names` outlives the result.
absl::StatusOr<ResolvedCall> Resolve(const OperatorCall& call,
                                     const FieldNames& names = kOnnxNames);

// Returns the gradients of a backward pass that names none: those of Q, K and V.
RoleSet UsualGradients(const OperatorCall& call);

// Returns the bytes of a row-major tensor; InvalidArgument, with `name`, if an axis is negative or
// the size overflows.
absl::StatusOr<int64_t> ByteSize(absl::string_view name, const TensorSpec& spec);

}  // namespace rapt

#endif  // RAPT_ATTENTION_OPERATOR_H_
