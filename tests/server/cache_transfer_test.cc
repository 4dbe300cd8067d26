// Export and Import of rapt.v1.CacheService between real servers.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/rapt/v1/cache.grpc.pb.h"
#include "tests/support/kv_chunks.h"
#include "tests/support/metrics_page.h"
#include "tests/support/rapt_reason.h"
#include "tests/support/server_process.h"
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using grpc::StatusCode;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Stub = v1::CacheService::Stub;
using Chunks = std::vector<v1::KvChunk>;

constexpr int64_t kKvHeads = 2, kQueryHeads = 4, kHeadSize = 8, kValueSize = 6;
constexpr char kCacheBytes[] = "--kv_cache_bytes=67108864";
constexpr char kClientAddress[] = "RAPT_TEST_CLIENT_ADDRESS";
constexpr char kUsed[] = "rapt_kv_used_bytes";

// --- Messages ------------------------------------------------------------------------------------

// Halves of random bits in which no exponent is all ones, so that all numbers are finite.
std::string RandomHalves(int64_t count, Rng& rng) {
  std::string bytes;
  for (int64_t n = 0; n < count; ++n) {
    const auto bits = static_cast<uint16_t>(Uniform(rng, 0, 65536));
    const auto half = static_cast<uint16_t>((bits & 0x83ff) | (0x2c00 + (bits & 0x1000)));
    bytes.append(reinterpret_cast<const char*>(&half), sizeof half);
  }
  return bytes;
}

