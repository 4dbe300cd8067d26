#include "attention/mechanism/lsh/lsh_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/philox.h"
#include "base/thread_pool.h"
#include "tests/support/run_attention.h"
#include "tests/support/run_operator.h"
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A call and its tensors.
struct Case {
  DType dtype = DType::kFloat32;
  LshForm form = LshForm::kReformer;
  int64_t batch = 2, heads = 2, length = 48, head_size = 8, value_head_size = 6;
  int64_t num_hashes = 2, num_buckets = 0, chunk_length = 8;
  std::optional<int64_t> chunks_before, chunks_after;
  bool is_causal = false;
  std::optional<double> scale;
  std::vector<int64_t> lengths;  // empty: none
  int64_t rotation_heads = 0;    // 0: drawn
  DType rotation_type = DType::kFloat32;
  bool wants_buckets = true;

  bool simple() const { return form == LshForm::kSimple; }
  bool hashes() const { return length > chunk_length; }
  int64_t buckets() const {
    if (simple()) return head_size;
    if (num_buckets != 0) return num_buckets;
    return int64_t{1} << static_cast<int>(
               std::log2(2.0 * static_cast<double>(length) / static_cast<double>(chunk_length)));
  }
  int64_t columns() const { return simple() ? head_size : buckets() / 2; }
};

constexpr uint64_t kSeed = 77;

LshAttentionCall CallOf(const Case& c) {
  LshAttentionCall call;
  const Shape rows = {c.batch, c.heads, c.length, c.head_size};
  call.inputs[Role::kQ] = TensorSpec{c.dtype, rows};
  if (c.simple()) call.inputs[Role::kK] = TensorSpec{c.dtype, rows};
  call.inputs[Role::kV] = TensorSpec{c.dtype, {c.batch, c.heads, c.length, c.value_head_size}};
  if (c.rotation_heads != 0) {
    call.inputs[kLshRotations] =
        TensorSpec{c.rotation_type, {c.rotation_heads, c.head_size, c.num_hashes, c.columns()}};
  } else {
    call.seed = kSeed;
  }
  if (!c.lengths.empty()) call.inputs[Role::kKeyLengths] = TensorSpec{DType::kInt64, {c.batch}};
  call.wants_buckets = c.wants_buckets && c.hashes();
  call.form = c.form;
  call.num_hashes = c.num_hashes;
  call.num_buckets = c.num_buckets;
  call.chunk_length = c.chunk_length;
  call.chunks_before = c.chunks_before;
  call.chunks_after = c.chunks_after;
  call.is_causal = c.is_causal;
  call.scale = c.scale;
  return call;
}

struct Tensors {
  Tensor q, k, v, rotations;
};

Tensors RandomTensors(const Case& c, uint64_t seed) {
  Rng rng(seed);
  const auto random = [&](DType type, const Dims& dims) {
    return Tensor(type, dims, Storage::kMisaligned).FillUniform(rng, -2, 2);
  };
  const Dims rows = {c.batch, c.heads, c.length, c.head_size};
  Tensors t{random(c.dtype, rows), random(c.dtype, rows),
            random(c.dtype, {c.batch, c.heads, c.length, c.value_head_size}), Tensor()};
  if (!c.simple()) t.k = t.q;
  if (c.rotation_heads != 0) {
    t.rotations =
        random(c.rotation_type, {c.rotation_heads, c.head_size, c.num_hashes, c.columns()});
  }
  return t;
}

// The numbers of the definition, in the order [B, H, num_hashes, S] and [B, H, S, Dv].
struct Want {
  std::vector<double> buckets;
  std::vector<double> y;
};

// The definition for one head, in float64.
class HeadOracle {
 public:
  HeadOracle(const Case& c, const Tensors& t, int64_t b, int64_t h)
      : c_(c), t_(t), b_(b), h_(h), length_(c.lengths.empty() ? c.length : c.lengths[b]) {
    if (c.rotation_heads == 0 && c.hashes()) {
      drawn_.resize(c.head_size * c.num_hashes * c.columns());
      DrawNormals(kSeed, static_cast<uint32_t>(h), DrawPurpose::kRotations, 0,
                  absl::MakeSpan(drawn_));
    }
  }

