// The real rapt-server with certificates and tokens: who is admitted, and how others are rejected.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/grpc/health/v1/health.grpc.pb.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "proto/rapt/v1/attention.grpc.pb.h"
#include "proto/rapt/v1/cache.grpc.pb.h"
#include "rapt/client.h"
#include "tests/support/certificates.h"
#include "tests/support/loopback.h"
#include "tests/support/metrics_page.h"
#include "tests/support/rapt_reason.h"
#include "tests/support/raw_http.h"
#include "tests/support/raw_http2.h"
#include "tests/support/server_process.h"

namespace rapt {
namespace {

using client::Client;
using client::TlsOptions;
using client::View;
using std::chrono::hours;
using test::Authority;
using test::Certificate;
using test::ChildProcess;
using test::Encrypt;
using test::ReadMetric;
using test::ReasonOf;
using test::ServerCommand;
using test::ServerProcess;
using test::Sha256;
using test::WaitForMetric;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr char kServer[] = "rapt.test";
constexpr char kToken[] = "a-token-that-is-known";
constexpr char kWrongToken[] = "a-token-that-nobody-has";

absl::Status Attend(Client& client) {
  static const std::vector<float> x(2 * 3 * 4, 0.5f);
  const client::TensorView tokens = View<float>({1, 2, 3, 4}, x);
  return client.Attend({.q = tokens, .k = tokens, .v = tokens}).status();
}

// With one connection and without retries.
absl::Status AttendOnce(const std::string& address, const std::optional<TlsOptions>& tls,
                        const std::string& token = "") {
  auto client = Client::Connect(
      address, {.tls = tls, .token = token, .connections = 1, .retries = {.max_attempts = 1}});
  return client.ok() ? Attend(**client) : client.status();
}

// Polls until the condition is true.
void WaitUntil(const std::function<bool()>& is_true) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!is_true()) {
    ASSERT_LT(std::chrono::steady_clock::now(), end) << "the condition did not become true";
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

// A temporary folder with the certificate of an authority.
class SecurityTest : public ::testing::Test {
 protected:
  SecurityTest() {
    std::string pattern = std::filesystem::temp_directory_path() / "rapt-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    Write("ca", ca_.cert());
    Save("server", ca_.Issue({kServer}));
  }
  ~SecurityTest() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return folder_ / name; }

  // Replaces the file atomically, as recommended for a running server.
  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(Path("new")) << text;
    std::filesystem::rename(Path("new"), Path(name));
  }

  void Save(const std::string& name, const Certificate& certificate) const {
    Write(name + ".key", certificate.key);
    Write(name + ".crt", certificate.cert);
  }

  std::string Flag(const std::string& flag, const std::string& file) const {
    return absl::StrCat("--", flag, "=", Path(file));
  }

  std::vector<std::string> TlsFlags(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> flags = {Flag("tls_cert", "server.crt"),
                                      Flag("tls_key", "server.key")};
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }

  std::vector<std::string> MutualTlsFlags(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> flags = TlsFlags(more);
    flags.push_back(Flag("tls_client_ca", "ca"));
    return flags;
  }

  std::vector<std::string> TokenFlags(const std::vector<std::string>& more = {}) const {
    Write("tokens", absl::StrCat("alice ", Sha256(kToken), "\n"));
    std::vector<std::string> flags = TlsFlags(more);
    flags.push_back(Flag("token_file", "tokens"));
    return flags;
  }

  // Options of a client that trusts ca_ and presents the certificate of that name.
  TlsOptions Tls(const std::string& certificate = "") const {
    TlsOptions tls{.ca_file = Path("ca")};
    if (certificate.empty()) return tls;
    tls.cert_file = Path(certificate + ".crt");
    tls.key_file = Path(certificate + ".key");
    return tls;
  }

  static std::shared_ptr<grpc::Channel> Channel(const ServerProcess& server,
                                                const Authority& authority) {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = authority.cert();
    return grpc::CreateChannel(server.grpc_address(), grpc::SslCredentials(options));
  }

  const Authority ca_;
  const Authority stranger_;
  std::filesystem::path folder_;
};

// --- TLS -----------------------------------------------------------------------------------------

TEST_F(SecurityTest, TlsServesClientsThatTrustTheAuthority) {
  const ServerProcess server(TlsFlags());
  EXPECT_TRUE(AttendOnce(server.grpc_address(), Tls()).ok());
  TlsOptions by_name = Tls();
  by_name.server_name = kServer;
  EXPECT_TRUE(AttendOnce(server.grpc_address(), by_name).ok());
  EXPECT_THAT(server.Log(), HasSubstr(" grpc_security=tls metrics_security=plaintext "));
}

TEST_F(SecurityTest, RejectsClientsWithoutTls) {
  const ServerProcess server(TlsFlags());
  Write("stranger", stranger_.cert());
  TlsOptions other_name = Tls();
  other_name.server_name = "elsewhere.test";
  TlsOptions other_authority = Tls();
  other_authority.ca_file = Path("stranger");
  for (const std::optional<TlsOptions>& tls :
       {std::optional<TlsOptions>(), std::optional(other_name), std::optional(other_authority)}) {
    const absl::Status status = AttendOnce(server.grpc_address(), tls);
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  }
  EXPECT_TRUE(AttendOnce(server.grpc_address(), Tls()).ok()) << "the server must keep serving";
}

