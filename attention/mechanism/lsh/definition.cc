#include "attention/mechanism/lsh/definition.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/arena.h"
#include "attention/half.h"
#include "attention/mechanism/lsh/hashing.h"
#include "attention/mechanism/softmax/softmax_state.h"

namespace rapt {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct WorkspaceLayout {
  explicit WorkspaceLayout(const LshShape& s) {
    if (s.hashes()) {
      rotations = arena.Take<double>({s.columns(), s.head_size});
      buckets = arena.Take<int32_t>({s.length});
      ends = arena.Take<int32_t>({s.buckets + 1});
      order = arena.Take<int32_t>({s.rounds(), s.length});
    }
    queries = arena.Take<double>({s.length, s.head_size});
    keys = arena.Take<double>({s.length, s.head_size});
    scores = arena.Take<double>({s.window_chunks(), s.chunk_rows()});
    output = arena.Take<double>({s.value_head_size});
    state = arena.Take<double>({s.length, s.value_head_size + 2});
  }

  Arena arena;
  ArrayAt<double> rotations, queries, keys, scores, output, state;
  ArrayAt<int32_t> buckets, ends, order;
};

class Head {
 public:
  Head(const LshShape& shape, const Arguments& arguments, std::byte* workspace, int64_t task,
       WorkMeter& meter)
      : s_(shape),
        a_(arguments),
        layout_(shape),
        memory_(workspace),
        head_(task),
        length_(s_.has_lengths ? a_.key_lengths[task / s_.heads] : s_.length),
        meter_(meter) {}

  void Run() {
    ReadRows(Role::kQ, layout_.queries.In(memory_));
    double* const keys = layout_.keys.In(memory_);
    ReadRows(s_.keys(), keys);
    for (int64_t r = 0; s_.hashes() && r < s_.rounds(); ++r) Hash(r);
    if (s_.is_reformer()) {
      for (int64_t p = 0; p < s_.length && meter_.Pass(8 * s_.head_size); ++p) {
        Normalize(keys + p * s_.head_size);
      }
    }
    double* const state = layout_.state.In(memory_);
    for (int64_t p = 0; p < s_.length; ++p) {
      double* const row = state + p * StateSize();
      row[0] = -kInfinity;
      std::fill(row + 1, row + StateSize(), 0.0);
    }
    for (int64_t n = 0; n < s_.rounds() * s_.length; ++n) {
      if (!meter_.Pass(4 * s_.window_rows() * (s_.head_size + s_.value_head_size))) return;
      if (PositionAt(n) < length_) Attend(n);
    }
    for (int64_t p = 0; p < s_.length && meter_.Pass(8 * s_.value_head_size); ++p) {
      WriteRow(p, state + p * StateSize());
    }
  }

 private:
  int64_t StateSize() const { return s_.value_head_size + 2; }

  void ReadRows(Role role, double* rows) {
    const int64_t count = s_.length * s_.head_size;
    for (int64_t n = 0; n < count && meter_.Pass(8); ++n) {
      rows[n] = LoadElement(a_.inputs[role].data, s_.dtype, head_ * count + n);
    }
  }

  void Normalize(double* key) const {
    double squares = 0;
    for (int64_t d = 0; d < s_.head_size; ++d) squares += key[d] * key[d];
    const double root = std::sqrt(squares / static_cast<double>(s_.head_size) + kLshKeyEpsilon);
    for (int64_t d = 0; d < s_.head_size; ++d) key[d] /= root;
  }

  void Hash(int64_t round) {
    LshRotations rotations{layout_.rotations.In(memory_), 0};
    ReadRotations(s_, a_, s_.rotation_head(head_ % s_.heads), round, layout_.rotations.In(memory_),
                  meter_);
    int32_t* const buckets = layout_.buckets.In(memory_);
    for (int64_t p = 0; p < s_.length; ++p) {
      buckets[p] =
          p < length_ ? BucketOf(s_, rotations, layout_.keys.In(memory_) + p * s_.head_size, meter_)
                      : static_cast<int32_t>(s_.buckets);
    }
    SortByBucket(s_, buckets, layout_.ends.In(memory_),
                 layout_.order.In(memory_) + round * s_.length, meter_);
    if (!s_.wants_buckets) return;
    const int64_t bytes = s_.length * int64_t{sizeof(int32_t)};
    std::memcpy(a_.outputs[kLshBuckets].data + (head_ * s_.rounds() + round) * bytes, buckets,
                static_cast<size_t>(bytes));
  }

