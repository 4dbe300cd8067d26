// The server's end of TLS against OpenSSL's client, both on this thread.
#include "server/wire/tls_socket.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "tests/support/certificates.h"

namespace rapt {
namespace {

using std::chrono::hours;
using test::Authority;
using test::Certificate;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Optional;

using Context = std::unique_ptr<SSL_CTX, FreeBy<SSL_CTX_free>>;
using Ssl = std::unique_ptr<SSL, FreeBy<SSL_free>>;

struct ClientOptions {
  std::string alpn = std::string("\2h2", 3);  // empty: without the extension
  int min_version = TLS1_2_VERSION;
  int max_version = TLS1_3_VERSION;
  std::string ciphers = "DEFAULT@SECLEVEL=0";
  std::string groups = "X25519:P-256";
  long max_fragment = SSL3_RT_MAX_PLAIN_LENGTH;  // of what it sends
  std::optional<Certificate> certificate = {};
  std::string more_certificates = {};  // sent after it
};

// The last error of this thread, as text.
std::string LastError() {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  return reason == nullptr ? "none" : reason;
}

// OpenSSL's client on a non-blocking socket. Trusts every server.
class TlsClient {
 public:
  TlsClient(int descriptor, const ClientOptions& options)
      : context_(SSL_CTX_new(TLS_client_method())) {
    SSL_CTX* const c = context_.get();
    SSL_CTX_set_min_proto_version(c, options.min_version);
    SSL_CTX_set_max_proto_version(c, options.max_version);
    EXPECT_EQ(SSL_CTX_set_cipher_list(c, options.ciphers.c_str()), 1);
    EXPECT_EQ(SSL_CTX_set1_groups_list(c, options.groups.c_str()), 1);
    SSL_CTX_set_max_send_fragment(c, options.max_fragment);
    if (options.certificate) Present(*options.certificate, options.more_certificates);
    ssl_.reset(SSL_new(c));
    if (!options.alpn.empty()) {
      SSL_set_alpn_protos(ssl_.get(), reinterpret_cast<const unsigned char*>(options.alpn.data()),
                          static_cast<unsigned>(options.alpn.size()));
    }
    SSL_set_fd(ssl_.get(), descriptor);
    SSL_set_connect_state(ssl_.get());
  }

  SSL* ssl() const { return ssl_.get(); }

  // Returns false after a fatal error.
  bool Handshake() {
    const int result = SSL_do_handshake(ssl_.get());
    return result == 1 || SSL_get_error(ssl_.get(), result) == SSL_ERROR_WANT_READ;
  }
  bool IsOpen() const { return SSL_is_init_finished(ssl_.get()) == 1; }

  // Sends as much as the socket takes now, and returns how much.
  size_t Write(absl::string_view bytes) {
    size_t count = 0;
    SSL_write_ex(ssl_.get(), bytes.data(), bytes.size(), &count);
    return count;
  }

  // Returns what has come.
  std::string Read() {
    std::string all, part(16384, '\0');
    for (size_t count; SSL_read_ex(ssl_.get(), part.data(), part.size(), &count) == 1;) {
      all.append(part, 0, count);
    }
    return all;
  }

 private:
  void Present(const Certificate& certificate, const std::string& more) {
    const Bio pem = BioOf(certificate.cert);
    EXPECT_EQ(SSL_CTX_use_certificate(context_.get(), ReadCertificate(pem).get()), 1);
    EXPECT_EQ(SSL_CTX_use_PrivateKey(context_.get(), ReadPrivateKey(certificate.key).get()), 1);
    if (more.empty()) return;
    EXPECT_EQ(SSL_CTX_add0_chain_cert(context_.get(), ReadCertificate(BioOf(more)).release()), 1);
  }

  Context context_;
  Ssl ssl_;
};

// A server's end and a client's, connected.
struct Pair {
  std::unique_ptr<Socket> server;
  Descriptor client_descriptor;
  std::unique_ptr<TlsClient> client;
  Socket::Handshake state = Socket::Handshake::kNeedsRead;
  bool client_is_fine = true;

