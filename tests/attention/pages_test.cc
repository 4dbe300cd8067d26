// Paged keys and values give the same bits as strided ones, for all page sizes and places.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/diagnosis.h"
#include "attention/mechanism/softmax/chunked.h"
#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "tests/support/run_attention.h"
#include "tests/support/strided_only_backend.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kSeed = 20261122;
constexpr int64_t kMaxInt = std::numeric_limits<int64_t>::max();
constexpr DType kFloatTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                 DType::kFloat64};

// A copy of a tensor in pages, each in memory of its own that ends with its last row. The other
// bytes read as NaN.
class Pages {
 public:
  struct Layout {
    int64_t page_rows;
    int64_t first_row = 0;
    int64_t offset = 0;
    int64_t gap = 0;    // elements between rows
    int64_t spare = 0;  // pages of each batch row behind those it needs
  };

  static Layout RandomLayout(int64_t page_rows, Rng& rng) {
    const bool aligned = UniformInt(rng, 0, 1) == 0;
    return {page_rows, aligned ? 0 : UniformInt(rng, 0, page_rows - 1), UniformInt(rng, 0, 9),
            UniformInt(rng, 0, 3), UniformInt(rng, 0, 2)};
  }

  Pages(const TensorView& whole, const Layout& layout) : view_(whole) {
    const auto& [batch, heads, length, size] = whole.dims;
    const int64_t element = SizeOf(whole.dtype);
    const int64_t row_step = size + layout.gap;
    view_.data = nullptr;
    view_.strides = {-1, layout.page_rows * row_step, row_step, 1};
    paged_.batch_pages = (layout.first_row + length - 1) / layout.page_rows + 1 + layout.spare;
    paged_.page_rows = layout.page_rows;
    paged_.first_row = layout.first_row;
    paged_.offset = layout.offset;
    const int64_t bytes =
        layout.offset + (heads * layout.page_rows * row_step - layout.gap) * element;
    for (int64_t n = 0; n < batch * paged_.batch_pages; ++n) {
      memory_.push_back(std::make_unique<std::byte[]>(bytes));
      std::memset(memory_.back().get(), 0xFF, bytes);
      pages_.push_back(memory_.back().get());
    }
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t s = 0; s < length; ++s) {
          const int64_t row = layout.first_row + s;
          std::byte* page = memory_[b * paged_.batch_pages + row / layout.page_rows].get();
          const int64_t at = (h * layout.page_rows + row % layout.page_rows) * row_step * element;
          whole.CopyRow(b, h, s, page + layout.offset + at);
        }
      }
    }
    paged_.pages = pages_;
    view_.pages = &paged_;
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  const TensorView& View() const { return view_; }

  // Rows [begin, begin + count), in the same pages.
  TensorView View(int64_t begin, int64_t count, PagedRows& storage) const {
    const int64_t row = paged_.first_row + begin;
    storage = paged_;
    storage.pages = paged_.pages.subspan(row / paged_.page_rows);
    storage.first_row = row % paged_.page_rows;
    TensorView view = view_;
    view.dims[2] = count;
    view.pages = &storage;
    return view;
  }

 private:
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::vector<const std::byte*> pages_;
  PagedRows paged_;
  TensorView view_;
};

// A view of the same bytes in slices of `size` bytes.
class Slices {
 public:
  Slices(const TensorView& whole, int64_t size) : view_(whole) {
    const auto& [batch, heads, length, size_of_row] = whole.dims;
    const int64_t bytes = batch * heads * length * size_of_row * SizeOf(whole.dtype);
    for (int64_t at = 0; at < bytes; at += size) {
      slices_.push_back({whole.data + at, at, std::min(at + size, bytes)});
    }
    sliced_.slices = slices_;
    view_.data = nullptr;
    view_.slices = &sliced_;
  }
  Slices(const Slices&) = delete;
  Slices& operator=(const Slices&) = delete;

  const TensorView& View() const { return view_; }

 private:
  std::vector<ByteSlice> slices_;
  SlicedBytes sliced_;
  TensorView view_;
};

// ---- The same bits

