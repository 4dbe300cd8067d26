#include "attention/diagnosis.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "attention/attention.h"
#include "attention/attributes.h"
#include "attention/data_checks.h"
#include "attention/half.h"
#include "attention/mechanism/softmax/query_row.h"
#include "attention/q8_0.h"
#include "attention/rotary/rotate.h"
#include "base/aligned_buffer.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

constexpr size_t kFirstEmptyRows = 8;
constexpr int64_t kEstimateRows = 64;
// e^-88 is about the smallest normal FP32 number.
constexpr double kWideScores = 88;

double LoadAny(const std::byte* data, DType dtype, int64_t index) {
  if (dtype == DType::kBool) return data[index] != std::byte{0} ? 1 : 0;
  if (dtype == DType::kInt64) {
    int64_t value;
    std::memcpy(&value, data + index * int64_t{sizeof(value)}, sizeof(value));
    return static_cast<double>(value);
  }
  if (dtype == DType::kInt32) {
    int32_t value;
    std::memcpy(&value, data + index * int64_t{sizeof(value)}, sizeof(value));
    return value;
  }
  return LoadElement(data, dtype, index);
}

double NumberOf(const TensorView& view, int64_t b, int64_t h, int64_t s, int64_t n) {
  if (view.dtype == DType::kInt8) return q8_0::LoadNumber(view.FindRow(b, h, s), n);
  std::byte element[sizeof(double)];
  view.CopyElement(b, h, s, n, element);
  return LoadAny(element, view.dtype, 0);
}

NumberSummary Summarize(absl::Span<const double> values) {
  NumberSummary summary;
  for (double value : values) summary.Add(value);
  return summary;
}

// " causal", " softcap=30"; "" if the problem has the default.
std::string TextOf(const AttributeInfo& info, const Problem& p) {
  const auto text = [&](const auto& field) -> std::string {
    if (field.problem == nullptr || p.*field.problem == Problem{}.*field.problem) return "";
    const auto& value = p.*field.problem;
    if constexpr (requires { *value; }) {
      // A bool as a number.
      return absl::StrCat(" ", info.c, "=", +*value);
    } else if constexpr (std::is_same_v<decltype(value), const bool&>) {
      return absl::StrCat(" ", info.c);
    } else if constexpr (std::is_enum_v<std::decay_t<decltype(value)>>) {
      return absl::StrCat(" ", info.c, "=", info.choices[static_cast<size_t>(value)]);
    } else {
      return absl::StrCat(" ", info.c, "=", value);
    }
  };
  return std::visit(text, info.field);
}

using Index = std::array<int64_t, 4>;

// Keeps the earlier index.
void KeepFirst(const std::optional<Index>& index, std::optional<Index>& first) {
  if (index && (!first || *index < *first)) first = index;
}

// "; the first is at [0,1,5,3]"
std::string TextOf(const std::optional<Index>& first) {
  return first ? absl::StrCat("; the first is at [", absl::StrJoin(*first, ","), "]") : "";
}

void WarnAboutTensor(const TensorSummary& tensor, std::vector<std::string>& warnings) {
  const NumberSummary& n = tensor.numbers;
  const int64_t infinite = n.positive_inf + n.negative_inf;
  if (infinite > 0) {
    warnings.push_back(absl::StrCat(tensor.name, " has ", infinite, " infinite values among ",
                                    n.count(), TextOf(tensor.first_infinity)));
  }
  if (n.finite == n.count() && n.count() > 1 && n.min == n.max) {
    warnings.push_back(absl::StrCat("all values of ", tensor.name, " are ", n.min));
  }
}

// -inf is normal in a mask.
void WarnAboutMask(const TensorSummary& mask, std::vector<std::string>& warnings) {
  const NumberSummary& n = mask.numbers;
  if (n.positive_inf > 0) {
    warnings.push_back(absl::StrCat(mask.name, " has ", n.positive_inf, " values of +inf among ",
                                    n.count(), "; a row that sees one becomes NaN"));
  }
  if (mask.role != Role::kMask) return;
  // All zeros are a valid mask that hides nothing.
  if (mask.dtype != DType::kBool && mask.only_zero_and_one && n.count() > 0 && n.max == 1) {
    warnings.push_back(absl::StrCat(
        mask.name, " has type ", NameOf(mask.dtype), " and contains only 0 and 1: it is added to ",
        "the scores and hides nothing; a mask of 0 and 1 that should hide keys must be BOOL"));
  }
}

