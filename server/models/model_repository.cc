#include "server/models/model_repository.h"

#include <algorithm>
#include <filesystem>
#include <new>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "attention/layer/files/layer_files.h"
#include "attention/layer/files/reading_memory.h"
#include "base/clock.h"
#include "base/invalid.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"

namespace rapt {
namespace {

// Returns whether a folder has a file of a model. Others, such as lost+found, are not errors.
bool HasFiles(const std::filesystem::path& folder) {
  std::error_code unknown;  // as without the file
  return std::filesystem::exists(folder / kConfigFile, unknown) ||
         std::filesystem::exists(folder / kWeightsFile, unknown) ||
         std::filesystem::exists(folder / kWeightsIndexFile, unknown);
}

// A layer with its part of the budget.
struct ChargedLayer {
  AdmissionGate::LongReservation memory;
  std::shared_ptr<const Layer> layer;  // destroyed first
};

absl::StatusOr<std::shared_ptr<const Layer>> Pack(const LayerFiles& files, int threads) {
  try {
    ThreadPool pool(threads);
    return MakeLayer(files, pool);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("the system has no memory for the weights");
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat("no threads: ", error.what()));
  }
}

}  // namespace

std::string ModelRepository::PathOf(const std::string& name) const {
  return absl::StrCat(options_.folder, "/", name);
}

absl::StatusOr<std::vector<std::string>> ModelRepository::Folders() const {
  std::error_code error;
  std::vector<std::string> names;
  for (auto entry = std::filesystem::directory_iterator(options_.folder, error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    std::string name = entry->path().filename().string();
    std::error_code unknown;
    if (name[0] == '.' || entry->is_regular_file(unknown)) continue;
    if (HasFiles(entry->path())) {
      names.push_back(std::move(name));
    } else {
      Log(LogLevel::kWarning, "no model: the folder has neither config.json nor model.safetensors",
          {{"folder", name}});
    }
  }
  if (error) return Invalid("--model_repository can't be read: ", error.message());
  std::sort(names.begin(), names.end());
  return names;
}

// A name from a caller must not lead out of the repository.
absl::Status ModelRepository::CheckName(absl::string_view name) const {
  const bool is_plain = std::all_of(name.begin(), name.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-' || c == '.';
  });
  if (!is_plain || name.empty() || name[0] == '.' || name.size() > kMaxNameBytes) {
    return Invalid("model '", name.substr(0, kMaxNameBytes), "': a name consists of 1 to ",
                   kMaxNameBytes,
                   " letters, digits, '_', '-' and '.', which it may not begin with");
  }
  if (std::find(options_.reserved.begin(), options_.reserved.end(), name) ==
      options_.reserved.end()) {
    return absl::OkStatus();
  }
  return Invalid("model '", name, "' is built in or reserved; it can't be loaded or unloaded");
}

absl::StatusOr<ModelInfoPtr> ModelRepository::Make(const std::string& name) {
  // Until the weights are packed.
  RAPT_ASSIGN_OR_RETURN(
      const MemoryBudget::Reservation reading,
      gate_.ReserveBehindCalls(ReadingBytes(PathOf(name)), "memory for reading its files"));
  RAPT_ASSIGN_OR_RETURN(const LayerFiles files, ReadLayerFiles(PathOf(name)));
  RAPT_ASSIGN_OR_RETURN(const int64_t bytes, LayerBytes(files.config, files.weights));
  RAPT_ASSIGN_OR_RETURN(AdmissionGate::LongReservation memory, gate_.ReserveForLong(bytes));
  RAPT_ASSIGN_OR_RETURN(std::shared_ptr<const Layer> layer, Pack(files, options_.threads));
  auto charged = std::make_shared<ChargedLayer>();
  charged->memory = std::move(memory);
  charged->layer = std::move(layer);
  const Layer* const packed = charged->layer.get();
  return std::make_shared<const ModelInfo>(LayerModel(name, {std::move(charged), packed}));
}

void ModelRepository::ForgetRemoved() {
  std::vector<std::string> removed;
  for (const Entry& entry : Describe()) {
    if (!entry.is_loaded) removed.push_back(entry.name);
  }
  // Without mutex_, for which requests wait: a file system may take long to answer.
  std::erase_if(removed, [&](const std::string& name) {
    std::error_code unknown;  // the folder may exist, then
    return std::filesystem::status(PathOf(name), unknown).type() !=
           std::filesystem::file_type::not_found;
  });
  MutexLock lock(mutex_);
  for (const std::string& name : removed) models_.erase(name);
}

absl::StatusOr<ModelInfoPtr> ModelRepository::Load(const std::string& name) {
  RAPT_RETURN_IF_ERROR(CheckName(name));
  MutexLock loading(loading_);
  ForgetRemoved();
  {
    MutexLock lock(mutex_);
    if (models_.size() >= kMaxModels && !models_.contains(name)) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "model '", name, "': the repository has ", models_.size(), " models, the most allowed"));
    }
  }
  const SteadyClock clock;
  const Instant begin = clock.Now();
  absl::StatusOr<ModelInfoPtr> made = Make(name);
  if (!made.ok()) {
    return absl::Status(made.status().code(),
                        absl::StrCat("model '", name, "': ", made.status().message()));
  }
  Log(LogLevel::kInfo, "model loaded",
      {{"model", name},
       {"bytes", (*made)->layer->bytes()},
       {"ms", Milliseconds(clock.Now() - begin)}});
  return Replace(name, *std::move(made));
}

absl::StatusOr<ModelInfoPtr> ModelRepository::Unload(const std::string& name) {
  RAPT_RETURN_IF_ERROR(CheckName(name));
  MutexLock loading(loading_);
  {
    MutexLock lock(mutex_);
    if (!models_.contains(name)) {
      return absl::NotFoundError(absl::StrCat("unknown model '", name, "'"));
    }
  }
  ModelInfoPtr unloaded = Replace(name, nullptr);
  if (unloaded != nullptr) Log(LogLevel::kInfo, "model unloaded", {{"model", name}});
  return unloaded;
}

ModelInfoPtr ModelRepository::Replace(const std::string& name, ModelInfoPtr model) {
  {
    MutexLock lock(mutex_);
    models_[name].swap(model);
  }
  if (model != nullptr) *model->has_ended = true;
  return model;
}

absl::Status ModelRepository::LoadAll(absl::FunctionRef<bool()> stop_requested) {
  RAPT_ASSIGN_OR_RETURN(const std::vector<std::string> names, Folders());
  for (const std::string& name : names) {
    if (stop_requested()) return absl::CancelledError("stopped while models were loaded");
    RAPT_RETURN_IF_ERROR(Load(name).status());
  }
  return absl::OkStatus();
}

ModelInfoPtr ModelRepository::Find(absl::string_view name) const {
  MutexLock lock(mutex_);
  const auto model = models_.find(name);
  return model == models_.end() ? nullptr : model->second;
}

std::vector<ModelInfoPtr> ModelRepository::loaded() const {
  std::vector<ModelInfoPtr> loaded;
  MutexLock lock(mutex_);
  for (const auto& [name, layer] : models_) {
    if (layer != nullptr) loaded.push_back(layer);
  }
  return loaded;
}

std::vector<ModelRepository::Entry> ModelRepository::Describe() const {
  std::vector<Entry> entries;
  MutexLock lock(mutex_);
  for (const auto& [name, layer] : models_) {
    entries.push_back({name, layer != nullptr, layer != nullptr ? "" : "unloaded"});
  }
  return entries;
}

}  // namespace rapt
