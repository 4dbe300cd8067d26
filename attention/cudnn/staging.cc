#include "attention/cudnn/staging.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/functional/function_ref.h"
#include "attention/half.h"
#include "attention/mechanism/softmax/softmax_state.h"
#include "base/round_up.h"

namespace rapt::cudnn {
namespace {

constexpr int64_t kAlignment = 256;
constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
// Beyond this the device's products with log2(e) overflow FP32.
constexpr double kMaxBias = 1e30;
constexpr int64_t kMaxHeadSize = 256;

// exp(score - lse) is 0 for every score.
constexpr float kLseOfNoKeys = 1e30f;

// Ragged rows are packed in blocks of this many tokens, one head after the other.
constexpr int64_t kTokenBlock = 16;

int64_t Aligned(int64_t bytes) { return RoundUp(bytes, kAlignment); }

// Returns whether no number is NaN or infinite, that is, no exponent is all ones.
template <typename Bits>
bool AllFinite(const std::byte* data, int64_t count, Bits exponent) {
  Bits found = 0;
  for (int64_t n = 0; n < count; ++n) {
    Bits bits;
    std::memcpy(&bits, data + n * static_cast<int64_t>(sizeof(bits)), sizeof(bits));
    found |= static_cast<Bits>((bits & exponent) == exponent);
  }
  return found == 0;
}

template <typename T>
void PutAt(std::byte* place, int64_t index, T value) {
  std::memcpy(place + index * static_cast<int64_t>(sizeof(value)), &value, sizeof(value));
}

// Returns what the mask adds to the score of key j in its row; -inf hides the key.
double BiasAt(const Problem& p, const TensorView& mask, int64_t b, int64_t h, int64_t i,
              int64_t j) {
  if (p.mask->dims[3] != 1 && j >= p.mask->dims[3]) return kMinusInfinity;
  const std::byte* row = mask.Row(b, h, i);
  if (p.mask->dtype != DType::kBool) {
    return LoadElement(row, p.mask->dtype, j * mask.strides[3]);
  }
  return row[j * mask.strides[3]] == std::byte{0} ? kMinusInfinity : 0;
}

// Returns whether the row sees a key, but only through biases that the device treats as masked.
bool IsFaint(const Problem& p, const Arguments& a, int64_t b, int64_t h, int64_t i) {
  const KeyRange visible = VisibleKeys(p, a.key_lengths, b, i);
  bool sees = false;
  for (int64_t j = visible.begin; j < visible.end; ++j) {
    const double bias = BiasAt(p, a.inputs[Role::kMask], b, h, i, j);
    if (bias > -kMaxBias) return false;
    sees |= bias != kMinusInfinity;
  }
  return sees;
}

bool HasFaintRow(const Problem& p, const Arguments& a) {
  if (p.mask->dtype == DType::kBool) return false;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.mask->dims[1]; ++h) {
      for (int64_t i = 0; i < p.query_length; ++i) {
        if (IsFaint(p, a, b, h, i)) return true;
      }
    }
  }
  return false;
}

// Packs the mask as a bias. Ignores keys that are not sent. Returns false for a NaN, +inf or a bias
// beyond the device's range.
bool PackBias(const Problem& p, const SdpaGraph& g, const Arguments& a, std::byte* target) {
  const std::array<int64_t, 4>& dims = g.bias->dims;
  const Crop crop = CropOf(p);
  const int64_t row_bytes = dims[3] * SizeOf(g.bias->dtype);
  std::memset(target, 0, dims[0] * dims[1] * dims[2] * row_bytes);
  const int64_t rows = dims[2] == 1 && p.mask->dims[2] == 1 ? 1 : crop.queries;
  for (int64_t b = 0; b < dims[0]; ++b) {
    // A row that broadcasts over the batch covers every key that any batch row sends.
    const SentKeys sent =
        dims[0] == 1 ? SentKeys{crop.first_key, crop.keys} : KeysOf(p, a.key_lengths, b);
    for (int64_t h = 0; h < dims[1]; ++h) {
      for (int64_t row = 0; row < rows; ++row) {
        std::byte* out = target + ((b * dims[1] + h) * dims[2] + row) * row_bytes;
        for (int64_t n = 0; n < sent.count; ++n) {
          const double bias =
              BiasAt(p, a.inputs[Role::kMask], b, h, crop.first_query + row, sent.first + n);
          if (!(bias <= kMaxBias)) return false;
          // Clamping keeps the weight at 0 next to any other key.
          const bool masked = bias == kMinusInfinity;
          StoreElement(out, g.bias->dtype, n, masked ? bias : std::max(bias, -kMaxBias));
        }
      }
    }
  }
  return true;
}

