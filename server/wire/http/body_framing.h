#ifndef RAPT_SERVER_WIRE_HTTP_BODY_FRAMING_H_
#define RAPT_SERVER_WIRE_HTTP_BODY_FRAMING_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace rapt::http {

// Finds a body's data among the bytes of a connection: as many as Content-Length says, or those of
// chunks. Extensions of chunks and trailers are skipped.
class BodyFraming {
 public:
  static constexpr size_t kMaxChunkLine = 256;
  static constexpr size_t kMaxTrailers = 8 * 1024;

  enum class Next : uint8_t {
    kData,      // data_left() bytes of data, at least 1, follow
    kNeedMore,  // the framing goes on in bytes to come
    kEnd,
    kMalformed,
  };

  static BodyFraming OfLength(uint64_t length) { return BodyFraming(false, length); }
  static BodyFraming Chunked() { return BodyFraming(true, 0); }

  // Removes framing from the front of `bytes`. If it returns kNeedMore, it has removed everything.
  Next Advance(absl::string_view& bytes);

  uint64_t data_left() const { return data_left_; }
  // Whether nothing of the body is to come.
  bool is_complete() const { return data_left_ == 0 && state_ == State::kEnd; }
  // Call when the next `count` bytes of data have arrived.
  void TakeData(uint64_t count) { data_left_ -= count; }

 private:
  enum class State : uint8_t { kSize, kEndOfData, kTrailers, kEnd };

  BodyFraming(bool is_chunked, uint64_t length)
      : state_(is_chunked ? State::kSize : State::kEnd), data_left_(length) {}

  Next OnLine();

  State state_;  // what follows the data
  uint64_t data_left_;
  std::string line_;  // so far
  size_t trailer_bytes_ = 0;
};

}  // namespace rapt::http

#endif  // RAPT_SERVER_WIRE_HTTP_BODY_FRAMING_H_
