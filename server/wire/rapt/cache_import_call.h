// Import: a cache of the chunks that its caller sends.
#ifndef RAPT_SERVER_WIRE_RAPT_CACHE_IMPORT_CALL_H_
#define RAPT_SERVER_WIRE_RAPT_CACHE_IMPORT_CALL_H_

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

}  // namespace rapt::native

#endif  // RAPT_SERVER_WIRE_RAPT_CACHE_IMPORT_CALL_H_
