// A request's tensors into the packed ones of a graph, and its results back. Both run on the host:
// what cuDNN leaves undefined never reaches a caller.
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

// A problem that a graph computes, and its tensors.
struct Part {
  const Problem* problem;
  const Arguments* arguments;
};

// One run of a graph: which rows of its tensors are whose. Several parts share one run of a ragged
// graph, the batch rows of each behind those of the one before. Borrows everything it is given.
class Staging {
 public:
  // The graph has as many batch rows as the parts, or where it is ragged, more.
  Staging(const SdpaGraph& graph, absl::Span<const Part> parts);

  const ArenaLayout& layout() const { return layout_; }

  // Writes everything that the graph reads into the arena, padding as zeros. Says of each part
  // whether its numbers are such that the device gives the definition's answer. Not so where only a
  // CPU does: with a NaN or an infinity in Q, K or V, which on the device reaches rows that must
  // not see it, or a row whose bias is nowhere above -1e30, which the device takes for masked. In
  // place of such a part there are zeros, so that it does the others no harm.
  std::vector<bool> StageInputs(std::byte* arena) const;

  // Writes the part's outputs, or folds them into the state where its problem folds. Rows that see
  // no key are zeros with an lse of -inf, whatever the device made of them.
  void TakeOutputs(size_t part, const std::byte* arena) const;

 private:
  // Rows of one head in the arena, in bytes.
  struct HeadRows;
  // A tensor of rows.
  struct RowTensor;
  // Of all the graph's queries, or keys, from its first one on.
  struct TokenRun {
    int64_t first = 0;
    int64_t count = 1;

    int64_t end() const { return first + count; }
  };
  struct BatchRow {
    TokenRun queries;
    TokenRun keys;
  };

  RowTensor QueryTensor() const;
  RowTensor KeyTensor() const;
  RowTensor ValueTensor() const;
  RowTensor OutputTensor() const;
  HeadRows RowsOf(const RowTensor& tensor, const BatchRow& row, int64_t h) const;
  bool StagePart(size_t part, std::byte* arena) const;
  void ClearRow(const BatchRow& row, std::byte* arena) const;
  void StageLengths(std::byte* arena) const;

  const SdpaGraph& graph_;
  const absl::Span<const Part> parts_;
  std::vector<BatchRow> rows_;
  std::vector<size_t> first_rows_;  // of the parts
  ArenaLayout layout_;
};

// The outputs of a problem none of whose rows sees a key, as Staging::TakeOutputs() writes them.
void WriteNothingSeen(const Problem& problem, const Arguments& arguments);

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_STAGING_H_
