#include "attention/mechanism/lsh/rounds.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "attention/arena.h"
#include "attention/backend.h"
#include "attention/half.h"
#include "attention/mechanism/lsh/hashing.h"
#include "attention/mechanism/softmax/softmax_state.h"
#include "base/round_up.h"

namespace rapt {
namespace {

// Tokens whose products are computed at once: as many as have about this many products.
constexpr int64_t kProducts = int64_t{1} << 18;
constexpr int64_t kMostTokens = 192;
constexpr int64_t kFewTokens = 8;
// Chunks of at most kSmallChunk tokens are computed several at once, with about this many tokens.
constexpr int64_t kSmallChunk = 64;
constexpr int64_t kGroupTokens = 256;

// Scores of larger scales may be beyond fp32.
constexpr double kMostFp32Scale = 1e30;

DType AccumulatorOf(const LshShape& s) {
  const bool fp64 = s.dtype == DType::kFloat64 || std::fabs(s.scale) > kMostFp32Scale;
  return fp64 ? DType::kFloat64 : DType::kFloat32;
}

// The tokens of a task of the second stage.
int64_t BlockOf(const LshShape& s) {
  if (!s.hashes()) return std::min(s.length, kMostTokens);
  const int64_t products = s.columns() * s.rounds();  // of a token
  return std::min(s.length, std::clamp(kProducts / products, kFewTokens, kMostTokens));
}

// The chunks of a task, and their queries that are computed at once.
int64_t GroupOf(const LshShape& s) {
  if (s.chunk_rows() > kSmallChunk) return 1;
  return std::min(s.round_chunks(), kGroupTokens / s.chunk_rows());
}
int64_t QueriesOf(const LshShape& s) {
  return s.chunk_rows() > kSmallChunk ? std::min(s.chunk_rows(), kMostTokens) : s.chunk_rows();
}

// What the second stage computes of a token.
template <typename Real>
struct KeyNorm {
  Real inverse;  // by which a key is multiplied
  Real self;     // the score of a token with itself, which kLshSelfScore replaces
};

// The arrays that all tasks share, and those of a worker. Some are absent.
template <typename Real>
struct WorkspaceLayout {
  explicit WorkspaceLayout(const LshShape& s) {
    const int64_t tokens = s.length;
    const int64_t queries = QueriesOf(s);
    const int64_t gathered = GroupOf(s) + s.window_chunks() - 1;
    if (s.hashes()) {
      const std::initializer_list<int64_t> rotation = {s.rotation_heads, s.rounds(), s.columns(),
                                                       s.head_size};
      exact_rotations = shared.Take<double>(rotation);
      rotations = shared.Take<Real>(rotation);
      largest_norms = shared.Take<double>({s.rotation_heads, s.rounds()});
      buckets = shared.Take<int32_t>({s.batch, s.heads, s.rounds(), tokens});
      order = shared.Take<int32_t>({s.batch, s.heads, s.rounds(), tokens});
      products = own.Take<Real>({s.rounds(), BlockOf(s), s.columns()});
      unused = own.Take<Real>({s.rounds(), BlockOf(s)});
      ends = own.Take<int32_t>({s.buckets + 1});
    }
    if (s.dtype != AccumulatorOf(s)) {
      inputs[Role::kQ] = shared.Take<Real>({s.batch, s.heads, tokens, s.head_size});
      inputs[Role::kK] = s.is_reformer()
                             ? inputs[Role::kQ]
                             : shared.Take<Real>({s.batch, s.heads, tokens, s.head_size});
      inputs[Role::kV] = shared.Take<Real>({s.batch, s.heads, tokens, s.value_head_size});
    }
    if (s.is_reformer()) key_norms = shared.Take<KeyNorm<Real>>({s.batch, s.heads, tokens});
    if (s.rounds() > 1) {
      state = shared.Take<Real>({s.batch, s.heads, tokens, s.value_head_size + 2});
    }
    token = own.Take<double>({s.head_size});
    positions = own.Take<int32_t>({gathered, s.chunk_rows()});
    keys = own.Take<Real>({gathered, s.chunk_rows(), s.head_size});
    values = own.Take<Real>({gathered, s.chunk_rows(), s.value_head_size});
    query_rows = own.Take<Real>({GroupOf(s), queries, s.head_size});
    mask = own.Take<Real>({GroupOf(s), queries, s.window_chunks(), s.chunk_rows()});
    outputs = own.Take<Real>({GroupOf(s), queries, s.value_head_size});
    lse = own.Take<Real>({GroupOf(s), queries});
  }

