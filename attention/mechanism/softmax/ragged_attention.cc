#include "attention/mechanism/softmax/ragged_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "attention/backend.h"
#include "attention/mechanism/softmax/chunked.h"
#include "attention/mechanism/softmax/ragged_device.h"
#include "attention/mechanism/softmax/softmax_state.h"
#include "base/check.h"
#include "base/checked_math.h"
#include "base/invalid.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

// Items of more rows have enough tasks without a division of their keys, and the partial results
// would need more memory than the keys.
constexpr int64_t kMostSplitRows = 64;

// Smaller tasks, of some tens of microseconds, cost more to distribute than they take.
constexpr double kMinTaskFlops = 4e5;

int64_t ChunksIn(const TokenRange& range) {
  if (range.empty()) return 0;
  return CeilDiv(range.end, kRaggedChunk) - range.begin / kRaggedChunk;
}

// Returns the same item with a position that sums of a few axes leave within the kernels' range.
// Positions beyond the keys differ only in what the window shows, which is kept.
RaggedItem Normalized(RaggedItem item) {
  constexpr int64_t kFarthest = kMaxAxis / 2;
  item.position = std::max(item.position, -item.rows);
  const int64_t excess = std::max<int64_t>(0, item.position - kFarthest);
  item.position -= excess;
  if (item.left_window >= 0) item.left_window = std::max<int64_t>(0, item.left_window - excess);
  return item;
}

// A problem of rows of the call, without keys.
Problem RowsProblem(const RaggedCall& call, int64_t rows) {
  Problem problem;
  problem.dtype = call.dtype;
  problem.q8_0 = call.q8_0;
  problem.batch = 1;
  problem.query_heads = call.query_heads;
  problem.kv_heads = call.kv_heads;
  problem.query_length = rows;
  problem.head_size = call.head_size;
  problem.value_head_size = call.value_head_size;
  problem.scale = call.scale;
  problem.softcap = call.softcap;
  problem.causal = true;
  problem.bias_table = call.bias_table;
  problem.max_distance = call.max_distance;
  problem.section = Section{.query_length = rows};
  return problem;
}

// Counts the pairs of a row and a token that it sees, as far as ranges tell.
double VisiblePairs(const RaggedItem& item, const VisibleTokens& visible) {
  double keys = static_cast<double>(visible.first.end - visible.first.begin);
  const int64_t recent = std::max<int64_t>(0, visible.recent.end - visible.recent.begin);
  const bool sees_all = item.left_window < 0 || item.left_window >= recent;
  keys += static_cast<double>(sees_all ? recent : item.left_window + 1);
  return keys * static_cast<double>(item.rows);
}

// The rows' keys [begin, begin + count) of a paged or strided view.
TensorView TokensOf(const TensorView& view, const TokenRange& tokens, PagedRows& pages) {
  TensorView part = view;
  part.dims[2] = tokens.end - tokens.begin;
  if (view.pages == nullptr) {
    part.data += view.RowOffset(0, 0, tokens.begin);
    return part;
  }
  pages = *view.pages;
  const int64_t row = pages.first_row + tokens.begin;
  pages.pages.remove_prefix(static_cast<size_t>(row / pages.page_rows));
  pages.first_row = row % pages.page_rows;
  part.pages = &pages;
  return part;
}

// Merges row `from` of a part into row `to` of another. Each part was folded once, so its sum is 1
// and its max the lse.
template <typename Real>
void FoldRow(const Arguments::State& part, int64_t from, const Arguments::State& into, int64_t to,
             int64_t h) {
  const auto row = [h](const MutableTensorView& view, int64_t i) {
    return reinterpret_cast<Real*>(view.Row(0, h, i));
  };
  const auto size = static_cast<size_t>(into.output.dims[3]);
  FoldInto(absl::Span<Real>(row(into.output, to), size), *row(into.max, to), *row(into.sum, to),
           absl::Span<const Real>(row(part.output, from), size), *row(part.max, from));
}

