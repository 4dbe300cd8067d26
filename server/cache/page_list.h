// The keys and values of one layer of a cache, in pages.
#ifndef RAPT_SERVER_CACHE_PAGE_LIST_H_
#define RAPT_SERVER_CACHE_PAGE_LIST_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "attention/mechanism/softmax/ragged_attention.h"
#include "attention/q8_0.h"
#include "attention/tensor_view.h"
#include "base/round_up.h"
#include "server/cache/arena.h"

namespace rapt::cache {

// What an entry in a table of pages counts towards the arena's limit, with the record of its page.
inline constexpr int64_t kPageTableBytes = 128;

// Tokens of a page. Equal to the block of keys of the kernels, which then never joins two pages.
inline constexpr int64_t kPageTokens = 64;

// A token's key and value: [Hkv, D] and [Hkv, Dv].
struct TokenShape {
  int64_t kv_heads = 0;
  int64_t head_size = 0;
  int64_t value_head_size = 0;
  DType dtype = DType::kFloat32;  // as callers send them
  bool q8_0 = false;              // they are stored as rows of attention/q8_0.h, not in `dtype`

  // Return the bytes of one head's key or value, and of all heads', as they are stored.
  int64_t key_row_bytes() const { return RowBytes(head_size); }
  int64_t value_row_bytes() const { return RowBytes(value_head_size); }
  int64_t key_bytes() const { return kv_heads * key_row_bytes(); }
  int64_t value_bytes() const { return kv_heads * value_row_bytes(); }
  // A page is [Hkv, 64] rows of keys, then [Hkv, 64] rows of values.
  int64_t value_offset() const { return kPageTokens * key_bytes(); }
  int64_t page_bytes() const { return value_offset() + kPageTokens * value_bytes(); }

  bool operator==(const TokenShape&) const = default;

 private:
  int64_t RowBytes(int64_t size) const {
    return q8_0 ? q8_0::RowBytes(size) : size * SizeOf(dtype);
  }
};

// Pages in the order of their tokens. Pages may be appended while snapshots read those before.
class PageTable;

// The first tokens of a list at one time. Holds the pages, which never change where it reads:
// neither appends, Truncate() nor the end of the list affects it. Immutable and thread-safe; cheap
// to copy. The views of a snapshot refer to it.
class Snapshot {
 public:
  int64_t length() const { return length_; }
  // The memory of each page, which identifies it while a snapshot holds it; null: evicted.
  absl::Span<const std::byte* const> pages() const { return key_pages_.pages; }
  // The number of each page's content, see RaggedSource::page_ids(). REQUIRES: length() > 0.
  absl::Span<const uint64_t> page_ids() const;
  // Return views [1, Hkv, length, D] and [1, Hkv, length, Dv]; in 8 bits, views of INT8 whose last
  // axis is a row of q8_0.h. The pages of evicted tokens are null and must not be read. REQUIRES:
  // length() > 0.
  TensorView keys() const;
  TensorView values() const;
  // Copies tokens, as they are stored, to keys [count, Hkv, D] and values [count, Hkv, Dv],
  // row-major. REQUIRES: 0 <= at, at + count <= length(), and none of them is evicted.
  void CopyTokens(int64_t at, int64_t count, std::byte* keys, std::byte* values) const;

 private:
  friend class PageList;
  Snapshot(std::shared_ptr<const PageTable> table, const TokenShape& shape, int64_t length);
  TensorView View(const PagedRows& pages, int64_t row_bytes) const;

  std::shared_ptr<const PageTable> table_;
  TokenShape shape_;
  int64_t length_;
  PagedRows key_pages_, value_pages_;
};

// Tokens are appended at the end. A row of a page is written once, by the list that took the page:
// a list that shares its last page, or that was truncated within it, copies that page before it
// appends. Therefore forks and snapshots need no lock to read.
//
// Not thread-safe, apart from snapshots. Movable. The arena outlives the list and its snapshots.
class PageList {
 public:
  PageList(Arena& arena, const TokenShape& shape) : arena_(&arena), shape_(shape) {}
  PageList(PageList&&) = default;
  PageList& operator=(PageList&&) = default;

  int64_t length() const { return length_; }
  const TokenShape& shape() const { return shape_; }
  // Returns the bytes of the pages that it reaches, with those reserved.
  int64_t bytes() const;
  // Of them, the bytes of pages that other lists or snapshots of them reach as well.
  int64_t shared_bytes() const;
  int64_t reserved_bytes() const { return reserved_pages() * shape_.page_bytes(); }
  // The tokens that Evict() freed, whole pages.
  const TokenRange& evicted() const { return evicted_; }
  // Returns the number of pages of the first `length` tokens, evicted ones included.
  static int64_t PagesOf(int64_t length) { return CeilDiv(length, kPageTokens); }