  // Takes turns until both ends are open or one has failed.
  void Shake() {
    for (int turn = 0; turn < 20; ++turn) {
      client_is_fine = client_is_fine && client->Handshake();
      if (state != Socket::Handshake::kFailed && server->NeedsHandshake()) {
        state = server->ContinueHandshake();
      }
    }
  }
  bool IsOpen() const { return state == Socket::Handshake::kComplete && client->IsOpen(); }

  // Returns what the server reads now, and how the last read ended.
  std::pair<std::string, ssize_t> Read(size_t most = 1 << 20) const {
    std::string all(most, '\0');
    size_t size = 0;
    for (;;) {
      const iovec place = {all.data() + size, all.size() - size};
      const ssize_t count = server->Read({&place, 1});
      if (count < 0) return {all.substr(0, size), count};
      size += static_cast<size_t>(count);
      if (size == most) return {all, count};
    }
  }
};

class TlsSocketTest : public ::testing::Test {
 protected:
  TlsSocketTest() {
    std::signal(SIGPIPE, SIG_IGN);
    std::string pattern = std::filesystem::temp_directory_path() / "rapt-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    Write("ca", ca_.cert());
    Save(ca_.Issue({"rapt.test"}));
  }
  ~TlsSocketTest() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
  }
  void Save(const Certificate& certificate) const {
    Write("cert", certificate.cert);
    Write("key", certificate.key);
  }

  std::unique_ptr<TlsAcceptor> Load(bool authenticates_clients = false) const {
    const std::string client_ca = authenticates_clients ? folder_ / "ca" : "";
    auto acceptor = TlsAcceptor::Load({folder_ / "cert", folder_ / "key", client_ca}, clock_);
    EXPECT_TRUE(acceptor.ok()) << acceptor.status();
    return *std::move(acceptor);
  }

  static Pair Connect(TlsAcceptor& acceptor, const ClientOptions& options = {},
                      TlsProtocol protocol = TlsProtocol::kHttp2) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    return {acceptor.Accept(Descriptor(ends[0]), protocol), Descriptor(ends[1]),
            std::make_unique<TlsClient>(ends[1], options)};
  }

  static Pair Open(TlsAcceptor& acceptor, const ClientOptions& options = {}) {
    Pair pair = Connect(acceptor, options);
    pair.Shake();
    EXPECT_TRUE(pair.IsOpen()) << LastError();
    return pair;
  }

  // The handshake fails. Returns the reason that the client learns.
  std::string Refusal(TlsAcceptor& acceptor, const ClientOptions& options) const {
    ERR_clear_error();
    Pair pair = Connect(acceptor, options);
    pair.Shake();
    EXPECT_EQ(pair.state, Socket::Handshake::kFailed);
    pair.client->Read();  // in TLS 1.3 the client is open before the server refuses it
    return LastError();
  }

  const SteadyClock clock_;
  const Authority ca_;
  std::filesystem::path folder_;
};

// --- Handshakes ----------------------------------------------------------------------------------

TEST_F(TlsSocketTest, SpeaksTls12And13) {
  const auto acceptor = Load();
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    const Pair pair = Open(*acceptor, {.min_version = version, .max_version = version});
    EXPECT_EQ(SSL_version(pair.client->ssl()), version);
    const unsigned char* protocol;
    unsigned size;
    SSL_get0_alpn_selected(pair.client->ssl(), &protocol, &size);
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(protocol), size), "h2");
    EXPECT_EQ(pair.server->certificate(), std::nullopt);
  }
}

TEST_F(TlsSocketTest, RefusesOldVersionsAndCiphers) {
  const auto acceptor = Load();
  EXPECT_THAT(Refusal(*acceptor, {.min_version = TLS1_VERSION, .max_version = TLS1_1_VERSION}),
              HasSubstr("protocol version"));
  for (const char* ciphers :
       {"ECDHE-ECDSA-AES128-SHA256", "ECDHE-ECDSA-AES128-CCM", "AES128-GCM-SHA256"}) {
    EXPECT_THAT(Refusal(*acceptor, {.max_version = TLS1_2_VERSION, .ciphers = ciphers}),
                HasSubstr("handshake failure"))
        << ciphers;
  }
  EXPECT_THAT(Refusal(*acceptor, {.groups = "P-521"}), HasSubstr("handshake failure"));
}

