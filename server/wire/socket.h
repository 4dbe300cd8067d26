// The bytes of a connection, in plain text or within TLS.
#ifndef RAPT_SERVER_WIRE_SOCKET_H_
#define RAPT_SERVER_WIRE_SOCKET_H_

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/descriptor.h"

namespace rapt {

// A connected, non-blocking socket. Not thread-safe.
class Socket {
 public:
  enum class Handshake : uint8_t { kComplete, kNeedsRead, kNeedsWrite, kFailed };

  // Read() and Write() return these instead of a number of bytes.
  static constexpr ssize_t kBlocked = -1;  // until the descriptor is ready
  static constexpr ssize_t kEnded = -2;    // by the peer or by an error

  virtual ~Socket() = default;
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  int descriptor() const { return descriptor_.get(); }

  virtual bool NeedsHandshake() const = 0;
  // Continues the handshake when the descriptor is ready. REQUIRES: NeedsHandshake().
  virtual Handshake ContinueHandshake() = 0;

  // The name in the peer's verified certificate, which may be empty; nullopt: it has none.
  virtual std::optional<absl::string_view> certificate() const = 0;

  // Reads into the places, in this order. If they are not full afterwards, the caller waits until
  // the descriptor is ready, or HasPending(), before it reads again.
  virtual ssize_t Read(absl::Span<const iovec> places) = 0;
  // Whether Read() returns more without waiting, although the descriptor may not be ready.
  virtual bool HasPending() const = 0;

  // Writes the first of these bytes, at least one. After kBlocked, the next call must begin with
  // the same bytes.
  virtual ssize_t Write(absl::Span<const iovec> places) = 0;

  // Tells the peer that no more bytes follow.
  virtual void EndWriting() = 0;

 protected:
  explicit Socket(Descriptor descriptor) : descriptor_(std::move(descriptor)) {}

 private:
  const Descriptor descriptor_;
};

// Returns the events of epoll for which an unfinished handshake waits.
uint32_t InterestOf(Socket::Handshake handshake);

class PlainSocket final : public Socket {
 public:
  explicit PlainSocket(Descriptor descriptor) : Socket(std::move(descriptor)) {}

  bool NeedsHandshake() const override { return false; }
  Handshake ContinueHandshake() override { return Handshake::kComplete; }
  std::optional<absl::string_view> certificate() const override { return std::nullopt; }
  ssize_t Read(absl::Span<const iovec> places) override;
  bool HasPending() const override { return false; }
  ssize_t Write(absl::Span<const iovec> places) override;
  void EndWriting() override;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_SOCKET_H_
