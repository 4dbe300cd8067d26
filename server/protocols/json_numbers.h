// Numbers of tensors in JSON.
#ifndef RAPT_SERVER_PROTOCOLS_JSON_NUMBERS_H_
#define RAPT_SERVER_PROTOCOLS_JSON_NUMBERS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "attention/operator.h"
#include "base/buffer_pool.h"

namespace rapt {

// A value that is neither null nor an array nor an object, as parsers give it.
using JsonScalar = std::variant<bool, int64_t, uint64_t, double, absl::string_view>;

// Returns the value for an error: "1e+39", "'abc'".
std::string TextOf(const JsonScalar& value);

// Returns the integer; nullopt if it is none or exceeds int64_t.
std::optional<int64_t> IntegerOf(const JsonScalar& value);

// The numbers of a tensor, which are stored while they are read. Those that are not finite are
// "NaN", "Infinity" and "-Infinity", as in ProtoJSON. Until Begin() they are only counted.
struct JsonNumbers {
  // `left`: numbers that the rest of the JSON may have. If the tensor has more, its count is wrong,
  // and no memory is taken. InvalidArgument, with the tensor's name, if its size overflows.
  absl::Status Begin(absl::string_view name, const TensorSpec& spec, BufferPool& pool,
                     int64_t& left);
  // Returns false if the type does not have the value.
  bool Add(const JsonScalar& value);

  int64_t count = 0;          // so far
  int64_t wanted = 0;         // by the shape
  PooledBuffer place;         // null: numbers are only counted
  absl::string_view allowed;  // "it must be an integer within the type"

 private:
  bool (*store_)(const JsonScalar& value, std::byte* place) = nullptr;
  int64_t size_ = 0;  // of a number
};

}  // namespace rapt

#endif  // RAPT_SERVER_PROTOCOLS_JSON_NUMBERS_H_
