#include "server/wire/tls_socket.h"

#include <arpa/inet.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "server/wire/client_records.h"

namespace rapt {
namespace {

using Names = std::unique_ptr<GENERAL_NAMES, FreeBy<GENERAL_NAMES_free>>;

// Of TLS 1.2; all suites of TLS 1.3 qualify.
constexpr char kCiphers[] = "ECDHE+AESGCM:ECDHE+CHACHA20";
// A client can't choose a group that costs more.
constexpr char kGroups[] = "X25519:P-256:P-384";
// As ALPN encodes them.
constexpr absl::string_view kHttp2("\2h2", 3);
constexpr absl::string_view kHttp1("\10http/1.1", 9);

// Ample for a chain of four certificates. OpenSSL's default is 100 KiB.
constexpr long kMaxCertificateBytes = 32 * 1024;

// The most records of a Read(), so that a flood of tiny ones does not delay other connections.
constexpr int kRecordsPerRead = 128;

// The handshake messages allowed. A full handshake takes 5. Others are key updates, which are
// needed only after gigabytes.
constexpr int64_t kHandshakeMessages = 32;
constexpr int64_t kBytesPerHandshakeMessage = 1 << 20;

// --- The context ---------------------------------------------------------------------------------

TlsProtocol ProtocolOf(SSL* ssl);

// Before the ALPN callback, which does not run without the extension.
int RequireAlpn(SSL* ssl, int* alert, void*) {
  if (ProtocolOf(ssl) == TlsProtocol::kHttp1) return SSL_CLIENT_HELLO_SUCCESS;
  const unsigned char* extension;
  size_t size;
  if (SSL_client_hello_get0_ext(ssl, TLSEXT_TYPE_application_layer_protocol_negotiation, &extension,
                                &size) == 1) {
    return SSL_CLIENT_HELLO_SUCCESS;
  }
  *alert = TLS1_AD_NO_APPLICATION_PROTOCOL;
  return SSL_CLIENT_HELLO_ERROR;
}

int SelectProtocol(SSL* ssl, const unsigned char** chosen, unsigned char* chosen_size,
                   const unsigned char* offered, unsigned int offered_size, void*) {
  const absl::string_view ours = ProtocolOf(ssl) == TlsProtocol::kHttp2 ? kHttp2 : kHttp1;
  unsigned char* found;
  if (SSL_select_next_proto(
          &found, chosen_size, reinterpret_cast<const unsigned char*>(ours.data()),
          static_cast<unsigned>(ours.size()), offered, offered_size) != OPENSSL_NPN_NEGOTIATED) {
    return SSL_TLSEXT_ERR_ALERT_FATAL;  // no_application_protocol
  }
  *chosen = found;
  return SSL_TLSEXT_ERR_OK;
}

absl::Status Unusable(absl::string_view flag) {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  return Invalid("the file of ", flag,
                 " can't be used: ", reason == nullptr ? "unknown error" : reason);
}

absl::Status UseCertificate(SSL_CTX* context, const TlsIdentity& identity) {
  const Bio chain = BioOf(identity.cert);
  if (SSL_CTX_use_certificate(context, ReadCertificate(chain).get()) != 1) {
    return Unusable("--tls_cert");
  }
  while (const Certificate certificate = ReadCertificate(chain)) {
    if (SSL_CTX_add1_chain_cert(context, certificate.get()) != 1) return Unusable("--tls_cert");
  }
  if (SSL_CTX_use_PrivateKey(context, ReadPrivateKey(identity.key).get()) != 1) {
    return Unusable("--tls_key");
  }
  return absl::OkStatus();
}

// Callers must present a certificate that one of these authorities has signed.
absl::Status AuthenticateClients(SSL_CTX* context, const std::string& authorities) {
  const Bio pem = BioOf(authorities);
  while (const Certificate authority = ReadCertificate(pem)) {
    if (X509_STORE_add_cert(SSL_CTX_get_cert_store(context), authority.get()) != 1 ||
        SSL_CTX_add_client_CA(context, authority.get()) != 1) {
      return Unusable("--tls_client_ca");
    }
  }
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  return absl::OkStatus();
}

// Sessions can't be resumed: connections are long, and a resumed session would be authenticated by
// an authority that may have been removed since.
void ForbidResumption(SSL_CTX* context) {
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_options(context, SSL_OP_NO_TICKET);  // of TLS 1.2
  RAPT_CHECK(SSL_CTX_set_num_tickets(context, 0) == 1, "no limit of tickets");
}

void CountHandshakeMessage(int is_sent, int version, int type, const void* bytes, size_t size,
                           SSL* ssl, void* unused);

absl::StatusOr<TlsAcceptor::Context> NewContext(const std::vector<std::string>& contents) {
  RAPT_ASSIGN_OR_RETURN(const TlsIdentity identity, ParseTlsIdentity(contents));
  const ScopedErrors errors;
  TlsAcceptor::Context context(SSL_CTX_new(TLS_server_method()));
  RAPT_CHECK(context != nullptr, "no memory");
  SSL_CTX* const c = context.get();
  RAPT_CHECK(SSL_CTX_set_min_proto_version(c, TLS1_2_VERSION) == 1 &&
                 SSL_CTX_set_cipher_list(c, kCiphers) == 1 &&
                 SSL_CTX_set1_groups_list(c, kGroups) == 1,
             "OpenSSL lacks the ciphers");
  SSL_CTX_set_options(c, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
  // An idle connection holds no buffers. Responses are written in place, a record at a time.
  SSL_CTX_set_mode(c, SSL_MODE_RELEASE_BUFFERS | SSL_MODE_ENABLE_PARTIAL_WRITE |
                          SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_max_cert_list(c, kMaxCertificateBytes);
  SSL_CTX_set_client_hello_cb(c, RequireAlpn, nullptr);
  SSL_CTX_set_alpn_select_cb(c, SelectProtocol, nullptr);
  SSL_CTX_set_msg_callback(c, CountHandshakeMessage);
  ForbidResumption(c);
  RAPT_RETURN_IF_ERROR(UseCertificate(c, identity));
  if (!identity.client_ca.empty()) {
    RAPT_RETURN_IF_ERROR(AuthenticateClients(c, identity.client_ca));
  }
  return context;
}

// --- Names of peers ------------------------------------------------------------------------------

std::optional<std::string> Utf8(const ASN1_STRING* text) {
  unsigned char* bytes = nullptr;
  const int size = ASN1_STRING_to_UTF8(&bytes, text);
  if (size < 0) return std::nullopt;
  std::string result(reinterpret_cast<const char*>(bytes), static_cast<size_t>(size));
  OPENSSL_free(bytes);
  return result;
}

std::optional<std::string> AddressOf(const ASN1_OCTET_STRING& bytes) {
  char text[INET6_ADDRSTRLEN];
  const int family = bytes.length == 4 ? AF_INET : AF_INET6;
  if (family == AF_INET6 && bytes.length != 16) return std::nullopt;
  return std::string(inet_ntop(family, bytes.data, text, sizeof(text)));
}

std::optional<std::string> TextOf(const GENERAL_NAME& name) {
  switch (name.type) {
    case GEN_DNS:
    case GEN_EMAIL:
    case GEN_URI:
      return Utf8(name.d.ia5);
    case GEN_IPADD:
      return AddressOf(*name.d.iPAddress);
    default:
      return "other types of SAN";  // gRPC's name for them
  }
}

std::optional<std::string> CommonNameOf(const X509* certificate) {
  const X509_NAME* const subject = X509_get_subject_name(certificate);
  const int place = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (place < 0) return "";
  return Utf8(X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, place)));
}

// The first alternative name of the subject, or else its common name, as gRPC chooses them.
// nullopt: it can't be read.
std::optional<std::string> NameOf(const X509* certificate) {
  const Names names(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  if (names == nullptr || sk_GENERAL_NAME_num(names.get()) == 0) return CommonNameOf(certificate);
  return TextOf(*sk_GENERAL_NAME_value(names.get(), 0));
}

// --- The socket ----------------------------------------------------------------------------------

class TlsSocket final : public Socket {
 public:
  TlsSocket(Descriptor descriptor, TlsProtocol protocol, Reloaded<TlsAcceptor::Context>& context)
      : Socket(std::move(descriptor)), protocol_(protocol), context_(context) {}

  TlsProtocol protocol() const { return protocol_; }

  bool NeedsHandshake() const override { return !is_open_; }
  Handshake ContinueHandshake() override;
  std::optional<absl::string_view> certificate() const override { return certificate_; }
  ssize_t Read(absl::Span<const iovec> places) override;
  bool HasPending() const override { return has_ended_ || SSL_pending(ssl_.get()) > 0; }
  ssize_t Write(absl::Span<const iovec> places) override;
  void EndWriting() override;

  void CountHandshakeMessage();
  // Returns whether OpenSSL may parse these bytes of the client.
  bool Admits(absl::Span<const uint8_t> bytes) {
    if (first_byte_ == 0) first_byte_ = bytes.front();
    return records_.OnBytes(bytes, phase());
  }

 private:
  using Ssl = std::unique_ptr<SSL, FreeBy<SSL_free>>;

  void Begin();
  bool TakeName();
  void AnswerPlainText() const;
  ClientRecords::Phase phase() const {
    if (is_open_) return ClientRecords::Phase::kOpen;
    return SSL_version(ssl_.get()) == TLS1_2_VERSION ? ClientRecords::Phase::kVerify
                                                     : ClientRecords::Phase::kHello;
  }

  const TlsProtocol protocol_;
  Reloaded<TlsAcceptor::Context>& context_;
  Ssl ssl_;  // null until the first bytes arrive
  ClientRecords records_;
  uint8_t first_byte_ = 0;  // of the client's
  bool is_open_ = false;
  bool has_ended_ = false;  // what is read
  bool has_failed_ = false;
  std::optional<std::string> certificate_;
  int64_t received_ = 0;  // bytes of data
  int64_t handshake_messages_ = 0;
};

TlsSocket& SocketOf(SSL* ssl) { return *static_cast<TlsSocket*>(SSL_get_app_data(ssl)); }

TlsProtocol ProtocolOf(SSL* ssl) { return SocketOf(ssl).protocol(); }

void CountHandshakeMessage(int is_sent, int, int type, const void*, size_t, SSL* ssl, void*) {
  if (is_sent == 0 && type == SSL3_RT_HANDSHAKE) SocketOf(ssl).CountHandshakeMessage();
}

void TlsSocket::CountHandshakeMessage() {
  if (++handshake_messages_ <= kHandshakeMessages + received_ / kBytesPerHandshakeMessage) return;
  SSL_set_shutdown(ssl_.get(), SSL_RECEIVED_SHUTDOWN);  // ends the read that called this
}

// --- OpenSSL's access to the socket --------------------------------------------------------------

TlsSocket& SocketOf(BIO* bio) { return *static_cast<TlsSocket*>(BIO_get_data(bio)); }

bool WouldBlock(ssize_t count) { return count < 0 && (errno == EAGAIN || errno == EINTR); }

int Receive(BIO* bio, char* bytes, int size) {
  BIO_clear_retry_flags(bio);
  const ssize_t count = recv(SocketOf(bio).descriptor(), bytes, static_cast<size_t>(size), 0);
  if (WouldBlock(count)) BIO_set_retry_read(bio);
  if (count <= 0) return static_cast<int>(count);
  const absl::Span<const uint8_t> received(reinterpret_cast<const uint8_t*>(bytes),
                                           static_cast<size_t>(count));
  return SocketOf(bio).Admits(received) ? static_cast<int>(count) : -1;
}

int Send(BIO* bio, const char* bytes, int size) {
  BIO_clear_retry_flags(bio);
  const ssize_t count =
      send(SocketOf(bio).descriptor(), bytes, static_cast<size_t>(size), MSG_NOSIGNAL);
  if (WouldBlock(count)) BIO_set_retry_write(bio);
  return static_cast<int>(count);
}

long Control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

BIO* NewBio(TlsSocket* socket) {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* const m = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "socket");
    RAPT_CHECK(m != nullptr && BIO_meth_set_read(m, Receive) == 1 &&
                   BIO_meth_set_write(m, Send) == 1 && BIO_meth_set_ctrl(m, Control) == 1,
               "no memory");
    return m;
  }();
  BIO* const bio = BIO_new(method);
  RAPT_CHECK(bio != nullptr, "no memory");
  BIO_set_data(bio, socket);
  BIO_set_init(bio, 1);
  return bio;
}

void TlsSocket::Begin() {
  ssl_.reset(SSL_new(context_.Get()->get()));
  RAPT_CHECK(ssl_ != nullptr, "no memory");
  BIO* const bio = NewBio(this);
  SSL_set_bio(ssl_.get(), bio, bio);  // owns it
  SSL_set_app_data(ssl_.get(), this);
  SSL_set_accept_state(ssl_.get());
}

Socket::Handshake TlsSocket::ContinueHandshake() {
  const ScopedErrors errors;
  if (ssl_ == nullptr) Begin();
  const int result = SSL_do_handshake(ssl_.get());
  if (result == 1) {
    is_open_ = true;
    return TakeName() ? Handshake::kComplete : Handshake::kFailed;
  }
  switch (SSL_get_error(ssl_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      return Handshake::kNeedsRead;
    case SSL_ERROR_WANT_WRITE:
      return Handshake::kNeedsWrite;
    default:
      has_failed_ = true;
      AnswerPlainText();
      return Handshake::kFailed;
  }
}

// Tells a client of HTTP/1.1, or of HTTP/2, that it should use TLS. Its bytes, or at least the
// first ones, are read before, because a close with unread bytes may discard the answer.
void TlsSocket::AnswerPlainText() const {
  if (first_byte_ < 'A' || first_byte_ > 'Z') return;  // of a method, or PRI
  std::array<char, SSL3_RT_MAX_PLAIN_LENGTH> unread;
  recv(descriptor(), unread.data(), unread.size(), MSG_DONTWAIT);
  constexpr absl::string_view kBody = R"({"error":"this port speaks TLS; use https, or TLS"})";
  const std::string answer =
      absl::StrCat("HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: ",
                   kBody.size(), "\r\nConnection: close\r\n\r\n", kBody);
  send(descriptor(), answer.data(), answer.size(), MSG_NOSIGNAL);
}

// Called only with a certificate that the handshake has verified. Returns false if its name can't
// be read.
bool TlsSocket::TakeName() {
  const X509* const leaf = SSL_get0_peer_certificate(ssl_.get());
  if (leaf == nullptr) return true;
  certificate_ = NameOf(leaf);
  return certificate_.has_value();
}

// OpenSSL returns at most a record at a time.
ssize_t TlsSocket::Read(absl::Span<const iovec> places) {
  const ScopedErrors errors;
  ssize_t total = 0;
  int records = 0;
  for (const iovec& place : places) {
    for (size_t filled = 0; filled < place.iov_len;) {
      if (++records > kRecordsPerRead) return total;
      size_t count;
      const int result = SSL_read_ex(ssl_.get(), static_cast<char*>(place.iov_base) + filled,
                                     place.iov_len - filled, &count);
      if (result != 1) {
        const int error = SSL_get_error(ssl_.get(), result);
        // WANT_WRITE: the peer does not read an alert that it provoked.
        has_ended_ = error != SSL_ERROR_WANT_READ;
        has_failed_ = has_ended_ && error != SSL_ERROR_ZERO_RETURN;
        if (total > 0) return total;
        return has_ended_ ? kEnded : kBlocked;
      }
      filled += count;
      total += static_cast<ssize_t>(count);
      received_ += static_cast<int64_t>(count);
    }
  }
  return total;
}

// Encrypts a record in place if its bytes are contiguous, otherwise gathers them.
ssize_t TlsSocket::Write(absl::Span<const iovec> places) {
  const ScopedErrors errors;
  std::array<char, SSL3_RT_MAX_PLAIN_LENGTH> gathered;
  absl::string_view bytes(static_cast<const char*>(places[0].iov_base), places[0].iov_len);
  if (bytes.size() < gathered.size() && places.size() > 1) {
    size_t size = 0;
    for (const iovec& place : places) {
      const size_t count = std::min(place.iov_len, gathered.size() - size);
      std::memcpy(gathered.data() + size, place.iov_base, count);
      size += count;
    }
    bytes = {gathered.data(), size};
  }
  size_t written;
  const int result = SSL_write_ex(ssl_.get(), bytes.data(), bytes.size(), &written);
  if (result == 1) return static_cast<ssize_t>(written);
  const int error = SSL_get_error(ssl_.get(), result);
  if (error == SSL_ERROR_WANT_WRITE) return kBlocked;
  has_failed_ = true;
  return kEnded;
}

void TlsSocket::EndWriting() {
  const ScopedErrors errors;
  // OpenSSL forbids it after an error.
  if (is_open_ && !has_failed_) SSL_shutdown(ssl_.get());
  shutdown(descriptor(), SHUT_WR);
}

}  // namespace

absl::StatusOr<std::unique_ptr<TlsAcceptor>> TlsAcceptor::Load(const TlsFiles& files,
                                                               const Clock& clock) {
  RAPT_ASSIGN_OR_RETURN(auto context,
                        Reloaded<Context>::Load(NamedTlsFiles(files), NewContext, clock));
  return absl::WrapUnique(new TlsAcceptor(std::move(context)));
}

std::unique_ptr<Socket> TlsAcceptor::Accept(Descriptor socket, TlsProtocol protocol) {
  return std::make_unique<TlsSocket>(std::move(socket), protocol, *context_);
}

}  // namespace rapt
