#include "server/wire/rapt/cache_transfer_calls.h"

#include <cstddef>
#include <memory>
#include <utility>

#include "base/status_macros.h"
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

// The transport may keep it beyond the call.
struct CacheExportCall::Buffer {
  MessageReservation memory;
  std::unique_ptr<std::byte[]> bytes;
};

absl::Status CacheExportCall::Check() { return store_ == nullptr ? NoCaches() : absl::OkStatus(); }

void CacheExportCall::OnMessage(const MessageBytes& message) {
  absl::Status status = Start(message);
  if (!status.ok()) return End(std::move(status), Stage::kReceive);
  ReleaseMessage();
  const int64_t bytes = exporter_->largest_chunk_bytes();
  Reserve(bytes, [this](MessageReservation memory) {
    first_memory_ = std::move(memory);
    Send(EncodeKvHeader(exporter_->header()), {.receive = true});
  });
}

absl::Status CacheExportCall::Start(const MessageBytes& message) {
  RAPT_ASSIGN_OR_RETURN(v1::ExportRequest request, DecodeExport(message));
  RAPT_ASSIGN_OR_RETURN(cache::CacheSnapshot snapshot,
                        store_->Freeze(call().caller(), request.cache(), request.generation()));
  exporter_.emplace(std::move(snapshot), request.chunk_tokens(),
                    call().limits().max_message_bytes - kMaxKvFieldBytes);
  return absl::OkStatus();
}

void CacheExportCall::OnHalfClose() {
  End(absl::InvalidArgumentError("the call ended without a request"), Stage::kReceive);
}

void CacheExportCall::OnSent() {
  if (has_sent_end_) return End(absl::OkStatus(), Stage::kSend);
  if (const auto chunk = exporter_->Next()) return CopyChunk(*chunk);
  has_sent_end_ = true;
  Send(EncodeKvEnd({.chunks = exporter_->chunks()}), {.receive = true});
}

// The transport may still hold the last bytes of the chunk before, so each has a buffer of its own.
void CacheExportCall::RenewBuffer() {
  const int64_t bytes = exporter_->largest_chunk_bytes();
  buffer_ = std::make_shared<Buffer>();
  buffer_->memory = first_memory_.bytes() > 0
                        ? std::exchange(first_memory_, {})
                        : call().engine().ChargeMessage(bytes, call().caller_memory());
  buffer_->bytes = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(bytes));
}

void CacheExportCall::CopyChunk(const cache::Exporter::Chunk& chunk) {
  chunk_ = chunk;
  RenewBuffer();
  Compute(cache::MakePreparation(
      [this](absl::Span<std::byte>) {
        std::byte* const keys = buffer_->bytes.get();
        std::byte* const values = keys + chunk_.key_bytes;
        exporter_->Copy(chunk_, keys, values);
        crc32_ = ChecksumOf({.layer = chunk_.layer,
                             .at = chunk_.at,
                             .count = chunk_.count,
                             .keys = {keys, chunk_.key_bytes},
                             .values = {values, chunk_.value_bytes}});
        return absl::OkStatus();
      },
      chunk.key_bytes + chunk.value_bytes));
}

void CacheExportCall::OnComputed(Result) {
  const std::byte* const keys = buffer_->bytes.get();
  const auto bytes_at = [](const std::byte* begin, int64_t count) {
    return absl::Span<const std::byte>(begin, static_cast<size_t>(count));
  };
  Send(EncodeKvTokens(chunk_, crc32_, {bytes_at(keys, chunk_.key_bytes), buffer_},
                      {bytes_at(keys + chunk_.key_bytes, chunk_.value_bytes), buffer_}),
       {.receive = true});
}

void CacheExportCall::Release() {
  first_memory_ = {};
  buffer_ = nullptr;
  exporter_.reset();
}

}  // namespace rapt::native
