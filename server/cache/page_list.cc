#include "server/cache/page_list.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/checked_math.h"
#include "base/status_macros.h"

namespace rapt::cache {

// Entries are written once, by one list. A snapshot reads those that existed when it was taken.
class PageTable {
 public:
  // `charge` is of the bytes that the table takes.
  PageTable(Arena::Charge charge, int64_t capacity)
      : charge_(std::move(charge)),
        pages_(static_cast<size_t>(capacity)),
        memory_(static_cast<size_t>(capacity)),
        ids_(static_cast<size_t>(capacity)) {}

  int64_t capacity() const { return static_cast<int64_t>(pages_.size()); }
  // Sets an entry to a page in use. Entries that are not set are evicted ones.
  void Set(int64_t n, std::shared_ptr<Arena::Page> page, uint64_t id) {
    memory_[n] = page->bytes().data();
    pages_[n] = std::move(page);
    ids_[n] = id;
  }
  // Sets an entry to a page without content yet.
  void SetNew(int64_t n, Arena::Page page) {
    static std::atomic<uint64_t> last_id{0};
    Set(n, std::make_shared<Arena::Page>(std::move(page)), ++last_id);
  }
  const std::shared_ptr<Arena::Page>& page(int64_t n) const { return pages_[n]; }
  uint64_t id(int64_t n) const { return ids_[n]; }
  absl::Span<const uint64_t> FirstIds(int64_t count) const {
    return {ids_.data(), static_cast<size_t>(count)};
  }
  absl::Span<const std::byte* const> First(int64_t count) const {
    return {memory_.data(), static_cast<size_t>(count)};
  }
  std::byte* memory(int64_t n) const { return pages_[n]->bytes().data(); }

 private:
  const Arena::Charge charge_;
  std::vector<std::shared_ptr<Arena::Page>> pages_;
  std::vector<const std::byte*> memory_;
  std::vector<uint64_t> ids_;  // of the content of each page
};

Snapshot::Snapshot(std::shared_ptr<const PageTable> table, const TokenShape& shape, int64_t length)
    : table_(std::move(table)), shape_(shape), length_(length) {
  if (length_ == 0) return;
  key_pages_.pages = table_->First(PageList::PagesOf(length_));
  key_pages_.page_rows = kPageTokens;
  value_pages_ = key_pages_;
  value_pages_.offset = shape_.value_offset();
}

TensorView Snapshot::View(const PagedRows& pages, int64_t row_bytes) const {
  TensorView view;
  view.dtype = shape_.q8_0 ? DType::kInt8 : shape_.dtype;
  const int64_t size = row_bytes / SizeOf(view.dtype);
  view.dims = {1, shape_.kv_heads, length_, size};
  view.strides = {0, kPageTokens * size, size, 1};
  view.pages = &pages;
  return view;
}

absl::Span<const uint64_t> Snapshot::page_ids() const {
  return table_->FirstIds(PageList::PagesOf(length_));
}

TensorView Snapshot::keys() const { return View(key_pages_, shape_.key_row_bytes()); }
TensorView Snapshot::values() const { return View(value_pages_, shape_.value_row_bytes()); }

void Snapshot::CopyTokens(int64_t at, int64_t count, std::byte* keys, std::byte* values) const {
  const auto copy = [&](int64_t begin, int64_t rows, int64_t offset, int64_t bytes, std::byte* to) {
    const auto row_bytes = static_cast<size_t>(bytes);
    const size_t token_bytes = row_bytes * static_cast<size_t>(shape_.kv_heads);
    const std::byte* page = key_pages_.pages[begin / kPageTokens] + offset;
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      const std::byte* from =
          page + static_cast<size_t>(head * kPageTokens + begin % kPageTokens) * row_bytes;
      std::byte* row = to + static_cast<size_t>(head) * row_bytes;
      for (int64_t n = 0; n < rows; ++n, from += row_bytes, row += token_bytes) {
        std::memcpy(row, from, row_bytes);
      }
    }
  };
  for (int64_t done = 0; done < count;) {
    const int64_t begin = at + done;
    const int64_t rows = std::min(count - done, kPageTokens - begin % kPageTokens);
    copy(begin, rows, 0, shape_.key_row_bytes(), keys + done * shape_.key_bytes());
    copy(begin, rows, shape_.value_offset(), shape_.value_row_bytes(),
         values + done * shape_.value_bytes());
    done += rows;
  }
}

