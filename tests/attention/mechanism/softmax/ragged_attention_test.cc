#include "attention/mechanism/softmax/ragged_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/q8_0.h"
#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "tests/support/run_attention.h"
#include "tests/support/run_operator.h"
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kPageTokens = 64;

// Returns the rows of a tensor as those of q8_0.h, bytes of INT8.
Tensor InEightBits(const Tensor& tensor) {
  const TensorView from = tensor.View();
  auto dims = from.dims;
  dims[3] = q8_0::RowBytes(from.dims[3]);
  Tensor stored(DType::kInt8, dims);
  std::vector<std::byte> numbers(static_cast<size_t>(from.dims[3] * SizeOf(from.dtype)));
  for (int64_t h = 0; h < dims[1]; ++h) {
    for (int64_t s = 0; s < dims[2]; ++s) {
      from.CopyRow(0, h, s, numbers.data());
      q8_0::StoreRow(numbers.data(), from.dtype, from.dims[3], stored.MutableView().Row(0, h, s));
    }
  }
  return stored;
}

// Returns the numbers that such rows stand for.
Tensor Numbers(const Tensor& stored, int64_t size) {
  auto dims = stored.dims();
  dims[3] = size;
  Tensor numbers(DType::kFloat32, dims);
  for (int64_t h = 0; h < dims[1]; ++h) {
    for (int64_t s = 0; s < dims[2]; ++s) {
      for (int64_t n = 0; n < size; ++n) {
        numbers.Set(0, h, s, n, q8_0::LoadNumber(stored.View().Row(0, h, s), n));
      }
    }
  }
  return numbers;
}

// The keys and values of a sequence, also in pages whose order in memory is random. Tokens that no
// row sees are NaN.
class Sequence {
 public:
  Sequence(const RaggedCall& call, const RaggedItem& item, Rng& rng)
      : is_q8_0_(call.q8_0),
        keys_(call.dtype, {1, call.kv_heads, item.keys, call.head_size}),
        values_(call.dtype, {1, call.kv_heads, item.keys, call.value_head_size}) {
    keys_.FillUniform(rng, -2, 2);
    values_.FillUniform(rng, -2, 2);
    const VisibleTokens visible = VisibleTokensOf(item);
    for (int64_t t = 0; t < item.keys; ++t) {
      const auto in = [&](const TokenRange& range) { return t >= range.begin && t < range.end; };
      if (in(visible.first) || in(visible.recent)) continue;
      for (Tensor* tensor : {&keys_, &values_}) {
        for (int64_t h = 0; h < call.kv_heads; ++h) {
          for (int64_t e = 0; e < tensor->dims()[3]; ++e) tensor->Set(0, h, t, e, kNan);
        }
      }
    }
    PageAgain();
  }
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  // After a change. In 8 bits, keys and values are then what is stored.
  void PageAgain() {
    stored_keys_ = Stored(keys_);
    stored_values_ = Stored(values_);
    Page(stored_keys_, key_memory_, key_pages_, paged_keys_);
    Page(stored_values_, value_memory_, value_pages_, paged_values_);
  }

  Tensor& mutable_keys() { return keys_; }
  Tensor& mutable_values() { return values_; }
  const Tensor& keys() const { return keys_; }
  const Tensor& values() const { return values_; }
  TensorView keys(bool paged) const { return View(stored_keys_, paged ? &paged_keys_ : nullptr); }
  TensorView values(bool paged) const {
    return View(stored_values_, paged ? &paged_values_ : nullptr);
  }

 private:
  Tensor Stored(Tensor& tensor) const {
    if (!is_q8_0_) return tensor;
    Tensor stored = InEightBits(tensor);
    tensor = Numbers(stored, tensor.dims()[3]);
    return stored;
  }

  static TensorView View(const Tensor& tensor, const PagedRows* pages) {
    TensorView view = tensor.View();
    if (pages == nullptr) return view;
    view.data = nullptr;
    view.pages = pages;
    view.strides = {0, kPageTokens * view.dims[3], view.dims[3], 1};
    return view;
  }

