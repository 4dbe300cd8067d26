#include <utility>

#include "client/cli/attention_caller.h"

namespace rapt {
namespace {

class RemoteCaller : public AttentionCaller {
 public:
  explicit RemoteCaller(std::unique_ptr<client::Client> server) : server_(std::move(server)) {}

  absl::StatusOr<client::AttendResult> Attend(const client::AttendCall& call) override {
    return server_->Attend(call);
  }

  absl::StatusOr<client::Diagnosis> Diagnose(const client::AttendCall& call) override {
    return server_->Diagnose(call);
  }

 private:
  const std::unique_ptr<client::Client> server_;
};

}  // namespace

std::unique_ptr<AttentionCaller> NewRemoteCaller(std::unique_ptr<client::Client> server) {
  return std::make_unique<RemoteCaller>(std::move(server));
}

}  // namespace rapt
