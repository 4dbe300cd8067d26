#include "attention/cudnn/cudnn_backend.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "attention/attention.h"
#include "attention/cudnn/graph.h"
#include "attention/mechanism/softmax/chunked.h"
#include "attention/present.h"
#include "base/aligned_buffer.h"
#include "base/log.h"
#include "base/round_up.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"

namespace rapt::cudnn {
namespace {

// Ragged tensors are sent if they are at most this fraction of padded ones.
constexpr double kMaxRaggedFraction = 0.75;
// The limits of a batch. Beyond them the data leaves the caches, and packing it costs more than
// the saved launches.
constexpr int64_t kMaxBatchBytes = int64_t{4} << 20;
constexpr int64_t kMaxBatchRows = 64;
// Problems that need a wider state are not supported.
constexpr DType kStateType = DType::kFloat32;

// The threshold before Measure(): copying takes 99 % of the time of stateless decoding, and 75 % of
// a prefill of 8192 tokens.
constexpr double kDefaultMinFlops = 1e10;

// Takes 1 ms on a fast GPU, 100 ms on a slow one; 32 MiB as BF16.
constexpr int64_t kSampleLength = 32 << 10;

Partition PartitionOn(const Lanes& lanes, const Problem& problem) {
  return MakePartition(problem, lanes.tensor_bytes(), lanes.device().lanes());
}

// How the problem is partitioned for the device, and its batch group.
class DevicePlan final : public BackendPlan {
 public:
  DevicePlan(const Partition& partition, std::optional<BatchGroup> group)
      : partition_(partition), group_(std::move(group)) {}

  const Partition& partition() const { return partition_; }
  const BatchGroup* batch_group() const override { return group_ ? &*group_ : nullptr; }

