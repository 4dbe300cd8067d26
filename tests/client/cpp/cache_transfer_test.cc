// Export and import of caches by the client library: between real servers, through files, with
// replies that are lost and with peers that break the rules.
#include "rapt/cache_transfer.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "proto/rapt/v1/cache.grpc.pb.h"
#include "tests/client/cpp/cache_proxy.h"
#include "tests/client/cpp/cache_tokens.h"
#include "tests/support/kv_chunks.h"
#include "tests/support/memory_watch.h"
#include "tests/support/server_process.h"

namespace rapt::client {
namespace {

using std::chrono::milliseconds;
using test::CacheProxy;
using test::DrawTokens;
using test::ExpectFails;
using test::ServerProcess;
using test::Tokens;
using test::TwoLayers;
using test::ValuesOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing::StartsWith;
using Chunks = std::vector<v1::KvChunk>;

// Passes calls on to a real server, or breaks them.
class Proxy final : public CacheProxy {
 public:
  using CacheProxy::CacheProxy;
  ~Proxy() override { Stop(); }

  // Changes what Export returns.
  void set_change(std::function<void(Chunks&)> change) {
    MutexLock lock(mutex_);
    change_ = std::move(change);
  }
  // Changes what List returns.
  void set_change_listed(std::function<void(v1::Cache&)> change) {
    MutexLock lock(mutex_);
    change_listed_ = std::move(change);
  }

  // The first attempts of Import end after a message; then the reply of one is lost.
  std::atomic<int> broken_imports{0};
  std::atomic<int> lost_imports{0};
  std::atomic<int> refused_exports{0};
  std::atomic<int> attempts{0};

  grpc::Status Export(grpc::ServerContext*, const v1::ExportRequest* request,
                      grpc::ServerWriter<v1::KvChunk>* writer) override {
    if (refused_exports > 0 && refused_exports-- > 0) {
      return {grpc::StatusCode::UNAVAILABLE, "not now"};
    }
    grpc::ClientContext context;
    const auto reader = stub().Export(&context, *request);
    Chunks chunks;
    for (v1::KvChunk chunk; reader->Read(&chunk);) chunks.push_back(chunk);
    grpc::Status status = reader->Finish();
    if (status.ok()) {
      MutexLock lock(mutex_);
      change_(chunks);
    }
    for (v1::KvChunk& chunk : chunks) test::Seal(chunk);
    for (const v1::KvChunk& chunk : chunks) writer->Write(chunk);
    return status;
  }

  grpc::Status Import(grpc::ServerContext* server_context, grpc::ServerReader<v1::KvChunk>* reader,
                      v1::Cache* response) override {
    ++attempts;
    v1::KvChunk chunk;
    if (broken_imports > 0 && broken_imports-- > 0) {
      reader->Read(&chunk);
      return {grpc::StatusCode::UNAVAILABLE, "broken"};
    }
    grpc::ClientContext context;
    const auto writer = stub().Import(&context, response);
    while (reader->Read(&chunk)) writer->Write(chunk);
    // A client that cancels does not half-close.
    if (server_context->IsCancelled()) context.TryCancel();
    writer->WritesDone();
    grpc::Status status = writer->Finish();
    if (lost_imports > 0 && lost_imports-- > 0) {
      return {grpc::StatusCode::UNAVAILABLE, "the reply is lost"};
    }
    return status;
  }

  grpc::Status List(grpc::ServerContext*, const v1::ListRequest* request,
                    v1::Caches* response) override {
    grpc::ClientContext context;
    grpc::Status status = stub().List(&context, *request, response);
    MutexLock lock(mutex_);
    for (v1::Cache& cache : *response->mutable_caches()) change_listed_(cache);
    return status;
  }

  grpc::Status Close(grpc::ServerContext*, const v1::Ids* request, v1::Caches* response) override {
    grpc::ClientContext context;
    return stub().Close(&context, *request, response);
  }

 private:
  Mutex mutex_;
  std::function<void(Chunks&)> change_ ABSL_GUARDED_BY(mutex_) = [](Chunks&) {};
  std::function<void(v1::Cache&)> change_listed_ ABSL_GUARDED_BY(mutex_) = [](v1::Cache&) {};
};

class CacheTransferTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    for (auto& server : servers_) {
      server =
          new ServerProcess({"--threads=1", "--kv_cache_bytes=134217728", "--grace_period=0s"});
    }
  }
  static void TearDownTestSuite() {
    for (auto& server : servers_) delete std::exchange(server, nullptr);
  }