// Returns whether query row i sees a key, by position and by mask.
bool SeesAKey(const Problem& p, const Arguments& a, int64_t b, int64_t h, int64_t i) {
  const KeyRange visible = VisibleKeys(p, a.key_lengths, b, i);
  if (!p.mask) return visible.begin < visible.end;
  for (int64_t j = visible.begin; j < visible.end; ++j) {
    if (BiasAt(p, a.inputs[Role::kMask], b, h, i, j) != kMinusInfinity) return true;
  }
  return false;
}

// Writes a row of a gradient; zeros if there is no `row`.
void WriteGradient(const MutableTensorView& gradient, int64_t b, int64_t h, int64_t s,
                   const std::byte* row) {
  const auto bytes = static_cast<size_t>(gradient.dims[3] * SizeOf(gradient.dtype));
  std::byte* const target = gradient.Row(b, h, s);
  row == nullptr ? std::memset(target, 0, bytes) : std::memcpy(target, row, bytes);
}

void FoldRow(const SdpaGraph& g, const Arguments::State& state, int64_t b, int64_t h, int64_t i,
             const std::byte* row, float lse) {
  std::array<float, kMaxHeadSize> part;
  const int64_t size = state.output.dims[3];
  for (int64_t d = 0; d < size; ++d) part[d] = static_cast<float>(LoadElement(row, g.dtype, d));
  const auto at = [&](const MutableTensorView& view) {
    return reinterpret_cast<float*>(view.Row(b, h, i));
  };
  FoldInto(absl::Span<float>(at(state.output), size), *at(state.max), *at(state.sum),
           absl::Span<const float>(part.data(), size), lse);
}

void WriteMaskedRow(const Problem& p, const Arguments& a, int64_t b, int64_t h, int64_t i) {
  if (p.folds) return;
  std::memset(a.outputs[Role::kY].Row(b, h, i), 0, p.value_head_size * SizeOf(p.dtype));
  if (p.wants_lse) {
    StoreElement(a.outputs[Role::kLse].Row(b, h, i), a.outputs[Role::kLse].dtype, 0,
                 kMinusInfinity);
  }
}

}  // namespace

bool AllFinite(const std::byte* data, DType dtype, int64_t count) {
  switch (dtype) {
    case DType::kFloat16:
      return AllFinite<uint16_t>(data, count, 0x7c00);
    case DType::kBFloat16:
      return AllFinite<uint16_t>(data, count, 0x7f80);
    default:
      return AllFinite<uint32_t>(data, count, 0x7f800000);
  }
}