 private:
  const Partition partition_;
  const std::optional<BatchGroup> group_;
};

Plan PlanOn(const Backend& backend, const Problem& problem, int threads) {
  Plan plan;
  plan.problem = problem;
  plan.routing.backend = &backend;
  plan.isa = ChooseIsa(backend, "auto");
  plan.threads = threads;
  if (!problem.empty()) backend.PlanTasks(plan);
  return plan;
}

void LogCosts(const CostModel& costs, std::chrono::nanoseconds time) {
  const auto giga = [](double rate) { return absl::StrFormat("%.3g", rate / 1e9); };
  const auto of = [&giga](const CostModel::PerType& rates, DType dtype) {
    return giga(rates[static_cast<size_t>(dtype)]);
  };
  const auto& [device, cpu] = costs;
  Log(LogLevel::kInfo, "device and cpu measured",
      {{"device_run_us", absl::StrFormat("%.3g", device.run_seconds * 1e6)},
       {"device_lane_gb_per_s", giga(device.lane_bytes_per_second)},
       {"device_gb_per_s", giga(device.bytes_per_second)},
       {"device_half_gflops", of(device.flops_per_second, DType::kBFloat16)},
       {"device_fp32_gflops", of(device.flops_per_second, DType::kFloat32)},
       {"cpu_gb_per_s", giga(cpu.bytes_per_second)},
       {"cpu_bf16_gflops", of(cpu.flops_per_second, DType::kBFloat16)},
       {"cpu_fp16_gflops", of(cpu.flops_per_second, DType::kFloat16)},
       {"cpu_fp32_gflops", of(cpu.flops_per_second, DType::kFloat32)},
       {"ms", std::chrono::duration_cast<std::chrono::milliseconds>(time).count()}});
}

// Returns one piece of each kind: all pieces but the last have the size of the first, and all split
// heads have the same kinds.
std::vector<Problem> KindsOfPieces(const Problem& problem, const Partition& partition) {
  std::vector<int64_t> tasks = {0, partition.task_count(problem) - 1};
  if (partition.splits_heads()) {
    tasks.resize(static_cast<size_t>(CountChunks(problem.query_length, partition.rows)));
    std::iota(tasks.begin(), tasks.end(), 0);
  }
  std::vector<Problem> kinds;
  for (const int64_t task : tasks) {
    for (int64_t n = 0; n < partition.pieces_per_task(problem); ++n) {
      kinds.push_back(ProblemOf(problem, partition.piece(problem, task, n)));
    }
  }
  return kinds;
}

// The same, without kinds that differ only in the position of the diagonal.
std::vector<Problem> SizesOfPieces(const Problem& problem, const Partition& partition) {
  std::vector<Problem> sizes;
  std::set<std::pair<int64_t, int64_t>> known;
  for (const Problem& kind : KindsOfPieces(problem, partition)) {
    const bool is_new = known.emplace(kind.query_length, kind.key_length).second;
    if (is_new || !partition.splits_heads()) sizes.push_back(kind);
  }
  return sizes;
}

// Returns the ragged graph that computes all parts in one run. REQUIRES: they differ only in sizes.
SdpaGraph RaggedGraphOf(absl::Span<const Part> parts) {
  int64_t batch = 0;
  int64_t queries = 1;
  int64_t keys = 1;
  for (const Part& part : parts) {
    const Problem& p = *part.problem;
    batch += p.batch;
    queries = std::max(queries, CropOf(p).queries);
    for (int64_t b = 0; b < p.batch; ++b) {
      keys = std::max(keys, KeysOf(p, part.arguments->key_lengths, b).count);
    }
  }
  return RaggedOf(GraphOf(*parts[0].problem), batch, queries, keys);
}

// Returns the fraction of a batch's capacity that a problem of this graph takes.
double BatchCostOf(const SdpaGraph& padded, const Lanes& lanes) {
  const int64_t capacity = std::min(kMaxBatchBytes, lanes.tensor_bytes() / 2);
  return std::max(static_cast<double>(LayOut(padded).end) / static_cast<double>(capacity),
                  static_cast<double>(padded.batch) / kMaxBatchRows);
}

bool MayGoOn(const Checkpoint& checkpoint) {
  return checkpoint.go_on == nullptr || checkpoint.go_on(checkpoint.context);
}

// Returns the bytes of the running softmax into which a task folds its pieces.
int64_t FoldedBytes(const Problem& problem, const Partition& partition) {
  if (!partition.splits_heads() || problem.folds) return 0;
  const Problem first = ProblemOf(problem, partition.piece(problem, 0, 0));
  return RoundUp(StateBytes(first, kStateType), AlignedBuffer::kAlignment);
}

}  // namespace

// --- CudnnBackend --------------------------------------------------------------------------------

void CudnnBackend::Start(absl::StatusOr<std::unique_ptr<Device>> device, const Backend& fallback,
                         const Clock& clock, BackendOptions options) {
  available_ = device.status();
  if (!device.ok()) return;
  fallback_ = &fallback;
  clock_ = &clock;
  options_ = std::move(options);
  device_ = *std::move(device);
  if (device_->page_memory_bytes() > 0) {
    pages_ = std::make_unique<PagePool>(device_->page_memory_bytes());
  }
  lanes_ = std::make_unique<Lanes>(*device_, clock, [this] {
    if (pages_ != nullptr) pages_->Clear();
  });
  plans_ = std::make_unique<PlanCache>(*device_, options_.plan_directory);
  if (pages_ == nullptr) return;
  paged_ = std::make_unique<PagedAttention>(*lanes_, *plans_, *pages_, fallback, fallback_pieces_,
                                            [this](const Work& on_device, const Work& on_host) {
                                              return CheckOffload(on_device, on_host);
                                            });
}

absl::Status CudnnBackend::Warm(absl::Span<const Problem> problems) {
  std::set<std::string> keys;
  for (size_t n = 0; n < problems.size(); ++n) {
    if (absl::Status status = Supports(problems[n]); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat("shape ", n + 1, ": ", status.message()));
    }
    for (SdpaGraph graph : GraphsOf(problems[n])) {
      if (keys.insert(graph.Key()).second) warm_.push_back(graph);
      graph.has_lengths = true;  // for shorter problems that round up to it
      if (keys.insert(graph.Key()).second) warm_.push_back(graph);
    }
  }
  for (const Problem& problem : problems) {
    for (const SdpaGraph& graph : RaggedGraphsOf(problem)) {
      if (keys.insert(graph.Key()).second) warm_.push_back(graph);
    }
  }
  if (measures()) {
    for (const Problem& sample : SamplesForLanes().all()) {
      for (const SdpaGraph& graph : GraphsOf(sample)) {
        if (keys.insert(graph.Key()).second) warm_.push_back(graph);
      }
    }
  }
  for (const SdpaGraph& graph : warm_) plans_->Pin(graph);
  return absl::OkStatus();
}

