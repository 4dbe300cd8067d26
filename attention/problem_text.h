// Parses problems from a line of text, for flags; extends the syntax of rapt-load's shapes.
#ifndef RAPT_ATTENTION_PROBLEM_TEXT_H_
#define RAPT_ATTENTION_PROBLEM_TEXT_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/problem.h"

namespace rapt {

// Parses problems separated by commas: "1x32/8x4096x128 bf16 causal, 8x32/8x1:4096x128 bf16". Each
// is
//
//     BxHxSxD                Hq/Hkv for H, Sq:Sk for S, D/Dv for D if they differ
//     followed by any of     fp32 fp16 bf16 fp64, causal, bottom_right, onnx_alignment,
//                            ragged (with key lengths), past=P, left_window=N,
//                            right_window=N, softcap=X, scale=X,
//                            mask=bool|float ([1, 1, Sq, T]), mask=padding (bool [B, 1, 1, T]),
//                            score_function=additive (with an additive_weight [1, D])
//
// The default type is fp32. InvalidArgument quotes the invalid problem.
absl::StatusOr<std::vector<Problem>> ParseProblems(absl::string_view text);

}  // namespace rapt

#endif  // RAPT_ATTENTION_PROBLEM_TEXT_H_