struct Case {
  std::string name;
  Problem problem;
  bool poisoned = false;  // NaN and infinities among the values
};

// The sources of past and new rows.
constexpr std::pair<Source, Source> kSources[] = {{Source::kPaged, Source::kPaged},
                                                  {Source::kStrided, Source::kPaged},
                                                  {Source::kPaged, Source::kStrided},
                                                  {Source::kSliced, Source::kPaged}};

class PagesTest : public ::testing::TestWithParam<std::tuple<Case, int64_t>> {};

TEST_P(PagesTest, GiveTheSameBitsAsStridedTensors) {
  const auto& [test, page_rows] = GetParam();
  Problem problem = test.problem;
  problem.wants_lse = problem.wants_present = true;
  for (DType dtype : kFloatTypes) {
    problem.dtype = dtype;
    Rng rng(kSeed);
    Inputs inputs = RandomInputs(problem, rng);
    if (test.poisoned) {
      inputs.value.Set(0, 0, 20, 1, std::nan(""));
      inputs.value.Set(0, 0, 90, 2, std::numeric_limits<double>::infinity());
    }
    for (const Target& target : Targets()) {
      if (target.backend == "cudnn") continue;
      const absl::StatusOr<Outputs> whole = RunAttention(problem, inputs, target.Options(3));
      ASSERT_TRUE(whole.ok()) << whole.status();
      for (const auto& [past_source, source] : kSources) {
        if (problem.past_length == 0 && past_source != Source::kPaged) continue;
        SCOPED_TRACE(target.Name() + " " + ToText(problem) + " past " +
                     std::string(NameOf(past_source)) + ", new " + std::string(NameOf(source)) +
                     " seed " + std::to_string(kSeed));
        std::vector<std::unique_ptr<Pages>> pages;
        std::vector<std::unique_ptr<Slices>> slices;
        const auto move = [&](TensorView& view, Source to) {
          if (!view.present() || to == Source::kStrided) return;
          if (to == Source::kSliced) {
            slices.push_back(std::make_unique<Slices>(view, 7));
            view = slices.back()->View();
          } else {
            pages.push_back(
                std::make_unique<Pages>(view, Pages::RandomLayout(std::get<1>(GetParam()), rng)));
            view = pages.back()->View();
          }
        };
        const absl::StatusOr<Outputs> paged =
            RunAttention(problem, inputs, target.Options(3), Storage::kRowMajor, std::nullopt,
                         [&, past_source = past_source, source = source](Arguments& arguments) {
                           move(arguments.inputs[Role::kPastKey], past_source);
                           move(arguments.inputs[Role::kPastValue], past_source);
                           move(arguments.inputs[Role::kK], source);
                           move(arguments.inputs[Role::kV], source);
                         });
        ASSERT_TRUE(paged.ok()) << paged.status();
        EXPECT_TRUE(SameBits(*paged, *whole));
      }
    }
  }
}

const Case kCases[] = {
    {"prefill",
     {.batch = 2,
      .query_heads = 4,
      .kv_heads = 2,
      .query_length = 65,
      .key_length = 129,
      .head_size = 64,
      .value_head_size = 80,
      .causal = true}},
    {"prefill_with_past",
     {.batch = 1,
      .query_heads = 3,
      .kv_heads = 3,
      .query_length = 21,
      .key_length = 21,
      .past_length = 90,
      .head_size = 5,
      .value_head_size = 19,
      .causal = true,
      .score_output = ScoreOutput::kBiased}},
    {"decode",
     {.batch = 2,
      .query_heads = 8,
      .kv_heads = 2,
      .query_length = 1,
      .key_length = 1,
      .past_length = 200,
      .head_size = 64,
      .value_head_size = 64}},
    {"decode_in_splits",
     {.batch = 1,
      .query_heads = 2,
      .kv_heads = 1,
      .query_length = 1,
      .key_length = 3000,
      .past_length = 1100,
      .head_size = 32,
      .value_head_size = 32}},
    {"few_rows_with_weights",
     {.batch = 2,
      .query_heads = 2,
      .kv_heads = 1,
      .query_length = 3,
      .key_length = 70,
      .past_length = 10,
      .head_size = 16,
      .value_head_size = 9,
      .score_output = ScoreOutput::kWeights}},
    {"poisoned_block",
     {.batch = 1,
      .query_heads = 2,
      .kv_heads = 1,
      .query_length = 12,
      .key_length = 131,
      .head_size = 16,
      .value_head_size = 24,
      .mask = MaskShape{DType::kBool, {1, 1, 12, 131}}},
     /*poisoned=*/true},
    {"poisoned_few",
     {.batch = 1,
      .query_heads = 2,
      .kv_heads = 1,
      .query_length = 2,
      .key_length = 131,
      .head_size = 16,
      .value_head_size = 24,
      .mask = MaskShape{DType::kBool, {1, 1, 2, 131}}},
     /*poisoned=*/true},
};

