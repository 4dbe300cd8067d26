// Packs a request's tensors for a graph and unpacks its results, on the host. Data that cuDNN
// leaves undefined never reaches a caller.
#ifndef RAPT_ATTENTION_CUDNN_STAGING_H_
#define RAPT_ATTENTION_CUDNN_STAGING_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "attention/cudnn/device.h"
#include "attention/cudnn/graph.h"
#include "attention/problem.h"

namespace rapt::cudnn {

// Returns whether no number is NaN or infinite. REQUIRES: the type is FP16, BF16 or FP32.
bool AllFinite(const std::byte* data, DType dtype, int64_t count);

// A problem that a graph computes, with its tensors.
struct Part {
  const Problem* problem;
  const Arguments* arguments;
};

// One run of a graph: assigns the rows of its tensors to parts. Several parts can share one run of
// a ragged graph; their batch rows are contiguous. Borrows all arguments.
class Staging {
 public:
  // REQUIRES: the graph has as many batch rows as all parts together, or more if ragged.
  Staging(const SdpaGraph& graph, absl::Span<const Part> parts);

  const ArenaLayout& layout() const { return layout_; }

  // Writes everything that the graph reads into the arena, padded with zeros. Returns for each part
  // whether the device computes it according to the definition. It does not if Q, K, V, Y or dY
  // contains a NaN or an infinity, which on the device reaches rows that must not see it, if the
  // bias of a row never exceeds -1e30, which the device treats as masked, or if the lse of a row
  // that sees a key is not finite. Such a part is replaced by zeros, so that it cannot affect the
  // others.
  std::vector<bool> StageInputs(std::byte* arena) const;

  // Writes the part's outputs, or folds them into the state if its problem folds. Rows that see no
  // key get zeros and an lse of -inf, regardless of what the device computed, and so do the
  // gradients of what was not sent.
  void TakeOutputs(size_t part, const std::byte* arena) const;

 private:
  // Rows of one head in the arena, in bytes.
  struct HeadRows;
  // A tensor of rows.
  struct RowTensor;
  // A range of the graph's queries or keys, counted over all batch rows.
  struct TokenRange {
    int64_t first = 0;
    int64_t count = 1;

    int64_t end() const { return first + count; }
  };
  struct BatchRow {
    TokenRange queries;
    TokenRange keys;
  };

  RowTensor QueryTensor() const;
  RowTensor KeyTensor() const;
  RowTensor ValueTensor() const;
  RowTensor OutputTensor() const;
  HeadRows RowsOf(const RowTensor& tensor, const BatchRow& row, int64_t h) const;
  bool StagePart(size_t part, std::byte* arena) const;
  bool StageLse(const Part& part, std::byte* arena) const;
  void ClearRow(const BatchRow& row, std::byte* arena) const;
  void StageLengths(std::byte* arena) const;
  void TakeGradients(const Part& part, const std::byte* arena) const;

  const SdpaGraph& graph_;
  const absl::Span<const Part> parts_;
  std::vector<BatchRow> rows_;
  std::vector<size_t> first_rows_;  // per part
  ArenaLayout layout_;
};

// Writes the outputs of a problem in which no row sees a key, as Staging::TakeOutputs() does.
void WriteFullyMasked(const Problem& problem, const Arguments& arguments);

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_STAGING_H_