  void AddTo(Want& want) {
    const int64_t rounds = c_.hashes() ? c_.num_hashes : 1;
    std::vector<int64_t> sorted;
    for (int64_t r = 0; r < rounds; ++r) {
      std::vector<int64_t> order(c_.length);
      std::iota(order.begin(), order.end(), 0);
      if (c_.hashes()) {
        std::vector<int64_t> buckets;
        for (int64_t p = 0; p < c_.length; ++p) buckets.push_back(BucketOf(p, r));
        std::stable_sort(order.begin(), order.end(),
                         [&](int64_t a, int64_t b) { return buckets[a] < buckets[b]; });
        want.buckets.insert(want.buckets.end(), buckets.begin(), buckets.end());
      }
      sorted.insert(sorted.end(), order.begin(), order.end());
    }
    const int64_t chunk = c_.hashes() ? c_.chunk_length : c_.length;
    const int64_t chunks = static_cast<int64_t>(sorted.size()) / chunk;
    const int64_t before = c_.hashes() ? c_.chunks_before.value_or(c_.simple() ? 0 : 1) : 0;
    const int64_t after = c_.hashes() ? c_.chunks_after.value_or(0) : 0;
    std::vector<std::vector<Part>> parts(c_.length);
    for (int64_t n = 0; n < static_cast<int64_t>(sorted.size()); ++n) {
      std::vector<int64_t> keys;
      for (int64_t o = -before; o <= after; ++o) {
        const int64_t seen = (n / chunk + o + chunks) % chunks;
        for (int64_t j = 0; j < chunk; ++j) keys.push_back(sorted[seen * chunk + j]);
      }
      parts[sorted[n]].push_back(Attend(sorted[n], keys));
    }
    for (int64_t p = 0; p < c_.length; ++p) AddRow(p, parts[p], want);
  }

 private:
  struct Part {
    std::vector<double> output;
    double lse;
  };

  double Rotation(int64_t d, int64_t r, int64_t n) const {
    if (!drawn_.empty()) return drawn_[(d * c_.num_hashes + r) * c_.columns() + n];
    return t_.rotations.At(c_.rotation_heads == 1 ? 0 : h_, d, r, n);
  }

  int64_t BucketOf(int64_t p, int64_t r) const {
    if (p >= length_) return c_.buckets();
    std::vector<double> products;
    for (int64_t n = 0; n < c_.columns(); ++n) {
      double sum = 0;
      for (int64_t d = 0; d < c_.head_size; ++d) sum += t_.k.At(b_, h_, p, d) * Rotation(d, r, n);
      products.push_back(sum);
    }
    for (int64_t n = 0; !c_.simple() && n < c_.columns(); ++n) products.push_back(-products[n]);
    return std::max_element(products.begin(), products.end()) - products.begin();
  }

  double Score(int64_t i, int64_t j) const {
    if (j >= length_ || (c_.is_causal && j > i)) return -kInfinity;
    if (!c_.simple() && i == j) return -1e5;
    double product = 0;
    double squares = 0;
    for (int64_t d = 0; d < c_.head_size; ++d) {
      const double k = t_.k.At(b_, h_, j, d);
      product += t_.q.At(b_, h_, i, d) * k;
      squares += k * k;
    }
    const auto size = static_cast<double>(c_.head_size);
    const double scale = c_.scale.value_or(1 / std::sqrt(size));
    return c_.simple() ? scale * product : scale * product / std::sqrt(squares / size + 1e-6);
  }

  Part Attend(int64_t i, const std::vector<int64_t>& keys) const {
    std::vector<double> scores;
    for (const int64_t j : keys) scores.push_back(Score(i, j));
    const double most = *std::max_element(scores.begin(), scores.end());
    Part part{std::vector<double>(c_.value_head_size), -kInfinity};
    if (most == -kInfinity) return part;
    double sum = 0;
    for (size_t n = 0; n < keys.size(); ++n) {
      const double weight = std::exp(scores[n] - most);
      sum += weight;
      for (int64_t d = 0; weight > 0 && d < c_.value_head_size; ++d) {
        part.output[d] += weight * t_.v.At(b_, h_, keys[n], d);
      }
    }
    for (double& value : part.output) value /= sum;
    part.lse = most + std::log(sum);
    return part;
  }