INSTANTIATE_TEST_SUITE_P(, PagesTest,
                         ::testing::Combine(::testing::ValuesIn(kCases),
                                            ::testing::Values(1, 3, 16, 64)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "_in_pages_of_" +
                                  std::to_string(std::get<1>(info.param));
                         });

TEST(PagesChunkTest, ASectionReadsTheFullProblemsPages) {
  Problem whole{.batch = 2,
                .query_heads = 4,
                .kv_heads = 2,
                .query_length = 19,
                .key_length = 300,
                .head_size = 16,
                .value_head_size = 20,
                .causal = true,
                .alignment = Alignment::kBottomRight};
  for (DType dtype : kFloatTypes) {
    whole.dtype = dtype;
    Rng rng(kSeed);
    const Inputs inputs = RandomInputs(whole, rng);
    for (const Target& target : Targets()) {
      if (target.backend == "cudnn") continue;
      for (int64_t page_rows : {1, 3, 16, 64}) {
        SCOPED_TRACE(target.Name() + " " + ToText(whole) + " page_rows " +
                     std::to_string(page_rows));
        const Pages key(inputs.key.View(), Pages::RandomLayout(page_rows, rng));
        const Pages value(inputs.value.View(), Pages::RandomLayout(page_rows, rng));
        const absl::StatusOr<ChunkedPlan> plan =
            MakeChunkedPlan(whole, {Streaming::kKeys, 19, 70}, target.Options(2));
        ASSERT_TRUE(plan.ok()) << plan.status();
        ThreadPool pool(2);
        AlignedBuffer workspace(plan->workspace_bytes);
        const auto fold = [&](bool paged) {
          std::vector<std::byte> bytes(plan->state_bytes);
          AlignedBuffer memory(plan->state_bytes);
          std::memset(memory.data(), 0, plan->state_bytes);
          Arguments arguments;
          arguments.state = StateIn(whole, plan->full.state_dtype, memory.data());
          ClearState(arguments.state);
          for (int64_t n = 0; n < plan->chunks(); ++n) {
            const RowRange keys = plan->Chunk(n);
            const Tensor key_chunk = SliceAxis(inputs.key, 2, keys.begin, keys.count);
            const Tensor value_chunk = SliceAxis(inputs.value, 2, keys.begin, keys.count);
            PagedRows key_pages, value_pages;
            arguments.inputs[Role::kQ] = inputs.query.View();
            arguments.inputs[Role::kK] =
                paged ? key.View(keys.begin, keys.count, key_pages) : key_chunk.View();
            arguments.inputs[Role::kV] =
                paged ? value.View(keys.begin, keys.count, value_pages) : value_chunk.View();
            const absl::Status status =
                rapt::Run(plan->PlanOf(n), arguments, workspace.span(), pool);
            EXPECT_TRUE(status.ok()) << status;
          }
          std::memcpy(bytes.data(), memory.data(), bytes.size());
          return bytes;
        };
        EXPECT_EQ(fold(/*paged=*/true), fold(/*paged=*/false));
      }
    }
  }
}

