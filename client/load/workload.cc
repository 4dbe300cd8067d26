#include "client/load/workload.h"

#include <utility>

#include "base/status_macros.h"

namespace rapt::load {
namespace {

using EncodedCalls = std::vector<std::shared_ptr<const EncodedCall>>;

class RepeatedCalls final : public CallSource {
 public:
  RepeatedCalls(const Interface& interface, const std::vector<CallData>& calls,
                EncodedCalls encoded, const client::Connection* connection)
      : interface_(interface),
        calls_(calls),
        encoded_(std::move(encoded)),
        connection_(connection) {}

  absl::Status Prepare(size_t /*shape*/) override { return absl::OkStatus(); }

  OutgoingCall Next(size_t shape) override {
    shape_ = shape;
    return {.method = MethodOf(interface_), .encoded = encoded_[shape], .shape = shape};
  }

  void OnDone(const absl::Status& status, std::vector<grpc::ByteBuffer> responses) override {
    if (!status.ok()) return;
    last_ok_shape_ = static_cast<int64_t>(shape_);
    last_responses_ = std::move(responses);
  }

  absl::Status Check() const override {
    if (last_ok_shape_ < 0) return absl::NotFoundError("no successful call");
    const auto shape = static_cast<size_t>(last_ok_shape_);
    RAPT_ASSIGN_OR_RETURN(const std::string y,
                          ReadY(interface_, calls_[shape], *encoded_[shape], last_responses_));
    return calls_[shape].CheckY({reinterpret_cast<const std::byte*>(y.data()), y.size()});
  }

  void Release() override {
    for (const auto& call : encoded_) load::Release(*call, connection_);
  }

 private:
  const Interface& interface_;
  const std::vector<CallData>& calls_;
  const EncodedCalls encoded_;
  const client::Connection* connection_;
  size_t shape_ = 0;
  int64_t last_ok_shape_ = -1;
  std::vector<grpc::ByteBuffer> last_responses_;
};

class RepeatedWorkload final : public Workload {
 public:
  RepeatedWorkload(const Interface& interface, const std::vector<CallShape>& shapes, uint64_t seed)
      : interface_(interface), shapes_(shapes) {
    for (size_t i = 0; i < shapes.size(); ++i) calls_.emplace_back(shapes[i], seed + i);
  }

  const std::vector<CallShape>& shapes() const override { return shapes_; }

  absl::StatusOr<std::unique_ptr<CallSource>> NewSource(
      const client::Connection* connection) override {
    // Regions of shared memory belong to one stream; other calls are shared by all.
    if (encoded_.empty() || interface_.transport == Transport::kSharedMemory) {
      RAPT_ASSIGN_OR_RETURN(encoded_, EncodeAll(connection));
    }
    return std::make_unique<RepeatedCalls>(interface_, calls_, encoded_, connection);
  }

 private:
  absl::StatusOr<EncodedCalls> EncodeAll(const client::Connection* connection) const {
    EncodedCalls encoded;
    for (const CallData& data : calls_) {
      RAPT_ASSIGN_OR_RETURN(EncodedCall call, Encode(interface_, data, connection));
      encoded.push_back(std::make_shared<const EncodedCall>(std::move(call)));
    }
    return encoded;
  }

  const Interface interface_;
  const std::vector<CallShape> shapes_;
  std::vector<CallData> calls_;
  EncodedCalls encoded_;  // of the last stream
};

}  // namespace

std::unique_ptr<Workload> RepeatCalls(const Interface& interface,
                                      const std::vector<CallShape>& shapes, uint64_t seed) {
  return std::make_unique<RepeatedWorkload>(interface, shapes, seed);
}

}  // namespace rapt::load
