#include "attention/reference/backward.h"

#include <algorithm>

#include "absl/types/span.h"
#include "attention/half.h"
#include "attention/mechanism/softmax/query_row.h"
#include "attention/rotary/rotate.h"
#include "attention/rotary/rotation.h"
#include "attention/score/relative_tables.h"

namespace rapt {
namespace {

constexpr int64_t kDouble = sizeof(double);

bool Wants(const Problem& p, Role gradient) { return p.backward->gradients.contains(gradient); }

// The elements of an input that one task sums: those of batch row b and head h, or of all of them,
// and for a mask those of query i. -1: all.
struct Slice {
  int64_t b = -1, h = -1, i = -1;

  bool Includes(int64_t other_b, int64_t other_h, int64_t other_i) const {
    return (b < 0 || b == other_b) && (h < 0 || h == other_h) && (i < 0 || i == other_i);
  }
  // Coordinates in a tensor in which summed axes have size 1.
  int64_t b_or_first() const { return std::max<int64_t>(b, 0); }
  int64_t h_or_first() const { return std::max<int64_t>(h, 0); }
  int64_t i_or_first() const { return std::max<int64_t>(i, 0); }
};

// How the tasks of a gradient other than those of Q, K and V divide it.
struct Division {
  int64_t batches = 1, heads = 1, queries = 1;  // 1: summed, if the problem has more
  int64_t numbers = 0;                          // of a slice

  int64_t tasks() const { return batches * heads * queries; }
  Slice SliceOf(const Problem& p, int64_t task) const {
    const auto part = [](int64_t n, int64_t count, int64_t full) {
      return count == 1 && full != 1 ? -1 : n;
    };
    const int64_t i = task % queries;
    const int64_t h = task / queries % heads;
    return {part(task / queries / heads, batches, p.batch), part(h, heads, p.query_heads),
            part(i, queries, p.query_length)};
  }
};

Division DivisionOf(const Problem& p, Role gradient) {
  switch (gradient) {
    case Role::kDMask:
      return {p.mask->dims[0], p.mask->dims[1], p.mask->dims[2], p.mask->dims[3]};
    case Role::kDBias:
      return {p.bias->dims[0], p.bias->dims[1], p.bias->dims[2], p.bias->dims[3]};
    case Role::kDHeadSink:
      return {.heads = p.query_heads, .numbers = 1};
    case Role::kDAlibiSlopes:
      return {.batches = p.alibi_slopes->batch, .heads = p.query_heads, .numbers = 1};
    case Role::kDBiasTable:
      return {.heads = p.query_heads, .numbers = p.bias_table->buckets};
    case Role::kDRelativeBias:
      return {.heads = p.relative_bias->heads, .numbers = p.relative_bias->length};
    case Role::kDRelativeKeys:
      return {.heads = p.relative_keys->heads, .numbers = p.relative_keys->length * p.head_size};
    case Role::kDRelativeValues:
      return {.heads = p.relative_values->heads,
              .numbers = p.relative_values->length * p.value_head_size};
    case Role::kDAdditiveWeight:
      return {.heads = p.additive_weight->heads, .numbers = p.head_size};
    default:
      return {.batches = 0};
  }
}

// Row `index` of rows of `size` numbers.
absl::Span<double> Part(absl::Span<double> numbers, int64_t index, int64_t size) {
  return absl::MakeSpan(numbers.data() + index * size, size);
}

// The gradients that have tasks of their own, in this order.
constexpr Role kSummed[] = {Role::kDMask,         Role::kDBias,           Role::kDHeadSink,
                            Role::kDAlibiSlopes,  Role::kDBiasTable,      Role::kDRelativeBias,
                            Role::kDRelativeKeys, Role::kDRelativeValues, Role::kDAdditiveWeight};

int64_t SummingTasks(const Problem& p) {
  int64_t tasks = 0;
  for (Role role : kSummed) tasks += Wants(p, role) ? DivisionOf(p, role).tasks() : 0;
  return tasks;
}

// Rotated keys, and the angles of all rows.
struct Rotations {
  Rotations(const Problem& p, std::byte* shared)
      : stored(p, shared, RotateRow),
        angles(p, shared + Rotation::SharedBytes(p), RotateRow, KeyRotation::kOnRead) {}