  void AddRow(int64_t p, const std::vector<Part>& parts, Want& want) const {
    double most = -kInfinity;
    for (const Part& part : parts) most = std::max(most, part.lse);
    std::vector<double> row(c_.value_head_size);
    double sum = 0;
    for (const Part& part : parts) {
      const double weight = c_.simple() ? 1 : std::exp(part.lse - most);
      sum += weight;
      for (int64_t d = 0; p < length_ && d < c_.value_head_size; ++d) {
        row[d] += weight * part.output[d];
      }
    }
    for (const double value : row) want.y.push_back(p < length_ ? value / sum : 0);
  }

  const Case& c_;
  const Tensors& t_;
  const int64_t b_, h_, length_;
  std::vector<double> drawn_;
};

Want WantOf(const Case& c, const Tensors& t) {
  Want want;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.heads; ++h) HeadOracle(c, t, b, h).AddTo(want);
  }
  return want;
}

struct Got {
  Tensor y, buckets;
};

Got OutputsOf(const Case& c) {
  return {Tensor(c.dtype, {c.batch, c.heads, c.length, c.value_head_size}, Storage::kMisaligned),
          Tensor(DType::kInt32, {c.batch, c.heads, c.num_hashes, c.length}, Storage::kMisaligned)};
}

Arguments ArgumentsOf(const Case& c, const Tensors& t, Got& got) {
  Arguments a;
  a.inputs[Role::kQ] = t.q.View();
  if (c.simple()) a.inputs[Role::kK] = t.k.View();
  a.inputs[Role::kV] = t.v.View();
  if (c.rotation_heads != 0) a.inputs[kLshRotations] = t.rotations.View();
  a.key_lengths = c.lengths;
  a.outputs[Role::kY] = got.y.MutableView();
  a.outputs[kLshBuckets] = got.buckets.MutableView();
  return a;
}

Got Attend(const Case& c, const Tensors& t, const PlanOptions& options) {
  const auto op = MakeLshAttention(CallOf(c)).value();
  Got got = OutputsOf(c);
  const Arguments arguments = ArgumentsOf(c, t, got);
  EXPECT_TRUE(op->CheckData(arguments).ok());
  RunOperator(*op, arguments, options);
  return got;
}

std::string NameOf(const Case& c) {
  return absl::StrCat(rapt::NameOf(c.dtype), c.simple() ? " simple" : " reformer", " S ", c.length,
                      " chunk ", c.chunk_length, " hashes ", c.num_hashes, " buckets ", c.buckets(),
                      c.is_causal ? " causal" : "", " rotations ", c.rotation_heads);
}

void ExpectDefinition(const Case& c, uint64_t seed = 1) {
  const Tensors tensors = RandomTensors(c, seed);
  const Want want = WantOf(c, tensors);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(absl::StrCat(NameOf(c), " on ", target.Name()));
    const Got got = Attend(c, tensors, target.Options());
    EXPECT_TRUE(IsClose(c.dtype, got.y, want.y));
    if (c.hashes() && c.wants_buckets) {
      EXPECT_EQ(got.buckets.ToVector(), want.buckets);
    }
  }
}

TEST(LshAttentionTest, IsTheDefinitionInEveryType) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
    for (const bool is_causal : {false, true}) {
      Case c{.dtype = dtype, .is_causal = is_causal, .lengths = {48, 29}, .rotation_heads = 2};
      ExpectDefinition(c);
      c.rotation_heads = 0;
      c.num_hashes = 3;
      c.lengths = {0, 1};
      ExpectDefinition(c);
    }
    Case simple{.dtype = dtype, .form = LshForm::kSimple, .rotation_heads = 1};
    simple.rotation_type = DType::kFloat64;
    ExpectDefinition(simple);
    simple.lengths = {1, 40};
    simple.rotation_heads = 0;
    ExpectDefinition(simple);
  }
}

TEST(LshAttentionTest, SeesChunksBeforeAndAfter) {
  for (const int64_t before : {0, 1, 2}) {
    for (const int64_t after : {0, 1, 3}) {
      Case c{.num_hashes = 1, .chunks_before = before, .chunks_after = after};
      c.is_causal = before == 2;
      ExpectDefinition(c);
      c.num_hashes = 3;
      c.lengths = {20, 47};
      ExpectDefinition(c);
    }
  }
  ExpectDefinition({.chunks_before = 11});  // every chunk of both rounds
}