  bool fits() const { return shared.fits() && own.fits(); }

  Arena shared;
  ArrayAt<double> exact_rotations, largest_norms;
  ArrayAt<Real> rotations, state;
  ArrayAt<int32_t> buckets, order;
  InputMap<ArrayAt<Real>> inputs;  // of other types, as Real
  ArrayAt<KeyNorm<Real>> key_norms;

  Arena own;
  ArrayAt<Real> products, unused;
  ArrayAt<int32_t> ends;
  ArrayAt<double> token;
  ArrayAt<int32_t> positions;
  ArrayAt<Real> keys, values, query_rows, mask, outputs, lse;
};

// The scores of tokens with rotations as keys: a head for each round. The keys count as padding, so
// that nothing but their scores is computed. These are sums of multiply-adds on every instruction
// set, as BucketOf() expects.
Problem ProductsProblem(const LshShape& s, int64_t tokens) {
  return {.dtype = AccumulatorOf(s),
          .batch = 1,
          .query_heads = s.rounds(),
          .kv_heads = s.rounds(),
          .query_length = tokens,
          .key_length = s.columns(),
          .head_size = s.head_size,
          .value_head_size = 1,
          .values_in_keys = true,
          .scale = 1,
          .has_key_lengths = true,
          .score_output = ScoreOutput::kScores};
}

// A head for each chunk.
Problem ChunksProblem(const LshShape& s, int64_t chunks, int64_t queries) {
  const DType type = AccumulatorOf(s);
  return {.dtype = type,
          .batch = 1,
          .query_heads = chunks,
          .kv_heads = chunks,
          .query_length = queries,
          .key_length = s.window_rows(),
          .head_size = s.head_size,
          .value_head_size = s.value_head_size,
          .scale = s.scale,
          .mask = MaskShape{type, {1, chunks, queries, s.window_rows()}},
          .wants_lse = true};
}

// Returns the plan of a part of a task, for one worker.
Plan PartPlan(const Plan& whole, const Problem& problem) {
  Plan plan;
  plan.problem = problem;
  plan.routing.backend = whole.routing.backend;
  plan.isa = whole.isa;
  if (!problem.empty()) plan.routing.backend->PlanTasks(plan);
  return plan;
}

enum class Step : uint8_t { kRotations, kTokens, kOrder, kRound };

class RoundsPlan final : public BackendPlan {
 public:
  RoundsPlan(const LshShape& s, const Plan& whole, int64_t own_bytes)
      : parts_begin(own_bytes), group(GroupOf(s)), queries(QueriesOf(s)) {
    const int64_t block = BlockOf(s);
    if (s.hashes()) {
      products = PartPlan(whole, ProductsProblem(s, block));
      last_products = PartPlan(whole, ProductsProblem(s, s.length % block));
      steps = {Step::kRotations, Step::kTokens, Step::kOrder};
    } else if (s.is_reformer() || s.dtype != AccumulatorOf(s)) {
      steps = {Step::kTokens};
    }
    chunks = PartPlan(whole, ChunksProblem(s, group, queries));
    last_chunks = PartPlan(whole, group > 1 ? ChunksProblem(s, s.round_chunks() % group, queries)
                                            : ChunksProblem(s, 1, s.chunk_rows() % queries));
    chunk_length = s.chunk_rows();
  }

