#include "attention/cudnn/paged_attention.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "attention/attention.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace rapt::cudnn {
namespace {

// Returns the pages that hold the tokens.
int64_t PagesOf(const TokenRange& tokens, int64_t page_rows) {
  return tokens.empty() ? 0 : CeilDiv(tokens.end, page_rows) - tokens.begin / page_rows;
}

// Returns the pages that the items read, those of a shared prefix once.
int64_t PagesIn(const RaggedCall& call) {
  int64_t pages = 0;
  for (const RaggedItem& item : call.items) pages += PagesOf(SeenBy(item), call.page_rows);
  for (const SharedPrefix& prefix : call.prefixes) {
    const auto others = static_cast<int64_t>(prefix.items.size()) - 1;
    pages -= others * (prefix.tokens / call.page_rows);
  }
  return pages;
}

// The work of a call whose pages the device has; on the CPU, all keys and values are moved, too.
Work WorkOf(const RaggedCall& call, bool moves_pages) {
  double rows = 0, tokens = 0, pairs = 0;
  for (const RaggedItem& item : call.items) {
    const TokenRange range = SeenBy(item);
    if (item.rows == 0 || range.empty()) continue;
    const int64_t seen = range.end - range.begin;
    const int64_t by_a_row = std::min(seen, WindowOf(item).value_or(seen - 1) + 1);
    rows += static_cast<double>(item.rows);
    tokens += static_cast<double>(seen);
    pairs += static_cast<double>(by_a_row) * static_cast<double>(item.rows);
  }
  const auto sizes = static_cast<double>(call.head_size + call.value_head_size);
  const auto query_heads = static_cast<double>(call.query_heads);
  const double moved_tokens = moves_pages ? tokens * static_cast<double>(call.kv_heads) : 0;
  return {.dtype = call.dtype,
          .flops = 2 * pairs * query_heads * sizes,
          .bytes = (rows * query_heads + moved_tokens) * sizes *
                   static_cast<double>(SizeOf(call.dtype))};
}

// Items of a run as those of a call of their own.
class Subset final : public RaggedSource {
 public:
  Subset(const RaggedSource& all, absl::Span<const PagedItem> items) : all_(all), items_(items) {}

  TensorView keys(int64_t item) const override { return all_.keys(items_[item].item); }
  TensorView values(int64_t item) const override { return all_.values(items_[item].item); }
  bool has_failed(int64_t item) const override { return all_.has_failed(items_[item].item); }

 private:
  const RaggedSource& all_;
  const absl::Span<const PagedItem> items_;
};

bool MayGoOn(const Checkpoint& checkpoint) {
  return checkpoint.go_on == nullptr || checkpoint.go_on(checkpoint.context);
}

}  // namespace