// Rows that see the same keys: those of an item, or of all items with one prefix.
struct Block {
  Block(const RaggedItem& item, const VisibleTokens& visible, int64_t first_row)
      : item(item), visible(visible), first_row(first_row) {}

  bool is_split() const { return item.rows <= kMostSplitRows; }
  int64_t parts_of_first() const {
    return is_split() ? ChunksIn(visible.first) : (visible.first.empty() ? 0 : 1);
  }
  // The chunks of the first tokens, then those of the recent ones.
  int64_t parts() const {
    const TokenRange& recent = visible.recent;
    const int64_t of_recent = is_split() ? ChunksIn(recent) : (recent.empty() ? 0 : 1);
    // The parts of a prefix are merged into one of the item's own.
    return std::max<int64_t>(parts_of_first() + of_recent, prefix == nullptr ? 0 : 1);
  }
  int64_t longest_part() const {
    const auto length = [](const TokenRange& range) { return range.end - range.begin; };
    const int64_t longest = std::max({length(visible.first), length(visible.recent), int64_t{1}});
    return is_split() ? std::min(longest, kRaggedChunk) : longest;
  }
  // The tokens of a part; may be empty.
  TokenRange Part(int64_t part) const {
    const TokenRange& range = part < parts_of_first() ? visible.first : visible.recent;
    if (!is_split()) return range;
    if (part >= parts_of_first()) part -= parts_of_first();
    const int64_t chunk = range.begin / kRaggedChunk + part;
    return {std::max(range.begin, chunk * kRaggedChunk),
            std::min(range.end, (chunk + 1) * kRaggedChunk)};
  }

  RaggedItem item;
  VisibleTokens visible;
  int64_t first_row;                      // of Q, or of the gathered queries
  const SharedPrefix* sharers = nullptr;  // of a prefix
  // Of an item with a prefix: its block, and the item's first row there.
  const Block* prefix = nullptr;
  int64_t prefix_row = 0;
};

// The tasks of a call, made for one backend.
class RaggedPlan final : public BackendPlan {
 public:
  // The plan of one part of the keys, for items of the same number of rows.
  struct Form {
    Plan plan;
    int64_t tasks = 0;        // of a part
    int64_t state_bytes = 0;  // likewise
  };
  struct Place {
    const Form* form = nullptr;
    int64_t first_unit = 0;  // a unit is one of a part's tasks
    int64_t state = 0;       // offset of the first part's state in the workspace
  };

  std::string Describe() const override { return description; }

  std::map<int64_t, Form> forms;  // by the number of rows
  std::vector<Place> places;      // of each block
  std::string description;
  int64_t queries = 0;  // offset of the gathered queries in the workspace
  int64_t units = 0;
  int64_t units_per_task = 1;
};

class RaggedAttention final : public TensorOperator {
 public:
  RaggedAttention(RaggedCall call, const RaggedSource& source)
      : call_(std::move(call)), source_(source) {
    blocks_.reserve(call_.items.size() + call_.prefixes.size());  // addresses stay
    for (const RaggedItem& item : call_.items) {
      const RaggedItem normalized = Normalized(item);
      blocks_.emplace_back(normalized, VisibleTokensOf(normalized), rows_);
      rows_ += item.rows;
    }
    for (const SharedPrefix& prefix : call_.prefixes) AddPrefix(prefix);
    const DType output = call_.output.value_or(call_.dtype);
    Shape y = {rows_, call_.query_heads, call_.value_head_size};
    Shape lse = {rows_, call_.query_heads};
    if (call_.heads_first) std::swap(y[0], y[1]);
    if (call_.lse_heads_first) std::swap(lse[0], lse[1]);
    outputs_[Role::kY] = TensorSpec{output, y};
    if (call_.wants_lse) outputs_[Role::kLse] = TensorSpec{LseType(), lse};
  }