  int64_t parts_bytes() const {
    int64_t bytes = 0;
    for (const Plan* plan : {&products, &last_products, &chunks, &last_chunks}) {
      bytes = std::max(bytes, plan->workspace_bytes());
    }
    return bytes;
  }

  std::string Describe() const override { return absl::StrCat("c", chunk_length, " g", group); }

  absl::InlinedVector<Step, 3> steps;  // before the rounds
  int64_t parts_begin;                 // of the workspace of parts in that of a worker
  int64_t group, queries;
  int64_t chunk_length;
  Plan products, last_products, chunks, last_chunks;
};

const RoundsPlan& PlanOf(const Plan& plan) {
  return static_cast<const RoundsPlan&>(*plan.backend_plan);
}

TensorView ViewOf(const void* data, DType type, std::array<int64_t, 4> dims,
                  std::array<int64_t, 4> strides) {
  return {static_cast<const std::byte*>(data), type, dims, strides};
}

template <typename Byte>
MutableTensorView OutputAt(Byte* data, DType type, std::array<int64_t, 4> dims) {
  return {reinterpret_cast<std::byte*>(data), type, dims, RowMajorStrides(dims)};
}

// Hidden keys are those of later tokens, and of padding, which follows them.
template <typename Real>
void FillMask(const int32_t* positions, int64_t count, int32_t last_visible, int32_t self,
              Real self_score, Real* mask) {
  constexpr Real kHidden = -std::numeric_limits<Real>::infinity();
  for (int64_t j = 0; j < count; ++j) {
    const Real shown = positions[j] == self ? self_score : Real{0};
    mask[j] = positions[j] > last_visible ? kHidden : shown;
  }
}

template <typename Real>
class Rounds {
 public:
  Rounds(const LshShape& shape, const Plan& plan, const Arguments& arguments, std::byte* workspace,
         int worker, WorkMeter& meter)
      : s_(shape),
        plan_(PlanOf(plan)),
        a_(arguments),
        layout_(shape),
        shared_(workspace),
        own_(workspace + plan.shared_workspace_bytes + worker * plan.worker_workspace_bytes),
        meter_(meter) {}

  void Run(int stage, int64_t task) {
    const auto steps = static_cast<int>(plan_.steps.size());
    switch (stage < steps ? plan_.steps[stage] : Step::kRound) {
      case Step::kRotations:
        return PrepareRotations(task);
      case Step::kTokens:
        return PrepareTokens(task);
      case Step::kOrder:
        return Order(task);
      case Step::kRound:
        return AttendGroup(stage - steps, task);
    }
  }

 private:
  static constexpr DType kType = sizeof(Real) == 8 ? DType::kFloat64 : DType::kFloat32;

  bool converts() const { return s_.dtype != kType; }

  // The rows of a head of a batch row, as Real but perhaps not aligned.
  const std::byte* Rows(Role role, int64_t head, int64_t size) const {
    const std::byte* const all =
        converts() ? reinterpret_cast<const std::byte*>(layout_.inputs[role].In(shared_))
                   : a_.inputs[role].data;
    return all + head * s_.length * size * int64_t{sizeof(Real)};
  }

  int32_t LengthOf(int64_t head) const {
    return static_cast<int32_t>(s_.has_lengths ? a_.key_lengths[head / s_.heads] : s_.length);
  }

  void PrepareRotations(int64_t task) {
    const int64_t count = s_.columns() * s_.head_size;
    double* const exact = layout_.exact_rotations.In(shared_) + task * count;
    layout_.largest_norms.In(shared_)[task] =
        ReadRotations(s_, a_, task / s_.rounds(), task % s_.rounds(), exact, meter_);
    Real* const rounded = layout_.rotations.In(shared_) + task * count;
    for (int64_t n = 0; n < count; ++n) {
      if (n % 4096 == 0 && !meter_.Pass(4096)) return;
      rounded[n] = static_cast<Real>(exact[n]);
    }
  }

