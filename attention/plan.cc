#include "attention/plan.h"

#include "absl/strings/str_cat.h"
#include "attention/backend.h"

namespace rapt {

std::string Plan::Describe() const {
  std::string text(routing.backend->name());
  if (!isa.empty()) absl::StrAppend(&text, "/", isa);
  if (stages.empty()) return absl::StrCat(text, " empty");
  if (tiles.query_block > 0) absl::StrAppend(&text, " q", tiles.query_block);
  if (tiles.key_block > 0) absl::StrAppend(&text, " k", tiles.key_block, " s", tiles.key_splits);
  return text;
}

}  // namespace rapt