  // Takes the pages that `count` more tokens need. Returns ResourceExhausted, as Arena::Take(),
  // and has no effect then. REQUIRES: count >= 0.
  absl::Status Reserve(int64_t count);

  // Returns the bytes of the pages that Reserve() would take; nullopt if they overflow, and
  // Reserve() fails. REQUIRES: as for Reserve(), and count <= the arena's capacity.
  std::optional<int64_t> MissingBytes(int64_t count) const;
  int64_t reserved_pages() const { return static_cast<int64_t>(reserved_.size()); }
  // Gives back reserved pages beyond the first `pages`. REQUIRES: pages <= reserved_pages().
  void KeepReserved(int64_t pages) { reserved_.resize(static_cast<size_t>(pages)); }

  // Appends tokens: keys [count, Hkv, D] and values [count, Hkv, Dv], row-major, as they are
  // stored. REQUIRES: Reserve(count) succeeded since the last change of the list.
  void Append(int64_t count, const std::byte* keys, const std::byte* values);

  // Returns whether the tokens from `at` on are these, to the bit; evicted tokens always are.
  // REQUIRES: at >= 0, at + count <= length().
  bool Holds(int64_t at, int64_t count, const std::byte* keys, const std::byte* values) const;

  // Keeps the first `length` tokens, and enough of the freed pages to grow to `reserve_tokens`.
  // REQUIRES: 0 <= length <= this->length(); the page of token `length` is not evicted, unless the
  // token is its first one; ReserveToTruncate() succeeded with these arguments since the last
  // change of the list, or reserve_tokens is 0.
  void Truncate(int64_t length, int64_t reserve_tokens = 0);
  // Takes the pages that Truncate() will not find among those that it frees. ResourceExhausted as
  // Reserve(). REQUIRES: as for Truncate(); reserve_tokens was reserved before.
  absl::Status ReserveToTruncate(int64_t length, int64_t reserve_tokens);

  // Frees the pages whose tokens are all in the range. REQUIRES: the range is within the tokens and
  // begins where those of earlier calls did.
  void Evict(const TokenRange& tokens);

  // Adds `count` tokens that are evicted. Returns ResourceExhausted if the arena has no memory for
  // the table of their pages, and has no effect then. REQUIRES: none is evicted; length() and
  // `count` are multiples of kPageTokens.
  absl::Status Skip(int64_t count);

  // Returns a list with the first `length` tokens, which shares their pages. REQUIRES: as for
  // Truncate().
  PageList Fork(int64_t length) const;
  Snapshot Take(int64_t length) const;

 private:
  int64_t MissingPages(int64_t count) const;
  // The pages that a list of `length` tokens, which must copy its last page, needs to grow.
  static int64_t PagesToGrow(int64_t length, int64_t tokens);
  // Whether only this list has page n, so that its memory may be used again.
  bool IsAlone(int64_t n) const;
  // Calls visit(row of a page, offset in the tokens' tensor, bytes) for each row of keys or values.
  template <typename Visit>
  void ForEachRow(int64_t at, int64_t count, bool is_value, const Visit& visit) const;
  std::byte* RowOf(int64_t token, int64_t head, bool is_value) const;
  int64_t pages() const { return PagesOf(length_); }
  bool MustCopyLastPage() const { return length_ % kPageTokens != 0 && !owns_last_page_; }
  // Returns the evicted ones of the first `length` tokens.
  TokenRange EvictedOf(int64_t length) const;
  // Makes `capacity` pages fit into a table that only this list appends to.
  void RenewTable(int64_t pages, int64_t capacity);
  // Copies the entries of the first `pages` pages, and uses the table from now on.
  void UseTable(int64_t pages, std::shared_ptr<PageTable> table);
  absl::Status TakeMore(int64_t pages);
  Arena::Page TakeReserved();
  // Copies the first rows of a page.
  void CopyTokens(const std::byte* from, int64_t count, std::byte* to) const;

  Arena* arena_;
  TokenShape shape_;
  int64_t length_ = 0;
  TokenRange evicted_;
  bool owns_last_page_ = false;  // may write the rows from `length_` on
  bool owns_table_ = false;      // may write the entries from pages() on
  std::shared_ptr<PageTable> table_;
  std::vector<Arena::Page> reserved_;
};

}  // namespace rapt::cache

#endif  // RAPT_SERVER_CACHE_PAGE_LIST_H_
