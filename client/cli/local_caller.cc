#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "client/cli/attention_caller.h"
#include "server/attention/attention.h"
#include "server/base/aligned_buffer.h"
#include "server/base/check.h"
#include "server/base/thread_pool.h"

namespace rapt {
namespace {

Tensor NewTensor(const TensorSpec& spec) {
  const absl::StatusOr<int64_t> bytes = ByteSize("output", spec);
  RAPT_CHECK(bytes.ok(), "a resolved call has outputs whose sizes fit");
  return {spec, std::string(*bytes, '\0')};
}

std::byte* MutableData(Tensor& tensor) { return reinterpret_cast<std::byte*>(tensor.bytes.data()); }

class LocalCaller : public AttentionCaller {
 public:
  LocalCaller() : pool_(static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))) {}

  absl::StatusOr<AttentionReply> Attend(const OperatorCall& call,
                                        const AttentionInputs& inputs) override {
    const auto start = std::chrono::steady_clock::now();
    const absl::StatusOr<ResolvedCall> resolved = Resolve(call);
    if (!resolved.ok()) return resolved.status();
    const absl::StatusOr<Plan> plan = MakePlan(resolved->problem, {.threads = pool_.workers()});
    if (!plan.ok()) return plan.status();

    std::vector<int64_t> key_lengths(inputs.key_lengths.size() / sizeof(int64_t));
    if (!key_lengths.empty()) {
      std::memcpy(key_lengths.data(), inputs.key_lengths.data(), inputs.key_lengths.size());
    }
    Arguments arguments;
    arguments.query = resolved->Query(inputs.q.data());
    arguments.key = resolved->Key(inputs.k.data());
    arguments.value = resolved->Value(inputs.v.data());
    if (call.attn_mask) arguments.mask = resolved->Mask(inputs.mask.data());
    if (call.past_key) {
      arguments.past_key = resolved->PastKey(inputs.past_key.data());
      arguments.past_value = resolved->PastValue(inputs.past_value.data());
    }
    arguments.key_lengths = key_lengths;

    AttentionReply reply;
    reply.y = NewTensor(resolved->y);
    arguments.output = resolved->Output(MutableData(reply.y));
    if (call.score_output) {
      reply.scores = NewTensor(resolved->scores);
      arguments.scores = resolved->Scores(MutableData(*reply.scores));
    }
    if (call.wants_lse) {
      reply.lse = NewTensor(resolved->lse);
      arguments.lse = resolved->Lse(MutableData(*reply.lse));
    }
    AlignedBuffer workspace(plan->workspace_bytes());
    if (absl::Status ran = Run(*plan, arguments, workspace.span(), pool_); !ran.ok()) return ran;
    reply.plan = plan->Describe();
    reply.backend = plan->backend == nullptr ? "" : std::string(plan->backend->name());
    reply.elapsed = std::chrono::steady_clock::now() - start;
    return reply;
  }

 private:
  ThreadPool pool_;
};

}  // namespace

std::unique_ptr<AttentionCaller> NewLocalCaller() { return std::make_unique<LocalCaller>(); }

}  // namespace rapt