TEST_F(TlsSocketTest, RefusesClientsThatDoNotOfferH2) {
  const auto acceptor = Load();
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    for (const std::string& alpn : {std::string(), std::string("\x8http/1.1"),
                                    std::string("\5h2-14"), std::string("\3xh2")}) {
      EXPECT_THAT(
          Refusal(*acceptor, {.alpn = alpn, .min_version = version, .max_version = version}),
          HasSubstr("no application protocol"))
          << alpn;
    }
    Open(*acceptor, {.alpn = "\x8http/1.1\2h2", .min_version = version, .max_version = version});
  }
}

TEST_F(TlsSocketTest, ClientsOfHttp1MayOfferNothing) {
  const auto acceptor = Load();
  for (const std::string& alpn : {std::string(), std::string("\2h2\x8http/1.1")}) {
    Pair pair = Connect(*acceptor, {.alpn = alpn}, TlsProtocol::kHttp1);
    pair.Shake();
    EXPECT_TRUE(pair.IsOpen()) << LastError();
  }
  Pair pair = Connect(*acceptor, {}, TlsProtocol::kHttp1);  // offers h2 alone
  pair.Shake();
  EXPECT_EQ(pair.state, Socket::Handshake::kFailed);
}

TEST_F(TlsSocketTest, WaitsForTheRestOfAClientHello) {
  const auto acceptor = Load();
  const Pair pair = Connect(*acceptor);
  EXPECT_EQ(pair.server->ContinueHandshake(), Socket::Handshake::kNeedsRead);
  // A record of 512 bytes, of which 9 come.
  const std::string half("\x16\x03\x01\x02\x00\x01\x00\x01\xFC", 9);
  ASSERT_EQ(write(pair.client_descriptor.get(), half.data(), half.size()), 9);
  EXPECT_EQ(pair.server->ContinueHandshake(), Socket::Handshake::kNeedsRead);
  EXPECT_TRUE(pair.server->NeedsHandshake());
}

// OpenSSL would allocate the size at once.
TEST_F(TlsSocketTest, RefusesLargeClientHellosByTheirHeader) {
  const auto acceptor = Load();
  const struct {
    std::string bytes;
    Socket::Handshake expected;
  } kCases[] = {
      {std::string("\x16\x03\x01\x00\x04\x01\x00\x40\x00", 9), Socket::Handshake::kNeedsRead},
      {std::string("\x16\x03\x01\x00\x04\x01\x00\x40\x01", 9), Socket::Handshake::kFailed},
      {std::string("\x16\x03\x01\x00\x04\x01\x02\x01\x00", 9), Socket::Handshake::kFailed},
      // The header in two records.
      {std::string("\x16\x03\x01\x00\x03\x01\x00\x00", 8), Socket::Handshake::kFailed},
  };
  for (const auto& test : kCases) {
    const Pair pair = Connect(*acceptor);
    // Byte by byte, because that is what the server may get.
    Socket::Handshake state = Socket::Handshake::kNeedsRead;
    for (const char byte : test.bytes) {
      ASSERT_EQ(state, Socket::Handshake::kNeedsRead);
      ASSERT_EQ(write(pair.client_descriptor.get(), &byte, 1), 1);
      state = pair.server->ContinueHandshake();
      if (state == Socket::Handshake::kFailed) break;
    }
    EXPECT_EQ(state, test.expected);
  }
}

// The server asks for a second one if it does not know the group of the first.
TEST_F(TlsSocketTest, RefusesALargeSecondClientHello) {
  const auto acceptor = Load();
  const ClientOptions client{.groups = "P-521:X25519"};
  Open(*acceptor, client);
  const std::string change_cipher_spec("\x14\x03\x03\x00\x01\x01", 6);
  const std::string large_hello("\x16\x03\x03\x00\x04\x01\x02\x01\x00", 9);
  const Pair pair = Connect(*acceptor, client);
  pair.client->Handshake();
  EXPECT_EQ(pair.server->ContinueHandshake(), Socket::Handshake::kNeedsRead);
  const std::string bytes = change_cipher_spec + large_hello;
  ASSERT_GT(write(pair.client_descriptor.get(), bytes.data(), bytes.size()), 0);
  EXPECT_EQ(pair.server->ContinueHandshake(), Socket::Handshake::kFailed);
}

