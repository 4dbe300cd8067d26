#include "server/wire/grpc/tls.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/reloaded.h"

namespace rapt {
namespace {

template <auto free>
struct FreeBy {
  template <typename T>
  void operator()(T* object) const {
    free(object);
  }
};
using Bio = std::unique_ptr<BIO, FreeBy<BIO_free_all>>;
using Certificate = std::unique_ptr<X509, FreeBy<X509_free>>;
using PrivateKey = std::unique_ptr<EVP_PKEY, FreeBy<EVP_PKEY_free>>;

// Clears OpenSSL's error queue: gRPC interprets errors left on its threads as its own.
class ScopedErrors {
 public:
  ScopedErrors() = default;
  ~ScopedErrors() { ERR_clear_error(); }
  ScopedErrors(const ScopedErrors&) = delete;
  ScopedErrors& operator=(const ScopedErrors&) = delete;
};

Bio BioOf(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// Rejects keys with a passphrase instead of prompting.
int NoPassphrase(char*, int, int, void*) { return -1; }

Certificate FirstCertificate(const std::string& pem) {
  return Certificate(PEM_read_bio_X509(BioOf(pem).get(), nullptr, NoPassphrase, nullptr));
}

struct Identity {
  std::string cert, key, client_ca;  // the files' contents
};

absl::Status Check(const Identity& identity) {
  const ScopedErrors errors;
  const Certificate certificate = FirstCertificate(identity.cert);
  if (certificate == nullptr) {
    return absl::InvalidArgumentError("the file of --tls_cert contains no PEM certificate");
  }
  const PrivateKey key(
      PEM_read_bio_PrivateKey(BioOf(identity.key).get(), nullptr, NoPassphrase, nullptr));
  if (key == nullptr) {
    return absl::InvalidArgumentError(
        "the file of --tls_key contains no PEM private key without a passphrase");
  }
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    return absl::InvalidArgumentError("the key of --tls_key does not match --tls_cert");
  }
  if (X509_cmp_current_time(X509_get0_notAfter(certificate.get())) < 0) {
    return absl::InvalidArgumentError("the certificate of --tls_cert has expired");
  }
  if (!identity.client_ca.empty() && FirstCertificate(identity.client_ca) == nullptr) {
    return absl::InvalidArgumentError("the file of --tls_client_ca contains no PEM certificate");
  }
  return absl::OkStatus();
}

// Reads the certificate, the key and, with client authentication, the authorities.
absl::StatusOr<Identity> ParseIdentity(const std::vector<std::string>& contents) {
  Identity identity{contents[0], contents[1], contents.size() > 2 ? contents[2] : ""};
  if (contents.size() > 2 && identity.client_ca.empty()) {
    return absl::InvalidArgumentError("the file of --tls_client_ca is empty");
  }
  if (absl::Status status = Check(identity); !status.ok()) return status;
  return identity;
}

// gRPC fetches the certificate at every handshake, one at a time. Its C++ interface for reloading
// uses polling threads, and would accept a key that does not match the certificate yet.
class ReloadedCredentials final : public TlsCredentials {
 public:
  ReloadedCredentials(std::unique_ptr<Reloaded<Identity>> identity, bool authenticates_clients)
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
    std::shared_ptr<const Identity> identity = identity_->Get();
    if (identity == fetched_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const grpc_ssl_pem_key_cert_pair pair{identity->key.c_str(), identity->cert.c_str()};
    // gRPC requires authorities even without client authentication, and ignores them then.
    const std::string& authorities = authenticates_clients_ ? identity->client_ca : identity->cert;
    *config = grpc_ssl_server_certificate_config_create(authorities.c_str(), &pair, 1);
    fetched_ = std::move(identity);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  const std::unique_ptr<Reloaded<Identity>> identity_;
  const bool authenticates_clients_;
  std::shared_ptr<const Identity> fetched_;  // used by gRPC
  grpc_server_credentials* credentials_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<TlsCredentials>> LoadTlsCredentials(const TlsFiles& files,
                                                                   const Clock& clock) {
  const bool authenticates_clients = !files.client_ca.empty();
  std::vector<NamedFile> named = {{"--tls_cert", files.cert}, {"--tls_key", files.key}};
  if (authenticates_clients) named.push_back({"--tls_client_ca", files.client_ca});
  auto identity = Reloaded<Identity>::Load(std::move(named), ParseIdentity, clock);
  if (!identity.ok()) return identity.status();
  return std::make_shared<ReloadedCredentials>(*std::move(identity), authenticates_clients);
}

}  // namespace rapt
