#ifndef RAPT_SERVER_PROTOCOLS_SHARED_TENSORS_H_
#define RAPT_SERVER_PROTOCOLS_SHARED_TENSORS_H_

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

// The shared memory of one request's tensors. `field` is the protocol's name of the tensor:
// "input Q".
class SharedTensors {
 public:
  explicit SharedTensors(const SharedMemory& shared_memory) : shared_memory_(shared_memory) {}

  // Returns the bytes of an input of `bytes` bytes. InvalidArgument if the reference has a
  // different size; otherwise as SharedMemory::Find().
  absl::StatusOr<InputBytes> FindInput(const std::string& field, const SharedReference& reference,
                                       int64_t bytes);

  // Returns the memory of an output. InvalidArgument if it is too small or not aligned to its
  // elements.
  absl::StatusOr<OutputPlace> FindOutput(const std::string& field, const SharedReference& reference,
                                         const TensorSpec& spec);

  // Makes the request own the memory, in addition to its previous owner, and check that it is
  // intact.
  void TransferTo(Request& request) &&;

 private:
  absl::StatusOr<OutputPlace> Find(const std::string& field, const SharedReference& reference);

  const SharedMemory& shared_memory_;
  std::vector<std::shared_ptr<const Region>> regions_;  // distinct ones
};

}  // namespace rapt

#endif  // RAPT_SERVER_PROTOCOLS_SHARED_TENSORS_H_
