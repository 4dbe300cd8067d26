#include "attention/mechanism/softmax/ragged_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "attention/backend.h"
#include "attention/mechanism/softmax/chunked.h"
#include "attention/mechanism/softmax/softmax_state.h"
#include "base/checked_math.h"
#include "base/round_up.h"

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

// Counts the pairs of a row and a token that it sees, as far as ranges tell.
double VisiblePairs(const RaggedItem& item, const VisibleTokens& visible) {
  double keys = static_cast<double>(visible.first.end - visible.first.begin);
  const int64_t recent = std::max<int64_t>(0, visible.recent.end - visible.recent.begin);
  keys +=
      static_cast<double>(item.left_window < 0 ? recent : std::min(recent, item.left_window + 1));
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

// Merges a part's row into the first part's. Each part was folded once, so its sum is 1 and its max
// the lse.
template <typename Real>
void FoldRow(const Arguments::State& part, const Arguments::State& into, int64_t h, int64_t i) {
  const auto row = [&](const MutableTensorView& view) {
    return reinterpret_cast<Real*>(view.Row(0, h, i));
  };
  const auto size = static_cast<size_t>(into.output.dims[3]);
  FoldInto(absl::Span<Real>(row(into.output), size), *row(into.max), *row(into.sum),
           absl::Span<const Real>(row(part.output), size), *row(part.max));
}

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

  std::string Describe() const override {
    const std::string inner = forms.empty() || forms.begin()->second.plan.backend_plan == nullptr
                                  ? ""
                                  : forms.begin()->second.plan.backend_plan->Describe();
    return absl::StrCat(inner, inner.empty() ? "" : " ", places.size(), " items");
  }

  std::map<int64_t, Form> forms;  // by the number of rows
  std::vector<Place> places;      // of each item
  int64_t units = 0;
  int64_t units_per_task = 1;
};

