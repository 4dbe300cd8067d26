// One AttendStream on a connection.
#ifndef RAPT_CLIENT_CPP_STREAM_CALL_H_
#define RAPT_CLIENT_CPP_STREAM_CALL_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "client/cpp/borrowed_payloads.h"
#include "client/cpp/connections.h"
#include "client/cpp/stream_codec.h"

namespace rapt::client {

// Sends the chunks of a call, one write at a time, and reads responses meanwhile, all on the
// calling thread. Use once.
class StreamCall {
 public:
  // REQUIRES: all arguments outlive this object. Run() does not wait until gRPC has released
  // `payloads`.
  StreamCall(const Connection& connection, grpc::ClientContext& context, const ChunkedCall& chunked,
             const StreamOptions& options, BorrowedPayloads& payloads, StreamResult& result);

  // Blocks until the call has finished. Sets `own_error` if the client or the function that makes
  // chunks failed.
  grpc::Status Run(absl::Status& own_error);

 private:
  void OnStarted(bool ok);
  void OnWritten(bool ok);
  void OnRead(bool ok);
  void WriteNext();
  void Read();
  absl::StatusOr<grpc::ByteBuffer> NextChunk();
  absl::Status TakeResponse();
  void Abort(const absl::Status& why);

  grpc::ClientContext& context_;
  const ChunkedCall& chunked_;
  const StreamOptions& options_;
  BorrowedPayloads& payloads_;
  StreamResult& result_;
  grpc::CompletionQueue queue_;
  const std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;

  size_t next_chunk_ = 0;
  StreamProgress progress_;
  bool is_writing_ = false;
  bool is_closed_ = false;  // no more writes
  bool is_read_ = false;    // no more reads
  absl::Status own_error_;
  grpc::ByteBuffer sent_;
  grpc::ByteBuffer received_;
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_STREAM_CALL_H_
