#ifndef RAPT_SERVER_PROTOCOLS_LENT_MEMORY_H_
#define RAPT_SERVER_PROTOCOLS_LENT_MEMORY_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/operator.h"
#include "server/request.h"
#include "server/shared_memory/shared_memory.h"

namespace rapt {

// The shared memory that one request's tensors are in. `field` is what the protocol calls the
// tensor: "input Q".
class LentMemory {
 public:
  explicit LentMemory(const SharedMemory& shared_memory) : shared_memory_(shared_memory) {}

  // The bytes of an input that has `bytes` of them. InvalidArgument where the reference has more or
  // fewer; otherwise as SharedMemory::Find().
  absl::StatusOr<InputBytes> FindInput(const std::string& field, const SharedReference& reference,
                                       int64_t bytes);

  // The place of an output. InvalidArgument where it is too small or not aligned to its elements.
  absl::StatusOr<OutputPlace> FindOutput(const std::string& field, const SharedReference& reference,
                                         const TensorSpec& spec);

  // Lets the request hold the memory, beside what it holds already, and watch it.
  void LendTo(Request& request) &&;

 private:
  absl::StatusOr<OutputPlace> Find(const std::string& field, const SharedReference& reference);

  const SharedMemory& shared_memory_;
  std::vector<std::shared_ptr<const Region>> regions_;  // distinct ones
};

}  // namespace rapt

#endif  // RAPT_SERVER_PROTOCOLS_LENT_MEMORY_H_