std::string RandomFloats(int64_t count, Rng& rng) {
  std::string bytes;
  for (int64_t n = 0; n < count; ++n) {
    const auto value = static_cast<float>(Uniform(rng, -2, 2));
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  return bytes;
}

v1::Tensor RandomTensor(v1::DataType dtype, const std::vector<int64_t>& shape, Rng& rng) {
  int64_t count = 1;
  for (const int64_t axis : shape) count *= axis;
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  tensor.set_data(dtype == v1::FP16 ? RandomHalves(count, rng) : RandomFloats(count, rng));
  return tensor;
}

// Two layers that keep all tokens, and one with a window.
v1::CreateRequest CreateOf(v1::DataType dtype = v1::FP32) {
  v1::CreateRequest request;
  request.set_dtype(dtype);
  for (const int layers : {2, 1}) {
    v1::LayerShape& shape = *request.add_shapes();
    shape.set_layers(layers);
    shape.set_kv_heads(kKvHeads);
    shape.set_head_size(kHeadSize);
    shape.set_value_head_size(kValueSize);
  }
  request.mutable_shapes(1)->set_keep_first(64);
  request.mutable_shapes(1)->set_keep_last(100);
  return request;
}

// --- Calls ---------------------------------------------------------------------------------------

std::unique_ptr<Stub> Connect(const std::string& address) {
  return v1::CacheService::NewStub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
}
std::unique_ptr<Stub> Connect(const ServerProcess& server) {
  return Connect(server.grpc_address());
}

v1::Cache Create(Stub& stub, const v1::CreateRequest& request = CreateOf()) {
  grpc::ClientContext context;
  v1::Cache cache;
  const grpc::Status status = stub.Create(&context, request, &cache);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return cache;
}

void Append(Stub& stub, const v1::Cache& cache, int layer, int64_t at, int64_t count, Rng& rng) {
  v1::AppendRequest request;
  v1::AppendPart& part = *request.add_parts();
  part.set_cache(cache.id());
  part.set_generation(cache.generation());
  part.set_layer(layer);
  part.set_at(at);
  *part.mutable_k() = RandomTensor(cache.dtype(), {count, kKvHeads, kHeadSize}, rng);
  *part.mutable_v() = RandomTensor(cache.dtype(), {count, kKvHeads, kValueSize}, rng);
  grpc::ClientContext context;
  v1::AppendResponse response;
  const grpc::Status status = stub.Append(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

// Appends `count` tokens, and attends with as many rows. The same seed gives the same numbers.
grpc::Status Attend(Stub& stub, const v1::Cache& cache, int layer, int64_t at, int count,
                    uint64_t seed, v1::AttendCachedResponse& response, int rows_before = 0) {
  Rng rng(seed);
  v1::AttendCachedRequest request;
  request.set_layer(layer);
  request.set_want_lse(true);
  v1::Item& item = *request.add_items();
  item.set_cache(cache.id());
  item.set_generation(cache.generation());
  const int rows = count + rows_before;
  item.set_rows(rows);
  item.set_new_tokens(count);
  item.set_at(at);
  *request.mutable_q() = RandomTensor(cache.dtype(), {rows, kQueryHeads, kHeadSize}, rng);
  if (count > 0) {
    *request.mutable_k() = RandomTensor(cache.dtype(), {count, kKvHeads, kHeadSize}, rng);
    *request.mutable_v() = RandomTensor(cache.dtype(), {count, kKvHeads, kValueSize}, rng);
  }
  grpc::ClientContext context;
  return stub.Attend(&context, request, &response);
}

void Close(Stub& stub, const std::string& id) {
  grpc::ClientContext context;
  v1::Ids ids;
  ids.add_caches(id);
  v1::Caches caches;
  const grpc::Status status = stub.Close(&context, ids, &caches);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

v1::Cache Get(Stub& stub, const std::string& id) {
  grpc::ClientContext context;
  v1::Ids ids;
  ids.add_caches(id);
  v1::Caches caches;
  const grpc::Status status = stub.Get(&context, ids, &caches);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return caches.caches_size() == 1 ? caches.caches(0) : v1::Cache();
}

struct Exported {
  Chunks chunks;
  grpc::Status status;
  std::string reason;
};

Exported Export(Stub& stub, const std::string& id, int64_t chunk_tokens = 0,
                uint64_t generation = 1) {
  v1::ExportRequest request;
  request.set_cache(id);
  request.set_generation(generation);
  request.set_chunk_tokens(chunk_tokens);
  grpc::ClientContext context;
  const auto reader = stub.Export(&context, request);
  Exported exported;
  for (v1::KvChunk chunk; reader->Read(&chunk);) exported.chunks.push_back(chunk);
  exported.status = reader->Finish();
  exported.reason = ReasonOf(context);
  return exported;
}

// A call of Import.
class Importing {
 public:
  explicit Importing(Stub& stub, seconds timeout = seconds(60)) {
    context_.set_deadline(std::chrono::system_clock::now() + timeout);
    writer_ = stub.Import(&context_, &cache_);
  }

  bool Write(const v1::KvChunk& chunk) { return writer_->Write(chunk); }
  void WriteAll(const Chunks& chunks) {
    for (const v1::KvChunk& chunk : chunks) {
      if (!Write(chunk)) return;
    }
  }
  // Half-closes the stream first.
  grpc::Status Finish() {
    writer_->WritesDone();
    return Wait();
  }
  grpc::Status Wait() { return writer_->Finish(); }
  void Cancel() { context_.TryCancel(); }
  const v1::Cache& cache() const { return cache_; }
  std::string reason() const { return ReasonOf(context_); }

 private:
  grpc::ClientContext context_;
  v1::Cache cache_;
  std::unique_ptr<grpc::ClientWriter<v1::KvChunk>> writer_;
};

grpc::Status Import(Stub& stub, const Chunks& chunks, v1::Cache& cache) {
  Importing importing(stub);
  importing.WriteAll(chunks);
  const grpc::Status status = importing.Finish();
  cache = importing.cache();
  return status;
}

// --- Tests ---------------------------------------------------------------------------------------

class CacheTransferTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    a_ = new ServerProcess({"--threads=2", kCacheBytes, "--grace_period=0s"});
    b_ = new ServerProcess({"--threads=2", kCacheBytes, "--grace_period=0s"});
  }
  static void TearDownTestSuite() {
    delete a_;
    delete b_;
  }

  // A cache whose last pages are partly filled, and whose last layer has evicted tokens 64 to 256.
  v1::Cache CreateFilled(v1::DataType dtype = v1::FP32, const std::string& name = "",
                         v1::Storage storage = v1::STORAGE_PLAIN) {
    v1::CreateRequest request = CreateOf(dtype);
    request.set_name(name);
    request.set_storage(storage);
    const v1::Cache cache = Create(*source_, request);
    Append(*source_, cache, 0, 0, 333, rng_);
    Append(*source_, cache, 1, 0, 1, rng_);
    Append(*source_, cache, 2, 0, 400, rng_);
    Append(*source_, cache, 2, 400, 5, rng_);
    return cache;
  }

  // Appends to and reads both caches, which answer the same bits.
  void ExpectSameBits(const v1::Cache& one, const v1::Cache& other) {
    ASSERT_EQ(one.lengths_size(), other.lengths_size());
    for (int layer = 0; layer < one.lengths_size(); ++layer) {
      for (int n = 0; n < 3; ++n) {
        const int64_t at = one.lengths(layer) + 2 * n;
        v1::AttendCachedResponse a, b;
        const grpc::Status of_a = Attend(*source_, one, layer, at, 2, 10 + n, a);
        const grpc::Status of_b = Attend(*target_, other, layer, at, 2, 10 + n, b);
        ASSERT_TRUE(of_a.ok() && of_b.ok()) << of_a.error_message() << of_b.error_message();
        EXPECT_EQ(a.y().SerializeAsString(), b.y().SerializeAsString()) << "layer " << layer;
        EXPECT_EQ(a.lse().SerializeAsString(), b.lse().SerializeAsString()) << "layer " << layer;
      }
    }
  }

  static ServerProcess *a_, *b_;
  std::unique_ptr<Stub> source_ = Connect(*a_), target_ = Connect(*b_);
  Rng rng_{3};
};
ServerProcess *CacheTransferTest::a_ = nullptr, *CacheTransferTest::b_ = nullptr;

TEST_F(CacheTransferTest, AnImportAnswersTheSameBits) {
  for (const auto& [dtype, storage] :
       {std::pair{v1::FP32, v1::STORAGE_PLAIN}, std::pair{v1::FP16, v1::STORAGE_PLAIN},
        std::pair{v1::FP16, v1::STORAGE_INT8}}) {
    for (const int64_t chunk_tokens : {0, 1, 50, 64, 1000}) {
      SCOPED_TRACE(absl::StrCat(v1::DataType_Name(dtype), " ", v1::Storage_Name(storage), " ",
                                chunk_tokens));
      const v1::Cache cache = Get(*source_, CreateFilled(dtype, "", storage).id());
      const Exported exported = Export(*source_, cache.id(), chunk_tokens);
      ASSERT_TRUE(exported.status.ok()) << exported.status.error_message();
      EXPECT_TRUE(exported.chunks.front().has_header());
      EXPECT_EQ(exported.chunks.back().end().chunks(),
                static_cast<int64_t>(exported.chunks.size()) - 2);
      v1::Cache imported;
      const grpc::Status status = Import(*target_, exported.chunks, imported);
      ASSERT_TRUE(status.ok()) << status.error_message();
      EXPECT_EQ(imported.generation(), 1u);
      EXPECT_EQ(imported.dtype(), dtype);
      EXPECT_EQ(imported.storage(), storage);
      EXPECT_EQ(imported.bytes(), cache.bytes());
      EXPECT_EQ(imported.lengths().size(), 3);
      EXPECT_EQ(imported.lengths(2), 405);
      EXPECT_EQ(imported.shapes(1).keep_last(), 100);
      ExpectSameBits(cache, imported);
      // A row that sees an evicted token fails on both.
      for (Stub* stub : {source_.get(), target_.get()}) {
        v1::AttendCachedResponse response;
        const grpc::Status evicted =
            Attend(*stub, stub == source_.get() ? cache : imported, 2, 411, 0, 1, response, 300);
        EXPECT_EQ(evicted.error_code(), StatusCode::FAILED_PRECONDITION);
      }
      Close(*source_, cache.id());
      Close(*target_, imported.id());
    }
  }
  WaitForMetric(*b_, kUsed, 0);
  WaitUntilNothingIsHeld(*a_);
  WaitUntilNothingIsHeld(*b_);
}

TEST_F(CacheTransferTest, AForkIsExportedOnItsOwn) {
  const v1::Cache parent = Create(*source_);
  for (int layer = 0; layer < 3; ++layer) Append(*source_, parent, layer, 0, 150, rng_);
  v1::ForkRequest request;
  request.set_cache(parent.id());
  request.set_generation(1);
  request.set_length(100);
  v1::Cache fork;
  grpc::ClientContext context;
  ASSERT_TRUE(source_->Fork(&context, request, &fork).ok());
  Append(*source_, fork, 1, 100, 70, rng_);
  fork = Get(*source_, fork.id());
  const Exported exported = Export(*source_, fork.id());
  Close(*source_, parent.id());
  v1::Cache imported;
  const grpc::Status status = Import(*target_, exported.chunks, imported);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ExpectSameBits(fork, imported);
  Close(*source_, fork.id());
  Close(*target_, imported.id());
}

TEST_F(CacheTransferTest, TheHeaderIsWhatCreateWasTold) {
  v1::CreateRequest request = CreateOf(v1::BF16);
  request.set_name("header");
  request.set_reserve_tokens(77);
  request.set_lease_ms(54321);
  request.set_first_position(1000);
  const v1::Cache cache = Create(*source_, request);
  Exported exported = Export(*source_, cache.id());
  ASSERT_EQ(exported.chunks.size(), 2u);  // no tokens
  v1::KvHeader& header = *exported.chunks[0].mutable_header();
  EXPECT_EQ(header.cache().SerializeAsString(), request.SerializeAsString());
  EXPECT_EQ(header.lengths_size(), 3);
  // The client may change them.
  header.mutable_cache()->set_name("other");
  header.mutable_cache()->set_lease_ms(1234);
  Seal(exported.chunks[0]);
  v1::Cache imported;
  ASSERT_TRUE(Import(*target_, exported.chunks, imported).ok());
  EXPECT_EQ(imported.name(), "other");
  EXPECT_EQ(imported.lease_ms(), 1234);
  EXPECT_EQ(imported.first_position(), 1000);
  EXPECT_EQ(imported.reserve_tokens(), 77);
  EXPECT_EQ(imported.bytes(), cache.bytes());
  Close(*source_, cache.id());
  Close(*target_, imported.id());
}

TEST_F(CacheTransferTest, ExportSaysWhyItFails) {
  const v1::Cache cache = Create(*source_);
  const Exported generation = Export(*source_, cache.id(), 0, 2);
  EXPECT_EQ(generation.status.error_code(), StatusCode::ABORTED);
  EXPECT_EQ(generation.reason, "generation");
  const Exported unknown = Export(*source_, "nobody");
  EXPECT_EQ(unknown.status.error_code(), StatusCode::NOT_FOUND);
  EXPECT_EQ(unknown.reason, "unknown");
  const Exported negative = Export(*source_, cache.id(), -1);
  EXPECT_EQ(negative.status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(negative.status.error_message(), "chunk_tokens is -1; it must be in [0, 2^62)");
  Close(*source_, cache.id());
  EXPECT_EQ(Export(*source_, cache.id()).reason, "closed");
}

TEST_F(CacheTransferTest, ABrokenStreamLeavesNothing) {
  const v1::Cache cache = CreateFilled();
  const Chunks right = Export(*source_, cache.id(), 100).chunks;
  // Header; layer 0: 100, 100, 100, 33; layer 1: 1; layer 2: 64, then 100, 49; end.
  ASSERT_EQ(right.size(), 10u);
  const struct {
    const char* error;
    std::function<void(Chunks&)> change;
  } kCases[] = {
      {"chunk 1: tokens 100 to 200 of layer 0 are missing; the layer evicts none",
       [](Chunks& m) { m.erase(m.begin() + 2); }},
      {"end.chunks is 8; 7 chunks came", [](Chunks& m) { m.erase(m.begin() + 5); }},
      {"chunk 7: k has 3136 bytes; 48 tokens of 64 bytes are needed",
       [](Chunks& m) { m[8].mutable_tokens()->set_tokens(48); }},
      {"chunk 0: layer is 3; the cache has 3 layers",
       [](Chunks& m) { m[1].mutable_tokens()->set_layer(3); }},
      {"chunk 0: k has 6399 bytes; 100 tokens of 64 bytes are needed",
       [](Chunks& m) { m[1].mutable_tokens()->mutable_k()->pop_back(); }},
      {"chunk 0: v has 0 bytes; 100 tokens of 48 bytes are needed",
       [](Chunks& m) { m[1].mutable_tokens()->clear_v(); }},
      {"end.chunks is 7; 8 chunks came", [](Chunks& m) { m[9].mutable_end()->set_chunks(7); }},
      {"the header came twice", [](Chunks& m) { m.insert(m.begin() + 1, m[0]); }},
      {"tokens came before the header", [](Chunks& m) { m.erase(m.begin()); }},
      {"a message came after the end", [](Chunks& m) { m.push_back(m[1]); }},
      {"the stream ended without an end", [](Chunks& m) { m.pop_back(); }},
      {"the stream ended without an end", [](Chunks& m) { m.clear(); }},
      {"the end came; tokens 333 to 334 of layer 0 are missing",
       [](Chunks& m) { m[0].mutable_header()->set_lengths(0, 334); }},
      {"the message has neither header, tokens nor end", [](Chunks& m) { m[3].Clear(); }},
      {"header.cache.dtype is", [](Chunks& m) { m[0].mutable_header()->clear_cache(); }},
      {"header.cache.shapes[0].kv_heads is 0",
       [](Chunks& m) {
         m[0].mutable_header()->mutable_cache()->mutable_shapes(0)->clear_kv_heads();
       }},
  };
  const double used = ReadMetric(*b_, kUsed);
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.error);
    Chunks chunks = right;
    c.change(chunks);
    for (v1::KvChunk& chunk : chunks) Seal(chunk);
    v1::Cache imported;
    const grpc::Status status = Import(*target_, chunks, imported);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(c.error));
    WaitForMetric(*b_, kUsed, used);
  }
  EXPECT_EQ(ReadMetric(*b_, "rapt_kv_caches"), 0);
  WaitUntilNothingIsHeld(*b_);
  Close(*source_, cache.id());
}