  static int64_t SharedBytes(const Problem& p) {
    return Rotation::SharedBytes(p) + Rotation::SharedBytes(p, KeyRotation::kOnRead);
  }
  static int64_t WorkerBytes(const Problem& p) {
    return std::max(Rotation::WorkerBytes(p), Rotation::WorkerBytes(p, KeyRotation::kOnRead));
  }
  static int64_t Tasks(const Problem& p) {
    return Rotation::Tasks(p) + Rotation::Tasks(p, KeyRotation::kOnRead);
  }

  void RunTask(const Problem& p, const Arguments& a, int64_t task, std::byte* worker,
               const Checkpoint& checkpoint) const {
    const int64_t first = Rotation::Tasks(p);
    if (task < first) return stored.RunTask(a, task, worker, checkpoint);
    angles.RunTask(a, task - first, worker, checkpoint);
  }

  Rotation stored;
  Rotation angles;
};

// The numbers of a worker: of a row, and the sums of a task.
struct Numbers {
  Numbers(const Problem& p, std::byte* memory) {
    auto* next = reinterpret_cast<double*>(memory);
    const auto take = [&next](int64_t count) {
      const absl::Span<double> span(next, count);
      next += count;
      return span;
    };
    gradient.weights = take(p.total_keys());
    gradient.biased = take(p.total_keys());
    gradient.raw = take(p.total_keys());
    output_gradient = take(p.value_head_size);
    query = take(p.head_size);
    relative_query = take(p.head_size);
    keys = take(p.total_keys() * p.head_size);
    values = take(p.total_keys() * p.value_head_size);
    row = reinterpret_cast<std::byte*>(take(QueryRow::MemoryBytes(p) / kDouble).data());
    sums = take(MostSums(p));
  }

  static int64_t MostSums(const Problem& p) {
    int64_t most = 0;
    for (Role role : kSummed) {
      if (Wants(p, role)) most = std::max(most, DivisionOf(p, role).numbers);
    }
    return most;
  }

  static int64_t Bytes(const Problem& p) {
    return (p.total_keys() * (3 + p.head_size + p.value_head_size) + p.value_head_size +
            2 * p.head_size + MostSums(p)) *
               kDouble +
           QueryRow::MemoryBytes(p);
  }

  RowGradient gradient;
  absl::Span<double> output_gradient, query, relative_query;
  absl::Span<double> keys, values;  // dK and dV of a head
  std::byte* row;                   // of a QueryRow
  absl::Span<double> sums;
};

class BackwardTask {
 public:
  // `rotated` are the arguments with the rotated keys; `rotations` is null without rotation.
  BackwardTask(const Problem& p, const Arguments& rotated, const Rotations* rotations,
               std::byte* memory, const Checkpoint& checkpoint)
      : p_(p), a_(rotated), rotations_(rotations), n_(p, memory), checkpoint_(checkpoint) {}

  // The gradients of Q, relative_query, K and V of one key/value head.
  void RunHead(int64_t b, int64_t kv_head) {
    Fill(n_.keys);
    Fill(n_.values);
    for (int64_t h = kv_head * p_.group_size(); h < (kv_head + 1) * p_.group_size(); ++h) {
      for (int64_t i = 0; i < p_.query_length; ++i) {
        if (!GoOn()) return;
        AddRow(b, h, i);
      }
    }
    for (int64_t j = 0; j < p_.total_keys(); ++j) StoreKey(b, kv_head, j);
  }

  void RunSum(int64_t task) {
    for (Role role : kSummed) {
      if (!Wants(p_, role)) continue;
      const Division division = DivisionOf(p_, role);
      if (task < division.tasks()) {
        return Sum(role, division.SliceOf(p_, task), Part(n_.sums, 0, division.numbers));
      }
      task -= division.tasks();
    }
  }

 private:
  static void Fill(absl::Span<double> numbers) { std::fill(numbers.begin(), numbers.end(), 0.0); }

  bool GoOn() const {
    return checkpoint_.go_on == nullptr || checkpoint_.go_on(checkpoint_.context);
  }

  QueryRow RowOf(int64_t b, int64_t h, int64_t i) const {
    return {p_, a_, rotations_ == nullptr ? nullptr : &rotations_->stored, b, h, i, n_.row};
  }

  double Load(Role role, int64_t b, int64_t h, int64_t i, int64_t d) const {
    const TensorView& tensor = a_.inputs[role];
    std::byte element[sizeof(double)];
    tensor.CopyElement(b, h, i, d, element);
    return LoadElement(element, tensor.dtype, 0);
  }