TEST_F(TlsSocketTest, TakesClientHellosInSeveralRecords) {
  const auto acceptor = Load();
  std::string alpn("\2h2");
  for (const char c : {'\1', '\x16', 'x'}) alpn += '\xFF' + std::string(255, c);
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    Open(*acceptor, {.alpn = alpn, .max_version = version, .max_fragment = 512});
  }
}

TEST_F(TlsSocketTest, PlainTextFailsTheHandshake) {
  const auto acceptor = Load();
  for (const std::string& text :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        std::string(100, '\0')}) {
    const Pair pair = Connect(*acceptor);
    ASSERT_GT(write(pair.client_descriptor.get(), text.data(), text.size()), 0);
    EXPECT_EQ(pair.server->ContinueHandshake(), Socket::Handshake::kFailed);
  }
}

TEST_F(TlsSocketTest, SessionsCanNotBeResumed) {
  const auto acceptor = Load();
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    const Pair pair = Open(*acceptor, {.min_version = version, .max_version = version});
    pair.client->Read();  // tickets would come after the handshake
    const SSL_SESSION* const session = SSL_get0_session(pair.client->ssl());
    EXPECT_EQ(SSL_SESSION_has_ticket(session), 0);
    unsigned size;
    SSL_SESSION_get_id(session, &size);
    EXPECT_EQ(size, 0u) << version;
  }
}

// --- Certificates of clients ---------------------------------------------------------------------

TEST_F(TlsSocketTest, RequiresACertificateOfTheAuthority) {
  const auto acceptor = Load(/*authenticates_clients=*/true);
  const Authority stranger;
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    ClientOptions client{.min_version = version, .max_version = version};
    // TLS 1.2 has no alert for it.
    EXPECT_THAT(Refusal(*acceptor, client),
                AnyOf(HasSubstr("certificate required"), HasSubstr("handshake failure")));
    client.certificate = ca_.Issue({"alice"}, {.from = hours(-2), .until = hours(-1)});
    EXPECT_THAT(Refusal(*acceptor, client), HasSubstr("certificate expired"));
    client.certificate = stranger.Issue({"alice"});
    EXPECT_THAT(Refusal(*acceptor, client), HasSubstr("decrypt error"));
    client.certificate = ca_.Issue({"alice"});
    EXPECT_THAT(Open(*acceptor, client).server->certificate(), Optional(std::string("alice")));
  }
}

// What a client sends beside its own certificate proves nothing.
TEST_F(TlsSocketTest, TheNameIsThatOfTheCertificateWhoseKeyTheClientHas) {
  const auto acceptor = Load(/*authenticates_clients=*/true);
  const Pair pair = Open(*acceptor, {.certificate = ca_.Issue({"alice"}),
                                     .more_certificates = ca_.Issue({"root"}).cert});
  EXPECT_THAT(pair.server->certificate(), Optional(std::string("alice")));
}

TEST_F(TlsSocketTest, NamesPeersAsGrpcDoes) {
  const auto acceptor = Load(/*authenticates_clients=*/true);
  struct {
    const char* common_name;
    const char* alternative_names;
    const char* expected;
  } const kCases[] = {
      {"alice", "", "alice"},
      {"", "", ""},
      {"alice", "DNS:bob,DNS:carol", "bob"},
      {"alice", "email:bob@rapt.test,DNS:carol", "bob@rapt.test"},
      {"alice", "URI:spiffe://rapt.test/bob", "spiffe://rapt.test/bob"},
      {"alice", "IP:10.1.2.3,DNS:carol", "10.1.2.3"},
      {"alice", "IP:2001:db8::1", "2001:db8::1"},
      {"alice", "RID:1.2.3.4,DNS:carol", "other types of SAN"},
  };
  for (const auto& test : kCases) {
    const Pair pair =
        Open(*acceptor, {.certificate = ca_.IssueNamed(test.common_name, test.alternative_names)});
    EXPECT_THAT(pair.server->certificate(), Optional(std::string(test.expected)));
  }
}