TEST_F(SecurityTest, MutualTlsServesClientsWithACertificate) {
  const ServerProcess server(MutualTlsFlags());
  Save("alice", ca_.Issue({"alice"}));
  const absl::Status status = AttendOnce(server.grpc_address(), Tls("alice"));
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(server.Log(), HasSubstr(" grpc_security=mtls "));
}

TEST_F(SecurityTest, MutualTlsRejectsInvalidCertificates) {
  const ServerProcess server(MutualTlsFlags());
  Save("expired", ca_.Issue({"alice"}, {.from = hours(-2), .until = hours(-1)}));
  Save("not-yet", ca_.Issue({"alice"}, {.from = hours(1), .until = hours(2)}));
  Save("strangers", stranger_.Issue({"alice"}));
  for (const char* certificate : {"", "expired", "not-yet", "strangers"}) {
    const absl::Status status = AttendOnce(server.grpc_address(), Tls(certificate));
    EXPECT_TRUE(absl::IsUnavailable(status)) << certificate << ": " << status;
  }
}

TEST_F(SecurityTest, GarbageOnTheTlsPortHasNoEffect) {
  const ServerProcess server(TlsFlags());
  for (const std::string& garbage :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100000, 'x'), std::string(7, '\0'),
        std::string("\x16\x03\x01\xff\xff\x01", 6)}) {
    test::Exchange(server.grpc_address(), garbage);
  }
  EXPECT_TRUE(AttendOnce(server.grpc_address(), Tls()).ok());
}

TEST_F(SecurityTest, PlainTextOnTheTlsPortIsToldSo) {
  const ServerProcess server(TlsFlags());
  for (const std::string& address : {server.grpc_address(), server.http_address()}) {
    for (const char* text :
         {"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
          "POST /v2/models/attention/infer HTTP/1.1\r\nHost: localhost\r\n\r\n{}",
          "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"}) {
      test::RawHttp connection(address);
      const test::RawResponse response = connection.Ask(text);
      EXPECT_EQ(response.status, 400) << text;
      EXPECT_THAT(response.body, HasSubstr("this port speaks TLS")) << text;
      connection.EndWriting();
      EXPECT_TRUE(connection.IsClosed()) << text;
    }
  }
}

// --- Reloaded files ------------------------------------------------------------------------------

// Makes calls until destruction, on an established connection and each on a new one; none may
// fail.
class Load {
 public:
  Load(std::string address, TlsOptions tls) : address_(std::move(address)), tls_(std::move(tls)) {
    standing_ = std::thread([this] {
      auto client = Client::Connect(address_, {.tls = tls_, .connections = 1});
      ASSERT_TRUE(client.ok()) << client.status();
      while (!stop_ && Count(Attend(**client))) {
      }
    });
    changing_ = std::thread([this] {
      while (!stop_ && Count(AttendOnce(address_, tls_))) {
      }
    });
  }
  ~Load() {
    stop_ = true;
    standing_.join();
    changing_.join();
    EXPECT_GT(calls_, 0);
  }

 private:
  bool Count(const absl::Status& status) {
    ++calls_;
    EXPECT_TRUE(status.ok()) << status;
    return status.ok();
  }

  const std::string address_;
  const TlsOptions tls_;
  std::atomic<bool> stop_{false};
  std::atomic<int> calls_{0};
  std::thread standing_, changing_;
};

TEST_F(SecurityTest, ANewCertificateIsServedUnderLoadAndNoCallFails) {
  const ServerProcess server(TlsFlags());
  TlsOptions always = Tls(), afterwards = Tls();
  always.server_name = kServer;
  afterwards.server_name = "new.test";
  const auto is_new = [&] { return AttendOnce(server.grpc_address(), afterwards).ok(); };
  EXPECT_FALSE(is_new());
  const Load load(server.grpc_address(), always);
  Save("server", ca_.Issue({kServer, "new.test"}));  // does not match the key yet
  WaitUntil(is_new);
}

TEST_F(SecurityTest, InvalidReplacementsHaveNoEffect) {
  const ServerProcess server(TlsFlags());
  Write("server.crt", "no certificate");
  WaitUntil([&] {
    EXPECT_TRUE(AttendOnce(server.grpc_address(), Tls()).ok());
    return absl::StrContains(server.Log(), "not reloaded");
  });
  EXPECT_THAT(server.Log(), HasSubstr("contains no PEM certificate"));
  EXPECT_THAT(server.Log(), Not(HasSubstr(folder_.string())));
  std::filesystem::remove(Path("server.crt"));
  WaitUntil([&] {
    EXPECT_TRUE(AttendOnce(server.grpc_address(), Tls()).ok());
    return absl::StrContains(server.Log(), ": No such file");
  });
}

TEST_F(SecurityTest, TheClientAuthorityIsReloaded) {
  const ServerProcess server(MutualTlsFlags());
  Save("alice", stranger_.Issue({"alice"}));
  Write("servers-ca", ca_.cert());
  TlsOptions alice = Tls("alice");
  alice.ca_file = Path("servers-ca");
  EXPECT_FALSE(AttendOnce(server.grpc_address(), alice).ok());
  Write("ca", stranger_.cert());
  WaitUntil([&] { return AttendOnce(server.grpc_address(), alice).ok(); });
}

// --- Unusable files ------------------------------------------------------------------------------

