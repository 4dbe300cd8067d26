// A POSIX shared memory object for one test.
#ifndef RAPT_TESTS_SUPPORT_SHARED_OBJECT_H_
#define RAPT_TESTS_SUPPORT_SHARED_OBJECT_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/types/span.h"

namespace rapt::test {

// Mapped until it is destroyed, then unlinked.
class SharedObject {
 public:
  // Its name is "/PREFIX-" and a unique suffix.
  explicit SharedObject(int64_t bytes, const std::string& prefix = "rapt");
  ~SharedObject();
  SharedObject(const SharedObject&) = delete;
  SharedObject& operator=(const SharedObject&) = delete;

  const std::string& key() const { return key_; }
  int64_t size() const { return bytes_; }
  std::byte* data() const { return data_; }
  template <typename T>
  absl::Span<T> Values(int64_t offset, int64_t count) const {
    return {reinterpret_cast<T*>(data_ + offset), static_cast<size_t>(count)};
  }

  // Truncates the object for all processes that mapped it. This mapping must not be accessed
  // afterwards either.
  void Truncate(int64_t bytes);

 private:
  const std::string key_;
  const int64_t bytes_;
  int descriptor_;
  std::byte* data_;
};

// Places an input or output of an Open Inference Protocol message in a region.
template <typename Tensor>
void Share(Tensor& tensor, const std::string& region, int64_t offset, int64_t byte_size) {
  auto& parameters = *tensor.mutable_parameters();
  parameters["shared_memory_region"].set_string_param(region);
  parameters["shared_memory_offset"].set_int64_param(offset);
  parameters["shared_memory_byte_size"].set_int64_param(byte_size);
}

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_SHARED_OBJECT_H_
