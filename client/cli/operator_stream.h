// Calls of an operator that has a state, over tokens that are sent in chunks: the server keeps the
// state.
#ifndef RAPT_CLIENT_CLI_OPERATOR_STREAM_H_
#define RAPT_CLIENT_CLI_OPERATOR_STREAM_H_

#include "absl/status/statusor.h"
#include "attention/operator_schema.h"
#include "client/cli/call_flags.h"

namespace rapt {

// Returns the outputs of all tokens. Shows the progress. REQUIRES: the operator is
// linear_attention, and the call is valid.
absl::StatusOr<client::ModelResult> StreamTokens(const OperatorSchema& schema,
                                                 const client::ModelCall& call,
                                                 const CallerFlags& flags, client::Client& server);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_OPERATOR_STREAM_H_