class BadFilesTest : public SecurityTest {
 protected:
  // The server exits with one line that names the flag and the error, but no path and no secret.
  void ExpectRefusal(std::vector<std::string> flags, const std::string& fragment) const {
    flags.insert(flags.end(), {"--grpc_address=127.0.0.1:0", "--metrics_address=127.0.0.1:0"});
    ChildProcess server(ServerCommand(flags));
    EXPECT_EQ(server.Wait(), 2);
    EXPECT_THAT(server.Errors(), HasSubstr(fragment));
    EXPECT_THAT(server.Errors(), Not(HasSubstr(folder_.string())));
    EXPECT_THAT(server.Errors(), Not(HasSubstr("PRIVATE KEY")));
    EXPECT_THAT(server.Errors(), Not(HasSubstr(kToken)));
  }
};

TEST_F(BadFilesTest, RejectsMissingFiles) {
  ExpectRefusal({Flag("tls_cert", "none"), Flag("tls_key", "server.key")},
                "cannot read the file of --tls_cert: No such file");
  ExpectRefusal(TlsFlags({Flag("tls_client_ca", "none")}),
                "cannot read the file of --tls_client_ca");
  ExpectRefusal(TlsFlags({Flag("token_file", "none")}), "cannot read the file of --token_file");
}

TEST_F(BadFilesTest, PipesAndDirectories) {
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  for (const std::string& path : {Path("pipe"), folder_.string()}) {
    ExpectRefusal(TlsFlags({"--token_file=" + path}),
                  "cannot read the file of --token_file: it is not a regular file");
  }
}

TEST_F(BadFilesTest, RejectsFilesOfAnotherKind) {
  ExpectRefusal({Flag("tls_cert", "server.key"), Flag("tls_key", "server.key")},
                "--tls_cert contains no PEM certificate");
  ExpectRefusal({Flag("tls_cert", "server.crt"), Flag("tls_key", "server.crt")},
                "--tls_key contains no PEM private key");
  ExpectRefusal(TlsFlags({Flag("tls_client_ca", "server.key")}),
                "--tls_client_ca contains no PEM certificate");
  Write("empty", "");
  ExpectRefusal(TlsFlags({Flag("tls_client_ca", "empty")}), "--tls_client_ca is empty");
}

TEST_F(BadFilesTest, RejectsUnusableKeys) {
  Write("other.key", ca_.Issue({kServer}).key);
  ExpectRefusal({Flag("tls_cert", "server.crt"), Flag("tls_key", "other.key")},
                "--tls_key does not match --tls_cert");
  const Certificate certificate = ca_.Issue({kServer});
  Save("locked", {certificate.cert, Encrypt(certificate.key)});
  ExpectRefusal({Flag("tls_cert", "locked.crt"), Flag("tls_key", "locked.key")}, "passphrase");
}

TEST_F(BadFilesTest, RejectsAnExpiredCertificate) {
  Save("expired", ca_.Issue({kServer}, {.from = hours(-2), .until = hours(-1)}));
  ExpectRefusal({Flag("tls_cert", "expired.crt"), Flag("tls_key", "expired.key")}, "has expired");
}

TEST_F(BadFilesTest, RejectsUnhashedTokens) {
  Write("tokens", absl::StrCat("# holders\n\nalice ", Sha256(kToken), "\nbob ", kToken, "\n"));
  ExpectRefusal(TlsFlags({Flag("token_file", "tokens")}), "line 4 of --token_file");
  Write("tokens", absl::StrCat("a/b ", Sha256(kToken)));
  ExpectRefusal(TlsFlags({Flag("token_file", "tokens")}), "line 1 of --token_file");
  Write("tokens", "# nobody yet\n");
  ExpectRefusal(TlsFlags({Flag("token_file", "tokens")}), "no token");
}

// --- Tokens --------------------------------------------------------------------------------------

void ExpectUnauthenticated(const absl::Status& status) {
  EXPECT_TRUE(absl::IsUnauthenticated(status)) << status;
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr("a-token")));
}

TEST_F(SecurityTest, OnlyCallersWithATokenAreServed) {
  const ServerProcess server(TokenFlags());
  const absl::Status known = AttendOnce(server.grpc_address(), Tls(), kToken);
  EXPECT_TRUE(known.ok()) << known;
  ExpectUnauthenticated(AttendOnce(server.grpc_address(), Tls()));
  ExpectUnauthenticated(AttendOnce(server.grpc_address(), Tls(), kWrongToken));
  ExpectUnauthenticated(AttendOnce(server.grpc_address(), Tls(), Sha256(kToken)));
  EXPECT_THAT(server.Log(), HasSubstr(" grpc_security=tls+tokens "));
  EXPECT_THAT(server.Log(), Not(HasSubstr("a-token")));
  WaitForMetric(server, "rapt_requests_total", 3, {{"code", "UNAUTHENTICATED"}});
}

