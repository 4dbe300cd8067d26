// The files of TLS, for Reloaded.
#ifndef RAPT_SERVER_WIRE_TLS_FILES_H_
#define RAPT_SERVER_WIRE_TLS_FILES_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/reloaded.h"

namespace rapt {

// Paths of PEM files.
struct TlsFiles {
  std::string cert;       // the server's certificate chain
  std::string key;        // without a passphrase
  std::string client_ca;  // authorities of callers' certificates; empty: callers need none
};

// The contents of the files.
struct TlsIdentity {
  std::string cert, key;
  std::string client_ca;  // empty: callers need no certificate
};

// Returns the files with the flags that name them.
std::vector<NamedFile> NamedTlsFiles(const TlsFiles& files);

// `contents` is in the order of NamedTlsFiles(). InvalidArgument, naming the flag, if a file is
// unusable or the key does not match the certificate.
absl::StatusOr<TlsIdentity> ParseTlsIdentity(const std::vector<std::string>& contents);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_TLS_FILES_H_
