// Import and Export: a cache of the chunks that its caller sends, and as a stream of chunks.
#ifndef RAPT_SERVER_WIRE_RAPT_CACHE_TRANSFER_CALLS_H_
#define RAPT_SERVER_WIRE_RAPT_CACHE_TRANSFER_CALLS_H_

#include <memory>
#include <optional>

#include "server/cache/cache_store.h"
#include "server/cache/cache_transfer.h"
#include "server/wire/rapt/stepwise_call.h"

namespace rapt::native {

// Each message is received and copied to pages. The cache exists once the caller has half-closed
// the stream; if the call ends earlier, its pages are free.
class CacheImportCall final : public StepwiseCall {
 public:
  // Null `store`: the server keeps no caches. Otherwise it outlives the call, as does `observe`.
  //
  // The store refuses drafts while the server drains, so that callers receive the reason.
  CacheImportCall(const CallEnvironment& environment, const CallObserver& observe,
                  MessageStream& stream, cache::CacheStore* store)
      : StepwiseCall(environment, observe, stream, "its cache", {.serves_while_draining = true}),
        store_(store) {}

 private:
  absl::Status Check() override;
  void OnMessage(const MessageBytes& message) override;
  void OnHalfClose() override;
  void OnComputed(Result) override { Receive(); }
  void OnSent() override { End(absl::OkStatus(), Stage::kSend); }
  AdmissionGate::Shares Held() const override { return {}; }
  void Release() override { importer_.reset(); }

  cache::CacheStore* const store_;
  std::optional<cache::Importer> importer_;
};

// The chunks are copied to one buffer, each when the one before has been sent. Its memory is
// reserved once. A server that drains serves the call.
class CacheExportCall final : public StepwiseCall {
 public:
  // Null `store`: the server keeps no caches. Otherwise it outlives the call, as does `observe`.
  CacheExportCall(const CallEnvironment& environment, const CallObserver& observe,
                  MessageStream& stream, cache::CacheStore* store)
      : StepwiseCall(environment, observe, stream, "a place", {.serves_while_draining = true}),
        store_(store) {}

 private:
  struct Buffer;

  absl::Status Check() override;
  void OnMessage(const MessageBytes& message) override;
  void OnHalfClose() override;
  void OnComputed(Result result) override;
  void OnSent() override;
  AdmissionGate::Shares Held() const override { return {}; }
  void Release() override;

  absl::Status Start(const MessageBytes& message);
  void RenewBuffer();
  void CopyChunk(const cache::Exporter::Chunk& chunk);

  cache::CacheStore* const store_;
  std::optional<cache::Exporter> exporter_;  // since the request
  cache::Exporter::Chunk chunk_;             // in the buffer
  uint32_t crc32_ = 0;                       // of the chunk
  MessageReservation first_memory_;          // of the first buffer, for which the call waits
  std::shared_ptr<Buffer> buffer_;           // of the current chunk; sent messages hold it, too
  bool has_sent_end_ = false;
};

}  // namespace rapt::native

#endif  // RAPT_SERVER_WIRE_RAPT_CACHE_TRANSFER_CALLS_H_
