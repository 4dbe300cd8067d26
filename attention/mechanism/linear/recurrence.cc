#include "attention/mechanism/linear/recurrence.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/types/span.h"
#include "attention/half.h"
#include "attention/tensor_view.h"
#include "attention/work_meter.h"

namespace rapt {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

DType TypeOf(Element element) {
  switch (element) {
    case Element::kFloat64:
      return DType::kFloat64;
    case Element::kFloat16:
      return DType::kFloat16;
    case Element::kBFloat16:
      return DType::kBFloat16;
    default:
      return DType::kFloat32;
  }
}

double Load(const std::byte* data, Element element, int64_t n) {
  return LoadElement(data, TypeOf(element), n);
}

class Recurrence {
 public:
  explicit Recurrence(const LinearTask& task)
      : t_(task), meter_(task.checkpoint, /*interval=*/100'000) {
    auto* next = reinterpret_cast<double*>(task.scratch);
    const auto take = [&next](int64_t count) {
      const absl::Span<double> span(next, count);
      next += count;
      return span;
    };
    state_ = take(t_.features * t_.columns);
    normalizer_ = take(t_.features);
    stabilizer_ = take(t_.features);
    features_ = take(t_.features);
    input_ = take(t_.key_size);
    row_ = take(t_.columns);
  }

  static int64_t ScratchBytes(const LinearTask& t) {
    return (t.features * (t.columns + 3) + t.key_size + t.columns) * int64_t{sizeof(double)};
  }

  bool Run() {
    LoadState();
    for (int64_t t = 0; t < t_.tokens; ++t) {
      if (!meter_.Pass(t_.features * t_.columns * (t_.group + 1))) return false;
      Update(t);
      if (t_.is_causal) ComputeOutput(t);
    }
    for (int64_t t = 0; t < t_.tokens && !t_.is_causal; ++t) {
      if (!meter_.Pass(t_.features * t_.columns * (t_.group + 1))) return false;
      ComputeOutput(t);
    }
    std::fill(row_.begin(), row_.end(), 0);
    for (int64_t t = t_.tokens; t < t_.length; ++t) {
      for (int64_t h = 0; h < t_.group; ++h) StoreRow(h, t);
    }
    StoreState();
    return true;
  }

 private:
  bool is_favor() const { return t_.feature_map == FeatureMap::kFavor; }

  absl::Span<double> StateRow(int64_t f) {
    return {state_.data() + f * t_.columns, static_cast<size_t>(t_.columns)};
  }

  void LoadState() {
    const LinearState& past = t_.past;
    for (int64_t f = 0; f < t_.features; ++f) {
      const absl::Span<double> row = StateRow(f);
      for (int64_t c = 0; c < t_.columns; ++c) {
        row[c] = past.rows == nullptr ? 0 : Load(past.rows, past.element, f * t_.state_stride + c);
      }
      normalizer_[f] =
          past.normalizer == nullptr ? 0 : Load(past.normalizer, past.normalizer_element, f);
      stabilizer_[f] = past.rows == nullptr && is_favor() ? -kInfinite : 0;
    }
  }

  void StoreState() {
    const LinearPresent& present = t_.present;
    const DType dtype = TypeOf(present.element);
    for (int64_t f = 0; f < t_.features; ++f) {
      const double factor = is_favor() ? std::exp(stabilizer_[f]) : 1;
      const absl::Span<double> row = StateRow(f);
      for (int64_t c = 0; c < t_.columns && present.rows != nullptr; ++c) {
        StoreElement(present.rows, dtype, f * t_.state_stride + c, row[c] * factor);
      }
      if (present.normalizer == nullptr) continue;
      StoreElement(present.normalizer, dtype, f, normalizer_[f] * factor);
    }
  }

  static const std::byte* RowOf(const LinearRows& rows, int64_t t) {
    return rows.data + t * rows.stride;
  }

  // Sets features_ to those of `count` numbers from element `first` of the row; of favor, to their
  // logarithms.
  void LoadFeatures(const LinearRows& rows, int64_t t, int64_t first) {
    for (int64_t d = 0; d < t_.key_size; ++d) {
      input_[d] = Load(RowOf(rows, t), rows.element, first + d);
    }
    if (is_favor()) return LoadFavor();
    for (int64_t d = 0; d < t_.key_size; ++d) features_[d] = FeatureOf(input_[d]);
  }

  double FeatureOf(double x) const {
    if (t_.feature_map == FeatureMap::kElu1) return x > 0 ? x + 1 : std::exp(x);
    if (t_.feature_map == FeatureMap::kRelu) return x < 0 ? 0 : x;
    return x;
  }