DeviceSamples CudnnBackend::SamplesForLanes() const {
  const auto samples = [this](int64_t length) { return DeviceSamples(length, device_->lanes()); };
  int64_t length = kSampleLength;
  while (PartitionOn(*lanes_, samples(length).full_fp32).splits_heads()) length /= 2;
  return samples(length);
}

Work CudnnBackend::WorkOnHost(const Problem& problem) const {
  return {
      .dtype = problem.dtype, .flops = FallbackPlan(problem).flops, .bytes = MovedBytes(problem)};
}

Work CudnnBackend::WorkOnDevice(const Problem& problem, Work work) const {
  const Partition partition = PartitionOn(*lanes_, problem);
  work.pieces = partition.task_count(problem) * partition.pieces_per_task(problem);
  work.lanes = std::min<int64_t>(partition.task_count(problem), device_->lanes());
  if (partition.splits_heads()) {  // every piece sends its queries and its keys
    work.bytes = static_cast<double>(work.pieces) *
                 MovedBytes(ProblemOf(problem, partition.piece(problem, 0, 0)));
  }
  return work;
}

absl::Status CudnnBackend::Measure(int threads, absl::FunctionRef<bool()> go_on) {
  measuring_ = true;
  absl::Status status = MeasureCosts(threads, go_on);
  measuring_ = false;
  return status;
}

absl::Status CudnnBackend::MeasureCosts(int threads, absl::FunctionRef<bool()> go_on) {
  const Instant begin = clock_->Now();
  ThreadPool lanes(device_->lanes());
  const auto device = MeasureDevice(
      SamplesForLanes(),
      [&](const Problem& sample) {
        return SecondsOf(PlanOn(*this, sample, lanes.workers()), lanes, *clock_, go_on);
      },
      [this](const Problem& sample) { return WorkOnDevice(sample, WorkOnHost(sample)); });
  if (!device.ok()) return device.status();
  ThreadPool cores(threads);
  const auto cpu = MeasureCpu(
      threads,
      [&](const Problem& sample) {
        return SecondsOf(PlanOn(*fallback_, sample, threads), cores, *clock_, go_on);
      },
      [this](const Problem& sample) { return WorkOnHost(sample); });
  if (!cpu.ok()) return cpu.status();
  measured_ = std::make_unique<const CostModel>(CostModel{*device, *cpu});
  LogCosts(*measured_, clock_->Now() - begin);
  costs_ = measured_.get();
  return absl::OkStatus();
}

std::optional<CudnnBackend::Estimate> CudnnBackend::EstimateOf(const Problem& problem) const {
  const Work work = WorkOnHost(problem);
  return EstimateOf(WorkOnDevice(problem, work), work);
}

std::optional<CudnnBackend::Estimate> CudnnBackend::EstimateOf(const Work& on_device,
                                                               const Work& on_host) const {
  const CostModel* const costs = costs_;
  if (costs == nullptr) return std::nullopt;
  return Estimate{.device = costs->device.Seconds(on_device),
                  .fallback = costs->cpu.Seconds(on_host)};
}

PlanCache::Counts CudnnBackend::warmth() const {
  PlanCache::Counts warmth;
  for (const SdpaGraph& graph : warm_) warmth.Add(plans_->Peek(graph).status());
  return warmth;
}

