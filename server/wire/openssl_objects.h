// Owners of OpenSSL's objects.
#ifndef RAPT_SERVER_WIRE_OPENSSL_OBJECTS_H_
#define RAPT_SERVER_WIRE_OPENSSL_OBJECTS_H_

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <memory>
#include <string>

namespace rapt {

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

// Clears OpenSSL's error queue at its end: later calls on the thread interpret errors that are left
// as their own.
class ScopedErrors {
 public:
  ScopedErrors() = default;
  ~ScopedErrors() { ERR_clear_error(); }
  ScopedErrors(const ScopedErrors&) = delete;
  ScopedErrors& operator=(const ScopedErrors&) = delete;
};

// REQUIRES: `text` outlives the result.
inline Bio BioOf(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// Rejects keys with a passphrase instead of prompting.
inline int NoPassphrase(char*, int, int, void*) { return -1; }

// Returns the next certificate in PEM, or null.
inline Certificate ReadCertificate(const Bio& pem) {
  return Certificate(PEM_read_bio_X509(pem.get(), nullptr, NoPassphrase, nullptr));
}

// Returns null if the text contains no PEM key without a passphrase.
inline PrivateKey ReadPrivateKey(const std::string& pem) {
  return PrivateKey(PEM_read_bio_PrivateKey(BioOf(pem).get(), nullptr, NoPassphrase, nullptr));
}

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_OPENSSL_OBJECTS_H_
