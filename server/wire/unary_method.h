// A unary method, independent of the transport that carries its calls.
#ifndef RAPT_SERVER_WIRE_UNARY_METHOD_H_
#define RAPT_SERVER_WIRE_UNARY_METHOD_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/operator.h"
#include "base/status_macros.h"
#include "server/calls/call.h"
#include "server/protocols/bounds.h"
#include "server/protocols/message_parts.h"
#include "server/protocols/response_size.h"

namespace rapt {

// A unary call as its method sees it.
class MethodCall {
 public:
  virtual Call& call() = 0;

  // Returns the memory that the transport needs to encode a response with these outputs, to be
  // reserved together with them; ResourceExhausted if the response would be too large. By default,
  // that of Protocol Buffers, which reference the outputs.
  virtual absl::StatusOr<int64_t> EncodingBytes(absl::Span<const TensorSpec* const> outputs) {
    RAPT_RETURN_IF_ERROR(CheckResponseSize(outputs));
    return 0;
  }

  // Finish the call: neither its message nor its handler must be used afterwards. Call one of them
  // once, on any thread.
  virtual void Respond(ResponseMessage response) = 0;
  virtual void End(absl::Status status) = 0;

 protected:
  ~MethodCall() = default;
};

// The handler of one call's message.
class MessageHandler {
 public:
  virtual ~MessageHandler() = default;

  // Leads to call.Respond() or call.End(). The message and the call stay valid until then.
  virtual void OnMessage(const MessageBytes& message, MethodCall& call) = 0;
};

struct UnaryMethod {
  CallObserver observe = {};
  MethodTraits traits = {};
  std::function<std::unique_ptr<MessageHandler>()> new_handler = {};
};

// By path: "/inference.GRPCInferenceService/ModelInfer".
using UnaryMethods = absl::flat_hash_map<std::string, UnaryMethod>;

// The handler of a method without tensors: `service` has absl::Status Respond(request, response&),
// or Respond(caller, request, response&) with the caller's identity.
template <typename Service, typename ProtoRequest, typename ProtoResponse>
class SmallHandler final : public MessageHandler {
 public:
  explicit SmallHandler(Service& service) : service_(service) {}

 private:
  void OnMessage(const MessageBytes& message, MethodCall& call) override {
    ProtoRequest request;
    if (absl::Status status = ParseRequest(message.ToString(), request); !status.ok()) {
      return call.End(std::move(status));
    }
    ProtoResponse response;
    if (absl::Status status = Respond(call.call().caller(), request, response); !status.ok()) {
      return call.End(std::move(status));
    }
    ResponseMessage serialized;
    serialized.Append(response.SerializeAsString());
    call.Respond(std::move(serialized));
  }

  absl::Status Respond(const std::string& caller, const ProtoRequest& request,
                       ProtoResponse& response) {
    if constexpr (requires { service_.Respond(caller, request, response); }) {
      return service_.Respond(caller, request, response);
    } else {
      return service_.Respond(request, response);
    }
  }

  Service& service_;
};

// REQUIRES: `service` outlives the method.
template <typename ProtoRequest, typename ProtoResponse, typename Service>
UnaryMethod SmallMethod(Service& service, const CallObserver& observe, bool is_public = false) {
  return {.observe = observe,
          .traits = {.carries_tensors = false, .is_public = is_public},
          .new_handler = [&service] {
            return std::make_unique<SmallHandler<Service, ProtoRequest, ProtoResponse>>(service);
          }};
}

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_UNARY_METHOD_H_