CudnnBackend::State CudnnBackend::state() const {
  if (device_ == nullptr) return {};
  return {.healthy = lanes_->health().usable(),
          .lanes = device_->lanes(),
          .busy_lanes = lanes_->health().running(),
          .memory_bytes = device_->lanes() * device_->arena_bytes(),
          .used_memory_bytes = lanes_->used_bytes(),
          .plans = plans_->Count(),
          .fallback_pieces = {fallback_pieces_[0], fallback_pieces_[1], fallback_pieces_[2],
                              fallback_pieces_[3]},
          .pages = pages_ == nullptr ? PagePool::Counts() : pages_->counts()};
}

void CudnnBackend::ExportTo(MetricSink& sink) const {
  const auto gauge = [this, &sink](const char* name, const char* help, auto read,
                                   const MetricSink::Labels& labels = {}) {
    sink.AddGauge(name, help, labels, [this, read] { return read(state()); });
  };
  gauge("rapt_device_healthy", "1 if there is a GPU that has not failed recently.",
        [](const State& s) { return s.healthy; });
  gauge("rapt_device_lanes", "Request pieces that the GPU can process at once.",
        [](const State& s) { return s.lanes; });
  gauge("rapt_device_lanes_busy", "Lanes in use.", [](const State& s) { return s.busy_lanes; });
  gauge("rapt_device_memory_bytes", "GPU memory allocated at the start.",
        [](const State& s) { return s.memory_bytes; });
  gauge("rapt_device_memory_used_bytes", "GPU memory in use by lanes and their kernels.",
        [](const State& s) { return s.used_memory_bytes; });
  const char* const plans_help = "Requested GPU kernels, by state.";
  gauge("rapt_device_plans", plans_help, [](const State& s) { return s.plans.ready; },
        {{"state", "ready"}});
  gauge("rapt_device_plans", plans_help, [](const State& s) { return s.plans.compiling; },
        {{"state", "compiling"}});
  gauge("rapt_device_plans", plans_help, [](const State& s) { return s.plans.declined; },
        {{"state", "declined"}});
  gauge("rapt_device_page_memory_bytes", "GPU memory for copies of the pages of caches.",
        [](const State& s) { return s.pages.memory_bytes; });
  gauge("rapt_device_page_resident_bytes", "Copies of the pages of caches in GPU memory.",
        [](const State& s) { return s.pages.resident_bytes; });
  const auto counter = [this, &sink](const char* name, const char* help, auto read) {
    sink.AddCounter(name, help, {}, [this, read] { return read(state()); });
  };
  counter("rapt_device_page_hits_total", "Pages that a run found in GPU memory, with all rows.",
          [](const State& s) { return s.pages.hits; });
  counter("rapt_device_page_misses_total", "Pages of which a run had to copy rows to the GPU.",
          [](const State& s) { return s.pages.misses; });
  counter("rapt_device_page_evictions_total", "Copies of pages that made room for others.",
          [](const State& s) { return s.pages.evictions; });
  counter("rapt_device_page_copied_bytes_total", "Bytes of pages copied to the GPU.",
          [](const State& s) { return s.pages.copied_bytes; });
  for (size_t n = 0; n < kFallbackReasons; ++n) {
    sink.AddCounter("rapt_device_stand_in_pieces_total",
                    "Pieces that the CPU computed as a fallback for the GPU.",
                    {{"reason", std::string(NameOf(static_cast<FallbackReason>(n)))}},
                    [this, n] { return state().fallback_pieces[n]; });
  }
}

void CudnnBackend::Stop() {
  available_ = NotStarted();
  warm_.clear();
  costs_ = nullptr;
  for (std::atomic<int64_t>& pieces : fallback_pieces_) pieces = 0;
  paged_.reset();
  plans_.reset();
  lanes_.reset();
  pages_.reset();
  device_.reset();
}

