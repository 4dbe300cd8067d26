// A gRPC server with a scripted Attend; AttendBackward runs the same script on its call and returns
// Y as the gradient dq; its other methods fail. It shows faults that the real
// server does not have on demand. Uses real sockets on a free loopback port.
#ifndef RAPT_TESTS_CLIENT_CPP_SCRIPTED_SERVER_H_
#define RAPT_TESTS_CLIENT_CPP_SCRIPTED_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "proto/rapt/v1/attention.grpc.pb.h"

namespace rapt::test {

// Thread-safe.
class ScriptedServer {
 public:
  // Returns the status of one call; nullopt: the call is never answered and ends when its caller
  // cancels it. Runs on gRPC's threads, concurrently.
  using Script =
      std::function<std::optional<grpc::Status>(const v1::AttendRequest&, v1::AttendResponse&)>;

  // kRegistered: callers may register shared memory, which the server does not read.
  enum class SharedMemory { kNone, kRegistered };

  explicit ScriptedServer(Script script, SharedMemory shared_memory = SharedMemory::kNone);
  ~ScriptedServer();

  const std::string& address() const { return address_; }

  int calls() const;
  // The messages of Attend, AttendBackward and Diagnose, in order.
  std::vector<size_t> message_bytes() const;
  // The peers of the connections that carried calls.
  std::set<std::string> peers() const;

  // Block until this number of calls has arrived; until this number of unanswered calls was
  // cancelled.
  void WaitForCalls(int count) const;
  void WaitForCancellations(int count) const;

 private:
  class Service;
  class Regions;

  std::unique_ptr<Service> service_;
  std::unique_ptr<Regions> regions_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

// Returns Q as Y.
std::optional<grpc::Status> Echo(const v1::AttendRequest& request, v1::AttendResponse& response);

// Never answers.
std::optional<grpc::Status> Hang(const v1::AttendRequest& request, v1::AttendResponse& response);

// A loopback address without a listener.
std::string DeadAddress();

}  // namespace rapt::test

#endif  // RAPT_TESTS_CLIENT_CPP_SCRIPTED_SERVER_H_
