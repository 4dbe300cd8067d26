#include "server/attention/reference/reference_backend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "server/attention/half.h"
#include "server/attention/philox.h"
#include "server/attention/present.h"

namespace rapt {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// One query row (b, h, i) and the T scores it has with the keys.
class Row {
 public:
  Row(const Problem& problem, const Arguments& arguments, int64_t row, double* scores)
      : p_(problem), a_(arguments), s_(scores) {
    i_ = row % p_.query_length;
    h_ = row / p_.query_length % p_.query_heads;
    b_ = row / p_.query_length / p_.query_heads;
    kv_head_ = h_ / p_.group_size();
    visible_ = VisibleKeys(p_, a_.key_lengths, b_, i_);
  }

  void Compute() {
    const int64_t t = p_.total_keys();
    for (int64_t j = 0; j < t; ++j) s_[j] = p_.effective_scale() * Dot(j);
    Emit(ScoreOutput::kScores);
    if (p_.softcap > 0) {
      for (int64_t j = 0; j < t; ++j) s_[j] = p_.softcap * std::tanh(s_[j] / p_.softcap);
    }
    Emit(ScoreOutput::kSoftcapped);
    for (int64_t j = 0; j < t; ++j) s_[j] = Masked(j) ? kMinusInfinity : s_[j] + Bias(j);
    Emit(ScoreOutput::kBiased);
    const double lse = Softmax();
    if (p_.dropout) DropOut();
    Emit(ScoreOutput::kWeights);
    StoreOutput(/*nothing_visible=*/lse == kMinusInfinity);
    if (p_.wants_lse) StoreElement(a_.lse.Row(b_, h_, i_), a_.lse.dtype, 0, lse);
  }

 private:
  // The bytes of key or value row j of the past and the present, one after the other.
  const std::byte* KeyRow(const TensorView& past, const TensorView& now, int64_t j) const {
    return j < p_.past_length ? past.Row(b_, kv_head_, j)
                              : now.Row(b_, kv_head_, j - p_.past_length);
  }

  double Dot(int64_t j) const {
    const std::byte* q = a_.query.Row(b_, h_, i_);
    const std::byte* k = KeyRow(a_.past_key, a_.key, j);
    double sum = 0;
    for (int64_t d = 0; d < p_.head_size; ++d) {
      sum += LoadElement(q, p_.dtype, d) * LoadElement(k, p_.dtype, d);
    }
    return sum;
  }

  bool BeyondMask(int64_t j) const {
    return p_.mask && p_.mask->dims[3] != 1 && j >= p_.mask->dims[3];
  }

  bool Masked(int64_t j) const {
    if (j < visible_.begin || j >= visible_.end || BeyondMask(j)) return true;
    if (!p_.mask) return false;
    if (p_.mask->dtype != DType::kBool) return Bias(j) == kMinusInfinity;
    return a_.mask.Row(b_, h_, i_)[j * a_.mask.strides[3]] == std::byte{0};
  }

  double Bias(int64_t j) const {
    if (!p_.mask || p_.mask->dtype == DType::kBool) return 0;
    return LoadElement(a_.mask.Row(b_, h_, i_), p_.mask->dtype, j * a_.mask.strides[3]);
  }

  // Turns the scores into weights; returns their lse, -inf when no key is visible.
  double Softmax() {
    const int64_t t = p_.total_keys();
    double max = kMinusInfinity;
    for (int64_t j = 0; j < t; ++j) max = s_[j] > max || std::isnan(s_[j]) ? s_[j] : max;
    if (max == kMinusInfinity) {
      std::fill(s_, s_ + t, 0.0);
      return kMinusInfinity;
    }
    double sum = 0;
    for (int64_t j = 0; j < t; ++j) sum += s_[j] = std::exp(s_[j] - max);
    for (int64_t j = 0; j < t; ++j) s_[j] /= sum;
    return max + std::log(sum);
  }

  void DropOut() {
    for (int64_t j = 0; j < p_.total_keys(); ++j) {
      bool keep;
      DropoutKeeps(p_.dropout->probability, p_.dropout->seed, b_, h_, i_, j, 1, &keep);
      s_[j] = keep ? s_[j] / (1 - p_.dropout->probability) : 0;
    }
  }

  void Emit(ScoreOutput stage) const {
    if (p_.score_output != stage) return;
    std::byte* row = a_.scores.Row(b_, h_, i_);
    for (int64_t j = 0; j < p_.total_keys(); ++j) StoreElement(row, p_.dtype, j, s_[j]);
  }

  void StoreOutput(bool nothing_visible) const {
    std::byte* out = a_.output.Row(b_, h_, i_);
    for (int64_t d = 0; d < p_.value_head_size; ++d) {
      double sum = 0;
      for (int64_t j = visible_.begin; j < visible_.end && !nothing_visible; ++j) {
        if (Masked(j)) continue;
        sum += s_[j] * LoadElement(KeyRow(a_.past_value, a_.value, j), p_.dtype, d);
      }
      StoreElement(out, p_.dtype, d, sum);
    }
  }

  const Problem& p_;
  const Arguments& a_;
  double* s_;
  int64_t b_, h_, i_, kv_head_;
  KeyRange visible_;
};

class Reference final : public Backend {
 public:
  absl::string_view name() const override { return "reference"; }

  absl::Status Supports(const Problem&) const override { return absl::OkStatus(); }

  void PlanTasks(Plan& plan) const override {
    const Problem& p = plan.problem;
    plan.stages = {Rows(p) + PresentTasks(p)};
    plan.worker_workspace_bytes = p.total_keys() * static_cast<int64_t>(sizeof(double));
    plan.flops = 2.0 * Rows(p) * p.total_keys() * (p.head_size + p.value_head_size);
  }

  void RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace, int /*stage*/,
               int64_t task, int worker) const override {
    const Problem& p = plan.problem;
    if (task >= Rows(p)) return RunPresentTask(p, arguments, task - Rows(p));
    auto* scores = reinterpret_cast<double*>(workspace + worker * plan.worker_workspace_bytes);
    Row(p, arguments, task, scores).Compute();
  }

 private:
  static int64_t Rows(const Problem& p) { return p.batch * p.query_heads * p.query_length; }
};

}  // namespace

const Backend& ReferenceBackend() {
  static const Reference backend;
  return backend;
}

}  // namespace rapt
