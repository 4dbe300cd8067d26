// Sequences whose keys and values lie in numbered pages, as those of resident caches do, and calls
// that attend to them.
#ifndef RAPT_TESTS_SUPPORT_PAGED_CACHES_H_
#define RAPT_TESTS_SUPPORT_PAGED_CACHES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/mechanism/softmax/ragged_attention.h"
#include "tests/support/tensor.h"

namespace rapt::test {

// The items of a call are the first sequences.
class PagedCaches final : public RaggedSource {
 public:
  static constexpr int64_t kPageTokens = 64;

  // Of a call's type and sizes. Numbers are random in [-2, 2].
  PagedCaches(const RaggedCall& shape, uint64_t seed);

  // Adds a sequence, with random tokens or with the first ones of another, whose pages it shares.
  void Add(int64_t tokens);
  void Fork(int64_t sequence, int64_t tokens);
  // Adds random tokens, or one of these numbers. A last page that another sequence has, too, is
  // copied first.
  void Append(int64_t sequence, int64_t tokens);
  void AppendNumber(int64_t sequence, double number);
  // Replaces the tokens from `tokens` on at the next Append().
  void Truncate(int64_t sequence, int64_t tokens);

  int64_t length(int64_t sequence) const { return sequences_[sequence]->keys.dims()[2]; }
  // [1, Hkv, length, size]
  const Tensor& all_keys(int64_t sequence) const { return sequences_[sequence]->keys; }
  const Tensor& all_values(int64_t sequence) const { return sequences_[sequence]->values; }

  TensorView keys(int64_t item) const override { return View(item, /*is_value=*/false); }
  TensorView values(int64_t item) const override { return View(item, /*is_value=*/true); }
  bool has_failed(int64_t item) const override { return item == failed; }
  absl::Span<const uint64_t> page_ids(int64_t item) const override { return sequences_[item]->ids; }

  int64_t failed = -1;  // an item

 private:
  struct Sequence {
    Tensor keys, values;
    std::vector<std::shared_ptr<std::vector<std::byte>>> pages;
    std::vector<uint64_t> ids;
    std::vector<const std::byte*> memory;
    PagedRows key_rows, value_rows;
    bool owns_last_page = false;
  };

  int64_t PageBytes(bool with_values) const;
  void AppendTensors(Sequence& sequence, const Tensor& keys, const Tensor& values);
  // Makes a page of the sequence, at the end or in the place of its last one.
  void TakePage(Sequence& sequence, bool replaces);
  TensorView View(int64_t item, bool is_value) const;

  const DType dtype_;
  const int64_t kv_heads_, head_size_, value_head_size_;
  Rng rng_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
};

// Returns a call without items: 4 query heads, 2 key heads, head sizes 16 and 8, with lse.
RaggedCall SmallShape(DType dtype = DType::kFloat16);
// Returns items of the first sequences, each of so many rows that see its last tokens.
std::vector<RaggedItem> LastRows(const PagedCaches& caches, const std::vector<int64_t>& rows);

struct PagedResult {
  Tensor queries;        // [1, rows, Hq, D]
  Tensor y;              // [1, rows, Hq, Dv]
  Tensor lse;            // [1, rows, Hq, 1]
  std::string backends;  // NamesOf() the routing after the run
};

// Runs the call on random queries, on as many threads as the plan has.
PagedResult RunPaged(const RaggedCall& call, const PagedCaches& caches, const PlanOptions& options);

// Compares each item with the oracle: zeros and -inf if it has failed or sees no token. REQUIRES:
// each item has one row, or is bottom-right.
void ExpectMatches(const RaggedCall& call, const PagedCaches& caches, const PagedResult& result);

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_PAGED_CACHES_H_
