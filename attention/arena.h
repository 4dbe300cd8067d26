// Divides memory into arrays.
#ifndef RAPT_ATTENTION_ARENA_H_
#define RAPT_ATTENTION_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>

#include "attention/plan.h"
#include "base/checked_math.h"
#include "base/round_up.h"

namespace rapt {

// An array of T in a workspace.
template <typename T>
struct ArrayAt {
  int64_t offset = 0;

  T* In(std::byte* workspace) const { return reinterpret_cast<T*>(workspace + offset); }
};

class Arena {
 public:
  // Returns an array whose length is the product of the factors, none of which is negative.
  template <typename T>
  ArrayAt<T> Take(std::initializer_list<int64_t> factors) {
    const ArrayAt<T> array{bytes_};
    const std::optional<int64_t> count = CheckedProduct({factors.begin(), factors.size()});
    if (!count || *count > kMostBytes / static_cast<int64_t>(sizeof(T))) {
      fits_ = false;
      return array;
    }
    bytes_ += RoundUp(*count * static_cast<int64_t>(sizeof(T)), kWorkspaceAlignment);
    fits_ = fits_ && bytes_ <= kMostBytes;
    return array;
  }

  int64_t bytes() const { return bytes_; }
  // Returns whether the arrays have at most 2^50 bytes; if not, bytes() is too small.
  bool fits() const { return fits_; }

 private:
  static constexpr int64_t kMostBytes = int64_t{1} << 50;

  int64_t bytes_ = 0;
  bool fits_ = true;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_ARENA_H_