absl::Status CudnnBackend::Supports(const Problem& problem) const {
  absl::Status status = cudnn::Supports(problem);
  if (!status.ok() || problem.empty()) return status;
  const Partition partition = PartitionOn(*lanes_, problem);
  if (partition.batch == 0) {
    return absl::UnimplementedError(
        absl::StrCat(problem.backward ? "the gradients of a single head need more than"
                                      : "a few rows of a single head exceed",
                     " the ", lanes_->tensor_bytes(), " bytes of a device lane"));
  }
  if (!partition.splits_heads()) return absl::OkStatus();
  // At scores of -1e38, an FP32 lse has no precision left for the number of keys.
  if (problem.mask && problem.mask->dtype != DType::kBool &&
      problem.mask->dtype != DType::kFloat16) {
    return absl::UnimplementedError(
        absl::StrCat("a single head exceeds a device lane, and partial results cannot be merged "
                     "with a mask of type ",
                     NameOf(problem.mask->dtype)));
  }
  return cudnn::Supports(ProblemOf(problem, partition.piece(problem, 0, 0)));
}

absl::Status CudnnBackend::Prefers(const Problem& problem) const {
  if (problem.empty()) return absl::OutOfRangeError("the problem is empty");
  const Work work = WorkOnHost(problem);
  RAPT_RETURN_IF_ERROR(CheckOffload(WorkOnDevice(problem, work), work));
  for (const SdpaGraph& graph : GraphsOf(problem)) {
    RAPT_RETURN_IF_ERROR(plans_->Peek(graph).status());
  }
  return absl::OkStatus();
}

absl::Status CudnnBackend::CheckOffload(const Work& on_device, const Work& on_host) const {
  if (measuring_) return absl::UnavailableError("the device is being measured");
  if (const std::optional<Estimate> seconds = EstimateOf(on_device, on_host)) {
    if (seconds->device >= seconds->fallback) {
      return absl::OutOfRangeError(
          absl::StrFormat("estimated to take %.3g ms on the device and %.3g ms on the next backend",
                          seconds->device * 1e3, seconds->fallback * 1e3));
    }
  } else if (const double min_flops = options_.min_flops.value_or(kDefaultMinFlops);
             on_host.flops < min_flops) {
    return absl::OutOfRangeError(absl::StrCat(
        on_host.flops, " operations are below the GPU offload threshold of ", min_flops));
  }
  if (lanes_->health().usable()) return absl::OkStatus();
  return absl::UnavailableError("device unavailable after a failure; retrying after backoff");
}

void CudnnBackend::Prepare(const Problem& problem) const {
  for (const SdpaGraph& graph : GraphsOf(problem)) plans_->Find(graph).IgnoreError();
}

std::vector<SdpaGraph> CudnnBackend::GraphsOf(const Problem& problem) const {
  std::vector<SdpaGraph> graphs;
  if (problem.empty()) return graphs;
  std::set<std::string> keys;
  for (const Problem& piece : KindsOfPieces(problem, PartitionOn(*lanes_, problem))) {
    if (CropOf(piece).empty()) continue;
    const SdpaGraph graph = GraphOf(piece);
    if (keys.insert(graph.Key()).second) graphs.push_back(graph);
  }
  return graphs;
}

std::vector<SdpaGraph> CudnnBackend::RaggedGraphsOf(const Problem& problem) const {
  std::vector<SdpaGraph> graphs;
  for (const SdpaGraph& padded : GraphsOf(problem)) {
    if (!MayBeRagged(padded)) continue;
    const auto batched = static_cast<int64_t>(1 / BatchCostOf(padded, *lanes_));
    const int64_t max_batch = padded.batch * std::max<int64_t>(1, batched);
    int64_t batch = problem.has_key_lengths ? padded.batch : 2 * padded.batch;
    for (; batch <= max_batch; batch = graphs.back().batch + 1) {
      graphs.push_back(RaggedOf(padded, batch, padded.query_length, padded.key_length));
    }
  }
  return graphs;
}