// Every method of the services, including future ones.
TEST_F(SecurityTest, EveryMethodRequiresAToken) {
  const ServerProcess server(TokenFlags());
  grpc::GenericStub stub(Channel(server, ca_));
  const grpc::Slice nothing;
  const grpc::ByteBuffer no_fields(&nothing, 1);
  for (const google::protobuf::ServiceDescriptor* service :
       {inference::ServerLiveRequest::descriptor()->file()->service(0),
        v1::AttendRequest::descriptor()->file()->service(0),
        v1::CreateRequest::descriptor()->file()->service(0)}) {
    for (int i = 0; i < service->method_count(); ++i) {
      for (const char* header : {"", "Bearer", "Bearer ", "Basic YTpi", "Bearer wrong"}) {
        const std::string method =
            absl::StrCat("/", service->full_name(), "/", service->method(i)->name());
        grpc::ClientContext context;
        if (*header != '\0') context.AddMetadata("authorization", header);
        grpc::CompletionQueue queue;
        const auto call = stub.PrepareUnaryCall(&context, method, no_fields, &queue);
        call->StartCall();
        grpc::ByteBuffer answer;
        grpc::Status status;
        call->Finish(&answer, &status, nullptr);
        void* tag;
        bool ok;
        queue.Next(&tag, &ok);
        // gRPC's own status for an unknown method has no message.
        if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED &&
            status.error_message().empty()) {
          continue;
        }
        EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED)
            << method << " with '" << header << "': " << status.error_message();
      }
    }
  }
}

// --- Caches of callers ---------------------------------------------------------------------------

// The calls of one caller on caches of one layer, of one head of size 1.
class CacheOwner {
 public:
  explicit CacheOwner(const std::shared_ptr<grpc::Channel>& channel)
      : caches_(v1::CacheService::NewStub(channel)),
        models_(inference::GRPCInferenceService::NewStub(channel)) {}

  std::string Create() {
    v1::CreateRequest request;
    request.set_name("mine");
    request.set_dtype(v1::FP32);
    v1::LayerShape& shape = *request.add_shapes();
    shape.set_layers(1);
    shape.set_kv_heads(1);
    shape.set_head_size(1);
    v1::Cache cache;
    const grpc::Status status = Call(&Stub::Create, request, cache);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return cache.id();
  }

  grpc::Status Append(const std::string& id, float token) {
    v1::AppendRequest request;
    v1::AppendPart& part = *request.add_parts();
    part.set_cache(id);
    part.set_generation(1);
    part.set_at(0);
    *part.mutable_k() = *part.mutable_v() = Number(token);
    v1::AppendResponse response;
    return Call(&Stub::Append, request, response);
  }

  v1::Cache Get(const std::string& id) {
    v1::Caches found;
    const grpc::Status status = Call(&Stub::Get, IdsOf(id), found);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return found.caches_size() == 1 ? found.caches(0) : v1::Cache();
  }

  std::vector<std::string> List() {
    v1::Caches found;
    EXPECT_TRUE(Call(&Stub::List, v1::ListRequest(), found).ok());
    std::vector<std::string> ids;
    for (const v1::Cache& cache : found.caches()) ids.push_back(cache.id());
    return ids;
  }

  // The refusals of all methods that name a cache.
  std::vector<std::string> TouchAll(const std::string& id) {
    std::vector<std::string> refusals;
    const auto note = [&](const grpc::Status& status) {
      refusals.push_back(absl::StrCat(status.error_code(), " ", reason_));
    };
    v1::Cache cache;
    v1::Caches caches;
    v1::ForkRequest fork;
    fork.set_cache(id);
    fork.set_generation(1);
    note(Call(&Stub::Fork, fork, cache));
    v1::TruncateRequest truncate;
    truncate.set_cache(id);
    truncate.set_generation(1);
    note(Call(&Stub::Truncate, truncate, cache));
    note(Call(&Stub::Renew, IdsOf(id), caches));
    note(Call(&Stub::Close, IdsOf(id), caches));
    note(Call(&Stub::Get, IdsOf(id), caches));
    note(Append(id, 3));
    v1::AttendCachedRequest attend;
    v1::Item& item = *attend.add_items();
    item.set_cache(id);
    item.set_generation(1);
    item.set_rows(1);
    *attend.mutable_q() = Number(1);
    v1::AttendCachedResponse attended;
    note(Call(&Stub::Attend, attend, attended));
    v1::DiagnoseResponse report;
    note(Call(&Stub::Diagnose, attend, report));
    grpc::ClientContext context;
    v1::ExportRequest request;
    request.set_cache(id);
    request.set_generation(1);
    const auto stream = caches_->Export(&context, request);
    v1::KvChunk chunk;
    EXPECT_FALSE(stream->Read(&chunk));
    const grpc::Status exported = stream->Finish();
    reason_ = ReasonOf(context);
    note(exported);
    return refusals;
  }

  // A step of the sequence 7 of the model attention_session. Returns y, or why there is none.
  std::string Step(bool starts, float token) {
    inference::ModelInferRequest request;
    request.set_model_name("attention_session");
    (*request.mutable_parameters())["sequence_id"].set_int64_param(7);
    (*request.mutable_parameters())["sequence_start"].set_bool_param(starts);
    for (const char* name : {"Q", "K", "V"}) {
      auto& input = *request.add_inputs();
      input.set_name(name);
      input.set_datatype("FP32");
      for (int axis = 0; axis < 4; ++axis) input.add_shape(1);
      request.add_raw_input_contents(reinterpret_cast<const char*>(&token), sizeof token);
    }
    grpc::ClientContext context;
    inference::ModelInferResponse response;
    const grpc::Status status = models_->ModelInfer(&context, request, &response);
    if (!status.ok()) return status.error_message();
    float y = 0;
    EXPECT_EQ(response.raw_output_contents(0).size(), sizeof y);
    response.raw_output_contents(0).copy(reinterpret_cast<char*>(&y), sizeof y);
    return absl::StrCat(y);
  }

