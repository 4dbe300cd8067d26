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
  absl::StatusOr<cache::KvPart> part = DecodeKvChunk(message);
  if (!part.ok()) return End(part.status(), Stage::kReceive);
  const int64_t workspace_bytes = cache::Importer::WorkspaceBytes(*part);
  Compute(cache::MakePreparation(
      [this, part = *std::move(part)](absl::Span<std::byte> workspace) {
        return importer_->Take(part, workspace);
      },
      message.size, workspace_bytes));
}

void CacheImportCall::OnHalfClose() {
  absl::StatusOr<cache::CacheInfo> info = importer_->Finish();
  if (!info.ok()) return End(info.status(), Stage::kReceive);
  Send(EncodeCache(*info), {});
}

}  // namespace rapt::native
