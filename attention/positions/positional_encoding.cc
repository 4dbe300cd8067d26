#include "attention/positions/positional_encoding.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/half.h"
#include "base/invalid.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

// Numbers of a task, approximately.
constexpr int64_t kTaskNumbers = 64 * 1024;

// y = x + encoding, in double, for `count` elements.
void AddTo(const std::byte* x, const double* encoding, DType dtype, int64_t count, std::byte* y) {
  if (dtype == DType::kFloat32) {
    for (int64_t n = 0; n < count; ++n) {
      StoreAs<float>(y, n, static_cast<float>(LoadAs<float>(x, n) + encoding[n]));
    }
    return;
  }
  for (int64_t n = 0; n < count; ++n) {
    StoreElement(y, dtype, n, LoadElement(x, dtype, n) + encoding[n]);
  }
}

class PositionalEncoding final : public TensorOperator {
 public:
  PositionalEncoding(const TensorSpec& x, std::optional<DType> table, double base,
                     int64_t first_position)
      : output_(x),
        table_(table),
        base_(base),
        first_position_(first_position),
        length_(output_.shape[output_.shape.size() - 2]),
        size_(output_.shape.back()) {
    outputs_[Role::kY] = output_;
    // The product of the other axes may overflow if one is 0.
    const bool is_empty = std::count(output_.shape.begin(), output_.shape.end(), 0) > 0;
    if (is_empty) batch_ = 0;
    for (size_t n = 0; n + 2 < output_.shape.size() && !is_empty; ++n) batch_ *= output_.shape[n];
    const int64_t numbers = std::max<int64_t>(size_, 1);
    batch_block_ = std::clamp<int64_t>(kTaskNumbers / numbers, 1, std::max<int64_t>(batch_, 1));
    length_block_ = std::max<int64_t>(kTaskNumbers / numbers / batch_block_, 1);
  }

  const OutputMap<std::optional<TensorSpec>>& outputs() const override { return outputs_; }

  void PlanTasks(Plan& plan) const override {
    const int64_t tasks = CeilDiv(length_, length_block_) * CeilDiv(batch_, batch_block_);
    plan.stages = {size_ == 0 ? 0 : tasks};
    plan.worker_workspace_bytes = RoundUp(size_ * int64_t{sizeof(double)}, kWorkspaceAlignment);
    plan.flops =
        static_cast<double>(batch_) * static_cast<double>(length_) * static_cast<double>(size_);
  }

  void RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace, int /*stage*/,
               int64_t task, int worker, const Checkpoint& /*checkpoint*/) const override {
    const int64_t batch_blocks = CeilDiv(batch_, batch_block_);
    const int64_t first_b = task % batch_blocks * batch_block_;
    const int64_t end_b = std::min(first_b + batch_block_, batch_);
    const int64_t first_s = task / batch_blocks * length_block_;
    const int64_t end_s = std::min(first_s + length_block_, length_);
    const absl::Span<double> encoding(
        reinterpret_cast<double*>(workspace + worker * plan.worker_workspace_bytes), size_);
    const int64_t row_bytes = size_ * SizeOf(output_.dtype);
    for (int64_t s = first_s; s < end_s; ++s) {
      Encode(arguments, s, encoding);
      for (int64_t b = first_b; b < end_b; ++b) {
        const int64_t offset = (b * length_ + s) * row_bytes;
        AddTo(arguments.inputs[kTokens].data + offset, encoding.data(), output_.dtype, size_,
              arguments.outputs[Role::kY].data + offset);
      }
    }
  }

 private:
  void Encode(const Arguments& arguments, int64_t s, absl::Span<double> out) const {
    if (!table_) return SinusoidalEncoding(base_, first_position_ + s, out);
    const std::byte* row = arguments.inputs[kTokenTable].data + s * size_ * SizeOf(*table_);
    for (int64_t n = 0; n < size_; ++n) out[n] = LoadElement(row, *table_, n);
  }

  const TensorSpec output_;
  OutputMap<std::optional<TensorSpec>> outputs_;
  const std::optional<DType> table_;
  const double base_;
  const int64_t first_position_;
  int64_t batch_ = 1;
  const int64_t length_;
  const int64_t size_;
  int64_t batch_block_, length_block_;
};

