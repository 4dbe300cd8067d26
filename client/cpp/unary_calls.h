// Unary calls to the server, with deadlines, stops and retries.
#ifndef RAPT_CLIENT_CPP_UNARY_CALLS_H_
#define RAPT_CLIENT_CPP_UNARY_CALLS_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <stop_token>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "client/cpp/borrowed_payloads.h"
#include "client/cpp/connections.h"
#include "client/cpp/deadline.h"
#include "client/cpp/request_message.h"
#include "rapt/client.h"

namespace rapt::client {

absl::Status StopRequested();

// Returns false if a stop was requested meanwhile. Waits on the channel because gRPC reconnects
// promptly only while a caller waits; otherwise it polls every 5 s, long after the last retry.
bool WaitBeforeRetry(std::chrono::nanoseconds delay, grpc::Channel& channel,
                     const std::stop_token& stop);

// Sends a serialized request. Blocks until the call has finished.
template <typename Response>
grpc::Status SendAndWait(const Connection& connection, const char* method,
                         grpc::ClientContext& context, const grpc::ByteBuffer& request,
                         Response& response) {
  grpc::CompletionQueue queue;
  grpc::TemplatedGenericStub<grpc::ByteBuffer, Response> stub(connection.channel);
  const auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
  call->StartCall();
  grpc::Status status;
  call->Finish(&response, &status, nullptr);
  void* tag;
  bool ok;
  queue.Next(&tag, &ok);
  return status;
}

// Thread-safe.
class UnaryCalls {
 public:
  UnaryCalls(const std::string& address, const Options& options,
             const std::shared_ptr<grpc::ChannelCredentials>& credentials);

  const Options& options() const { return options_; }
  Connections& connections() { return connections_; }

  Deadline DeadlineOf(const CallOptions& options) const {
    return Deadline::After(options.timeout.value_or(options_.default_timeout));
  }

  std::optional<std::chrono::nanoseconds> DelayBeforeRetry(const RetryPolicy& policy,
                                                           const absl::Status& status, int attempts,
                                                           const Deadline& deadline);

  // Makes attempts until one succeeds or fails with a final error; `attempts` were made before.
  // `deadline` is the absolute form of the timeout in `options`. `method` is a blocking call:
  // grpc::Status(const Connection&, grpc::ClientContext*, Response*).
  template <typename Response, typename Method>
  absl::StatusOr<Response> Call(const CallOptions& options, const Deadline& deadline,
                                const RetryPolicy& policy, const Method& method, int attempts = 0);

  // The same for a method of generated code, such as &v1::CacheService::Stub::Create.
  template <typename Stub, typename Request, typename Response>
  absl::StatusOr<Response> Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                             Response*),
                                const Request& request, const CallOptions& options,
                                const RetryPolicy& policy) {
    return Call<Response>(
        options, DeadlineOf(options), policy,
        [&](const Connection& connection, grpc::ClientContext* context, Response* response) {
          return (connection.StubOf<Stub>().*method)(context, request, response);
        });
  }
  template <typename Stub, typename Request, typename Response>
  absl::StatusOr<Response> Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                             Response*),
                                const Request& request, const CallOptions& options) {
    return Call(method, request, options, options_.retries);
  }

  // Like Call(), for a method that takes a serialized request. On return, gRPC has released the
  // request's payloads.
  template <typename Response>
  absl::StatusOr<Response> Send(const char* method, const RequestMessage& request,
                                const CallOptions& options, const Deadline& deadline,
                                const RetryPolicy& policy, int attempts = 0);

  // Converts the status of a finished call, with the reason that its trailing metadata give.
  absl::Status StatusOf(const grpc::Status& status, const grpc::ClientContext& context,
                        bool was_stopped) const;

 private:
  const Options options_;
  Connections connections_;

  Mutex mutex_;
  std::minstd_rand random_ ABSL_GUARDED_BY(mutex_);
};

template <typename Response, typename Method>
absl::StatusOr<Response> UnaryCalls::Call(const CallOptions& options, const Deadline& deadline,
                                          const RetryPolicy& policy, const Method& method,
                                          int attempts) {
  for (++attempts;; ++attempts) {
    Response response;
    grpc::ClientContext context;
    context.set_deadline(deadline.ToGrpc());
    absl::Status status;
    grpc::Channel* channel;  // owned by connections_
    {
      const std::stop_callback stop(options.stop, [&context] { context.TryCancel(); });
      const ConnectionLease connection = connections_.LeastBusy();
      channel = connection->channel.get();
      const grpc::Status ended = method(*connection, &context, &response);
      status = StatusOf(ended, context, options.stop.stop_requested());
    }
    if (status.ok()) return response;
    const auto delay = DelayBeforeRetry(policy, status, attempts, deadline);
    if (!delay) return status;
    if (!WaitBeforeRetry(*delay, *channel, options.stop)) return StopRequested();
  }
}

template <typename Response>
absl::StatusOr<Response> UnaryCalls::Send(const char* method, const RequestMessage& request,
                                          const CallOptions& options, const Deadline& deadline,
                                          const RetryPolicy& policy, int attempts) {
  BorrowedPayloads payloads;
  absl::StatusOr<Response> response = Call<Response>(
      options, deadline, policy,
      [&](const Connection& connection, grpc::ClientContext* context, Response* message) {
        return SendAndWait(connection, method, *context, payloads.MakeBuffer(request), *message);
      },
      attempts);
  payloads.WaitUntilReleased();
  return response;
}

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_UNARY_CALLS_H_