void WarnAboutInputs(const Problem& p, DiagnosisReport& report) {
  for (const TensorSummary& input : report.inputs) {
    if (input.numbers.nan > 0) {
      report.warnings.push_back(absl::StrCat(
          input.name, " has ", input.numbers.nan, " NaN among ", input.numbers.count(),
          " values; each visible one propagates to the output", TextOf(input.first_nan)));
    }
    // 0 and -inf have a meaning in a sink; positions may repeat, and so may the rest.
    const bool is_float = IsFloat(InfoOf(input.role).dtype(p));  // also tokens in 8 bits
    if (input.role == Role::kHeadSink || (input.role != Role::kMask && !is_float)) {
      continue;
    }
    const bool may_hide = input.role == Role::kMask || input.role == Role::kBias ||
                          input.role == Role::kBiasTable || input.role == Role::kRelativeBias;
    (may_hide ? WarnAboutMask : WarnAboutTensor)(input, report.warnings);
  }
}

void WarnAboutScale(const Problem& p, std::vector<std::string>& warnings) {
  if (!p.bias_table || p.scale == 1) return;
  warnings.push_back(absl::StrCat("scale is ", p.effective_scale(),
                                  " with a bias_table; the models of T5 have a scale of 1"));
}

void WarnAboutResults(const Problem& p, DiagnosisReport& report) {
  if (report.widest_row > kWideScores && p.normalizer == Normalizer::kSoftmax) {
    report.warnings.push_back(absl::StrCat("the scaled scores of a row span up to ",
                                           report.widest_row,
                                           ": the softmax is almost one-hot; check the scale"));
  }
  if (report.empty_rows > 0) {
    report.warnings.push_back(
        absl::StrCat("query rows that see no key: ", report.empty_rows,
                     "; their output is 0 and their lse is -inf, or their sink"));
  }
  const NumberSummary& output = report.output;
  if (output.finite < output.count()) {
    report.warnings.push_back(absl::StrCat("the output has ", output.nan, " NaN and ",
                                           output.positive_inf + output.negative_inf,
                                           " infinite values among ", output.count()));
  }
}

}  // namespace

void NumberSummary::Add(double value) {
  if (std::isnan(value)) {
    ++nan;
  } else if (std::isinf(value)) {
    ++(value > 0 ? positive_inf : negative_inf);
  } else {
    min = finite == 0 ? value : std::min(min, value);
    max = finite == 0 ? value : std::max(max, value);
    sum += value;
    ++finite;
  }
}

void NumberSummary::Merge(const NumberSummary& other) {
  nan += other.nan;
  positive_inf += other.positive_inf;
  negative_inf += other.negative_inf;
  if (other.finite == 0) return;
  min = finite == 0 ? other.min : std::min(min, other.min);
  max = finite == 0 ? other.max : std::max(max, other.max);
  sum += other.sum;
  finite += other.finite;
}

