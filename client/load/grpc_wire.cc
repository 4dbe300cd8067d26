#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <optional>

#include "base/status_macros.h"
#include "client/cpp/codec.h"
#include "client/cpp/deadline.h"
#include "client/cpp/reason.h"
#include "client/load/wire.h"
#include "proto/inference/grpc_service.grpc.pb.h"

namespace rapt::load {
namespace {

using std::chrono::nanoseconds;

// Its events arrive in the completion queue.
class GrpcStream final : public Stream {
 public:
  enum class Event : uint8_t { kStarted, kWrote, kRead, kFinished };
  struct Tag {
    GrpcStream* stream;
    Event event;
  };

  GrpcStream(const LoadClock& clock, std::unique_ptr<CallSource> source, const Interface& interface,
             const client::Connection& connection, grpc::CompletionQueue& queue)
      : Stream(clock, std::move(source)),
        interface_(interface),
        stub_(connection.channel),
        queue_(queue) {}

  // Returns true if the call has finished.
  bool On(Event event, bool ok) {
    switch (event) {
      case Event::kStarted:
        if (!ok) return FinishStream();
        Write();
        Read();
        return false;
      case Event::kWrote:
        --pending_;
        if (ok && next_message_ < call_.encoded->messages.size()) {
          Write();
          return false;
        }
        return FinishStream();
      case Event::kRead:
        --pending_;
        if (!ok) return FinishStream();
        if (record_.status.ok()) record_.status = StatusInResponse(interface_, incoming_);
        record_.response_bytes += static_cast<int64_t>(incoming_.Length());
        received_.push_back(incoming_);
        Read();
        return false;
      case Event::kFinished:
        Finish();
        return true;
    }
    return false;
  }

 private:
  bool is_unary() const { return interface_.transport != Transport::kStream; }

  void Send(nanoseconds timeout) override {
    context_.emplace();
    received_.clear();
    context_->set_deadline(client::Deadline::After(timeout).ToGrpc());
    if (is_unary()) {
      unary_ = stub_.PrepareUnaryCall(&*context_, call_.method, call_.encoded->messages.front(),
                                      &queue_);
      unary_->StartCall();
      unary_->Finish(&incoming_, &status_, &tags_[3]);
      return;
    }
    pending_ = 0;
    next_message_ = 0;
    streaming_ = stub_.PrepareCall(&*context_, call_.method, &queue_);
    streaming_->StartCall(&tags_[0]);
  }

  void Write() {
    const std::vector<grpc::ByteBuffer>& messages = call_.encoded->messages;
    grpc::WriteOptions options;
    const bool is_last = next_message_ + 1 == messages.size();
    if (is_last) options.set_last_message();
    ++pending_;
    streaming_->Write(messages[next_message_++], options, &tags_[1]);
  }

  void Read() {
    ++pending_;
    streaming_->Read(&incoming_, &tags_[2]);
  }

  bool FinishStream() {
    if (pending_ == 0) streaming_->Finish(&status_, &tags_[3]);
    return false;
  }

  void Finish() {
    if (is_unary()) {
      record_.response_bytes = static_cast<int64_t>(incoming_.Length());
      received_.push_back(incoming_);
    }
    if (!status_.ok()) {
      record_.status = absl::Status(static_cast<absl::StatusCode>(status_.error_code()),
                                    status_.error_message());
      client::SetReason(*context_, record_.status);
    }
    if (record_.status.ok()) {
      const auto& metadata = context_->GetServerTrailingMetadata();
      record_.server = ReadServerTimes([&metadata](const char* name) {
        const auto found = metadata.find(name);
        return found == metadata.end()
                   ? absl::string_view()
                   : absl::string_view(found->second.data(), found->second.size());
      });
    }
    End(std::exchange(received_, {}));
    incoming_.Clear();
    unary_.reset();
    streaming_.reset();
  }

  const Interface& interface_;
  grpc::GenericStub stub_;
  grpc::CompletionQueue& queue_;
  Tag tags_[4] = {{this, Event::kStarted},
                  {this, Event::kWrote},
                  {this, Event::kRead},
                  {this, Event::kFinished}};

  // State of the current call.
  std::optional<grpc::ClientContext> context_;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> unary_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> streaming_;
  grpc::ByteBuffer incoming_;
  grpc::Status status_;
  std::vector<grpc::ByteBuffer> received_;
  size_t next_message_ = 0;
  int pending_ = 0;  // writes and reads
};

class GrpcInbox final : public Inbox {
 public:
  GrpcInbox(const LoadClock& clock, const Interface& interface, client::Connections& connections)
      : clock_(clock), interface_(interface), connections_(connections) {}

 private:
  std::unique_ptr<Stream> NewStream(int index, std::unique_ptr<CallSource> source) override {
    return std::make_unique<GrpcStream>(clock_, std::move(source), interface_,
                                        connections_.at(index), queue_);
  }

  Stream* Next() override {
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) {
      const auto [stream, event] = *static_cast<GrpcStream::Tag*>(tag);
      if (stream->On(event, ok)) return stream;
    }
    return nullptr;
  }

  void Shutdown() override { queue_.Shutdown(); }

  const LoadClock& clock_;
  const Interface& interface_;
  client::Connections& connections_;
  grpc::CompletionQueue queue_;
};

class GrpcWire final : public Wire {
 public:
  GrpcWire(const std::string& address, const client::Options& options,
           const std::shared_ptr<grpc::ChannelCredentials>& credentials, Interface interface)
      : interface_(std::move(interface)), connections_(address, options, credentials) {}

 private:
  absl::Status WaitUntilReady(nanoseconds timeout) override {
    return connections_.WaitUntilReady(timeout);
  }

  ServerIdentity FetchIdentity() override {
    const client::Connection& connection = connections_.at(0);
    grpc::ClientContext context;
    context.set_deadline(client::Deadline::After(kIdentityTimeout).ToGrpc());
    if (interface_.protocol == Protocol::kRapt) {
      v1::GetServerInfoResponse response;
      if (!connection.attention->GetServerInfo(&context, {}, &response).ok()) return {};
      const client::ServerInfo info = client::Decode(response);
      return {"rapt-server", info.version, info.isa, info.compute_threads};
    }
    inference::ServerMetadataResponse response;
    const auto stub = inference::GRPCInferenceService::NewStub(connection.channel);
    if (!stub->ServerMetadata(&context, {}, &response).ok()) return {};
    return {response.name(), response.version(), "", 0};
  }

  const client::Connection* connection(int stream) override { return &connections_.at(stream); }

  std::unique_ptr<Inbox> NewInbox(const LoadClock& clock) override {
    return std::make_unique<GrpcInbox>(clock, interface_, connections_);
  }

  const Interface interface_;
  client::Connections connections_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Wire>> NewGrpcWire(const std::string& address,
                                                  const client::Options& options,
                                                  const Interface& interface) {
  RAPT_ASSIGN_OR_RETURN(const auto credentials, client::CredentialsFor(address, options));
  return std::make_unique<GrpcWire>(address, options, credentials, interface);
}

}  // namespace rapt::load