void CudnnBackend::PlanTasks(Plan& plan) const {
  const Problem& p = plan.problem;
  plan.stages = {PresentTasks(p)};
  if (p.empty()) return;
  const Partition partition = PartitionOn(*lanes_, p);
  plan.stages[0] += partition.task_count(p);
  for (const Problem& piece : SizesOfPieces(p, partition)) {
    plan.worker_workspace_bytes =
        std::max(plan.worker_workspace_bytes, FallbackPlan(piece).workspace_bytes());
  }
  plan.worker_workspace_bytes = RoundUp(plan.worker_workspace_bytes, AlignedBuffer::kAlignment);
  plan.worker_workspace_bytes += FoldedBytes(p, partition);
  plan.flops = FallbackPlan(p).flops;
  plan.backend_plan = std::make_shared<DevicePlan>(partition, BatchGroupOf(plan));
}

void CudnnBackend::RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace,
                           int /*stage*/, int64_t task, int worker,
                           const Checkpoint& checkpoint) const {
  const Problem& problem = plan.problem;
  if (task < PresentTasks(problem)) return RunPresentTask(problem, arguments, task);
  const Partition& partition = static_cast<const DevicePlan&>(*plan.backend_plan).partition();
  const int64_t device_task = task - PresentTasks(problem);
  std::byte* const own_workspace = workspace + worker * plan.worker_workspace_bytes;
  if (partition.splits_heads()) {
    return RunSplitHead(problem, partition, device_task, arguments, own_workspace, worker,
                        checkpoint);
  }
  const Piece piece = partition.piece(problem, device_task, 0);
  const PieceArguments part(arguments, problem, piece);
  RunPiece(ProblemOf(problem, piece), part.arguments(), own_workspace, worker, checkpoint);
}

std::optional<BatchGroup> CudnnBackend::BatchGroupOf(const Plan& plan) const {
  const Problem& p = plan.problem;
  if (plan.stages[0] != 1 || CropOf(p).empty()) return std::nullopt;
  const SdpaGraph padded = GraphOf(p);
  const double cost = BatchCostOf(padded, *lanes_);
  if (!MayBeRagged(padded) || cost > 0.5) return std::nullopt;
  // Problems with equal keys of this graph can share a ragged graph.
  const SdpaGraph common = RaggedOf(padded, 1, std::min<int64_t>(padded.query_length, 2), 1);
  return BatchGroup{absl::StrFormat("%s scale%a", common.Key(), common.scale), cost};
}

void CudnnBackend::RunBatch(absl::Span<BatchMember> members, int worker) const {
  std::vector<Part> parts;
  for (const BatchMember& member : members) {
    parts.push_back({&member.plan->problem, member.arguments});
  }
  const SdpaGraph graph = RaggedGraphOf(parts);
  const absl::StatusOr<CompiledPlanPtr> plan = plans_->Find(graph);
  if (!plan.ok()) return;
  const std::vector<std::optional<FallbackReason>> reasons = RunGraph(graph, **plan, parts, worker);
  for (size_t n = 0; n < members.size(); ++n) members[n].done = !reasons[n];
}

void CudnnBackend::RunSplitHead(const Problem& problem, const Partition& partition, int64_t task,
                                const Arguments& arguments, std::byte* workspace, int worker,
                                const Checkpoint& checkpoint) const {
  const Piece first = partition.piece(problem, task, 0);
  const Problem rows = ProblemOf(problem, first);
  const PieceArguments first_part(arguments, problem, first);
  const Arguments& of_rows = first_part.arguments();
  Arguments::State state = of_rows.state;
  if (!problem.folds) {
    state = StateIn(rows, kStateType, workspace);
    ClearState(state);
  }
  std::byte* const piece_workspace = workspace + FoldedBytes(problem, partition);
  for (int64_t n = 0; n < partition.pieces_per_task(problem); ++n) {
    if (!MayGoOn(checkpoint)) return;
    const Piece piece = partition.piece(problem, task, n);
    const PieceArguments part(arguments, problem, piece);
    RunPiece(ProblemOf(problem, piece), part.FoldingInto(state), piece_workspace, worker,
             checkpoint);
  }
  if (problem.folds) return;
  for (int64_t head = 0; head < rows.query_heads; ++head) {
    FinishRows(rows, first_part.FoldingInto(state), 0, of_rows.outputs[Role::kY],
               of_rows.outputs[Role::kLse], head);
  }
}

