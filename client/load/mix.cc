#include "client/load/mix.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "client/load/random.h"

namespace rapt::load {
namespace {

constexpr int64_t kMaxAxis = int64_t{1} << 24;

struct NamedMix {
  absl::string_view name;
  absl::string_view shapes;
};

constexpr NamedMix kMixes[] = {
    // Self-attention of a batch, as in tutorials.
    {"tutorial", "32x8x64x64, 32x8x128x64, 32x8x256x64, 32x8x512x64"},
    // A language model server: few prompts, then one token at a time over cached keys.
    {"prefill-decode",
     "1x32/8x~512x128 causal weight=1, 4x32/8x1:1024x128 weight=8, 8x32/8x1:2048x128 weight=4"},
    {"tiny", "1x1x16x64"},
    {"short", "32x8x128x64"},
};

absl::string_view Absl(std::string_view text) { return {text.data(), text.size()}; }

absl::Status ShapeError(absl::string_view spec, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrFormat("the shape '%s' %s; a shape is BxHxSxD, such as '1x8x1024x64' or "
                      "'8x32/8x1:4096x128 bf16 causal'",
                      spec, why));
}

bool ParseAxis(absl::string_view text, int64_t* value) {
  return absl::SimpleAtoi(text, value) && *value >= 1 && *value <= kMaxAxis;
}

// Quantile of the standard normal distribution, by Newton's method.
double NormalQuantile(double share) {
  double x = 0;
  for (int i = 0; i < 50; ++i) {
    const double below = 0.5 * std::erfc(-x / std::sqrt(2.0));
    const double density = std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
    x -= std::clamp((below - share) / density, -1.0, 1.0);
  }
  return x;
}

// Parses a number, or a distribution into its quantiles.
std::optional<std::vector<int64_t>> ParseLengths(absl::string_view text, int64_t variants) {
  constexpr double kSigma = 0.7;  // typical of prompts: one in six exceeds twice the median
  const auto quantiles = [variants](const auto& value_at) {
    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < variants; ++i) {
      const double share = (static_cast<double>(i) + 0.5) / static_cast<double>(variants);
      lengths.push_back(std::max<int64_t>(1, std::llround(value_at(share))));
    }
    return lengths;
  };
  int64_t low = 0, high = 0;
  if (absl::ConsumePrefix(&text, "~")) {
    if (!ParseAxis(text, &low)) return std::nullopt;
    return quantiles([low](double share) {
      return static_cast<double>(low) * std::exp(kSigma * NormalQuantile(share));
    });
  }
  const std::vector<absl::string_view> ends = absl::StrSplit(text, "..");
  if (ends.size() > 2 || !ParseAxis(ends.front(), &low) || !ParseAxis(ends.back(), &high) ||
      high < low) {
    return std::nullopt;
  }
  if (low == high) return std::vector<int64_t>{low};
  return quantiles([low, high](double share) {
    return static_cast<double>(low) + share * static_cast<double>(high - low);
  });
}

// Splits "8/2"; "8" stands for both parts.
bool ParsePair(absl::string_view text, char separator, absl::string_view* first,
               absl::string_view* second) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, separator);
  *first = parts.front();
  *second = parts.back();
  return parts.size() <= 2;
}

// Applies a word after the axes.
absl::Status ReadWord(absl::string_view word, CallShape& shape) {
  const std::string lower = absl::AsciiStrToLower(word);
  if (lower == "causal" || lower == "ragged") {
    (lower == "causal" ? shape.causal : shape.ragged) = true;
    return absl::OkStatus();
  }
  absl::string_view value = lower;
  if (absl::ConsumePrefix(&value, "weight=")) {
    if (absl::SimpleAtod(value, &shape.weight) && shape.weight > 0 && shape.weight <= 1e9) {
      return absl::OkStatus();
    }
    return Invalid("has an invalid weight; it must be above 0 and at most 1e9");
  }
  if (absl::ConsumePrefix(&value, "mask=")) {
    const absl::StatusOr<MaskKind> mask = ParseMask(std::string(value));
    if (!mask.ok()) {
      return Invalid("has an ", mask.status().message());
    }
    shape.mask = *mask;
    return absl::OkStatus();
  }
  const absl::StatusOr<client::DType> dtype = ParseDType(lower);
  if (!dtype.ok())
    return absl::InvalidArgumentError(absl::StrFormat("has the unknown word '%s'", word));
  shape.dtype = *dtype;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<CallShape>> ParseSpec(absl::string_view spec, int64_t variants,
                                                 const ShapeDefaults& defaults) {
  const std::vector<absl::string_view> words =
      absl::StrSplit(spec, absl::ByAnyChar(" \t"), absl::SkipEmpty());
  CallShape shape{.dtype = defaults.dtype,
                  .causal = defaults.causal,
                  .ragged = defaults.ragged,
                  .mask = defaults.mask};
  for (size_t i = 1; i < words.size(); ++i) {
    if (absl::Status read = ReadWord(words[i], shape); !read.ok()) {
      return ShapeError(spec, read.message());
    }
  }
  const std::vector<absl::string_view> axes = absl::StrSplit(words.front(), 'x');
  if (axes.size() != 4) {
    return ShapeError(spec, absl::StrFormat("has %d axes, not 4", axes.size()));
  }
  absl::string_view query_heads, kv_heads, queries, keys;
  if (!ParseAxis(axes[0], &shape.batch) || !ParseAxis(axes[3], &shape.head_size) ||
      !ParsePair(axes[1], '/', &query_heads, &kv_heads) ||
      !ParseAxis(query_heads, &shape.query_heads) || !ParseAxis(kv_heads, &shape.kv_heads) ||
      !ParsePair(axes[2], ':', &queries, &keys)) {
    return ShapeError(spec, "has an invalid axis; it must be a whole number from 1 to 16777216");
  }
  if (shape.query_heads % shape.kv_heads != 0) {
    return ShapeError(spec, "has query heads that are not a multiple of the key heads");
  }
  const auto query_lengths = ParseLengths(queries, variants);
  const auto key_lengths = ParseLengths(keys, variants);
  if (!query_lengths || !key_lengths) {
    return ShapeError(
        spec,
        "has an invalid length; it must be a number, a range like 128..2048 or a median like ~512");
  }
  const bool is_self = queries == keys;
  std::vector<CallShape> shapes;
  for (const int64_t query_length : *query_lengths) {
    for (const int64_t key_length : *key_lengths) {
      if (is_self && key_length != query_length) continue;
      shape.queries = query_length;
      shape.keys = key_length;
      shapes.push_back(shape);
    }
  }
  for (CallShape& one : shapes) one.weight /= static_cast<double>(shapes.size());
  return shapes;
}

const NamedMix* FindMix(absl::string_view name) {
  const auto* found = std::find_if(std::begin(kMixes), std::end(kMixes),
                                   [name](const NamedMix& mix) { return mix.name == name; });
  return found == std::end(kMixes) ? nullptr : found;
}

}  // namespace