  void SetUp() override {
    a_ = Connect(servers_[0]->grpc_address());
    b_ = Connect(servers_[1]->grpc_address());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // Does not wait between retries.
  static std::unique_ptr<Client> Connect(const std::string& address) {
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(
        address, {.connections = 1, .retries = {.initial_backoff = {}, .max_backoff = {}}});
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }

  // 200 tokens of a layer that keeps all, and 300 of one that has evicted some.
  Cache CreateFilled(const std::string& name = "", CacheStorage storage = CacheStorage::kPlain) {
    CacheOptions options = TwoLayers();
    options.storage = storage;
    options.name = name;
    options.lease = std::chrono::seconds(77);
    options.first_position = 5;
    options.shapes[0].layers = 1;
    options.shapes.push_back(options.shapes[0]);
    options.shapes[1].keep_first = 10;
    options.shapes[1].keep_last = 40;
    absl::StatusOr<Cache> cache = CreateCache(*a_, options);
    EXPECT_TRUE(cache.ok()) << cache.status();
    const Tokens tokens = DrawTokens(1, 300);
    for (const auto& [layer, begin, end] :
         {std::tuple(0, 0, 200), std::tuple(1, 0, 250), std::tuple(1, 250, 300)}) {
      const auto appended =
          cache->Append(layer, tokens.k.view(begin, end), tokens.v.view(begin, end));
      EXPECT_TRUE(appended.ok()) << appended.status();
    }
    return *std::move(cache);
  }

  static std::unique_ptr<CacheReader> Export(Client& client, const Cache& cache,
                                             int64_t chunk_tokens = 0) {
    return ExportCache(
        client, {.id = cache.id(), .generation = cache.generation(), .chunk_tokens = chunk_tokens});
  }

  // The same step of both layers has the same bits.
  static void ExpectSameBits(Cache& one, Cache& other) {
    ASSERT_EQ(one.lengths(), other.lengths());
    const Tokens tokens = DrawTokens(2, 3);
    for (const int32_t layer : {0, 1}) {
      const CacheAttendCall call{.layer = layer,
                                 .q = tokens.q.view(),
                                 .k = tokens.k.view(),
                                 .v = tokens.v.view(),
                                 .wants_lse = true};
      const auto a = one.Attend(call), b = other.Attend(call);
      ASSERT_TRUE(a.ok() && b.ok()) << a.status() << b.status();
      EXPECT_EQ(ValuesOf(a->y), ValuesOf(b->y));
      EXPECT_EQ(ValuesOf(*a->lse), ValuesOf(*b->lse));
    }
  }

  static void ExpectNoCaches(Client& client) {
    const auto listed = ListCaches(client);
    ASSERT_TRUE(listed.ok()) << listed.status();
    EXPECT_THAT(*listed, IsEmpty());
  }

  std::string PathOf(const std::string& name) const { return (folder_ / name).string(); }

  static ServerProcess* servers_[2];
  std::unique_ptr<Client> a_, b_;
  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / absl::StrCat("cache_transfer_test-", getpid());
};

ServerProcess* CacheTransferTest::servers_[] = {};

TEST_F(CacheTransferTest, ACopyOnAnotherServerAnswersTheSameBits) {
  for (const int64_t chunk_tokens : {0, 1, 50}) {
    SCOPED_TRACE(chunk_tokens);
    Cache cache = CreateFilled();
    absl::StatusOr<Cache> copy = ImportCache(*b_, *Export(*a_, cache, chunk_tokens));
    ASSERT_TRUE(copy.ok()) << copy.status();
    const absl::StatusOr<CacheInfo> info = copy->Refresh();
    ASSERT_TRUE(info.ok()) << info.status();
    EXPECT_EQ(info->generation, 1u);
    EXPECT_EQ(info->lease, std::chrono::seconds(77));
    EXPECT_EQ(info->first_position, 5);
    EXPECT_EQ(info->shapes, cache.shapes());
    ExpectSameBits(cache, *copy);
  }
  ExpectNoCaches(*b_);  // handles close what they made
}

TEST_F(CacheTransferTest, EightBitsMoveAsTheyAreStored) {
  Cache cache = CreateFilled("", CacheStorage::kInt8);
  const std::unique_ptr<CacheReader> reader = Export(*a_, cache, 100);
  const absl::StatusOr<CacheHeader> header = reader->Begin();
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->cache.storage, CacheStorage::kInt8);
  const absl::StatusOr<std::optional<CacheChunk>> chunk = reader->Next();
  ASSERT_TRUE(chunk.ok() && *chunk) << chunk.status();
  EXPECT_EQ((*chunk)->k.dtype(), DType::kUint8);
  EXPECT_EQ((*chunk)->k.shape(), (Shape{100, test::kKvHeads, test::kSize + 2}));
  EXPECT_EQ((*chunk)->v.shape(), (Shape{100, test::kKvHeads, test::kValueSize + 2}));
  const std::string path = PathOf("int8");
  const absl::Status written = WriteCacheFile(*reader, path);
  ASSERT_TRUE(written.ok()) << written;
  absl::StatusOr<Cache> copy = ImportCache(*b_, *ReadCacheFile(path));
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(copy->Refresh()->storage, CacheStorage::kInt8);
  ExpectSameBits(cache, *copy);
}

