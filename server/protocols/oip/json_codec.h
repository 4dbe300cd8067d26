// Inference in JSON, with tensors as numbers or as binary data after the JSON, as Triton defines
// it.
#ifndef RAPT_SERVER_PROTOCOLS_OIP_JSON_CODEC_H_
#define RAPT_SERVER_PROTOCOLS_OIP_JSON_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/buffer_pool.h"
#include "server/protocols/message_parts.h"
#include "server/protocols/oip/codec.h"
#include "server/protocols/oip/infer_fields.h"
#include "server/request.h"

namespace rapt::oip {

// A tensor takes at most this many times the bytes of its numbers in JSON: "1," becomes 8 bytes.
inline constexpr int64_t kTypedBytesPerJsonByte = 4;

// Which outputs of an answer are binary data after the JSON.
struct BinaryOutputs {
  bool IsBinary(size_t output) const { return named.empty() ? all : named[output]; }

  std::vector<bool> named;  // of the outputs that the request names
  bool all = false;         // if it names none
};

// The fields of a request, without the model's name. Owns the tensors that were numbers; others lie
// in the body.
struct JsonInfer final : InferFields {
  // Returns the bytes of the answer's JSON, at most.
  absl::StatusOr<int64_t> EncodingBytes(absl::Span<const TensorSpec* const> outputs) const override;

  std::vector<PooledBuffer> numbers;
  BinaryOutputs binary;
  int64_t max_json_bytes = 0;  // of the answer
};

// Reads a body whose first `json_bytes` are JSON. The result refers to the body. Allocates from
// `pool` at most kTypedBytesPerJsonByte for each byte of JSON. The answer may have `max_json_bytes`
// of JSON. InvalidArgument names the field or the input, the value received and the values allowed.
// Throws std::bad_alloc.
absl::StatusOr<std::shared_ptr<JsonInfer>> ReadJsonInfer(const MessageBytes& body,
                                                         int64_t json_bytes, int64_t max_json_bytes,
                                                         BufferPool& pool);

struct JsonAnswer {
  std::string json;
  std::vector<OutputBuffer> binary;  // follow the JSON
};

// Encodes an answer. ResourceExhausted if it has more than `max_json_bytes` of JSON. REQUIRES: as
// EncodeInfer(); `binary` and `max_json_bytes` are those of the request.
absl::StatusOr<JsonAnswer> EncodeJsonInfer(const BinaryOutputs& binary, const DecodedInfer& decoded,
                                           const Result& result, int64_t max_json_bytes);

}  // namespace rapt::oip

#endif  // RAPT_SERVER_PROTOCOLS_OIP_JSON_CODEC_H_