TEST_F(TlsSocketTest, ALongChainOfCertificatesIsRefused) {
  const auto acceptor = Load(/*authenticates_clients=*/true);
  std::string names = "DNS:a";
  for (int i = 0; i < 1000; ++i) absl::StrAppend(&names, ",DNS:", std::string(50, 'a'), i);
  EXPECT_THAT(Refusal(*acceptor, {.certificate = ca_.IssueNamed("alice", names)}),
              HasSubstr("illegal parameter"));
}

// --- Reloaded files ------------------------------------------------------------------------------

TEST_F(TlsSocketTest, ReloadedFilesAreForNewHandshakes) {
  const auto acceptor = Load();
  const auto name = [](const Pair& pair) {
    const std::unique_ptr<X509, FreeBy<X509_free>> certificate(
        SSL_get1_peer_certificate(pair.client->ssl()));
    char text[100] = {};
    X509_NAME_get_text_by_NID(X509_get_subject_name(certificate.get()), NID_commonName, text, 100);
    return std::string(text);
  };
  Pair old = Open(*acceptor);
  Save(ca_.Issue({"new.test"}));
  acceptor->Reload();
  EXPECT_EQ(name(Open(*acceptor)), "new.test");
  EXPECT_EQ(name(old), "rapt.test");
  old.client->Write("still there");
  EXPECT_EQ(old.Read().first, "still there");
  Write("key", ca_.Issue({"other.test"}).key);
  acceptor->Reload();  // does not match
  EXPECT_EQ(name(Open(*acceptor)), "new.test");
}

// --- Bytes ---------------------------------------------------------------------------------------

std::string Numbered(size_t size) {
  std::string bytes(size, '\0');
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(i * 31 + i / 251);
  return bytes;
}

// Far more than the sockets hold, from pieces of all sizes, whose addresses change after a block.
TEST_F(TlsSocketTest, WritesPiecesInOrder) {
  const auto acceptor = Load();
  const Pair pair = Open(*acceptor);
  const std::string all = Numbered(3 << 20);
  std::string received;
  size_t sent = 0, blocked = 0;
  while (sent < all.size()) {
    // Copies, so that their addresses differ.
    std::vector<std::string> pieces;
    std::vector<iovec> places;
    size_t begin = sent;
    for (const size_t size : {9, 5, 300, 20000, 9, 70000, 1}) {
      pieces.push_back(all.substr(begin, size));
      begin += pieces.back().size();
    }
    for (std::string& piece : pieces) {
      if (!piece.empty()) places.push_back({piece.data(), piece.size()});
    }
    const ssize_t count = pair.server->Write(places);
    ASSERT_NE(count, Socket::kEnded);
    if (count == Socket::kBlocked) {
      ++blocked;
      received += pair.client->Read();
    } else {
      sent += static_cast<size_t>(count);
    }
  }
  received += pair.client->Read();
  EXPECT_TRUE(received == all);
  EXPECT_GT(blocked, 0u);
}

TEST_F(TlsSocketTest, ReadsIntoPlacesOfAnySize) {
  const auto acceptor = Load();
  const Pair pair = Open(*acceptor);
  const std::string all = Numbered(3 << 20);
  std::string received, first(1000, '\0'), second(33, '\0');
  for (size_t sent = 0; received.size() < all.size();) {
    if (sent < all.size()) {
      sent += pair.client->Write(absl::string_view(all).substr(sent, 5000));
    }
    const iovec places[] = {{first.data(), first.size()}, {second.data(), second.size()}};
    do {
      const ssize_t count = pair.server->Read(places);
      if (count == Socket::kBlocked) break;
      ASSERT_GT(count, 0);
      received += (first + second).substr(0, static_cast<size_t>(count));
    } while (pair.server->HasPending());
  }
  EXPECT_TRUE(received == all);
}

// Others have their turn between.
TEST_F(TlsSocketTest, AReadEndsAfterManyTinyRecords) {
  const auto acceptor = Load();
  const Pair pair = Open(*acceptor);
  for (int i = 0; i < 200; ++i) ASSERT_EQ(pair.client->Write("x"), 1u);
  std::string bytes(1000, '\0');
  const iovec place = {bytes.data(), bytes.size()};
  EXPECT_LT(pair.server->Read({&place, 1}), 200);
  EXPECT_FALSE(pair.server->HasPending()) << "the descriptor reports the rest";
}