int64_t PageList::bytes() const {
  const int64_t evicted_pages = (evicted_.end - evicted_.begin) / kPageTokens;
  return (pages() - evicted_pages + reserved_pages()) * shape_.page_bytes();
}

bool PageList::IsAlone(int64_t n) const {
  return table_.use_count() == 1 && table_->page(n).use_count() == 1;
}

int64_t PageList::shared_bytes() const {
  int64_t shared = 0;
  for (int64_t n = 0; n < pages(); ++n) {
    if (table_->page(n) != nullptr && !IsAlone(n)) ++shared;
  }
  return shared * shape_.page_bytes();
}

int64_t PageList::MissingPages(int64_t count) const {
  if (count == 0) return 0;
  const int64_t needed = PagesOf(length_ + count) - pages() + (MustCopyLastPage() ? 1 : 0);
  return std::max<int64_t>(0, needed - reserved_pages());
}

std::optional<int64_t> PageList::MissingBytes(int64_t count) const {
  return CheckedMul(MissingPages(count), shape_.page_bytes());
}

absl::Status PageList::Reserve(int64_t count) {
  // Both terms fit: a length is bounded by the arena, and a larger count is refused before.
  if (count > arena_->capacity_bytes()) {
    return arena_->Take(shape_.page_bytes(), count).status();
  }
  const int64_t missing = MissingPages(count);
  if (missing == 0) return absl::OkStatus();
  return TakeMore(missing);
}

absl::Status PageList::TakeMore(int64_t pages) {
  RAPT_ASSIGN_OR_RETURN(std::vector<Arena::Page> taken, arena_->Take(shape_.page_bytes(), pages));
  for (Arena::Page& page : taken) reserved_.push_back(std::move(page));
  return absl::OkStatus();
}

Arena::Page PageList::TakeReserved() {
  Arena::Page page = std::move(reserved_.back());
  reserved_.pop_back();
  return page;
}

void PageList::RenewTable(int64_t pages, int64_t capacity) {
  UseTable(pages,
           std::make_shared<PageTable>(arena_->ChargeAnyway(capacity * kPageTableBytes), capacity));
}

void PageList::UseTable(int64_t pages, std::shared_ptr<PageTable> table) {
  for (int64_t n = 0; n < pages; ++n) {
    if (!evicted_.Overlaps({n * kPageTokens, (n + 1) * kPageTokens})) {
      table->Set(n, table_->page(n), table_->id(n));
    }
  }
  table_ = std::move(table);
  owns_table_ = true;
}

// Leaves out the other rows, which the list that took the page may write now.
void PageList::CopyTokens(const std::byte* from, int64_t count, std::byte* to) const {
  const auto copy = [&](int64_t offset, int64_t row_bytes) {
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      const int64_t begin = offset + head * kPageTokens * row_bytes;
      std::memcpy(to + begin, from + begin, static_cast<size_t>(count * row_bytes));
    }
  };
  copy(0, shape_.key_row_bytes());
  copy(shape_.value_offset(), shape_.value_row_bytes());
}

void PageList::Append(int64_t count, const std::byte* keys, const std::byte* values) {
  if (count == 0) return;
  const int64_t old_pages = pages();
  const int64_t new_pages = PagesOf(length_ + count);
  const bool copies = MustCopyLastPage();
  if (copies || !owns_table_ || table_->capacity() < new_pages) {
    RenewTable(old_pages, std::max(new_pages, 2 * old_pages));
  }
  if (copies) {
    Arena::Page page = TakeReserved();
    CopyTokens(table_->memory(old_pages - 1), length_ % kPageTokens, page.bytes().data());
    table_->SetNew(old_pages - 1, std::move(page));
  }
  for (int64_t n = old_pages; n < new_pages; ++n) {
    table_->SetNew(n, TakeReserved());
  }
  owns_last_page_ = true;
  const auto write = [](const std::byte* from) {
    return [from](std::byte* row, int64_t offset, int64_t bytes) {
      std::memcpy(row, from + offset, static_cast<size_t>(bytes));
    };
  };
  ForEachRow(length_, count, /*is_value=*/false, write(keys));
  ForEachRow(length_, count, /*is_value=*/true, write(values));
  length_ += count;
}