  // Returns ResourceExhausted if the plan's sizes could overflow.
  absl::Status CheckSizes() const {
    std::optional<int64_t> total = 0;
    for (const Block& block : blocks_) {
      // A state is O, max and sum of each row, and its parts are aligned. Queries may be gathered.
      const auto sizes = CheckedAdd(call_.value_head_size, call_.head_size);
      const auto values = CheckedAdd(sizes.value_or(-1), 2 + kWorkspaceAlignment);
      const int64_t factors[] = {block.parts(), block.item.rows, call_.query_heads,
                                 values.value_or(0), SizeOf(DType::kFloat64)};
      const auto bytes = sizes && values ? CheckedProduct(factors) : std::nullopt;
      total = total && bytes ? CheckedAdd(*total, *bytes) : std::nullopt;
    }
    if (total) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        "the partial results of the items have more bytes than 64 bits can count");
  }

  const OutputMap<std::optional<TensorSpec>>& outputs() const override { return outputs_; }

  std::optional<absl::Status> SupportedBy(const Backend& device) const override {
    if (device.ragged() == nullptr || call_.page_rows == 0 || call_.bias_table) return std::nullopt;
    return device.ragged()->Supports(call_);
  }
  absl::Status PreferredBy(const Backend& device) const override {
    return device.ragged()->Prefers(call_);
  }
  void PrepareOn(const Backend& device) const override { device.ragged()->Prepare(call_); }

  // Stages: the states are cleared and the queries of prefixes gathered; the parts are computed;
  // those of an item are merged.
  void PlanTasks(Plan& plan) const override {
    if (const RaggedDevice* const device = plan.routing.backend->ragged()) {
      return device->PlanTasks(call_, source_, plan);
    }
    auto ragged = std::make_shared<RaggedPlan>();
    for (const Block& block : blocks_) {
      const auto [form, is_new] = ragged->forms.try_emplace(block.item.rows);
      Problem& problem = form->second.plan.problem;
      if (is_new) problem = PartProblem(block.item.rows);
      problem.key_length = std::max(problem.key_length, block.longest_part());
    }
    for (auto& [rows, form] : ragged->forms) PlanForm(plan, form);
    ragged->queries = plan.shared_workspace_bytes;
    plan.shared_workspace_bytes += RoundUp(gathered_rows_ * QueryBytes(), kWorkspaceAlignment);
    double pairs = 0;
    for (const Block& block : blocks_) {
      const RaggedPlan::Form& form = ragged->forms.at(block.item.rows);
      ragged->places.push_back({&form, ragged->units, plan.shared_workspace_bytes});
      ragged->units += block.parts() * form.tasks;
      plan.shared_workspace_bytes += block.parts() * form.state_bytes;
      pairs += VisiblePairs(block.item, block.visible);
    }
    plan.flops = 2 * pairs * static_cast<double>(call_.query_heads) *
                 static_cast<double>(call_.head_size + call_.value_head_size);
    const double unit_flops = plan.flops / static_cast<double>(std::max<int64_t>(ragged->units, 1));
    const int64_t share = std::max<int64_t>(1, CeilDiv(ragged->units, plan.threads));
    ragged->units_per_task = static_cast<int64_t>(
        std::clamp(kMinTaskFlops / std::max(unit_flops, 1.0), 1.0, static_cast<double>(share)));
    if (rows_ > 0) {
      const int64_t tasks = std::max<int64_t>(1, CeilDiv(ragged->units, ragged->units_per_task));
      plan.stages = {std::min(Blocks(), tasks), tasks,
                     std::min(Items() * call_.query_heads, tasks)};
    }
    ragged->description = Describe(*ragged);
    plan.backend_plan = std::move(ragged);
  }

  void RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace, int stage,
               int64_t task, int worker, const Checkpoint& checkpoint) const override {
    if (const RaggedDevice* const device = plan.routing.backend->ragged()) {
      return device->RunTask(plan, arguments, workspace, task, worker, checkpoint);
    }
    const auto& ragged = static_cast<const RaggedPlan&>(*plan.backend_plan);
    const auto share = [&](int64_t count) {
      const int64_t tasks = plan.stages[static_cast<size_t>(stage)];
      return TokenRange{task * count / tasks, (task + 1) * count / tasks};
    };
    if (stage == 0) return Begin(ragged, share(Blocks()), arguments, workspace);
    if (stage == 2) {
      return Finish(ragged, share(Items() * call_.query_heads), arguments, workspace);
    }
    const int64_t begin = task * ragged.units_per_task;
    const TokenRange units = {begin, std::min(begin + ragged.units_per_task, ragged.units)};
    std::byte* const own =
        workspace + plan.shared_workspace_bytes + worker * plan.worker_workspace_bytes;
    Attend(ragged, units, arguments, workspace, own, checkpoint);
  }

 private:
  int64_t Items() const { return static_cast<int64_t>(call_.items.size()); }
  int64_t Blocks() const { return static_cast<int64_t>(blocks_.size()); }
  int64_t QueryBytes() const { return call_.query_heads * call_.head_size * SizeOf(call_.dtype); }
  DType LseType() const {
    return call_.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  }

  // All rows of the sharers see the whole prefix; the items keep what comes after it.
  void AddPrefix(const SharedPrefix& prefix) {
    RaggedItem rows = {.keys = prefix.tokens, .position = prefix.tokens};
    const int64_t first_row = gathered_rows_;
    for (int64_t n : prefix.items) {
      Block& block = blocks_[n];
      block.prefix_row = rows.rows;
      block.visible.recent.begin = prefix.tokens;
      rows.rows += block.item.rows;
    }
    gathered_rows_ += rows.rows;
    Block& block = blocks_.emplace_back(rows, VisibleTokensOf(rows), first_row);
    block.sharers = &prefix;
    for (int64_t n : prefix.items) blocks_[n].prefix = &block;
  }

  // A valid problem of one part, without keys yet.
  Problem PartProblem(int64_t rows) const {
    Problem problem = RowsProblem(call_, rows);
    problem.folds = true;
    return problem;
  }

  // One thread plans each part, so that its bits do not depend on their number, and its tasks share
  // nothing: there is one stage.
  static void PlanForm(Plan& plan, RaggedPlan::Form& form) {
    Plan& inner = form.plan;
    inner.routing = plan.routing;
    inner.isa = plan.isa;
    inner.threads = 1;
    if (inner.problem.empty()) return;
    inner.problem.section->key_length = inner.problem.key_length;
    inner.routing.backend->PlanTasks(inner);
    RAPT_CHECK(inner.stages.size() == 1, "the tasks of a part can't wait for each other");
    form.tasks = inner.stages.front();
    form.state_bytes = StateBytes(inner.problem, inner.state_dtype);
    plan.worker_workspace_bytes = std::max(plan.worker_workspace_bytes,
                                           RoundUp(inner.workspace_bytes(), kWorkspaceAlignment));
  }

  // "q24 k64 s1 32 items, prefixes of 31, INT8", "q24 k64 s1 1 item"
  std::string Describe(const RaggedPlan& ragged) const {
    const auto form = ragged.forms.begin();
    std::string text = absl::StrCat(Items(), Items() == 1 ? " item" : " items");
    if (form != ragged.forms.end() && form->second.plan.backend_plan != nullptr) {
      text = absl::StrCat(form->second.plan.backend_plan->Describe(), " ", text);
    }
    size_t sharers = 0;
    for (const SharedPrefix& prefix : call_.prefixes) sharers += prefix.items.size();
    if (sharers > 0) absl::StrAppend(&text, ", prefixes of ", sharers);
    if (call_.q8_0) absl::StrAppend(&text, ", INT8");
    return text;
  }

  static Arguments::State StateOf(const RaggedPlan::Place& place, int64_t part,
                                  std::byte* workspace) {
    const RaggedPlan::Form& form = *place.form;
    return StateIn(form.plan.problem, form.plan.state_dtype,
                   workspace + place.state + part * form.state_bytes);
  }

  void Begin(const RaggedPlan& ragged, TokenRange range, const Arguments& arguments,
             std::byte* workspace) const {
    for (int64_t n = range.begin; n < range.end; ++n) {
      const Block& block = blocks_[n];
      if (block.item.rows == 0) continue;
      for (int64_t part = 0; part < block.parts(); ++part) {
        ClearState(StateOf(ragged.places[n], part, workspace));
      }
      if (block.sharers == nullptr) continue;
      std::byte* to = workspace + ragged.queries + block.first_row * QueryBytes();
      for (int64_t item : block.sharers->items) {
        const Block& from = blocks_[item];
        const int64_t bytes = from.item.rows * QueryBytes();
        std::memcpy(to, arguments.inputs[Role::kQ].data + from.first_row * QueryBytes(),
                    static_cast<size_t>(bytes));
        to += bytes;
      }
    }
  }

  // The item whose keys a block reads; nullopt if they are not available.
  std::optional<int64_t> SourceOf(int64_t n) const {
    if (blocks_[n].sharers == nullptr) {
      return source_.has_failed(n) ? std::nullopt : std::optional(n);
    }
    for (int64_t item : blocks_[n].sharers->items) {
      if (!source_.has_failed(item)) return item;
    }
    return std::nullopt;
  }

  void Attend(const RaggedPlan& ragged, TokenRange units, const Arguments& arguments,
              std::byte* workspace, std::byte* own, const Checkpoint& checkpoint) const {
    const auto after =
        std::upper_bound(ragged.places.begin(), ragged.places.end(), units.begin,
                         [](int64_t unit, const auto& place) { return unit < place.first_unit; });
    int64_t n = after - ragged.places.begin() - 1;
    Arguments inner;
    inner.piece_fallback = arguments.piece_fallback;
    if (call_.bias_table) {
      const std::array<int64_t, 4> dims = {call_.bias_table->buckets, call_.query_heads, 1, 1};
      inner.inputs[Role::kBiasTable] = {.data = arguments.inputs[Role::kBiasTable].data,
                                        .dtype = call_.bias_table->dtype,
                                        .dims = dims,
                                        .strides = RowMajorStrides(dims)};
    }
    std::optional<Plan> part_plan;
    for (int64_t unit = units.begin; unit < units.end; ++unit) {
      while (n + 1 < Blocks() && unit >= ragged.places[n + 1].first_unit) {
        ++n;
        part_plan.reset();
      }
      const RaggedPlan::Place& place = ragged.places[n];
      if (!part_plan) part_plan = place.form->plan;
      const int64_t local = unit - place.first_unit;
      const TokenRange tokens = blocks_[n].Part(local / place.form->tasks);
      const std::optional<int64_t> source = SourceOf(n);
      if (!source || tokens.empty()) continue;
      PagedRows key_pages, value_pages;
      inner.inputs[Role::kQ] = QueriesOf(blocks_[n], ragged, arguments, workspace);
      inner.inputs[Role::kK] = TokensOf(source_.keys(*source), tokens, key_pages);
      inner.inputs[Role::kV] = TokensOf(source_.values(*source), tokens, value_pages);
      inner.state = StateOf(place, local / place.form->tasks, workspace);
      SetPart(blocks_[n], tokens, part_plan->problem);
      part_plan->routing.backend->RunTask(*part_plan, inner, own, 0, local % place.form->tasks, 0,
                                          checkpoint);
    }
  }

  static void SetPart(const Block& block, TokenRange tokens, Problem& problem) {
    const RaggedItem& item = block.item;
    problem.key_length = tokens.end - tokens.begin;
    problem.left_window = tokens.begin < block.visible.first.end ? -1 : item.left_window;
    problem.section = Section{.first_query = item.position,
                              .first_key = tokens.begin,
                              .query_length = item.rows,
                              .key_length = item.keys};
  }

  TensorView QueriesOf(const Block& block, const RaggedPlan& ragged, const Arguments& arguments,
                       const std::byte* workspace) const {
    const std::byte* const rows =
        block.sharers == nullptr ? arguments.inputs[Role::kQ].data : workspace + ragged.queries;
    return {.data = rows + block.first_row * QueryBytes(),
            .dtype = call_.dtype,
            .dims = {1, call_.query_heads, block.item.rows, call_.head_size},
            .strides = StridesOf(call_.head_size, call_.heads_first && block.sharers == nullptr)};
  }

  // Of heads and rows with `size` elements each.
  std::array<int64_t, 4> StridesOf(int64_t size, bool heads_first) const {
    if (heads_first) return {0, rows_ * size, size, 1};
    return {0, size, call_.query_heads * size, 1};
  }

  // Merges the parts of these heads of all items, and writes their results.
  void Finish(const RaggedPlan& ragged, TokenRange heads, const Arguments& arguments,
              std::byte* workspace) const {
    Arguments inner;
    if (call_.head_sink) {
      inner.inputs[Role::kHeadSink] = {.data = arguments.inputs[Role::kHeadSink].data,
                                       .dtype = *call_.head_sink,
                                       .dims = {call_.query_heads, 1, 1, 1},
                                       .strides = {1, 0, 0, 0}};
    }
    for (int64_t head = heads.begin; head < heads.end; ++head) {
      const int64_t n = head / call_.query_heads;
      if (blocks_[n].item.rows == 0) continue;
      FinishHead(ragged, n, head % call_.query_heads, arguments, inner, workspace);
    }
  }

  void FinishHead(const RaggedPlan& ragged, int64_t n, int64_t h, const Arguments& arguments,
                  Arguments& inner, std::byte* workspace) const {
    const Block& block = blocks_[n];
    const RaggedPlan::Place& place = ragged.places[n];
    Problem problem = place.form->plan.problem;
    problem.dtype = outputs_[Role::kY]->dtype;
    problem.wants_lse = call_.wants_lse;
    problem.head_sink = call_.head_sink;
    const MutableTensorView output = OutputOf(Role::kY, n, call_.value_head_size, arguments);
    const MutableTensorView lse = OutputOf(Role::kLse, n, 1, arguments);
    const bool has_failed = source_.has_failed(n);
    if (has_failed) problem.head_sink.reset();
    if (has_failed || block.parts() == 0) return FinishEmpty(problem, inner, h, output, lse);
    inner.state = StateOf(place, 0, workspace);
    for (int64_t part = 1; part < block.parts(); ++part) {
      MergeRows(StateOf(place, part, workspace), 0, inner.state, h);
    }
    if (block.prefix != nullptr) {
      const RaggedPlan::Place& shared = ragged.places[block.prefix - blocks_.data()];
      for (int64_t part = 0; part < block.prefix->parts(); ++part) {
        MergeRows(StateOf(shared, part, workspace), block.prefix_row, inner.state, h);
      }
    }
    FinishRows(problem, inner, 0, output, lse, h);
  }

  // Merges the rows of `part` from `first` on into all rows of `into`.
  static void MergeRows(const Arguments::State& part, int64_t first, const Arguments::State& into,
                        int64_t h) {
    for (int64_t i = 0; i < into.max.dims[2]; ++i) {
      part.max.dtype == DType::kFloat64 ? FoldRow<double>(part, first + i, into, i, h)
                                        : FoldRow<float>(part, first + i, into, i, h);
    }
  }

  // Writes rows that see nothing. They need no memory for a state: one row stands for all.
  static void FinishEmpty(const Problem& problem, Arguments& inner, int64_t h,
                          const MutableTensorView& output, const MutableTensorView& lse) {
    double max = -std::numeric_limits<double>::infinity();
    double sum = 0;
    const auto view = [](double& value) {
      return MutableTensorView{.data = reinterpret_cast<std::byte*>(&value),
                               .dtype = DType::kFloat64};
    };
    inner.state = {.output = {}, .max = view(max), .sum = view(sum)};
    FinishRows(problem, inner, 0, output, lse, h);
  }

  MutableTensorView OutputOf(Role role, int64_t n, int64_t size, const Arguments& arguments) const {
    if (!outputs_[role]) return {};
    const DType dtype = outputs_[role]->dtype;
    const int64_t row = call_.query_heads * size;
    return {
        .data = arguments.outputs[role].data + blocks_[n].first_row * row * SizeOf(dtype),
        .dtype = dtype,
        .dims = {1, call_.query_heads, blocks_[n].item.rows, size},
        .strides = StridesOf(size, role == Role::kLse ? call_.lse_heads_first : call_.heads_first)};
  }

  const RaggedCall call_;
  const RaggedSource& source_;
  std::vector<Block> blocks_;  // of each item, then of each prefix
  int64_t rows_ = 0;
  int64_t gathered_rows_ = 0;  // of the prefixes
  OutputMap<std::optional<TensorSpec>> outputs_;
};

