// Bounds the messages of a TLS handshake.
#ifndef RAPT_SERVER_WIRE_CLIENT_RECORDS_H_
#define RAPT_SERVER_WIRE_CLIENT_RECORDS_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace rapt {

// Parses the headers of the records that a client sends, before OpenSSL does. OpenSSL allocates the
// size that the header of a handshake message states, up to 128 KiB, before the message arrives.
// Not thread-safe.
class ClientRecords {
 public:
  enum class Phase : uint8_t {
    kHello,   // a ClientHello may come, in plain text
    kVerify,  // OpenSSL bounds the messages, some of which are encrypted
    kOpen,    // after the handshake
  };

  static constexpr size_t kMaxMessageBytes = 16 * 1024;

  // Call with all bytes that the client sends, in order. Returns false for a message in kHello that
  // is larger than kMaxMessageBytes or has a header in two records, and for a handshake record in
  // kOpen: an attempt to renegotiate.
  bool OnBytes(absl::Span<const uint8_t> bytes, Phase phase);

 private:
  bool OnRecord(Phase phase);
  bool OnMessage();

  std::array<uint8_t, 9> head_ = {};  // of a record, and of the message that begins in it
  size_t head_bytes_ = 0;
  size_t skip_ = 0;          // bytes until the next header of a record
  size_t record_bytes_ = 0;  // of the record's content
  size_t message_left_ = 0;  // bytes of a message in further records
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_CLIENT_RECORDS_H_