ArenaLayout LayOut(const SdpaGraph& g, const TokenCounts& tokens) {
  ArenaLayout layout;
  int64_t end = 0;
  const auto place = [&end](int64_t& begin, int64_t bytes) {
    begin = end;
    end = Aligned(end + bytes);
  };
  const int64_t element = SizeOf(g.dtype);
  const int64_t query_rows = g.query_heads * tokens.queries;
  const int64_t key_rows = g.pages ? 0 : g.kv_heads * tokens.keys;
  place(layout.query, query_rows * g.head_size * element);
  place(layout.key, key_rows * g.head_size * element);
  // Reads beyond the last key hit the values; reads beyond the last value hit this padding.
  const int64_t beyond =
      g.ragged ? kTileKeys * g.kv_heads * std::max(g.head_size, g.value_head_size) * element : 0;
  place(layout.value, key_rows * g.value_head_size * element + beyond);
  if (g.bias) {
    const std::array<int64_t, 4>& dims = g.bias->dims;
    place(layout.bias, dims[0] * dims[1] * dims[2] * dims[3] * SizeOf(g.bias->dtype));
  }
  if (g.has_lengths) {
    place(layout.query_lengths, g.batch * static_cast<int64_t>(sizeof(int32_t)));
    place(layout.key_lengths, g.batch * static_cast<int64_t>(sizeof(int32_t)));
  }
  if (g.ragged) {
    for (int64_t* offsets : {&layout.query_offsets, &layout.key_offsets, &layout.value_offsets,
                             &layout.output_offsets}) {
      place(*offsets, (g.batch + 1) * static_cast<int64_t>(sizeof(int64_t)));
    }
  }
  if (g.pages) {
    const int64_t entries = g.batch * (g.key_length / g.pages->rows);
    place(layout.page_table, entries * static_cast<int64_t>(sizeof(int32_t)));
  }
  if (!g.backward) layout.outputs = end;
  place(layout.output, query_rows * g.value_head_size * element);
  place(layout.lse, g.batch * g.query_heads * g.query_length * static_cast<int64_t>(sizeof(float)));
  if (g.backward) {
    place(layout.output_gradient, query_rows * g.value_head_size * element);
    layout.outputs = end;
    place(layout.query_gradient, query_rows * g.head_size * element);
    place(layout.key_gradient, key_rows * g.head_size * element);
    place(layout.value_gradient, key_rows * g.value_head_size * element);
  }
  layout.end = end;
  return layout;
}

ArenaLayout LayOut(const SdpaGraph& g) {
  return LayOut(g, {g.batch * g.query_length, g.batch * g.key_length});
}

// --- Staging -------------------------------------------------------------------------------------

struct Staging::HeadRows {
  int64_t begin;
  int64_t step;   // from a row to the next
  int64_t bytes;  // of a row
  int64_t count;

  int64_t Row(int64_t n) const { return begin + n * step; }

  // Copies rows [first, first + rows) of head (b, h) to row `at` and the following ones. Returns
  // false if a number is not finite.
  bool Pack(const TensorView& view, int64_t b, int64_t h, int64_t first, int64_t rows, int64_t at,
            std::byte* arena) const {
    const int64_t row_bytes = view.dims[3] * SizeOf(view.dtype);
    std::byte* const target = arena + Row(at);
    if (view.slices == nullptr && row_bytes == bytes && row_bytes == step &&
        view.strides[2] == view.dims[3]) {
      if (rows > 0) std::memcpy(target, view.Row(b, h, first), rows * bytes);
      return AllFinite(target, view.dtype, rows * view.dims[3]);
    }
    bool finite = true;
    for (int64_t n = 0; n < rows; ++n) {
      std::byte* const row = target + n * step;
      view.CopyRow(b, h, first + n, row);
      std::memset(row + row_bytes, 0, bytes - row_bytes);
      finite &= AllFinite(row, view.dtype, view.dims[3]);
    }
    return finite;
  }

  // The same for keys or values, whose first rows may be in the past.
  bool PackKeys(const TensorView& past, const TensorView& now, int64_t past_length, SentKeys sent,
                int64_t b, int64_t h, int64_t at, std::byte* arena) const {
    const int64_t old = std::clamp<int64_t>(past_length - sent.first, 0, sent.count);
    bool finite = old == 0 || Pack(past, b, h, sent.first, old, at, arena);
    finite &= Pack(now, b, h, sent.first + old - past_length, sent.count - old, at + old, arena);
    return finite;
  }

  void Clear(int64_t from, std::byte* arena) const {
    if (step == bytes) {
      std::memset(arena + Row(from), 0, (count - from) * bytes);
      return;
    }
    for (int64_t n = from; n < count; ++n) std::memset(arena + Row(n), 0, bytes);
  }
};

struct Staging::RowTensor {
  int64_t place;
  int64_t heads;
  int64_t length;  // of a head, if the graph is not ragged
  int64_t row_bytes;
  TokenRange BatchRow::*tokens;

  RowTensor At(int64_t another_place) const {
    RowTensor tensor = *this;
    tensor.place = another_place;
    return tensor;
  }
};

