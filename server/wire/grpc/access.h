// Who may call, and who calls.
#ifndef RAPT_SERVER_WIRE_GRPC_ACCESS_H_
#define RAPT_SERVER_WIRE_GRPC_ACCESS_H_

#include <grpcpp/server_context.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/reloaded.h"
#include "server/calls/tokens.h"

namespace rapt {

// Asked at the beginning of every call of our services; gRPC's own, health and reflection, are
// open to whoever can connect. Thread-safe.
class Access {
 public:
  // `token_file` is a path; empty: whoever can connect may call. InvalidArgument where the file
  // can't be used. `clock` outlives it.
  static absl::StatusOr<std::unique_ptr<Access>> Open(const std::string& token_file,
                                                      const Clock& clock);

  // What the caller is called: "token:HOLDER", "certificate:NAME" of one without a token, or else
  // its address without the port, "ipv4:127.0.0.1". All who use the Unix domain socket without a
  // token are one caller: gRPC does not tell them apart, and what names their ends have is up to
  // them. Unauthenticated, in words that show nothing of what came, where tokens are asked for and
  // the call has none of them.
  absl::StatusOr<std::string> Identify(const grpc::ServerContextBase& context) const;

 private:
  explicit Access(std::unique_ptr<Reloaded<Tokens>> tokens) : tokens_(std::move(tokens)) {}

  const std::unique_ptr<Reloaded<Tokens>> tokens_;  // null: none are asked for
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_ACCESS_H_
