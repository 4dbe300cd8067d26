// HTTP/2 frames written by hand, to do what no client library does.
#ifndef RAPT_TESTS_SUPPORT_RAW_HTTP2_H_
#define RAPT_TESTS_SUPPORT_RAW_HTTP2_H_

#include <nghttp2/nghttp2.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace rapt::test {

using Headers = std::map<std::string, std::string>;

// The bytes of a frame. `type` and `flags` are nghttp2's.
std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, const std::string& payload);

// HPACK without its table and Huffman's code.
std::string HeaderBlock(const Headers& headers);

// The headers of a gRPC call, with `more` in addition or instead.
Headers CallHeaders(const std::string& path, const Headers& more = {});

// A message with its prefix, which states `announced` bytes or the message's size.
std::string Prefixed(const std::string& message, std::optional<uint32_t> announced = std::nullopt);

std::string BigEndian(uint32_t number);

// The bytes that begin a connection.
std::string Preface();

enum class Security { kPlainText, kTls };

// A connection whose frames the test writes, and whose frames from the server it reads. One thread
// may send while another one reads.
class RawHttp2 {
 public:
  struct Received {
    uint8_t type = 0;
    uint8_t flags = 0;
    uint32_t stream = 0;
    std::string payload;
    Headers headers;  // of HEADERS, decoded

    uint32_t Number(size_t offset) const;  // in the payload
  };

  // `address` and `from` are as for ConnectTo(). Sends the preface. Over TLS, every certificate is
  // accepted, and a handshake that fails is a connection that the server has closed.
  explicit RawHttp2(const std::string& address, Security security = Security::kPlainText,
                    const std::string& from = "");
  ~RawHttp2();
  RawHttp2(const RawHttp2&) = delete;
  RawHttp2& operator=(const RawHttp2&) = delete;

  // Returns false once the server has closed the connection.
  bool Send(const std::string& bytes);

  // Returns whether bytes have arrived that are not read yet.
  bool HasUnread() const;

  // Returns how many of the bytes were sent without waiting.
  size_t SendWithoutWaiting(absl::string_view bytes);

  // Sends HEADERS, and the rest of a call.
  void OpenCall(uint32_t stream, const Headers& headers, uint8_t flags = NGHTTP2_FLAG_NONE);
  void SendData(uint32_t stream, const std::string& bytes, bool ends = false);

  // Discards what the server sends during this time, or until it closes the connection.
  void Discard(std::chrono::milliseconds time);

  // Blocks. nullopt: the server has closed the connection. Silence for a minute fails the test.
  std::optional<Received> Read();
  // Reads until the frame.
  std::optional<Received> ReadUntil(uint8_t type);
  // Reads until the end of the response: its last headers.
  Headers ReadResponse(uint32_t stream);
  // Reads until the server ends the connection: the error code of its GOAWAY, or nullopt.
  std::optional<uint32_t> ReadGoAway();

 private:
  struct Tls;

  // Returns how many bytes were transferred without waiting. nullopt: the connection has ended.
  std::optional<size_t> TryRead(char* bytes, size_t count);
  std::optional<size_t> TryWrite(absl::string_view bytes);
  bool ReadExactly(size_t count, std::string& bytes);

  int connection_;
  std::unique_ptr<Tls> tls_;  // null without TLS
  nghttp2_hd_inflater* inflater_;
};

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_RAW_HTTP2_H_
