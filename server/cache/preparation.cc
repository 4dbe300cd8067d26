#include "server/cache/preparation.h"

#include <memory>
#include <utility>

#include "attention/tensor_operator.h"
#include "base/status_macros.h"

namespace rapt::cache {
namespace {

// An operator that computes nothing.
class Nothing final : public TensorOperator {
 public:
  Nothing() { outputs_[Role::kY] = TensorSpec{DType::kFloat32, {0}}; }

  const OutputMap<std::optional<TensorSpec>>& outputs() const override { return outputs_; }
  void PlanTasks(Plan&) const override {}
  void RunTask(const Plan&, const Arguments&, std::byte*, int, int64_t, int,
               const Checkpoint&) const override {}

 private:
  OutputMap<std::optional<TensorSpec>> outputs_;
};

}  // namespace

Request MakePreparation(absl::AnyInvocable<absl::Status(absl::Span<std::byte> workspace)> prepare,
                        int64_t bytes, int64_t workspace_bytes) {
  static const auto* const kNothing = new std::shared_ptr<const TensorOperator>(new Nothing());
  Request request;
  request.model = Model::kAttentionSession;
  request.SetOperator(*kNothing);
  request.prepare = std::move(prepare);
  request.preparation_bytes = workspace_bytes;
  request.prepared_bytes = bytes;
  return request;
}

std::byte* TakeFrom(absl::Span<std::byte>& workspace, int64_t bytes) {
  std::byte* const taken = workspace.data();
  workspace.remove_prefix(static_cast<size_t>(bytes));
  return taken;
}

int64_t GatheredBytes(const InputBytes& bytes) {
  return bytes.data != nullptr && !bytes.is_shared ? 0 : bytes.size;
}

absl::StatusOr<const std::byte*> Gather(const InputBytes& bytes, absl::Span<std::byte>& workspace) {
  if (GatheredBytes(bytes) == 0) return bytes.data;
  std::byte* const copy = TakeFrom(workspace, bytes.size);
  RAPT_RETURN_IF_ERROR(bytes.Fetch(0, bytes.size, copy));
  return copy;
}

}  // namespace rapt::cache