bool PageList::Holds(int64_t at, int64_t count, const std::byte* keys,
                     const std::byte* values) const {
  if (evicted_.Overlaps({at, at + count})) {
    const int64_t before = std::max<int64_t>(0, evicted_.begin - at);
    const int64_t until = std::min(count, evicted_.end - at);  // the first token after them
    return Holds(at, before, keys, values) &&
           Holds(at + until, count - until, keys + until * shape_.key_bytes(),
                 values + until * shape_.value_bytes());
  }
  bool same = true;
  const auto compare = [&same](const std::byte* with) {
    return [&same, with](const std::byte* row, int64_t offset, int64_t bytes) {
      same = same && std::memcmp(row, with + offset, static_cast<size_t>(bytes)) == 0;
    };
  };
  ForEachRow(at, count, /*is_value=*/false, compare(keys));
  ForEachRow(at, count, /*is_value=*/true, compare(values));
  return same;
}

std::byte* PageList::RowOf(int64_t token, int64_t head, bool is_value) const {
  const int64_t row_bytes = is_value ? shape_.value_row_bytes() : shape_.key_row_bytes();
  const int64_t row = head * kPageTokens + token % kPageTokens;
  return table_->memory(token / kPageTokens) + (is_value ? shape_.value_offset() : 0) +
         row * row_bytes;
}

template <typename Visit>
void PageList::ForEachRow(int64_t at, int64_t count, bool is_value, const Visit& visit) const {
  const int64_t row_bytes = is_value ? shape_.value_row_bytes() : shape_.key_row_bytes();
  for (int64_t token = 0; token < count; ++token) {
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      visit(RowOf(at + token, head, is_value), (token * shape_.kv_heads + head) * row_bytes,
            row_bytes);
    }
  }
}

int64_t PageList::PagesToGrow(int64_t length, int64_t tokens) {
  if (tokens <= length) return 0;
  return PagesOf(tokens) - PagesOf(length) + (length % kPageTokens != 0 ? 1 : 0);
}

absl::Status PageList::ReserveToTruncate(int64_t length, int64_t reserve_tokens) {
  if (length == length_) return absl::OkStatus();
  int64_t missing = PagesToGrow(length, reserve_tokens) - reserved_pages();
  for (int64_t n = PagesOf(length); n < pages() && missing > 0; ++n) {
    if (table_->page(n) != nullptr && IsAlone(n)) --missing;
  }
  return missing > 0 ? TakeMore(missing) : absl::OkStatus();
}

void PageList::Truncate(int64_t length, int64_t reserve_tokens) {
  if (length == length_) return;
  const int64_t wanted = PagesToGrow(length, reserve_tokens);
  for (int64_t n = PagesOf(length); n < pages() && reserved_pages() < wanted; ++n) {
    if (table_->page(n) != nullptr && IsAlone(n)) reserved_.push_back(std::move(*table_->page(n)));
  }
  length_ = length;
  owns_last_page_ = false;
  evicted_ = EvictedOf(length);
  if (length == 0) {
    table_ = nullptr;
    owns_table_ = false;
    return;
  }
  RenewTable(pages(), pages());
}

void PageList::Evict(const TokenRange& tokens) {
  const int64_t begin = PagesOf(tokens.begin);
  const int64_t end = tokens.end / kPageTokens;
  if (begin >= end || end * kPageTokens <= evicted_.end) return;
  evicted_ = {begin * kPageTokens, end * kPageTokens};
  // A new table, because snapshots read the old one.
  RenewTable(pages(), table_->capacity());
}

absl::Status PageList::Skip(int64_t count) {
  const int64_t length = length_ + count;
  if (length > arena_->capacity_bytes()) {
    return arena_->Take(shape_.page_bytes(), length).status();
  }
  const int64_t capacity = PagesOf(length);
  RAPT_ASSIGN_OR_RETURN(Arena::Charge charge, arena_->TryCharge(capacity * kPageTableBytes));
  UseTable(pages(), std::make_shared<PageTable>(std::move(charge), capacity));
  evicted_ = {length_, length_ + count};
  length_ = length;
  return absl::OkStatus();
}

TokenRange PageList::EvictedOf(int64_t length) const {
  if (length <= evicted_.begin) return {};
  return {evicted_.begin, std::min(evicted_.end, length)};
}

PageList PageList::Fork(int64_t length) const {
  PageList fork(*arena_, shape_);
  fork.length_ = length;
  if (length == 0) return fork;
  fork.evicted_ = EvictedOf(length);
  fork.table_ = table_;
  // Of its own, so that it does not keep pages beyond its length.
  fork.RenewTable(fork.pages(), fork.pages());
  return fork;
}

Snapshot PageList::Take(int64_t length) const { return Snapshot(table_, shape_, length); }

}  // namespace rapt::cache
