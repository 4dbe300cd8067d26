// TLS for the gRPC server, with files that are reloaded when replaced.
#ifndef RAPT_SERVER_WIRE_GRPC_TLS_H_
#define RAPT_SERVER_WIRE_GRPC_TLS_H_

#include <grpcpp/security/server_credentials.h>

#include <memory>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "server/wire/tls_files.h"

namespace rapt {

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
