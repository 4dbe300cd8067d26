// A model as its callers see it: its name and tensors.
#ifndef RAPT_SERVER_MODELS_MODEL_INFO_H_
#define RAPT_SERVER_MODELS_MODEL_INFO_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "attention/layer/layer.h"
#include "attention/roles.h"
#include "attention/tensor_view.h"
#include "server/request.h"

namespace rapt {

struct ModelTensor {
  absl::string_view name;
  Role role;    // in Request
  DType dtype;  // if several are accepted, the one that tools should use
  int rank;     // likewise
  bool required = false;
  bool unlisted = false;  // as RoleInfo::unlisted
  int64_t size = -1;      // of the last axis; -1: any
};

// Of a layer it is made when it is loaded. The weights stay, and stay charged to the budget, until
// the last call that holds it has ended.
struct ModelInfo {
  ModelId model;
  std::vector<ModelTensor> inputs;
  std::vector<ModelTensor> outputs;
  std::shared_ptr<const Layer> layer = nullptr;  // of a layer, together with its memory
  uint64_t load = 0;  // of a layer: a number that no other load of the process has, from 1

  absl::string_view name() const { return model.name(); }
};

using ModelInfoPtr = std::shared_ptr<const ModelInfo>;

ModelInfo LayerModel(const std::string& name, std::shared_ptr<const Layer> layer, uint64_t load);

}  // namespace rapt

#endif  // RAPT_SERVER_MODELS_MODEL_INFO_H_
