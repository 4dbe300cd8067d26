#include <optional>
#include <utility>

#include "client/cli/attention_caller.h"
#include "client/cli/progress_bar.h"

namespace rapt {
namespace {

class RemoteCaller final : public AttentionCaller {
 public:
  RemoteCaller(std::unique_ptr<client::Client> server, std::optional<int64_t> chunk)
      : server_(std::move(server)), chunk_(chunk) {}

  absl::StatusOr<client::AttendResult> Attend(const client::AttendCall& call) override {
    if (!chunk_) return server_->Attend(call);
    ProgressBar bar;
    client::StreamOptions stream;
    stream.query_chunk = stream.key_chunk = *chunk_;
    stream.progress = [&bar](const client::StreamProgress& now) {
      bar.Show(now.sent_bytes, now.bytes);
    };
    return server_->AttendStream(call, stream);
  }

  absl::StatusOr<client::BackwardResult> AttendBackward(const client::BackwardCall& call) override {
    return server_->AttendBackward(call);
  }

  absl::StatusOr<client::Diagnosis> Diagnose(const client::AttendCall& call) override {
    return server_->Diagnose(call);
  }

  absl::StatusOr<client::Diagnosis> Diagnose(const client::BackwardCall& call) override {
    return server_->Diagnose(call);
  }

 private:
  const std::unique_ptr<client::Client> server_;
  const std::optional<int64_t> chunk_;  // absent: calls are sent whole
};

}  // namespace

std::unique_ptr<AttentionCaller> NewRemoteCaller(std::unique_ptr<client::Client> server,
                                                 std::optional<int64_t> chunk) {
  return std::make_unique<RemoteCaller>(std::move(server), chunk);
}

}  // namespace rapt