TEST(LshAttentionTest, HasOneChunkIfItIsLongerThanTheTokens) {
  for (const LshForm form : {LshForm::kReformer, LshForm::kSimple}) {
    for (const int64_t chunk_length : {48, 64}) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        ExpectDefinition({.dtype = dtype, .form = form, .chunk_length = chunk_length});
      }
    }
  }
  Case c{.length = 500, .chunk_length = 500, .is_causal = true, .lengths = {500, 321}};
  ExpectDefinition(c);
  c.length = c.chunk_length = 1;
  c.lengths = {0, 1};
  ExpectDefinition(c);
}

// Groups of chunks, blocks of queries and blocks of products that are not full.
TEST(LshAttentionTest, ComputesLongCalls) {
  Case c{.batch = 1, .heads = 1, .length = 1000, .head_size = 20, .value_head_size = 33};
  c.chunk_length = 40;
  ExpectDefinition(c);
  c.chunk_length = 250;
  c.is_causal = true;
  ExpectDefinition(c);
  c.chunk_length = 1;
  c.num_hashes = 1;
  ExpectDefinition(c);
  c.chunk_length = 100;
  c.num_buckets = 30002;
  c.lengths = {777};
  ExpectDefinition(c);
}

TEST(LshAttentionTest, TakesAScale) {
  for (const double scale : {0.0, 1.0, -3.0, 1e32}) {
    ExpectDefinition({.scale = scale});
    ExpectDefinition({.form = LshForm::kSimple, .scale = scale});
  }
}

// Products that are equal in fp32 or nearly so, and all equal.
TEST(LshAttentionTest, ChoosesBucketsAsFloat64Does) {
  for (const LshForm form : {LshForm::kReformer, LshForm::kSimple}) {
    Case c{.form = form, .num_buckets = form == LshForm::kSimple ? 0 : 16, .rotation_heads = 2};
    c.rotation_type = DType::kFloat64;
    Tensors t = RandomTensors(c, 3);
    for (int64_t d = 0; d < c.head_size; ++d) {
      for (int64_t n = 1; n < c.columns(); ++n) {
        const double close =
            (1 + 2e-8 * static_cast<double>((7 * n + 3 * d) % 5)) * t.rotations.At(0, d, 0, 0);
        t.rotations.Set(0, d, 0, n, close);
        t.rotations.Set(1, d, 1, n, t.rotations.At(1, d, 1, 0));
      }
      t.q.Set(0, 0, 5, d, 0);
      t.q.Set(1, 0, 6, d, 1e-42);
      t.q.Set(1, 1, 7, d, 1e20 * t.q.At(1, 1, 8, d));
    }
    if (!c.simple()) t.k = t.q;
    const Want want = WantOf(c, t);
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name());
      EXPECT_EQ(Attend(c, t, target.Options()).buckets.ToVector(), want.buckets);
    }
  }
}

// Numbers whose squares underflow in fp64.
TEST(LshAttentionTest, HashesTinyNumbers) {
  Case c{.dtype = DType::kFloat64, .rotation_heads = 1, .rotation_type = DType::kFloat64};
  Tensors t = RandomTensors(c, 9);
  for (int64_t p = 0; p < c.length; ++p) {
    for (int64_t d = 0; d < c.head_size; ++d) t.q.Set(0, 0, p, d, 1e-170 * t.q.At(0, 0, p, d));
  }
  t.k = t.q;
  const Want want = WantOf(c, t);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    EXPECT_EQ(Attend(c, t, target.Options()).buckets.ToVector(), want.buckets);
  }
}

// NaN is the largest product, and the first of the two of its column counts.
TEST(LshAttentionTest, HashesWithRotationsThatAreNotFinite) {
  Case c{.num_buckets = 16, .rotation_heads = 1};
  Tensors t = RandomTensors(c, 10);
  t.rotations.Set(0, 3, 1, 5, kNan);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Got got = Attend(c, t, target.Options());
    for (int64_t p = 0; p < c.length; ++p) EXPECT_EQ(got.buckets.At(1, 1, 1, p), 5);
  }
}