 private:
  using Stub = v1::CacheService::Stub;

  static v1::Tensor Number(float value) {
    v1::Tensor tensor;
    tensor.set_dtype(v1::FP32);
    for (int axis = 0; axis < 3; ++axis) tensor.add_shape(1);
    tensor.set_data(&value, sizeof value);
    return tensor;
  }
  static v1::Ids IdsOf(const std::string& id) {
    v1::Ids ids;
    ids.add_caches(id);
    return ids;
  }

  template <typename Request, typename Response>
  grpc::Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response& response) {
    grpc::ClientContext context;
    const grpc::Status status = ((*caches_).*method)(&context, request, &response);
    reason_ = ReasonOf(context);
    return status;
  }

  std::unique_ptr<Stub> caches_;
  std::unique_ptr<inference::GRPCInferenceService::Stub> models_;
  std::string reason_;
};

void ExpectThatTheySeeNothingOfEachOther(CacheOwner alice, CacheOwner bob) {
  const std::string hers = alice.Create();
  ASSERT_TRUE(alice.Append(hers, 2).ok());
  const std::string unknown = absl::StrCat(grpc::StatusCode::NOT_FOUND, " unknown");
  EXPECT_THAT(bob.TouchAll(hers), ::testing::Each(unknown));
  EXPECT_THAT(bob.List(), IsEmpty());
  const std::string his = bob.Create();  // a cache of the same name
  EXPECT_NE(his, hers);
  EXPECT_THAT(bob.List(), ElementsAre(his));
  EXPECT_THAT(alice.List(), ElementsAre(hers));
  const v1::Cache cache = alice.Get(hers);
  EXPECT_EQ(cache.generation(), 1u);
  EXPECT_THAT(cache.lengths(), ElementsAre(1));
  // Sequences of one id, which are caches without a name.
  EXPECT_EQ(alice.Step(/*starts=*/true, 5), "5");
  const std::vector<std::string> all_of_hers = alice.List();
  ASSERT_EQ(all_of_hers.size(), 2u);
  EXPECT_THAT(bob.TouchAll(all_of_hers[1]), ::testing::Each(unknown));
  EXPECT_THAT(bob.Step(/*starts=*/false, 5), HasSubstr("START flag"));
  EXPECT_EQ(bob.Step(/*starts=*/true, -5), "-5");
  EXPECT_EQ(alice.Step(/*starts=*/false, 5), "5");  // over two equal tokens of hers
  EXPECT_THAT(alice.List(), ::testing::ElementsAreArray(all_of_hers));
}

