#ifndef RAPT_SERVER_PROTOCOLS_OIP_INFER_FIELDS_H_
#define RAPT_SERVER_PROTOCOLS_OIP_INFER_FIELDS_H_

#include <google/protobuf/arena.h>

#include <cstdint>
#include <map>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/inference/grpc_service.pb.h"
#include "server/request.h"

namespace rapt::oip {

// A request for inference without the bytes of its tensors, and where these are. A protocol may
// derive from it to own them.
struct InferFields {
  // Typed contents of an input that are read in place, and the field that contains them.
  struct LargeContents {
    int field;
    InputBytes bytes;
  };

  virtual ~InferFields() = default;

  // Returns the bytes of memory that the encoding of a response with these outputs takes in
  // addition to them. Null: the output is in shared memory. ResourceExhausted if the response would
  // be too large.
  virtual absl::StatusOr<int64_t> EncodingBytes(
      absl::Span<const TensorSpec* const> /*outputs*/) const {
    return 0;
  }

  bool HasContents(int input) const {
    return message.inputs(input).has_contents() || contents.count(input) > 0;
  }

  google::protobuf::Arena arena{OneBlock()};
  inference::ModelInferRequest& message =
      *google::protobuf::Arena::CreateMessage<inference::ModelInferRequest>(&arena);
  // Those of the inputs that are not in shared memory, in order. Empty: all are typed contents.
  absl::InlinedVector<InputBytes, 4> raw;
  std::map<int, LargeContents> contents;  // by input

 private:
  // A parsed message without its payloads takes one or two KiB.
  static google::protobuf::ArenaOptions OneBlock() {
    google::protobuf::ArenaOptions options;
    options.start_block_size = 2048;
    return options;
  }
};

}  // namespace rapt::oip

#endif  // RAPT_SERVER_PROTOCOLS_OIP_INFER_FIELDS_H_