  void PrepareTokens(int64_t task) {
    const int64_t block = BlockOf(s_);
    const int64_t blocks = CeilDiv(s_.length, block);
    const int64_t head = task / blocks;
    const int64_t begin = task % blocks * block;
    const int64_t count = std::min(block, s_.length - begin);
    if (converts()) {
      Convert(Role::kQ, head, begin, count, s_.head_size);
      if (!s_.is_reformer()) Convert(Role::kK, head, begin, count, s_.head_size);
      Convert(Role::kV, head, begin, count, s_.value_head_size);
    }
    if (s_.hashes()) MultiplyRotations(head, begin, count);
    for (int64_t n = 0; n < count && meter_.Pass(8 * s_.head_size); ++n) {
      const double norm = ReadToken(head, begin + n);
      if (s_.is_reformer()) SetKeyNorm(norm, head * s_.length + begin + n);
      if (s_.hashes()) ChooseBuckets(head, begin, n, count, norm);
    }
  }

  void Convert(Role role, int64_t head, int64_t begin, int64_t count, int64_t size) {
    const int64_t first = (head * s_.length + begin) * size;
    Real* const to = layout_.inputs[role].In(shared_) + first;
    for (int64_t n = 0; n < count * size; ++n) {
      if (n % 1024 == 0 && !meter_.Pass(16 * 1024)) return;
      to[n] = static_cast<Real>(LoadElement(a_.inputs[role].data, s_.dtype, first + n));
    }
  }

  // Reads a token's key into layout_.token and returns its norm.
  double ReadToken(int64_t head, int64_t p) {
    double* const token = layout_.token.In(own_);
    const std::byte* const rows = Rows(s_.keys(), head, s_.head_size);
    double squares = 0;
    for (int64_t d = 0; d < s_.head_size; ++d) {
      token[d] = LoadAs<Real>(rows, p * s_.head_size + d);
      squares += token[d] * token[d];
    }
    return std::sqrt(squares);
  }

  void SetKeyNorm(double norm, int64_t index) {
    const double squares = norm * norm;
    const double inverse =
        1 / std::sqrt(squares / static_cast<double>(s_.head_size) + kLshKeyEpsilon);
    layout_.key_norms.In(shared_)[index] = {static_cast<Real>(inverse),
                                            static_cast<Real>(s_.scale * squares * inverse)};
  }

  // Writes the products of tokens [begin, begin + count) to layout_.products.
  void MultiplyRotations(int64_t head, int64_t begin, int64_t count) {
    const Plan& plan = count == BlockOf(s_) ? plan_.products : plan_.last_products;
    const int64_t rounds = s_.rounds();
    const int64_t columns = s_.columns();
    const int64_t size = s_.head_size;
    const std::byte* const tokens =
        Rows(s_.keys(), head, size) + begin * size * int64_t{sizeof(Real)};
    const Real* const rotations =
        layout_.rotations.In(shared_) + s_.rotation_head(head % s_.heads) * rounds * columns * size;
    static constexpr int64_t kNoKeys = 0;
    Arguments a;
    a.key_lengths = {&kNoKeys, 1};
    a.inputs[Role::kQ] = ViewOf(tokens, kType, {1, rounds, count, size}, {0, 0, size, 1});
    a.inputs[Role::kK] =
        ViewOf(rotations, kType, {1, rounds, columns, size}, {0, columns * size, size, 1});
    a.outputs[Role::kY] = OutputAt(layout_.unused.In(own_), kType, {1, rounds, count, 1});
    a.outputs[Role::kScores] =
        OutputAt(layout_.products.In(own_), kType, {1, rounds, count, columns});
    RunPart(plan, a);
  }