// As in a cache: a page holds K and V of a few positions, and batch rows begin with the same pages.
TEST(SharedPagesTest, KeysAndValuesOfAllBatchRowsMayShareTheirPages) {
  const Problem problem{.batch = 3,
                        .query_heads = 4,
                        .kv_heads = 2,
                        .query_length = 2,
                        .key_length = 100,
                        .head_size = 8,
                        .value_head_size = 8};
  Rng rng(kSeed);
  const Inputs inputs = RandomInputs(problem, rng, {.key_value = Storage::kBroadcastBatch});
  // One row of K and V side by side, as one tensor of twice the head size.
  Tensor both(problem.dtype, {1, 2, 100, 16});
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t s = 0; s < 100; ++s) {
      for (int64_t e = 0; e < 8; ++e) {
        both.Set(0, h, s, e, inputs.key.At(0, h, s, e));
        both.Set(0, h, s, 8 + e, inputs.value.At(0, h, s, e));
      }
    }
  }
  const Pages pages(both.View(), {.page_rows = 16});
  PagedRows key_pages = *pages.View().pages;
  key_pages.batch_pages = 0;
  PagedRows value_pages = key_pages;
  value_pages.offset += 8 * SizeOf(problem.dtype);
  for (const Target& target : Targets()) {
    if (target.backend == "cudnn") continue;
    SCOPED_TRACE(target.Name());
    const absl::StatusOr<Outputs> whole = RunAttention(problem, inputs, target.Options());
    const absl::StatusOr<Outputs> paged =
        RunAttention(problem, inputs, target.Options(), Storage::kRowMajor, std::nullopt,
                     [&](Arguments& arguments) {
                       TensorView view = pages.View();
                       view.dims = {3, 2, 100, 8};
                       view.pages = &key_pages;
                       arguments.inputs[Role::kK] = view;
                       view.pages = &value_pages;
                       arguments.inputs[Role::kV] = view;
                     });
    ASSERT_TRUE(whole.ok() && paged.ok()) << whole.status() << paged.status();
    EXPECT_TRUE(SameBits(*paged, *whole));
  }
}

// ---- Unusual views

const Problem kUnusual{.batch = 2,
                       .query_heads = 4,
                       .kv_heads = 2,
                       .key_length = 200,
                       .head_size = 16,
                       .value_head_size = 24};

// Computes kUnusual with few and with many queries, in every type and on every target: the result
// of `inputs` with the views that `change` replaces must equal that of `expected`.
void ExpectSameBits(
    const std::function<void(const Problem&, Inputs& inputs, Inputs& expected)>& fill,
    const std::function<void(const Inputs&, Arguments&)>& change, Problem problem = kUnusual) {
  for (DType dtype : kFloatTypes) {
    for (int64_t query_length : {2, 12}) {
      problem.dtype = dtype;
      problem.query_length = query_length;
      problem.wants_lse = true;
      Rng rng(kSeed);
      Inputs inputs = RandomInputs(problem, rng);
      Inputs expected = inputs;
      fill(problem, inputs, expected);
      for (const Target& target : Targets()) {
        if (target.backend == "cudnn") continue;
        SCOPED_TRACE(target.Name() + " " + ToText(problem));
        const absl::StatusOr<Outputs> whole = RunAttention(problem, expected, target.Options(2));
        const absl::StatusOr<Outputs> changed =
            RunAttention(problem, inputs, target.Options(2), Storage::kRowMajor, std::nullopt,
                         [&](Arguments& arguments) { change(inputs, arguments); });
        ASSERT_TRUE(whole.ok() && changed.ok()) << whole.status() << changed.status();
        EXPECT_TRUE(SameBits(*changed, *whole));
      }
    }
  }
}

// Sets element e of row (b, h, s) to set(b, h, s, e).
void SetEach(Tensor& tensor, const std::function<double(int64_t, int64_t, int64_t, int64_t)>& set) {
  const auto [batch, heads, rows, size] = tensor.dims();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t s = 0; s < rows; ++s) {
        for (int64_t e = 0; e < size; ++e) tensor.Set(b, h, s, e, set(b, h, s, e));
      }
    }
  }
}

