// TLS by OpenSSL.
#ifndef RAPT_SERVER_WIRE_TLS_SOCKET_H_
#define RAPT_SERVER_WIRE_TLS_SOCKET_H_

#include <openssl/ssl.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/descriptor.h"
#include "base/reloaded.h"
#include "server/wire/openssl_objects.h"
#include "server/wire/socket.h"
#include "server/wire/tls_files.h"

namespace rapt {

// The protocol that ALPN selects.
enum class TlsProtocol : uint8_t {
  kHttp2,  // must be offered
  kHttp1,  // or the client offers none
};

// TLS 1.2 with forward secrecy and authenticated encryption, or TLS 1.3. Thread-safe.
class TlsAcceptor {
 public:
  using Context = std::unique_ptr<SSL_CTX, FreeBy<SSL_CTX_free>>;

  // Returns InvalidArgument, naming the flag, if the files are unusable. REQUIRES: `clock` outlives
  // the result.
  static absl::StatusOr<std::unique_ptr<TlsAcceptor>> Load(const TlsFiles& files,
                                                           const Clock& clock);

  // Reloads the files now.
  void Reload() { context_->Reload(); }

  // Returns the server's end of TLS on this socket. Its handshake uses files that were read at most
  // a second before the first bytes arrived; invalid replacements are ignored. REQUIRES: this
  // outlives the handshake.
  std::unique_ptr<Socket> Accept(Descriptor socket, TlsProtocol protocol = TlsProtocol::kHttp2);

 private:
  explicit TlsAcceptor(std::unique_ptr<Reloaded<Context>> context) : context_(std::move(context)) {}

  const std::unique_ptr<Reloaded<Context>> context_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_TLS_SOCKET_H_
