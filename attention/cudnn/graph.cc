#include "attention/cudnn/graph.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace rapt::cudnn {
namespace {

// cuDNN compares positions as FP32, which is exact up to here.
constexpr int64_t kMaxRows = int64_t{1} << 24;
constexpr int64_t kHeadSizeStep = 8;
constexpr int64_t kMaxHeadSize = 256;
constexpr int64_t kMinOctave = 128;
constexpr int64_t kLengthsPerOctave = 8;
// Batch sizes of ragged graphs: 4, 16, 64, ...
constexpr int64_t kMinRaggedBatch = 4;
constexpr int64_t kRaggedBatchStep = 4;

// Tiles of the backward kernels' matrix of the scores' gradients.
constexpr int64_t kBackwardTileRows = 64;
constexpr int64_t kBackwardTileKeys = 128;
constexpr double kBackwardScheduleBytes = 4 << 10;

absl::Status Unsupported(absl::string_view what) {
  return absl::UnimplementedError(absl::StrCat("cuDNN does not support ", what));
}

bool IsBeyondFp32(double x) { return x != 0 && (std::fabs(x) > 1e30 || std::fabs(x) < 1e-30); }

// The keys that query i sees by position: [i + offset - left, i + offset + right].
struct Band {
  std::optional<int64_t> left;
  std::optional<int64_t> right;

  bool limits() const { return left || right; }
};

// Ignores windows wider than any length, which hide nothing.
Band BandOf(const Problem& p) {
  Band band;
  if (p.left_window >= 0 && p.left_window < kMaxAxis) band.left = p.left_window;
  if (p.right_window >= 0 && p.right_window < kMaxAxis) band.right = p.right_window;
  if (p.causal) band.right = 0;
  return band;
}

// Returns whether the diagonal depends on the batch row.
bool DiagonalVaries(const Problem& p) { return BandOf(p).limits() && PositionVaries(p); }

// Returns the offset of the diagonal: key i + offset for query i, both counted from the problem's
// first. REQUIRES: the diagonal does not depend on the batch row.
int64_t DiagonalOffset(const Problem& p) { return DiagonalKey(p, /*key_lengths=*/{}, 0, 0); }

// A single query sees one range of keys, which the host selects: no diagonal is needed.
bool IsDecode(const Problem& p) { return p.query_length == 1; }

absl::Status CheckDiagonal(const Problem& p) {
  if (!DiagonalVaries(p)) return absl::OkStatus();
  if (IsDecode(p)) {
    // The first selected key differs between batch rows, but a mask may have one row for all.
    if (p.mask && BandOf(p).left) {
      return Unsupported("a mask with a window that depends on nonpad_kv_seqlen");
    }
    return absl::OkStatus();
  }
  if (p.section) {
    return Unsupported("a section of a problem whose diagonal depends on nonpad_kv_seqlen");
  }
  if (p.mask) return Unsupported("a mask with a diagonal that depends on nonpad_kv_seqlen");
  // cuDNN has no lower limit of the diagonal's offset.
  if (p.alignment == Alignment::kBottomRight) {
    return Unsupported("several queries aligned with the last key of each nonpad_kv_seqlen");
  }
  return absl::OkStatus();
}

// Returns whether only the last query sees the last key, as with new queries after a past. The
// graph then does not depend on the length of the past, and all steps of a prefill share one graph.
// cuDNN does not support a bias in this form.
bool EndsAtLastKey(const Problem& p, const Crop& crop, int64_t offset) {
  const Band band = BandOf(p);
  if (!band.right || p.mask || p.has_key_lengths || crop.keys == crop.queries) return false;
  return offset + *band.right == crop.keys - crop.queries;
}

MaskShape BiasOf(const SdpaGraph& graph, const MaskShape& mask) {
  MaskShape bias = mask;
  if (bias.dtype == DType::kBool) bias.dtype = graph.dtype;
  // cuDNN broadcasts a row over the queries only if it also does over the heads.
  if (mask.dims[2] != 1 || mask.dims[1] != 1) bias.dims[2] = graph.query_length;
  bias.dims[3] = graph.key_length;
  return bias;
}

double ScaleOf(const RaggedCall& call) {
  return call.scale.value_or(1 / std::sqrt(static_cast<double>(call.head_size)));
}

// An item's rows must be the last ones before a token.
absl::Status CheckItem(const RaggedItem& item) {
  const VisibleTokens visible = VisibleTokensOf(item);
  if (visible.first.empty() && visible.recent.empty()) return absl::OkStatus();
  const bool has_window = WindowOf(item).has_value();
  if (has_window && !visible.first.empty()) return Unsupported("first_keys with a window");
  // A single row without a window sees one range of tokens.
  if (item.rows == 1 && !has_window) return absl::OkStatus();
  if (item.position >= 0 && item.position <= item.keys - item.rows) return absl::OkStatus();
  return Unsupported("rows before the first token or beyond the last");
}

// What no graph has, whatever the sizes.
struct Gap {
  bool (*is_in)(const Problem&);
  absl::string_view what;
};
constexpr Gap kGaps[] = {
    {[](const Problem& p) { return p.dtype == DType::kFloat64 || p.softmax_in_fp64; }, "FP64"},
    {[](const Problem& p) { return p.mask && p.mask->dtype == DType::kFloat64; }, "an FP64 mask"},
    {[](const Problem& p) { return p.bias.has_value(); }, "attention_bias"},
    {[](const Problem& p) { return p.head_sink.has_value(); }, "head_sink"},
    {[](const Problem& p) { return p.normalizer != Normalizer::kSoftmax; },
     "a normalizer but softmax"},
    {[](const Problem& p) { return p.q8_0; }, "keys and values in 8 bits"},
    {[](const Problem& p) { return p.values_in_keys; }, "values inside the keys"},
    {[](const Problem& p) { return p.has_relative(); }, "biases by distance"},
    {[](const Problem& p) { return p.has_relative_vectors(); },
     "relative_keys and relative_values"},
    {[](const Problem& p) { return p.has_rotary(); }, "rotary embedding"},
    {[](const Problem& p) { return p.is_additive(); }, "additive scores"},
    {[](const Problem& p) { return p.block_mask.has_value(); }, "block_mask"},
    {[](const Problem& p) { return p.selected.has_value(); }, "selected_indices"},
    {[](const Problem& p) { return p.has_exemptions(); },
     "prefix_keys and global_mask with a window"},
    {[](const Problem& p) { return p.dropout.has_value(); },
     "dropout with a prescribed random number generator"},
    {[](const Problem& p) { return p.score_output.has_value(); }, "scores as an output"},
};

absl::Status CheckBackward(const Problem& p) {
  if (!p.backward) return absl::OkStatus();
  if (p.dtype == DType::kFloat32) return Unsupported("gradients in FP32");
  if (!p.backward->has_forward) return Unsupported("gradients without Y and lse");
  if (p.backward->has_lse_gradient) return Unsupported("a gradient of lse");
  if (p.backward->gradients.contains(Role::kDMask)) {
    return Unsupported("the gradient of an attn_mask");
  }
  // It would need a second score modifier, for the derivative.
  if (p.softcap != 0) return Unsupported("gradients through a softcap");
  return absl::OkStatus();
}

}  // namespace

