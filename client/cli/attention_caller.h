// One attention call, wherever it is computed.
#ifndef RAPT_CLIENT_CLI_ATTENTION_CALLER_H_
#define RAPT_CLIENT_CLI_ATTENTION_CALLER_H_

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/attention/operator.h"

namespace grpc {
class Channel;
}

namespace rapt {

// Row-major bytes of the tensors that a call has, each of the size that its spec states.
struct AttentionInputs {
  absl::Span<const std::byte> q = {}, k = {}, v = {};
  absl::Span<const std::byte> mask = {};
  absl::Span<const std::byte> past_key = {}, past_value = {};
  absl::Span<const std::byte> key_lengths = {};
};

// A tensor that owns its bytes, row-major.
struct Tensor {
  TensorSpec spec;
  std::string bytes;

  const std::byte* data() const { return reinterpret_cast<const std::byte*>(bytes.data()); }
};

struct AttentionReply {
  Tensor y;
  std::optional<Tensor> scores;  // what call.score_output asked for
  std::optional<Tensor> lse;
  std::string backend;  // "cpu"; empty where a server does not say
  std::string plan;
  std::chrono::nanoseconds elapsed{0};  // the whole call, as its caller felt it
};

// Thread-compatible.
class AttentionCaller {
 public:
  virtual ~AttentionCaller() = default;

  // Blocks until done. InvalidArgument for a call that makes no sense, whoever finds out.
  virtual absl::StatusOr<AttentionReply> Attend(const OperatorCall& call,
                                                const AttentionInputs& inputs) = 0;
};

// Computes in this process, on all its cores.
std::unique_ptr<AttentionCaller> NewLocalCaller();

// Asks the server at the other end, each time for at most `timeout`.
std::unique_ptr<AttentionCaller> NewRemoteCaller(std::shared_ptr<grpc::Channel> channel,
                                                 std::chrono::nanoseconds timeout);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_ATTENTION_CALLER_H_