std::string Describe(const Problem& p) {
  std::string text = absl::StrCat("B=", p.batch, " Hq=", p.query_heads, " Hkv=", p.kv_heads,
                                  " Sq=", p.query_length, " Sk=", p.key_length,
                                  " P=", p.past_length, " D=", p.head_size);
  absl::StrAppend(&text, " Dv=", p.value_head_size, " ", NameOf(p.dtype),
                  " scale=", p.effective_scale());
  for (const AttributeInfo& info : Attributes()) {
    if (info.attribute != Attribute::kScale) text += TextOf(info, p);
  }
  if (p.alignment == Alignment::kBottomRight) absl::StrAppend(&text, " bottom_right");
  const bool is_onnx = p.alignment == Alignment::kOnnx && p.has_key_lengths;
  if (is_onnx) absl::StrAppend(&text, " onnx_alignment");
  // The sizes above are those of the others.
  constexpr RoleSet kSized = {Role::kQ, Role::kK, Role::kV, Role::kPastKey, Role::kPastValue};
  for (Role role : kInputs) {
    const RoleInfo& info = InfoOf(role);
    if (kSized.contains(role) || !info.wanted(p)) continue;
    const std::array<int64_t, 4> dims = info.dims(p);
    // The caches of angles have rank 2 or 3.
    const bool is_cache = role == Role::kCosCache || role == Role::kSinCache;
    const bool is_3d = is_cache && !p.rotary_cache->by_position();
    absl::StrAppend(&text, " ", info.native, "=", NameOf(info.dtype(p)), "[",
                    absl::StrJoin(absl::MakeSpan(dims).first(is_3d ? 3 : info.rank), ","), "]");
  }
  if (p.values_in_keys) absl::StrAppend(&text, " values_in_keys");
  if (p.dropout) absl::StrAppend(&text, " dropout=", p.dropout->probability);
  if (p.q8_0) absl::StrAppend(&text, " q8_0");
  if (p.section && p.section->first_query != 0) {
    absl::StrAppend(&text, " first_query=", p.section->first_query);
  }
  return text;
}

namespace {

absl::Status Prefers(const Backend& backend, const Problem& problem) {
  return backend.Prefers(problem);
}
absl::Status Prefers(const Backend& backend, const TensorOperator& op) {
  const std::optional<absl::Status> support = op.SupportedBy(backend);
  return support && support->ok() ? op.PreferredBy(backend) : absl::OkStatus();
}

// Of a backend that was named and did not take what it was named for.
std::string WhyDeclined(const Backend& backend, const TensorOperator& op) {
  const std::optional<absl::Status> support = op.SupportedBy(backend);
  if (support && !support->ok()) return std::string(support->message());
  return "the backend does not compute this operator";
}

template <typename What>
std::string WhyNotChosen(const Backend& backend, const What& what, const PlanOptions& options,
                         const Plan& chosen) {
  if (options.backend != "auto") return absl::StrCat("the backend is set to ", options.backend);
  const absl::Status preference = Prefers(backend, what);
  if (!preference.ok()) return std::string(preference.message());
  return absl::StrCat("auto prefers ", chosen.Describe());
}

template <typename What>
std::vector<BackendChoice> ExplainChoiceOf(const What& what, const PlanOptions& options) {
  const absl::StatusOr<Plan> chosen = MakePlan(what, options);
  std::vector<BackendChoice> choices;
  for (const Backend* backend : *options.backends) {
    BackendChoice choice;
    choice.backend = std::string(backend->name());
    PlanOptions named = options;
    named.backend = choice.backend;
    const absl::StatusOr<Plan> plan = MakePlan(what, named);
    choice.chosen = chosen.ok() && chosen->routing.backend == backend;
    if (!plan.ok()) {
      choice.reason = std::string(plan.status().message());
    } else if (plan->routing.backend == backend) {
      choice.plan = plan->Describe();
      choice.workspace_bytes = plan->workspace_bytes();
      if (!choice.chosen) choice.reason = WhyNotChosen(*backend, what, options, *chosen);
    } else if constexpr (std::is_same_v<What, TensorOperator>) {
      choice.reason = WhyDeclined(*backend, what);
    }
    choices.push_back(std::move(choice));
  }
  return choices;
}

}  // namespace

std::vector<BackendChoice> ExplainChoice(const Problem& problem, const PlanOptions& options) {
  return ExplainChoiceOf(problem, options);
}

std::vector<BackendChoice> ExplainChoice(const TensorOperator& op, const PlanOptions& options) {
  return ExplainChoiceOf(op, options);
}