TEST(LshAttentionTest, ChoosesTheSignAsFloat64Does) {
  Case c{.num_buckets = 2, .rotation_heads = 2, .rotation_type = DType::kFloat64};
  Tensors t = RandomTensors(c, 8);
  t.q.Fill(1);
  t.rotations.Fill(0);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t r = 0; r < c.num_hashes; ++r) {
      t.rotations.Set(h, 2, r, 0, 1);
      t.rotations.Set(h, 5, r, 0, h == r ? -1 - 1e-9 : -1 + 1e-9);
    }
  }
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Got got = Attend(c, t, target.Options());
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t r = 0; r < c.num_hashes; ++r) {
        EXPECT_EQ(got.buckets.At(1, h, r, 7), h == r ? 1 : 0);
      }
    }
  }
}

TEST(LshAttentionTest, IgnoresPaddingThatIsNotFinite) {
  for (const LshForm form : {LshForm::kReformer, LshForm::kSimple}) {
    Case c{.form = form, .lengths = {30, 3}, .rotation_heads = 1};
    Tensors t = RandomTensors(c, 4);
    const Want want = WantOf(c, t);
    for (const double value : {kNan, kInfinity, -kInfinity}) {
      for (int64_t p = 30; p < c.length; ++p) {
        t.q.Set(0, 1, p, p % c.head_size, value);
        t.k.Set(0, 1, p, p % c.head_size, value);
        t.v.Set(0, 1, p, p % c.value_head_size, value);
      }
      for (const Target& target : Targets()) {
        SCOPED_TRACE(target.Name());
        const Got got = Attend(c, t, target.Options());
        EXPECT_TRUE(IsClose(c.dtype, got.y, want.y));
        EXPECT_EQ(got.buckets.ToVector(), want.buckets);
      }
    }
  }
}

TEST(LshAttentionTest, PutsTokensThatAreNotFiniteIntoABucket) {
  Case c;
  Tensors t = RandomTensors(c, 5);
  t.q.Set(0, 0, 3, 1, kNan);
  t.q.Set(0, 1, 4, 1, kInfinity);
  t.q.Set(1, 0, 5, 1, -kInfinity);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Got got = Attend(c, t, target.Options());
    EXPECT_EQ(got.buckets.At(0, 0, 0, 3), 0);  // the first NaN is the largest
    for (const double bucket : got.buckets.ToVector()) {
      EXPECT_TRUE(bucket >= 0 && bucket < static_cast<double>(c.buckets())) << bucket;
    }
  }
}

TEST(LshAttentionTest, HasTheSameBitsOnAnyNumberOfThreads) {
  Case c{.length = 960, .head_size = 32, .value_head_size = 32, .num_hashes = 4};
  c.chunk_length = 32;
  const Tensors t = RandomTensors(c, 6);
  const auto op = MakeLshAttention(CallOf(c)).value();
  for (const Target& target : Targets()) {
    const Got want = Attend(c, t, target.Options());
    for (const int threads : {2, 5}) {
      SCOPED_TRACE(absl::StrCat(target.Name(), " on ", threads, " threads"));
      const Plan plan = MakePlan(*op, target.Options(threads)).value();
      AlignedBuffer workspace(plan.workspace_bytes());
      ThreadPool pool(threads);
      Got got = OutputsOf(c);
      ASSERT_TRUE(rapt::Run(*op, plan, ArgumentsOf(c, t, got), workspace.span(), pool).ok());
      EXPECT_TRUE(SameBits("Y", got.y, want.y));
      EXPECT_TRUE(SameBits("buckets", got.buckets, want.buckets));
    }
  }
}

