#include "attention/cudnn/paged_staging.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "attention/cudnn/staging.h"
#include "base/round_up.h"

namespace rapt::cudnn {
namespace {

void PutAt(std::byte* place, int64_t index, int64_t value) {
  const auto number = static_cast<int32_t>(value);
  std::memcpy(place + index * static_cast<int64_t>(sizeof(number)), &number, sizeof(number));
}

}  // namespace

// Collects copies in the lane's host memory and sends them when it is full.
class PagedStaging::Sender {
 public:
  explicit Sender(Lane& lane) : lane_(lane) {}

  // Returns room in host memory; null after an error. REQUIRES: the memory is that large.
  std::byte* Take(int64_t bytes) {
    if (used_ + bytes > static_cast<int64_t>(lane_.host().size())) Flush().IgnoreError();
    if (!status_.ok()) return nullptr;
    std::byte* const taken = lane_.host().data() + used_;
    used_ += bytes;
    return taken;
  }

  // Adds rows at `from`, in the room that was taken last.
  void Add(const std::byte* from, PageCopy copy) {
    copy.from = from - lane_.host().data();
    copies_.push_back(copy);
  }

  absl::Status Flush() {
    if (status_.ok() && !copies_.empty()) status_ = lane_.SendPages(copies_);
    copies_.clear();
    used_ = 0;
    return status_;
  }