  // Computes the gradients of a row's steps in n_.
  void Differentiate(const QueryRow& row, int64_t b, int64_t h, int64_t i) {
    double sum = 0;
    for (int64_t d = 0; d < p_.value_head_size; ++d) {
      const double dy = n_.output_gradient[d] = Load(Role::kOutputGradient, b, h, i, d);
      if (p_.backward->has_forward) sum += dy * Load(Role::kForwardOutput, b, h, i, d);
    }
    RowCotangent cotangent = {.output = n_.output_gradient};
    if (p_.backward->has_lse_gradient) cotangent.lse = Load(Role::kLseGradient, b, h, i, 0);
    if (p_.backward->has_forward) {
      cotangent.forward = {.lse = Load(Role::kForwardLse, b, h, i, 0), .sum = sum};
    }
    row.Differentiate(cotangent, n_.gradient);
  }

  void AddRow(int64_t b, int64_t h, int64_t i) {
    const QueryRow row = RowOf(b, h, i);
    Differentiate(row, b, h, i);
    Fill(n_.query);
    Fill(n_.relative_query);
    const int64_t d = p_.head_size;
    const int64_t dv = p_.value_head_size;
    for (int64_t j = 0; j < p_.total_keys(); ++j) {
      if (row.Hidden(j)) continue;
      const double weight = n_.gradient.weights[j];
      for (int64_t n = 0; weight != 0 && n < dv; ++n) {
        n_.values[j * dv + n] += weight * n_.output_gradient[n];
      }
      const double raw = n_.gradient.raw[j];
      if (raw == 0) continue;
      row.AddToQuery(j, raw, n_.query);
      row.AddToKey(j, raw, Part(n_.keys, j, d));
      if (p_.has_relative_query) row.AddToRelativeQuery(j, raw, n_.relative_query);
    }
    if (rotations_ != nullptr) RotateBack(rotations_->angles.QueryAngles(b, i), n_.query.data());
    Store(Role::kDQ, b, h, i, n_.query);
    Store(Role::kDRelativeQuery, b, h, i, n_.relative_query);
  }

  void StoreKey(int64_t b, int64_t h, int64_t j) {
    const absl::Span<double> key = Part(n_.keys, j, p_.head_size);
    const absl::Span<double> value = Part(n_.values, j, p_.value_head_size);
    const bool past = j < p_.past_length;
    const int64_t row = past ? j : j - p_.past_length;
    if (!past && p_.rotates_keys()) RotateBack(rotations_->angles.KeyAngles(b, row), key.data());
    for (size_t d = 0; p_.values_in_keys && d < value.size(); ++d) key[d] += value[d];
    Store(past ? Role::kDPastKey : Role::kDK, b, h, row, key);
    Store(past ? Role::kDPastValue : Role::kDV, b, h, row, value);
  }

  void Store(Role role, int64_t b, int64_t h, int64_t s, absl::Span<const double> numbers) const {
    if (!Wants(p_, role)) return;
    const MutableTensorView& out = a_.outputs[role];
    for (size_t n = 0; n < numbers.size(); ++n) {
      StoreElement(out.Row(b, h, s), out.dtype, static_cast<int64_t>(n), numbers[n]);
    }
  }

  // Sums a slice of a gradient over the rows that it has a share in.
  void Sum(Role gradient, const Slice& slice, absl::Span<double> sums) {
    Fill(sums);
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t h = 0; h < p_.query_heads; ++h) {
        for (int64_t i = 0; i < p_.query_length; ++i) {
          if (!slice.Includes(b, h, i)) continue;
          if (!GoOn()) return;
          const QueryRow row = RowOf(b, h, i);
          Differentiate(row, b, h, i);
          AddRow(gradient, row, b, i, sums);
        }
      }
    }
    StoreSums(gradient, slice, sums);
  }