Staging::Staging(const SdpaGraph& graph, absl::Span<const Part> parts)
    : graph_(graph), parts_(parts), rows_(static_cast<size_t>(graph.batch)) {
  size_t n = 0;
  for (const Part& part : parts_) {
    const Problem& p = *part.problem;
    const int64_t queries = CropOf(p).queries;
    first_rows_.push_back(n);
    for (int64_t b = 0; b < p.batch; ++b, ++n) {
      rows_[n].queries.count = queries;
      // cuDNN returns NaN for a row without keys, so such a row gets one key of zeros.
      rows_[n].keys.count = std::max<int64_t>(1, KeysOf(p, part.arguments->key_lengths, b).count);
    }
  }
  TokenCounts tokens;
  for (BatchRow& row : rows_) {
    row.queries.first = tokens.queries;
    row.keys.first = tokens.keys;
    tokens.queries += graph_.ragged ? row.queries.count : graph_.query_length;
    tokens.keys += graph_.ragged ? row.keys.count : graph_.key_length;
  }
  layout_ = LayOut(graph_, tokens);
}

Staging::RowTensor Staging::QueryTensor() const {
  return {layout_.query, graph_.query_heads, graph_.query_length,
          graph_.head_size * SizeOf(graph_.dtype), &BatchRow::queries};
}

Staging::RowTensor Staging::KeyTensor() const {
  return {layout_.key, graph_.kv_heads, graph_.key_length, graph_.head_size * SizeOf(graph_.dtype),
          &BatchRow::keys};
}

Staging::RowTensor Staging::ValueTensor() const {
  return {layout_.value, graph_.kv_heads, graph_.key_length,
          graph_.value_head_size * SizeOf(graph_.dtype), &BatchRow::keys};
}

Staging::RowTensor Staging::OutputTensor() const {
  return {layout_.output, graph_.query_heads, graph_.query_length,
          graph_.value_head_size * SizeOf(graph_.dtype), &BatchRow::queries};
}

Staging::HeadRows Staging::RowsOf(const RowTensor& t, const BatchRow& row, int64_t h) const {
  const TokenRange& tokens = row.*t.tokens;
  const int64_t before = tokens.first * t.heads;
  if (!graph_.ragged) {
    return {t.place + (before + h * t.length) * t.row_bytes, t.row_bytes, t.row_bytes, t.length};
  }
  return {t.place + (before + h) * t.row_bytes, t.heads * t.row_bytes, t.row_bytes, tokens.count};
}

std::vector<bool> Staging::StageInputs(std::byte* arena) const {
  std::vector<bool> staged;
  for (size_t n = 0; n < parts_.size(); ++n) staged.push_back(StagePart(n, arena));
  if (graph_.ragged) {
    const auto last = first_rows_.back() + static_cast<size_t>(parts_.back().problem->batch);
    for (size_t n = last; n < rows_.size(); ++n) ClearRow(rows_[n], arena);
    // Kernels read whole tiles and multiply tokens beyond the last one by 0.
    const auto clear = [&](const RowTensor& t, int64_t until) {
      const int64_t begin = t.place + rows_.back().keys.end() * t.heads * t.row_bytes;
      std::memset(arena + begin, 0, until - begin);
    };
    clear(KeyTensor(), layout_.value);
    clear(ValueTensor(), layout_.query_lengths);
  }
  if (graph_.has_lengths) StageLengths(arena);
  return staged;
}

