#include "attention/rotary/checks.h"

#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/checked_math.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

absl::Status BothSet(absl::string_view a, absl::string_view b, absl::string_view why) {
  return Invalid(a, " and ", b, " are both set; ", why);
}

absl::Status CheckIdsNeedRotary(const Problem& p, const FieldNames& names) {
  for (const auto& [role, given] : {std::pair{Role::kPositionIds, p.has_position_ids},
                                    {Role::kKeyPositionIds, p.has_key_position_ids}}) {
    if (!given) continue;
    return Invalid(names[role], " is set, but neither ", names[Role::kCosCache], " nor ",
                   names[Attribute::kRopeTheta], " is; nothing is rotated");
  }
  return absl::OkStatus();
}

absl::Status CheckSize(const Problem& p, const FieldNames& names) {
  const int64_t size = p.rotary_size();
  if (size % 2 == 0 && size <= p.head_size) return absl::OkStatus();
  if (p.rotary_embedding_dim == 0) {
    return Invalid("the head size of ", names[Role::kQ], " is ", size,
                   "; with rotary embedding of all of it, it must be even");
  }
  return Invalid(names[Attribute::kRotaryDim], " is ", size, "; it must be even and at most ",
                 p.head_size, ", the head size of ", names[Role::kQ]);
}

absl::Status CheckCacheByRow(const Problem& p, const FieldNames& names) {
  const RotaryCache& cache = *p.rotary_cache;
  const absl::string_view name = names[Role::kCosCache];
  if (p.has_position_ids || p.has_key_position_ids) {
    const Role ids = p.has_position_ids ? Role::kPositionIds : Role::kKeyPositionIds;
    return BothSet(names[ids], absl::StrCat(name, " [B, S, r/2]"),
                   "ids are for a cache by position, [M, r/2]");
  }
  if (p.section) return Invalid(name, " must be [M, r/2] in a section of a problem");
  if (cache.batch != p.batch || (!p.empty() && cache.rows != p.query_length)) {
    return Invalid(name, " is [", *cache.batch, ", ", cache.rows, ", ", cache.pairs,
                   "]; it must be [M, r/2], or [", p.batch, ", ", p.query_length,
                   ", r/2] with the batch and length of ", names[Role::kQ]);
  }
  if (!p.rotates_keys() || p.key_length == cache.rows) return absl::OkStatus();
  return Invalid(name, " is [", *cache.batch, ", ", cache.rows, ", ", cache.pairs, "], but ",
                 names[Role::kK], " has length ", p.key_length, "; the lengths must be equal, or ",
                 names[Attribute::kRotaryKeys], " false");
}

absl::Status CheckPosition(absl::string_view name, int64_t position, const Problem& p,
                           const FieldNames& names) {
  if (position >= 0 && position < p.rotary_cache->rows) return absl::OkStatus();
  return Invalid("the position of ", name, " is ", position, "; it must be from 0 to ",
                 p.rotary_cache->rows - 1, ", the last row of ", names[Role::kCosCache]);
}

// Checks the position of query 0 and of the last one.
absl::Status CheckQueries(const Problem& p, absl::Span<const int64_t> key_lengths, int64_t b,
                          const FieldNames& names) {
  for (const int64_t i : {int64_t{0}, p.query_length - 1}) {
    RAPT_RETURN_IF_ERROR(CheckPosition(absl::StrCat("query ", i, " of batch row ", b),
                                       QueryPosition(p, key_lengths, b, i), p, names));
  }
  return absl::OkStatus();
}

absl::Status CheckCacheByPosition(const Problem& p, const FieldNames& names) {
  const bool has_keys = p.rotates_keys() && !p.has_key_position_ids && p.key_length > 0;
  if (has_keys) {
    const int64_t last = p.key_length - 1;
    RAPT_RETURN_IF_ERROR(CheckPosition(absl::StrCat("row ", last, " of ", names[Role::kK]),
                                       KeyPosition(p, last), p, names));
  }
  return PositionVaries(p) ? absl::OkStatus() : CheckQueryPositions(p, {}, names);
}

absl::Status CheckCache(const Problem& p, const FieldNames& names) {
  const RotaryCache& cache = *p.rotary_cache;
  const absl::string_view name = names[Role::kCosCache];
  RAPT_RETURN_IF_ERROR(CheckTableType(name, cache.dtype, p.dtype, names[Role::kQ]));
  for (const int64_t size : {cache.batch.value_or(1), cache.rows, cache.pairs}) {
    if (size >= 0 && size <= kMaxAxis) continue;
    return Invalid(name, " has an axis of ", size, "; it must be from 0 to 2^40");
  }
  if (cache.pairs != p.rotary_size() / 2) {
    return Invalid(name, " has a last axis of ", cache.pairs, "; it must be ", p.rotary_size() / 2,
                   ", half of ", names[Attribute::kRotaryDim], " or of the head size");
  }
  const std::optional<int64_t> bytes = CheckedMul(cache.rows, 8 * 8 * cache.pairs);
  if (!bytes || !CheckedMul(*bytes, cache.batch.value_or(1))) {
    return Invalid("the size of ", name, " overflows 64 bits");
  }
  return cache.by_position() ? CheckCacheByPosition(p, names) : CheckCacheByRow(p, names);
}

