#include "rapt/cache_transfer.h"

#include <chrono>
#include <functional>
#include <optional>
#include <stop_token>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "client/cpp/cache_calls.h"
#include "client/cpp/cache_codec.h"
#include "client/cpp/codec.h"
#include "client/cpp/kv_messages.h"

namespace rapt::client {
namespace {

// One call of Export. Cancelled by its destructor unless it has ended.
class ExportCall {
 public:
  ExportCall(UnaryCalls& calls, const v1::ExportRequest& request, const Deadline& deadline,
             std::stop_token stop)
      : calls_(calls),
        connection_(calls.connections().exports()),
        stop_(std::move(stop)),
        on_stop_(stop_, [this] { context_.TryCancel(); }) {
    context_.set_deadline(deadline.ToGrpc());
    stream_ = connection_.cache->Export(&context_, request);
  }
  ~ExportCall() {
    if (has_ended_) return;
    context_.TryCancel();
    Finish().IgnoreError();
  }

  bool Read(v1::KvChunk& message) { return stream_->Read(&message); }

  // Returns the status of the call. REQUIRES: no message is left.
  absl::Status Finish() {
    has_ended_ = true;
    const grpc::Status status = stream_->Finish();
    return calls_.StatusOf(status, context_, stop_.stop_requested());
  }

  grpc::Channel& channel() const { return *connection_.channel; }

 private:
  UnaryCalls& calls_;
  const Connection& connection_;
  const std::stop_token stop_;
  grpc::ClientContext context_;
  std::stop_callback<std::function<void()>> on_stop_;
  std::unique_ptr<grpc::ClientReader<v1::KvChunk>> stream_;
  bool has_ended_ = false;
};

class ExportReader final : public KvMessageReader {
 public:
  ExportReader(UnaryCalls& calls, const ExportOptions& cache, const CallOptions& options)
      : calls_(calls), deadline_(calls.DeadlineOf(options)), stop_(options.stop) {
    request_.set_cache(cache.id);
    request_.set_generation(cache.generation);
    request_.set_chunk_tokens(cache.chunk_tokens);
  }

  absl::StatusOr<CacheHeader> Begin() override {
    for (int attempts = 1;; ++attempts) {
      absl::StatusOr<CacheHeader> header = KvMessageReader::Begin();
      if (header.ok()) return header;
      const auto delay =
          calls_.DelayBeforeRetry(calls_.options().retries, header.status(), attempts, deadline_);
      if (!delay) return header;
      if (!WaitBeforeRetry(*delay, call_->channel(), stop_)) return StopRequested();
    }
  }

 private:
  absl::Status Open() override {
    call_.reset();
    call_ = std::make_unique<ExportCall>(calls_, request_, deadline_, stop_);
    return absl::OkStatus();
  }

  absl::Status Read(v1::KvChunk& message) override {
    if (call_->Read(message)) return absl::OkStatus();
    RAPT_RETURN_IF_ERROR(call_->Finish());
    return Malformed("the stream ended without an end");
  }

  absl::Status Finish() override {
    if (v1::KvChunk message; call_->Read(message)) return Malformed("a message came after the end");
    return call_->Finish();
  }

  absl::Status Malformed(absl::string_view why) const override { return MalformedResponse(why); }

  UnaryCalls& calls_;
  const Deadline deadline_;
  const std::stop_token stop_;
  v1::ExportRequest request_;
  std::unique_ptr<ExportCall> call_;
};

using Clock = CacheLease::Clock;

// Returns the shapes as the server says them.
std::vector<LayerShape> Normalized(std::vector<LayerShape> shapes) {
  for (LayerShape& shape : shapes) {
    if (shape.value_head_size == 0) shape.value_head_size = shape.head_size;
  }
  return shapes;
}

bool IsWhatWasSent(const CacheInfo& info, const CacheHeader& sent) {
  return info.name == sent.cache.name && info.lengths == sent.lengths &&
         info.dtype == sent.cache.dtype && info.storage == sent.cache.storage &&
         info.generation == 1 && info.first_position == sent.cache.first_position &&
         Normalized(info.shapes) == Normalized(sent.cache.shapes);
}

// Returns the caller's cache of that name if it holds what the header says, and its lease did not
// begin before `began`, if that is given; NotFound otherwise.
absl::StatusOr<CacheInfo> FindImported(Client& client, const CacheHeader& header,
                                       std::optional<Clock::time_point> began,
                                       const CallOptions& options) {
  RAPT_ASSIGN_OR_RETURN(std::vector<CacheInfo> named,
                        ListCaches(client, header.cache.name, options));
  const Clock::time_point now = Clock::now();
  constexpr std::chrono::milliseconds kRounding{1};  // of expires_in
  for (CacheInfo& info : named) {
    const bool is_new = !began || info.lease - info.expires_in <= now - *began + kRounding;
    if (is_new && IsWhatWasSent(info, header)) return std::move(info);
  }
  return absl::NotFoundError("no such cache");
}

}  // namespace

std::unique_ptr<CacheReader> ExportCache(Client& client, const ExportOptions& cache,
                                         const CallOptions& options) {
  return std::make_unique<ExportReader>(CacheCalls::Of(client).calls(), cache, options);
}

absl::StatusOr<Cache> ImportCache(Client& client, CacheReader& from, const ImportOptions& import,
                                  const CallOptions& options) {
  CacheCalls& caches = CacheCalls::Of(client);
  UnaryCalls& calls = caches.calls();
  const Deadline deadline = calls.DeadlineOf(options);
  const Clock::time_point began = Clock::now();
  const std::string drawn = DrawName();
  CacheHeader sent;
  const auto change = [&](CacheHeader& header) {
    std::string& name = header.cache.name;
    if (!import.name.empty()) name = import.name;
    if (name.empty() || IsDrawn(name)) name = drawn;
    if (import.lease) header.cache.lease = *import.lease;
    sent = header;
  };
  absl::Status read;  // of `from`
  int attempts = 0;
  Clock::time_point start;
  const auto send = [&](const Connection& connection, grpc::ClientContext* context,
                        v1::Cache* made) {
    ++attempts;
    start = Clock::now();
    const auto stream = connection.cache->Import(context, made);
    read = WriteKvMessages(from, change,
                           [&](const v1::KvChunk& message) { return stream->Write(message); });
    if (read.ok()) {
      stream->WritesDone();
      return stream->Finish();
    }
    context->TryCancel();
    stream->Finish();
    return grpc::Status(grpc::StatusCode::ABORTED, "");  // is not retried
  };
  const absl::StatusOr<v1::Cache> made =
      calls.Call<v1::Cache>(options, deadline, calls.options().retries, send);
  if (!read.ok()) return read;
  absl::StatusOr<CacheInfo> info = made.ok() ? Decode(*made) : made.status();
  if (absl::IsAlreadyExists(made.status()) && attempts > 1) {
    // Nobody else has a name that this call has drawn.
    const auto earliest =
        sent.cache.name == drawn ? std::nullopt : std::optional<Clock::time_point>(began);
    info = FindImported(client, sent, earliest, {.timeout = deadline.left(), .stop = options.stop});
    if (!info.ok()) return made.status();
  }
  if (!info.ok()) return info.status();
  return OwnCache(caches, *info, start);
}

}  // namespace rapt::client