  static void Page(const Tensor& tensor, std::vector<std::byte>& memory,
                   std::vector<const std::byte*>& pages, PagedRows& rows) {
    const TensorView view = tensor.View();
    const int64_t row_bytes = view.dims[3] * SizeOf(view.dtype);
    const int64_t page_bytes = view.dims[1] * kPageTokens * row_bytes;
    const int64_t count = (view.dims[2] + kPageTokens - 1) / kPageTokens;
    memory.assign(static_cast<size_t>(count * page_bytes), std::byte{0xFF});
    pages.clear();
    for (int64_t n = 0; n < count; ++n) {
      pages.push_back(memory.data() + (count - 1 - n) * page_bytes);
    }
    for (int64_t h = 0; h < view.dims[1]; ++h) {
      for (int64_t s = 0; s < view.dims[2]; ++s) {
        const int64_t row = h * kPageTokens + s % kPageTokens;
        std::byte* page = memory.data() + (count - 1 - s / kPageTokens) * page_bytes;
        view.CopyRow(0, h, s, page + row * row_bytes);
      }
    }
    rows.pages = pages;
    rows.page_rows = kPageTokens;
  }

  const bool is_q8_0_;
  Tensor keys_, values_;
  Tensor stored_keys_, stored_values_;
  std::vector<std::byte> key_memory_, value_memory_;
  std::vector<const std::byte*> key_pages_, value_pages_;
  PagedRows paged_keys_, paged_values_;
};

// A call with random tensors.
struct Batch final : public RaggedSource {
  Batch(RaggedCall wanted, uint64_t seed, bool is_paged = true)
      : call(std::move(wanted)), paged(is_paged) {
    Rng rng(seed);
    int64_t rows = 0;
    for (const RaggedItem& item : call.items) {
      sequences.push_back(std::make_unique<Sequence>(call, item, rng));
      rows += item.rows;
    }
    queries = Tensor(call.dtype, {1, rows, call.query_heads, call.head_size}, Storage::kMisaligned)
                  .FillUniform(rng, -2, 2);
    if (call.head_sink) {
      sink = Tensor(*call.head_sink, {call.query_heads, 1, 1, 1}).FillUniform(rng, -4, 4);
    }
  }

  TensorView keys(int64_t item) const override { return sequences[item]->keys(paged); }
  TensorView values(int64_t item) const override { return sequences[item]->values(paged); }
  bool has_failed(int64_t item) const override { return item == failed; }

  RaggedCall call;
  bool paged;
  int64_t failed = -1;
  std::vector<std::unique_ptr<Sequence>> sequences;
  Tensor queries;
  std::optional<Tensor> sink;
};

struct Results {
  Tensor y, lse;
};

Results RunBatch(const Batch& batch, const PlanOptions& options, bool in_threads = false) {
  const auto op = MakeRaggedAttention(batch.call, batch).value();
  const TensorSpec& y = *op->outputs()[Role::kY];
  Results results{Tensor(y.dtype, {1, y.shape[0], y.shape[1], y.shape[2]}), Tensor()};
  Arguments arguments;
  arguments.inputs[Role::kQ] = batch.queries.View();
  if (batch.sink) arguments.inputs[Role::kHeadSink] = batch.sink->View();
  arguments.outputs[Role::kY] = results.y.MutableView();
  if (batch.call.wants_lse) {
    const TensorSpec& lse = *op->outputs()[Role::kLse];
    results.lse = Tensor(lse.dtype, {1, lse.shape[0], lse.shape[1], 1});
    arguments.outputs[Role::kLse] = results.lse.MutableView();
  }
  if (!in_threads) {
    RunOperator(*op, arguments, options);
    return results;
  }
  const Plan plan = MakePlan(*op, options).value();
  AlignedBuffer workspace(plan.workspace_bytes());
  ThreadPool pool(options.threads);
  EXPECT_TRUE(Run(*op, plan, arguments, workspace.span(), pool).ok());
  return results;
}

// The definition, in float64.
struct Want {
  std::vector<double> y, lse;
};