TEST(UnusualPagesTest, RowsBeyondTheKeyLengthsHaveNoEffect) {
  Problem problem = kUnusual;
  problem.has_key_lengths = true;
  std::unique_ptr<Pages> key, value;
  ExpectSameBits(
      [&](const Problem&, Inputs& inputs, Inputs& expected) {
        inputs.key_lengths = expected.key_lengths = {70, 133};
        for (Tensor* tensor : {&inputs.key, &inputs.value}) {
          const Tensor before = *tensor;
          SetEach(*tensor, [&](int64_t b, int64_t h, int64_t s, int64_t e) {
            return s < inputs.key_lengths[b] ? before.At(b, h, s, e) : std::nan("");
          });
        }
        key = std::make_unique<Pages>(inputs.key.View(), Pages::Layout{.page_rows = 16});
        value = std::make_unique<Pages>(inputs.value.View(), Pages::Layout{.page_rows = 16});
      },
      [&](const Inputs&, Arguments& arguments) {
        arguments.inputs[Role::kK] = key->View();
        arguments.inputs[Role::kV] = value->View();
      },
      problem);
}

// All rows of a page, or all heads, are the same memory.
TEST(UnusualPagesTest, AStrideInAPageMayBe0) {
  constexpr int64_t kPageRows = 16;
  for (int axis : {1, 2}) {
    PagedRows key_pages, value_pages;
    std::unique_ptr<Pages> key, value;
    const auto share = [&](const Tensor& tensor, PagedRows& storage, const Pages& pages) {
      TensorView view = tensor.View();
      storage = *pages.View().pages;
      if (axis == 2) storage.page_rows = kPageRows;
      view.data = nullptr;
      view.strides = pages.View().strides;
      view.strides[axis] = 0;
      view.pages = &storage;
      return view;
    };
    ExpectSameBits(
        [&](const Problem&, Inputs& inputs, Inputs& expected) {
          const auto first = [&](Tensor& tensor, const Tensor& from) {
            SetEach(tensor, [&](int64_t b, int64_t h, int64_t s, int64_t e) {
              return axis == 1 ? from.At(b, 0, s, e) : from.At(b, h, s / kPageRows, e);
            });
          };
          first(expected.key, inputs.key);
          first(expected.value, inputs.value);
          // Along axis 2, every row is a page of memory; a page of kPageRows rows repeats it.
          const Pages::Layout layout{.page_rows = axis == 1 ? kPageRows : 1};
          key = std::make_unique<Pages>(inputs.key.View(), layout);
          value = std::make_unique<Pages>(inputs.value.View(), layout);
        },
        [&](const Inputs& inputs, Arguments& arguments) {
          arguments.inputs[Role::kK] = share(inputs.key, key_pages, *key);
          arguments.inputs[Role::kV] = share(inputs.value, value_pages, *value);
        });
  }
}

TEST(UnusualStridesTest, KeysAndValuesMayBeReversed) {
  ExpectSameBits(
      [&](const Problem& p, Inputs& inputs, Inputs& expected) {
        for (const auto& [tensor, from] :
             {std::pair{&inputs.key, &expected.key}, std::pair{&inputs.value, &expected.value}}) {
          SetEach(*tensor, [&, from = from](int64_t b, int64_t h, int64_t s, int64_t e) {
            return from->At(b, h, p.key_length - 1 - s, e);
          });
        }
      },
      [&](const Inputs&, Arguments& arguments) {
        for (Role role : {Role::kK, Role::kV}) {
          TensorView& view = arguments.inputs[role];
          view.data = view.Row(0, 0, view.dims[2] - 1);
          view.strides[2] = -view.strides[2];
        }
      });
}

const PagedRows kGarbage = {
    .pages = {}, .batch_pages = -5, .page_rows = 0, .first_row = -7, .offset = -1};

TEST(UnusualPagesTest, WithoutRowsTheirFieldsAreNotRead) {
  for (Role role : {Role::kK, Role::kPastKey}) {
    Problem problem = kUnusual;
    problem.wants_present = true;
    if (role == Role::kK) std::swap(problem.key_length, problem.past_length);
    ExpectSameBits([](const Problem&, Inputs&, Inputs&) {},
                   [&](const Inputs&, Arguments& arguments) {
                     const Role value = role == Role::kK ? Role::kV : Role::kPastValue;
                     for (Role empty : {role, value}) {
                       arguments.inputs[empty].data = nullptr;
                       arguments.inputs[empty].pages = &kGarbage;
                     }
                   },
                   problem);
  }
}