namespace {

constexpr std::pair<Step, NumberSummary DiagnosisReport::*> kStepNumbers[] = {
    {Step::kRaw, &DiagnosisReport::raw_scores},
    {Step::kSoftcapped, &DiagnosisReport::scaled_scores},
    {Step::kBiased, &DiagnosisReport::biased_scores},
    {Step::kSoftmax, &DiagnosisReport::weights},
};

// Why a key is hidden: the first that holds.
struct HidingReason {
  bool (QueryRow::*hides)(int64_t) const;
  int64_t DiagnosisReport::*count;
};
constexpr HidingReason kHidingReasons[] = {
    {&QueryRow::HiddenByPosition, &DiagnosisReport::hidden_by_position},
    {&QueryRow::HiddenByBlock, &DiagnosisReport::hidden_by_block_mask},
    {&QueryRow::HiddenBySelection, &DiagnosisReport::hidden_by_selection},
    {&QueryRow::HiddenByMask, &DiagnosisReport::hidden_by_mask},
};

int64_t SharedBytes(const Problem& p) { return p.has_rotary() ? Rotation::SharedBytes(p) : 0; }

int64_t WorkerBytes(const Problem& p) {
  const int64_t row = (p.total_keys() + p.value_head_size) * static_cast<int64_t>(sizeof(double)) +
                      QueryRow::MemoryBytes(p);
  return RoundUp(p.has_rotary() ? std::max(row, Rotation::WorkerBytes(p)) : row, sizeof(double));
}

// Of the stages before the gradients.
int64_t ForwardBytes(const Problem& p, int workers) {
  return RoundUp(SharedBytes(p) + workers * WorkerBytes(p), AlignedBuffer::kAlignment);
}

// Of Q, K and V with their past.
RoleSet FlowGradients(const Problem& p) {
  RoleSet gradients;
  for (Role role : {Role::kDQ, Role::kDK, Role::kDV, Role::kDPastKey, Role::kDPastValue}) {
    gradients.Add(role, InfoOf(InfoOf(role).gradient_of).wanted(p));
  }
  return gradients;
}

std::optional<Plan> BackwardPlanOf(Problem problem, int workers) {
  if (!problem.backward) return std::nullopt;
  problem.backward->gradients = FlowGradients(problem);
  // The reference supports every valid problem.
  return *MakePlan(problem, {.backend = "reference", .threads = workers});
}

// The gradients one after the other, each with the type and axes of its input.
struct GradientMemory {
  explicit GradientMemory(const Problem& p) {
    for (Role role : FlowGradients(p)) {
      const RoleInfo& info = InfoOf(role);
      MutableTensorView view{nullptr, info.dtype(p), info.dims(p)};
      view.strides = RowMajorStrides(view.dims);
      views[role] = view;
      offsets[role] = bytes;
      bytes +=
          RoundUp(view.dims[0] * view.dims[1] * view.dims[2] * view.dims[3] * SizeOf(view.dtype),
                  AlignedBuffer::kAlignment);
    }
  }

  MutableTensorView View(Role role, std::byte* memory) const {
    MutableTensorView view = views[role];
    view.data = memory + offsets[role];
    return view;
  }