// One run on the device, and its computation on the fallback.
class PagedAttention::Run {
 public:
  Run(const RaggedCall& call, const RaggedSource& source, Batch batch, const Backend& fallback)
      : call_(call), source_(source), batch_(std::move(batch)), subset_(source, batch_.items) {
    RaggedCall part = call;
    part.prefixes.clear();
    part.items.clear();
    for (const PagedItem& item : batch_.items) {
      part.items.push_back(call.items[item.item]);
      rows_ += item.rows;
    }
    is_whole_ = part.items.size() == call.items.size();
    // The call was accepted, so its parts are valid.
    operator_ = *MakeRaggedAttention(std::move(part), subset_);
    plan_.routing.backend = &fallback;
    plan_.isa = ChooseIsa(fallback, "auto");
    plan_.threads = 1;
    operator_->PlanTasks(plan_);
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  const RaggedCall& call() const { return call_; }
  const RaggedSource& source() const { return source_; }
  const SdpaGraph& graph() const { return batch_.graph; }
  const std::vector<PagedItem>& items() const { return batch_.items; }
  double flops() const { return plan_.flops; }
  int64_t fallback_bytes() const {
    return RoundUp(plan_.workspace_bytes(), kWorkspaceAlignment) + GatheredBytes();
  }

  // The memory that PagedStaging and PagePool::Lease take for the run.
  int64_t staging_bytes() const {
    constexpr auto kUseBytes =
        static_cast<int64_t>(sizeof(PageUse) + sizeof(size_t) + sizeof(void*));
    int64_t uses = 0;
    for (const PagedItem& item : batch_.items) uses += PagesOf(item.seen, graph().pages->rows);
    return uses * kUseBytes;
  }

  // Computes the items on the fallback, on one thread. `workspace` has fallback_bytes().
  void RunFallback(const Arguments& arguments, std::byte* workspace,
                   const Checkpoint& checkpoint) const {
    if (is_whole_) return RunStages(arguments, workspace, checkpoint);
    std::byte* next = workspace + RoundUp(plan_.workspace_bytes(), kWorkspaceAlignment);
    const auto take = [&](int64_t row_bytes) {
      std::byte* const taken = next;
      next += RoundUp(rows_ * row_bytes, kWorkspaceAlignment);
      return taken;
    };
    Arguments part;
    std::byte* const queries = take(QueryBytes());
    part.inputs[Role::kQ].data = queries;
    part.outputs[Role::kY].data = take(OutputBytes());
    if (call_.wants_lse) part.outputs[Role::kLse].data = take(LseBytes());
    const auto copy = [](std::byte* to, const std::byte* from, int64_t bytes) {
      std::memcpy(to, from, static_cast<size_t>(bytes));
    };
    int64_t row = 0;
    for (const PagedItem& item : batch_.items) {
      copy(queries + row * QueryBytes(),
           arguments.inputs[Role::kQ].data + item.first_row * QueryBytes(),
           item.rows * QueryBytes());
      row += item.rows;
    }
    RunStages(part, workspace, checkpoint);
    row = 0;
    for (const PagedItem& item : batch_.items) {
      const auto scatter = [&](Role role, int64_t row_bytes) {
        copy(arguments.outputs[role].data + item.first_row * row_bytes,
             part.outputs[role].data + row * row_bytes, item.rows * row_bytes);
      };
      scatter(Role::kY, OutputBytes());
      if (call_.wants_lse) scatter(Role::kLse, LseBytes());
      row += item.rows;
    }
  }

 private:
  // Bytes of a row, of all heads.
  int64_t QueryBytes() const { return call_.query_heads * call_.head_size * SizeOf(call_.dtype); }
  int64_t OutputBytes() const {
    return call_.query_heads * call_.value_head_size * SizeOf(call_.dtype);
  }
  int64_t LseBytes() const { return call_.query_heads * SizeOf(DType::kFloat32); }

  // A part of a call has its rows in one piece, gathered from the call's and scattered to them.
  int64_t GatheredBytes() const {
    if (is_whole_) return 0;
    int64_t bytes = 0;
    for (const int64_t row_bytes : {QueryBytes(), OutputBytes(), LseBytes()}) {
      bytes += RoundUp(rows_ * row_bytes, kWorkspaceAlignment);
    }
    return bytes;
  }

  void RunStages(const Arguments& arguments, std::byte* workspace,
                 const Checkpoint& checkpoint) const {
    for (size_t stage = 0; stage < plan_.stages.size(); ++stage) {
      for (int64_t task = 0; task < plan_.stages[stage]; ++task) {
        if (!MayGoOn(checkpoint)) return;
        operator_->RunTask(plan_, arguments, workspace, static_cast<int>(stage), task, 0,
                           checkpoint);
      }
    }
  }

  const RaggedCall& call_;
  const RaggedSource& source_;
  const Batch batch_;
  const Subset subset_;
  bool is_whole_ = false;  // the run has all items of the call
  int64_t rows_ = 0;
  std::shared_ptr<const TensorOperator> operator_;
  Plan plan_;
};

class PagedAttention::PagedPlan final : public BackendPlan {
 public:
  // "32 items, 2 runs", "1 item, 1 run"
  std::string Describe() const override {
    size_t items = 0;
    for (const auto& run : runs) items += run->items().size();
    return absl::StrCat(items, items == 1 ? " item, " : " items, ", runs.size(),
                        runs.size() == 1 ? " run" : " runs");
  }