  void AddRow(Role gradient, const QueryRow& row, int64_t b, int64_t i, absl::Span<double> sums) {
    if (gradient == Role::kDHeadSink) {
      sums[0] += n_.gradient.sink;
      return;
    }
    const int64_t diagonal = DiagonalKey(p_, a_.key_lengths, b, i);
    for (int64_t j = 0; j < p_.total_keys(); ++j) {
      const double dx = n_.gradient.biased[j];
      const double raw = n_.gradient.raw[j];
      const double weight = n_.gradient.weights[j];
      const auto vector = [&](Role role, int64_t size) {
        return Part(sums, row.RelativeIndex(role, j), size);
      };
      switch (gradient) {
        case Role::kDMask:
        case Role::kDBias:
          if (sums.size() == 1)
            sums[0] += dx;
          else if (j < static_cast<int64_t>(sums.size()))
            sums[j] += dx;
          break;
        case Role::kDRelativeKeys:
          if (raw != 0) row.AddToRelativeKey(raw, vector(Role::kRelativeKeys, p_.head_size));
          break;
        case Role::kDRelativeValues:
          for (int64_t d = 0; weight != 0 && d < p_.value_head_size; ++d) {
            vector(Role::kRelativeValues, p_.value_head_size)[d] += weight * n_.output_gradient[d];
          }
          break;
        case Role::kDAdditiveWeight:
          if (raw != 0) row.AddToAdditiveWeight(j, raw, sums);
          break;
        default: {
          const RelativeEntry entry = RelativeEntryOf(p_, j - diagonal);
          sums[entry.index] += entry.factor * dx;
        }
      }
    }
  }

  void StoreSums(Role gradient, const Slice& slice, absl::Span<const double> sums) const {
    const MutableTensorView& out = a_.outputs[gradient];
    const int64_t h = slice.h_or_first();
    for (size_t n = 0; n < sums.size(); ++n) {
      const auto index = static_cast<int64_t>(n);
      StoreElement(ElementAt(gradient, out, slice.b_or_first(), h, slice.i_or_first(), index),
                   out.dtype, 0, sums[n]);
    }
  }

  // The place of number n of a slice.
  std::byte* ElementAt(Role gradient, const MutableTensorView& out, int64_t b, int64_t h, int64_t i,
                       int64_t n) const {
    switch (gradient) {
      case Role::kDMask:
      case Role::kDBias:
        return out.Row(b, h, i) + n * SizeOf(out.dtype);
      case Role::kDHeadSink:
        return out.Row(h, 0, 0);
      case Role::kDRelativeKeys:
        return out.Row(h, n / p_.head_size, n % p_.head_size);
      case Role::kDRelativeValues:
        return out.Row(h, n / p_.value_head_size, n % p_.value_head_size);
      case Role::kDAdditiveWeight:
        return out.Row(h, n, 0);
      default:
        return RelativeElement(p_, out, b, h, n);
    }
  }

  const Problem& p_;
  const Arguments& a_;
  const Rotations* rotations_;
  Numbers n_;
  const Checkpoint& checkpoint_;
};

}  // namespace

void PlanReferenceBackward(Plan& plan) {
  const Problem& p = plan.problem;
  plan.worker_workspace_bytes = Numbers::Bytes(p);
  if (p.has_rotary()) {
    plan.stages.push_back(Rotations::Tasks(p));
    plan.shared_workspace_bytes = Rotations::SharedBytes(p);
    plan.worker_workspace_bytes += Rotations::WorkerBytes(p);
  }
  plan.stages.push_back(p.batch * p.kv_heads);
  if (SummingTasks(p) > 0) plan.stages.push_back(SummingTasks(p));
  const double pairs = static_cast<double>(p.batch * p.query_heads * p.query_length) *
                       static_cast<double>(p.total_keys());
  plan.flops = 6 * pairs * static_cast<double>(p.head_size + p.value_head_size);
}

void RunReferenceBackward(const Plan& plan, const Arguments& a, std::byte* workspace, int stage,
                          int64_t task, int worker, const Checkpoint& checkpoint) {
  const Problem& p = plan.problem;
  std::byte* const own =
      workspace + plan.shared_workspace_bytes + worker * plan.worker_workspace_bytes;
  const auto run = [&](const Arguments& arguments, const Rotations* rotations) {
    BackwardTask backward(p, arguments, rotations, own, checkpoint);
    stage == 0 ? backward.RunHead(task / p.kv_heads, task % p.kv_heads) : backward.RunSum(task);
  };
  if (!p.has_rotary()) return run(a, nullptr);
  const Rotations rotations(p, workspace);
  if (stage-- == 0) return rotations.RunTask(p, a, task, own, checkpoint);
  run(rotations.stored.WithKeys(a), &rotations);
}

}  // namespace rapt