absl::Status CheckNumbers(const RaggedCall& call) {
  if (call.scale && !std::isfinite(*call.scale)) {
    return Invalid("scale is ", *call.scale, "; it must be finite, or absent for 1 / sqrt(D)");
  }
  if (std::isfinite(call.softcap) && call.softcap >= 0) return absl::OkStatus();
  return Invalid("softcap is ", call.softcap, "; it must be finite and at least 0");
}

}  // namespace

VisibleTokens VisibleTokensOf(const RaggedItem& item) {
  if (item.rows == 0) return {};
  // Positions and keys may be hostile; beyond the keys nothing depends on the difference.
  const auto end_of = [&](int64_t position) {
    return position < 0 ? 0 : std::min(item.keys, position + 1);
  };
  const int64_t last = item.position > item.keys ? item.keys : item.position + item.rows - 1;
  const int64_t end = end_of(last);
  if (item.left_window < 0) return {.first = {}, .recent = {0, end}};
  const TokenRange first = {0, std::min(end, std::max<int64_t>(0, item.first_keys))};
  const int64_t begin = item.position <= item.left_window ? 0 : item.position - item.left_window;
  return {.first = first, .recent = {std::max(first.end, begin), end}};
}

Problem ProblemOf(const RaggedCall& call, const RaggedItem& item) {
  const RaggedItem normalized = Normalized(item);
  Problem problem = RowsProblem(call, item.rows);
  problem.key_length = problem.section->key_length = item.keys;
  problem.section->first_query = normalized.position;
  problem.left_window = normalized.left_window;
  if (problem.has_window())
    problem.prefix_keys = std::clamp<int64_t>(item.first_keys, 0, item.keys);
  problem.head_sink = call.head_sink;
  return problem;
}

bool SeesAll(const RaggedItem& item, int64_t tokens) {
  const VisibleTokens visible = VisibleTokensOf(item);
  const bool starts_at_0 = visible.first.empty() && visible.recent.begin == 0;
  if (item.rows == 0 || !starts_at_0) return false;
  if (tokens > item.keys || item.position < tokens - 1) return false;
  // The last row's window is the one that begins last.
  return item.left_window < 0 || item.position + item.rows - 1 <= item.left_window;
}

absl::StatusOr<std::shared_ptr<const TensorOperator>> MakeRaggedAttention(
    RaggedCall call, const RaggedSource& source) {
  RAPT_RETURN_IF_ERROR(CheckNumbers(call));
  auto ragged = std::make_shared<const RaggedAttention>(std::move(call), source);
  RAPT_RETURN_IF_ERROR(ragged->CheckSizes());
  return std::shared_ptr<const TensorOperator>(std::move(ragged));
}

}  // namespace rapt
