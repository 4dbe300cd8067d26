#include "client/load/call_data.h"

#include <array>
#include <cmath>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"
#include "attention/half.h"
#include "attention/mechanism/softmax/query_row.h"
#include "attention/problem.h"
#include "base/check.h"
#include "client/load/random.h"

namespace rapt::load {
namespace {

int64_t Product(const client::Shape& shape) {
  int64_t product = 1;
  for (const int64_t axis : shape) product *= axis;
  return product;
}

void Fill(DType dtype, absl::Span<std::byte> bytes, uint64_t seed) {
  const int64_t elements = static_cast<int64_t>(bytes.size()) / SizeOf(dtype);
  for (int64_t i = 0; i < elements; ++i) {
    const double value = 2 * UnitDraw(seed, static_cast<uint64_t>(i)) - 1;
    switch (dtype) {
      case DType::kFloat32: {
        const auto rounded = static_cast<float>(value);
        std::memcpy(bytes.data() + i * 4, &rounded, 4);
        break;
      }
      case DType::kBool:
        bytes[static_cast<size_t>(i)] = std::byte{value < 1.0 / 3};
        break;
      default:
        StoreElement(bytes.data(), dtype, i, value);
    }
  }
}

// The rounding error allowed in a mean of numbers below 1.
double Tolerance(client::DType dtype) {
  switch (dtype) {
    case client::DType::kFloat64:
      return 1e-12;
    case client::DType::kFloat32:
      return 1e-5;
    case client::DType::kFloat16:
      return 2e-3;
    default:
      return 1.6e-2;
  }
}

std::array<int64_t, 4> DimsOf(const client::TensorView& view) {
  return {view.shape[0], view.shape[1], view.shape[2], view.shape[3]};
}

TensorView ViewOf(const client::TensorView& view) {
  const std::array<int64_t, 4> dims = DimsOf(view);
  return {view.data.data(), view.dtype, dims, RowMajorStrides(dims)};
}

// Returns the first, middle and last index.
std::set<int64_t> Sample(int64_t size) { return {0, size / 2, size - 1}; }

}  // namespace

client::TensorView CallData::NewTensor(client::DType dtype, client::Shape shape, uint64_t seed) {
  const int64_t bytes = Product(shape) * client::SizeOf(dtype);
  AlignedBuffer& buffer = buffers_.emplace_back(static_cast<size_t>(bytes));
  Fill(dtype, buffer.span(), seed);
  return {dtype, std::move(shape), buffer.span()};
}

CallData::CallData(const CallShape& shape, uint64_t seed) : shape_(shape) {
  const CallShape& s = shape_;
  const auto tensor_seed = [seed](uint64_t tensor) { return Draw(seed, tensor); };
  call_.q = NewTensor(s.dtype, {s.batch, s.query_heads, s.queries, s.head_size}, tensor_seed(0));
  call_.k = NewTensor(s.dtype, {s.batch, s.kv_heads, s.keys, s.head_size}, tensor_seed(1));
  call_.v = NewTensor(s.dtype, {s.batch, s.kv_heads, s.keys, s.head_size}, tensor_seed(2));
  call_.causal = s.causal;
  const auto random_length = [&](int64_t row) {
    const double draw = UnitDraw(tensor_seed(3), static_cast<uint64_t>(row));
    return 1 + static_cast<int64_t>(draw * static_cast<double>(s.keys));
  };
  switch (s.mask) {
    case MaskKind::kNone:
      break;
    case MaskKind::kBool:
      call_.mask = NewTensor(client::DType::kBool, {1, 1, s.queries, s.keys}, tensor_seed(4));
      for (int64_t i = 0; i < s.queries; ++i) {
        buffers_.back().data()[i * s.keys] = std::byte{1};  // every query sees a key
      }
      break;
    case MaskKind::kFloat:
      call_.mask = NewTensor(s.dtype, {1, 1, s.queries, s.keys}, tensor_seed(4));
      break;
    case MaskKind::kPadding:
      call_.mask = NewTensor(client::DType::kBool, {s.batch, 1, 1, s.keys}, tensor_seed(4));
      for (int64_t b = 0; b < s.batch; ++b) {
        const int64_t length = random_length(b + s.batch);
        for (int64_t j = 0; j < s.keys; ++j) {
          buffers_.back().data()[b * s.keys + j] = std::byte{j < length};
        }
      }
      break;
  }
  if (s.ragged) {
    for (int64_t b = 0; b < s.batch; ++b) key_lengths_.push_back(random_length(b));
    call_.key_lengths = key_lengths_;
    call_.alignment = client::Alignment::kOnnx;  // the only one of the Open Inference Protocol
  }
}

int64_t CallData::y_bytes() const { return static_cast<int64_t>(call_.q.data.size()); }

absl::Status CallData::CheckY(absl::Span<const std::byte> y) const {
  const CallShape& s = shape_;
  if (static_cast<int64_t>(y.size()) != y_bytes()) {
    return absl::InternalError(absl::StrFormat("the response to %s has %d bytes of Y; expected %d",
                                               Describe(s), y.size(), y_bytes()));
  }
  Problem problem{.dtype = s.dtype,
                  .batch = s.batch,
                  .query_heads = s.query_heads,
                  .kv_heads = s.kv_heads,
                  .query_length = s.queries,
                  .key_length = s.keys,
                  .head_size = s.head_size,
                  .value_head_size = s.head_size,
                  .causal = s.causal,
                  .alignment = Alignment::kOnnx,
                  .has_key_lengths = s.ragged};
  Arguments arguments;
  arguments.inputs[Role::kQ] = ViewOf(call_.q);
  arguments.inputs[Role::kK] = ViewOf(call_.k);
  arguments.inputs[Role::kV] = ViewOf(call_.v);
  arguments.key_lengths = call_.key_lengths;
  if (call_.mask) {
    problem.mask = MaskShape{call_.mask->dtype, DimsOf(*call_.mask)};
    arguments.inputs[Role::kMask] = ViewOf(*call_.mask);
    for (size_t axis = 0; axis < 3; ++axis) {
      if (arguments.inputs[Role::kMask].dims[axis] == 1) {
        arguments.inputs[Role::kMask].strides[axis] = 0;
      }
    }
  }
  const std::array<int64_t, 4> dims = DimsOf(call_.q);
  const TensorView actual{y.data(), problem.dtype, dims, RowMajorStrides(dims)};
  return CheckRows(problem, arguments, actual, s);
}

absl::Status CheckRows(const Problem& problem, const Arguments& arguments, const TensorView& y,
                       const CallShape& shape) {
  std::vector<double> scores(static_cast<size_t>(problem.key_length));
  std::vector<double> wanted(static_cast<size_t>(problem.value_head_size));
  for (const int64_t b : Sample(problem.batch)) {
    for (const int64_t h : Sample(problem.query_heads)) {
      for (const int64_t i : Sample(problem.query_length)) {
        const QueryRow row(problem, arguments, /*rotation=*/nullptr, b, h, i, /*memory=*/nullptr);
        const double lse = row.Weigh(absl::MakeSpan(scores), [](Step, absl::Span<const double>) {});
        row.Output(scores, lse, absl::MakeSpan(wanted));
        for (int64_t d = 0; d < problem.value_head_size; ++d) {
          const double got = LoadElement(y.Row(b, h, i), problem.dtype, d);
          const double error = std::abs(got - wanted[static_cast<size_t>(d)]);
          if (error <= Tolerance(shape.dtype)) continue;  // false for NaN
          return absl::InternalError(
              absl::StrFormat("the response to %s is wrong: Y[%d, %d, %d, %d] is %g; expected %g",
                              Describe(shape), b, h, i, d, got, wanted[static_cast<size_t>(d)]));
        }
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace rapt::load