bool Staging::StagePart(size_t part, std::byte* arena) const {
  const Problem& p = *parts_[part].problem;
  const Arguments& a = *parts_[part].arguments;
  const absl::Span<const BatchRow> rows(&rows_[first_rows_[part]], static_cast<size_t>(p.batch));
  const Crop crop = CropOf(p);
  // Rows of a ragged head are far apart: blocks of a few tokens touch few pages at a time.
  const int64_t block = graph_.ragged ? kTokenBlock : kMaxAxis;
  bool finite = true;
  const auto pack =
      [&](const RowTensor& tensor, const BatchRow& row, int64_t count,
          absl::FunctionRef<bool(const HeadRows&, int64_t h, int64_t at, int64_t)> from) {
        for (int64_t at = 0; at < count; at += block) {
          for (int64_t h = 0; h < tensor.heads; ++h) {
            finite &= from(RowsOf(tensor, row, h), h, at, std::min(block, count - at));
          }
        }
        for (int64_t h = 0; h < tensor.heads; ++h) RowsOf(tensor, row, h).Clear(count, arena);
      };
  const auto pack_queries = [&](const RowTensor& tensor, Role role, int64_t b) {
    pack(tensor, rows[b], crop.queries,
         [&](const HeadRows& to, int64_t h, int64_t at, int64_t count) {
           return to.Pack(a.inputs[role], b, h, crop.first_query + at, count, at, arena);
         });
  };
  for (int64_t b = 0; b < p.batch && finite; ++b) {
    pack_queries(QueryTensor(), Role::kQ, b);
    if (graph_.backward) {
      pack_queries(OutputTensor(), Role::kForwardOutput, b);
      pack_queries(OutputTensor().At(layout_.output_gradient), Role::kOutputGradient, b);
    }
    const SentKeys sent = KeysOf(p, a.key_lengths, b);
    pack(KeyTensor(), rows[b], sent.count,
         [&](const HeadRows& to, int64_t h, int64_t at, int64_t count) {
           return to.PackKeys(a.inputs[Role::kPastKey], a.inputs[Role::kK], p.past_length,
                              {sent.first + at, count}, b, h, at, arena);
         });
    pack(ValueTensor(), rows[b], sent.count,
         [&](const HeadRows& to, int64_t h, int64_t at, int64_t count) {
           return to.PackKeys(a.inputs[Role::kPastValue], a.inputs[Role::kV], p.past_length,
                              {sent.first + at, count}, b, h, at, arena);
         });
  }
  if (finite && graph_.bias) {
    finite = PackBias(p, graph_, a, arena + layout_.bias) && !HasFaintRow(p, a);
  }
  if (finite && graph_.backward) finite = StageLse(parts_[part], arena);
  if (finite) return true;
  for (const BatchRow& row : rows) ClearRow(row, arena);
  return false;
}

// Also removes the gradients of rows that see no key, whose lse the device would multiply.
bool Staging::StageLse(const Part& part, std::byte* arena) const {
  const Problem& p = *part.problem;
  const Crop crop = CropOf(p);
  std::memset(arena + layout_.lse, 0, layout_.output_gradient - layout_.lse);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.query_heads; ++h) {
      const HeadRows gradients = RowsOf(OutputTensor().At(layout_.output_gradient), rows_[b], h);
      for (int64_t n = 0; n < crop.queries; ++n) {
        float lse = kLseOfNoKeys;
        if (SeesAKey(p, *part.arguments, b, h, crop.first_query + n)) {
          std::byte element[sizeof(double)];
          const TensorView& given = part.arguments->inputs[Role::kForwardLse];
          given.CopyElement(b, h, crop.first_query + n, 0, element);
          lse = static_cast<float>(LoadElement(element, given.dtype, 0));
          if (!std::isfinite(lse)) return false;
        } else {
          std::memset(arena + gradients.Row(n), 0, gradients.bytes);
        }
        PutAt(arena + layout_.lse, (b * graph_.query_heads + h) * graph_.query_length + n, lse);
      }
    }
  }
  return true;
}

void Staging::ClearRow(const BatchRow& row, std::byte* arena) const {
  for (const RowTensor& tensor : {QueryTensor(), KeyTensor(), ValueTensor()}) {
    for (int64_t h = 0; h < tensor.heads; ++h) RowsOf(tensor, row, h).Clear(0, arena);
  }
}

void Staging::StageLengths(std::byte* arena) const {
  for (size_t n = 0; n < rows_.size(); ++n) {
    PutAt(arena + layout_.query_lengths, n, static_cast<int32_t>(rows_[n].queries.count));
    PutAt(arena + layout_.key_lengths, n, static_cast<int32_t>(rows_[n].keys.count));
  }
  if (!graph_.ragged) return;
  const std::pair<RowTensor, int64_t> offsets[] = {{QueryTensor(), layout_.query_offsets},
                                                   {KeyTensor(), layout_.key_offsets},
                                                   {ValueTensor(), layout_.value_offsets},
                                                   {OutputTensor(), layout_.output_offsets}};
  for (const auto& [tensor, place] : offsets) {
    const int64_t token = tensor.heads * tensor.row_bytes / SizeOf(graph_.dtype);
    for (size_t n = 0; n < rows_.size(); ++n) {
      PutAt(arena + place, n, (rows_[n].*tensor.tokens).first * token);
    }
    PutAt(arena + place, rows_.size(), (rows_.back().*tensor.tokens).end() * token);
  }
}