  OutputMap<MutableTensorView> views;
  OutputMap<int64_t> offsets;
  int64_t bytes = 0;
};

// Adds the squares of the gradient's finite numbers to those of the positions from `first` on.
void AddSquares(const MutableTensorView& view, int64_t first, GradientSummary& summary,
                std::vector<double>& squares) {
  for (int64_t b = 0; b < view.dims[0]; ++b) {
    for (int64_t h = 0; h < view.dims[1]; ++h) {
      for (int64_t s = 0; s < view.dims[2]; ++s) {
        for (int64_t d = 0; d < view.dims[3]; ++d) {
          const double value = LoadElement(view.Row(b, h, s), view.dtype, d);
          summary.numbers.Add(value);
          if (std::isfinite(value)) squares[first + s] += value * value;
        }
      }
    }
  }
}

double NormOf(const DiagnosisReport& report, Role role) {
  for (const GradientSummary& gradient : report.gradients) {
    if (gradient.role == role) return gradient.norm;
  }
  return 0;
}

// "0, 3 and 5 more"
std::string TextOf(absl::Span<const int64_t> positions) {
  constexpr size_t kShown = 5;
  const auto shown = positions.first(std::min(kShown, positions.size()));
  std::string text = absl::StrJoin(shown, ", ");
  if (positions.size() > kShown) {
    absl::StrAppend(&text, " and ", positions.size() - kShown, " more");
  }
  return text;
}

// The rule of the ONNX operator moves the queries of a batch row by its key length.
void WarnAboutAlignment(const Problem& p, absl::Span<const int64_t> key_lengths,
                        const FieldNames& names, std::vector<std::string>& warnings) {
  Problem onnx = p;
  onnx.alignment = Alignment::kOnnx;
  const bool matters = p.causal || p.has_window() || p.has_relative() || p.has_relative_vectors() ||
                       (p.has_rotary() && !p.has_position_ids);
  if (!matters || p.alignment == Alignment::kBottomRight || !PositionVaries(onnx)) return;
  std::vector<int64_t> moved;
  for (int64_t b = 0; b < p.batch; ++b) {
    if (QueryPosition(onnx, key_lengths, b, 0) != 0) moved.push_back(b);
  }
  if (moved.empty()) return;
  const int64_t by = QueryPosition(onnx, key_lengths, moved[0], 0);
  const std::string which =
      absl::StrCat("the queries of batch rows ", TextOf(moved), " by ", names[Role::kKeyLengths],
                   " - Sq, those of row ", moved[0], " by ", by);
  warnings.push_back(
      p.alignment == Alignment::kOnnx
          ? absl::StrCat(
                "the alignment of ONNX moves ", which,
                "; a padded row differs from the row alone, unlike with top-left alignment")
          : absl::StrCat("a padded row equals the row alone; the ONNX operator, as the model "
                         "attention of the Open Inference Protocol, would move ",
                         which));
}

// `learns` of each position: false if no gradient is expected.
void WarnAboutStarved(const GradientSummary& gradient, const std::vector<bool>& learns,
                      std::vector<std::string>& warnings) {
  const std::vector<double>& norms = gradient.position_norms;
  std::vector<int64_t> starved;
  for (size_t n = 0; n < norms.size(); ++n) {
    if (norms[n] == 0 && learns[n]) starved.push_back(static_cast<int64_t>(n));
  }
  if (starved.empty()) return;
  const bool is_query = gradient.role == Role::kDQ;
  warnings.push_back(absl::StrCat(
      gradient.name, " is 0 at ", starved.size(), " of ", norms.size(),
      is_query ? " query" : " key", " positions: ", TextOf(starved),
      is_query ? "; they do not learn, because their weights are 0 and 1: reduce the scale"
               : "; they do not learn, because a mask, causality, the window or lengths hide them "
                 "from all queries, or their weights are 0"));
}

void WarnAboutOutliers(const GradientSummary& gradient, std::vector<std::string>& warnings) {
  constexpr double kExploding = 1000;
  const std::vector<double>& norms = gradient.position_norms;
  const absl::string_view whose = gradient.role == Role::kDQ ? "query" : "key";
  if (norms.empty()) return;
  std::vector<double> sorted = norms;
  std::sort(sorted.begin(), sorted.end());
  const double median = sorted[sorted.size() / 2];
  if (median == 0 || sorted.back() <= kExploding * median) return;
  const auto largest = std::max_element(norms.begin(), norms.end()) - norms.begin();
  warnings.push_back(absl::StrCat(
      "the gradient explodes: the norm of ", gradient.name, " at ", whose, " position ", largest,
      " is ", sorted.back(), ", ", sorted.back() / median,
      " times the median; look for outliers in the inputs there, or clip the gradient"));
}

void WarnAboutFlow(const std::vector<bool>& chooses, DiagnosisReport& report) {
  constexpr double kVanishing = 1e-4;
  for (const GradientSummary& gradient : report.gradients) {
    const NumberSummary& numbers = gradient.numbers;
    if (numbers.finite < numbers.count()) {
      report.warnings.push_back(absl::StrCat(
          gradient.name, " has ", numbers.nan, " NaN and ",
          numbers.positive_inf + numbers.negative_inf,
          " infinite values; look for them in the inputs above, or reduce the scores"));
    }
    const std::vector<bool> all(gradient.position_norms.size(), true);
    WarnAboutStarved(gradient, gradient.role == Role::kDQ ? chooses : all, report.warnings);
    WarnAboutOutliers(gradient, report.warnings);
  }
  const double scores = std::hypot(NormOf(report, Role::kDQ), NormOf(report, Role::kDK));
  const double values = NormOf(report, Role::kDV);
  if (values > 0 && scores < kVanishing * values) {
    report.warnings.push_back(absl::StrCat(
        "the gradient vanishes: the norm of those of queries and keys is ", scores,
        ", that of values ", values,
        "; the softmax is peaked, so that its slope is near 0: reduce the scale or the norms of Q "
        "and K, or raise the temperature"));
  }
  if (report.empty_rows > 0) {
    report.warnings.push_back(absl::StrCat(
        "rows that see no key: ", report.empty_rows,
        "; their gradient is exactly 0 here, and NaN where a row of -inf goes through a softmax: "
        "let each row see at least one key, or ignore these rows in the loss"));
  }
}

}  // namespace