TEST_F(CacheTransferTest, AReaderShowsTheTokens) {
  const Cache cache = CreateFilled("shown");
  const Tokens tokens = DrawTokens(1, 300);
  const std::unique_ptr<CacheReader> reader = Export(*a_, cache, 120);
  for (int again = 0; again < 2; ++again) {
    const absl::StatusOr<CacheHeader> header = reader->Begin();
    ASSERT_TRUE(header.ok()) << header.status();
    EXPECT_EQ(header->cache.name, "shown");
    EXPECT_EQ(header->cache.first_position, 5);
    EXPECT_THAT(header->cache.shapes, SizeIs(2));
    EXPECT_THAT(header->lengths, ElementsAre(200, 300));
    const absl::StatusOr<std::optional<CacheChunk>> first = reader->Next();
    ASSERT_TRUE(first.ok() && *first) << first.status();
    EXPECT_EQ((*first)->layer, 0);
    EXPECT_EQ((*first)->at, 0);
    EXPECT_EQ((*first)->k.shape(), (Shape{120, test::kKvHeads, test::kSize}));
    EXPECT_EQ((*first)->v.shape(), (Shape{120, test::kKvHeads, test::kValueSize}));
    const TensorView k = tokens.k.view(0, 120);
    EXPECT_TRUE((*first)->k.bytes() == k.data);
  }
  int64_t last = 0;
  for (;;) {
    const absl::StatusOr<std::optional<CacheChunk>> chunk = reader->Next();
    ASSERT_TRUE(chunk.ok()) << chunk.status();
    if (!*chunk) break;
    last = (*chunk)->at + (*chunk)->k.shape()[0];
  }
  EXPECT_EQ(last, 300);
}

TEST_F(CacheTransferTest, AFileKeepsACache) {
  std::optional<Cache> cache = CreateFilled("kept");
  const std::string path = PathOf("a.kvcache");
  absl::Status written = WriteCacheFile(*Export(*a_, *cache), path);
  ASSERT_TRUE(written.ok()) << written;
  EXPECT_FALSE(std::filesystem::exists(path + ".part"));
  absl::StatusOr<Cache> copy = ImportCache(*b_, *ReadCacheFile(path));
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(copy->Refresh()->name, "kept");
  ExpectSameBits(*cache, *copy);

  // An export that fails leaves the file as it was.
  const std::unique_ptr<CacheReader> gone = Export(*a_, *cache);
  cache.reset();
  ExpectFails<Cache>(WriteCacheFile(*gone, path), absl::StatusCode::kNotFound, "closed");
  EXPECT_FALSE(std::filesystem::exists(path + ".part"));
  absl::StatusOr<Cache> again =
      ImportCache(*a_, *ReadCacheFile(path), {.name = "again", .lease = milliseconds(5000)});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->Refresh()->name, "again");
  EXPECT_EQ(again->Refresh()->lease, milliseconds(5000));
}