std::string Read(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST_F(SecurityTest, TokensSeparateTheCachesOfCallers) {
  std::vector<std::string> flags = TlsFlags({"--kv_cache_bytes=16777216", "--grace_period=0s"});
  Write("tokens", absl::StrCat("alice ", Sha256("hers"), "\nbob ", Sha256("his"), "\n"));
  flags.push_back(Flag("token_file", "tokens"));
  const ServerProcess server(flags);
  const auto caller = [&](const std::string& token) {
    grpc::SslCredentialsOptions tls;
    tls.pem_root_certs = ca_.cert();
    return CacheOwner(
        grpc::CreateChannel(server.grpc_address(),
                            grpc::CompositeChannelCredentials(
                                grpc::SslCredentials(tls), grpc::AccessTokenCredentials(token))));
  };
  ExpectThatTheySeeNothingOfEachOther(caller("hers"), caller("his"));
}

TEST_F(SecurityTest, CertificatesSeparateTheCachesOfCallers) {
  const ServerProcess server(MutualTlsFlags({"--kv_cache_bytes=16777216", "--grace_period=0s"}));
  const auto caller = [&](const std::string& name) {
    Save(name, ca_.Issue({name}));
    grpc::SslCredentialsOptions tls;
    tls.pem_root_certs = ca_.cert();
    tls.pem_private_key = Read(Path(name + ".key"));
    tls.pem_cert_chain = Read(Path(name + ".crt"));
    return CacheOwner(grpc::CreateChannel(server.grpc_address(), grpc::SslCredentials(tls)));
  };
  ExpectThatTheySeeNothingOfEachOther(caller("alice"), caller("bob"));
}

TEST_F(SecurityTest, HealthNeedsNoToken) {
  const ServerProcess server(TokenFlags());
  auto client = Client::Connect(server.grpc_address(), {.tls = Tls()});
  ASSERT_TRUE(client.ok()) << client.status();
  const auto health = (*client)->CheckHealth("rapt.v1.AttentionService");
  ASSERT_TRUE(health.ok()) << health.status();
  EXPECT_EQ(*health, client::HealthStatus::kServing);
}

TEST_F(SecurityTest, TokensAreReloaded) {
  const ServerProcess server(TokenFlags());
  auto client = Client::Connect(server.grpc_address(), {.tls = Tls(), .token = kToken});
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_TRUE(Attend(**client).ok());
  Write("tokens", absl::StrCat("alice ", Sha256("another"), "\nalice ", Sha256("third"), "\n"));
  WaitUntil([&] { return absl::IsUnauthenticated(Attend(**client)); });
  for (const char* token : {"another", "third"}) {
    EXPECT_TRUE(AttendOnce(server.grpc_address(), Tls(), token).ok());
  }
}

TEST_F(SecurityTest, TokensWorkOnAUnixSocket) {
  Write("tokens", absl::StrCat("alice ", Sha256(kToken), "\n"));
  ChildProcess server(ServerCommand({"--grpc_address=", "--metrics_address=127.0.0.1:0",
                                     Flag("unix_socket", "socket"), Flag("token_file", "tokens")}));
  EXPECT_THAT(server.ReadLine(), HasSubstr(" grpc_security=unix+tokens "));
  const std::string address = absl::StrCat("unix:", Path("socket"));
  const absl::Status known = AttendOnce(address, std::nullopt, kToken);
  EXPECT_TRUE(known.ok()) << known;
  ExpectUnauthenticated(AttendOnce(address, std::nullopt));
  ExpectUnauthenticated(AttendOnce(address, std::nullopt, kWrongToken));
}

TEST_F(SecurityTest, AClientNeverSendsItsTokenInPlainText) {
  const ServerProcess server;
  const absl::Status status = AttendOnce(server.grpc_address(), std::nullopt, kToken);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
}

TEST_F(SecurityTest, HangupReloadsTokensAndCertificatesAndEndsNothing) {
  ServerProcess server(TokenFlags({"--drain_pause=0"}));
  const auto count_of = [&server](const std::string& text) {
    const std::vector<std::string> parts = absl::StrSplit(server.Log(), text);
    return parts.size() - 1;
  };
  server.Signal(SIGHUP);  // nothing has changed
  WaitUntil([&] { return count_of("INFO reloaded flags=--token_file") == 1; });
  WaitUntil([&] { return count_of("INFO reloaded flags=\"--tls_cert --tls_key\"") == 1; });
  Write("tokens", "nonsense\n");
  server.Signal(SIGHUP);
  WaitUntil([&] { return count_of("WARNING not reloaded flags=--token_file") == 1; });
  EXPECT_TRUE(AttendOnce(server.grpc_address(), Tls(), kToken).ok()) << "the previous ones count";
  Write("tokens", absl::StrCat("alice ", Sha256("another"), "\n"));
  server.Signal(SIGHUP);
  WaitUntil([&] { return count_of("INFO reloaded flags=--token_file") == 2; });
  EXPECT_TRUE(AttendOnce(server.grpc_address(), Tls(), "another").ok());
  ExpectUnauthenticated(AttendOnce(server.grpc_address(), Tls(), kToken));
  server.Terminate();
  EXPECT_EQ(server.Wait(), 0);
}

// Opening a pipe would wait for its writer.
TEST_F(SecurityTest, ATokenFileThatBecomesAPipeOrADirectoryBlocksNobody) {
  ServerProcess server(TokenFlags());
  for (const bool is_pipe : {true, false}) {
    std::filesystem::remove(Path("tokens"));
    if (is_pipe) {
      ASSERT_EQ(mkfifo(Path("tokens").c_str(), 0600), 0);
    } else {
      std::filesystem::create_directory(Path("tokens"));
    }
    server.Signal(SIGHUP);
    const std::string reason = "cannot read the file of --token_file: it is not a regular file";
    WaitUntil([&] { return absl::StrContains(server.Log(), reason); });
    for (int n = 0; n < 3; ++n) {
      EXPECT_TRUE(AttendOnce(server.grpc_address(), Tls(), kToken).ok());
    }
  }
}

// --- Identity of callers --------------------------------------------------------------------

// A call that has begun and sends no message, so that it stays open.
class OpenCall {
 public:
  OpenCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& token)
      : stub_(channel) {
    context_.AddMetadata("authorization", "Bearer " + token);
    call_ = stub_.PrepareCall(&context_, "/rapt.v1.AttentionService/Attend", &queue_);
    call_->StartCall(nullptr);
    void* tag;
    bool ok;
    queue_.Next(&tag, &ok);
    EXPECT_TRUE(ok);
  }
  ~OpenCall() {
    context_.TryCancel();
    grpc::Status status;
    call_->Finish(&status, nullptr);
    void* tag;
    bool ok;
    queue_.Next(&tag, &ok);
  }

 private:
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
};

TEST_F(SecurityTest, AHolderOfATokenIsOneCaller) {
  const ServerProcess server(TokenFlags({"--max_calls_per_caller=1"}));
  Write("tokens", absl::StrCat("alice ", Sha256(kToken), "\nalice ", Sha256("her second"), "\nbob ",
                               Sha256("bobs"), "\n"));
  WaitUntil([&] { return AttendOnce(server.grpc_address(), Tls(), "bobs").ok(); });
  const OpenCall call(Channel(server, ca_), kToken);
  WaitForMetric(server, "rapt_open_calls", 1);
  const absl::Status again = AttendOnce(server.grpc_address(), Tls(), "her second");
  EXPECT_TRUE(absl::IsResourceExhausted(again)) << again;
  const absl::Status other = AttendOnce(server.grpc_address(), Tls(), "bobs");
  EXPECT_TRUE(other.ok()) << other;
}