Diagnosis::Diagnosis(const Problem& problem, const Arguments& arguments, int workers,
                     const FieldNames& names)
    : problem_(problem),
      names_(names),
      arguments_(arguments),
      backward_(BackwardPlanOf(problem, workers)) {
  for (Role role : InputTensorsOf(problem)) {
    const TensorView& view = arguments.inputs[role];
    inputs_.push_back({role, view.dims[0] * view.dims[1] * view.dims[2]});
    input_rows_ += inputs_.back().rows;
    MutexLock lock(mutex_);  // for the thread safety analysis; the object is not shared yet
    report_.inputs.push_back(
        {.role = role, .name = std::string(names[role]), .dtype = view.dtype, .dims = view.dims});
  }
  query_rows_ = problem.batch * problem.query_heads * problem.query_length;
  if (HasEstimates(problem)) estimate_stride_ = (query_rows_ + kEstimateRows - 1) / kEstimateRows;
  MutexLock lock(mutex_);
  chooses_.resize(problem.query_length);
}

absl::InlinedVector<int64_t, 6> Diagnosis::stages() const {
  absl::InlinedVector<int64_t, 6> stages;
  if (problem_.has_rotary()) stages.push_back(Rotation::Tasks(problem_));
  stages.push_back(input_rows_ + query_rows_);
  if (!backward_) return stages;
  stages.insert(stages.end(), backward_->stages.begin(), backward_->stages.end());
  stages.push_back(3);  // the summaries of the gradients of Q, K and V
  return stages;
}

int64_t Diagnosis::WorkspaceBytes(const Problem& problem, int workers) {
  const std::optional<Plan> backward = BackwardPlanOf(problem, workers);
  if (!backward) return ForwardBytes(problem, workers);
  return ForwardBytes(problem, workers) + GradientMemory(problem).bytes +
         backward->workspace_bytes();
}

void Diagnosis::RunTask(int stage, int64_t task, int worker, std::byte* workspace,
                        const Checkpoint& checkpoint) {
  const int forward_stages = problem_.has_rotary() ? 2 : 1;
  if (stage >= forward_stages) {
    std::byte* const gradients = workspace + ForwardBytes(problem_, backward_->threads);
    stage -= forward_stages;
    if (stage < static_cast<int>(backward_->stages.size())) {
      return RunBackwardTask(stage, task, worker, gradients, checkpoint);
    }
    constexpr Role kRoles[] = {Role::kDQ, Role::kDK, Role::kDV};
    return SummarizeGradient(kRoles[task], gradients);
  }
  std::byte* const own = workspace + SharedBytes(problem_) + worker * WorkerBytes(problem_);
  if (!problem_.has_rotary()) return SummarizeRow(task, arguments_, nullptr, own);
  const Rotation rotation(problem_, workspace, RotateRow);
  if (stage == 0) return rotation.RunTask(arguments_, task, own, /*checkpoint=*/{});
  SummarizeRow(task, rotation.WithKeys(arguments_), &rotation, own);
}