Want Define(const Batch& batch) {
  const RaggedCall& call = batch.call;
  const double scale = call.scale.value_or(1 / std::sqrt(static_cast<double>(call.head_size)));
  Want want;
  int64_t q_row = 0;
  for (size_t n = 0; n < call.items.size(); ++n) {
    const RaggedItem& item = call.items[n];
    const Sequence& sequence = *batch.sequences[n];
    for (int64_t r = 0; r < item.rows; ++r, ++q_row) {
      const int64_t p = item.position + r;
      for (int64_t h = 0; h < call.query_heads; ++h) {
        const int64_t kv = h / (call.query_heads / call.kv_heads);
        std::vector<std::pair<int64_t, double>> scores;
        double max = -kInfinity;
        for (int64_t t = 0; t < item.keys; ++t) {
          if (t > p) continue;
          if (t >= item.first_keys && item.left_window >= 0 && p - t > item.left_window) continue;
          double score = 0;
          for (int64_t e = 0; e < call.head_size; ++e) {
            score += batch.queries.At(0, q_row, h, e) * sequence.keys().At(0, kv, t, e);
          }
          score *= scale;
          if (call.softcap > 0) score = call.softcap * std::tanh(score / call.softcap);
          scores.emplace_back(t, score);
          max = std::max(max, score);
        }
        const double sink = batch.sink && batch.failed != static_cast<int64_t>(n)
                                ? batch.sink->At(h, 0, 0, 0)
                                : -kInfinity;
        if (batch.failed == static_cast<int64_t>(n)) scores.clear();
        max = std::max(scores.empty() ? -kInfinity : max, sink);
        double sum = std::exp(sink - max);
        std::vector<double> y(call.value_head_size, 0);
        for (const auto& [t, score] : scores) {
          const double weight = std::exp(score - max);
          sum += weight;
          for (size_t e = 0; e < y.size(); ++e) {
            y[e] += weight * sequence.values().At(0, kv, t, static_cast<int64_t>(e));
          }
        }
        for (double value : y) want.y.push_back(scores.empty() ? 0 : value / sum);
        want.lse.push_back(max == -kInfinity ? -kInfinity : max + std::log(sum));
      }
    }
  }
  return want;
}

void ExpectMatches(const Batch& batch, const PlanOptions& options) {
  const Results got = RunBatch(batch, options);
  const Want want = Define(batch);
  // The numbers are rounded to the type before they are multiplied, and sums have its type.
  const Tolerance tolerance{4 * ToleranceOf(batch.call.dtype), {}};
  EXPECT_TRUE(AllClose("y", got.y, want.y, tolerance));
  if (!batch.call.wants_lse) return;
  EXPECT_TRUE(AllClose("lse", got.lse, want.lse, tolerance));
}

RaggedCall CallOf(std::vector<RaggedItem> items, DType dtype = DType::kFloat32) {
  return {.items = std::move(items),
          .dtype = dtype,
          .query_heads = 4,
          .kv_heads = 2,
          .head_size = 16,
          .value_head_size = 8,
          .wants_lse = true};
}

RaggedItem RandomItem(Rng& rng) {
  RaggedItem item;
  constexpr int64_t kRows[] = {0, 1, 1, 1, 2, 5, 63, 64, 65, 130};
  item.rows = kRows[UniformInt(rng, 0, 9)];
  const bool is_long = item.rows <= 5 && UniformInt(rng, 0, 3) == 0;
  item.keys = UniformInt(rng, 0, is_long ? 5000 : 300);
  item.position = item.keys - item.rows;
  if (UniformInt(rng, 0, 3) == 0) item.position = UniformInt(rng, -10, item.keys + 10);
  if (UniformInt(rng, 0, 1) == 0) {
    item.left_window = UniformInt(rng, 0, 1) == 0 ? UniformInt(rng, 0, 100) : item.keys / 2;
    item.first_keys = UniformInt(rng, 0, 1) == 0 ? 0 : UniformInt(rng, 0, 200);
  }
  return item;
}

RaggedCall RandomCall(Rng& rng, DType dtype) {
  std::vector<RaggedItem> items(static_cast<size_t>(UniformInt(rng, 1, 6)));
  for (RaggedItem& item : items) item = RandomItem(rng);
  RaggedCall call = CallOf(std::move(items), dtype);
  call.kv_heads = UniformInt(rng, 1, 3);
  call.query_heads = call.kv_heads * (UniformInt(rng, 0, 2) == 0 ? 8 : UniformInt(rng, 1, 3));
  call.head_size = UniformInt(rng, 1, 40);
  call.value_head_size = UniformInt(rng, 1, 40);
  if (UniformInt(rng, 0, 2) == 0) call.scale = Uniform(rng, -1, 1);
  if (UniformInt(rng, 0, 2) == 0) call.softcap = Uniform(rng, 0.5, 5);
  if (UniformInt(rng, 0, 2) == 0) call.head_sink = UniformInt(rng, 0, 1) ? dtype : DType::kFloat32;
  if (dtype != DType::kFloat64 && UniformInt(rng, 0, 1)) call.output = DType::kFloat32;
  call.wants_lse = UniformInt(rng, 0, 3) != 0;
  return call;
}