// A call whose tasks are long.
TEST(LshAttentionTest, AbandonsTasksAtCheckpoints) {
  Case c{.dtype = DType::kFloat16, .batch = 1, .heads = 1, .length = 1024, .head_size = 64};
  c.value_head_size = 64;
  c.chunk_length = 512;
  c.num_buckets = 4096;
  const Tensors t = RandomTensors(c, 7);
  const auto op = MakeLshAttention(CallOf(c)).value();
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Plan plan = MakePlan(*op, target.Options()).value();
    AlignedBuffer workspace(plan.workspace_bytes());
    Got got = OutputsOf(c);
    const Arguments arguments = ArgumentsOf(c, t, got);
    const auto count_calls = [&](int stage, int64_t task, bool (*go_on)(void*)) {
      int calls = 0;
      op->RunTask(plan, arguments, workspace.data(), stage, task, /*worker=*/0, {go_on, &calls});
      return calls;
    };
    const auto proceed = [](void* context) { return ++*static_cast<int*>(context) > 0; };
    const auto stop = [](void* context) { return ++*static_cast<int*>(context) < 3; };
    std::vector<int> calls;  // of task 0 of each stage
    for (int stage = 0; stage < static_cast<int>(plan.stages.size()); ++stage) {
      for (int64_t task = plan.stages[stage]; task-- > 0;) {
        const int count = count_calls(stage, task, proceed);
        if (task == 0) calls.push_back(count);
      }
    }
    EXPECT_TRUE(SameBits("Y", got.y, Attend(c, t, target.Options()).y));
    for (int stage = 0; stage < static_cast<int>(calls.size()); ++stage) {
      // Only the sort, which takes microseconds here, has no checkpoint.
      const bool sorts = calls.size() > 1 && stage == 2;
      EXPECT_TRUE(sorts || calls[stage] > 3) << "stage " << stage << ": " << calls[stage];
      EXPECT_EQ(count_calls(stage, /*task=*/0, stop), sorts ? 0 : 3) << "stage " << stage;
    }
  }
}

TEST(LshAttentionTest, HasMemoryThatGrowsWithTheLengthOnly) {
  for (const int64_t chunk_length : {int64_t{64}, int64_t{1} << 20}) {
    const auto bytes = [&](int64_t length, const std::string& backend) {
      Case c{.length = length, .num_hashes = 4, .num_buckets = 64};
      c.chunk_length = std::min(length, chunk_length);
      c.wants_buckets = false;
      return static_cast<double>(
          MakePlan(*MakeLshAttention(CallOf(c)).value(), {.backend = backend})->workspace_bytes());
    };
    for (const char* const backend : {"cpu", "reference"}) {
      EXPECT_LT(bytes(1 << 16, backend), 4.5 * bytes(1 << 14, backend));
    }
  }
}

TEST(LshAttentionTest, HasNoTasksWithoutTokens) {
  for (const Shape& axes : {Shape{0, 2, 48}, Shape{2, 0, 48}, Shape{2, 2, 0}}) {
    Case c{.batch = axes[0], .heads = axes[1], .length = axes[2]};
    const auto op = MakeLshAttention(CallOf(c)).value();
    EXPECT_TRUE(MakePlan(*op, {}).value().stages.empty());
    EXPECT_EQ(op->outputs()[Role::kY]->shape, (Shape{axes[0], axes[1], axes[2], 6}));
  }
}

template <typename Change>
std::string ErrorOf(Change change, const Case& c = {.rotation_heads = 2}) {
  LshAttentionCall call = CallOf(c);
  change(call);
  return std::string(MakeLshAttention(call).status().message());
}

using Call = LshAttentionCall;
constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr Case kSimpleForm{.form = LshForm::kSimple};

