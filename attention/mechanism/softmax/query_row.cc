#include "attention/mechanism/softmax/query_row.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/half.h"
#include "attention/mechanism/entmax/entmax.h"
#include "attention/philox.h"
#include "attention/q8_0.h"
#include "attention/score/pipeline.inc"
#include "attention/score/relative_tables.h"
#include "attention/score/score_params.h"
#include "base/round_up.h"

namespace rapt {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

constexpr DType DTypeOf(Element element) {
  switch (element) {
    case Element::kFloat16:
      return DType::kFloat16;
    case Element::kBFloat16:
      return DType::kBFloat16;
    case Element::kFloat64:
      return DType::kFloat64;
    case Element::kBool:
      return DType::kBool;
    default:
      return DType::kFloat32;
  }
}

// The score policies' operations on one float64 score at a time.
struct Float64Ops {
  using Real = double;
  using Vec = double;
  static constexpr int64_t kLanes = 1;

  static double Load(const double* p) { return *p; }
  static void Store(double* p, double x) { *p = x; }
  static double Splat(double x) { return x; }
  static double ExpOne(double x) { return std::exp(x); }

  template <Element kElement>
  static double LoadElement(const std::byte* row, int64_t n) {
    return rapt::LoadElement(row, DTypeOf(kElement), n);
  }
  template <Element kElement>
  static double LoadPartial(const std::byte* p, int64_t /*count*/) {
    return LoadElement<kElement>(p, 0);
  }
  template <Element kElement>
  static double Gather(const std::byte* row, int64_t n, int64_t /*step*/, int64_t /*count*/) {
    return LoadElement<kElement>(row, n);
  }
};

// The elements of a row, which the boundaries of slices may divide.
class Elements {
 public:
  Elements(const TensorView& view, int64_t b, int64_t h, int64_t s)
      : view_(view), b_(b), h_(h), s_(s), row_(view.FindRow(b, h, s)) {}

  double operator[](int64_t n) const {
    if (view_.dtype == DType::kInt8) return q8_0::LoadNumber(row_, n);
    if (row_ != nullptr) return LoadElement(row_, view_.dtype, n);
    std::byte element[sizeof(double)];
    view_.CopyElement(b_, h_, s_, n, element);
    return LoadElement(element, view_.dtype, 0);
  }

 private:
  const TensorView& view_;
  int64_t b_, h_, s_;
  const std::byte* row_;  // null: in slices
};

// Row j of head h of the past's keys or values and the new ones, one after the other.
Elements KeyRow(const TensorView& past, const TensorView& now, int64_t past_length, int64_t b,
                int64_t h, int64_t j) {
  return j < past_length ? Elements(past, b, h, j) : Elements(now, b, h, j - past_length);
}

// The size of the biases by distance.
int64_t RelativeBytes(const Problem& problem) {
  return problem.has_relative() ? problem.total_keys() * int64_t{sizeof(double)} : 0;
}

// The size of a rotated query.
int64_t QueryBytes(const Problem& problem) {
  if (!problem.has_rotary()) return 0;
  return RoundUp(problem.head_size * SizeOf(problem.dtype), sizeof(double));
}

Step StepOf(ScoreStage stage) {
  switch (stage) {
    case ScoreStage::kScores:
      return Step::kScaled;
    case ScoreStage::kSoftcapped:
      return Step::kSoftcapped;
    default:
      return Step::kBiased;
  }
}

}  // namespace

