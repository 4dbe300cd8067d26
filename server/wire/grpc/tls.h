// TLS for the gRPC server, with files that are reloaded when replaced.
#ifndef RAPT_SERVER_WIRE_GRPC_TLS_H_
#define RAPT_SERVER_WIRE_GRPC_TLS_H_

#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/clock.h"

namespace rapt {

// Paths of PEM files.
struct TlsFiles {
  std::string cert;       // the server's certificate chain
  std::string key;        // without a passphrase
  std::string client_ca;  // authorities of callers' certificates; empty: callers need none
};

class TlsCredentials : public grpc::ServerCredentials {
 public:
  // Reloads the files now.
  virtual void Reload() = 0;
};

// Returns credentials for one listening address. A handshake uses files read at most a second
// earlier; existing connections keep their certificates. Invalid or incomplete replacements are
// ignored. Returns InvalidArgument, naming the flag, if the initial files are unusable. `clock`
// outlives the result.
absl::StatusOr<std::shared_ptr<TlsCredentials>> LoadTlsCredentials(const TlsFiles& files,
                                                                   const Clock& clock);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_TLS_H_
