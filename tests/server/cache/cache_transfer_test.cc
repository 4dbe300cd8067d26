#include "server/cache/cache_transfer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/fake_clock.h"

namespace rapt::cache {
namespace {

using ::testing::HasSubstr;

constexpr TokenShape kToken = {.kv_heads = 2, .head_size = 3, .value_head_size = 2};
constexpr int64_t kTokenBytes = 2 * (3 + 2) * 4;

std::vector<std::byte> RandomBytes(int64_t count, std::mt19937& random) {
  std::vector<std::byte> bytes(static_cast<size_t>(count));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// A part, and the bytes of its tokens.
struct Message {
  KvPart part;
  std::shared_ptr<std::vector<std::byte>> bytes = nullptr;

  KvTokens& tokens() { return std::get<KvTokens>(part); }
};

// A server's caches.
struct Server {
  explicit Server(CacheStore::Options options = {.instance = "s"}, int64_t slabs = 16)
      : arena(slabs * Arena::kSlabBytes), store(std::move(options), arena, clock) {}

  test::FakeClock clock;
  Arena arena;
  CacheStore store;
};

class CacheTransferTest : public ::testing::Test {
 protected:
  CacheInfo Create(CacheSpec spec) {
    const absl::StatusOr<CacheInfo> info = a_.store.Create("me", spec);
    EXPECT_TRUE(info.ok()) << info.status();
    return *info;
  }

  void Append(const std::string& id, int64_t layer, int64_t at, int64_t count,
              uint64_t generation = 1) {
    const auto keys = RandomBytes(count * kToken.key_bytes(), random_);
    const auto values = RandomBytes(count * kToken.value_bytes(), random_);
    const LayerCall call = {
        .cache = id, .layer = layer, .generation = generation, .at = at, .count = count};
    const auto batch = a_.store.Open("me", {&call, 1});
    ASSERT_TRUE(batch.ok()) << batch.status();
    const NewTokens tokens = {.keys = keys.data(), .values = values.data()};
    const auto results = a_.store.Append(*batch, {&tokens, 1});
    ASSERT_TRUE(results.ok()) << results.status();
  }

  static std::vector<Message> Export(CacheStore& store, const std::string& id,
                                     int64_t chunk_tokens = 0, uint64_t generation = 1) {
    absl::StatusOr<CacheSnapshot> snapshot = store.Freeze("me", id, generation);
    EXPECT_TRUE(snapshot.ok()) << snapshot.status();
    Exporter exporter(*std::move(snapshot), chunk_tokens, int64_t{1} << 30);
    std::vector<Message> messages = {{exporter.header()}};
    while (const auto chunk = exporter.Next()) {
      auto bytes = std::make_shared<std::vector<std::byte>>(
          static_cast<size_t>(chunk->key_bytes + chunk->value_bytes));
      std::byte* const values = bytes->data() + chunk->key_bytes;
      EXPECT_LE(chunk->key_bytes + chunk->value_bytes, exporter.largest_chunk_bytes());
      exporter.Copy(*chunk, bytes->data(), values);
      messages.push_back({KvTokens{.layer = chunk->layer,
                                   .at = chunk->at,
                                   .count = chunk->count,
                                   .keys = {bytes->data(), chunk->key_bytes},
                                   .values = {values, chunk->value_bytes}},
                          bytes});
    }
    messages.push_back({KvEnd{.chunks = exporter.chunks()}});
    return messages;
  }

  static absl::StatusOr<CacheInfo> Import(CacheStore& store, const std::vector<Message>& messages) {
    Importer importer(store, "me");
    for (const Message& message : messages) {
      if (absl::Status status = importer.Take(message.part, {}); !status.ok()) return status;
    }
    return importer.Finish();
  }

  // The tokens of a layer, and which of its pages are evicted.
  static std::vector<std::byte> BytesOf(const Snapshot& layer) {
    std::vector<std::byte> bytes(static_cast<size_t>(layer.length() * kTokenBytes));
    std::vector<std::byte> evicted;
    for (int64_t at = 0; at < layer.length(); at += kPageTokens) {
      const int64_t count = std::min(kPageTokens, layer.length() - at);
      const bool is_evicted = layer.pages()[static_cast<size_t>(at / kPageTokens)] == nullptr;
      evicted.push_back(static_cast<std::byte>(is_evicted));
      std::byte* const to = bytes.data() + at * kTokenBytes;
      if (!is_evicted) layer.CopyTokens(at, count, to, to + count * kToken.key_bytes());
    }
    bytes.insert(bytes.end(), evicted.begin(), evicted.end());
    return bytes;
  }

  static void ExpectEqual(CacheStore& a, const std::string& id_of_a, uint64_t generation,
                          CacheStore& b, const std::string& id_of_b) {
    const auto one = a.Freeze("me", id_of_a, generation);
    const auto other = b.Freeze("me", id_of_b, 1);
    ASSERT_TRUE(one.ok() && other.ok()) << one.status() << other.status();
    EXPECT_EQ(one->spec.shapes, other->spec.shapes);
    ASSERT_EQ(one->layers.size(), other->layers.size());
    for (size_t n = 0; n < one->layers.size(); ++n) {
      EXPECT_EQ(one->layers[n].length(), other->layers[n].length());
      EXPECT_EQ(BytesOf(one->layers[n]), BytesOf(other->layers[n])) << "layer " << n;
    }
  }

  // A cache with a layer that keeps all tokens and one with a window.
  CacheInfo CreateWithWindow() {
    const CacheInfo cache = Create(
        {.shapes = {{.token = kToken}, {.token = kToken, .keep_first = 70, .keep_last = 100}}});
    Append(cache.id, 0, 0, 150);
    Append(cache.id, 1, 0, 400);
    Append(cache.id, 1, 400, 50);  // evicts tokens 128 to 256
    return cache;
  }

  std::mt19937 random_{5};
  Server a_, b_;
};

TEST_F(CacheTransferTest, AnImportEqualsWhatWasExported) {
  for (int round = 0; round < 60; ++round) {
    std::uniform_int_distribution<int64_t> upto(0, 300);
    CacheSpec spec = {.shapes = {{.layers = 2, .token = kToken},
                                 {.token = kToken,
                                  .keep_first = upto(random_) / 2,
                                  .keep_last = 1 + upto(random_) / 2}},
                      .first_position = upto(random_) / 4};
    const CacheInfo cache = Create(spec);
    for (int64_t layer = 0; layer < 3; ++layer) {
      int64_t at = 0;
      for (int n = 0; n < 4; ++n) {
        const int64_t count = upto(random_);
        if (count > 0) Append(cache.id, layer, at, count);
        at += count;
      }
    }
    const auto messages = Export(a_.store, cache.id, upto(random_));
    const absl::StatusOr<CacheInfo> imported = Import(b_.store, messages);
    ASSERT_TRUE(imported.ok()) << imported.status();
    EXPECT_EQ(imported->generation, 1u);
    const auto source = a_.store.Get("me", {{cache.id}})->caches[0];
    EXPECT_EQ(imported->lengths, source.lengths);
    EXPECT_EQ(imported->bytes, source.bytes);
    EXPECT_EQ(imported->spec.first_position, spec.first_position);
    ExpectEqual(a_.store, cache.id, 1, b_.store, imported->id);
    // And back again, in other chunks.
    const auto back = Import(a_.store, Export(b_.store, imported->id));
    ASSERT_TRUE(back.ok()) << back.status();
    ExpectEqual(a_.store, back->id, 1, b_.store, imported->id);
    ASSERT_TRUE(a_.store.Close("me", {{cache.id, back->id}}).ok());
    ASSERT_TRUE(b_.store.Close("me", {{imported->id}}).ok());
  }
  EXPECT_EQ(a_.arena.committed_bytes(), 0);
  EXPECT_EQ(b_.arena.committed_bytes(), 0);
}

TEST_F(CacheTransferTest, AnImportedWindowGoesOnAsTheExportedOne) {
  const CacheInfo cache = CreateWithWindow();
  const auto imported = Import(a_.store, Export(a_.store, cache.id));
  ASSERT_TRUE(imported.ok()) << imported.status();
  for (const std::string& id : {cache.id, imported->id}) {
    random_.seed(7);
    Append(id, 1, 450, 100);
    Append(id, 1, 550, 100);  // evicts more
  }
  ExpectEqual(a_.store, cache.id, 1, a_.store, imported->id);
  // A row of the import that needs an evicted token fails, as one of the export does.
  EXPECT_EQ(ReasonOf(a_.store.Truncate("me", imported->id, 150, 1).status()), Reason::kEvicted);
}

TEST_F(CacheTransferTest, AnExportIsOfItsMoment) {
  const CacheInfo cache = Create({.shapes = {{.token = kToken}}});
  Append(cache.id, 0, 0, 100);
  auto snapshot = a_.store.Freeze("me", cache.id, 1);
  ASSERT_TRUE(snapshot.ok());
  const auto before = BytesOf(snapshot->layers[0]);
  Append(cache.id, 0, 100, 100);
  ASSERT_TRUE(a_.store.Truncate("me", cache.id, 10, 1).ok());
  Append(cache.id, 0, 10, 100, /*generation=*/2);
  EXPECT_EQ(BytesOf(snapshot->layers[0]), before);
  EXPECT_EQ(snapshot->layers[0].length(), 100);
  EXPECT_EQ(ReasonOf(a_.store.Freeze("me", cache.id, 1).status()), Reason::kGeneration);
  EXPECT_EQ(ReasonOf(a_.store.Freeze("other", cache.id, 2).status()), Reason::kUnknown);
  // It does not renew the lease.
  a_.clock.Advance(std::chrono::minutes(9));
  ASSERT_TRUE(a_.store.Freeze("me", cache.id, 2).ok());
  a_.clock.Advance(std::chrono::minutes(2));
  EXPECT_EQ(ReasonOf(a_.store.Freeze("me", cache.id, 2).status()), Reason::kExpired);
}

TEST_F(CacheTransferTest, AChunkHasAtMostWhatIsAsked) {
  const CacheInfo cache = Create({.shapes = {{.token = kToken}}});
  constexpr int64_t kMiBTokens = (1 << 20) / kTokenBytes;
  Append(cache.id, 0, 0, 2 * kMiBTokens + 1);
  const auto counts = [&](int64_t chunk_tokens, int64_t max_bytes) {
    Exporter exporter(*a_.store.Freeze("me", cache.id, 1), chunk_tokens, max_bytes);
    std::vector<int64_t> counts;
    while (const auto chunk = exporter.Next()) counts.push_back(chunk->count);
    return counts;
  };
  EXPECT_EQ(counts(0, 1 << 30), (std::vector<int64_t>{kMiBTokens, kMiBTokens, 1}));
  EXPECT_EQ(counts(kMiBTokens + 1, 1 << 30), (std::vector<int64_t>{kMiBTokens + 1, kMiBTokens}));
  EXPECT_EQ(counts(std::numeric_limits<int64_t>::max(), kMiBTokens * kTokenBytes).size(), 3u);
  EXPECT_EQ(counts(0, 1).size(), static_cast<size_t>(2 * kMiBTokens + 1));  // one token at least
}

TEST_F(CacheTransferTest, WhatIsWrongLeavesNothing) {
  const CacheInfo cache = CreateWithWindow();
  // Header; layer 0: 0, 50, 100; layer 1: 0, 50, 100 to 128, then 256, 306, 356, 406; end.
  const std::vector<Message> right = Export(a_.store, cache.id, 50);
  ASSERT_EQ(right.size(), 12u);
  using Messages = std::vector<Message>;
  const auto header = [](Messages& m) -> KvHeader& { return std::get<KvHeader>(m[0].part); };
  const auto set_chunks = [](Messages& m, int64_t chunks) {
    std::get<KvEnd>(m.back().part).chunks = chunks;
  };
  const struct {
    const char* error;
    std::function<void(Messages&)> change;
  } kCases[] = {
      {"chunk 1: tokens 50 to 100 of layer 0 are missing; the layer evicts none",
       [&](Messages& m) { m.erase(m.begin() + 2), set_chunks(m, 9); }},
      {"the end came; tokens 100 to 150 of layer 0 are missing",
       [&](Messages& m) { m.erase(m.begin() + 3), set_chunks(m, 9); }},
      {"the end came; tokens 406 to 450 of layer 1 are missing",
       [&](Messages& m) { m.erase(m.end() - 2), set_chunks(m, 9); }},
      {"chunk 5: tokens 100 to 256 of layer 1 are missing; one range of multiples of 64 within 70 "
       "to 351 may be",
       [&](Messages& m) { m.erase(m.begin() + 6), set_chunks(m, 9); }},
      {"chunk 3: tokens 0 to 50 of layer 1 are missing",
       [&](Messages& m) { m.erase(m.begin() + 4), set_chunks(m, 9); }},
      {"chunk 7: tokens 306 to 356 of layer 1 are missing",
       [&](Messages& m) { m.erase(m.begin() + 8), set_chunks(m, 9); }},
      {"end.chunks is 9; 10 chunks came", [&](Messages& m) { set_chunks(m, 9); }},
      {"the stream ended without an end", [&](Messages& m) { m.pop_back(); }},
      {"the end came; tokens 0 to 150 of layer 0 are missing",
       [&](Messages& m) {
         m = {m.front(), m.back()};
         set_chunks(m, 0);
       }},
      {"the header came twice", [&](Messages& m) { m.insert(m.begin() + 3, m[0]); }},
      {"tokens came before the header", [&](Messages& m) { m.erase(m.begin()); }},
      {"the end came before the header", [&](Messages& m) { m = {m.back()}; }},
      {"a message came after the end", [&](Messages& m) { m.push_back(m[1]); }},
      {"a message came after the end", [&](Messages& m) { m.push_back(m.back()); }},
      {"chunk 0: layer is 2; the cache has 2 layers",
       [&](Messages& m) { m[1].tokens().layer = 2; }},
      {"chunk 0: layer is -1", [&](Messages& m) { m[1].tokens().layer = -1; }},
      {"chunk 1: at is 0 and tokens is 50; layer 0 has 50 tokens so far and 150 in the header",
       [&](Messages& m) { m.insert(m.begin() + 1, m[1]); }},
      {"chunk 1: tokens 50 to 100 of layer 0 are missing",
       [&](Messages& m) { std::swap(m[2], m[3]); }},
      {"at is -1 and tokens is 50", [&](Messages& m) { m[1].tokens().at = -1; }},
      {"chunk 0: tokens is 0; it must be in [1, 2^62)",
       [&](Messages& m) { m[1].tokens().count = 0; }},
      {"chunk 1: tokens is 9223372036854775807; it must be in [1, 2^62)",
       [&](Messages& m) { m[2].tokens().count = std::numeric_limits<int64_t>::max(); }},
      {"chunk 0: v has 800 bytes; 51 tokens of 16 bytes are needed",
       [&](Messages& m) {
         m[1].tokens().count = 51;
         m[1].tokens().keys.size += 24;
       }},
      {"chunk 0: k has 1199 bytes; 50 tokens of 24 bytes are needed",
       [&](Messages& m) { --m[1].tokens().keys.size; }},
      {"chunk 0: v has 801 bytes; 50 tokens of 16 bytes are needed",
       [&](Messages& m) { ++m[1].tokens().values.size; }},
      {"header.lengths has 1 entries; the cache has 2 layers",
       [&](Messages& m) { header(m).lengths.pop_back(); }},
      {"header.lengths[1] is -1; it must be in [0, 2^62)",
       [&](Messages& m) { header(m).lengths[1] = -1; }},
      {"chunk 2: at is 100 and tokens is 50; layer 0 has 100 tokens so far and 149 in the header",
       [&](Messages& m) { header(m).lengths[0] = 149; }},
      {"the end came; tokens 150 to 151 of layer 0 are missing",
       [&](Messages& m) { header(m).lengths[0] = 151; }},
      {"header.cache.shapes.head_size is 0",
       [&](Messages& m) { header(m).cache.shapes[0].token.head_size = 0; }},
      {"header.cache.shapes is empty", [&](Messages& m) { header(m).cache.shapes.clear(); }},
      {"chunk 6: tokens 128 to 256 of layer 1 are missing; one range of multiples of 64 within 200",
       [&](Messages& m) { header(m).cache.shapes[1].keep_first = 200; }},
      {"chunk 6: tokens 128 to 256 of layer 1 are missing; one range of multiples of 64 within 70",
       [&](Messages& m) { header(m).cache.shapes[1].keep_last = 300; }},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.error);
    std::vector<Message> messages = right;
    c.change(messages);
    const absl::StatusOr<CacheInfo> imported = Import(b_.store, messages);
    EXPECT_EQ(imported.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(imported.status().message()), HasSubstr(c.error));
    EXPECT_EQ(b_.arena.committed_bytes(), 0);
    EXPECT_EQ(b_.store.caches(), 0);
  }
  EXPECT_TRUE(Import(b_.store, right).ok());
}

TEST_F(CacheTransferTest, ALayerEvictsOnce) {
  const CacheInfo cache = Create({.shapes = {{.token = kToken, .keep_last = 64}}});
  Append(cache.id, 0, 0, 64 * 10);
  auto messages = Export(a_.store, cache.id, 64);
  ASSERT_EQ(messages.size(), 12u);
  messages.erase(messages.begin() + 6);
  messages.erase(messages.begin() + 3);
  std::get<KvEnd>(messages.back().part).chunks = 8;
  EXPECT_THAT(std::string(Import(b_.store, messages).status().message()),
              HasSubstr("chunk 4: tokens 320 to 384 of layer 0 are missing"));
}

TEST_F(CacheTransferTest, ALongGapIsRefusedWithoutMemoryOrQuota) {
  KvHeader header{.cache = {.shapes = {{.token = kToken, .keep_last = 1}}}};
  const std::vector<std::byte> bytes(static_cast<size_t>(kTokenBytes));
  for (const auto& [length, status_code, reason] :
       {std::tuple{int64_t{1} << 61, absl::StatusCode::kResourceExhausted, Reason::kPages},
        // The table of 2^25 tokens needs 64 MiB, twice what the arena has.
        std::tuple{int64_t{1} << 25, absl::StatusCode::kResourceExhausted, Reason::kPages}}) {
    header.lengths = {length + 1};
    const Message tokens = {KvTokens{.at = length,
                                     .count = 1,
                                     .keys = {bytes.data(), kToken.key_bytes()},
                                     .values = {bytes.data(), kToken.value_bytes()}}};
    const auto imported = Import(b_.store, {{header}, tokens});
    EXPECT_EQ(imported.status().code(), status_code) << imported.status();
    EXPECT_EQ(ReasonOf(imported.status()), reason);
    EXPECT_EQ(b_.arena.committed_bytes(), 0);
  }
  Server small({.instance = "s", .max_bytes_per_caller = 64 * kTokenBytes + 100 * kPageTableBytes});
  const auto import = [&](int64_t pages) {
    header.lengths = {pages * 64 + 1};
    const Message tokens = {KvTokens{.at = pages * 64,
                                     .count = 1,
                                     .keys = {bytes.data(), kToken.key_bytes()},
                                     .values = {bytes.data(), kToken.value_bytes()}}};
    return Import(small.store, {{header}, tokens, {KvEnd{.chunks = 1}}});
  };
  EXPECT_EQ(ReasonOf(import(101).status()), Reason::kQuota);
  const auto imported = import(100);
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_EQ(imported->bytes, 64 * kTokenBytes);
  EXPECT_EQ(ReasonOf(import(1).status()), Reason::kQuota);
  ASSERT_TRUE(small.store.Close("me", {{imported->id}}).ok());
  EXPECT_TRUE(import(100).ok());
}

TEST_F(CacheTransferTest, PagesAndQuotasLimitAnImport) {
  const CacheInfo cache = Create({.shapes = {{.token = kToken}}, .reserve_tokens = 200});
  Append(cache.id, 0, 0, 150);
  auto messages = Export(a_.store, cache.id);
  Server small({.instance = "s", .max_bytes_per_caller = 3 * 64 * kTokenBytes});
  EXPECT_EQ(ReasonOf(Import(small.store, messages).status()), Reason::kQuota);
  std::get<KvHeader>(messages[0].part).cache.reserve_tokens = 192;
  const auto imported = Import(small.store, messages);
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_EQ(imported->bytes, 3 * 64 * kTokenBytes);
  EXPECT_EQ(ReasonOf(Import(small.store, messages).status()), Reason::kQuota);
  Server tiny({.instance = "s"}, /*slabs=*/0);
  EXPECT_EQ(ReasonOf(Import(tiny.store, messages).status()), Reason::kPages);
  Server few({.instance = "s", .max_caches_per_caller = 1});
  ASSERT_TRUE(Import(few.store, messages).ok());
  EXPECT_EQ(ReasonOf(Import(few.store, messages).status()), Reason::kQuota);
  EXPECT_EQ(few.store.caches(), 1);
}

TEST_F(CacheTransferTest, ANameIsUsedOnce) {
  const CacheInfo cache = Create({.name = "n", .shapes = {{.token = kToken}}});
  Append(cache.id, 0, 0, 100);
  const auto messages = Export(a_.store, cache.id);
  // Also for a cache that was made with the same arguments.
  EXPECT_EQ(Import(a_.store, messages).status().code(), absl::StatusCode::kAlreadyExists);
  // The first of two that ends.
  Importer first(b_.store, "me"), second(b_.store, "me"), other(b_.store, "other");
  for (const Message& message : messages) {
    for (Importer* importer : {&first, &second, &other}) {
      ASSERT_TRUE(importer->Take(message.part, {}).ok());
    }
  }
  EXPECT_EQ(b_.store.caches(), 0);
  EXPECT_TRUE(second.Finish().ok());
  EXPECT_EQ(first.Finish().status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(other.Finish().ok());
  EXPECT_EQ(b_.store.caches(), 2);
  EXPECT_EQ(b_.arena.used_bytes(), 2 * 2 * 64 * kTokenBytes);
}

TEST_F(CacheTransferTest, ADrainingServerImportsNothing) {
  const CacheInfo cache = Create({.shapes = {{.token = kToken}}});
  Append(cache.id, 0, 0, 100);
  const auto messages = Export(a_.store, cache.id, 50);
  Importer begun(b_.store, "me"), complete(b_.store, "me");
  ASSERT_TRUE(begun.Take(messages[0].part, {}).ok());
  for (const Message& message : messages) ASSERT_TRUE(complete.Take(message.part, {}).ok());
  b_.store.StopCreating();
  EXPECT_EQ(ReasonOf(begun.Take(messages[1].part, {})), Reason::kDraining);
  EXPECT_EQ(ReasonOf(complete.Finish().status()), Reason::kDraining);
  EXPECT_EQ(ReasonOf(Import(b_.store, messages).status()), Reason::kDraining);
  a_.store.StopCreating();
  EXPECT_TRUE(a_.store.Freeze("me", cache.id, 1).ok());
}

}  // namespace
}  // namespace rapt::cache
