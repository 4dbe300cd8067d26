// Sliced tensors give the same bits as contiguous ones, for all slice boundaries.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "base/aligned_buffer.h"
#include "base/sliced_bytes.h"
#include "base/thread_pool.h"
#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

// The bytes of a row-major tensor in separately allocated slices, preceded by other bytes.
class Slices {
 public:
  Slices(const TensorView& whole, Rng& rng, int64_t largest_slice) {
    const int64_t bytes =
        whole.dims[0] * whole.dims[1] * whole.dims[2] * whole.dims[3] * SizeOf(whole.dtype);
    bytes_.offset = UniformInt(rng, 0, 9);
    int64_t position = 0;
    while (position < bytes_.offset + bytes) {
      const int64_t size =
          std::min(UniformInt(rng, 1, largest_slice), bytes_.offset + bytes - position);
      auto buffer = std::make_unique<std::byte[]>(size);
      for (int64_t n = 0; n < size; ++n) {
        const int64_t at = position + n - bytes_.offset;
        buffer[n] = at < 0 ? std::byte{0xFF} : whole.data[at];
      }
      slices_.push_back({buffer.get(), position, position + size});
      buffers_.push_back(std::move(buffer));
      position += size;
    }
    bytes_.slices = slices_;
  }

  TensorView View(TensorView view) const {
    view.data = nullptr;
    view.slices = &bytes_;
    return view;
  }

 private:
  std::vector<std::unique_ptr<std::byte[]>> buffers_;
  std::vector<ByteSlice> slices_;
  SlicedBytes bytes_;
};

struct SlicedOutputs {
  Tensor output, present_key, present_value;
};

SlicedOutputs RunSliced(const Problem& p, const Inputs& inputs, const PlanOptions& options,
                        Rng& rng, int64_t largest_slice) {
  const absl::StatusOr<Plan> plan = MakePlan(p, options);
  EXPECT_TRUE(plan.ok()) << plan.status();
  Tensor output(p.dtype, {p.batch, p.query_heads, p.query_length, p.value_head_size});
  Tensor present_key(p.dtype, {p.batch, p.kv_heads, p.total_keys(), p.head_size});
  Tensor present_value(p.dtype, {p.batch, p.kv_heads, p.total_keys(), p.value_head_size});

  std::vector<std::unique_ptr<Slices>> kept;
  const auto sliced = [&](const TensorView& view) {
    kept.push_back(std::make_unique<Slices>(view, rng, largest_slice));
    return kept.back()->View(view);
  };
  Arguments arguments;
  arguments.inputs[Role::kQ] = sliced(inputs.query.View());
  arguments.inputs[Role::kK] = sliced(inputs.key.View());
  arguments.inputs[Role::kV] = sliced(inputs.value.View());
  if (inputs.past_key) arguments.inputs[Role::kPastKey] = sliced(inputs.past_key->View());
  if (inputs.past_value) arguments.inputs[Role::kPastValue] = sliced(inputs.past_value->View());
  if (inputs.mask) arguments.inputs[Role::kMask] = inputs.mask->View();
  arguments.key_lengths = inputs.key_lengths;
  arguments.outputs[Role::kY] = output.MutableView();
  arguments.outputs[Role::kPresentKey] = present_key.MutableView();
  arguments.outputs[Role::kPresentValue] = present_value.MutableView();

  ThreadPool pool(options.threads);
  AlignedBuffer workspace(plan->workspace_bytes());
  const absl::Status status = rapt::Run(*plan, arguments, workspace.span(), pool);
  EXPECT_TRUE(status.ok()) << status;
  return {std::move(output), std::move(present_key), std::move(present_value)};
}

struct Case {
  std::string name;
  Problem problem;
  int64_t largest_slice;
};

class SlicesTest : public ::testing::TestWithParam<Case> {};

