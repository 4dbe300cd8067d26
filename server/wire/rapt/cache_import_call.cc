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
  Compute(cache::MakePreparation(
      [this, part = *std::move(part)](absl::Span<std::byte>) { return importer_->Take(part); },
      message.size));
}

void CacheImportCall::OnHalfClose() {
  absl::StatusOr<cache::CacheInfo> info = importer_->Finish();
  if (!info.ok()) return End(info.status(), Stage::kReceive);
  Send(EncodeCache(*info), {});
}

}  // namespace rapt::native