  // The token at place n of the rounds' orders, one after the other.
  int64_t PositionAt(int64_t n) const { return s_.hashes() ? layout_.order.In(memory_)[n] : n; }

  double Score(int64_t i, int64_t j) const {
    if (j >= length_ || (s_.is_causal && j > i)) return -kInfinity;
    if (s_.is_reformer() && i == j) return kLshSelfScore;
    const double* const q = layout_.queries.In(memory_) + i * s_.head_size;
    const double* const k = layout_.keys.In(memory_) + j * s_.head_size;
    double product = 0;
    for (int64_t d = 0; d < s_.head_size; ++d) product += q[d] * k[d];
    return s_.scale * product;
  }

  // Folds what the token at place n sees into its row.
  void Attend(int64_t n) {
    const int64_t i = PositionAt(n);
    const int64_t places = s_.rounds() * s_.length;
    const int64_t chunk = n / s_.chunk_rows();
    const int64_t first = (chunk - s_.before()) * s_.chunk_rows() + places;
    double* const scores = layout_.scores.In(memory_);
    double most = -kInfinity;
    for (int64_t j = 0; j < s_.window_rows(); ++j) {
      scores[j] = Score(i, PositionAt((first + j) % places));
      if (!(scores[j] <= most)) most = scores[j];
    }
    double* const output = layout_.output.In(memory_);
    std::fill(output, output + s_.value_head_size, 0.0);
    double sum = 0;
    for (int64_t j = 0; j < s_.window_rows(); ++j) {
      if (scores[j] == -kInfinity) continue;
      const double weight = std::exp(scores[j] - most);
      sum += weight;
      const int64_t value = head_ * s_.length + PositionAt((first + j) % places);
      for (int64_t d = 0; d < s_.value_head_size; ++d) {
        output[d] += weight * LoadElement(a_.inputs[Role::kV].data, s_.dtype,
                                          value * s_.value_head_size + d);
      }
    }
    for (int64_t d = 0; d < s_.value_head_size; ++d) output[d] /= sum;
    double* const state = layout_.state.In(memory_) + i * StateSize();
    const double lse = s_.is_reformer() ? most + std::log(sum) : 0;  // a mean has equal weights
    FoldInto(absl::Span<double>(state + 2, s_.value_head_size), state[0], state[1],
             absl::Span<const double>(output, s_.value_head_size), lse);
  }

  void WriteRow(int64_t p, const double* state) {
    const int64_t first = (head_ * s_.length + p) * s_.value_head_size;
    for (int64_t d = 0; d < s_.value_head_size; ++d) {
      StoreElement(a_.outputs[Role::kY].data, s_.dtype, first + d,
                   p < length_ ? state[2 + d] / state[1] : 0);
    }
  }

  const LshShape& s_;
  const Arguments& a_;
  const WorkspaceLayout layout_;
  std::byte* const memory_;
  const int64_t head_;  // of all batch rows
  const int64_t length_;
  WorkMeter& meter_;
};

}  // namespace

bool FitsDefinition(const LshShape& shape) { return WorkspaceLayout(shape).arena.fits(); }

void PlanDefinition(const LshShape& shape, Plan& plan) {
  plan.stages = {shape.all_heads()};
  plan.worker_workspace_bytes = WorkspaceLayout(shape).arena.bytes();
}

void RunDefinition(const LshShape& shape, const Arguments& arguments, std::byte* workspace,
                   int64_t task, WorkMeter& meter) {
  Head(shape, arguments, workspace, task, meter).Run();
}

}  // namespace rapt
