// Divides a call into messages, and assembles its result from the server's messages.
#ifndef RAPT_CLIENT_CPP_STREAM_CODEC_H_
#define RAPT_CLIENT_CPP_STREAM_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/aligned_buffer.h"
#include "base/sliced_bytes.h"
#include "client/cpp/request_message.h"
#include "proto/rapt/v1/attention.pb.h"
#include "rapt/stream.h"

namespace rapt::client {

// A chunk of Q, or of K and V.
struct StreamChunk {
  bool is_keys = false;
  bool streams = false;  // else resident
  int64_t begin = 0;
  int64_t count = 0;
};

// A call divided into chunks. Thread-compatible value; references the call's tensors.
class ChunkedCall {
 public:
  // InvalidArgument, naming the field, if shapes are inconsistent, if data does not have the size
  // of its shape, if the tensors of the header do not fit into it, and for unsupported features:
  // present outputs, integer masks. ResourceExhausted if a row does not fit into a message of
  // `max_bytes`.
  static absl::StatusOr<ChunkedCall> Make(const AttendCall& call, const StreamOptions& options,
                                          int64_t max_bytes);

  // Returns the first message.
  RequestMessage Header() const;
  // The chunks that follow, in order.
  const std::vector<StreamChunk>& chunks() const { return chunks_; }
  RequestMessage Chunk(const StreamChunk& chunk) const;
  // The same, with bytes produced by StreamOptions::read and owned by `owner`.
  absl::StatusOr<RequestMessage> ReadChunk(const StreamChunk& chunk,
                                           std::shared_ptr<std::string>& owner) const;
  // Returns whether StreamOptions::read produces that chunk.
  bool NeedsRead(const StreamChunk& chunk) const { return chunk.streams && options_.read; }

  int64_t BytesOf(const StreamChunk& chunk) const;
  int64_t bytes() const;  // of all chunks

 private:
  friend class StreamResult;
  struct Axes {
    int64_t batch = 0, query_heads = 0, kv_heads = 0;
    int64_t query_length = 0, key_length = 0, past_length = 0;  // key_length includes past_length
    int64_t head_size = 0, value_head_size = 0;
  };
  // Bytes of a chunk's tensors.
  struct Sizes {
    int64_t q = 0, k = 0, v = 0, mask = 0, bias = 0;
    int64_t total() const { return q + k + v + mask + bias; }
  };
  // Append the data of a field of a chunk's message.
  using Append = absl::FunctionRef<void(RequestMessage&)>;
  struct Appends {
    Append q, k, v, mask, bias;
  };

  ChunkedCall(const AttendCall& call, const StreamOptions& options)
      : call_(call), options_(options) {}
  absl::Status ReadShapes();
  absl::Status ReadHeads(bool is_3d);
  absl::Status CheckData() const;
  absl::Status CheckHeader() const;
  absl::Status ReadMask(absl::string_view name, const TensorView& mask, Shape& shape) const;
  void ChooseStreaming();
  absl::Status ChooseChunks(int64_t max_bytes);
  void AddChunks(bool is_keys, bool streams);
  bool keys_stream() const { return streaming_ == Streaming::kKeys; }
  Sizes SizesOf(const StreamChunk& chunk) const;
  static RequestMessage Message(const StreamChunk& chunk, const Sizes& sizes,
                                const Appends& append);
  int64_t ResultBytes(const StreamChunk& chunk) const;
  void AppendRows(const TensorView& view, int64_t heads, int64_t size, int64_t begin, int64_t count,
                  RequestMessage& message) const;
  void AppendKeyRows(const std::optional<TensorView>& past, const TensorView& view, int64_t size,
                     const StreamChunk& chunk, RequestMessage& message) const;
  static void AppendMask(const TensorView& mask, const Shape& shape, const StreamChunk& chunk,
                         RequestMessage& message);

  AttendCall call_;
  StreamOptions options_;
  Axes axes_;
  bool heads_outside_ = true;  // [B, H, S, D]; else [B, S, H, D]
  Streaming streaming_ = Streaming::kKeys;
  int64_t query_chunk_ = 0, key_chunk_ = 0;
  Shape mask_shape_, bias_shape_;  // of rank 4, if there is a mask or a bias
  std::vector<StreamChunk> chunks_;
};

// Assembles the result from the server's messages. Thread-compatible. `chunked` outlives it.
class StreamResult {
 public:
  // Allocates the outputs.
  explicit StreamResult(const ChunkedCall& chunked);

  // Adds the next message, of `size` bytes. Internal if it is malformed or unexpected.
  absl::Status Take(const SlicedBytes& bytes, int64_t size);

  // Call after the last message. Internal if something is missing.
  absl::StatusOr<AttendResult> Finish();

 private:
  struct Output {
    std::shared_ptr<AlignedBuffer> bytes;
    DType dtype = DType::kFloat32;
    Shape shape;
  };
  // The destination of a part of an output: `runs` ranges of `run` bytes, `stride` apart, starting
  // at `offset`.
  struct Place {
    int64_t runs, run, stride, offset;
  };

  Output Allocate(DType dtype, Shape shape) const;
  absl::Status TakeRows(const v1::OutputChunk& fields);
  absl::Status TakeScores(const v1::ScoreChunk& fields);
  absl::Status Put(const char* name, int field, const Output& output, const Place& place);

  const ChunkedCall& chunked_;
  Output y_;
  std::optional<Output> lse_, scores_;
  int64_t rows_ = 0;  // received rows of Y
  int64_t keys_ = 0;  // keys with received scores, if keys stream
  std::optional<v1::StreamEnd> end_;

  // The current message.
  SlicedBytes bytes_;
  struct Payload {
    int field;
    int64_t begin, size;
  };
  std::vector<Payload> payloads_;
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_STREAM_CODEC_H_