void Staging::TakeGradients(const Part& part, const std::byte* arena) const {
  const Problem& p = *part.problem;
  const Arguments& a = *part.arguments;
  const Crop crop = CropOf(p);
  const RoleSet& wanted = p.backward->gradients;
  const auto take_keys = [&](const RowTensor& tensor, Role past, Role now, int64_t b) {
    const SentKeys sent = KeysOf(p, a.key_lengths, b);
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      const HeadRows rows = RowsOf(tensor, rows_[b], h);
      for (int64_t j = 0; j < p.total_keys(); ++j) {
        const bool is_past = j < p.past_length;
        const Role role = is_past ? past : now;
        if (!wanted.contains(role)) continue;
        const int64_t n = j - sent.first;
        const bool is_sent = n >= 0 && n < sent.count;
        WriteGradient(a.outputs[role], b, h, is_past ? j : j - p.past_length,
                      is_sent ? arena + rows.Row(n) : nullptr);
      }
    }
  };
  for (int64_t b = 0; b < p.batch; ++b) {
    take_keys(KeyTensor().At(layout_.key_gradient), Role::kDPastKey, Role::kDK, b);
    take_keys(ValueTensor().At(layout_.value_gradient), Role::kDPastValue, Role::kDV, b);
    if (!wanted.contains(Role::kDQ)) continue;
    for (int64_t h = 0; h < p.query_heads; ++h) {
      const HeadRows rows = RowsOf(QueryTensor().At(layout_.query_gradient), rows_[b], h);
      for (int64_t i = 0; i < p.query_length; ++i) {
        const bool sees = SeesAKey(p, a, b, h, i);
        WriteGradient(a.outputs[Role::kDQ], b, h, i,
                      sees ? arena + rows.Row(i - crop.first_query) : nullptr);
      }
    }
  }
}

void Staging::TakeOutputs(size_t part, const std::byte* arena) const {
  if (graph_.backward) return TakeGradients(parts_[part], arena);
  const Problem& p = *parts_[part].problem;
  const Arguments& a = *parts_[part].arguments;
  const Crop crop = CropOf(p);
  const int64_t row_bytes = p.value_head_size * SizeOf(p.dtype);
  for (int64_t b = 0; b < p.batch; ++b) {
    const auto n = static_cast<int64_t>(first_rows_[part]) + b;
    for (int64_t h = 0; h < p.query_heads; ++h) {
      const HeadRows rows = RowsOf(OutputTensor(), rows_[n], h);
      for (int64_t i = 0; i < p.query_length; ++i) {
        if (!SeesAKey(p, a, b, h, i)) {
          WriteMaskedRow(p, a, b, h, i);
          continue;
        }
        const int64_t query = i - crop.first_query;
        const std::byte* row = arena + rows.Row(query);
        const int64_t index = (n * graph_.query_heads + h) * graph_.query_length + query;
        float lse;
        std::memcpy(&lse, arena + layout_.lse + index * sizeof(lse), sizeof(lse));
        if (p.folds) {
          FoldRow(graph_, a.state, b, h, i, row, lse);
          continue;
        }
        std::memcpy(a.outputs[Role::kY].Row(b, h, i), row, row_bytes);
        if (p.wants_lse) {
          StoreElement(a.outputs[Role::kLse].Row(b, h, i), a.outputs[Role::kLse].dtype, 0, lse);
        }
      }
    }
  }
}

void WriteFullyMasked(const Problem& p, const Arguments& a) {
  if (p.backward) {
    for (Role role : p.backward->gradients) {
      const MutableTensorView& gradient = a.outputs[role];
      for (int64_t b = 0; b < gradient.dims[0]; ++b) {
        for (int64_t h = 0; h < gradient.dims[1]; ++h) {
          for (int64_t s = 0; s < gradient.dims[2]; ++s) WriteGradient(gradient, b, h, s, nullptr);
        }
      }
    }
    return;
  }
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.query_heads; ++h) {
      for (int64_t i = 0; i < p.query_length; ++i) WriteMaskedRow(p, a, b, h, i);
    }
  }
}

}  // namespace rapt::cudnn