  // Writes the buckets of token begin + n, whose key is in layout_.token.
  void ChooseBuckets(int64_t head, int64_t begin, int64_t n, int64_t count, double norm) {
    const int64_t p = begin + n;
    for (int64_t r = 0; r < s_.rounds(); ++r) {
      int32_t& bucket = layout_.buckets.In(shared_)[(head * s_.rounds() + r) * s_.length + p];
      if (p >= LengthOf(head)) {
        bucket = static_cast<int32_t>(s_.buckets);
        continue;
      }
      const int64_t rotation = s_.rotation_head(head % s_.heads) * s_.rounds() + r;
      const LshRotations rotations = {
          layout_.exact_rotations.In(shared_) + rotation * s_.columns() * s_.head_size,
          layout_.largest_norms.In(shared_)[rotation]};
      const Real* const products = layout_.products.In(own_) + (r * count + n) * s_.columns();
      bucket = BucketOf(s_, rotations, layout_.token.In(own_), norm, products, meter_);
    }
  }

  void Order(int64_t task) {
    const int32_t* const buckets = layout_.buckets.In(shared_) + task * s_.length;
    SortByBucket(s_, buckets, layout_.ends.In(own_), layout_.order.In(shared_) + task * s_.length,
                 meter_);
    if (!s_.wants_buckets) return;
    const int64_t bytes = s_.length * int64_t{sizeof(int32_t)};
    std::memcpy(a_.outputs[kLshBuckets].data + task * bytes, buckets, static_cast<size_t>(bytes));
  }

  void AttendGroup(int64_t round, int64_t task) {
    const int64_t groups = CeilDiv(s_.round_chunks(), plan_.group);
    const int64_t head = task / groups;
    const int64_t first = task % groups * plan_.group;
    const int64_t chunks = std::min(plan_.group, s_.round_chunks() - first);
    if (!GatherKeys(head, round * s_.round_chunks() + first, chunks)) return;
    for (int64_t begin = 0; begin < s_.chunk_rows(); begin += plan_.queries) {
      const int64_t queries = std::min(plan_.queries, s_.chunk_rows() - begin);
      if (!GatherQueries(head, chunks, begin, queries)) return;
      AttendChunks(chunks, queries);
      if (!Fold(head, round, chunks, begin, queries)) return;
    }
  }

  // Gathers the keys and values that chunks from `first` of all rounds on see.
  bool GatherKeys(int64_t head, int64_t first, int64_t chunks) {
    const int64_t places = s_.rounds() * s_.length;
    const int64_t rows = s_.chunk_rows();
    const int64_t count = (chunks + s_.window_chunks() - 1) * rows;
    const int32_t* const order = s_.hashes() ? layout_.order.In(shared_) + head * places : nullptr;
    const std::byte* const keys = Rows(s_.keys(), head, s_.head_size);
    const std::byte* const values = Rows(Role::kV, head, s_.value_head_size);
    int64_t place = (first - s_.before()) * rows;
    if (place < 0) place += places;
    for (int64_t n = 0; n < count; ++n, ++place) {
      if (!meter_.Pass(s_.head_size + s_.value_head_size)) return false;
      if (place == places) place = 0;
      const int64_t p = order == nullptr ? place : order[place];
      layout_.positions.In(own_)[n] = static_cast<int32_t>(p);
      CopyRow(keys, p, s_.head_size, layout_.keys.In(own_) + n * s_.head_size);
      if (s_.is_reformer()) ScaleKey(head, p, layout_.keys.In(own_) + n * s_.head_size);
      CopyRow(values, p, s_.value_head_size, layout_.values.In(own_) + n * s_.value_head_size);
    }
    return true;
  }

  static void CopyRow(const std::byte* rows, int64_t p, int64_t size, Real* to) {
    const int64_t bytes = size * int64_t{sizeof(Real)};
    std::memcpy(to, rows + p * bytes, static_cast<size_t>(bytes));
  }