TEST_P(SlicesTest, GiveTheSameBitsAsContiguousTensors) {
  Problem problem = GetParam().problem;
  problem.wants_present = true;
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
    problem.dtype = dtype;
    const uint64_t seed = 20261120;
    Rng rng(seed);
    const Inputs inputs = RandomInputs(problem, rng);
    for (const Target& target : Targets()) {
      if (target.backend != "cpu") continue;
      const PlanOptions options = target.Options(3);
      SCOPED_TRACE(target.Name() + " " + ToText(problem) + " seed " + std::to_string(seed));
      const absl::StatusOr<Outputs> whole = RunAttention(problem, inputs, options);
      ASSERT_TRUE(whole.ok()) << whole.status();
      const SlicedOutputs outputs =
          RunSliced(problem, inputs, options, rng, GetParam().largest_slice);
      EXPECT_TRUE(SameBits("output", outputs.output, whole->output));
      EXPECT_TRUE(SameBits("present_key", outputs.present_key, *whole->present_key));
      EXPECT_TRUE(SameBits("present_value", outputs.present_value, *whole->present_value));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, SlicesTest,
                         ::testing::Values(Case{"prefill",
                                                {.batch = 2,
                                                 .query_heads = 4,
                                                 .kv_heads = 2,
                                                 .query_length = 65,
                                                 .key_length = 129,
                                                 .head_size = 64,
                                                 .value_head_size = 80,
                                                 .causal = true},
                                                700},
                                           Case{"bytes_apart",
                                                {.batch = 1,
                                                 .query_heads = 2,
                                                 .kv_heads = 1,
                                                 .query_length = 3,
                                                 .key_length = 17,
                                                 .head_size = 5,
                                                 .value_head_size = 3},
                                                3},
                                           Case{"decode_in_large_slices",
                                                {.batch = 2,
                                                 .query_heads = 8,
                                                 .kv_heads = 2,
                                                 .query_length = 1,
                                                 .key_length = 700,
                                                 .head_size = 64,
                                                 .value_head_size = 64},
                                                40000},
                                           Case{"decode_in_small_slices",
                                                {.batch = 1,
                                                 .query_heads = 4,
                                                 .kv_heads = 1,
                                                 .query_length = 1,
                                                 .key_length = 300,
                                                 .head_size = 32,
                                                 .value_head_size = 32},
                                                100},
                                           Case{"past",
                                                {.batch = 2,
                                                 .query_heads = 2,
                                                 .kv_heads = 2,
                                                 .query_length = 7,
                                                 .key_length = 7,
                                                 .past_length = 90,
                                                 .head_size = 32,
                                                 .value_head_size = 16,
                                                 .causal = true},
                                                500}),
                         [](const auto& info) { return info.param.name; });

TEST(SlicesRejectionTest, AreRejectedByABackendThatDoesNotReadThem) {
  const Problem problem{.batch = 1,
                        .query_heads = 1,
                        .kv_heads = 1,
                        .query_length = 2,
                        .key_length = 2,
                        .head_size = 2,
                        .value_head_size = 2};
  Rng rng(1);
  const Inputs inputs = RandomInputs(problem, rng);
  const Slices slices(inputs.key.View(), rng, 3);
  Tensor output(DType::kFloat32, {1, 1, 2, 2});
  Arguments arguments;
  arguments.inputs[Role::kQ] = inputs.query.View();
  arguments.inputs[Role::kK] = slices.View(inputs.key.View());
  arguments.inputs[Role::kV] = inputs.value.View();
  arguments.outputs[Role::kY] = output.MutableView();
  const absl::StatusOr<Plan> plan = MakePlan(problem, {.backend = "reference"});
  ASSERT_TRUE(plan.ok());
  AlignedBuffer workspace(plan->workspace_bytes());
  ThreadPool pool(1);
  const absl::Status status = rapt::Run(*plan, arguments, workspace.span(), pool);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

}  // namespace
}  // namespace rapt::test