// How keys and values are stored.
struct Storing {
  DType dtype;
  bool q8_0 = false;
};
constexpr Storing kStorings[] = {
    {DType::kFloat32},       {DType::kFloat16},       {DType::kBFloat16},      {DType::kFloat64},
    {DType::kFloat32, true}, {DType::kFloat16, true}, {DType::kBFloat16, true}};

TEST(RaggedAttention, RandomBatchesMatchTheDefinition) {
  uint64_t seed = 1;
  for (const Target& target : Targets()) {
    for (const Storing& storing : kStorings) {
      const int64_t cases = target.backend == "reference" ? 3 : 10;
      for (int64_t n = 0; n < cases; ++n) {
        Rng rng(++seed);
        RaggedCall call = RandomCall(rng, storing.dtype);
        call.q8_0 = storing.q8_0;
        const Batch batch(std::move(call), seed, /*is_paged=*/n % 4 != 0);
        SCOPED_TRACE(absl::StrCat(target.Name(), " ", NameOf(storing.dtype),
                                  storing.q8_0 ? " in 8 bits" : "", " seed ", seed));
        ExpectMatches(batch, target.Options());
      }
    }
  }
}

void FillNormal(Tensor& tensor, Rng& rng) {
  const auto& dims = tensor.dims();
  for (int64_t h = 0; h < dims[1]; ++h) {
    for (int64_t s = 0; s < dims[2]; ++s) {
      for (int64_t e = 0; e < dims[3]; ++e) {
        double sum = 0;  // of twelve, each of variance 1 / 12
        for (int n = 0; n < 12; ++n) sum += Uniform(rng, -0.5, 0.5);
        tensor.Set(0, h, s, e, sum);
      }
    }
  }
}

// The scale of the block of 8-bit numbers that has element e of a row.
double ScaleOf(const Tensor& tensor, int64_t h, int64_t t, int64_t e) {
  double largest = 0;
  const int64_t begin = e / q8_0::kBlock * q8_0::kBlock;
  for (int64_t n = begin; n < std::min(begin + q8_0::kBlock, tensor.dims()[3]); ++n) {
    largest = std::max(largest, std::abs(tensor.At(0, h, t, n)));
  }
  return largest / 127;
}

// The variance of Y of a row that sees all keys, to first order, if the errors of the stored
// numbers are independent and uniform within half a scale, of variance scale^2 / 12: with weights w
// and scores s, dY = sum w (v - y) ds + w dv, and ds = scale q dk.
std::vector<double> VariancesOf(const Batch& batch, int64_t row, int64_t h) {
  const Sequence& sequence = *batch.sequences[0];
  const RaggedCall& call = batch.call;
  const int64_t kv = h / (call.query_heads / call.kv_heads);
  const double scale = 1 / std::sqrt(static_cast<double>(call.head_size));
  std::vector<double> weights, score_variances;
  double sum = 0;
  for (int64_t t = 0; t < call.items[0].keys; ++t) {
    double score = 0, variance = 0;
    for (int64_t e = 0; e < call.head_size; ++e) {
      const double q = scale * batch.queries.At(0, row, h, e);
      score += q * sequence.keys().At(0, kv, t, e);
      variance += std::pow(q * ScaleOf(sequence.keys(), kv, t, e), 2) / 12;
    }
    weights.push_back(std::exp(score));
    score_variances.push_back(variance);
    sum += weights.back();
  }
  std::vector<double> variances;
  for (int64_t e = 0; e < call.value_head_size; ++e) {
    const auto value = [&](size_t t) {
      return sequence.values().At(0, kv, static_cast<int64_t>(t), e);
    };
    double y = 0, variance = 0;
    for (size_t t = 0; t < weights.size(); ++t) y += weights[t] / sum * value(t);
    for (size_t t = 0; t < weights.size(); ++t) {
      const double of_value =
          std::pow(ScaleOf(sequence.values(), kv, static_cast<int64_t>(t), e), 2) / 12;
      variance += std::pow(weights[t] / sum, 2) *
                  (std::pow(value(t) - y, 2) * score_variances[t] + of_value);
    }
    variances.push_back(variance);
  }
  return variances;
}