TEST_F(SecurityTest, ACertificateIsOneCaller) {
  const ServerProcess server(MutualTlsFlags({"--max_calls_per_caller=1"}));
  const Certificate alice = ca_.Issue({"alice"});
  Save("alice", alice);
  Save("bob", ca_.Issue({"bob"}));
  const auto channel = grpc::CreateChannel(
      server.grpc_address(), grpc::SslCredentials({ca_.cert(), alice.key, alice.cert}));
  const OpenCall call(channel, "");
  WaitForMetric(server, "rapt_open_calls", 1);
  const absl::Status again = AttendOnce(server.grpc_address(), Tls("alice"));
  EXPECT_TRUE(absl::IsResourceExhausted(again)) << again;
  const absl::Status other = AttendOnce(server.grpc_address(), Tls("bob"));
  EXPECT_TRUE(other.ok()) << other;
}

// --- Connection limits --------------------------------------------------------------------------

constexpr char kSettings[] = {0, 0, 0, 4, 0, 0, 0, 0, 0};
constexpr char kPing[] = {0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8};

template <size_t n>
std::string Frame(const char (&bytes)[n]) {
  return std::string(bytes, n);
}

// The start of an HTTP/2 connection.
std::string Preface() { return "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(kSettings); }

// A connection that sends only what a test writes.
class RawConnection {
 public:
  explicit RawConnection(const ServerProcess& server)
      : descriptor_(test::ConnectTo(server.grpc_address())) {}
  ~RawConnection() { close(descriptor_); }
  RawConnection(RawConnection&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)) {}

  void Send(const std::string& bytes) const {
    send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }

  // Blocks until the server closes the connection. Returns everything it sent.
  std::string ReadToEnd() const {
    std::string all;
    char buffer[4096];
    for (ssize_t n; (n = read(descriptor_, buffer, sizeof(buffer))) > 0;) {
      all.append(buffer, static_cast<size_t>(n));
    }
    return all;
  }

 private:
  int descriptor_;
};