  std::vector<std::unique_ptr<const Run>> runs;
};

GraphPages PagedAttention::PagesFor(const RaggedCall& call) const {
  return {.rows = call.page_rows, .count = lanes_.device().page_memory_bytes() / PageBytes(call)};
}

std::vector<PagedAttention::Batch> PagedAttention::BatchesOf(const RaggedCall& call) const {
  // By the rows of their graphs, and the window.
  std::map<std::pair<int64_t, std::optional<int64_t>>, std::vector<PagedItem>> alike;
  int64_t first_row = 0;
  for (size_t n = 0; n < call.items.size(); ++n) {
    const RaggedItem& item = call.items[n];
    if (item.rows > 0) {
      const int64_t rows = item.rows == 1 ? 1 : RoundUpLength(item.rows);
      alike[{rows, WindowOf(item)}].push_back(
          {static_cast<int64_t>(n), first_row, item.rows, SeenBy(item)});
    }
    first_row += item.rows;
  }
  const GraphPages pages = PagesFor(call);
  std::vector<Batch> batches;
  for (const auto& [kind, items] : alike) {
    PagedSizes sizes = {.rows = kind.first, .tokens = 1, .window = kind.second};
    for (const PagedItem& item : items) sizes.tokens = std::max(sizes.tokens, item.seen.end);
    const auto graph_of = [&](size_t count) {
      sizes.items = static_cast<int64_t>(count);
      return PagedGraphOf(call, pages, sizes);
    };
    size_t most = items.size();
    while (most > 1 && LayOut(graph_of(most)).end > lanes_.tensor_bytes()) most = (most + 1) / 2;
    for (size_t first = 0; first < items.size(); first += most) {
      const size_t count = std::min(most, items.size() - first);
      batches.push_back({graph_of(count), {items.begin() + first, items.begin() + first + count}});
    }
  }
  return batches;
}

absl::Status PagedAttention::Supports(const RaggedCall& call) const {
  RAPT_RETURN_IF_ERROR(cudnn::Supports(call, call.page_rows));
  const int64_t page_bytes = PageBytes(call);
  const int64_t capacity = pages_.CapacityOf(page_bytes);
  if (const int64_t pages = PagesIn(call); pages > capacity) {
    return absl::UnimplementedError(absl::StrCat("the call reads ", pages, " pages of ", page_bytes,
                                                 " bytes; the device holds ", capacity));
  }
  for (const Batch& batch : BatchesOf(call)) {
    if (std::max(LayOut(batch.graph).end, page_bytes) <= lanes_.tensor_bytes()) continue;
    return absl::UnimplementedError(
        absl::StrCat("an item exceeds the ", lanes_.tensor_bytes(), " bytes of a device lane"));
  }
  return absl::OkStatus();
}

absl::Status PagedAttention::Prefers(const RaggedCall& call) const {
  const std::vector<Batch> batches = BatchesOf(call);
  if (batches.empty()) return absl::OutOfRangeError("the call has no rows");
  Work on_device = WorkOf(call, /*moves_pages=*/false);
  on_device.pieces = static_cast<int64_t>(batches.size());
  on_device.lanes = std::min<int64_t>(on_device.pieces, lanes_.device().lanes());
  absl::Status status = check_offload_(on_device, WorkOf(call, /*moves_pages=*/true));
  for (size_t n = 0; n < batches.size() && status.ok(); ++n) {
    status = plans_.Peek(batches[n].graph).status();
  }
  return status;
}

void PagedAttention::Prepare(const RaggedCall& call) const {
  for (const Batch& batch : BatchesOf(call)) plans_.Find(batch.graph).IgnoreError();
}

void PagedAttention::PlanTasks(const RaggedCall& call, const RaggedSource& source,
                               Plan& plan) const {
  auto paged = std::make_shared<PagedPlan>();
  for (Batch& batch : BatchesOf(call)) {
    const Run& run = *paged->runs.emplace_back(
        std::make_unique<const Run>(call, source, std::move(batch), fallback_));
    plan.flops += run.flops();
    // What the run keeps outside of the workspace is charged as a part of it.
    plan.worker_workspace_bytes =
        std::max(plan.worker_workspace_bytes,
                 run.fallback_bytes() + RoundUp(run.staging_bytes(), kWorkspaceAlignment));
  }
  if (!paged->runs.empty()) plan.stages = {static_cast<int64_t>(paged->runs.size())};
  plan.backend_plan = std::move(paged);
}

void PagedAttention::RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace,
                             int64_t task, int worker, const Checkpoint& checkpoint) const {
  const Run& run = *static_cast<const PagedPlan&>(*plan.backend_plan).runs[task];
  const std::optional<FallbackReason> reason = RunOnLane(run, arguments, worker);
  if (!reason) return;
  ++fallback_pieces_[static_cast<size_t>(*reason)];
  if (arguments.piece_fallback != nullptr) *arguments.piece_fallback = &fallback_;
  run.RunFallback(arguments, workspace + worker * plan.worker_workspace_bytes, checkpoint);
}

std::optional<FallbackReason> PagedAttention::RunOnLane(const Run& run, const Arguments& arguments,
                                                        int worker) const {
  std::vector<PagedItem> items = run.items();
  for (PagedItem& item : items) {
    if (run.source().has_failed(item.item)) item.seen = {};
  }
  const PagedStaging staging(run.call(), run.source(), run.graph(), items);
  if (staging.uses().empty()) {
    staging.TakeOutputs(arguments, nullptr);
    return std::nullopt;
  }
  const absl::StatusOr<CompiledPlanPtr> kernels = plans_.Get(run.graph());
  if (!kernels.ok()) return FallbackReason::kKernels;
  const int64_t bytes = staging.layout().end + (*kernels)->workspace_bytes;
  if (bytes > lanes_.device().arena_bytes()) return FallbackReason::kMemory;

  std::optional<FallbackReason> reason = FallbackReason::kDevice;
  lanes_.Use(worker, bytes, [&](Lane& lane) -> std::optional<absl::Status> {
    const absl::StatusOr<PagePool::Lease> lease = pages_.Acquire(
        PageBytes(run.graph()), staging.uses(),
        [&](absl::Span<MissingRows> missing) { return staging.SendRows(missing, lane); });
    if (absl::IsResourceExhausted(lease.status())) reason = FallbackReason::kMemory;
    if (absl::IsOutOfRange(lease.status())) reason = FallbackReason::kNumbers;
    if (reason != FallbackReason::kDevice) return std::nullopt;
    if (!lease.ok()) return lease.status();
    std::byte* const arena = lane.host().data();
    if (!staging.StageInputs(arguments, *lease, arena)) {
      reason = FallbackReason::kNumbers;
      return std::nullopt;
    }
    absl::Status status = lane.Run(run.graph(), **kernels, staging.layout());
    if (status.ok()) {
      staging.TakeOutputs(arguments, arena);
      reason = std::nullopt;
    }
    return status;
  });
  return reason;
}

}  // namespace rapt::cudnn
