// Authentication of callers.
#ifndef RAPT_SERVER_CALLS_ACCESS_H_
#define RAPT_SERVER_CALLS_ACCESS_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/reloaded.h"
#include "server/calls/call_headers.h"
#include "server/calls/tokens.h"

namespace rapt {

// Consulted at the beginning of every call of rapt's services; gRPC's own, health and reflection,
// are open to every client that can connect. Thread-safe.
class Access {
 public:
  // `token_file` is a path; empty: every client that can connect may call. Returns InvalidArgument
  // if the file is unusable. REQUIRES: `clock` outlives the object.
  static absl::StatusOr<std::unique_ptr<Access>> Open(const std::string& token_file,
                                                      const Clock& clock);

  // Returns the caller's identity: "token:HOLDER" if tokens are required, else "certificate:NAME",
  // else its address without the port, "ipv4:127.0.0.1". All callers on the Unix domain socket
  // without a token share the identity "unix", because a client chooses the name of its own end.
  // Returns Unauthenticated, without quoting the token, if tokens are required and the call has no
  // valid one, or more than one.
  absl::StatusOr<std::string> Identify(const CallHeaders& headers) const;

  // Returns the identity of a caller without a token.
  static std::string PeerOf(const CallHeaders& headers);

  // Reloads the token file, if there is one.
  void Reload() const;

 private:
  explicit Access(std::unique_ptr<Reloaded<Tokens>> tokens) : tokens_(std::move(tokens)) {}

  const std::unique_ptr<Reloaded<Tokens>> tokens_;  // null: tokens are not required
};

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_ACCESS_H_
