#include <utility>

#include "client/cli/attention_caller.h"
#include "client/cli/progress_bar.h"

namespace rapt {
namespace {

class RemoteCaller : public AttentionCaller {
 public:
  explicit RemoteCaller(std::unique_ptr<client::Client> server) : server_(std::move(server)) {}

  absl::StatusOr<client::AttendResult> Attend(const client::AttendCall& call) override {
    return server_->Attend(call);
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

 protected:
  client::Client& server() { return *server_; }

 private:
  const std::unique_ptr<client::Client> server_;
};

// Sends calls of attention in chunks.
class StreamCaller final : public RemoteCaller {
 public:
  StreamCaller(std::unique_ptr<client::Client> server, int64_t chunk)
      : RemoteCaller(std::move(server)), chunk_(chunk) {}

  absl::StatusOr<client::AttendResult> Attend(const client::AttendCall& call) override {
    ProgressBar bar;
    client::StreamOptions stream;
    stream.query_chunk = stream.key_chunk = chunk_;
    stream.progress = [&bar](const client::StreamProgress& now) {
      bar.Show(now.sent_bytes, now.bytes);
    };
    return server().AttendStream(call, stream);
  }

 private:
  const int64_t chunk_;
};

}  // namespace

std::unique_ptr<AttentionCaller> NewRemoteCaller(std::unique_ptr<client::Client> server) {
  return std::make_unique<RemoteCaller>(std::move(server));
}

std::unique_ptr<AttentionCaller> NewStreamCaller(std::unique_ptr<client::Client> server,
                                                 int64_t chunk) {
  return std::make_unique<StreamCaller>(std::move(server), chunk);
}

}  // namespace rapt
