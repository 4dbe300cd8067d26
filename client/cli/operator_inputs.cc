#include "client/cli/operator_inputs.h"

#include "base/status_macros.h"

namespace rapt {

std::optional<client::TensorView> OperatorInputs::View(Role role) const {
  if (!tensors[role]) return std::nullopt;
  return tensors[role]->view();
}

Arguments OperatorInputs::ToArguments() const {
  Arguments arguments;
  for (Role role : kAllInputs) {
    if (tensors[role]) arguments.inputs[role].data = tensors[role]->view().data.data();
  }
  arguments.key_lengths = key_lengths;
  return arguments;
}

InputMap<std::optional<TensorSpec>> OperatorInputs::Specs() const {
  InputMap<std::optional<TensorSpec>> specs;
  for (Role role : kAllInputs) {
    if (!tensors[role]) continue;
    specs[role] = TensorSpec{tensors[role]->dtype, tensors[role]->shape};
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
  for (const auto& [role, name, path, usual] : files) {
    if (!path) continue;
    RAPT_ASSIGN_OR_RETURN(inputs.tensors[role], LoadTensor(*path, name, dtype, usual));
  }
  if (!key_lengths) return inputs;
  RAPT_ASSIGN_OR_RETURN(inputs.key_lengths, LoadLengths(*key_lengths, "key_lengths"));
  return inputs;
}

}  // namespace rapt
