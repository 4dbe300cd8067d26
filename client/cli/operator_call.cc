#include "client/cli/operator_call.h"

#include <utility>

#include "attention/attention.h"
#include "base/aligned_buffer.h"
#include "base/status_macros.h"

namespace rapt {

std::optional<client::TensorView> OperatorInputs::View(Slot slot) const {
  if (tensors[slot]) return tensors[slot]->view();
  if (slot != Role::kKeyLengths || key_lengths.empty()) return std::nullopt;
  return client::View<int64_t>({static_cast<int64_t>(key_lengths.size())}, key_lengths);
}

Arguments OperatorInputs::ToArguments() const {
  Arguments arguments;
  for (Slot slot : kAllInputs) {
    if (tensors[slot]) arguments.inputs[slot].data = tensors[slot]->view().data.data();
  }
  arguments.key_lengths = key_lengths;
  return arguments;
}

InputMap<std::optional<TensorSpec>> OperatorInputs::Specs() const {
  InputMap<std::optional<TensorSpec>> specs;
  for (Slot slot : kAllInputs) {
    if (!tensors[slot]) continue;
    specs[slot] = TensorSpec{tensors[slot]->dtype, tensors[slot]->shape};
  }
  if (!key_lengths.empty()) {
    specs[Role::kKeyLengths] =
        TensorSpec{DType::kInt64, {static_cast<int64_t>(key_lengths.size())}};
  }
  return specs;
}

absl::StatusOr<OperatorInputs> LoadInputs(const std::vector<InputFile>& files,
                                          const std::optional<std::string>& key_lengths,
                                          const std::string& dtype) {
  OperatorInputs inputs;
  for (const auto& [slot, name, path, usual] : files) {
    if (!path) continue;
    RAPT_ASSIGN_OR_RETURN(inputs.tensors[slot], LoadTensor(*path, name, dtype, usual));
  }
  if (!key_lengths) return inputs;
  RAPT_ASSIGN_OR_RETURN(inputs.key_lengths, LoadLengths(*key_lengths, "key_lengths"));
  return inputs;
}

absl::StatusOr<OperatorResult> RunHere(const BoundCall& call, const Arguments& inputs,
                                       ThreadPool& pool) {
  Arguments arguments = inputs;
  OutputMap<std::string> bytes;
  for (Slot slot : kAllOutputs) {
    const std::optional<TensorSpec>& spec = call.outputs()[slot];
    if (!spec) continue;
    RAPT_ASSIGN_OR_RETURN(const int64_t size, ByteSize("output", *spec));
    bytes[slot].resize(static_cast<size_t>(size));
    arguments.outputs[slot].data = reinterpret_cast<std::byte*>(bytes[slot].data());
  }
  RAPT_ASSIGN_OR_RETURN(const Plan plan, call.MakePlan({.threads = pool.workers()}));
  AlignedBuffer workspace(plan.workspace_bytes());
  const auto start = std::chrono::steady_clock::now();
  RAPT_RETURN_IF_ERROR(call.Run(plan, arguments, workspace.span(), pool));
  OperatorResult result;
  result.compute_time = std::chrono::duration_cast<std::chrono::microseconds>(
      std::chrono::steady_clock::now() - start);
  if (plan.routing.backend != nullptr) result.backend = std::string(plan.routing.backend->name());
  result.plan = plan.Describe();
  for (Slot slot : kAllOutputs) {
    const std::optional<TensorSpec>& spec = call.outputs()[slot];
    if (!spec) continue;
    result.outputs[slot].emplace(spec->dtype, spec->shape, std::move(bytes[slot]));
  }
  return result;
}

}  // namespace rapt
