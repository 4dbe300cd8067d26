#include "server/wire/grpc/tls.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>

#include <string>
#include <utility>

#include "base/check.h"
#include "base/reloaded.h"

namespace rapt {
namespace {

// gRPC fetches the certificate at every handshake, one at a time. Its C++ interface for reloading
// uses polling threads, and would accept a key that does not match the certificate yet.
class ReloadedCredentials final : public TlsCredentials {
 public:
  ReloadedCredentials(std::unique_ptr<Reloaded<TlsIdentity>> identity, bool authenticates_clients)
      : identity_(std::move(identity)), authenticates_clients_(authenticates_clients) {
    credentials_ = grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(
            authenticates_clients_ ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                   : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE,
            Fetch, this));
  }
  ~ReloadedCredentials() override { grpc_server_credentials_release(credentials_); }

  void Reload() override { identity_->Reload(); }

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {
    RAPT_CHECK(false, "tokens are checked by Access");
  }

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  static grpc_ssl_certificate_config_reload_status Fetch(
      void* credentials, grpc_ssl_server_certificate_config** config) {
    return static_cast<ReloadedCredentials*>(credentials)->FetchChange(config);
  }

  grpc_ssl_certificate_config_reload_status FetchChange(
      grpc_ssl_server_certificate_config** config) {
    std::shared_ptr<const TlsIdentity> identity = identity_->Get();
    if (identity == fetched_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const grpc_ssl_pem_key_cert_pair pair{identity->key.c_str(), identity->cert.c_str()};
    // gRPC requires authorities even without client authentication, and ignores them then.
    const std::string& authorities = authenticates_clients_ ? identity->client_ca : identity->cert;
    *config = grpc_ssl_server_certificate_config_create(authorities.c_str(), &pair, 1);
    fetched_ = std::move(identity);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  const std::unique_ptr<Reloaded<TlsIdentity>> identity_;
  const bool authenticates_clients_;
  std::shared_ptr<const TlsIdentity> fetched_;  // used by gRPC
  grpc_server_credentials* credentials_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<TlsCredentials>> LoadTlsCredentials(const TlsFiles& files,
                                                                   const Clock& clock) {
  auto identity = Reloaded<TlsIdentity>::Load(NamedTlsFiles(files), ParseTlsIdentity, clock);
  if (!identity.ok()) return identity.status();
  return std::make_shared<ReloadedCredentials>(*std::move(identity), !files.client_ca.empty());
}

}  // namespace rapt
