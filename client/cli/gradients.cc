#include "client/cli/gradients.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <utility>

#include "attention/field_names.h"
#include "attention/half.h"
#include "base/status_macros.h"
#include "client/cpp/call_fields.h"

namespace rapt {
namespace {

using Values = std::vector<double>;

// h, and the tolerance relative to max(1, |slope|).
struct Precision {
  double step;
  double tolerance;
};
constexpr Precision kOfDirections = {1e-5, 1e-7};
constexpr Precision kOfElements = {1e-6, 1e-4};

double Dot(absl::Span<const double> a, absl::Span<const double> b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// The sum of dlse * lse without rows that see no key, whose lse is -inf.
double DotLse(absl::Span<const double> dlse, absl::Span<const double> lse) {
  double sum = 0;
  for (size_t n = 0; n < dlse.size(); ++n) {
    if (lse[n] != -std::numeric_limits<double>::infinity()) sum += dlse[n] * lse[n];
  }
  return sum;
}

// One input that is moved: its values and the direction.
struct Moved {
  const client::CallTensor* input;
  absl::Span<const double> values;
  Values direction;
};

class GradientChecker {
 public:
  GradientChecker(AttentionCaller& caller, const client::BackwardCall& call)
      : caller_(caller), call_(call) {
    dy_ = Copy(call.dy);
    if (call.dlse) dlse_ = Copy(*call.dlse);
  }

  absl::Status Run() {
    RAPT_ASSIGN_OR_RETURN(result_, caller_.AttendBackward(call_));
    for (const GradientRef& gradient : GradientsIn(result_)) {
      const client::CallTensor* const input = client::FindCallTensor(kNativeNames[gradient.input]);
      inputs_.push_back(
          {gradient.name, input, Copy(*input->In(call_.call)), Copy(gradient.tensor->view())});
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<GradientCheck>> CheckDirections(std::mt19937_64& random) {
    std::vector<Moved> all;
    std::vector<GradientCheck> checks;
    for (const Input& input : inputs_) {
      Values direction(input.values.size());
      for (double& value : direction) value = 2 * std::generate_canonical<double, 53>(random) - 1;
      all.push_back({input.tensor, input.values, std::move(direction)});
      const double gradient = Dot(all.back().direction, input.gradient);
      RAPT_ASSIGN_OR_RETURN(const auto check,
                            Check(input.name, {&all.back(), 1}, gradient, kOfDirections));
      checks.push_back(check);
    }
    double sum = 0;
    for (const GradientCheck& check : checks) sum += check.gradient;
    RAPT_ASSIGN_OR_RETURN(const auto check, Check("all", all, sum, kOfDirections));
    checks.push_back(check);
    return checks;
  }

  absl::StatusOr<std::vector<GradientCheck>> CheckElements() {
    std::vector<GradientCheck> checks;
    for (const Input& input : inputs_) {
      GradientCheck worst{.name = input.name, .passed = true};
      Moved moved{input.tensor, input.values, Values(input.values.size())};
      for (size_t n = 0; n < input.values.size(); ++n) {
        moved.direction[n] = 1;
        RAPT_ASSIGN_OR_RETURN(auto check,
                              Check(input.name, {&moved, 1}, input.gradient[n], kOfElements));
        moved.direction[n] = 0;
        check.element = static_cast<int64_t>(n);
        const bool is_worse =
            worst.passed != check.passed ? worst.passed : check.difference > worst.difference;
        if (is_worse || n == 0) worst = check;
      }
      checks.push_back(worst);
    }
    return checks;
  }

 private:
  struct Input {
    const char* name;
    const client::CallTensor* tensor;
    Values values;
    Values gradient;
  };

  static Values Copy(const client::TensorView& view) {
    Values values(view.data.size() / sizeof(double));
    std::copy(view.data.begin(), view.data.end(), reinterpret_cast<std::byte*>(values.data()));
    return values;
  }

  // L with `step` times the directions added to the inputs.
  absl::StatusOr<double> Loss(absl::Span<const Moved> moved, double step) {
    client::AttendCall call = call_.call;
    call.wants_lse = call_.dlse.has_value();
    std::vector<Values> shifted;
    for (const Moved& input : moved) {
      Values values(input.values.begin(), input.values.end());
      for (size_t n = 0; n < values.size(); ++n) values[n] += step * input.direction[n];
      const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
      input.input->Set(call, {client::DType::kFloat64, input.input->In(call)->shape,
                              absl::MakeConstSpan(bytes, values.size() * sizeof(double))});
      shifted.push_back(std::move(values));  // keeps the bytes where they are
    }
    RAPT_ASSIGN_OR_RETURN(const client::AttendResult result, caller_.Attend(call));
    double loss = Dot(dy_, result.y.values<double>());
    if (call.wants_lse) loss += DotLse(dlse_, result.lse->values<double>());
    return loss;
  }

  absl::StatusOr<GradientCheck> Check(const char* name, absl::Span<const Moved> moved,
                                      double gradient, const Precision& precision) {
    RAPT_ASSIGN_OR_RETURN(const double after, Loss(moved, precision.step));
    RAPT_ASSIGN_OR_RETURN(const double before, Loss(moved, -precision.step));
    GradientCheck check{.name = name, .gradient = gradient};
    check.slope = (after - before) / (2 * precision.step);
    check.difference = std::abs(check.slope - gradient);
    // False for a NaN.
    check.passed = check.difference <= precision.tolerance * std::max(1.0, std::abs(check.slope));
    return check;
  }

  AttentionCaller& caller_;
  const client::BackwardCall& call_;
  Values dy_, dlse_;
  client::BackwardResult result_;
  std::vector<Input> inputs_;
};

}  // namespace

std::vector<GradientRef> GradientsIn(const client::BackwardResult& result) {
  std::vector<GradientRef> gradients;
  for (Role role : kGradients) {
    const client::GradientField& field = *client::FindGradient(kNativeNames[role]);
    const std::optional<client::Tensor>& tensor = result.*field.member;
    if (tensor) gradients.push_back({field.name, InfoOf(role).gradient_of, &*tensor});
  }
  return gradients;
}

double NormOf(const client::Tensor& tensor) {
  const DType dtype = tensor.dtype();
  const auto size = static_cast<int64_t>(tensor.bytes().size()) / SizeOf(dtype);
  double squares = 0;
  for (int64_t n = 0; n < size; ++n) {
    const double value = LoadElement(tensor.bytes().data(), dtype, n);
    squares += value * value;
  }
  return std::sqrt(squares);
}

absl::StatusOr<std::vector<GradientCheck>> CheckDirections(AttentionCaller& caller,
                                                           const client::BackwardCall& call,
                                                           std::mt19937_64& random) {
  GradientChecker checker(caller, call);
  RAPT_RETURN_IF_ERROR(checker.Run());
  return checker.CheckDirections(random);
}

absl::StatusOr<std::vector<GradientCheck>> CheckElements(AttentionCaller& caller,
                                                         const client::BackwardCall& call) {
  GradientChecker checker(caller, call);
  RAPT_RETURN_IF_ERROR(checker.Run());
  return checker.CheckElements();
}

}  // namespace rapt
