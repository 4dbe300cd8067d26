// Linear attention over tokens that are sent in chunks: the server keeps the state.
#ifndef RAPT_CLIENT_CLI_LINEAR_STREAM_H_
#define RAPT_CLIENT_CLI_LINEAR_STREAM_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/mechanism/linear/linear_attention.h"
#include "client/cli/call_flags.h"
#include "client/cli/operator_call.h"

namespace rapt {

// InvalidArgument for attributes of the call that a stream does not take, by the flags of `rapt
// run`.
absl::Status CheckStreamed(const LinearAttentionCall& call);

// Returns the outputs of all tokens. Shows the progress. REQUIRES: the call is valid.
absl::StatusOr<client::LinearResult> StreamTokens(const OperatorInputs& inputs,
                                                  const LinearAttentionCall& attributes,
                                                  const CallerFlags& flags, client::Client& server);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_LINEAR_STREAM_H_