QueryRow::QueryRow(const Problem& problem, const Arguments& arguments, const Rotation* rotation,
                   int64_t b, int64_t h, int64_t i, std::byte* memory)
    : p_(problem),
      a_(arguments),
      b_(b),
      h_(h),
      i_(i),
      kv_head_(h / problem.group_size()),
      alpha_(AlphaOf(problem, arguments, h)),
      query_(arguments.inputs[Role::kQ]),
      score_(ScoreParamsOf(problem, arguments, DType::kFloat64)),
      row_(ScoreRowOf(problem, arguments, b, h, i)) {
  if (problem.has_relative()) {
    const absl::Span<double> biases(reinterpret_cast<double*>(memory), problem.total_keys());
    RelativeRow(problem, arguments, b, h, i, biases);
    row_.relative = memory;
    memory += RelativeBytes(problem);
  }
  if (rotation != nullptr) {
    rotation->RotateQuery(arguments, b, h, i, memory);
    query_ = {.data = memory, .dtype = problem.dtype, .dims = query_.dims, .strides = {0, 0, 0, 1}};
    memory += QueryBytes(problem);
  }
  if (!problem.is_sparse()) return;
  sparse_ = SparseRowOf(problem, arguments, b, h, i);
  row_.sparse = &sparse_;
  if (!problem.selected) return;
  auto* const selected = reinterpret_cast<uint64_t*>(memory);
  SetSelectedBits(problem, arguments, b, h, i, selected);
  sparse_.selected = selected;
}

int64_t QueryRow::MemoryBytes(const Problem& problem) {
  const int64_t words = problem.selected ? SelectedWords(problem) : 0;
  return RelativeBytes(problem) + QueryBytes(problem) + words * int64_t{sizeof(uint64_t)};
}

double QueryRow::Weigh(absl::Span<double> s, Observer observe) const {
  const int64_t t = p_.total_keys();
  for (int64_t j = 0; j < t; ++j) s[j] = p_.is_additive() ? AdditiveScore(j) : Dot(j);
  observe(Step::kRaw, s);

  FinishScores<Float64Ops>(score_, row_, {.scale = true, .bias = true}, 0, t, s.data(),
                           [&](ScoreStage stage) { observe(StepOf(stage), s); });

  const double lse = Normalize(s);
  for (int64_t j = 0; j < t; ++j) {
    if (std::isnan(s[j]) && Hidden(j)) s[j] = 0;
  }
  observe(Step::kSoftmax, s);

  if (p_.dropout) DropOut(s);
  observe(Step::kWeights, s);
  return lse;
}

void QueryRow::Output(absl::Span<const double> weights, double lse,
                      absl::Span<double> output) const {
  std::fill(output.begin(), output.end(), 0.0);
  if (lse == kMinusInfinity) return;
  const TensorView past = PastValuesOf(p_, a_);
  const TensorView now = ValuesOf(p_, a_);
  for (int64_t j = row_.begin; j < row_.end; ++j) {
    // A NaN in its V must not matter.
    if (IsHidden<Float64Ops>(score_, row_, j) || (alpha_ > 1 && weights[j] == 0)) continue;
    const Elements v = KeyRow(past, now, p_.past_length, b_, kv_head_, j);
    for (int64_t d = 0; d < p_.value_head_size; ++d) {
      const double relative = p_.relative_values ? Relative(Role::kRelativeValues, j, d) : 0;
      output[d] += weights[j] * (v[d] + relative);
    }
  }
}

// Until the end, gradient.raw has the weights before dropout, gradient.biased the slope of the
// biased scores in the raw ones, and gradient.weights G.
void QueryRow::Differentiate(const RowCotangent& cotangent, RowGradient& gradient) const {
  const absl::Span<double> weights = gradient.raw;
  const absl::Span<double> slope = gradient.biased;
  std::fill(slope.begin(), slope.end(), p_.effective_scale());
  double lse = Weigh(gradient.weights, [&](Step step, absl::Span<const double> s) {
    for (size_t j = 0; step == Step::kSoftcapped && p_.softcap > 0 && j < s.size(); ++j) {
      slope[j] *= 1 - s[j] / p_.softcap * (s[j] / p_.softcap);
    }
    const bool has_weights = step == (cotangent.forward ? Step::kBiased : Step::kSoftmax);
    if (has_weights) std::copy(s.begin(), s.end(), weights.begin());
  });
  if (cotangent.forward) {
    lse = cotangent.forward->lse;
    for (double& w : weights) w = lse == kMinusInfinity ? 0 : std::exp(w - lse);
  }

  double sum = 0;  // of dY Y
  double entmax_sum = 0;
  double entmax_slopes = 0;
  bool blind = true;
  for (int64_t j = 0; j < p_.total_keys(); ++j) {
    const bool hidden = Hidden(j);
    blind = blind && hidden;
    if (hidden) weights[j] = 0;
    gradient.weights[j] = 0;
    if (weights[j] == 0) continue;
    const double g = gradient.weights[j] = DropoutFactor(j) * ValueGradient(j, cotangent.output);
    sum += weights[j] * g;
    const double s = std::pow(weights[j], 2 - alpha_);
    entmax_sum += s * g;
    entmax_slopes += s;
  }
  // What dY contains in a row without keys does not matter.
  if (cotangent.forward && !blind) sum = cotangent.forward->sum;
  const double delta = sum - cotangent.lse;
  gradient.sink = row_.sink == kMinusInfinity ? 0 : -std::exp(row_.sink - lse) * delta;

  for (int64_t j = 0; j < p_.total_keys(); ++j) {
    const double weight = weights[j];
    if (weight == 0) {  // gradient.weights[j] is 0 already
      gradient.raw[j] = gradient.biased[j] = 0;
      continue;
    }
    const double g = gradient.weights[j];
    const double dx = alpha_ == 1 ? weight * (g - delta)
                                  : std::pow(weight, 2 - alpha_) * (g - entmax_sum / entmax_slopes);
    gradient.raw[j] = dx * slope[j];
    gradient.biased[j] = dx;
    gradient.weights[j] = weight * DropoutFactor(j);
  }
}

