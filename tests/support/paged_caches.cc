#include "tests/support/paged_caches.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "tests/support/oracle.h"
#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

// Exchanges axes 1 and 2.
Tensor Swapped(const Tensor& tensor) {
  const Dims& dims = tensor.dims();
  Tensor swapped(tensor.dtype(), {dims[0], dims[2], dims[1], dims[3]});
  for (int64_t h = 0; h < dims[2]; ++h) {
    for (int64_t r = 0; r < dims[1]; ++r) {
      for (int64_t e = 0; e < dims[3]; ++e) swapped.Set(0, h, r, e, tensor.At(0, r, h, e));
    }
  }
  return swapped;
}

}  // namespace

PagedCaches::PagedCaches(const RaggedCall& shape, uint64_t seed)
    : dtype_(shape.dtype),
      kv_heads_(shape.kv_heads),
      head_size_(shape.head_size),
      value_head_size_(shape.value_head_size),
      rng_(seed) {}

void PagedCaches::Add(int64_t tokens) {
  auto sequence = std::make_unique<Sequence>();
  sequence->keys = Tensor(dtype_, {1, kv_heads_, 0, head_size_});
  sequence->values = Tensor(dtype_, {1, kv_heads_, 0, value_head_size_});
  sequence->key_rows.page_rows = sequence->value_rows.page_rows = kPageTokens;
  sequence->value_rows.offset = PageBytes(/*with_values=*/false);
  sequences_.push_back(std::move(sequence));
  Append(static_cast<int64_t>(sequences_.size()) - 1, tokens);
}

void PagedCaches::Fork(int64_t sequence, int64_t tokens) {
  sequences_.push_back(std::make_unique<Sequence>(*sequences_[sequence]));
  Truncate(static_cast<int64_t>(sequences_.size()) - 1, tokens);
}

void PagedCaches::Truncate(int64_t sequence, int64_t tokens) {
  Sequence& s = *sequences_[sequence];
  const auto pages = static_cast<size_t>((tokens + kPageTokens - 1) / kPageTokens);
  s.keys = SliceAxis(s.keys, 2, 0, tokens);
  s.values = SliceAxis(s.values, 2, 0, tokens);
  s.pages.resize(pages);
  s.ids.resize(pages);
  s.memory.resize(pages);
  s.key_rows.pages = s.value_rows.pages = s.memory;
  s.owns_last_page = false;
}

void PagedCaches::Append(int64_t sequence, int64_t tokens) {
  AppendTensors(*sequences_[sequence],
                Tensor(dtype_, {1, kv_heads_, tokens, head_size_}).FillUniform(rng_, -2, 2),
                Tensor(dtype_, {1, kv_heads_, tokens, value_head_size_}).FillUniform(rng_, -2, 2));
}

void PagedCaches::AppendNumber(int64_t sequence, double number) {
  AppendTensors(*sequences_[sequence], Tensor(dtype_, {1, kv_heads_, 1, head_size_}).Fill(number),
                Tensor(dtype_, {1, kv_heads_, 1, value_head_size_}).Fill(number));
}

int64_t PagedCaches::PageBytes(bool with_values) const {
  return kPageTokens * kv_heads_ * (head_size_ + (with_values ? value_head_size_ : 0)) *
         SizeOf(dtype_);
}

void PagedCaches::TakePage(Sequence& sequence, bool replaces) {
  static std::atomic<uint64_t> last_id{0};
  const auto bytes = static_cast<size_t>(PageBytes(/*with_values=*/true));
  // Rows that are not written are NaN.
  auto page = std::make_shared<std::vector<std::byte>>(bytes, std::byte{0xFF});
  if (replaces) {
    *page = *sequence.pages.back();
    sequence.pages.pop_back();
    sequence.ids.pop_back();
    sequence.memory.pop_back();
  }
  sequence.memory.push_back(page->data());
  sequence.pages.push_back(std::move(page));
  sequence.ids.push_back(++last_id);
}

void PagedCaches::AppendTensors(Sequence& sequence, const Tensor& keys, const Tensor& values) {
  const int64_t begin = sequence.keys.dims()[2];
  const int64_t count = keys.dims()[2];
  if (begin % kPageTokens != 0 && !sequence.owns_last_page) TakePage(sequence, /*replaces=*/true);
  while (static_cast<int64_t>(sequence.pages.size()) * kPageTokens < begin + count) {
    TakePage(sequence, /*replaces=*/false);
  }
  sequence.owns_last_page = true;
  for (const Tensor* tensor : {&keys, &values}) {
    const TensorView view = tensor->View();
    const int64_t row_bytes = view.dims[3] * SizeOf(dtype_);
    const int64_t part = tensor == &keys ? 0 : PageBytes(/*with_values=*/false);
    for (int64_t h = 0; h < kv_heads_; ++h) {
      for (int64_t n = 0; n < count; ++n) {
        const int64_t token = begin + n;
        const int64_t row = h * kPageTokens + token % kPageTokens;
        view.CopyRow(0, h, n, sequence.pages[token / kPageTokens]->data() + part + row * row_bytes);
      }
    }
  }
  sequence.key_rows.pages = sequence.value_rows.pages = sequence.memory;
  sequence.keys = JoinRows(sequence.keys, keys);
  sequence.values = JoinRows(sequence.values, values);
}