  void ScaleKey(int64_t head, int64_t p, Real* key) const {
    const Real inverse = layout_.key_norms.In(shared_)[head * s_.length + p].inverse;
    for (int64_t d = 0; d < s_.head_size; ++d) key[d] *= inverse;
  }

  // The positions of queries [begin, ...) of a chunk of the group.
  const int32_t* QueryPositions(int64_t chunk, int64_t begin) const {
    return layout_.positions.In(own_) + (s_.before() + chunk) * s_.chunk_rows() + begin;
  }

  // The last position that token p sees; padding sees none.
  int32_t LastVisible(int64_t head, int32_t p) const {
    const int32_t length = LengthOf(head);
    if (p >= length) return -1;
    return s_.is_causal ? p : length - 1;
  }

  // Gathers queries [begin, begin + queries) of each chunk, and fills their mask.
  bool GatherQueries(int64_t head, int64_t chunks, int64_t begin, int64_t queries) {
    const std::byte* const rows = Rows(Role::kQ, head, s_.head_size);
    for (int64_t n = 0; n < chunks * queries; ++n) {
      if (!meter_.Pass(s_.head_size + 4 * s_.window_rows())) return false;
      const int64_t chunk = n / queries;
      const int32_t p = QueryPositions(chunk, begin)[n % queries];
      CopyRow(rows, p, s_.head_size, layout_.query_rows.In(own_) + n * s_.head_size);
      Real self = 0;
      if (s_.is_reformer()) {
        self = static_cast<Real>(kLshSelfScore) -
               layout_.key_norms.In(shared_)[head * s_.length + p].self;
      }
      FillMask(layout_.positions.In(own_) + chunk * s_.chunk_rows(), s_.window_rows(),
               LastVisible(head, p), p, self, layout_.mask.In(own_) + n * s_.window_rows());
    }
    return true;
  }

  void AttendChunks(int64_t chunks, int64_t queries) {
    const bool full = chunks == plan_.group && queries == plan_.queries;
    const int64_t size = s_.head_size;
    const int64_t value_size = s_.value_head_size;
    const int64_t keys = s_.window_rows();
    const std::array<int64_t, 4> mask = {1, chunks, queries, keys};
    Arguments a;
    a.inputs[Role::kQ] = ViewOf(layout_.query_rows.In(own_), kType, {1, chunks, queries, size},
                                RowMajorStrides({1, chunks, queries, size}));
    a.inputs[Role::kK] = ViewOf(layout_.keys.In(own_), kType, {1, chunks, keys, size},
                                {0, s_.chunk_rows() * size, size, 1});
    a.inputs[Role::kV] = ViewOf(layout_.values.In(own_), kType, {1, chunks, keys, value_size},
                                {0, s_.chunk_rows() * value_size, value_size, 1});
    a.inputs[Role::kMask] = ViewOf(layout_.mask.In(own_), kType, mask, RowMajorStrides(mask));
    a.outputs[Role::kY] =
        OutputAt(layout_.outputs.In(own_), kType, {1, chunks, queries, value_size});
    a.outputs[Role::kLse] = OutputAt(layout_.lse.In(own_), kType, {1, chunks, queries, 1});
    RunPart(full ? plan_.chunks : plan_.last_chunks, a);
  }

  // Folds the outputs into those of the rounds before, and writes the rows of the last round.
  bool Fold(int64_t head, int64_t round, int64_t chunks, int64_t begin, int64_t queries) {
    for (int64_t n = 0; n < chunks * queries; ++n) {
      if (!meter_.Pass(8 * s_.value_head_size)) return false;
      const int64_t p = head * s_.length + QueryPositions(n / queries, begin)[n % queries];
      const absl::Span<Real> output(layout_.outputs.In(own_) + n * s_.value_head_size,
                                    s_.value_head_size);
      if (s_.rounds() > 1) FoldRow(p, round, output, layout_.lse.In(own_)[n]);
      if (round + 1 == s_.rounds()) WriteRow(p, output);
    }
    return true;
  }