class RaggedAttention final : public TensorOperator {
 public:
  RaggedAttention(RaggedCall call, const RaggedSource& source)
      : call_(std::move(call)), source_(source) {
    for (RaggedItem& item : call_.items) {
      item = Normalized(item);
      visible_.push_back(VisibleTokensOf(item));
      first_rows_.push_back(rows_);
      rows_ += item.rows;
    }
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
    for (size_t n = 0; n < call_.items.size() && total; ++n) {
      // A state is O, max and sum of each row, and its parts are aligned.
      const auto values = CheckedAdd(call_.value_head_size, 2 + kWorkspaceAlignment);
      const int64_t factors[] = {PartsOf(n), call_.items[n].rows, call_.query_heads,
                                 values.value_or(0), SizeOf(DType::kFloat64)};
      const auto bytes = values ? CheckedProduct(factors) : std::nullopt;
      total = bytes ? CheckedAdd(*total, *bytes) : std::nullopt;
    }
    if (total) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        "the partial results of the items have more bytes than 64 bits can count");
  }

  // A valid problem of one part, of the form of `rows` rows and at most `keys` keys.
  Problem PartProblem(int64_t rows, int64_t keys) const {
    Problem p;
    p.dtype = call_.dtype;
    p.batch = 1;
    p.query_heads = call_.query_heads;
    p.kv_heads = call_.kv_heads;
    p.query_length = rows;
    p.key_length = keys;
    p.head_size = call_.head_size;
    p.value_head_size = call_.value_head_size;
    p.scale = call_.scale;
    p.softcap = call_.softcap;
    p.causal = true;
    p.section = Section{.query_length = rows, .key_length = keys};
    p.folds = true;
    return p;
  }

  const OutputMap<std::optional<TensorSpec>>& outputs() const override { return outputs_; }

  // Stages: the states are cleared, the parts computed, and those of an item merged.
  void PlanTasks(Plan& plan) const override {
    auto ragged = std::make_shared<RaggedPlan>();
    for (size_t n = 0; n < call_.items.size(); ++n) {
      const int64_t keys = LongestPart(n);
      const auto [form, is_new] = ragged->forms.try_emplace(call_.items[n].rows);
      Problem& problem = form->second.plan.problem;
      if (is_new) problem = PartProblem(call_.items[n].rows, keys);
      problem.key_length = std::max(problem.key_length, keys);
    }
    for (auto& [rows, form] : ragged->forms) PlanForm(plan, form);
    double flops = 0;
    for (size_t n = 0; n < call_.items.size(); ++n) {
      const RaggedItem& item = call_.items[n];
      const RaggedPlan::Form& form = ragged->forms.at(item.rows);
      ragged->places.push_back({&form, ragged->units, plan.shared_workspace_bytes});
      ragged->units += PartsOf(n) * form.tasks;
      plan.shared_workspace_bytes += PartsOf(n) * form.state_bytes;
      flops += VisiblePairs(item, visible_[n]);
    }
    plan.flops = 2 * flops * static_cast<double>(call_.query_heads) *
                 static_cast<double>(call_.head_size + call_.value_head_size);
    const double unit_flops = plan.flops / static_cast<double>(std::max<int64_t>(ragged->units, 1));
    const int64_t share = std::max<int64_t>(1, CeilDiv(ragged->units, plan.threads));
    ragged->units_per_task = static_cast<int64_t>(
        std::clamp(kMinTaskFlops / std::max(unit_flops, 1.0), 1.0, static_cast<double>(share)));
    if (rows_ > 0) {
      const int64_t tasks = std::max<int64_t>(1, CeilDiv(ragged->units, ragged->units_per_task));
      plan.stages = {std::min(Items(), tasks), tasks, std::min(Items() * call_.query_heads, tasks)};
    }
    plan.backend_plan = std::move(ragged);
  }

  void RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace, int stage,
               int64_t task, int worker, const Checkpoint& checkpoint) const override {
    const auto& ragged = static_cast<const RaggedPlan&>(*plan.backend_plan);
    const auto part = [&](int64_t count) {
      const int64_t tasks = plan.stages[static_cast<size_t>(stage)];
      return TokenRange{task * count / tasks, (task + 1) * count / tasks};
    };
    if (stage == 0) return Clear(ragged, part(Items()), workspace);
    if (stage == 2) {
      return Finish(ragged, part(Items() * call_.query_heads), arguments, workspace);
    }
    const int64_t begin = task * ragged.units_per_task;
    const TokenRange units = {begin, std::min(begin + ragged.units_per_task, ragged.units)};
    std::byte* const own =
        workspace + plan.shared_workspace_bytes + worker * plan.worker_workspace_bytes;
    Attend(plan, ragged, units, arguments, workspace, own, checkpoint);
  }

 private:
  int64_t Items() const { return static_cast<int64_t>(call_.items.size()); }
  DType LseType() const {
    return call_.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  }
  bool IsSplit(size_t n) const { return call_.items[n].rows <= kMostSplitRows; }

  // The parts of an item: the chunks of its first tokens, then those of the recent ones.
  int64_t PartsOf(size_t n) const {
    const auto& [first, recent] = visible_[n];
    if (!IsSplit(n)) return (first.empty() ? 0 : 1) + (recent.empty() ? 0 : 1);
    return ChunksIn(first) + ChunksIn(recent);
  }

  int64_t LongestPart(size_t n) const {
    const auto& [first, recent] = visible_[n];
    const int64_t longest =
        std::max({first.end - first.begin, recent.end - recent.begin, int64_t{1}});
    return IsSplit(n) ? std::min(longest, kRaggedChunk) : longest;
  }

  // The tokens of a part.
  TokenRange PartOf(size_t n, int64_t part) const {
    const auto& [first, recent] = visible_[n];
    const int64_t parts_of_first = IsSplit(n) ? ChunksIn(first) : (first.empty() ? 0 : 1);
    const TokenRange& range = part < parts_of_first ? first : recent;
    if (!IsSplit(n)) return range;
    if (part >= parts_of_first) part -= parts_of_first;
    const int64_t chunk = range.begin / kRaggedChunk + part;
    return {std::max(range.begin, chunk * kRaggedChunk),
            std::min(range.end, (chunk + 1) * kRaggedChunk)};
  }

  // One thread plans each part, so that its bits do not depend on their number.
  static void PlanForm(Plan& plan, RaggedPlan::Form& form) {
    Plan& inner = form.plan;
    inner.routing = plan.routing;
    inner.isa = plan.isa;
    inner.threads = 1;
    if (inner.problem.empty()) return;
    inner.routing.backend->PlanTasks(inner);
    form.tasks = inner.stages.front();
    form.state_bytes = StateBytes(inner.problem, inner.state_dtype);
    plan.worker_workspace_bytes = std::max(plan.worker_workspace_bytes,
                                           RoundUp(inner.workspace_bytes(), kWorkspaceAlignment));
  }

  static Arguments::State StateOf(const RaggedPlan::Place& place, int64_t part,
                                  std::byte* workspace) {
    const RaggedPlan::Form& form = *place.form;
    return StateIn(form.plan.problem, form.plan.state_dtype,
                   workspace + place.state + part * form.state_bytes);
  }

  void Clear(const RaggedPlan& ragged, TokenRange items, std::byte* workspace) const {
    for (int64_t n = items.begin; n < items.end; ++n) {
      for (int64_t part = 0; part < PartsOf(n) && call_.items[n].rows > 0; ++part) {
        ClearState(StateOf(ragged.places[n], part, workspace));
      }
    }
  }

  void Attend(const Plan& plan, const RaggedPlan& ragged, TokenRange units,
              const Arguments& arguments, std::byte* workspace, std::byte* own,
              const Checkpoint& checkpoint) const {
    const auto after =
        std::upper_bound(ragged.places.begin(), ragged.places.end(), units.begin,
                         [](int64_t unit, const auto& place) { return unit < place.first_unit; });
    int64_t n = after - ragged.places.begin() - 1;
    Arguments inner;
    inner.piece_fallback = arguments.piece_fallback;
    std::optional<Plan> part_plan;
    for (int64_t unit = units.begin; unit < units.end; ++unit) {
      while (n + 1 < Items() && unit >= ragged.places[n + 1].first_unit) {
        ++n;
        part_plan.reset();
      }
      if (!part_plan) part_plan = ragged.places[n].form->plan;
      const int64_t tasks = ragged.places[n].form->tasks;
      const int64_t local = unit - ragged.places[n].first_unit;
      const TokenRange tokens = PartOf(n, local / tasks);
      if (source_.has_failed(n)) continue;
      PagedRows key_pages, value_pages;
      inner.inputs[Role::kQ] = QueriesOf(n, arguments);
      inner.inputs[Role::kK] = TokensOf(source_.keys(n), tokens, key_pages);
      inner.inputs[Role::kV] = TokensOf(source_.values(n), tokens, value_pages);
      inner.state = StateOf(ragged.places[n], local / tasks, workspace);
      SetPart(n, tokens, part_plan->problem);
      plan.routing.backend->RunTask(*part_plan, inner, own, 0, local % tasks, 0, checkpoint);
    }
  }

  void SetPart(int64_t n, TokenRange tokens, Problem& problem) const {
    const RaggedItem& item = call_.items[n];
    problem.key_length = tokens.end - tokens.begin;
    problem.left_window = tokens.begin < visible_[n].first.end ? -1 : item.left_window;
    problem.section = Section{.first_query = item.position,
                              .first_key = tokens.begin,
                              .query_length = item.rows,
                              .key_length = item.keys};
  }

  TensorView QueriesOf(int64_t n, const Arguments& arguments) const {
    const int64_t row = call_.query_heads * call_.head_size;
    return {.data = arguments.inputs[Role::kQ].data + first_rows_[n] * row * SizeOf(call_.dtype),
            .dtype = call_.dtype,
            .dims = {1, call_.query_heads, call_.items[n].rows, call_.head_size},
            .strides = StridesOf(call_.head_size, call_.heads_first)};
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
      if (call_.items[n].rows == 0) continue;
      FinishHead(ragged.places[n], n, head % call_.query_heads, arguments, inner, workspace);
    }
  }

  void FinishHead(const RaggedPlan::Place& place, int64_t n, int64_t h, const Arguments& arguments,
                  Arguments& inner, std::byte* workspace) const {
    Problem problem = place.form->plan.problem;
    problem.dtype = outputs_[Role::kY]->dtype;
    problem.wants_lse = call_.wants_lse;
    problem.head_sink = call_.head_sink;
    const MutableTensorView output = OutputOf(Role::kY, n, call_.value_head_size, arguments);
    const MutableTensorView lse = OutputOf(Role::kLse, n, 1, arguments);
    const int64_t parts = source_.has_failed(n) ? 0 : PartsOf(n);
    if (source_.has_failed(n)) problem.head_sink.reset();
    if (parts == 0) return FinishEmpty(problem, inner, h, output, lse);
    inner.state = StateOf(place, 0, workspace);
    for (int64_t part = 1; part < parts; ++part) {
      const Arguments::State state = StateOf(place, part, workspace);
      for (int64_t i = 0; i < problem.query_length; ++i) {
        state.max.dtype == DType::kFloat64 ? FoldRow<double>(state, inner.state, h, i)
                                           : FoldRow<float>(state, inner.state, h, i);
      }
    }
    FinishRows(problem, inner, 0, output, lse, h);
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
        .data = arguments.outputs[role].data + first_rows_[n] * row * SizeOf(dtype),
        .dtype = dtype,
        .dims = {1, call_.query_heads, call_.items[n].rows, size},
        .strides = StridesOf(size, role == Role::kLse ? call_.lse_heads_first : call_.heads_first)};
  }

  RaggedCall call_;  // constant after construction
  const RaggedSource& source_;
  std::vector<VisibleTokens> visible_;  // of each item
  std::vector<int64_t> first_rows_;     // of each item
  int64_t rows_ = 0;
  OutputMap<std::optional<TensorSpec>> outputs_;
};

absl::Status CheckNumbers(const RaggedCall& call) {
  if (call.scale && !std::isfinite(*call.scale)) {
    return absl::InvalidArgumentError(
        absl::StrCat("scale is ", *call.scale, "; it must be finite, or absent for 1 / sqrt(D)"));
  }
  if (std::isfinite(call.softcap) && call.softcap >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("softcap is ", call.softcap, "; it must be finite and at least 0"));
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

absl::StatusOr<std::shared_ptr<const TensorOperator>> MakeRaggedAttention(
    RaggedCall call, const RaggedSource& source) {
  if (absl::Status status = CheckNumbers(call); !status.ok()) return status;
  auto ragged = std::make_shared<const RaggedAttention>(std::move(call), source);
  if (absl::Status status = ragged->CheckSizes(); !status.ok()) return status;
  return std::shared_ptr<const TensorOperator>(std::move(ragged));
}

}  // namespace rapt
