#include "server/wire/rapt/cache_import_call.h"

#include <utility>

#include "server/cache/preparation.h"
#include "server/protocols/rapt/cache_codec.h"
#include "server/wire/rapt/cache_methods.h"

namespace rapt::native {

absl::Status CacheImportCall::Check() {
  if (store_ == nullptr) return NoCaches();
  importer_.emplace(*store_, call().caller());
  return absl::OkStatus();
}

void CacheImportCall::OnMessage(const MessageBytes& message) {
  absl::StatusOr<DecodedKvChunk> chunk = DecodeKvChunk(message);
  if (!chunk.ok()) return End(chunk.status(), Stage::kReceive);
  const int64_t workspace_bytes = cache::Importer::WorkspaceBytes(chunk->part);
  Compute(cache::MakePreparation(
      [this, chunk = *std::move(chunk)](absl::Span<std::byte> workspace) {
        absl::Status status = CheckChecksum(chunk);
        return status.ok() ? importer_->Take(chunk.part, workspace) : status;
      },
      message.size, workspace_bytes));
}

void CacheImportCall::OnHalfClose() {
  absl::StatusOr<cache::CacheInfo> info = importer_->Finish();
  if (!info.ok()) return End(info.status(), Stage::kReceive);
  Send(EncodeCache(*info), {});
}

}  // namespace rapt::native