void CudnnBackend::RunPiece(const Problem& piece, const Arguments& arguments, std::byte* workspace,
                            int worker, const Checkpoint& checkpoint) const {
  const std::optional<FallbackReason> reason = RunOnLane(piece, arguments, worker);
  if (!reason) return;
  ++fallback_pieces_[static_cast<size_t>(*reason)];
  if (arguments.piece_fallback != nullptr) *arguments.piece_fallback = fallback_;
  RunFallback(piece, arguments, workspace, checkpoint);
}

std::optional<FallbackReason> CudnnBackend::RunOnLane(const Problem& problem,
                                                      const Arguments& arguments,
                                                      int worker) const {
  if (CropOf(problem).empty()) {
    WriteFullyMasked(problem, arguments);
    return std::nullopt;
  }
  const Part part{&problem, &arguments};
  const SdpaGraph graph = GraphFor(part);
  const absl::StatusOr<CompiledPlanPtr> plan = plans_->Get(graph);
  if (!plan.ok()) return FallbackReason::kKernels;
  return RunGraph(graph, **plan, {&part, 1}, worker)[0];
}

SdpaGraph CudnnBackend::GraphFor(const Part& part) const {
  SdpaGraph padded = GraphOf(*part.problem);
  if (!part.problem->has_key_lengths || !MayBeRagged(padded)) return padded;
  SdpaGraph ragged = RaggedGraphOf({&part, 1});
  const int64_t bytes = Staging(ragged, {&part, 1}).layout().end;
  if (bytes > LayOut(padded).end * kMaxRaggedFraction) return padded;
  return plans_->Find(ragged).ok() ? ragged : padded;
}

std::vector<std::optional<FallbackReason>> CudnnBackend::RunGraph(const SdpaGraph& graph,
                                                                  const CompiledPlan& plan,
                                                                  absl::Span<const Part> parts,
                                                                  int worker) const {
  const Staging staging(graph, parts);
  const int64_t bytes = staging.layout().end + plan.workspace_bytes;
  std::vector<std::optional<FallbackReason>> reasons(parts.size(), FallbackReason::kMemory);
  if (bytes > device_->arena_bytes()) return reasons;
  reasons.assign(parts.size(), FallbackReason::kDevice);
  lanes_->Use(worker, bytes, [&](Lane& lane) {
    std::byte* const arena = lane.host().data();
    const std::vector<bool> staged = staging.StageInputs(arena);
    std::optional<absl::Status> run;
    if (std::find(staged.begin(), staged.end(), true) != staged.end()) {
      run = lane.Run(graph, plan, staging.layout());
    }
    for (size_t n = 0; n < parts.size(); ++n) {
      if (!staged[n]) {
        reasons[n] = FallbackReason::kNumbers;
      } else if (run->ok()) {
        staging.TakeOutputs(n, arena);
        reasons[n] = std::nullopt;
      }
    }
    return run;
  });
  return reasons;
}

Plan CudnnBackend::FallbackPlan(const Problem& problem) const {
  return PlanOn(*fallback_, problem, 1);
}

void CudnnBackend::RunFallback(const Problem& problem, const Arguments& arguments,
                               std::byte* workspace, const Checkpoint& checkpoint) const {
  const Plan plan = FallbackPlan(problem);
  for (size_t stage = 0; stage < plan.stages.size(); ++stage) {
    for (int64_t task = 0; task < plan.stages[stage]; ++task) {
      if (!MayGoOn(checkpoint)) return;
      fallback_->RunTask(plan, arguments, workspace, static_cast<int>(stage), task, /*worker=*/0,
                         checkpoint);
    }
  }
}

}  // namespace rapt::cudnn
