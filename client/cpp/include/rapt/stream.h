// A call of any length: its tensors go to the server in chunks, and come from memory, from a file
// that is mapped (rapt/npy.h), or from a function that makes them.
//
// Either the queries stay with the server and keys and values stream past them, or keys and values
// stay and queries stream past. The server computes while chunks arrive, and needs memory for what
// stays, for the sums of Y and for two chunks, whatever the lengths are. Exact: equals Attend()
// within rounding.
#ifndef RAPT_CLIENT_RAPT_STREAM_H_
#define RAPT_CLIENT_RAPT_STREAM_H_

#include <cstdint>
#include <functional>
#include <optional>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "rapt/attend.h"

namespace rapt::client {

enum class Streaming : uint8_t {
  kKeys,     // K and V; the mask has their part of every row
  kQueries,  // Q; the mask has their rows
};

// Where a function puts rows [begin, begin + count) of what streams: [B, H, count, D] or, in the
// layouts kBshd and kBse, [B, count, H, D]. Empty: not of what streams, or not part of the call.
struct StreamRows {
  int64_t begin = 0;
  int64_t count = 0;
  absl::Span<std::byte> q;     // where queries stream
  absl::Span<std::byte> k, v;  // where keys stream; the past's rows come first
  absl::Span<std::byte> mask;  // [B, Hq, Sq, count] of keys, [B, Hq, count, T] of queries; an axis
                               // of 1 stays one
};

struct StreamProgress {
  int64_t sent_bytes = 0;
  int64_t bytes = 0;  // of all tensors
};

struct StreamOptions {
  // Absent: whichever takes the server less memory, but queries where weights are wanted.
  std::optional<Streaming> streaming = {};

  // Rows in a chunk, 0: so that it has about 8 MiB. What stays is sent in chunks too.
  int64_t query_chunk = 0;
  int64_t key_chunk = 0;

  // Makes what streams; its tensors have a shape in the call, but no data. Called for each chunk in
  // order, on the thread of the call. An error ends the call with it.
  std::function<absl::Status(const StreamRows& rows)> read = {};

  // Called when a chunk has gone out, on the thread of the call.
  std::function<void(const StreamProgress&)> progress = {};
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_STREAM_H_
