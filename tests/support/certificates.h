// Certificates that tests generate at run time.
#ifndef RAPT_TESTS_SUPPORT_CERTIFICATES_H_
#define RAPT_TESTS_SUPPORT_CERTIFICATES_H_

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace rapt::test {

// In PEM.
struct Certificate {
  std::string cert, key;
};

struct Validity {
  std::chrono::seconds from = std::chrono::hours(-1);  // from now
  std::chrono::seconds until = std::chrono::hours(1);
};

class Authority {
 public:
  Authority();
  ~Authority();
  Authority(const Authority&) = delete;
  Authority& operator=(const Authority&) = delete;

  // The certificate of the authority.
  const std::string& cert() const;

  // For these DNS names and 127.0.0.1.
  Certificate Issue(const std::vector<std::string>& names, Validity validity = {}) const;
  // With this common name, and alternative names as OpenSSL's configuration writes them, such as
  // "DNS:alice,IP:::1". An empty text leaves them out.
  Certificate IssueNamed(const std::string& common_name, const std::string& alternative_names,
                         Validity validity = {}) const;

 private:
  struct Identity;
  const std::unique_ptr<Identity> identity_;
};

// Files with a certificate for 127.0.0.1 and its key, until it is destroyed.
class ServerCertificate {
 public:
  ServerCertificate();
  ~ServerCertificate();
  ServerCertificate(const ServerCertificate&) = delete;
  ServerCertificate& operator=(const ServerCertificate&) = delete;

  // Of the server that uses them.
  std::vector<std::string> Flags() const;
  // The certificate of its authority, and a file with it.
  const std::string& authority() const { return authority_.cert(); }
  std::string authority_file() const { return folder_ / "authority"; }

 private:
  const Authority authority_;
  std::filesystem::path folder_;
};

// Returns the key encrypted with a passphrase.
std::string Encrypt(const std::string& key);

// The SHA-256 of the text in hexadecimal digits.
std::string Sha256(const std::string& text);

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_CERTIFICATES_H_