TEST(LshAttentionTest, NamesATensorThatIsInvalid) {
  EXPECT_EQ(ErrorOf([](Call& c) { c.inputs[Role::kQ].reset(); }), "Q is missing");
  EXPECT_EQ(ErrorOf([](Call& c) { c.inputs[Role::kV].reset(); }), "V is missing");
  EXPECT_EQ(ErrorOf([](Call& c) { c.inputs[Role::kQ].reset(); }, kSimpleForm), "Q is missing");
  EXPECT_EQ(ErrorOf([](Call& c) { c.inputs[Role::kK].reset(); }, kSimpleForm),
            "K is missing; form 'simple' needs it");
  EXPECT_EQ(ErrorOf([](Call& c) { c.inputs[Role::kK] = c.inputs[Role::kQ]; }),
            "K is given; in form 'reformer' the queries Q are the keys");
  EXPECT_EQ(ErrorOf([](Call& c) { c.inputs[Role::kQ]->dtype = DType::kInt32; }),
            "Q has type INT32; it must be FP32, FP16, BF16 or FP64");
  for (const Shape& shape : {Shape{2, 48, 8}, Shape{2, 2, 48, 0}}) {
    EXPECT_THAT(ErrorOf([&](Call& c) { c.inputs[Role::kQ]->shape = shape; }),
                HasSubstr("; it must be [B, H, S, D] with D at least 1"));
  }
  EXPECT_THAT(ErrorOf([](Call& c) { c.inputs[Role::kQ]->shape[0] = -1; }),
              HasSubstr("Q has shape [-1, 2, 48, 8]; no axis may be negative"));
  EXPECT_THAT(ErrorOf([](Call& c) { c.inputs[Role::kQ]->shape[2] = kHuge; }),
              HasSubstr("its size overflows 64 bits"));
  EXPECT_EQ(ErrorOf([](Call& c) {
              c.inputs[Role::kQ]->shape = {1, 1, int64_t{1} << 31, 1};
            }),
            "the length of Q is 2147483648; it must be at most 2147483647");
  EXPECT_EQ(ErrorOf([](Call& c) { c.inputs[Role::kK]->shape[2] = 47; }, kSimpleForm),
            "K is FP32 [2, 2, 47, 8]; it must be as Q, FP32 [2, 2, 48, 8]");
  EXPECT_EQ(ErrorOf([](Call& c) { c.inputs[Role::kV]->dtype = DType::kFloat16; }),
            "V has type FP16; it must have that of Q, FP32");
  for (const Shape& shape : {Shape{2, 2, 47, 6}, Shape{2, 2, 48, 0}, Shape{2, 48, 6}}) {
    EXPECT_THAT(ErrorOf([&](Call& c) { c.inputs[Role::kV]->shape = shape; }),
                HasSubstr("; it must be [2, 2, 48, Dv] with Dv at least 1"));
  }
  EXPECT_EQ(ErrorOf([](Call& c) {
              c.inputs[Role::kKeyLengths] = TensorSpec{DType::kInt64, {3}};
            }),
            "nonpad_kv_seqlen is INT64 [3]; it must be INT64 [2]");
  EXPECT_EQ(ErrorOf([](Call& c) {
              c.inputs[Role::kKeyLengths] = TensorSpec{DType::kInt32, {2}};
            }),
            "nonpad_kv_seqlen is INT32 [2]; it must be INT64 [2]");
}

TEST(LshAttentionTest, NamesAnAttributeThatIsInvalid) {
  for (const int64_t hashes : {int64_t{0}, int64_t{1025}, kHuge}) {
    EXPECT_EQ(ErrorOf([&](Call& c) { c.num_hashes = hashes; }),
              absl::StrCat("num_hashes is ", hashes, "; it must be from 1 to 1024"));
  }
  EXPECT_EQ(ErrorOf([](Call& c) { c.chunk_length = 0; }),
            "chunk_length is 0; it must be at least 1");
  EXPECT_EQ(ErrorOf([](Call& c) { c.chunk_length = 9; }),
            "chunk_length is 9; it must divide the length 48 or be at least that");
  EXPECT_EQ(ErrorOf([](Call& c) { c.chunks_before = -1; }),
            "chunks_before is -1; it must be at least 0");
  EXPECT_EQ(ErrorOf([](Call& c) { c.chunks_after = -1; }),
            "chunks_after is -1; it must be at least 0");
  for (const int64_t after : {int64_t{11}, kHuge}) {
    EXPECT_EQ(ErrorOf([&](Call& c) { c.chunks_after = after; }),
              absl::StrCat("chunks_before is 1 and chunks_after ", after,
                           "; together they must be at most 11, as num_hashes 2 and chunk_length 8 "
                           "give 12 chunks"));
  }
  EXPECT_THAT(ErrorOf([](Call& c) { c.chunks_before = c.chunks_after = kHuge; }),
              HasSubstr("together they must be at most 11"));
  for (const int64_t buckets : {int64_t{-2}, int64_t{3}}) {
    EXPECT_EQ(ErrorOf([&](Call& c) { c.num_buckets = buckets; }),
              absl::StrCat("num_buckets is ", buckets, "; it must be even and at least 2"));
  }
  EXPECT_EQ(ErrorOf([](Call& c) { c.num_buckets = int64_t{1} << 40; }),
            "num_buckets is 1099511627776; it must be at most 2147483646");
  EXPECT_EQ(ErrorOf([](Call& c) { c.scale = kNan; }), "scale is nan; it must be finite");
  EXPECT_EQ(ErrorOf([](Call& c) { c.is_causal = true; }, kSimpleForm),
            "is_causal is true; form 'simple' hides only padding");
  EXPECT_EQ(ErrorOf([](Call& c) { c.chunks_before = 1; }, kSimpleForm),
            "chunks_before is 1; it must be 0 in form 'simple'");
  EXPECT_EQ(ErrorOf([](Call& c) { c.chunks_after = 2; }, kSimpleForm),
            "chunks_after is 2; it must be 0 in form 'simple'");
  EXPECT_EQ(ErrorOf([](Call& c) { c.num_buckets = 6; }, kSimpleForm),
            "num_buckets is 6; in form 'simple' it must be D, 8");
  EXPECT_EQ(ErrorOf([](Call& c) { c.chunk_length = 48; }),
            "buckets are asked for, but nothing is hashed: the length 48 is at most the "
            "chunk_length 48");
}

