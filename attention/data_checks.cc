#include "attention/data_checks.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/invalid.h"

namespace rapt {
namespace {

// Indices per task: tens of microseconds.
constexpr int64_t kIndicesPerTask = 32 * 1024;

bool HasPositions(const Problem& p) { return p.has_position_ids || p.has_key_position_ids; }

int64_t QueriesPerTask(const Problem& p) {
  return std::max<int64_t>(1, kIndicesPerTask / std::max<int64_t>(1, p.selected->count));
}

int64_t TasksPerHead(const Problem& p) {
  const int64_t queries = QueriesPerTask(p);
  return p.query_length / queries + (p.query_length % queries != 0 ? 1 : 0);
}

// Finds errors in the selected indices.
class IndexCheck {
 public:
  IndexCheck(const Problem& p, const TensorView& indices, const FieldNames& names)
      : keys_(p.total_keys()),
        indices_(indices),
        name_(names[Role::kSelectedIndices]),
        seen_((keys_ + 63) / 64) {}

  absl::Status Run(int64_t b, int64_t h, int64_t i) {
    const std::byte* row = indices_.Row(b, h, i);
    bool ascends = true;
    int64_t last = -1;
    for (int64_t n = 0; n < indices_.dims[3]; ++n) {
      const int64_t key = Load(row, n);
      if (key == -1) continue;
      if (key < -1 || key >= keys_) {
        return Error(b, h, i, n, absl::StrCat("; it must be -1 or from 0 to ", keys_ - 1));
      }
      ascends = ascends && key > last;
      last = key;
    }
    return ascends ? absl::OkStatus() : FindDuplicate(b, h, i);
  }

 private:
  absl::Status FindDuplicate(int64_t b, int64_t h, int64_t i) {
    const std::byte* row = indices_.Row(b, h, i);
    int64_t n = 0;
    for (; n < indices_.dims[3]; ++n) {
      const int64_t key = Load(row, n);
      if (key == -1) continue;
      const uint64_t bit = uint64_t{1} << (key % 64);
      if ((seen_[key / 64] & bit) != 0) break;
      seen_[key / 64] |= bit;
    }
    if (n < indices_.dims[3]) {
      return Error(b, h, i, n, ", which the row already has; a key may be selected once");
    }
    for (n = 0; n < indices_.dims[3]; ++n) {
      const int64_t key = Load(row, n);
      if (key >= 0) seen_[key / 64] = 0;
    }
    return absl::OkStatus();
  }

  int64_t Load(const std::byte* row, int64_t n) const {
    int32_t key;
    std::memcpy(&key, row + n * indices_.strides[3] * int64_t{sizeof(key)}, sizeof(key));
    return key;
  }

  absl::Status Error(int64_t b, int64_t h, int64_t i, int64_t n, absl::string_view why) const {
    return Invalid(name_, "[", b, ", ", h, ", ", i, ", ", n, "] is ",
                   Load(indices_.Row(b, h, i), n), why);
  }

  const int64_t keys_;
  const TensorView& indices_;
  const absl::string_view name_;
  std::vector<uint64_t> seen_;  // a bit for each key; all 0 between rows
};

}  // namespace

int64_t DataChecks(const Problem& p) {
  const int64_t tasks = HasPositions(p) ? 1 : 0;
  if (!p.selected || p.selected->count == 0) return tasks;
  return tasks + p.batch * p.selected->heads * TasksPerHead(p);
}

absl::Status CheckData(const Problem& p, const Arguments& a, int64_t task,
                       const FieldNames& names) {
  if (HasPositions(p) && task-- == 0) return ValidatePositions(p, a, names);
  const int64_t tasks = TasksPerHead(p);
  const int64_t b = task / tasks / p.selected->heads;
  const int64_t h = task / tasks % p.selected->heads;
  const int64_t begin = task % tasks * QueriesPerTask(p);
  const int64_t end = std::min(begin + QueriesPerTask(p), p.query_length);
  IndexCheck check(p, a.inputs[Role::kSelectedIndices], names);
  absl::Status status;
  for (int64_t i = begin; i < end && status.ok(); ++i) status = check.Run(b, h, i);
  return status;
}

absl::Status CheckData(const Problem& p, const Arguments& a, const FieldNames& names) {
  const int64_t tasks = DataChecks(p);
  absl::Status status;
  for (int64_t task = 0; task < tasks && status.ok(); ++task) status = CheckData(p, a, task, names);
  return status;
}

}  // namespace rapt