TEST_F(TlsSocketTest, CloseNotifyEndsWhatIsRead) {
  const auto acceptor = Load();
  const Pair pair = Open(*acceptor);
  pair.client->Write("the end");
  SSL_shutdown(pair.client->ssl());
  std::string bytes(100, '\0');
  const iovec place = {bytes.data(), bytes.size()};
  EXPECT_EQ(pair.server->Read({&place, 1}), 7);
  EXPECT_TRUE(pair.server->HasPending()) << "nothing makes the descriptor ready again";
  EXPECT_EQ(pair.server->Read({&place, 1}), Socket::kEnded);
}

TEST_F(TlsSocketTest, SendsCloseNotify) {
  const auto acceptor = Load();
  const Pair pair = Open(*acceptor);
  const iovec place = {const_cast<char*>("bye"), 3};
  ASSERT_EQ(pair.server->Write({&place, 1}), 3);
  pair.server->EndWriting();
  EXPECT_EQ(pair.client->Read(), "bye");
  EXPECT_EQ(SSL_get_shutdown(pair.client->ssl()), SSL_RECEIVED_SHUTDOWN);
}

TEST_F(TlsSocketTest, ACutConnectionEnds) {
  const auto acceptor = Load();
  Pair pair = Open(*acceptor);
  pair.client_descriptor = Descriptor();
  EXPECT_EQ(pair.Read().second, Socket::kEnded);
  const iovec place = {const_cast<char*>("lost"), 4};
  EXPECT_EQ(pair.server->Write({&place, 1}), Socket::kEnded);
}

TEST_F(TlsSocketTest, ChangedBytesEndTheConnection) {
  const auto acceptor = Load();
  const Pair pair = Open(*acceptor);
  const std::string record = std::string("\x17\x03\x03\x00\x20", 5) + std::string(32, 'x');
  ASSERT_EQ(write(pair.client_descriptor.get(), record.data(), record.size()), 37);
  EXPECT_EQ(pair.Read().second, Socket::kEnded);
}

// --- Messages after the handshake ----------------------------------------------------------------

TEST_F(TlsSocketTest, RenegotiationIsRefused) {
  const auto acceptor = Load();
  const Pair pair = Open(*acceptor, {.max_version = TLS1_2_VERSION});
  pair.client->Write("before");
  EXPECT_EQ(SSL_renegotiate(pair.client->ssl()), 1);
  pair.client->Handshake();  // sends a ClientHello
  const auto [bytes, end] = pair.Read();
  EXPECT_EQ(bytes, "before");
  EXPECT_EQ(end, Socket::kEnded);
}

TEST_F(TlsSocketTest, AFewUpdatesOfKeysAreFine) {
  const auto acceptor = Load();
  const Pair pair = Open(*acceptor);
  for (int i = 0; i < 10; ++i) {
    ASSERT_EQ(SSL_key_update(pair.client->ssl(), SSL_KEY_UPDATE_REQUESTED), 1);
    ASSERT_EQ(pair.client->Write("abc"), 3u);
    EXPECT_EQ(pair.Read().first, "abc");
    const iovec place = {const_cast<char*>("def"), 3};
    ASSERT_EQ(pair.server->Write({&place, 1}), 3);
    EXPECT_EQ(pair.client->Read(), "def");
  }
}

TEST_F(TlsSocketTest, AFloodOfUpdatesOfKeysEndsTheConnection) {
  const auto acceptor = Load();
  const Pair pair = Open(*acceptor);
  for (int i = 0; i < 100; ++i) {
    SSL_key_update(pair.client->ssl(), SSL_KEY_UPDATE_NOT_REQUESTED);
    if (!pair.client->Handshake()) break;
    const auto [bytes, end] = pair.Read();
    if (end == Socket::kEnded) return;
  }
  ADD_FAILURE() << "the server takes every one";
}

}  // namespace
}  // namespace rapt