// Z of key j.
double QueryRow::DropoutFactor(int64_t j) const {
  if (!p_.dropout) return 1;
  const double p = p_.dropout->probability;
  bool keep;
  DropoutKeeps(p, p_.dropout->seed, b_, h_, i_, j, 1, &keep);
  return keep ? 1 / (1 - p) : 0;
}

// dY (V + Rv) of key j.
double QueryRow::ValueGradient(int64_t j, absl::Span<const double> output) const {
  const TensorView past = PastValuesOf(p_, a_);
  const TensorView now = ValuesOf(p_, a_);
  const Elements v = KeyRow(past, now, p_.past_length, b_, kv_head_, j);
  double sum = 0;
  for (int64_t d = 0; d < p_.value_head_size; ++d) {
    const double relative = p_.relative_values ? Relative(Role::kRelativeValues, j, d) : 0;
    sum += output[d] * (v[d] + relative);
  }
  return sum;
}

void QueryRow::AddToQuery(int64_t j, double raw, absl::Span<double> query) const {
  const Elements k =
      KeyRow(a_.inputs[Role::kPastKey], a_.inputs[Role::kK], p_.past_length, b_, kv_head_, j);
  const bool has_vectors = p_.relative_keys && !p_.has_relative_query;
  for (int64_t d = 0; d < p_.head_size; ++d) {
    const double relative = has_vectors ? Relative(Role::kRelativeKeys, j, d) : 0;
    query[d] += raw * (p_.is_additive() ? AdditiveSlope(j, d) : k[d] + relative);
  }
}

void QueryRow::AddToRelativeQuery(int64_t j, double raw, absl::Span<double> query) const {
  for (int64_t d = 0; d < p_.head_size; ++d) query[d] += raw * Relative(Role::kRelativeKeys, j, d);
}

void QueryRow::AddToKey(int64_t j, double raw, absl::Span<double> key) const {
  const Elements q(query_, b_, h_, i_);
  for (int64_t d = 0; d < p_.head_size; ++d) {
    key[d] += raw * (p_.is_additive() ? AdditiveSlope(j, d) : q[d]);
  }
}

void QueryRow::AddToRelativeKey(double raw, absl::Span<double> vector) const {
  const Elements q(p_.has_relative_query ? a_.inputs[Role::kRelativeQuery] : query_, b_, h_, i_);
  for (int64_t d = 0; d < p_.head_size; ++d) vector[d] += raw * q[d];
}

void QueryRow::AddToAdditiveWeight(int64_t j, double raw, absl::Span<double> weight) const {
  for (int64_t d = 0; d < p_.head_size; ++d) weight[d] += raw * AdditiveTanh(j, d);
}

bool QueryRow::Hidden(int64_t j) const { return IsHidden<Float64Ops>(score_, row_, j); }