TEST_F(CacheTransferTest, AFileThatIsCutOrDamagedMakesNothing) {
  const Cache cache = CreateFilled();
  const std::string path = PathOf("whole");
  ASSERT_TRUE(WriteCacheFile(*Export(*a_, cache, 64), path).ok());
  std::ifstream file(path, std::ios::binary);
  const std::string whole(std::istreambuf_iterator<char>(file), {});
  const auto import = [&](const std::string& bytes) {
    std::ofstream(PathOf("broken"), std::ios::binary | std::ios::trunc) << bytes;
    const absl::Status status = ImportCache(*b_, *ReadCacheFile(PathOf("broken"))).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), StartsWith(PathOf("broken") + ": "));
    return std::string(status.message());
  };
  for (size_t size = 0; size < whole.size(); size += whole.size() / 37) {
    import(whole.substr(0, size));
  }
  EXPECT_THAT(import(whole.substr(0, whole.size() - 1)), HasSubstr("cut or damaged"));
  EXPECT_THAT(import(""), HasSubstr("ends without an end"));
  import(std::string(10, '\xff'));
  EXPECT_THAT(import(std::string("\xff\xff\xff\xff\x07 no 2 GiB", 14)),
              HasSubstr("cut or damaged"));
  EXPECT_THAT(import(std::string("\0", 1)), HasSubstr("not a header"));
  for (size_t bit = 0; bit < whole.size() * 8; bit += whole.size() * 8 / 311) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    SCOPED_TRACE(bit);
    import(flipped);
  }
  std::string flipped = whole;
  flipped[whole.size() / 2] ^= 1;
  EXPECT_THAT(import(flipped), HasSubstr("crc32 is wrong: the data is damaged"));
  // A header without a checksum, as older versions wrote it.
  EXPECT_THAT(import(std::string("\x02\x0a\0", 3)), HasSubstr("the header's crc32 is missing"));
  ExpectNoCaches(*b_);

  const absl::Status missing = ImportCache(*b_, *ReadCacheFile(PathOf("no/file"))).status();
  EXPECT_EQ(missing.message(), PathOf("no/file") + ": No such file or directory");
  const absl::Status folder = WriteCacheFile(*Export(*a_, cache), PathOf("no/file"));
  EXPECT_TRUE(absl::IsInvalidArgument(folder)) << folder;
  EXPECT_THAT(std::string(folder.message()), StartsWith(PathOf("no/file")));
  const absl::Status full = WriteCacheFile(*Export(*a_, cache), "/dev/full");
  EXPECT_EQ(full.message(), "/dev/full: No space left on device");
}

TEST_F(CacheTransferTest, NamesAreKeptAndUnique) {
  const Cache named = CreateFilled("named"), unnamed = CreateFilled();
  const absl::StatusOr<Cache> copy = ImportCache(*b_, *Export(*a_, named));
  ASSERT_TRUE(copy.ok()) << copy.status();
  ExpectFails(ImportCache(*b_, *Export(*a_, named)), absl::StatusCode::kAlreadyExists, "");
  ExpectFails(ImportCache(*a_, *Export(*a_, named)), absl::StatusCode::kAlreadyExists, "");
  EXPECT_TRUE(ImportCache(*b_, *Export(*a_, named), {.name = "other"}).ok());
  // The client drew the name of a cache without one, and draws another.
  const absl::StatusOr<Cache> beside = ImportCache(*a_, *Export(*a_, unnamed));
  EXPECT_TRUE(beside.ok()) << beside.status();
}

TEST_F(CacheTransferTest, ErrorsKeepTheirReason) {
  Cache cache = CreateFilled();
  const auto stale = ExportCache(*a_, {.id = cache.id(), .generation = 9});
  ExpectFails(stale->Begin(), absl::StatusCode::kAborted, "generation");
  ExpectFails(ImportCache(*b_, *stale), absl::StatusCode::kAborted, "generation");
  ExpectFails(ExportCache(*a_, {.id = "nobody"})->Begin(), absl::StatusCode::kNotFound, "unknown");
  const ServerProcess small(
      {"--kv_cache_bytes=4194304", "--kv_max_bytes_per_caller=20000", "--grace_period=0s"});
  const auto to_small = Connect(small.grpc_address());
  ExpectFails(ImportCache(*to_small, *Export(*a_, cache)), absl::StatusCode::kResourceExhausted,
              "quota");
  const ServerProcess none;
  ExpectFails(ImportCache(*Connect(none.grpc_address()), *Export(*a_, cache)),
              absl::StatusCode::kUnimplemented, "");
}