absl::StatusOr<MaskKind> ParseMask(std::string_view text) {
  constexpr std::pair<std::string_view, MaskKind> kKinds[] = {{"none", MaskKind::kNone},
                                                              {"bool", MaskKind::kBool},
                                                              {"float", MaskKind::kFloat},
                                                              {"padding", MaskKind::kPadding}};
  for (const auto& [name, kind] : kKinds) {
    if (text == name) return kind;
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("unknown mask '%s'; it must be none, bool, float or padding", text));
}

absl::StatusOr<client::DType> ParseDType(std::string_view text) {
  for (const client::DType dtype : {client::DType::kFloat32, client::DType::kFloat16,
                                    client::DType::kBFloat16, client::DType::kFloat64}) {
    if (absl::EqualsIgnoreCase(Absl(text), client::NameOf(dtype))) return dtype;
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("unknown type '%s'; it must be fp32, fp16, bf16 or fp64", text));
}

std::string Describe(const CallShape& shape) {
  std::string text = absl::StrCat(shape.batch, "x", shape.query_heads);
  if (shape.kv_heads != shape.query_heads) absl::StrAppend(&text, "/", shape.kv_heads);
  absl::StrAppend(&text, "x", shape.queries);
  if (shape.keys != shape.queries) absl::StrAppend(&text, ":", shape.keys);
  absl::StrAppend(&text, "x", shape.head_size, " ", client::NameOf(shape.dtype));
  if (shape.causal) absl::StrAppend(&text, " causal");
  if (shape.ragged) absl::StrAppend(&text, " ragged");
  switch (shape.mask) {
    case MaskKind::kNone:
      break;
    case MaskKind::kBool:
      absl::StrAppend(&text, " mask=bool");
      break;
    case MaskKind::kFloat:
      absl::StrAppend(&text, " mask=float");
      break;
    case MaskKind::kPadding:
      absl::StrAppend(&text, " mask=padding");
      break;
  }
  return text;
}

absl::StatusOr<std::vector<CallShape>> ParseMix(std::string_view text, int64_t variants,
                                                const ShapeDefaults& defaults) {
  std::vector<CallShape> shapes;
  for (const absl::string_view line : absl::StrSplit(Absl(text), '\n')) {
    const std::pair<absl::string_view, absl::string_view> uncommented =
        absl::StrSplit(line, absl::MaxSplits('#', 1));
    for (absl::string_view spec : absl::StrSplit(uncommented.first, ',')) {
      spec = absl::StripAsciiWhitespace(spec);
      if (spec.empty()) continue;
      const NamedMix* mix = FindMix(spec);
      RAPT_ASSIGN_OR_RETURN(
          const std::vector<CallShape> parsed,
          mix != nullptr ? ParseMix({mix->shapes.data(), mix->shapes.size()}, variants, defaults)
                         : ParseSpec(spec, variants, defaults));
      shapes.insert(shapes.end(), parsed.begin(), parsed.end());
    }
  }
  if (shapes.empty()) return Invalid("the mix is empty; it must have at least one shape");
  return shapes;
}

ShapeChoice::ShapeChoice(const std::vector<CallShape>& shapes, uint64_t seed) : seed_(seed) {
  double all = 0, sum = 0;
  for (const CallShape& shape : shapes) all += shape.weight;
  for (const CallShape& shape : shapes) up_to_.push_back((sum += shape.weight) / all);
}

size_t ShapeChoice::operator()(uint64_t n) const {
  const double draw = UnitDraw(seed_, n);
  const auto chosen = std::upper_bound(up_to_.begin(), up_to_.end() - 1, draw);
  return static_cast<size_t>(chosen - up_to_.begin());
}

}  // namespace rapt::load