bool QueryRow::HiddenByPosition(int64_t j) const { return PositionHides(score_.sparse, row_, j); }

bool QueryRow::HiddenByBlock(int64_t j) const { return BlockHides(score_.sparse, row_, j); }

bool QueryRow::HiddenBySelection(int64_t j) const { return SelectionHides(row_, j); }

bool QueryRow::HiddenByMask(int64_t j) const { return MaskHides<Float64Ops>(score_, row_, j); }

double QueryRow::Dot(int64_t j) const {
  const Elements q(query_, b_, h_, i_);
  const Elements k =
      KeyRow(a_.inputs[Role::kPastKey], a_.inputs[Role::kK], p_.past_length, b_, kv_head_, j);
  double sum = 0;
  for (int64_t d = 0; d < p_.head_size; ++d) sum += q[d] * k[d];
  if (!p_.relative_keys) return sum;
  const Elements r(p_.has_relative_query ? a_.inputs[Role::kRelativeQuery] : query_, b_, h_, i_);
  for (int64_t d = 0; d < p_.head_size; ++d) sum += r[d] * Relative(Role::kRelativeKeys, j, d);
  return sum;
}

// Element d of the vector for the distance from the query to key j.
double QueryRow::Relative(Role role, int64_t j, int64_t d) const {
  const TensorView& table = a_.inputs[role];
  const int64_t h = table.dims[0] == 1 ? 0 : h_;
  return LoadElement(table.Row(h, RelativeIndex(role, j), d), table.dtype, 0);
}

int64_t QueryRow::RelativeIndex(Role role, int64_t j) const {
  const int64_t clip = a_.inputs[role].dims[1] / 2;
  const int64_t distance = j - DiagonalKey(p_, a_.key_lengths, b_, i_);
  return clip + std::clamp(distance, -clip, clip);
}

double QueryRow::AdditiveScore(int64_t j) const {
  double sum = 0;
  for (int64_t d = 0; d < p_.head_size; ++d) sum += AdditiveWeightOf(d) * AdditiveTanh(j, d);
  return sum;
}

double QueryRow::AdditiveWeightOf(int64_t d) const {
  const TensorView& weight = a_.inputs[Role::kAdditiveWeight];
  return LoadElement(weight.Row(h_, d, 0), weight.dtype, 0);
}

double QueryRow::AdditiveTanh(int64_t j, int64_t d) const {
  const Elements q(query_, b_, h_, i_);
  const Elements k =
      KeyRow(a_.inputs[Role::kPastKey], a_.inputs[Role::kK], p_.past_length, b_, kv_head_, j);
  return std::tanh(q[d] + k[d]);
}

// Of an additive score, in element d of the query and of key j.
double QueryRow::AdditiveSlope(int64_t j, int64_t d) const {
  const double t = AdditiveTanh(j, d);
  return AdditiveWeightOf(d) * (1 - t * t);
}

double QueryRow::Normalize(absl::Span<double> s) const {
  if (alpha_ == 1) return Softmax(s);
  return Entmax(alpha_, s) ? 0 : kMinusInfinity;
}

// Turns the scores into weights and returns their lse.
double QueryRow::Softmax(absl::Span<double> s) const {
  double max = kMinusInfinity;
  for (double score : s) max = score > max || std::isnan(score) ? score : max;
  if (max == kMinusInfinity) {
    std::fill(s.begin(), s.end(), 0.0);
    return row_.sink;
  }
  double sum = 0;
  for (double& score : s) sum += score = std::exp(score - max);
  const double factor = AddSink<Float64Ops>(row_.sink, max, sum);
  for (double& weight : s) weight = weight * factor / sum;
  return max + std::log(sum);
}

void QueryRow::DropOut(absl::Span<double> weights) const {
  const double p = p_.dropout->probability;
  const Section section = p_.section.value_or(Section{});
  for (int64_t j = 0; j < static_cast<int64_t>(weights.size()); ++j) {
    bool keep;
    DropoutKeeps(p, p_.dropout->seed, b_, h_, section.first_query + i_, section.first_key + j, 1,
                 &keep);
    weights[j] = keep ? weights[j] / (1 - p) : 0;
  }
}

}  // namespace rapt
