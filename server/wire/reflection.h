// gRPC server reflection, versions v1 and v1alpha, independent of the transport.
#ifndef RAPT_SERVER_WIRE_REFLECTION_H_
#define RAPT_SERVER_WIRE_REFLECTION_H_

#include <google/protobuf/descriptor.h>

#include <memory>
#include <set>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "proto/grpc/reflection/v1/reflection.pb.h"
#include "server/calls/call.h"
#include "server/calls/call_report.h"
#include "server/protocols/message_parts.h"
#include "server/wire/message_stream.h"
#include "server/wire/unary_method.h"

namespace rapt {

// Describes the served services and the files that define them. Other files of the process are not
// found. Thread-safe.
class Reflection {
 public:
  // Describes the services of both sets of methods and its own. REQUIRES: the program is linked
  // with the descriptor of each; `environment` outlives this.
  Reflection(const CallEnvironment& environment, const UnaryMethods& methods,
             const StreamMethods& stream_methods);

  // Adds the method of each version. Open to callers without a token. REQUIRES: this outlives them.
  void AddTo(StreamMethods& methods);

  // The message with the response, which may be an error. It refers to this.
  ResponseMessage Respond(const grpc::reflection::v1::ServerReflectionRequest& request) const;

 private:
  class Call;

  void AddFile(const google::protobuf::FileDescriptor& file);
  const google::protobuf::FileDescriptor* FileOf(
      const grpc::reflection::v1::ServerReflectionRequest& request) const;
  const google::protobuf::Descriptor* FindType(const std::string& name) const;
  void ListExtensions(const std::string& name,
                      grpc::reflection::v1::ServerReflectionResponse& response) const;

  const CallEnvironment& environment_;
  const CallObserver observe_ = [](const CallReport&) {};
  std::set<std::string> services_;
  // Serialized responses with the file and all files that it imports. Sent by reference: a caller
  // that does not read holds no copy.
  absl::flat_hash_map<const google::protobuf::FileDescriptor*, std::shared_ptr<const std::string>>
      files_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_REFLECTION_H_
