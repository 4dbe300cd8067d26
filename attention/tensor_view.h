// Non-owning views of tensors: location, type, shape and strides.
#ifndef RAPT_ATTENTION_TENSOR_VIEW_H_
#define RAPT_ATTENTION_TENSOR_VIEW_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/sliced_bytes.h"
#include "rapt/data_type.h"

namespace rapt {

// The form of a tensor in memory. An input that may have one form may have those before it.
enum class Source : uint8_t { kStrided, kSliced, kPaged };

// Returns the name for errors.
constexpr absl::string_view NameOf(Source source) {
  switch (source) {
    case Source::kStrided:
      return "strided";
    case Source::kSliced:
      return "sliced";
    case Source::kPaged:
      return "paged";
  }
  return "?";
}

// Rows in pages. A page is a separate block of memory with `page_rows` consecutive rows of every
// head, as in a resident cache. Row s of batch row b is row (first_row + s) % page_rows of the page
// with index b * batch_pages + (first_row + s) / page_rows. Non-owning.
struct PagedRows {
  // None is null. All are readable, also those whose rows are beyond the key lengths: a backend may
  // read rows that no query sees.
  absl::Span<const std::byte* const> pages;
  int64_t batch_pages = 0;  // 0: all batch rows have the same pages
  int64_t page_rows = 0;    // at least 1
  int64_t first_row = 0;    // in [0, page_rows)
  int64_t offset = 0;       // from a page to its first row, in bytes; K and V may share pages
};

// A tensor of rank 4, [batch, head, position, element]. `dims` and `strides` count elements, not
// bytes; a stride of 0 broadcasts. Lower ranks have leading axes of 1. `data` is null for an absent
// tensor; it need not be aligned, because payloads are read in place.
//
// A payload that arrived in slices has `slices` instead of `data`: the row-major bytes of the
// tensor, to which the strides refer. Paged keys and values have `pages` instead; strides[1] and
// strides[2] then apply within a page, and strides[0] is unused. Both outlive the view.
template <typename Byte>
struct BasicTensorView {
  Byte* data = nullptr;
  DType dtype = DType::kFloat32;
  std::array<int64_t, 4> dims = {0, 0, 0, 0};
  std::array<int64_t, 4> strides = {0, 0, 0, 0};

  const SlicedBytes* slices = nullptr;
  const PagedRows* pages = nullptr;

  Source source() const {
    if (pages != nullptr) return Source::kPaged;
    return slices != nullptr ? Source::kSliced : Source::kStrided;
  }
  bool has_elements() const { return std::find(dims.begin(), dims.end(), 0) == dims.end(); }
  bool present() const { return data != nullptr || source() != Source::kStrided; }

  // Returns the byte offset of row (b, h, s); of a paged view with b = 0, of row s of a page.
  int64_t RowOffset(int64_t b, int64_t h, int64_t s) const {
    return (b * strides[0] + h * strides[1] + s * strides[2]) * SizeOf(dtype);
  }

  // Returns the first byte of row (b, h, s). REQUIRES: the view is neither sliced nor paged.
  Byte* Row(int64_t b, int64_t h, int64_t s) const { return data + RowOffset(b, h, s); }

  // Returns the first byte of row (b, h, s); null in slices, whose boundaries may divide the row.
  const std::byte* FindRow(int64_t b, int64_t h, int64_t s) const {
    if (source() == Source::kStrided) return Row(b, h, s);
    if (source() == Source::kSliced) return nullptr;
    const int64_t row = pages->first_row + s;
    const int64_t page = b * pages->batch_pages + row / pages->page_rows;
    return pages->pages[page] + pages->offset + RowOffset(0, h, row % pages->page_rows);
  }

  // Copies element n of row (b, h, s).
  void CopyElement(int64_t b, int64_t h, int64_t s, int64_t n, std::byte* target) const {
    CopyBytes(b, h, s, n * strides[3] * SizeOf(dtype), SizeOf(dtype), target);
  }

  void CopyRow(int64_t b, int64_t h, int64_t s, std::byte* target) const {
    CopyBytes(b, h, s, 0, dims[3] * SizeOf(dtype), target);
  }

 private:
  void CopyBytes(int64_t b, int64_t h, int64_t s, int64_t begin, int64_t size,
                 std::byte* target) const {
    const std::byte* row = FindRow(b, h, s);
    if (row == nullptr) return slices->Copy(RowOffset(b, h, s) + begin, size, target);
    std::memcpy(target, row + begin, static_cast<size_t>(size));
  }
};

using TensorView = BasicTensorView<const std::byte>;
using MutableTensorView = BasicTensorView<std::byte>;

// Returns the row-major strides of `dims`.
constexpr std::array<int64_t, 4> RowMajorStrides(const std::array<int64_t, 4>& dims) {
  return {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1};
}

}  // namespace rapt

#endif  // RAPT_ATTENTION_TENSOR_VIEW_H_