// Against the definition with the numbers as they were given.
TEST(RaggedAttention, TheErrorOfEightBitsIsAsDerived) {
  constexpr int64_t kKeys = 512, kSize = 64;
  for (const double outlier : {1.0, 20.0}) {  // two channels of K are so much larger
    RaggedCall call = CallOf({{.rows = 1, .keys = kKeys, .position = kKeys - 1}});
    call.head_size = call.value_head_size = kSize;
    Batch given(call, 3);
    Rng rng(4);
    Tensor& keys = given.sequences[0]->mutable_keys();
    for (Tensor* tensor : {&keys, &given.sequences[0]->mutable_values(), &given.queries}) {
      FillNormal(*tensor, rng);
    }
    for (int64_t n = 0; n < call.kv_heads * kKeys; ++n) {
      for (int64_t e : {5, 40}) {
        const int64_t h = n / kKeys, t = n % kKeys;
        keys.Set(0, h, t, e, outlier * keys.At(0, h, t, e));
      }
    }
    given.sequences[0]->PageAgain();
    call.q8_0 = true;
    Batch stored(call, 3);
    stored.queries = given.queries;
    stored.sequences[0]->mutable_keys() = keys;
    stored.sequences[0]->mutable_values() = given.sequences[0]->values();
    stored.sequences[0]->PageAgain();

    std::vector<double> variances;
    for (int64_t h = 0; h < call.query_heads; ++h) {
      const std::vector<double> some = VariancesOf(given, 0, h);
      variances.insert(variances.end(), some.begin(), some.end());
    }
    const Want want = Define(given);
    for (const Target& target : Targets()) {
      const std::vector<double> y = RunBatch(stored, target.Options()).y.ToVector();
      double most = 0, squares = 0, variance = 0, size = 0;
      for (size_t n = 0; n < y.size(); ++n) {
        const double error = std::abs(y[n] - want.y[n]);
        EXPECT_LE(error, 6 * std::sqrt(variances[n]));
        most = std::max(most, error);
        squares += error * error;
        variance += variances[n];
        size += want.y[n] * want.y[n];
      }
      const auto count = static_cast<double>(y.size());
      const double rms = std::sqrt(squares / count), derived = std::sqrt(variance / count);
      std::printf("%s, outliers of %g: rms of Y %.2g, error max %.2g, rms %.2g, derived %.2g\n",
                  target.Name().c_str(), outlier, std::sqrt(size / count), most, rms, derived);
      EXPECT_GE(rms, 0.7 * derived);
      EXPECT_LE(rms, 1.4 * derived);
    }
  }
}

std::vector<std::pair<Target, bool>> TargetsAndStorings() {
  std::vector<std::pair<Target, bool>> pairs;
  for (const Target& target : Targets()) {
    for (const bool q8_0 : {false, true}) pairs.emplace_back(target, q8_0);
  }
  return pairs;
}

TEST(RaggedAttention, AnItemsBitsDependOnNothingElse) {
  const std::vector<RaggedItem> items = {
      {.rows = 1, .keys = 5000, .position = 4999},
      {.rows = 3, .keys = 700, .position = 697},
      {.rows = 100, .keys = 2500, .position = 2400},
      {.rows = 1, .keys = 4500, .position = 4499, .first_keys = 4, .left_window = 2100},
      {.rows = 1, .keys = 10, .position = 9},
  };
  const auto call_of = [](std::vector<RaggedItem> some, bool q8_0) {
    RaggedCall call = CallOf(std::move(some), DType::kFloat16);
    call.q8_0 = q8_0;
    return call;
  };
  for (const auto& [target, q8_0] : TargetsAndStorings()) {
    const Batch all(call_of(items, q8_0), 5);
    const Results together = RunBatch(all, target.Options(1));
    for (int threads : {2, 5}) {
      const Results again = RunBatch(all, target.Options(threads), /*in_threads=*/true);
      EXPECT_TRUE(SameBits("y", together.y, again.y)) << target.Name() << " threads " << threads;
      EXPECT_TRUE(SameBits("lse", together.lse, again.lse)) << target.Name();
    }
    int64_t first_row = 0;
    for (size_t n = 0; n < items.size(); ++n) {
      Batch alone(call_of({items[n]}, q8_0), 6);
      alone.sequences[0] = nullptr;
      std::swap(alone.sequences[0], const_cast<Batch&>(all).sequences[n]);
      alone.queries = SliceAxis(all.queries, 1, first_row, items[n].rows);
      const Results got = RunBatch(alone, target.Options(3));
      std::swap(alone.sequences[0], const_cast<Batch&>(all).sequences[n]);
      EXPECT_TRUE(SameBits("y", got.y, SliceAxis(together.y, 1, first_row, items[n].rows)))
          << target.Name() << " item " << n;
      EXPECT_TRUE(SameBits("lse", got.lse, SliceAxis(together.lse, 1, first_row, items[n].rows)));
      first_row += items[n].rows;
    }
  }
}