// ---- Refusals

const Problem kSmall{.batch = 2,
                     .query_heads = 2,
                     .kv_heads = 2,
                     .query_length = 3,
                     .key_length = 10,
                     .past_length = 10,
                     .head_size = 4,
                     .value_head_size = 4,
                     .mask = MaskShape{DType::kFloat32, {1, 1, 3, 20}},
                     .bias = MaskShape{DType::kFloat32, {1, 1, 3, 20}},
                     .head_sink = DType::kFloat32};

// Validates kSmall with the pages of `role` changed; there are 2 x 3 pages of 4 rows.
absl::Status ValidateWith(
    Role role,
    const std::function<void(PagedRows&, TensorView&, std::vector<const std::byte*>&)>& change) {
  Rng rng(kSeed);
  const Inputs inputs = RandomInputs(kSmall, rng);
  absl::Status status;
  // RunAttention() provides complete views.
  const absl::StatusOr<Outputs> run =
      RunAttention(kSmall, inputs, {.backend = "cpu"}, Storage::kRowMajor, std::nullopt,
                   [&](Arguments& arguments) {
                     const Pages pages(inputs.key.View(), {.page_rows = 4});
                     PagedRows paged = *pages.View().pages;
                     std::vector<const std::byte*> places(paged.pages.begin(), paged.pages.end());
                     TensorView& view = arguments.inputs[role];
                     view = pages.View();
                     view.pages = &paged;
                     change(paged, view, places);
                     paged.pages = places;
                     status = Validate(kSmall, arguments);
                     arguments.inputs[role] = role == Role::kPastKey     ? inputs.past_key->View()
                                              : role == Role::kPastValue ? inputs.past_value->View()
                                              : role == Role::kK         ? inputs.key.View()
                                                                         : inputs.value.View();
                   });
  EXPECT_TRUE(run.ok()) << run.status();
  return status;
}

struct Refusal {
  const char* name;
  std::function<void(PagedRows&, TensorView&, std::vector<const std::byte*>&)> change;
  const char* message;
};

using Places = std::vector<const std::byte*>;

const Refusal kRefusals[] = {
    {"no_page_rows", [](PagedRows& p, TensorView&, Places&) { p.page_rows = 0; },
     " has pages with page_rows 0; it must be from 1 to 1099511627776"},
    {"negative_page_rows", [](PagedRows& p, TensorView&, Places&) { p.page_rows = -4; },
     " has pages with page_rows -4; it must be from 1 to 1099511627776"},
    {"huge_page_rows", [](PagedRows& p, TensorView&, Places&) { p.page_rows = kMaxInt; },
     " has pages with page_rows 9223372036854775807; it must be from 1 to 1099511627776"},
    {"negative_first_row", [](PagedRows& p, TensorView&, Places&) { p.first_row = -1; },
     " has pages with first_row -1; it must be from 0 to 3"},
    {"first_row_beyond_the_page", [](PagedRows& p, TensorView&, Places&) { p.first_row = 4; },
     " has pages with first_row 4; it must be from 0 to 3"},
    {"negative_batch_pages", [](PagedRows& p, TensorView&, Places&) { p.batch_pages = -1; },
     " has pages with batch_pages -1; it must be from 0 to 6"},
    {"huge_batch_pages", [](PagedRows& p, TensorView&, Places&) { p.batch_pages = kMaxInt; },
     " has pages with batch_pages 9223372036854775807; it must be from 0 to 6"},
    {"negative_offset", [](PagedRows& p, TensorView&, Places&) { p.offset = -8; },
     " has pages with offset -8; it must be from 0 to 9223372036854775807"},
    {"no_pages",
     [](PagedRows& p, TensorView&, Places& places) {
       places.clear();
       p.batch_pages = 0;
     },
     " has 0 pages; each of its 2 batch rows needs 3, with a distance of 0 to those of the next"},
    {"a_page_too_few", [](PagedRows&, TensorView&, Places& places) { places.pop_back(); },
     " has 5 pages; each of its 2 batch rows needs 3, with a distance of 3 to those of the next"},
    {"a_row_too_many", [](PagedRows& p, TensorView&, Places&) { p.first_row = 3; },
     " has 6 pages; each of its 2 batch rows needs 4, with a distance of 3 to those of the next"},
    {"null_page", [](PagedRows&, TensorView&, Places& places) { places[4] = nullptr; },
     " has a null page, number 4"},
    {"negative_head_stride", [](PagedRows&, TensorView& v, Places&) { v.strides[1] = -1; },
     " has strides -1 and 4 in a page; they must not be negative"},
    {"negative_row_stride", [](PagedRows&, TensorView& v, Places&) { v.strides[2] = -4; },
     " has strides 16 and -4 in a page; they must not be negative"},
    {"head_stride_overflows",
     [](PagedRows&, TensorView& v, Places&) { v.strides[1] = kMaxInt / 4; },
     "the bytes of a page must not overflow 64 bits"},
    {"row_stride_overflows", [](PagedRows&, TensorView& v, Places&) { v.strides[2] = kMaxInt / 2; },
     "the bytes of a page must not overflow 64 bits"},
    {"offset_overflows", [](PagedRows& p, TensorView&, Places&) { p.offset = kMaxInt - 8; },
     "the bytes of a page must not overflow 64 bits"},
};