// Raises the limit of open files to the maximum.
void TakeAllDescriptors() {
  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = limit.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST(ConnectionsTest, ConnectionsBeyondTheLimitAreClosedAndOthersServed) {
  TakeAllDescriptors();
  constexpr int kLimit = 900, kTried = 1000;
  const ServerProcess server({absl::StrCat("--max_connections=", kLimit),
                              absl::StrCat("--max_connections_per_address=", kLimit)});
  auto client = Client::Connect(server.grpc_address(), {.connections = 1});
  ASSERT_TRUE(client.ok()) << client.status();
  {
    std::vector<RawConnection> connections;
    for (int i = 0; i < kTried; ++i) {
      connections.emplace_back(server);
      connections.back().Send(Preface());
    }
    WaitForMetric(server, "rapt_refused_connections_total", kTried + 1 - kLimit);
    WaitForMetric(server, "rapt_open_connections", kLimit);
    EXPECT_EQ(connections.back().ReadToEnd(), "");
    EXPECT_TRUE(Attend(**client).ok()) << "connected clients must be served";
    EXPECT_FALSE(AttendOnce(server.grpc_address(), std::nullopt).ok());
  }
  WaitUntil([&] { return AttendOnce(server.grpc_address(), std::nullopt).ok(); });
}

TEST(ConnectionsTest, OneAddressCannotTakeAllConnections) {
  const ServerProcess server({"--max_connections=8"});
  std::vector<RawConnection> connections;
  for (int i = 0; i < 8; ++i) {
    connections.emplace_back(server);
    connections.back().Send(Preface());
  }
  WaitForMetric(server, "rapt_refused_connections_total", 6);
  EXPECT_EQ(ReadMetric(server, "rapt_open_connections"), 2);
  // Another address of this machine, as the source of a connection.
  const int other = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  ASSERT_EQ(inet_pton(AF_INET, "127.0.0.2", &address.sin_addr), 1);
  ASSERT_EQ(bind(other, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  address.sin_port = htons(static_cast<uint16_t>(
      std::stoi(server.grpc_address().substr(server.grpc_address().rfind(':') + 1))));
  ASSERT_EQ(inet_pton(AF_INET, "127.0.0.1", &address.sin_addr), 1);
  ASSERT_EQ(connect(other, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  WaitForMetric(server, "rapt_open_connections", 3);
  close(other);
}

TEST(ConnectionsTest, ClientsThatPingTooOftenAreDisconnected) {
  const ServerProcess server;
  const RawConnection connection(server);
  connection.Send(Preface());
  for (int i = 0; i < 10; ++i) connection.Send(Frame(kPing));
  EXPECT_THAT(connection.ReadToEnd(), HasSubstr("too_many_pings"));
}

TEST(ConnectionsTest, IdleConnectionsAreClosedAndClientsReconnect) {
  const ServerProcess server({"--max_connection_idle=100ms"});
  test::RawHttp2 idle(server.grpc_address());
  EXPECT_TRUE(idle.ReadGoAway());
  // The connections of rapt's client are never idle: they watch the server's health.
  const auto stub = v1::AttentionService::NewStub(
      grpc::CreateChannel(server.grpc_address(), grpc::InsecureChannelCredentials()));
  const auto call = [&stub] {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    v1::GetServerInfoResponse response;
    return stub->GetServerInfo(&context, {}, &response).ok();
  };
  EXPECT_TRUE(call());
  WaitForMetric(server, "rapt_open_connections", 0);
  EXPECT_TRUE(call());
}

TEST(ConnectionsTest, OldConnectionsAreClosedAndNoCallFails) {
  const ServerProcess server({"--max_connection_age=100ms"});
  test::RawHttp2 old(server.grpc_address());
  auto client = Client::Connect(server.grpc_address(), {.connections = 1});
  ASSERT_TRUE(client.ok()) << client.status();
  std::atomic<bool> is_closed{false};
  std::thread reader([&] {
    EXPECT_TRUE(old.ReadUntil(NGHTTP2_GOAWAY));
    is_closed = true;
  });
  while (!is_closed) {
    const absl::Status status = Attend(**client);
    EXPECT_TRUE(status.ok()) << status;
  }
  reader.join();
}

TEST(ConnectionsTest, MetadataIsLimited) {
  const ServerProcess server;
  const auto stub = grpc::health::v1::Health::NewStub(
      grpc::CreateChannel(server.grpc_address(), grpc::InsecureChannelCredentials()));
  for (const auto& [bytes, code] : {std::pair(4 * 1024, grpc::StatusCode::OK),
                                    std::pair(24 * 1024, grpc::StatusCode::RESOURCE_EXHAUSTED)}) {
    grpc::ClientContext context;
    context.AddMetadata("padding", std::string(static_cast<size_t>(bytes), 'x'));
    grpc::health::v1::HealthCheckResponse response;
    const grpc::Status status = stub->Check(&context, {}, &response);
    EXPECT_EQ(status.error_code(), code) << bytes << ": " << status.error_message();
  }
}

TEST(ConnectionsTest, CallsBeyondTheStreamLimitWait) {
  const ServerProcess server({"--max_streams_per_connection=1"});
  const auto channel =
      grpc::CreateChannel(server.grpc_address(), grpc::InsecureChannelCredentials());
  const auto check = [&] {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(500));
    grpc::health::v1::HealthCheckResponse response;
    const auto stub = grpc::health::v1::Health::NewStub(channel);
    return stub->Check(&context, {}, &response).error_code();
  };
  {
    const OpenCall open(channel, "");
    WaitForMetric(server, "rapt_open_calls", 1);
    EXPECT_EQ(check(), grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  WaitUntil([&] { return check() == grpc::StatusCode::OK; });
}

// --- Reflection ------------------------------------------------------------------------------

TEST(ReflectionTest, CanBeTurnedOff) {
  for (const bool is_on : {true, false}) {
    const ServerProcess server({is_on ? "--reflection" : "--reflection=false"});
    grpc::GenericStub stub(
        grpc::CreateChannel(server.grpc_address(), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    const auto call = stub.PrepareCall(
        &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
    void* tag;
    bool ok;
    call->StartCall(nullptr);
    queue.Next(&tag, &ok);
    call->WritesDone(nullptr);
    queue.Next(&tag, &ok);
    grpc::Status status;
    call->Finish(&status, nullptr);
    queue.Next(&tag, &ok);
    EXPECT_EQ(status.error_code(), is_on ? grpc::StatusCode::OK : grpc::StatusCode::UNIMPLEMENTED);
  }
}

// --- Traces --------------------------------------------------------------------------------------

constexpr char kTraceparent[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

// Takes the reference backend far longer than a millisecond.
inference::ModelInferRequest LongRequest() {
  const std::vector<float> x(512 * 64, 0.5f);
  inference::ModelInferRequest request;
  request.set_model_name("attention");
  for (const char* name : {"Q", "K", "V"}) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype("FP32");
    for (const int64_t axis : {1, 1, 512, 64}) input.add_shape(axis);
    request.add_raw_input_contents(x.data(), x.size() * sizeof(float));
  }
  return request;
}

// Returns the traceparents in the responses of two calls that sent `sent`.
std::vector<std::string> ReturnedTraceparents(const ServerProcess& server,
                                              const std::vector<std::string>& sent) {
  const auto stub = inference::GRPCInferenceService::NewStub(
      grpc::CreateChannel(server.grpc_address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext plain, tensors;
  for (const std::string& traceparent : sent) {
    plain.AddMetadata("traceparent", traceparent);
    tensors.AddMetadata("traceparent", traceparent);
  }
  inference::ServerLiveResponse live;
  EXPECT_TRUE(stub->ServerLive(&plain, {}, &live).ok());
  inference::ModelInferResponse response;
  EXPECT_TRUE(stub->ModelInfer(&tensors, LongRequest(), &response).ok());
  std::vector<std::string> returned;
  for (const grpc::ClientContext* context : {&plain, &tensors}) {
    const auto [first, last] = context->GetServerTrailingMetadata().equal_range("traceparent");
    for (auto entry = first; entry != last; ++entry) {
      returned.emplace_back(entry->second.data(), entry->second.size());
    }
  }
  return returned;
}

TEST(TraceTest, TraceparentsAreLoggedAndReturned) {
  const ServerProcess server({"--slow_call=1ms", "--backend=reference"});
  EXPECT_THAT(ReturnedTraceparents(server, {kTraceparent}),
              ElementsAre(kTraceparent, kTraceparent));
  WaitUntil([&] { return absl::StrContains(server.Log(), kTraceparent); });
}

TEST(TraceTest, InvalidOrRepeatedTraceparentsAreIgnored) {
  const ServerProcess server;
  EXPECT_THAT(ReturnedTraceparents(server, {}), IsEmpty());
  EXPECT_THAT(ReturnedTraceparents(server, {"00-nothing"}), IsEmpty());
  EXPECT_THAT(ReturnedTraceparents(server, {kTraceparent, kTraceparent}), IsEmpty());
}

}  // namespace
}  // namespace rapt
