#ifndef RAPT_SERVER_CALLS_PER_MODEL_H_
#define RAPT_SERVER_CALLS_PER_MODEL_H_

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "server/request.h"

namespace rapt {

// Under which calls of further layers, and of models that do not exist, are counted; no layer may
// have this name.
inline constexpr char kOtherModels[] = "others";

inline const ModelId& OtherModels() {
  static const auto* const others = new ModelId(std::make_shared<const std::string>(kOtherModels));
  return *others;
}

// A T for each model that calls are counted for. A layer keeps its T when it is unloaded, so that
// counts never go back; from kMaxLayers names on, layers share one, kOtherModels. Thread-safe; T
// is.
template <typename T>
class PerModel {
 public:
  static constexpr size_t kMaxLayers = 1000;

  // The reference stays valid.
  T& operator[](const ModelId& model) {
    if (model.kind != Model::kLayer) return built_in_[IndexOf(model)];
    MutexLock lock(mutex_);
    if (const auto known = layers_.find(model.name()); known != layers_.end()) return known->second;
    const size_t layers = layers_.size() - layers_.count(kOtherModels);
    return layers_[std::string(layers < kMaxLayers ? model.name() : kOtherModels)];
  }

  // Visits every built-in model, and the layers by name.
  void ForEach(absl::FunctionRef<void(absl::string_view name, const T& value)> visit) const {
    for (size_t n = 0; n < built_in_.size(); ++n) visit(BuiltInModels()[n].name(), built_in_[n]);
    MutexLock lock(mutex_);
    for (const auto& [name, value] : layers_) visit(name, value);
  }

 private:
  // In the order of BuiltInModels().
  static size_t IndexOf(const ModelId& model) {
    const std::vector<ModelId>& all = BuiltInModels();
    const auto found = std::find_if(
        all.begin(), all.end(), [&](const ModelId& other) { return other.name() == model.name(); });
    return static_cast<size_t>(found - all.begin());
  }

  std::vector<T> built_in_ = std::vector<T>(BuiltInModels().size());
  mutable Mutex mutex_;
  std::map<std::string, T, std::less<>> layers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_PER_MODEL_H_
