// How calls reach a server: over gRPC or over HTTP.
#ifndef RAPT_CLIENT_LOAD_WIRE_H_
#define RAPT_CLIENT_LOAD_WIRE_H_

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/connections.h"
#include "client/load/recorder.h"
#include "client/load/requests.h"
#include "client/load/workload.h"

namespace rapt::load {

class Group;

// Time since the start of a load.
struct LoadClock {
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();

  std::chrono::nanoseconds Now() const { return std::chrono::steady_clock::now() - start; }
};

// Carries the calls of a source, one at a time. Thread-compatible: between Start() and the return
// of Inbox::Next(), only the inbox uses it.
class Stream {
 public:
  Stream(const LoadClock& clock, std::unique_ptr<CallSource> source)
      : clock_(clock), source_(std::move(source)) {}
  virtual ~Stream() = default;

  CallSource& source() { return *source_; }

  // Sends the next call, which ends `deadline` after it was due at the latest.
  void Start(size_t shape, std::chrono::nanoseconds due, std::chrono::nanoseconds deadline) {
    call_ = source_->Next(shape);
    record_ = {.shape = call_.shape, .due = due};
    record_.request_bytes = call_.encoded->message_bytes;
    record_.sent = clock_.Now();
    Send(due + deadline - record_.sent);
  }

  // Of the call that has ended.
  const CallRecord& record() const { return record_; }
  // Returns whether the record counts.
  bool counts() const { return call_.is_measured || !record_.status.ok(); }

  Group* group = nullptr;

 protected:
  // Sends call_.
  virtual void Send(std::chrono::nanoseconds timeout) = 0;
  // Call when the call has ended, with its status in the record.
  void End(std::vector<grpc::ByteBuffer> responses) {
    record_.done = clock_.Now();
    source_->OnDone(record_.status, std::move(responses));
  }

  OutgoingCall call_;
  CallRecord record_;

 private:
  const LoadClock& clock_;
  const std::unique_ptr<CallSource> source_;
};

// Receives the responses of its streams. Next() is for one thread.
class Inbox {
 public:
  virtual ~Inbox() = default;

  // Returns stream number `index` of the load. REQUIRES: no call has started.
  virtual std::unique_ptr<Stream> NewStream(int index, std::unique_ptr<CallSource> source) = 0;
  // Waits until a call has ended. Returns its stream, or null after Shutdown().
  virtual Stream* Next() = 0;
  // REQUIRES: no call is in flight. Thread-safe.
  virtual void Shutdown() = 0;
};

inline constexpr std::chrono::seconds kIdentityTimeout{5};

// The identity of the server, as far as it reports it.
struct ServerIdentity {
  std::string name;  // "rapt-server", or the name that an OIP server reports
  std::string version;
  std::string isa;  // of rapt-server only, like the next field
  int compute_threads = 0;
};

// The connections to one server.
class Wire {
 public:
  virtual ~Wire() = default;

  // Unavailable if no server answers.
  virtual absl::Status WaitUntilReady(std::chrono::nanoseconds timeout) = 0;
  // Fields that the server does not report are empty.
  virtual ServerIdentity FetchIdentity() = 0;
  // Returns the connection of a stream; null over HTTP, where streams have their own.
  virtual const client::Connection* connection(int stream) = 0;
  // `clock` outlives the inbox, and this.
  virtual std::unique_ptr<Inbox> NewInbox(const LoadClock& clock) = 0;
};

// The errors are InvalidArgument, for unusable options.
absl::StatusOr<std::unique_ptr<Wire>> NewGrpcWire(const std::string& address,
                                                  const client::Options& options,
                                                  const Interface& interface);
absl::StatusOr<std::unique_ptr<Wire>> NewHttpWire(const std::string& address,
                                                  const client::Options& options);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_WIRE_H_