// Calls a function before the first chunk, and has no other one.
class InterruptedReader final : public CacheReader {
 public:
  InterruptedReader(std::unique_ptr<CacheReader> from, std::function<void()> interrupt)
      : from_(std::move(from)), interrupt_(std::move(interrupt)) {}

  absl::StatusOr<CacheHeader> Begin() override { return from_->Begin(); }
  absl::StatusOr<std::optional<CacheChunk>> Next() override {
    if (std::exchange(has_begun_, true)) return std::nullopt;
    interrupt_();
    return from_->Next();
  }

 private:
  const std::unique_ptr<CacheReader> from_;
  const std::function<void()> interrupt_;
  bool has_begun_ = false;
};

TEST_F(CacheTransferTest, ImportsEndWhenTheyAreStoppedOrLate) {
  const Cache cache = CreateFilled();
  std::stop_source stop;
  InterruptedReader stopped(Export(*a_, cache), [&stop] { stop.request_stop(); });
  ExpectFails(ImportCache(*b_, stopped, {}, {.stop = stop.get_token()}),
              absl::StatusCode::kCancelled, "");
  const milliseconds timeout(50);
  InterruptedReader late(Export(*a_, cache), [&] { std::this_thread::sleep_for(2 * timeout); });
  ExpectFails(ImportCache(*b_, late, {}, {.timeout = timeout}), absl::StatusCode::kDeadlineExceeded,
              "");
  ExpectNoCaches(*b_);
}

TEST_F(CacheTransferTest, BrokenCallsAreMadeAgain) {
  Cache cache = CreateFilled();
  Proxy proxy(servers_[1]->grpc_address());
  proxy.broken_imports = 2;
  const auto to_proxy = Connect(proxy.address());
  {
    const absl::StatusOr<Cache> copy = ImportCache(*to_proxy, *Export(*a_, cache));
    ASSERT_TRUE(copy.ok()) << copy.status();
    EXPECT_EQ(proxy.attempts, 3);
    EXPECT_THAT(copy->lengths(), ElementsAre(200, 300));
  }
  Proxy source(servers_[0]->grpc_address());
  source.refused_exports = 2;
  const auto from_proxy = Connect(source.address());
  absl::StatusOr<Cache> copy = ImportCache(*b_, *Export(*from_proxy, cache));
  ASSERT_TRUE(copy.ok()) << copy.status();
  ExpectSameBits(cache, *copy);
}

TEST_F(CacheTransferTest, ALostReplyIsFoundByItsName) {
  Cache cache = CreateFilled(), named = CreateFilled("lost");
  Proxy proxy(servers_[1]->grpc_address());
  const auto to_proxy = Connect(proxy.address());
  for (const Cache* from : {&cache, &named}) {
    proxy.lost_imports = 1;
    proxy.attempts = 0;
    const absl::StatusOr<Cache> copy = ImportCache(*to_proxy, *Export(*a_, *from));
    ASSERT_TRUE(copy.ok()) << copy.status();
    EXPECT_EQ(proxy.attempts, 2);
    const auto listed = ListCaches(*b_);
    ASSERT_TRUE(listed.ok()) << listed.status();
    ASSERT_THAT(*listed, SizeIs(1));
    EXPECT_EQ((*listed)[0].id, copy->id());
  }
  // A cache of that name with other contents is another's.
  CacheOptions other = TwoLayers();
  other.name = "lost";
  const absl::StatusOr<Cache> before = CreateCache(*b_, other);
  ASSERT_TRUE(before.ok()) << before.status();
  proxy.lost_imports = 1;
  ExpectFails(ImportCache(*to_proxy, *Export(*a_, named)), absl::StatusCode::kAlreadyExists, "");
}