TEST_F(CacheTransferTest, AMissingChecksumIsNoDamage) {
  const v1::Cache cache = Create(*source_, CreateOf());
  Append(*source_, cache, 0, 0, 1, rng_);
  const Chunks right = Export(*source_, cache.id()).chunks;
  const auto error = [&](const Chunks& chunks) {
    v1::Cache imported;
    const grpc::Status status = Import(*target_, chunks, imported);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
    return status.error_message();
  };
  const auto missing = [](const std::string& part) {
    return AllOf(HasSubstr(part + ".crc32 is missing; it must be the checksum of the part"),
                 Not(HasSubstr("damaged")));
  };
  Chunks chunks = right;
  chunks[0].mutable_header()->clear_crc32();
  EXPECT_THAT(error(chunks), missing("header"));
  chunks = right;
  chunks[1].mutable_tokens()->clear_crc32();
  EXPECT_THAT(error(chunks), missing("tokens 0 to 1 of layer 0"));
  chunks[1].mutable_tokens()->set_crc32(0);
  EXPECT_THAT(error(chunks),
              HasSubstr("tokens 0 to 1 of layer 0.crc32 is 00000000; what came has "));
  chunks = right;
  chunks.back().mutable_end()->clear_crc32();
  EXPECT_THAT(error(chunks), missing("end"));
}

