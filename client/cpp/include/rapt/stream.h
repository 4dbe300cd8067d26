// A call of any length. Its tensors are sent to the server in chunks. They come from memory, which
// may be a mapped file, or from a function that reads or computes them.
//
// Either the queries are resident at the server and keys and values stream past them, or keys and
// values are resident and queries stream. The server computes while chunks arrive. It needs memory
// for the resident tensors, the accumulators of Y and two chunks, regardless of the lengths. The
// result is exact: it equals Attend() up to rounding.
#ifndef RAPT_CLIENT_RAPT_STREAM_H_
#define RAPT_CLIENT_RAPT_STREAM_H_

#include <cstdint>
#include <functional>
#include <optional>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "rapt/attend.h"
#include "rapt/choices.h"

namespace rapt::client {

using rapt::Streaming;

// The buffers that a function fills with rows [begin, begin + count) of the streaming tensors: [B,
// H, count, D] or, in the layouts kBshd and kBse, [B, count, H, D]. A buffer is empty if the tensor
// does not stream or is not part of the call.
struct StreamRows {
  int64_t begin = 0;
  int64_t count = 0;
  absl::Span<std::byte> q;     // if queries stream
  absl::Span<std::byte> k, v;  // if keys stream; past rows come first
  absl::Span<std::byte> mask;  // [B, Hq, Sq, count] of keys, [B, Hq, count, T] of queries; an axis
                               // of 1 stays 1
  absl::Span<std::byte> attention_bias;  // likewise
};

struct StreamProgress {
  int64_t sent_bytes = 0;
  int64_t bytes = 0;  // of all tensors
};

struct StreamOptions {
  // If absent: whichever needs less server memory, but queries if weights are requested.
  std::optional<Streaming> streaming = {};

  // Rows in a chunk. 0: about 8 MiB. The resident tensors are sent in chunks too.
  int64_t query_chunk = 0;
  int64_t key_chunk = 0;

  // Fills the streaming tensors, which have a shape in the call but no data. Called for each chunk
  // in order, on the thread of the call. An error ends the call and is returned.
  std::function<absl::Status(const StreamRows& rows)> read = {};

  // Called after each chunk sent, on the thread of the call.
  std::function<void(const StreamProgress&)> progress = {};
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_STREAM_H_