  // After the last round, `output` is the result.
  void FoldRow(int64_t p, int64_t round, absl::Span<Real> output, Real lse) {
    Real* const state = layout_.state.In(shared_) + p * (s_.value_head_size + 2);
    Real& max = state[0];
    Real& sum = state[1];
    const absl::Span<Real> folded(state + 2, s_.value_head_size);
    if (round == 0) {
      max = -std::numeric_limits<Real>::infinity();
      sum = 0;
      std::fill(folded.begin(), folded.end(), Real{0});
    }
    // A mean is a merge with equal weights.
    FoldInto<Real>(folded, max, sum, output, s_.is_reformer() ? lse : Real{0});
    if (round + 1 < s_.rounds()) return;
    for (int64_t d = 0; d < s_.value_head_size; ++d) output[d] = sum == 0 ? 0 : folded[d] / sum;
  }

  void WriteRow(int64_t p, absl::Span<const Real> output) {
    const int64_t first = p * s_.value_head_size;
    std::byte* const data = a_.outputs[Role::kY].data;
    if (!converts()) {
      std::memcpy(data + first * int64_t{sizeof(Real)}, output.data(),
                  output.size() * sizeof(Real));
      return;
    }
    for (size_t d = 0; d < output.size(); ++d) {
      StoreElement(data, s_.dtype, first + static_cast<int64_t>(d), output[d]);
    }
  }

  void RunPart(const Plan& plan, const Arguments& a) {
    for (size_t stage = 0; stage < plan.stages.size(); ++stage) {
      for (int64_t task = 0; task < plan.stages[stage]; ++task) {
        plan.routing.backend->RunTask(plan, a, own_ + plan_.parts_begin, static_cast<int>(stage),
                                      task, /*worker=*/0, meter_.ForParts());
      }
    }
  }

  const LshShape& s_;
  const RoundsPlan& plan_;
  const Arguments& a_;
  const WorkspaceLayout<Real> layout_;
  std::byte* const shared_;
  std::byte* const own_;
  WorkMeter& meter_;
};

template <typename Real>
void PlanWith(const LshShape& s, Plan& plan) {
  const WorkspaceLayout<Real> layout(s);
  const auto rounds = std::make_shared<const RoundsPlan>(s, plan, layout.own.bytes());
  for (const Step step : rounds->steps) {
    plan.stages.push_back(step == Step::kRotations ? s.rotation_heads * s.rounds()
                          : step == Step::kTokens  ? s.all_heads() * CeilDiv(s.length, BlockOf(s))
                                                   : s.all_heads() * s.rounds());
  }
  plan.stages.resize(plan.stages.size() + s.rounds(),
                     s.all_heads() * CeilDiv(s.round_chunks(), rounds->group));
  plan.shared_workspace_bytes = layout.shared.bytes();
  plan.worker_workspace_bytes =
      layout.own.bytes() + RoundUp(rounds->parts_bytes(), kWorkspaceAlignment);
  plan.backend_plan = rounds;
}

}  // namespace

bool FitsRounds(const LshShape& s) {
  return AccumulatorOf(s) == DType::kFloat64 ? WorkspaceLayout<double>(s).fits()
                                             : WorkspaceLayout<float>(s).fits();
}

void PlanRounds(const LshShape& s, Plan& plan) {
  AccumulatorOf(s) == DType::kFloat64 ? PlanWith<double>(s, plan) : PlanWith<float>(s, plan);
}

void RunRounds(const LshShape& s, const Plan& plan, const Arguments& a, std::byte* workspace,
               int stage, int64_t task, int worker, WorkMeter& meter) {
  if (AccumulatorOf(s) == DType::kFloat64) {
    return Rounds<double>(s, plan, a, workspace, worker, meter).Run(stage, task);
  }
  Rounds<float>(s, plan, a, workspace, worker, meter).Run(stage, task);
}

}  // namespace rapt