void Diagnosis::RunBackwardTask(int stage, int64_t task, int worker, std::byte* workspace,
                                const Checkpoint& checkpoint) const {
  const GradientMemory memory(problem_);
  Arguments arguments = arguments_;
  for (Role role : FlowGradients(problem_)) arguments.outputs[role] = memory.View(role, workspace);
  backward_->routing.backend->RunTask(*backward_, arguments, workspace + memory.bytes, stage, task,
                                      worker, checkpoint);
}

// `role` is that of Q, K or V; the summary includes the past.
void Diagnosis::SummarizeGradient(Role role, std::byte* workspace) {
  const RoleSet gradients = FlowGradients(problem_);
  if (!gradients.contains(role)) return;
  const GradientMemory memory(problem_);
  const Role past = role == Role::kDK ? Role::kDPastKey : Role::kDPastValue;
  const bool has_past = role != Role::kDQ && gradients.contains(past);
  const int64_t first = has_past ? problem_.past_length : 0;
  GradientSummary summary;
  summary.role = role;
  summary.name = std::string(names_[role]);
  std::vector<double> squares(first + memory.views[role].dims[2]);
  if (has_past) AddSquares(memory.View(past, workspace), 0, summary, squares);
  AddSquares(memory.View(role, workspace), first, summary, squares);
  summary.norm = std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0));
  for (const double square : squares) summary.position_norms.push_back(std::sqrt(square));
  MutexLock lock(mutex_);
  report_.gradients.push_back(std::move(summary));
}

void Diagnosis::SummarizeRow(int64_t task, const Arguments& arguments, const Rotation* rotation,
                             std::byte* workspace) {
  if (task < input_rows_) return SummarizeInputRow(task);
  SummarizeQueryRow(task - input_rows_, arguments, rotation, workspace);
}

void Diagnosis::SummarizeInputRow(int64_t row) {
  size_t input = 0;
  while (row >= inputs_[input].rows) row -= inputs_[input++].rows;
  const TensorView& view = arguments_.inputs[inputs_[input].role];
  const int64_t s = row % view.dims[2];
  const int64_t h = row / view.dims[2] % view.dims[1];
  const int64_t b = row / view.dims[2] / view.dims[1];

  TensorSummary part;
  for (int64_t n = 0; n < view.dims[3]; ++n) {
    const double value = NumberOf(view, b, h, s, n);
    part.numbers.Add(value);
    part.only_zero_and_one = part.only_zero_and_one && (value == 0 || value == 1);
    if (std::isnan(value)) KeepFirst(Index{b, h, s, n}, part.first_nan);
    if (std::isinf(value)) KeepFirst(Index{b, h, s, n}, part.first_infinity);
  }
  MutexLock lock(mutex_);
  TensorSummary& summary = report_.inputs[input];
  summary.numbers.Merge(part.numbers);
  summary.only_zero_and_one &= part.only_zero_and_one;
  KeepFirst(part.first_nan, summary.first_nan);
  KeepFirst(part.first_infinity, summary.first_infinity);
}