 private:
  Lane& lane_;
  int64_t used_ = 0;
  std::vector<PageCopy> copies_;
  absl::Status status_;
};

PagedStaging::PagedStaging(const RaggedCall& call, const RaggedSource& source,
                           const SdpaGraph& graph, absl::Span<const PagedItem> items)
    : call_(call), source_(source), graph_(graph), items_(items), layout_(LayOut(graph)) {
  for (const RaggedItem& item : call.items) call_rows_ += item.rows;
  const int64_t page_rows = graph.pages->rows;
  for (size_t n = 0; n < items.size(); ++n) {
    first_use_.push_back(uses_.size());
    const TokenRange& seen = items[n].seen;
    if (seen.empty()) continue;
    const absl::Span<const uint64_t> ids = source.page_ids(items[n].item);
    for (int64_t page = seen.begin / page_rows; page * page_rows < seen.end; ++page) {
      uses_.push_back({.id = ids[static_cast<size_t>(page)],
                       .rows = std::min(page_rows, seen.end - page * page_rows)});
      item_of_use_.push_back(n);
    }
  }
}

absl::Status PagedStaging::SendRows(absl::Span<MissingRows> missing, Lane& lane) const {
  Sender sender(lane);
  for (MissingRows& rows : missing) SendPage(rows, sender);
  return sender.Flush();
}

// Of a new page, all rows are sent.
void PagedStaging::SendPage(MissingRows& missing, Sender& sender) const {
  const int64_t page_rows = graph_.pages->rows;
  const int64_t sent = missing.first_row == 0 ? page_rows : missing.rows - missing.first_row;
  const int64_t bytes = sent * (PageBytes(graph_) / page_rows);
  std::byte* const keys = sender.Take(bytes);
  if (keys == nullptr) return;
  std::byte* const values = keys + sent * (PageKeyBytes(graph_) / page_rows);
  std::memset(keys, 0, static_cast<size_t>(bytes));
  const size_t n = item_of_use_[missing.use];
  const int64_t page =
      items_[n].seen.begin / page_rows + static_cast<int64_t>(missing.use - first_use_[n]);
  const int64_t first_token = page * page_rows + missing.first_row;
  const int64_t count = missing.rows - missing.first_row;
  const auto pack = [&](const TensorView& view, std::byte* to) {
    const int64_t row_bytes = view.dims[3] * SizeOf(view.dtype);
    for (int64_t h = 0; h < graph_.kv_heads; ++h) {
      std::byte* const rows = to + h * sent * row_bytes;
      for (int64_t r = 0; r < count; ++r) {
        view.CopyRow(0, h, first_token + r, rows + r * row_bytes);
      }
      missing.is_finite &= AllFinite(rows, view.dtype, count * view.dims[3]);
    }
  };
  pack(source_.keys(items_[n].item), keys);
  pack(source_.values(items_[n].item), values);
  if (!missing.is_finite) return;
  const auto add = [&](const std::byte* from, int64_t to, int64_t head_size) {
    const int64_t row_bytes = head_size * SizeOf(graph_.dtype);
    sender.Add(from, {.to = to + missing.first_row * row_bytes,
                      .row_bytes = sent * row_bytes,
                      .rows = graph_.kv_heads,
                      .step = page_rows * row_bytes});
  };
  add(keys, missing.offset, graph_.head_size);
  add(values, missing.offset + PageKeyBytes(graph_), graph_.value_head_size);
  missing.copied_bytes = bytes;
}

int64_t PagedStaging::CallRow(const PagedItem& item, int64_t h, int64_t r, bool heads_first) const {
  if (heads_first) return h * call_rows_ + item.first_row + r;
  return (item.first_row + r) * call_.query_heads + h;
}

bool PagedStaging::StageInputs(const Arguments& arguments, const PagePool::Lease& lease,
                               std::byte* arena) const {
  StageTables(lease, arena);
  const int64_t row_bytes = call_.head_size * SizeOf(call_.dtype);
  std::memset(arena + layout_.query, 0, static_cast<size_t>(RowOf(graph_.batch, 0, 0) * row_bytes));
  const std::byte* const queries = arguments.inputs[Role::kQ].data;
  bool finite = true;
  for (size_t n = 0; n < items_.size(); ++n) {
    const PagedItem& item = items_[n];
    if (item.seen.empty()) continue;
    for (int64_t h = 0; h < call_.query_heads; ++h) {
      for (int64_t r = 0; r < item.rows; ++r) {
        std::byte* const row = arena + layout_.query + RowOf(n, h, r) * row_bytes;
        std::memcpy(row, queries + CallRow(item, h, r, call_.heads_first) * row_bytes,
                    static_cast<size_t>(row_bytes));
        finite &= AllFinite(row, call_.dtype, call_.head_size);
      }
    }
  }
  return finite;
}

// A batch row without an item, or whose item is not sent, has one query of zeros and a token of
// another item. Entries of a table before and beyond the pages that the item sees repeat one of
// them, because hidden keys must be finite.
void PagedStaging::StageTables(const PagePool::Lease& lease, std::byte* arena) const {
  const int64_t page_rows = graph_.pages->rows;
  const int64_t entries = graph_.key_length / page_rows;
  for (int64_t n = 0; n < graph_.batch; ++n) {
    const bool is_sent = n < static_cast<int64_t>(items_.size()) && !items_[n].seen.empty();
    const PagedItem item = is_sent ? items_[n] : PagedItem{.rows = 1, .seen = {0, 1}};
    const size_t first_use = is_sent ? first_use_[n] : 0;
    const int64_t first_page = item.seen.begin / page_rows;
    const int64_t last_page = (item.seen.end - 1) / page_rows;
    PutAt(arena + layout_.query_lengths, n, item.rows);
    PutAt(arena + layout_.key_lengths, n, item.seen.end);
    for (int64_t entry = 0; entry < entries; ++entry) {
      const int64_t use = std::clamp(entry, first_page, last_page) - first_page;
      PutAt(arena + layout_.page_table, n * entries + entry,
            lease.page(first_use + static_cast<size_t>(use)));
    }
  }
}

void PagedStaging::TakeOutputs(const Arguments& arguments, const std::byte* arena) const {
  const int64_t row_bytes = call_.value_head_size * SizeOf(call_.dtype);
  for (size_t n = 0; n < items_.size(); ++n) {
    const PagedItem& item = items_[n];
    for (int64_t h = 0; h < call_.query_heads; ++h) {
      for (int64_t r = 0; r < item.rows; ++r) {
        std::byte* const y =
            arguments.outputs[Role::kY].data + CallRow(item, h, r, call_.heads_first) * row_bytes;
        const int64_t from = RowOf(n, h, r);
        float lse = -std::numeric_limits<float>::infinity();
        if (item.seen.empty()) {
          std::memset(y, 0, static_cast<size_t>(row_bytes));
        } else {
          std::memcpy(y, arena + layout_.output + from * row_bytes, static_cast<size_t>(row_bytes));
          std::memcpy(&lse, arena + layout_.lse + from * static_cast<int64_t>(sizeof(lse)),
                      sizeof(lse));
        }
        if (!call_.wants_lse) continue;
        std::memcpy(
            arguments.outputs[Role::kLse].data +
                CallRow(item, h, r, call_.lse_heads_first) * static_cast<int64_t>(sizeof(lse)),
            &lse, sizeof(lse));
      }
    }
  }
}

}  // namespace rapt::cudnn
