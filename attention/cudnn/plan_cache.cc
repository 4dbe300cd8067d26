#include "attention/cudnn/plan_cache.h"

#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/log.h"
#include "base/status_macros.h"

namespace rapt::cudnn {
namespace {

absl::Status BeingCompiled() { return absl::UnavailableError("cuDNN is compiling the kernels"); }

// FNV-1a: collisions of file names only have to be unlikely.
uint64_t HashOf(const std::string& text) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

// File format: the key, workspace and size of the plan, each on a line, then the plan.
std::optional<CompiledPlan> ReadPlan(const std::string& path, const std::string& key) {
  std::ifstream file(path, std::ios::binary);
  std::string line;
  if (!std::getline(file, line) || line != key) return std::nullopt;
  CompiledPlan plan;
  size_t size = 0;
  if (!(file >> plan.workspace_bytes >> size) || file.get() != '\n') return std::nullopt;
  plan.bytes.assign(std::istreambuf_iterator<char>(file), {});
  if (plan.bytes.size() != size) return std::nullopt;
  return plan;
}

// Atomic even if two servers share the directory.
void WritePlan(const std::string& path, const std::string& key, const CompiledPlan& plan) {
  const std::string part = absl::StrCat(path, ".", getpid());
  std::ofstream file(part, std::ios::binary);
  file << key << '\n' << plan.workspace_bytes << '\n' << plan.bytes.size() << '\n';
  file.write(reinterpret_cast<const char*>(plan.bytes.data()),
             static_cast<std::streamsize>(plan.bytes.size()));
  file.close();
  if (!file || std::rename(part.c_str(), path.c_str()) != 0) std::remove(part.c_str());
}

}  // namespace

PlanCache::PlanCache(Device& device, std::string directory, Limits limits)
    : device_(device),
      directory_(std::move(directory)),
      limits_(limits),
      compiler_([this] { CompileLoop(); }) {}

PlanCache::~PlanCache() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.SignalAll();
  compiler_.join();
}

absl::StatusOr<CompiledPlanPtr> PlanCache::Peek(const SdpaGraph& graph) {
  MutexLock lock(mutex_);
  const auto entry = entries_.find(graph.Key());
  if (entry == entries_.end()) return absl::UnavailableError("the kernels are not compiled yet");
  return Use(entry->second);
}

absl::StatusOr<CompiledPlanPtr> PlanCache::Find(const SdpaGraph& graph) {
  MutexLock lock(mutex_);
  return FindOrEnqueue(graph);
}

absl::StatusOr<CompiledPlanPtr> PlanCache::Get(const SdpaGraph& graph) {
  MutexLock lock(mutex_);
  for (;;) {
    absl::StatusOr<CompiledPlanPtr> plan = FindOrEnqueue(graph);
    if (!absl::IsUnavailable(plan.status()) || stopping_) return plan;
    changed_.Wait(mutex_);
  }
}

void PlanCache::Pin(const SdpaGraph& graph) {
  MutexLock lock(mutex_);
  const auto entry = entries_.find(graph.Key());
  Entry& to_pin = entry == entries_.end() ? Enqueue(graph) : entry->second;
  if (!std::exchange(to_pin.pinned, true)) ++pinned_;
}

void PlanCache::Counts::Add(const absl::Status& plan) {
  ++(plan.ok() ? ready : absl::IsUnavailable(plan) ? compiling : declined);
}

PlanCache::Counts PlanCache::Count() const {
  Counts counts;
  MutexLock lock(mutex_);
  for (const auto& [key, entry] : entries_) counts.Add(entry.plan.status());
  return counts;
}

absl::StatusOr<CompiledPlanPtr> PlanCache::FindOrEnqueue(const SdpaGraph& graph) {
  const auto entry = entries_.find(graph.Key());
  if (entry != entries_.end()) return Use(entry->second);
  if (queue_.size() >= limits_.waiting) {
    return absl::UnavailableError("the queue of kernels to compile is full");
  }
  EvictIfFull();
  return Use(Enqueue(graph));
}

absl::StatusOr<CompiledPlanPtr> PlanCache::Use(Entry& entry) {
  entry.last_use = ++uses_;
  return entry.plan;
}

PlanCache::Entry& PlanCache::Enqueue(const SdpaGraph& graph) {
  queue_.push_back(graph);
  changed_.SignalAll();
  return entries_.try_emplace(graph.Key(), Entry{BeingCompiled()}).first->second;
}

// A linear search: compiling is rare and takes a second.
void PlanCache::EvictIfFull() {
  if (entries_.size() - pinned_ < limits_.plans) return;
  auto oldest = entries_.end();
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    const bool evictable =
        !entry->second.pinned && !absl::IsUnavailable(entry->second.plan.status());
    if (!evictable) continue;
    if (oldest == entries_.end() || entry->second.last_use < oldest->second.last_use) {
      oldest = entry;
    }
  }
  if (oldest != entries_.end()) entries_.erase(oldest);
}

void PlanCache::CompileLoop() {
  for (;;) {
    SdpaGraph graph;
    {
      MutexLock lock(mutex_);
      while (queue_.empty() && !stopping_) changed_.Wait(mutex_);
      if (stopping_) return;
      graph = queue_.front();
      queue_.pop_front();
    }
    absl::StatusOr<CompiledPlanPtr> made = Make(graph);
    // Unavailable is reserved for plans in the queue.
    if (absl::IsUnavailable(made.status())) {
      made = absl::InternalError(std::string(made.status().message()));
    }
    if (!made.ok()) {
      Log(LogLevel::kWarning, "kernels not compiled",
          {{"graph", graph.Key()}, {"error", made.status().message()}});
    }
    MutexLock lock(mutex_);
    entries_.at(graph.Key()).plan = std::move(made);
    changed_.SignalAll();
  }
}

absl::StatusOr<CompiledPlanPtr> PlanCache::Make(const SdpaGraph& graph) const {
  const std::string key = absl::StrCat(device_.kind(), " ", graph.Key());
  const std::string path = directory_.empty() ? "" : PathOf(key);
  if (!path.empty()) {
    if (std::optional<CompiledPlan> stored = ReadPlan(path, key)) {
      return std::make_shared<const CompiledPlan>(*std::move(stored));
    }
  }
  RAPT_ASSIGN_OR_RETURN(CompiledPlan compiled, device_.Compile(graph));
  Log(LogLevel::kInfo, "kernels compiled", {{"graph", graph.Key()}});
  if (!path.empty()) WritePlan(path, key, compiled);
  return std::make_shared<const CompiledPlan>(std::move(compiled));
}

std::string PlanCache::PathOf(const std::string& key) const {
  return absl::StrFormat("%s/%016x.plan", directory_, HashOf(key));
}

}  // namespace rapt::cudnn
