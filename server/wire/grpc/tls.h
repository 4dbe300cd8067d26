// TLS for the gRPC server, from files that may be replaced while it runs.
#ifndef RAPT_SERVER_WIRE_GRPC_TLS_H_
#define RAPT_SERVER_WIRE_GRPC_TLS_H_

#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/clock.h"

namespace rapt {

// Paths of files in PEM.
struct TlsFiles {
  std::string cert;  // the server's, and those of its authorities up to the root's
  std::string key;   // without a passphrase
  std::string
      client_ca;  // callers have to show a certificate that these sign; empty: none is asked
};

// For one listening address. A handshake uses the files as they were at most a second before;
// connections that stand keep what they were made with. New files that can't be used, or of which
// only some are there yet, change nothing. InvalidArgument, which names the flag, where those that
// are there at the start can't be used. `clock` outlives it.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> TlsCredentials(const TlsFiles& files,
                                                                        const Clock& clock);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_TLS_H_