TEST(RaggedAttention, AFailedItemGivesZerosAndLeavesOthersAlone) {
  RaggedCall call = CallOf({{.rows = 2, .keys = 100, .position = 98},
                            {.rows = 1, .keys = 3000, .position = 2999},
                            {.rows = 1, .keys = 50, .position = 49}});
  call.head_sink = DType::kFloat32;
  Batch batch(call, 9);
  batch.failed = 1;
  for (const Target& target : Targets()) ExpectMatches(batch, target.Options());
}

// Items 1, 2 and 4 have the same first tokens.
Batch WithPrefix(RaggedCall call, int64_t tokens) {
  Batch batch(std::move(call), 11);
  batch.call.prefixes = {{.tokens = tokens, .items = {1, 2, 4}}};
  for (int64_t n : {2, 4}) {
    for (Tensor* to :
         {&batch.sequences[n]->mutable_keys(), &batch.sequences[n]->mutable_values()}) {
      const Sequence& from = *batch.sequences[1];
      const Tensor& tensor = to == &batch.sequences[n]->keys() ? from.keys() : from.values();
      PasteAxis(*to, 2, 0, SliceAxis(tensor, 2, 0, tokens));
    }
    batch.sequences[n]->PageAgain();
  }
  return batch;
}

TEST(RaggedAttention, ItemsShareAPrefix) {
  for (const auto& [dtype, q8_0] :
       {Storing{DType::kFloat32}, Storing{DType::kFloat16}, Storing{DType::kFloat16, true}}) {
    RaggedCall call = CallOf({{.rows = 1, .keys = 70, .position = 69},
                              {.rows = 1, .keys = 2200, .position = 2199},
                              {.rows = 3, .keys = 2112, .position = 2111},
                              {.rows = 0, .keys = 5, .position = 5},
                              {.rows = 9, .keys = 2150, .position = 2141}},
                             dtype);
    call.head_sink = DType::kFloat32;
    call.q8_0 = q8_0;
    for (int64_t tokens : {64, 2112}) {  // row 0 of item 2 stands at the end of the latter
      Batch batch = WithPrefix(call, tokens);
      for (const Target& target : Targets()) {
        SCOPED_TRACE(absl::StrCat(target.Name(), " ", NameOf(dtype), " prefix of ", tokens));
        batch.failed = -1;
        ExpectMatches(batch, target.Options());
        batch.failed = 1;
        ExpectMatches(batch, target.Options());
      }
    }
  }
}

TEST(RaggedAttention, TellsWhichItemsSeeAWholePrefix) {
  EXPECT_TRUE(SeesAll({.rows = 1, .keys = 100, .position = 99}, 100));
  EXPECT_FALSE(SeesAll({.rows = 2, .keys = 100, .position = 98}, 100));
  EXPECT_TRUE(SeesAll({.rows = 2, .keys = 100, .position = 98}, 99));
  EXPECT_FALSE(SeesAll({.rows = 1, .keys = 99, .position = 200}, 100));
  EXPECT_TRUE(SeesAll({.rows = 2, .keys = 100, .position = 98, .left_window = 99}, 50));
  EXPECT_FALSE(SeesAll({.rows = 2, .keys = 100, .position = 98, .left_window = 98}, 50));
  EXPECT_FALSE(
      SeesAll({.rows = 1, .keys = 100, .position = 99, .first_keys = 4, .left_window = 200}, 50));
  EXPECT_FALSE(SeesAll({.rows = 0, .keys = 100, .position = 99}, 50));
}