absl::Status CheckTable(const TensorSpec& table, const TensorSpec& x) {
  RAPT_RETURN_IF_ERROR(CheckTableType("table", table.dtype, x.dtype, "X"));
  const int64_t length = x.shape[x.shape.size() - 2];
  const int64_t size = x.shape.back();
  if (table.shape.size() == 2 && table.shape[0] >= length && table.shape[1] == size) {
    return absl::OkStatus();
  }
  return Invalid("table has shape ", ToString(table.shape), "; it must be [M, ", size,
                 "] with at least ", length, " rows, for X ", ToString(x.shape));
}

// --- The table ---

constexpr TensorSchema kPositionalInputs[] = {
    OfAnyRank(Required(TensorRow("X", kTokens, 3, "[..., S, E]"))),
    TensorRow("table", kTokenTable, 2, "learned encodings, [M, E] with M >= S")};
constexpr TensorSchema kPositionalOutputs[] = {Required(TensorRow("Y", Role::kY, 3, "as X"))};
constexpr AttributeSchema kPositionalAttributes[] = {AttributeOf<&PositionalEncodingCall::base>(
    "base", "base of the wave lengths (default: 10000)")};

}  // namespace

const OperatorSchema kPositionalEncoding = {
    "positional_encoding",
    "EncodePositions",
    "Adds an encoding of the positions to X: sines and cosines, or the rows of a table.",
    kPositionalInputs,
    kPositionalOutputs,
    kPositionalAttributes,
    NewCall<PositionalEncodingCall, MakePositionalEncoding>};

void SinusoidalEncoding(double base, int64_t position, absl::Span<double> out) {
  const auto size = static_cast<double>(out.size());
  for (size_t n = 0; n < out.size(); n += 2) {
    const double angle =
        static_cast<double>(position) * std::pow(base, -static_cast<double>(n) / size);
    out[n] = std::sin(angle);
    if (n + 1 < out.size()) out[n + 1] = std::cos(angle);
  }
}

absl::StatusOr<std::shared_ptr<const TensorOperator>> MakePositionalEncoding(
    const PositionalEncodingCall& call) {
  const std::optional<TensorSpec>& x = call.inputs[kTokens];
  const std::optional<TensorSpec>& table = call.inputs[kTokenTable];
  if (!x) return Invalid("X is missing");
  RAPT_RETURN_IF_ERROR(ByteSize("X", *x).status());
  if (!IsFloat(x->dtype)) {
    return Invalid("X has type ", NameOf(x->dtype), "; it must be FP32, FP16, BF16 or FP64");
  }
  if (x->shape.size() < 2 || x->shape.size() > 8) {
    return Invalid("X has shape ", ToString(x->shape), "; it must be [..., S, E], of rank 2 to 8");
  }
  if (*std::max_element(x->shape.begin(), x->shape.end()) > kMaxAxis) {
    return Invalid("X has shape ", ToString(x->shape), "; no axis may exceed 2^40");
  }
  if (table && call.base) {
    return Invalid("table and base are both set; at most one of them may be");
  }
  const double base = call.base.value_or(kDefaultBase);
  if (!(base > 0 && std::isfinite(base))) {
    return Invalid("base is ", base, "; it must be positive and finite");
  }
  using Made = std::shared_ptr<const TensorOperator>;
  if (!table) {
    return Made(
        std::make_shared<const PositionalEncoding>(*x, std::nullopt, base, call.first_position));
  }
  RAPT_RETURN_IF_ERROR(ByteSize("table", *table).status());
  RAPT_RETURN_IF_ERROR(CheckTable(*table, *x));
  return Made(std::make_shared<const PositionalEncoding>(*x, table->dtype, base, 0));
}

}  // namespace rapt