TensorView PagedCaches::View(int64_t item, bool is_value) const {
  const Sequence& sequence = *sequences_[item];
  TensorView view = (is_value ? sequence.values : sequence.keys).View();
  view.data = nullptr;
  view.strides = {0, kPageTokens * view.dims[3], view.dims[3], 1};
  view.pages = is_value ? &sequence.value_rows : &sequence.key_rows;
  return view;
}

RaggedCall SmallShape(DType dtype) {
  return {.dtype = dtype,
          .query_heads = 4,
          .kv_heads = 2,
          .head_size = 16,
          .value_head_size = 8,
          .wants_lse = true,
          .page_rows = PagedCaches::kPageTokens};
}

std::vector<RaggedItem> LastRows(const PagedCaches& caches, const std::vector<int64_t>& rows) {
  std::vector<RaggedItem> items;
  for (size_t n = 0; n < rows.size(); ++n) {
    const int64_t keys = caches.length(static_cast<int64_t>(n));
    items.push_back({.rows = rows[n], .keys = keys, .position = keys - rows[n]});
  }
  return items;
}

PagedResult RunPaged(const RaggedCall& call, const PagedCaches& caches,
                     const PlanOptions& options) {
  int64_t rows = 0;
  for (const RaggedItem& item : call.items) rows += item.rows;
  Rng rng(7);
  const auto empty = [&](DType dtype, int64_t size, bool heads_first) {
    const Dims dims = {1, rows, call.query_heads, size};
    return Tensor(dtype, heads_first ? Dims{dims[0], dims[2], dims[1], dims[3]} : dims);
  };
  PagedResult result{empty(call.dtype, call.head_size, false).FillUniform(rng, -2, 2),
                     empty(call.dtype, call.value_head_size, call.heads_first),
                     empty(DType::kFloat32, 1, call.lse_heads_first), ""};
  const auto op = MakeRaggedAttention(call, caches).value();
  const Plan plan = MakePlan(*op, options).value();
  std::atomic<const Backend*> fallback{nullptr};
  Arguments arguments;
  const Tensor queries = call.heads_first ? Swapped(result.queries) : result.queries;
  arguments.inputs[Role::kQ] = queries.View();
  arguments.outputs[Role::kY] = result.y.MutableView();
  if (call.wants_lse) arguments.outputs[Role::kLse] = result.lse.MutableView();
  arguments.piece_fallback = &fallback;
  AlignedBuffer workspace(plan.workspace_bytes());
  std::fill(workspace.span().begin(), workspace.span().end(), std::byte{0xFF});
  ThreadPool pool(plan.threads);
  EXPECT_TRUE(Run(*op, plan, arguments, workspace.span(), pool).ok());
  // Their memory has the call's layout.
  if (call.heads_first) result.y = Swapped(result.y);
  if (call.lse_heads_first) result.lse = Swapped(result.lse);
  Routing routing = plan.routing;
  routing.piece_fallback = fallback;
  result.backends = NamesOf(routing);
  return result;
}

void ExpectMatches(const RaggedCall& call, const PagedCaches& caches, const PagedResult& result) {
  int64_t first_row = 0;
  for (size_t n = 0; n < call.items.size(); ++n) {
    SCOPED_TRACE("item " + std::to_string(n));
    const auto item_number = static_cast<int64_t>(n);
    const RaggedItem& item = call.items[n];
    if (item.rows == 0) continue;
    const int64_t seen = caches.has_failed(item_number) ? 0 : VisibleTokensOf(item).recent.end;
    const Problem problem{.dtype = call.dtype,
                          .batch = 1,
                          .query_heads = call.query_heads,
                          .kv_heads = call.kv_heads,
                          .query_length = item.rows,
                          .key_length = seen,
                          .head_size = call.head_size,
                          .value_head_size = call.value_head_size,
                          .scale = call.scale,
                          .causal = true,
                          .alignment = Alignment::kBottomRight,
                          .left_window = item.left_window,
                          .wants_lse = call.wants_lse};
    const Inputs inputs{.query = Swapped(SliceAxis(result.queries, 1, first_row, item.rows)),
                        .key = SliceAxis(caches.all_keys(item_number), 2, 0, seen),
                        .value = SliceAxis(caches.all_values(item_number), 2, 0, seen)};
    Outputs outputs{.output = Swapped(SliceAxis(result.y, 1, first_row, item.rows))};
    if (call.wants_lse) outputs.lse = Swapped(SliceAxis(result.lse, 1, first_row, item.rows));
    EXPECT_TRUE(Matches(problem, outputs, Attend(problem, inputs)));
    first_row += item.rows;
  }
}

}  // namespace rapt::test
