// The layers of --model_repository: a model for each folder with config.json and model.safetensors.
#ifndef RAPT_SERVER_MODELS_MODEL_REPOSITORY_H_
#define RAPT_SERVER_MODELS_MODEL_REPOSITORY_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "server/admission/gate.h"
#include "server/models/model_info.h"

namespace rapt {

// Thread-safe. Loading and unloading wait for each other and may take seconds; the other functions
// do not wait for them.
class ModelRepository {
 public:
  static constexpr size_t kMaxModels = 1000;
  static constexpr size_t kMaxNameBytes = 128;

  struct Options {
    std::string folder;
    std::vector<std::string> reserved;  // names that no folder may have, as of built-in models
    int threads = 1;                    // that pack weights
  };

  // A model that is served, or was, or could not be loaded again.
  struct Entry {
    std::string name;
    bool is_loaded;
    std::string reason;  // why it is not
  };

  // REQUIRES: `gate` outlives this and its layers.
  ModelRepository(Options options, AdmissionGate& gate)
      : options_(std::move(options)), gate_(gate) {}

  // Loads every folder of the repository, apart from hidden ones and, with a warning, those that
  // have neither file of a model. Returns the first error, with the
  // model's name; Cancelled as soon as `stop_requested` returns true.
  absl::Status LoadAll(absl::FunctionRef<bool()> stop_requested);

  // Reads the model's folder again, replaces the layer, which calls in flight still use, and
  // returns the one replaced; null if the model was not loaded. After an error the model is what it
  // was before. Returns InvalidArgument for a name that no folder may have and for files that make
  // no layer, NotFound without files, Aborted for files that change meanwhile, ResourceExhausted,
  // with needed and allowed bytes, if the budget has no room for reading the files, or for the
  // weights beside all others.
  absl::StatusOr<ModelInfoPtr> Load(const std::string& name);

  // Ends the service of a model, and returns it; null if it was not loaded. Its memory is free once
  // its last call has ended. NotFound for an unknown model.
  absl::StatusOr<ModelInfoPtr> Unload(const std::string& name);

  // Returns null unless the model is loaded.
  ModelInfoPtr Find(absl::string_view name) const;
  // Returns the models that are loaded, by name.
  std::vector<ModelInfoPtr> loaded() const;
  // Returns these, and those that were unloaded and whose folder exists.
  std::vector<Entry> Describe() const;

 private:
  using Models = std::map<std::string, ModelInfoPtr, std::less<>>;

  absl::StatusOr<std::vector<std::string>> Folders() const;
  absl::Status CheckName(absl::string_view name) const;
  absl::StatusOr<ModelInfoPtr> Make(const std::string& name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(loading_);
  // Returns the layer that was served until now, which has ended.
  ModelInfoPtr Replace(const std::string& name, ModelInfoPtr model)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(loading_);
  // Forgets models that were unloaded and whose folder does not exist.
  void ForgetRemoved() ABSL_EXCLUSIVE_LOCKS_REQUIRED(loading_);
  std::string PathOf(const std::string& name) const;

  const Options options_;
  AdmissionGate& gate_;
  Mutex loading_;  // held while a model is loaded or unloaded
  mutable Mutex mutex_;
  Models models_ ABSL_GUARDED_BY(mutex_);  // null: unloaded
};

}  // namespace rapt

#endif  // RAPT_SERVER_MODELS_MODEL_REPOSITORY_H_
