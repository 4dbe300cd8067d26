// gRPC's buffers from requests, and responses from gRPC's buffers, without a copy.
#ifndef RAPT_CLIENT_CPP_BYTE_BUFFER_H_
#define RAPT_CLIENT_CPP_BYTE_BUFFER_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "base/sliced_bytes.h"
#include "client/cpp/codec.h"
#include "client/cpp/request_message.h"

namespace rapt::client {

// Returns the message with its payloads as `slice_of` makes them.
template <typename SliceOf>
grpc::ByteBuffer ToByteBuffer(const RequestMessage& message, const SliceOf& slice_of) {
  std::vector<grpc::Slice> slices;
  for (const RequestMessage::Piece& piece : message.pieces()) {
    if (!piece.bytes.empty()) slices.emplace_back(piece.bytes);
    if (!piece.payload.empty()) slices.push_back(slice_of(piece.payload));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// Returns decode(the bytes of a response, their number).
template <typename Decode>
auto DecodeBytes(const grpc::ByteBuffer& response, const Decode& decode)
    -> decltype(decode(SlicedBytes{}, int64_t{})) {
  std::vector<grpc::Slice> slices;
  if (!response.Dump(&slices).ok()) return MalformedResponse("its bytes can't be read");
  return decode({ToByteSlices(slices)}, static_cast<int64_t>(response.Length()));
}

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_BYTE_BUFFER_H_