class PagesContractTest : public ::testing::TestWithParam<Refusal> {};

TEST_P(PagesContractTest, NamesFieldAndAllowedValues) {
  for (Role role : {Role::kK, Role::kV, Role::kPastKey, Role::kPastValue}) {
    EXPECT_TRUE(ValidateWith(role, [](PagedRows&, TensorView&, Places&) {}).ok());
    const absl::Status status = ValidateWith(role, GetParam().change);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(status.message().substr(0, InfoOf(role).onnx.size() + 1),
              std::string(InfoOf(role).onnx) + " ");
    EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().message));
  }
}

INSTANTIATE_TEST_SUITE_P(, PagesContractTest, ::testing::ValuesIn(kRefusals),
                         [](const auto& info) { return info.param.name; });

TEST(PagesRefusalTest, OnlyKeysAndValuesMayBeInPages) {
  Problem problem = kSmall;
  problem.wants_lse = problem.wants_present = true;
  problem.score_output = ScoreOutput::kScores;
  Rng rng(kSeed);
  const Inputs inputs = RandomInputs(problem, rng);
  const std::byte* page = inputs.query.View().data;
  PagedRows paged;
  paged.pages = {&page, 1};
  paged.page_rows = 64;
  const SlicedBytes sliced;
  const auto refuse = [&](auto& view, Source source, const Arguments& arguments) {
    const auto before = view;
    view.data = nullptr;
    if (source == Source::kPaged) view.pages = &paged;
    if (source == Source::kSliced) view.slices = &sliced;
    const absl::Status status = Validate(problem, arguments);
    view = before;
    return std::string(status.message());
  };
  const absl::StatusOr<Outputs> outputs = RunAttention(
      problem, inputs, {.backend = "cpu"}, Storage::kRowMajor, std::nullopt, [&](Arguments& a) {
        EXPECT_EQ(refuse(a.inputs[Role::kQ], Source::kPaged, a),
                  "Q is paged; it must be strided or sliced");
        for (Role role : {Role::kMask, Role::kBias, Role::kHeadSink}) {
          const std::string name(InfoOf(role).onnx);
          EXPECT_EQ(refuse(a.inputs[role], Source::kPaged, a),
                    name + " is paged; it must be strided");
          EXPECT_EQ(refuse(a.inputs[role], Source::kSliced, a),
                    name + " is sliced; it must be strided");
        }
        for (Role role : kOutputs) {
          const std::string name(InfoOf(role).onnx);
          EXPECT_EQ(refuse(a.outputs[role], Source::kPaged, a),
                    name + " is paged; it must be strided");
          EXPECT_EQ(refuse(a.outputs[role], Source::kSliced, a),
                    name + " is sliced; it must be strided");
        }
      });
  EXPECT_TRUE(outputs.ok()) << outputs.status();
}

