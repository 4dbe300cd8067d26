// Moves the rows of a run over pages between host and device.
#ifndef RAPT_ATTENTION_CUDNN_PAGED_STAGING_H_
#define RAPT_ATTENTION_CUDNN_PAGED_STAGING_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "attention/cudnn/device.h"
#include "attention/cudnn/graph.h"
#include "attention/cudnn/page_pool.h"
#include "attention/mechanism/softmax/ragged_attention.h"
#include "attention/problem.h"

namespace rapt::cudnn {

// An item of a run, a batch row of its graph.
struct PagedItem {
  int64_t item = 0;       // of the call
  int64_t first_row = 0;  // of the call's rows
  int64_t rows = 0;
  TokenRange seen = {};  // some row sees each; empty: the item is not sent
};

// Borrows all arguments.
class PagedStaging {
 public:
  // REQUIRES: the graph has at least as many batch rows as there are items, and room for each; an
  // item that is sent has not failed.
  PagedStaging(const RaggedCall& call, const RaggedSource& source, const SdpaGraph& graph,
               absl::Span<const PagedItem> items);

  const ArenaLayout& layout() const { return layout_; }
  // The pages of all items that are sent, in order. Empty: there is nothing to compute.
  absl::Span<const PageUse> uses() const { return uses_; }

  // Copies rows of pages to the device, through the lane's host memory. Returns the device's error.
  absl::Status SendRows(absl::Span<MissingRows> missing, Lane& lane) const;

  // Writes the queries, lengths and page tables into the arena. Returns false if a query has a
  // number that is not finite. REQUIRES: the lease is that of uses(), which are not empty.
  bool StageInputs(const Arguments& arguments, const PagePool::Lease& lease,
                   std::byte* arena) const;

  // Writes the items' rows of Y and lse: zeros and -inf if they see no token. `arena` may be null
  // if no item is sent.
  void TakeOutputs(const Arguments& arguments, const std::byte* arena) const;

 private:
  class Sender;

  void SendPage(MissingRows& missing, Sender& sender) const;
  void StageTables(const PagePool::Lease& lease, std::byte* arena) const;
  // Return the index of row r of head h of item n among the rows of the graph's Q, O or LSE, and of
  // the call's.
  int64_t RowOf(size_t n, int64_t h, int64_t r) const {
    return (static_cast<int64_t>(n) * graph_.query_heads + h) * graph_.query_length + r;
  }
  int64_t CallRow(const PagedItem& item, int64_t h, int64_t r, bool heads_first) const;

  const RaggedCall& call_;
  const RaggedSource& source_;
  const SdpaGraph& graph_;
  const absl::Span<const PagedItem> items_;
  int64_t call_rows_ = 0;
  std::vector<PageUse> uses_;
  std::vector<size_t> first_use_;    // of each item
  std::vector<size_t> item_of_use_;  // index of the item
  const ArenaLayout layout_;
};

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_PAGED_STAGING_H_
