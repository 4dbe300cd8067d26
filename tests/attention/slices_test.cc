// Sliced tensors give the same bits as contiguous ones, for all slice boundaries.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "base/sliced_bytes.h"
#include "tests/support/run_attention.h"
#include "tests/support/strided_only_backend.h"

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
      if (target.backend == "cudnn") continue;
      const PlanOptions options = target.Options(3);
      SCOPED_TRACE(target.Name() + " " + ToText(problem) + " seed " + std::to_string(seed));
      const absl::StatusOr<Outputs> whole = RunAttention(problem, inputs, options);
      ASSERT_TRUE(whole.ok()) << whole.status();
      std::vector<std::unique_ptr<Slices>> slices;
      const absl::StatusOr<Outputs> sliced = RunAttention(
          problem, inputs, options, Storage::kRowMajor, std::nullopt, [&](Arguments& arguments) {
            for (Role role : {Role::kQ, Role::kK, Role::kV, Role::kPastKey, Role::kPastValue,
                              Role::kRelativeQuery}) {
              TensorView& view = arguments.inputs[role];
              if (!view.present()) continue;
              slices.push_back(std::make_unique<Slices>(view, rng, GetParam().largest_slice));
              view = slices.back()->View(view);
            }
          });
      ASSERT_TRUE(sliced.ok()) << sliced.status();
      EXPECT_TRUE(SameBits(*sliced, *whole));
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
                                           Case{"relative_query",
                                                {.batch = 2,
                                                 .query_heads = 4,
                                                 .kv_heads = 2,
                                                 .query_length = 13,
                                                 .key_length = 17,
                                                 .head_size = 20,
                                                 .value_head_size = 3,
                                                 .relative_keys = RelativeVectors{.length = 5},
                                                 .has_relative_query = true},
                                                50},
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
  const StridedOnlyBackend backend;
  const BackendSet backends({&backend});
  PlanOptions options;
  options.backend = "strided_only";
  options.backends = &backends;
  EXPECT_TRUE(RunAttention(problem, inputs, options).ok());
  const absl::StatusOr<Outputs> outputs = RunAttention(
      problem, inputs, options, Storage::kRowMajor, std::nullopt,
      [&](Arguments& arguments) { arguments.inputs[Role::kK] = slices.View(inputs.key.View()); });
  EXPECT_EQ(outputs.status(),
            absl::InvalidArgumentError(
                "K is sliced; backend 'strided_only' does not read sliced tensors"));
}

}  // namespace
}  // namespace rapt::test
