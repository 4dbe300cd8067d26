#include "tests/support/certificates.h"

#include <openssl/ec.h>
#include <openssl/sha.h>
#include <openssl/x509v3.h>

#include <atomic>
#include <cstdlib>
#include <fstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "server/wire/openssl_objects.h"

namespace rapt::test {
namespace {

using Key = PrivateKey;
using X509Certificate = rapt::Certificate;
using Extension = std::unique_ptr<X509_EXTENSION, FreeBy<X509_EXTENSION_free>>;

// Returns the PEM text written by `write`.
template <typename Write>
std::string Pem(const Write& write) {
  const Bio bio(BIO_new(BIO_s_mem()));
  RAPT_CHECK(write(bio.get()) == 1, "OpenSSL does not write");
  char* data;
  const long size = BIO_get_mem_data(bio.get(), &data);
  return std::string(data, static_cast<size_t>(size));
}

std::string PemOf(X509* certificate) {
  return Pem([&](BIO* bio) { return PEM_write_bio_X509(bio, certificate); });
}

std::string PemOf(EVP_PKEY* key) {
  return Pem([&](BIO* bio) {
    return PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr);
  });
}

void SetName(X509_NAME* name, const std::string& text) {
  if (text.empty()) return;
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(text.data()),
                             static_cast<int>(text.size()), -1, 0);
}

void AddExtension(X509* certificate, int kind, const std::string& value) {
  const Extension extension(X509V3_EXT_conf_nid(nullptr, nullptr, kind, value.c_str()));
  RAPT_CHECK(extension != nullptr, "OpenSSL does not know the extension");
  X509_add_ext(certificate, extension.get(), -1);
}

// Not signed yet.
X509Certificate NewCertificate(const std::string& name, EVP_PKEY* key, Validity validity) {
  static std::atomic<long> serial{1};
  X509Certificate certificate(X509_new());
  X509_set_version(certificate.get(), 2);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate.get()), serial++);
  X509_gmtime_adj(X509_getm_notBefore(certificate.get()), validity.from.count());
  X509_gmtime_adj(X509_getm_notAfter(certificate.get()), validity.until.count());
  SetName(X509_get_subject_name(certificate.get()), name);
  X509_set_pubkey(certificate.get(), key);
  return certificate;
}

}  // namespace

struct Authority::Identity {
  Key key{EVP_EC_gen("P-256")};
  X509Certificate certificate = NewCertificate("Authority of the test", key.get(), {});
  std::string pem;
};

Authority::Authority() : identity_(std::make_unique<Identity>()) {
  X509* certificate = identity_->certificate.get();
  X509_set_issuer_name(certificate, X509_get_subject_name(certificate));
  AddExtension(certificate, NID_basic_constraints, "critical,CA:TRUE");
  X509_sign(certificate, identity_->key.get(), EVP_sha256());
  identity_->pem = PemOf(certificate);
}

Authority::~Authority() = default;

const std::string& Authority::cert() const { return identity_->pem; }

Certificate Authority::Issue(const std::vector<std::string>& names, Validity validity) const {
  std::string alternatives;
  for (const std::string& name : names) absl::StrAppend(&alternatives, "DNS:", name, ",");
  return IssueNamed(names.front(), absl::StrCat(alternatives, "IP:127.0.0.1"), validity);
}

Certificate Authority::IssueNamed(const std::string& common_name,
                                  const std::string& alternative_names, Validity validity) const {
  const Key key(EVP_EC_gen("P-256"));
  const X509Certificate certificate = NewCertificate(common_name, key.get(), validity);
  X509_set_issuer_name(certificate.get(), X509_get_subject_name(identity_->certificate.get()));
  if (!alternative_names.empty()) {
    AddExtension(certificate.get(), NID_subject_alt_name, alternative_names);
  }
  X509_sign(certificate.get(), identity_->key.get(), EVP_sha256());
  return {PemOf(certificate.get()), PemOf(key.get())};
}

ServerCertificate::ServerCertificate() {
  std::string pattern = std::filesystem::temp_directory_path() / "rapt-XXXXXX";
  RAPT_CHECK(mkdtemp(pattern.data()) != nullptr, "no temporary folder");
  folder_ = pattern;
  const Certificate certificate = authority_.Issue({"rapt.test"});
  std::ofstream(authority_file()) << authority();
  std::ofstream(folder_ / "cert") << certificate.cert;
  std::ofstream(folder_ / "key") << certificate.key;
}

ServerCertificate::~ServerCertificate() { std::filesystem::remove_all(folder_); }

std::vector<std::string> ServerCertificate::Flags() const {
  return {absl::StrCat("--tls_cert=", (folder_ / "cert").string()),
          absl::StrCat("--tls_key=", (folder_ / "key").string())};
}

std::string Encrypt(const std::string& key) {
  const Bio bio(BIO_new_mem_buf(key.data(), static_cast<int>(key.size())));
  const Key plain(PEM_read_bio_PrivateKey(bio.get(), nullptr, nullptr, nullptr));
  const unsigned char passphrase[] = "secret";
  return Pem([&](BIO* out) {
    return PEM_write_bio_PrivateKey(out, plain.get(), EVP_aes_128_cbc(), passphrase,
                                    sizeof(passphrase) - 1, nullptr, nullptr);
  });
}

std::string Sha256(const std::string& text) {
  unsigned char hash[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), hash);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(hash), sizeof(hash)));
}

}  // namespace rapt::test
