// The messages of Export and Import, and a reader of them.
#ifndef RAPT_CLIENT_CPP_KV_MESSAGES_H_
#define RAPT_CLIENT_CPP_KV_MESSAGES_H_

#include <cstdint>
#include <optional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/rapt/v1/cache.pb.h"
#include "rapt/cache_transfer.h"

namespace rapt::client {

// Reads a cache as the messages of its export.
class KvMessageReader : public CacheReader {
 public:
  absl::StatusOr<CacheHeader> Begin() override;
  absl::StatusOr<std::optional<CacheChunk>> Next() override;

 protected:
  // Goes to the first message.
  virtual absl::Status Open() = 0;
  // Reads the next one. It is an error if there is none.
  virtual absl::Status Read(v1::KvChunk& message) = 0;
  // Called after the end.
  virtual absl::Status Finish() { return absl::OkStatus(); }
  // Returns the error for messages that are not those of an export.
  virtual absl::Status Malformed(absl::string_view why) const = 0;

 private:
  absl::StatusOr<CacheChunk> Decode(v1::KvTokens tokens) const;

  CacheHeader header_;
  int64_t chunks_ = 0;
};

// Passes what `from` has to `write`, as messages: the header, the chunks, the end. Stops if `write`
// returns false. Returns an error of `from`. `change` may change the header.
absl::Status WriteKvMessages(CacheReader& from, absl::FunctionRef<void(CacheHeader&)> change,
                             absl::FunctionRef<bool(const v1::KvChunk&)> write);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_KV_MESSAGES_H_