int64_t PowerOfTwoFrom(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

int64_t RoundUpLength(int64_t length) {
  const int64_t octave = PowerOfTwoFrom(std::max(length, kMinOctave));
  return RoundUp(length, octave / 2 / kLengthsPerOctave);
}

absl::Status Supports(const Problem& p) {
  for (const Gap& gap : kGaps) {
    if (gap.is_in(p)) return Unsupported(gap.what);
  }
  if (std::max(p.head_size, p.value_head_size) > kMaxHeadSize) {
    return Unsupported(absl::StrCat("a head size above ", kMaxHeadSize));
  }
  if (p.head_size == 0 || p.value_head_size == 0) return Unsupported("a head size of 0");
  if (IsBeyondFp32(p.effective_scale()) || IsBeyondFp32(p.softcap)) {
    return Unsupported("a scale or softcap above 1e30 or below 1e-30");
  }
  if (std::max(p.query_length, p.total_keys()) > kMaxRows) {
    return Unsupported(absl::StrCat("more than ", kMaxRows, " queries or keys"));
  }
  RAPT_RETURN_IF_ERROR(CheckBackward(p));
  return CheckDiagonal(p);
}

Crop CropOf(const Problem& p) {
  Crop crop{0, p.query_length, 0, p.total_keys()};
  if (p.empty() || crop.keys == 0) return {};
  const Band band = BandOf(p);
  if (!band.limits() || DiagonalVaries(p)) return crop;
  const int64_t offset = DiagonalOffset(p);
  // Drop queries before the first that sees key 0 and after the last that sees the last key.
  if (band.right) crop.first_query = std::max<int64_t>(0, -offset - *band.right);
  if (band.left) crop.queries = std::min(crop.queries, crop.keys + *band.left - offset);
  crop.queries -= crop.first_query;
  if (crop.queries <= 0) return {};
  const int64_t first_diagonal = crop.first_query + offset;
  const int64_t last_diagonal = first_diagonal + crop.queries - 1;
  if (band.left) crop.first_key = std::max<int64_t>(0, first_diagonal - *band.left);
  if (band.right) crop.keys = std::min(crop.keys, last_diagonal + *band.right + 1);
  crop.keys -= crop.first_key;
  return crop;
}

SentKeys KeysOf(const Problem& p, absl::Span<const int64_t> key_lengths, int64_t b) {
  if (IsDecode(p)) {
    const KeyRange visible = VisibleKeys(p, key_lengths, b, 0);
    return {visible.begin, visible.end - visible.begin};
  }
  const Crop crop = CropOf(p);
  if (!p.has_key_lengths) return {crop.first_key, crop.keys};
  const Section section = SectionOrFull(p);
  const int64_t length = section.past_length + key_lengths[b] - section.first_key;
  const int64_t end = std::min(crop.first_key + crop.keys, length);
  return {crop.first_key, std::max<int64_t>(0, end - crop.first_key)};
}

SdpaGraph GraphOf(const Problem& p) {
  const Crop crop = CropOf(p);
  const Band band = BandOf(p);
  SdpaGraph graph{.dtype = p.dtype,
                  .batch = p.batch,
                  .query_heads = p.query_heads,
                  .kv_heads = p.kv_heads,
                  .query_length = crop.queries == 1 ? 1 : RoundUpLength(crop.queries),
                  .key_length = RoundUpLength(crop.keys),
                  .head_size = RoundUp(p.head_size, kHeadSizeStep),
                  .value_head_size = RoundUp(p.value_head_size, kHeadSizeStep),
                  .scale = p.effective_scale(),
                  .softcap = p.softcap,
                  .backward = p.backward.has_value()};
  graph.has_lengths =
      p.has_key_lengths || graph.query_length != crop.queries || graph.key_length != crop.keys;
  if (p.mask) graph.bias = BiasOf(graph, *p.mask);
  if (IsDecode(p)) return graph;
  if (DiagonalVaries(p)) {
    graph.bottom_right = true;
    graph.right_bound = band.right;
    if (band.left) graph.left_bound = *band.left + 1;
    return graph;
  }
  const int64_t offset = band.limits() ? DiagonalOffset(p) + crop.first_query - crop.first_key : 0;
  if (EndsAtLastKey(p, crop, offset)) {
    graph.bottom_right = true;
    graph.right_bound = 0;
    if (band.left) graph.left_bound = *band.left + *band.right + 1;
    return graph;
  }
  // Omit bounds that hide nothing.
  if (band.right && offset + *band.right < crop.keys - 1) graph.right_bound = offset + *band.right;
  if (band.left && offset + crop.queries - 1 > *band.left) {
    graph.left_bound = *band.left + 1 - offset;
    // With a left bound, cuDNN supports fewer keys than queries only if lengths are given.
    graph.has_lengths |= graph.query_length > graph.key_length;
  }
  return graph;
}

std::optional<int64_t> WindowOf(const RaggedItem& item) {
  const bool hides = item.left_window >= 0 && item.position > item.left_window - (item.rows - 1);
  return hides ? std::optional(item.left_window) : std::nullopt;
}

TokenRange SeenBy(const RaggedItem& item) {
  const TokenRange recent = VisibleTokensOf(item).recent;
  return {WindowOf(item) ? recent.begin : 0, recent.end};
}

absl::Status Supports(const RaggedCall& call, int64_t page_rows) {
  if (!IsFloat(call.dtype) || call.dtype == DType::kFloat64) {
    return Unsupported(absl::StrCat("pages of ", NameOf(call.dtype)));
  }
  if (call.q8_0) return Unsupported("keys and values in 8 bits");
  for (const int64_t size : {call.head_size, call.value_head_size}) {
    if (size > kMaxHeadSize || size % kHeadSizeStep != 0) {
      return Unsupported(absl::StrCat("pages with a head size of ", size));
    }
  }
  if (PowerOfTwoFrom(page_rows) != page_rows) {
    return Unsupported(absl::StrCat("pages of ", page_rows, " tokens"));
  }
  if (call.softcap != 0) return Unsupported("a softcap over pages");
  if (call.head_sink) return Unsupported("head_sink");
  if (call.output.value_or(call.dtype) != call.dtype) {
    return Unsupported(absl::StrCat("outputs of another type, ", NameOf(*call.output)));
  }
  if (IsBeyondFp32(ScaleOf(call))) return Unsupported("a scale above 1e30 or below 1e-30");
  for (const RaggedItem& item : call.items) {
    if (std::max(item.rows, item.keys) > kMaxRows) {
      return Unsupported(absl::StrCat("more than ", kMaxRows, " rows or tokens"));
    }
    RAPT_RETURN_IF_ERROR(CheckItem(item));
  }
  return absl::OkStatus();
}

SdpaGraph PagedGraphOf(const RaggedCall& call, const GraphPages& pages, const PagedSizes& sizes) {
  const auto [items, rows, tokens, window] = sizes;
  SdpaGraph graph{.dtype = call.dtype,
                  .batch = rows == 1 ? kMinRaggedBatch : 1,
                  .query_heads = call.query_heads,
                  .kv_heads = call.kv_heads,
                  .query_length = rows == 1 ? 1 : RoundUpLength(rows),
                  .key_length = PowerOfTwoFrom(std::max({tokens, kMinOctave, pages.rows})),
                  .head_size = call.head_size,
                  .value_head_size = call.value_head_size,
                  .scale = ScaleOf(call),
                  .has_lengths = true,
                  .pages = pages};
  // Missing items of a single row cost next to nothing.
  const int64_t step = rows == 1 ? kRaggedBatchStep : 2;
  while (graph.batch < items) graph.batch *= step;
  if (rows == 1 && !window) return graph;
  graph.bottom_right = true;
  graph.right_bound = 0;
  // A window beyond the keys hides none.
  if (window) graph.left_bound = std::min(*window, graph.key_length) + 1;
  return graph;
}

int64_t PageKeyBytes(const SdpaGraph& g) {
  return g.pages->rows * g.kv_heads * g.head_size * SizeOf(g.dtype);
}

int64_t PageBytes(const SdpaGraph& g) {
  return PageKeyBytes(g) + g.pages->rows * g.kv_heads * g.value_head_size * SizeOf(g.dtype);
}

int64_t PageBytes(const RaggedCall& call) {
  return PageBytes(SdpaGraph{.dtype = call.dtype,
                             .kv_heads = call.kv_heads,
                             .head_size = call.head_size,
                             .value_head_size = call.value_head_size,
                             .pages = GraphPages{.rows = call.page_rows}});
}

int64_t BackwardWorkspaceBytes(const SdpaGraph& g) {
  // Computed as doubles, as large problems exceed int64.
  const auto rows = static_cast<double>(g.batch * g.query_heads);
  const auto queries = static_cast<double>(RoundUp(g.query_length, kBackwardTileRows));
  const auto keys = static_cast<double>(RoundUp(g.key_length, kBackwardTileKeys));
  double bytes = rows * queries * keys * 2 + rows * queries * 4 + kBackwardScheduleBytes;
  // The gradients of the keys for each query head, which are added for each key head.
  if (g.kv_heads != g.query_heads) {
    bytes += rows * keys * static_cast<double>(g.head_size + g.value_head_size) * 2;
  }
  return static_cast<int64_t>(std::min(bytes, 1e18));
}

// With a softcap, lengths only mask scores: kernels would read beyond ragged rows.
bool MayBeRagged(const SdpaGraph& graph) {
  return !graph.bias && graph.softcap == 0 && !graph.backward;
}

SdpaGraph RaggedOf(SdpaGraph graph, int64_t batch, int64_t queries, int64_t keys) {
  graph.has_lengths = graph.ragged = true;
  graph.batch = kMinRaggedBatch;
  while (graph.batch < batch) graph.batch *= kRaggedBatchStep;
  // A single query has its own kernels.
  graph.query_length = queries == 1 ? 1 : PowerOfTwoFrom(std::max(queries, kMinOctave));
  graph.key_length = PowerOfTwoFrom(std::max(keys, kMinOctave));
  return graph;
}

std::string SdpaGraph::Key() const {
  std::string key =
      absl::StrFormat("%s b%d h%d/%d s%d/%d d%d/%d", NameOf(dtype), batch, query_heads, kv_heads,
                      query_length, key_length, head_size, value_head_size);
  if (softcap > 0) absl::StrAppendFormat(&key, " softcap%a", softcap);
  if (bottom_right) absl::StrAppend(&key, " bottom-right");
  if (left_bound) absl::StrAppend(&key, " left", *left_bound);
  if (right_bound) absl::StrAppend(&key, " right", *right_bound);
  if (has_lengths) absl::StrAppend(&key, ragged ? " ragged" : " lengths");
  if (pages) absl::StrAppend(&key, " pages", pages->count, "x", pages->rows);
  if (bias) {
    absl::StrAppend(&key, " bias-", NameOf(bias->dtype), "[", absl::StrJoin(bias->dims, ","), "]");
  }
  if (backward) absl::StrAppend(&key, " backward");
  return key;
}

}  // namespace rapt::cudnn
