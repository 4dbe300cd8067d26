// ModelInfer calls for benchmarks. Requests are serialized in advance, so that sending one costs
// the same for every peer.
#ifndef RAPT_BENCH_INFER_CALL_H_
#define RAPT_BENCH_INFER_CALL_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "bench/server_process.h"

namespace rapt::bench {

using Seconds = std::chrono::duration<double>;

inline Seconds Since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::steady_clock::now() - begin;
}

// FP32 attention over zeros.
struct InferShape {
  int64_t heads = 1;
  int64_t queries = 1;
  int64_t keys = 1;
  int64_t size = 64;
  std::optional<int64_t> window = {};  // visible keys on either side of a query; absent: all
  std::string region = "";  // registered shared memory with Q, K and V, one after the other
};
std::string SerializedInfer(const InferShape& shape);

// References `message`. REQUIRES: `message` outlives the result.
grpc::ByteBuffer BufferOf(const std::string& message);

// Opens a separate connection.
std::shared_ptr<grpc::Channel> Connect(const std::string& address);

// Overlapping calls from one thread. Each has a deadline of 20 s, so every wait ends.
class InferCaller {
 public:
  // `address` is "127.0.0.1:8001" or "unix:PATH". Opens separate connections, which calls use in
  // turn.
  explicit InferCaller(const std::string& address, int connections = 1);
  // Cancels the calls in flight.
  ~InferCaller();
  InferCaller(const InferCaller&) = delete;
  InferCaller& operator=(const InferCaller&) = delete;

  // Starts a call. A large request is sent while a thread is in Wait().
  void Start(const grpc::ByteBuffer& request);
  // May run on another thread during Wait().
  void CancelAll();

  struct Ended {
    grpc::Status status;
    Seconds took;
  };
  // Waits for any call. REQUIRES: one was started.
  Ended WaitForOne();

  // The same, but aborts if the call failed.
  Seconds ExpectOne();
  Seconds CallOnce(const grpc::ByteBuffer& request);

 private:
  struct Call;

  grpc::CompletionQueue queue_;
  std::vector<grpc::GenericStub> stubs_;
  size_t next_ = 0;  // of stubs_
  Mutex mutex_;
  std::map<Call*, std::unique_ptr<Call>> calls_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt::bench

#endif  // RAPT_BENCH_INFER_CALL_H_
