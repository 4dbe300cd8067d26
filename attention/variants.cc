#include "attention/variants.h"

#include <algorithm>

namespace rapt {
namespace {

bool IsPlain(const Problem& problem) {
  const absl::Span<const VariantInfo> others = Variants().subspan(1);
  return std::none_of(others.begin(), others.end(),
                      [&problem](const VariantInfo& variant) { return variant.used(problem); });
}

template <Normalizer kNormalizer>
bool Normalizes(const Problem& p) {
  return p.normalizer == kNormalizer;
}

constexpr VariantInfo kTable[] = {
    {"plain", IsPlain},
    {"backward", [](const Problem& p) { return p.backward.has_value(); }},
    {"head_sink", [](const Problem& p) { return p.head_sink.has_value(); }},
    {"v_head_size", [](const Problem& p) { return p.values_in_keys; }},
    {"rotary", [](const Problem& p) { return p.has_rotary(); }},
    {"alibi", [](const Problem& p) { return p.alibi || p.alibi_slopes; }},
    {"bias_table", [](const Problem& p) { return p.bias_table.has_value(); }},
    {"relative_bias", [](const Problem& p) { return p.relative_bias.has_value(); }},
    {"relative_vectors", [](const Problem& p) { return p.has_relative_vectors(); }},
    {"additive", [](const Problem& p) { return p.is_additive(); }},
    {"sparsemax", Normalizes<Normalizer::kSparsemax>},
    {"entmax15", Normalizes<Normalizer::kEntmax15>},
    {"entmax", Normalizes<Normalizer::kEntmax>},
    {"block_mask", [](const Problem& p) { return p.block_mask.has_value(); }},
    {"selected_indices", [](const Problem& p) { return p.selected.has_value(); }},
    {"prefix_keys", [](const Problem& p) { return p.prefix_keys > 0; }},
    {"global_mask", [](const Problem& p) { return p.has_global_mask; }},
};

}  // namespace

absl::Span<const VariantInfo> Variants() { return kTable; }

}  // namespace rapt