void Diagnosis::SummarizeQueryRow(int64_t index, const Arguments& arguments,
                                  const Rotation* rotation, std::byte* workspace) {
  const Problem& p = problem_;
  const int64_t i = index % p.query_length;
  const int64_t h = index / p.query_length % p.query_heads;
  const int64_t b = index / p.query_length / p.query_heads;
  auto* numbers = reinterpret_cast<double*>(workspace);
  const absl::Span<double> scores(numbers, p.total_keys());
  const absl::Span<double> output(numbers + p.total_keys(), p.value_head_size);
  auto* const memory = reinterpret_cast<std::byte*>(output.data() + output.size());
  const QueryRow row(p, arguments, rotation, b, h, i, memory);

  DiagnosisReport part;  // of this row
  double row_sum = 0;
  const double lse = row.Weigh(scores, [&](Step step, absl::Span<const double> s) {
    for (const auto& [of, numbers] : kStepNumbers) {
      if (of == step) part.*numbers = Summarize(s);
    }
    if (step == Step::kSoftmax) row_sum = std::accumulate(s.begin(), s.end(), 0.0);
  });
  row.Output(scores, lse, output);
  part.output = Summarize(output);
  int64_t visible = 0;
  for (int64_t j = 0; j < p.total_keys(); ++j) {
    const auto* const reason =
        std::find_if(std::begin(kHidingReasons), std::end(kHidingReasons),
                     [&](const HidingReason& r) { return (row.*r.hides)(j); });
    ++(reason == std::end(kHidingReasons) ? visible : part.*reason->count);
  }
  const bool sees_key = part.biased_scores.negative_inf < p.total_keys();
  // Weights that are NaN have no order.
  if (sees_key && part.weights.nan == 0 && estimate_stride_ > 0 && index % estimate_stride_ == 0) {
    part.estimate_fit = MeasureRow(p, arguments, b, h, i, scores);
  }

  MutexLock lock(mutex_);
  report_.estimate_fit.Merge(part.estimate_fit);
  for (const auto& [step, numbers] : kStepNumbers) (report_.*numbers).Merge(part.*numbers);
  if (const NumberSummary& scaled = part.scaled_scores; scaled.finite > 0) {
    report_.widest_row = std::max(report_.widest_row, scaled.max - scaled.min);
  }
  report_.output.Merge(part.output);
  for (const HidingReason& reason : kHidingReasons) report_.*reason.count += part.*reason.count;
  if (visible > 1) chooses_[i] = true;
  if (sees_key) {
    report_.row_sums.Add(row_sum);
    return;
  }
  ++report_.empty_rows;
  // Kept sorted and short: the result does not depend on the order of tasks.
  auto& first = report_.first_empty_rows;
  const std::array<int64_t, 3> place = {b, h, i};
  first.insert(std::lower_bound(first.begin(), first.end(), place), place);
  if (first.size() > kFirstEmptyRows) first.pop_back();
}

DiagnosisReport Diagnosis::Finish(const PlanOptions& options) {
  MutexLock lock(mutex_);
  report_.problem = Describe(problem_);
  report_.backends = ExplainChoice(problem_, options);
  WarnAboutInputs(problem_, report_);
  WarnAboutScale(problem_, report_.warnings);
  WarnAboutAlignment(problem_, arguments_.key_lengths, names_, report_.warnings);
  WarnAboutResults(problem_, report_);
  std::sort(report_.gradients.begin(), report_.gradients.end(),
            [](const GradientSummary& a, const GradientSummary& b) { return a.role < b.role; });
  if (backward_) WarnAboutFlow(chooses_, report_);
  if (report_.estimate_fit.rows > 0) {
    report_.estimates = Explain(problem_, report_.estimate_fit);
  }
  return std::move(report_);
}

absl::StatusOr<DiagnosisReport> Diagnose(const Problem& problem, const Arguments& arguments,
                                         const PlanOptions& options, ThreadPool& pool,
                                         const FieldNames& names) {
  RAPT_RETURN_IF_ERROR(Validate(problem, names));
  RAPT_RETURN_IF_ERROR(Validate(options));
  RAPT_RETURN_IF_ERROR(ValidateInputs(problem, arguments, names));
  RAPT_RETURN_IF_ERROR(CheckData(problem, arguments, names));
  Diagnosis diagnosis(problem, arguments, pool.workers(), names);
  AlignedBuffer workspace(Diagnosis::WorkspaceBytes(problem, pool.workers()));
  const auto stages = diagnosis.stages();
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    pool.ParallelFor(stages[stage], [&](int64_t task, int worker) {
      diagnosis.RunTask(static_cast<int>(stage), task, worker, workspace.data(),
                        /*checkpoint=*/{});
    });
  }
  return diagnosis.Finish(options);
}

}  // namespace rapt
