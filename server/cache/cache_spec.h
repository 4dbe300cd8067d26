// What a cache is made of.
#ifndef RAPT_SERVER_CACHE_CACHE_SPEC_H_
#define RAPT_SERVER_CACHE_CACHE_SPEC_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/cache/limits.h"
#include "server/cache/page_list.h"

namespace rapt::cache {

// `layers` layers of one form.
struct LayerShape {
  int64_t layers = 1;
  TokenShape token;
  // A token at position t stays while t < keep_first, or a row at position p with p - t < keep_last
  // may come. keep_last 0: all stay.
  int64_t keep_first = 0;
  int64_t keep_last = 0;

  bool operator==(const LayerShape&) const = default;
};

// A new cache, and a fork.
struct CacheSpec {
  std::string name = {};  // empty: every call makes a new cache
  std::vector<LayerShape> shapes = {};
  int64_t first_position = 0;
  int64_t reserve_tokens = 0;         // pages for this many tokens of every layer are taken at once
  std::chrono::nanoseconds lease{0};  // 0: the default
};
struct ForkSpec {
  std::string cache = {};
  uint64_t generation = 0;             // of `cache`
  std::optional<int64_t> length = {};  // absent: the least of the layers' lengths
  std::string name = {};
  int64_t reserve_tokens = 0;
  std::chrono::nanoseconds lease{0};  // 0: as `cache`
};

// InvalidArgument names the field, what came and what is allowed. The lease is not checked.
absl::Status Validate(const CacheSpec& spec);
absl::Status ValidateName(absl::string_view name);
absl::Status ValidateReservation(int64_t reserve_tokens);

}  // namespace rapt::cache

#endif  // RAPT_SERVER_CACHE_CACHE_SPEC_H_
