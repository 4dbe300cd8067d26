// Bytes of a connection that wait to be written to its socket.
#ifndef RAPT_SERVER_WIRE_OUTPUT_QUEUE_H_
#define RAPT_SERVER_WIRE_OUTPUT_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "server/request.h"
#include "server/wire/socket.h"

namespace rapt {

// A string, or an output that is referenced.
struct OutputSegment {
  std::string bytes;
  OutputBuffer payload;  // instead of bytes

  absl::string_view view() const;
};

// Outputs of calls are written from where they are; everything else is copied. Not thread-safe.
class OutputQueue {
 public:
  enum class Written : uint8_t { kAll, kBlocked, kFailed };

  // REQUIRES: the clock outlives this.
  explicit OutputQueue(const Clock& clock) : clock_(clock), progressed_(clock.Now()) {}

  bool empty() const { return segments_.empty(); }
  // False: nothing should be appended but the rest of a frame, and nothing be read that leads to
  // more, until the caller has taken some.
  bool HasRoom() const;
  // The bytes that are not of an output, whose memory is charged.
  int64_t copied_bytes() const { return copied_bytes_; }
  // When bytes were written last, or the queue ceased to be empty.
  Instant progressed() const { return progressed_; }

  void Append(const void* bytes, size_t size);
  // Appends a segment, which is not copied unless it is small.
  void Append(OutputSegment segment);
  // Appends a part of a segment, whose output stays until the part is written.
  void Append(const OutputSegment& segment, size_t offset, size_t size);

  // Writes at most about `left` bytes, and subtracts what it has written. kBlocked: the loop
  // reports the socket when it accepts more, at once if only `left` is used up.
  Written Write(Socket& socket, int64_t& left);

  void Clear() { segments_.clear(); }

 private:
  void Drop(int64_t bytes);

  const Clock& clock_;
  Instant progressed_;
  std::deque<OutputSegment> segments_;
  int64_t bytes_ = 0;
  int64_t copied_bytes_ = 0;
  size_t offset_ = 0;  // written bytes of the first segment
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_OUTPUT_QUEUE_H_
