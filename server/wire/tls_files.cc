#include "server/wire/tls_files.h"

#include "absl/status/status.h"
#include "base/status_macros.h"
#include "server/wire/openssl_objects.h"

namespace rapt {
namespace {

absl::Status Check(const TlsIdentity& identity) {
  const ScopedErrors errors;
  const Certificate certificate = ReadCertificate(BioOf(identity.cert));
  if (certificate == nullptr) {
    return absl::InvalidArgumentError("the file of --tls_cert contains no PEM certificate");
  }
  const PrivateKey key = ReadPrivateKey(identity.key);
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
  if (!identity.client_ca.empty() && ReadCertificate(BioOf(identity.client_ca)) == nullptr) {
    return absl::InvalidArgumentError("the file of --tls_client_ca contains no PEM certificate");
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<NamedFile> NamedTlsFiles(const TlsFiles& files) {
  std::vector<NamedFile> named = {{"--tls_cert", files.cert}, {"--tls_key", files.key}};
  if (!files.client_ca.empty()) named.push_back({"--tls_client_ca", files.client_ca});
  return named;
}

absl::StatusOr<TlsIdentity> ParseTlsIdentity(const std::vector<std::string>& contents) {
  const bool authenticates_clients = contents.size() > 2;
  TlsIdentity identity{contents[0], contents[1], authenticates_clients ? contents[2] : ""};
  if (authenticates_clients && identity.client_ca.empty()) {
    return absl::InvalidArgumentError("the file of --tls_client_ca is empty");
  }
  RAPT_RETURN_IF_ERROR(Check(identity));
  return identity;
}

}  // namespace rapt
