// The table of variants of attention, those of docs/variants.md, for statistics of what is used.
#ifndef RAPT_ATTENTION_VARIANTS_H_
#define RAPT_ATTENTION_VARIANTS_H_

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/problem.h"

namespace rapt {

struct VariantInfo {
  absl::string_view name;  // a label of metrics
  bool (*used)(const Problem& problem);
};

// A problem may use several. The first, "plain", is used by a problem that uses no other.
absl::Span<const VariantInfo> Variants();

}  // namespace rapt

#endif  // RAPT_ATTENTION_VARIANTS_H_