// Under the names of Hugging Face's configurations.
absl::Status CheckScaling(const Problem& p, const FieldNames& names) {
  const RopeScaling& s = *p.rope_scaling;
  const absl::string_view theta = names[Attribute::kRopeTheta];
  if (!p.rope_theta) return Invalid("rope_scaling is set, but ", theta, " is not");
  const bool is_yarn = s.type == RopeScaling::Type::kYarn;
  const absl::string_view slow = is_yarn ? "beta_slow" : "low_freq_factor";
  const absl::string_view fast = is_yarn ? "beta_fast" : "high_freq_factor";
  const struct {
    absl::string_view name;
    double value;
    bool fits;
    const char* allowed;
  } numbers[] = {
      {"factor", s.factor, s.factor >= 1, "at least 1"},
      {"original_max_position_embeddings", s.original_length, s.original_length >= 1, "at least 1"},
      {slow, s.slow, s.slow > 0, "positive"},
      {fast, s.fast, s.fast > 0, "positive"},
      {"attention_factor", s.attention_factor, s.attention_factor > 0, "positive"}};
  for (const auto& [name, value, fits, allowed] : numbers) {
    if (std::isfinite(value) && fits) continue;
    return Invalid("rope_scaling's ", name, " is ", value, "; it must be finite and ", allowed);
  }
  if (s.type == RopeScaling::Type::kLlama3 && s.slow >= s.fast) {
    return Invalid("rope_scaling's ", slow, " is ", s.slow, "; it must be less than ", fast, ", ",
                   s.fast);
  }
  if (is_yarn && s.slow > s.fast) {
    return Invalid("rope_scaling's ", slow, " is ", s.slow, "; it must be at most ", fast, ", ",
                   s.fast);
  }
  if (!is_yarn || *p.rope_theta > 1) return absl::OkStatus();
  return Invalid(theta, " is ", *p.rope_theta, "; with YaRN it must be more than 1");
}

}  // namespace

absl::Status CheckRotary(const Problem& p, const FieldNames& names) {
  if (p.rope_scaling) {
    RAPT_RETURN_IF_ERROR(CheckScaling(p, names));
  }
  if (!p.has_rotary()) return CheckIdsNeedRotary(p, names);
  if (p.rotary_cache && p.rope_theta) {
    return BothSet(names[Role::kCosCache], names[Attribute::kRopeTheta],
                   "at most one of them may be");
  }
  if (p.values_in_keys && p.rotates_keys()) {
    return BothSet(names[Attribute::kValueHeadSize],
                   p.rope_theta ? names[Attribute::kRopeTheta] : names[Role::kCosCache],
                   absl::StrCat("the values in the keys are not rotated, so ",
                                names[Attribute::kRotaryKeys], " must be false"));
  }
  if (p.has_key_position_ids && !p.rotates_keys()) {
    return Invalid(names[Role::kKeyPositionIds], " is set, but ", names[Attribute::kRotaryKeys],
                   " is false");
  }
  absl::Status status = CheckSize(p, names);
  return status.ok() && p.rotary_cache ? CheckCache(p, names) : status;
}

absl::Status CheckQueryPositions(const Problem& p, absl::Span<const int64_t> key_lengths,
                                 const FieldNames& names) {
  const bool by_default = p.rotary_cache && p.rotary_cache->by_position() && !p.has_position_ids;
  if (!by_default || p.empty()) return absl::OkStatus();
  const int64_t different = PositionVaries(p) ? p.batch : 1;
  for (int64_t b = 0; b < different; ++b) {
    RAPT_RETURN_IF_ERROR(CheckQueries(p, key_lengths, b, names));
  }
  return absl::OkStatus();
}

absl::Status CheckPositionIds(Role role, const Problem& p, const Arguments& a,
                              const FieldNames& names) {
  if (!InfoOf(role).wanted(p) || !p.rotary_cache) return absl::OkStatus();
  const TensorView& ids = a.inputs[role];
  for (int64_t b = 0; b < ids.dims[0]; ++b) {
    for (int64_t s = 0; s < ids.dims[1]; ++s) {
      int64_t position;
      std::memcpy(&position, ids.Row(b, s, 0), sizeof(position));
      if (position >= 0 && position < p.rotary_cache->rows) continue;
      return Invalid(names[role], "[", b, ", ", s, "] is ", position, "; it must be from 0 to ",
                     p.rotary_cache->rows - 1, ", the last row of ", names[Role::kCosCache]);
    }
  }
  return absl::OkStatus();
}

}  // namespace rapt