TEST(RaggedAttention, RowsAndItemsMayBeAbsent) {
  for (const Target& target : Targets()) {
    ExpectMatches(Batch(CallOf({}), 1), target.Options());
    ExpectMatches(Batch(CallOf({{.rows = 0, .keys = 10, .position = 10}}), 1), target.Options());
    ExpectMatches(Batch(CallOf({{.rows = 3, .keys = 0, .position = -3}}), 1), target.Options());
  }
}

TEST(RaggedAttention, HeadsMayComeFirst) {
  constexpr int64_t kRows = 5, kHeads = 6, kSize = 8, kValueSize = 12;
  Batch batch({.items = {{.rows = kRows, .keys = 70, .position = 65}},
               .query_heads = kHeads,
               .kv_heads = 3,
               .head_size = kSize,
               .value_head_size = kValueSize,
               .wants_lse = true},
              /*seed=*/1);
  const Results rows_first = RunBatch(batch, {});
  Tensor queries(DType::kFloat32, {1, kHeads, kRows, kSize});
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t e = 0; e < kSize; ++e) queries.Set(0, h, r, e, batch.queries.At(0, r, h, e));
    }
  }
  batch.queries = queries;
  batch.call.heads_first = batch.call.lse_heads_first = true;
  const Results heads_first = RunBatch(batch, {});
  ASSERT_EQ(heads_first.y.dims()[1], kHeads);
  ASSERT_EQ(heads_first.lse.dims()[1], kHeads);
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t r = 0; r < kRows; ++r) {
      EXPECT_EQ(heads_first.lse.At(0, h, r, 0), rows_first.lse.At(0, r, h, 0));
      for (int64_t e = 0; e < kValueSize; ++e) {
        EXPECT_EQ(heads_first.y.At(0, h, r, e), rows_first.y.At(0, r, h, e));
      }
    }
  }
}

TEST(RaggedAttention, HostilePositionsSeeAllOrNothing) {
  constexpr int64_t kFar = int64_t{1} << 62;
  for (const Target& target : Targets()) {
    ExpectMatches(Batch(CallOf({{.rows = 2, .keys = 70, .position = kFar},
                                {.rows = 2, .keys = 70, .position = -kFar},
                                {.rows = 2,
                                 .keys = 70,
                                 .position = kFar,
                                 .first_keys = kFar,
                                 .left_window = kFar - 40},
                                {.rows = 2,
                                 .keys = 70,
                                 .position = kFar,
                                 .first_keys = 3,
                                 .left_window = std::numeric_limits<int64_t>::max()}}),
                        3),
                  target.Options());
  }
}

TEST(RaggedAttention, RefusesNumbersThatAreNotAllowed) {
  const Batch batch(CallOf({{.rows = 1, .keys = 1, .position = 0}}), 1);
  const auto refusal = [&](RaggedCall call) {
    return std::string(MakeRaggedAttention(std::move(call), batch).status().message());
  };
  RaggedCall call = batch.call;
  call.scale = kInfinity;
  EXPECT_THAT(refusal(call), HasSubstr("scale is inf; it must be finite"));
  call = batch.call;
  call.softcap = -1;
  EXPECT_THAT(refusal(call), HasSubstr("softcap is -1; it must be finite and at least 0"));
}

TEST(RaggedAttention, RefusesSizesThatOverflow) {
  const Batch batch(CallOf({{.rows = 1, .keys = 1, .position = 0}}), 1);
  RaggedCall call = batch.call;
  call.items = {{.rows = 1, .keys = int64_t{1} << 38, .position = int64_t{1} << 38}};
  call.query_heads = int64_t{1} << 30;
  const absl::Status status = MakeRaggedAttention(call, batch).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
}

TEST(RaggedAttention, ReadsOnlyVisibleTokens) {
  const VisibleTokens all = VisibleTokensOf({.rows = 2, .keys = 100, .position = 98});
  EXPECT_EQ(all.recent.begin, 0);
  EXPECT_EQ(all.recent.end, 100);
  const VisibleTokens window =
      VisibleTokensOf({.rows = 2, .keys = 100, .position = 50, .first_keys = 4, .left_window = 10});
  EXPECT_EQ(window.first.end, 4);
  EXPECT_EQ(window.recent.begin, 40);
  EXPECT_EQ(window.recent.end, 52);
}

}  // namespace
}  // namespace rapt::test