TEST(PagesRefusalTest, ABackendThatDoesNotReadPagesSaysSo) {
  const Problem problem{.dtype = DType::kFloat16,
                        .batch = 1,
                        .query_heads = 2,
                        .kv_heads = 2,
                        .query_length = 8,
                        .key_length = 16,
                        .head_size = 8,
                        .value_head_size = 8};
  Rng rng(kSeed);
  const Inputs inputs = RandomInputs(problem, rng);
  const Pages pages(inputs.value.View(), {.page_rows = 4});
  for (const Target& target : Targets()) {
    const absl::Status status =
        RunAttention(problem, inputs, target.Options(), Storage::kRowMajor, std::nullopt,
                     [&](Arguments& a) { a.inputs[Role::kV] = pages.View(); })
            .status();
    if (target.backend != "cudnn") {
      EXPECT_TRUE(status.ok()) << target.Name() << status;
    } else {
      EXPECT_EQ(status, absl::InvalidArgumentError(
                            "V is paged; backend 'cudnn' does not read paged tensors"));
    }
  }
}

TEST(PagesRefusalTest, ABackendThatDoesNotReadPagesIgnoresThoseWithoutRows) {
  const StridedOnlyBackend backend;
  const BackendSet backends({&backend});
  const PlanOptions options{.backend = "strided_only", .backends = &backends};
  Problem problem = kUnusual;
  problem.query_length = 2;
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  const auto run = [&](Role role) {
    return RunAttention(problem, inputs, options, Storage::kRowMajor, std::nullopt,
                        [&](Arguments& a) { a.inputs[role].pages = &kGarbage; })
        .status();
  };
  EXPECT_TRUE(run(Role::kPastKey).ok()) << run(Role::kPastKey);
  problem.key_length = 0;
  inputs = RandomInputs(problem, rng);
  EXPECT_TRUE(run(Role::kK).ok()) << run(Role::kK);
}

TEST(PagesRefusalTest, AutoDoesNotChooseABackendThatDoesNotReadThem) {
  const StridedOnlyBackend backend;
  const BackendSet backends({&backend});
  PlanOptions options{.backends = &backends};
  Problem problem = kUnusual;
  problem.query_length = 2;
  EXPECT_EQ(MakePlan(problem, options)->routing.backend, &backend);
  options.source = Source::kPaged;
  const absl::StatusOr<Plan> plan = MakePlan(problem, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->routing.backend->name(), "cpu");
  EXPECT_EQ(plan->routing.declined, &backend);
  options.backend = "strided_only";
  EXPECT_EQ(MakePlan(problem, options).status(),
            absl::UnimplementedError("backend 'strided_only' can't compute this: it does not read "
                                     "paged tensors"));
}

TEST(PagesDiagnosisTest, ADiagnosisReadsThem) {
  Problem problem = kSmall;
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.key.Set(1, 1, 7, 2, std::nan(""));
  const Pages pages(inputs.key.View(), {.page_rows = 4, .first_row = 1});
  const Slices slices(inputs.value.View(), 3);
  const absl::StatusOr<Outputs> outputs = RunAttention(
      problem, inputs, {.backend = "cpu"}, Storage::kRowMajor, std::nullopt, [&](Arguments& a) {
        ThreadPool pool(2);
        const auto text = [&] {
          const absl::StatusOr<DiagnosisReport> report = Diagnose(problem, a, {}, pool);
          EXPECT_TRUE(report.ok()) << report.status();
          std::string all;
          for (const std::string& warning : report->warnings) all += warning + "\n";
          return all;
        };
        const std::string whole = text();
        EXPECT_THAT(whole, HasSubstr("K has 1 NaN"));
        a.inputs[Role::kK] = pages.View();
        a.inputs[Role::kV] = slices.View();
        EXPECT_EQ(text(), whole);
      });
  EXPECT_TRUE(outputs.ok()) << outputs.status();
}

}  // namespace
}  // namespace rapt::test