// Every bit of a small export, as a file or a network may flip it.
TEST_F(CacheTransferTest, AFlippedBitIsRefused) {
  v1::CreateRequest request = CreateOf();
  request.set_name("bits");
  request.mutable_shapes()->DeleteSubrange(1, 1);
  const v1::Cache cache = Create(*source_, request);
  Append(*source_, cache, 0, 0, 1, rng_);
  const Chunks right = Export(*source_, cache.id()).chunks;
  ASSERT_EQ(right.size(), 3u);  // the second layer is empty
  v1::Cache imported;
  int64_t tried = 0;
  for (size_t n = 0; n < right.size(); ++n) {
    const std::string bytes = right[n].SerializeAsString();
    for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      std::string flipped = bytes;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
      Chunks chunks = right;
      if (!chunks[n].ParseFromString(flipped)) continue;  // the reader of a file refuses it
      ++tried;
      const grpc::Status status = Import(*target_, chunks, imported);
      EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT)
          << "bit " << bit << " of message " << n << ": " << status.error_message();
    }
  }
  EXPECT_GT(tried, 1000);
  Chunks unsealed = right;
  unsealed[0].mutable_header()->mutable_cache()->set_name("other");
  EXPECT_THAT(Import(*target_, unsealed, imported).error_message(),
              AllOf(HasSubstr("header.crc32 is "), HasSubstr("damaged")));
  Seal(unsealed[0]);
  EXPECT_TRUE(Import(*target_, unsealed, imported).ok());
  Close(*target_, imported.id());
  Close(*source_, cache.id());
}