  void LoadFavor() {
    double norm = 0;
    for (double& x : input_) {
      x *= std::sqrt(t_.scale);
      norm += x * x;
    }
    const double rest = -norm / 2 - std::log(static_cast<double>(t_.features)) / 2;
    for (int64_t f = 0; f < t_.features; ++f) {
      double sum = rest;
      for (int64_t d = 0; d < t_.key_size; ++d) {
        sum += Load(RowOf(t_.projection, f), t_.projection.element, d) * input_[d];
      }
      features_[f] = sum;
    }
  }

  // Row f of the state is kept divided by e^stabilizer, the largest feature so far, which cancels.
  void StabilizeKeys() {
    for (int64_t f = 0; f < t_.features; ++f) {
      const double largest = std::max(stabilizer_[f], features_[f]);
      if (largest > stabilizer_[f]) {
        const double factor = std::exp(stabilizer_[f] - largest);
        for (double& s : StateRow(f)) s *= factor;
        normalizer_[f] *= factor;
        stabilizer_[f] = largest;
      }
      features_[f] = std::exp(features_[f] - stabilizer_[f]);
    }
  }

  void StabilizeQuery() {
    double largest = -kInfinite;
    for (int64_t f = 0; f < t_.features; ++f) {
      features_[f] += stabilizer_[f];
      largest = std::max(largest, features_[f]);
    }
    for (double& x : features_) x = std::exp(x - largest);
  }

  void Decay(int64_t t) {
    for (int64_t f = 0; f < t_.features; ++f) {
      const double g =
          Load(RowOf(t_.decay, t), t_.decay.element, t_.decay_kind == DecayKind::kPerKey ? f : 0);
      const double factor = std::exp(g);
      for (double& s : StateRow(f)) s = g == -kInfinite ? 0 : s * factor;
    }
  }

  void Update(int64_t t) {
    if (t_.decay_kind != DecayKind::kNone) Decay(t);
    LoadFeatures(t_.key, t, 0);
    if (is_favor()) StabilizeKeys();
    for (int64_t c = 0; c < t_.columns; ++c) {
      row_[c] = Load(RowOf(t_.value, t), t_.value.element, c);
    }
    if (t_.is_delta) {
      const double beta = Load(RowOf(t_.beta, t), t_.beta.element, 0);
      for (int64_t f = 0; f < t_.features; ++f) {
        const absl::Span<double> state = StateRow(f);
        for (int64_t c = 0; c < t_.columns; ++c) row_[c] -= features_[f] * state[c];
      }
      for (double& u : row_) u *= beta;
    }
    for (int64_t f = 0; f < t_.features; ++f) {
      const absl::Span<double> state = StateRow(f);
      for (int64_t c = 0; c < t_.columns; ++c) state[c] += features_[f] * row_[c];
      normalizer_[f] += features_[f];
    }
  }

  void ComputeOutput(int64_t t) {
    for (int64_t h = 0; h < t_.group; ++h) {
      LoadFeatures(t_.query, t, h * t_.key_size);
      if (is_favor()) StabilizeQuery();
      std::fill(row_.begin(), row_.end(), 0);
      double sum = 0;
      for (int64_t f = 0; f < t_.features; ++f) {
        const absl::Span<double> state = StateRow(f);
        for (int64_t c = 0; c < t_.columns; ++c) row_[c] += features_[f] * state[c];
        sum += features_[f] * normalizer_[f];
      }
      for (double& o : row_) {
        o = !t_.is_normalized ? o * t_.scale : sum == 0 ? 0 : o / sum;
      }
      StoreRow(h, t);
    }
  }

  void StoreRow(int64_t head, int64_t t) {
    std::byte* const output = t_.output + t * t_.output_stride;
    for (int64_t c = 0; c < t_.columns; ++c) {
      StoreElement(output, TypeOf(t_.output_element), head * t_.value_size + c, row_[c]);
    }
  }

  const LinearTask& t_;
  absl::Span<double> state_;       // [features][columns]
  absl::Span<double> normalizer_;  // [features]
  absl::Span<double> stabilizer_;  // [features]
  absl::Span<double> features_;    // of the current key or query
  absl::Span<double> input_;       // [key_size]
  absl::Span<double> row_;         // [columns], u or o
  WorkMeter meter_;                // of multiply-adds
};

}  // namespace

const LinearKernel kRecurrence = {Recurrence::ScratchBytes,
                                  [](const LinearTask& task) { return Recurrence(task).Run(); }};

}  // namespace rapt