TEST(LshAttentionTest, NamesRotationsThatAreInvalid) {
  EXPECT_EQ(ErrorOf([](Call& c) { c.seed = 3; }),
            "rotations and seed are both set; the seed draws the rotations");
  EXPECT_EQ(ErrorOf([](Call& c) { c.inputs[kLshRotations].reset(); }),
            "rotations is missing; it or seed must be given");
  EXPECT_EQ(ErrorOf([](Call& c) { c.inputs[kLshRotations]->dtype = DType::kFloat16; }),
            "rotations has type FP16; it must be FP32, FP64 or the type of Q, FP32");
  for (const Shape& shape : {Shape{3, 8, 2, 4}, Shape{2, 8, 2, 8}, Shape{8, 2, 4}}) {
    EXPECT_EQ(
        ErrorOf([&](Call& c) { c.inputs[kLshRotations]->shape = shape; }),
        absl::StrCat("rotations has shape ", ToString(shape), "; it must be [2 or 1, 8, 2, 4]"));
  }
  const Case drawn;
  EXPECT_EQ(ErrorOf([](Call& c) { c.num_buckets = 2147483646, c.num_hashes = 3; }, drawn),
            "rotations of 2 heads with D 8, num_hashes 3 and num_buckets 2147483646 can't be "
            "drawn; a head has at most 17179869184 numbers");
  Case heads = drawn;
  heads.heads = int64_t{1} << 33;
  heads.head_size = heads.value_head_size = 1;
  EXPECT_THAT(ErrorOf([](Call&) {}, heads), HasSubstr("can't be drawn"));
  heads.heads = int64_t{1} << 31;
  heads.num_hashes = 1024;
  heads.wants_buckets = false;
  EXPECT_THAT(ErrorOf([](Call&) {}, heads), HasSubstr("less than 2^50 bytes of memory"));
}

TEST(LshAttentionTest, ChecksLengths) {
  Case c{.lengths = {48, 0}, .rotation_heads = 1};
  const auto op = MakeLshAttention(CallOf(c)).value();
  EXPECT_TRUE(op->checks_data());
  Arguments arguments;
  const auto error = [&](const std::vector<int64_t>& lengths) {
    arguments.key_lengths = lengths;
    return std::string(op->CheckData(arguments).message());
  };
  EXPECT_EQ(error({48, 0}), "");
  EXPECT_EQ(error({48}),
            "nonpad_kv_seqlen has 1 elements; it must have one for each of the 2 batch rows");
  EXPECT_EQ(error({48, 49}), "nonpad_kv_seqlen[1] is 49; it must be from 0 to the length 48");
  EXPECT_EQ(error({-1, 48}), "nonpad_kv_seqlen[0] is -1; it must be from 0 to the length 48");
  c.lengths.clear();
  EXPECT_FALSE(MakeLshAttention(CallOf(c)).value()->checks_data());
}

}  // namespace
}  // namespace rapt::test