TEST_F(CacheTransferTest, ACacheThatWasThereBeforeIsNotTakenForTheImportedOne) {
  const Cache cache = CreateFilled("before");
  const absl::StatusOr<Cache> before = ImportCache(*b_, *Export(*a_, cache));
  ASSERT_TRUE(before.ok()) << before.status();
  Proxy proxy(servers_[1]->grpc_address());
  const auto to_proxy = Connect(proxy.address());
  proxy.broken_imports = 1;
  // As if it had waited.
  proxy.set_change_listed(
      [](v1::Cache& listed) { listed.set_expires_in_ms(listed.expires_in_ms() - 30'000); });
  ExpectFails(ImportCache(*to_proxy, *Export(*a_, cache)), absl::StatusCode::kAlreadyExists, "");
  EXPECT_EQ(proxy.attempts, 2);
  EXPECT_TRUE(GetCaches(*b_, {before->id()}).ok());
}

TEST_F(CacheTransferTest, ALostReplyIsNotThatOfACacheOfAnotherForm) {
  const Cache cache = CreateFilled("form");
  Proxy proxy(servers_[1]->grpc_address());
  const auto to_proxy = Connect(proxy.address());
  proxy.lost_imports = 1;
  proxy.set_change_listed([](v1::Cache& listed) { listed.mutable_shapes(1)->set_keep_last(41); });
  ExpectFails(ImportCache(*to_proxy, *Export(*a_, cache)), absl::StatusCode::kAlreadyExists, "");
  const auto left = ListCaches(*b_, "form");
  ASSERT_TRUE(left.ok()) << left.status();
  ASSERT_THAT(*left, SizeIs(1));
  EXPECT_TRUE(CloseCaches(*b_, {(*left)[0].id}).ok());
}

TEST_F(CacheTransferTest, ALostReplyIsFoundIfTheHeaderLeavesOutTheSizeOfValues) {
  CacheOptions options = TwoLayers();
  options.shapes[0].value_head_size = 0;
  options.name = "sizes";
  const absl::StatusOr<Cache> cache = CreateCache(*a_, options);
  ASSERT_TRUE(cache.ok()) << cache.status();
  Proxy source(servers_[0]->grpc_address()), proxy(servers_[1]->grpc_address());
  source.set_change([](Chunks& m) {
    m[0].mutable_header()->mutable_cache()->mutable_shapes(0)->clear_value_head_size();
  });
  proxy.lost_imports = 1;
  const auto from_source = Connect(source.address()), to_proxy = Connect(proxy.address());
  const absl::StatusOr<Cache> copy = ImportCache(*to_proxy, *Export(*from_source, *cache));
  EXPECT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(proxy.attempts, 2);
}

TEST_F(CacheTransferTest, AnExportThatBreaksTheRulesMakesNothing) {
  const Cache cache = CreateFilled();
  Proxy proxy(servers_[0]->grpc_address());
  const auto client = Connect(proxy.address());
  const struct {
    const char* error;
    std::function<void(Chunks&)> change;
  } kCases[] = {
      {"the stream ended without an end", [](Chunks& m) { m.clear(); }},
      {"the stream ended without an end", [](Chunks& m) { m.pop_back(); }},
      {"the first message is not a header", [](Chunks& m) { m.erase(m.begin()); }},
      {"the cache has an unknown data type",
       [](Chunks& m) { m[0].mutable_header()->mutable_cache()->clear_dtype(); }},
      {"the cache is stored in an unknown way",
       [](Chunks& m) {
         m[0].mutable_header()->mutable_cache()->set_storage(static_cast<v1::Storage>(7));
       }},
      {"a message has neither tokens nor an end", [](Chunks& m) { m[1].Clear(); }},
      {"a message has neither tokens nor an end", [](Chunks& m) { m[1] = m[0]; }},
      {"chunk 0: the cache has no layer 2", [](Chunks& m) { m[1].mutable_tokens()->set_layer(2); }},
      {"chunk 0: the cache has no layer -1",
       [](Chunks& m) { m[1].mutable_tokens()->set_layer(-1); }},
      {"chunk 1: k has 6400 bytes; its shape is [101, 2, 8]",
       [](Chunks& m) { m[2].mutable_tokens()->set_tokens(101); }},
      {"chunk 1: k has 6400 bytes; its shape is [-1, 2, 8]",
       [](Chunks& m) { m[2].mutable_tokens()->set_tokens(-1); }},
      {"chunk 1: v has 4799 bytes; its shape is [100, 2, 6]",
       [](Chunks& m) { m[2].mutable_tokens()->mutable_v()->pop_back(); }},
      {"the end counts 1 chunks; ", [](Chunks& m) { m.back().mutable_end()->set_chunks(1); }},
      {"a message came after the end", [](Chunks& m) { m.push_back(m[1]); }},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.error);
    proxy.set_change(c.change);
    const absl::Status status = ImportCache(*b_, *Export(*client, cache, 100)).status();
    EXPECT_TRUE(absl::IsInternal(status)) << status;
    EXPECT_THAT(std::string(status.message()), StartsWith("malformed response from server: "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.error));
    ExpectNoCaches(*b_);
  }
  // What only the importing server can tell.
  proxy.set_change([](Chunks& m) { m[2].mutable_tokens()->set_at(101); });
  const absl::Status gap = ImportCache(*b_, *Export(*client, cache, 100)).status();
  EXPECT_TRUE(absl::IsInvalidArgument(gap)) << gap;
  EXPECT_THAT(std::string(gap.message()), HasSubstr("chunk 1: "));
  ExpectNoCaches(*b_);
}

// Has one chunk, of more bytes than a message can have. They are zeros that take no memory.
class HugeReader final : public CacheReader {
 public:
  static constexpr int64_t kTokens = 4, kBytes = kTokens << 28;  // of k, and of v

  HugeReader()
      : zeros_(mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0),
               [](void* zeros) { munmap(zeros, kBytes); }) {}

  absl::StatusOr<CacheHeader> Begin() override {
    const LayerShape shape{.kv_heads = 1, .head_size = kBytes / kTokens / 4};
    return CacheHeader{.cache = {.shapes = {shape}}, .lengths = {kTokens}};
  }
  absl::StatusOr<std::optional<CacheChunk>> Next() override {
    if (std::exchange(has_begun_, true)) return std::nullopt;
    const Tensor part(DType::kFloat32, {kTokens, 1, kBytes / kTokens / 4}, zeros_,
                      {static_cast<const std::byte*>(zeros_.get()), kBytes});
    return CacheChunk{.layer = 0, .at = 0, .k = part, .v = part};
  }

 private:
  const std::shared_ptr<void> zeros_;
  bool has_begun_ = false;
};

TEST_F(CacheTransferTest, AChunkThatNoMessageHoldsMakesNoFile) {
  HugeReader huge;
  const std::string path = PathOf("huge");
  const absl::Status written = WriteCacheFile(huge, path);
  EXPECT_TRUE(absl::IsInvalidArgument(written)) << written;
  EXPECT_EQ(std::string(written.message()), path + ".part: a message has more than 2 GiB");
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(CacheTransferTest, MemoryDoesNotGrowWithTheCache) {
  if (!test::kRssIsMeaningful) GTEST_SKIP() << "a sanitizer keeps freed memory";
  constexpr int64_t kTokens = 512, kParts = 24;  // of 4 MiB, keys and values
  absl::StatusOr<Cache> cache =
      CreateCache(*a_, {.shapes = {{.layers = 1, .kv_heads = 8, .head_size = 128}}});
  ASSERT_TRUE(cache.ok()) << cache.status();
  const std::vector<float> part(kTokens * 8 * 128, 0.5F);
  for (int n = 0; n < kParts; ++n) {
    const TensorView view = View<float>({kTokens, 8, 128}, part);
    ASSERT_TRUE(cache->Append(0, view, view).ok());
  }
  const int64_t before = test::RssAnonBytes(getpid());
  const test::MemoryWatch watch(getpid());
  const std::string path = PathOf("large");
  ASSERT_TRUE(WriteCacheFile(*Export(*a_, *cache), path).ok());
  EXPECT_GT(std::filesystem::file_size(path), kParts * 4 << 20);
  for (const bool from_file : {true, false}) {
    const absl::StatusOr<Cache> copy =
        from_file ? ImportCache(*b_, *ReadCacheFile(path)) : ImportCache(*b_, *Export(*a_, *cache));
    ASSERT_TRUE(copy.ok()) << copy.status();
  }
  EXPECT_LT(watch.peak() - before, 32 << 20);  // the cache has 96 MiB
}

}  // namespace
}  // namespace rapt::client