TEST_F(CacheTransferTest, ANameInUseIsRefused) {
  const v1::Cache cache = CreateFilled(v1::FP32, "used");
  const Chunks chunks = Export(*source_, cache.id()).chunks;
  v1::Cache imported;
  EXPECT_EQ(Import(*source_, chunks, imported).error_code(), StatusCode::ALREADY_EXISTS);
  // Two at a time: one of them makes it.
  Importing one(*target_), other(*target_);
  for (const v1::KvChunk& chunk : chunks) {
    ASSERT_TRUE(one.Write(chunk));
    ASSERT_TRUE(other.Write(chunk));
  }
  EXPECT_TRUE(other.Finish().ok());
  EXPECT_EQ(one.Finish().error_code(), StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(ReadMetric(*b_, "rapt_kv_caches"), 1);
  Close(*source_, cache.id());
  Close(*target_, other.cache().id());
  WaitForMetric(*b_, kUsed, 0);
}

// The callers of TCP are one caller, those of the Unix domain socket another.
TEST(CacheTransferOwnerTest, OnlyTheOwnerExports) {
  std::string folder = std::filesystem::temp_directory_path() / "rapt-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string socket = absl::StrCat(folder, "/socket");
  const ServerProcess server(
      {kCacheBytes, absl::StrCat("--unix_socket=", socket), "--grace_period=0s"});
  const auto owner = Connect(server), other = Connect(absl::StrCat("unix:", socket));
  Rng rng(4);
  v1::CreateRequest request = CreateOf();
  request.set_name("mine");
  const v1::Cache cache = Create(*owner, request);
  Append(*owner, cache, 0, 0, 100, rng);
  const Exported refused = Export(*other, cache.id());
  EXPECT_EQ(refused.status.error_code(), StatusCode::NOT_FOUND);
  EXPECT_EQ(refused.reason, "unknown");
  EXPECT_TRUE(refused.chunks.empty());
  // Names are of a caller, and so is what it imports.
  v1::Cache imported;
  ASSERT_TRUE(Import(*other, Export(*owner, cache.id()).chunks, imported).ok());
  EXPECT_EQ(Export(*owner, imported.id()).status.error_code(), StatusCode::NOT_FOUND);
  EXPECT_TRUE(Export(*other, imported.id()).status.ok());
  std::filesystem::remove_all(folder);
}

TEST(CacheTransferEndTest, AnImporterThatLeavesHoldsNothing) {
  const ServerProcess server({kCacheBytes});
  const auto stub = Connect(server);
  Rng rng(5);
  const v1::Cache cache = Create(*stub);
  Append(*stub, cache, 0, 0, 20000, rng);
  const Chunks chunks = Export(*stub, cache.id()).chunks;
  Close(*stub, cache.id());
  WaitForMetric(server, kUsed, 0);
  {
    Importing importing(*stub);
    importing.WriteAll({chunks[0], chunks[1], chunks[2]});
    WaitForPage(server, "pages of the import",
                [](const std::string& page) { return SumOnPage(page, kUsed) > 1000000; });
    importing.Cancel();
    EXPECT_EQ(importing.Wait().error_code(), StatusCode::CANCELLED);
  }
  WaitForMetric(server, kUsed, 0);
}

// A chunk of `tokens` tokens from 0 on, and what surrounds it.
Chunks OneChunk(int64_t tokens) {
  Chunks chunks(3);
  v1::KvHeader& header = *chunks[0].mutable_header();
  *header.mutable_cache() = CreateOf();
  for (const int64_t length : {tokens, int64_t{0}, int64_t{0}}) header.add_lengths(length);
  v1::KvTokens& part = *chunks[1].mutable_tokens();
  part.set_tokens(tokens);
  part.set_k(std::string(static_cast<size_t>(tokens * kKvHeads * kHeadSize * 4), 'k'));
  part.set_v(std::string(static_cast<size_t>(tokens * kKvHeads * kValueSize * 4), 'v'));
  chunks[2].mutable_end()->set_chunks(1);
  for (v1::KvChunk& chunk : chunks) Seal(chunk);
  return chunks;
}

// Not a test: the process that AnImporterThatIsKilledLeavesNothing starts and kills.
TEST(CacheTransferClient, DISABLED_SendsEverythingButTheHalfClose) {
  const char* const address = getenv(kClientAddress);
  ASSERT_NE(address, nullptr);
  const auto stub = Connect(std::string(address));
  Importing importing(*stub);
  importing.WriteAll(OneChunk(2000));
  importing.Wait();
}

TEST(CacheTransferEndTest, AnImporterThatIsKilledLeavesNothing) {
  const ServerProcess server({kCacheBytes});
  ChildProcess client(
      {"/proc/self/exe", "--gtest_also_run_disabled_tests", "--gtest_filter=CacheTransferClient.*"},
      {absl::StrCat(kClientAddress, "=", server.grpc_address())});
  WaitForMetric(server, "rapt_chunks_total", 3);
  EXPECT_GT(ReadMetric(server, kUsed), 0);
  EXPECT_EQ(ReadMetric(server, "rapt_kv_caches"), 0);
  client.Signal(SIGKILL);
  EXPECT_EQ(client.Wait(), -SIGKILL);
  WaitForMetric(server, kUsed, 0);
  EXPECT_EQ(ReadMetric(server, "rapt_kv_caches"), 0);
  WaitUntilNothingIsHeld(server);
}

TEST(CacheTransferEndTest, ASilentImporterIsEnded) {
  const ServerProcess server({kCacheBytes, "--default_deadline=1s"});
  const auto stub = Connect(server);
  for (const size_t sent : {0, 1, 2, 3}) {
    SCOPED_TRACE(sent);
    Chunks chunks = OneChunk(2000);
    chunks.resize(sent);
    Importing importing(*stub);
    importing.WriteAll(chunks);
    const grpc::Status status = importing.Wait();  // without a half-close
    EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_EQ(status.error_message(), "no message arrived for 1s, while the stream held its cache");
    WaitForMetric(server, kUsed, 0);
  }
  EXPECT_EQ(ReadMetric(server, "rapt_rejected_total", {{"reason", "slow_sender"}}), 4);
  EXPECT_EQ(ReadMetric(server, "rapt_kv_caches"), 0);
  WaitUntilNothingIsHeld(server);
}

TEST(CacheTransferEndTest, TheDeadlineOfTheImporterEndsIt) {
  const ServerProcess server({kCacheBytes});
  const auto stub = Connect(server);
  Importing importing(*stub, seconds(1));
  const Chunks chunks = OneChunk(2000);
  importing.WriteAll({chunks[0], chunks[1]});
  EXPECT_EQ(importing.Wait().error_code(), StatusCode::DEADLINE_EXCEEDED);
  WaitForMetric(server, kUsed, 0);
  WaitUntilNothingIsHeld(server);
}

TEST(CacheTransferEndTest, AReaderThatStopsIsEnded) {
  const ServerProcess server({"--kv_cache_bytes=134217728", "--default_deadline=1s"});
  const auto stub = Connect(server);
  Rng rng(6);
  const v1::Cache cache = Create(*stub);
  for (int n = 0; n < 12; ++n) Append(*stub, cache, n % 2, n / 2 * 40000, 40000, rng);  // 50 MB
  v1::ExportRequest request;
  request.set_cache(cache.id());
  request.set_generation(1);
  grpc::ClientContext context;
  const auto reader = stub->Export(&context, request);
  v1::KvChunk chunk;
  ASSERT_TRUE(reader->Read(&chunk));
  // A chunk of 1 MiB is in memory, whatever the size of the cache.
  const double reserved = ReadMetric(server, "rapt_memory_reserved_bytes");
  EXPECT_GT(reserved, 500000);
  EXPECT_LT(reserved, 3000000);
  // The cache's pages are free when the call has ended.
  Close(*stub, cache.id());
  EXPECT_GT(ReadMetric(server, kUsed), 50000000);
  WaitForMetric(server, "rapt_requests_total", 1,
                {{"method", "rapt.v1.CacheService/Export"}, {"code", "DEADLINE_EXCEEDED"}});
  WaitForMetric(server, kUsed, 0);
  WaitUntilNothingIsHeld(server);
}

void ExpectSame(const std::string& name, const Chunks& got, const Chunks& want) {
  ASSERT_EQ(got.size(), want.size()) << name;
  for (size_t n = 0; n < got.size(); ++n) {
    const std::string a = got[n].SerializeAsString(), b = want[n].SerializeAsString();
    const auto [at, other] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
    EXPECT_EQ(at - a.begin(), static_cast<int64_t>(b.size()))
        << name << " chunk " << n << " of " << got.size() << " has " << a.size() << " bytes";
  }
}

TEST(CacheTransferEndTest, ADrainingServerExportsAndDoesNotImport) {
  ServerProcess server({kCacheBytes, "--grace_period=30s"});
  const auto stub = Connect(server);
  Rng rng(7);
  const v1::Cache cache = Create(*stub);
  for (int n = 0; n < 2; ++n) Append(*stub, cache, n, 0, 50000, rng);
  const Chunks before = Export(*stub, cache.id()).chunks;
  v1::ExportRequest request;
  request.set_cache(cache.id());
  request.set_generation(1);
  grpc::ClientContext context;
  const auto reader = stub->Export(&context, request);
  Chunks read(1);
  ASSERT_TRUE(reader->Read(&read[0]));
  Importing begun(*stub);
  ASSERT_TRUE(begun.Write(before[0]));
  WaitForMetric(server, "rapt_open_streams", 2);
  server.Terminate();
  for (;;) {
    Importing importing(*stub);
    importing.WriteAll(before);
    const grpc::Status status = importing.Finish();
    if (status.ok()) {
      Close(*stub, importing.cache().id());
      continue;
    }
    EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE) << status.error_message();
    if (importing.reason() == "draining") break;
  }
  begun.Write(before[1]);
  EXPECT_EQ(begun.Wait().error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(begun.reason(), "draining");
  const Exported after = Export(*stub, cache.id());
  EXPECT_TRUE(after.status.ok()) << after.status.error_message();
  for (v1::KvChunk chunk; reader->Read(&chunk);) read.push_back(chunk);
  EXPECT_TRUE(reader->Finish().ok());
  ExpectSame("after", after.chunks, before);
  ExpectSame("read", read, before);
  Close(*stub, cache.id());
  EXPECT_EQ(server.Wait(), 0);
}

TEST(CacheTransferEndTest, AServerWithoutCachesSaysSo) {
  const ServerProcess server;
  const auto stub = Connect(server);
  const Exported exported = Export(*stub, "any");
  EXPECT_EQ(exported.status.error_code(), StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(exported.status.error_message(), HasSubstr("--kv_cache_bytes"));
  v1::Cache imported;
  const grpc::Status status = Import(*stub, OneChunk(1), imported);
  EXPECT_EQ(status.error_code(), StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(status.error_message(), HasSubstr("--kv_cache_bytes"));
}

}  // namespace
}  // namespace rapt::test
