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

// The handler of a method whose request the engine computes.
class ComputedHandler : public MessageHandler {
 private:
  // Returns the request, without what its call binds.
  virtual absl::StatusOr<Request> Decode(const MessageBytes& message, MethodCall& call) = 0;
  virtual void Record(const Result& result, MethodCall& call) { call.call().Record(result); }
  // Returns the response. REQUIRES: the request has succeeded.
  virtual ResponseMessage Encode(const Result& result, MethodCall& call) = 0;

  void OnMessage(const MessageBytes& message, MethodCall& call) final {
    absl::StatusOr<Request> request = Decode(message, call);
    if (!request.ok()) return call.End(request.status());
    call.call().Bind(*request);
    call.call().engine().Submit(*std::move(request), [this, &call](Result result) {
      Record(result, call);
      if (!result.status.ok()) return call.End(std::move(result.status));
      call.Respond(Encode(result, call));
    });
  }
};

// The function of a method without tensors. One that takes long ends when `call` is over.
template <typename ProtoRequest, typename ProtoResponse>
using SmallFunction = std::function<absl::Status(const Call& call, const ProtoRequest& request,
                                                 ProtoResponse& response)>;

template <typename ProtoRequest, typename ProtoResponse>
class SmallHandler final : public MessageHandler {
 public:
  using Function = SmallFunction<ProtoRequest, ProtoResponse>;

  explicit SmallHandler(const Function& function) : function_(function) {}

 private:
  void OnMessage(const MessageBytes& message, MethodCall& call) override {
    ProtoRequest request;
    if (absl::Status status = ParseRequest(message.ToString(), request); !status.ok()) {
      return call.End(std::move(status));
    }
    ProtoResponse response;
    if (absl::Status status = function_(call.call(), request, response); !status.ok()) {
      return call.End(std::move(status));
    }
    ResponseMessage serialized;
    serialized.Append(response.SerializeAsString());
    call.Respond(std::move(serialized));
  }

  const Function& function_;
};

template <typename ProtoRequest, typename ProtoResponse>
UnaryMethod SmallMethod(SmallFunction<ProtoRequest, ProtoResponse> function,
                        const CallObserver& observe, bool is_public = false) {
  return {
      .observe = observe,
      .traits = {.carries_tensors = false, .is_public = is_public},
      .new_handler = [function = std::make_shared<const decltype(function)>(std::move(function))] {
        return std::make_unique<SmallHandler<ProtoRequest, ProtoResponse>>(*function);
      }};
}

// The same for a function of an object that does not look at the call. REQUIRES: `service` outlives
// the method.
template <typename Service, typename ProtoRequest, typename ProtoResponse>
UnaryMethod SmallMethod(const Service& service,
                        absl::Status (Service::*function)(const ProtoRequest&, ProtoResponse&)
                            const,
                        const CallObserver& observe, bool is_public = false) {
  return SmallMethod<ProtoRequest, ProtoResponse>(
      [&service, function](const Call&, const ProtoRequest& request, ProtoResponse& response) {
        return (service.*function)(request, response);
      },
      observe, is_public);
}

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_UNARY_METHOD_H_
