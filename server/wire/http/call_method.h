// A method that is called by HTTP requests, independent of the connection that carries them.
#ifndef RAPT_SERVER_WIRE_HTTP_CALL_METHOD_H_
#define RAPT_SERVER_WIRE_HTTP_CALL_METHOD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "server/calls/call.h"
#include "server/protocols/message_parts.h"
#include "server/wire/http/message.h"

namespace rapt::http {

// The segments of a path that its pattern leaves open, decoded.
using PathValues = absl::InlinedVector<std::string, 2>;

// The head of a response whose status is 200, unless a method says otherwise.
struct ResponseHead {
  int status = 200;
  std::string content_type = "application/json";
  std::vector<Header> headers = {};
};

// A call as its method sees it.
class MethodCall {
 public:
  virtual Call& call() = 0;

  // Finish the call: neither its body nor its handler must be used afterwards. Call one of them
  // once, on any thread.
  virtual void Respond(ResponseHead head, ResponseMessage body) = 0;
  virtual void End(absl::Status status) = 0;

 protected:
  ~MethodCall() = default;
};

// The handler of one call's body.
class BodyHandler {
 public:
  virtual ~BodyHandler() = default;

  // Checks the head of a call and the size of its body, before the body is admitted; a chunked body
  // when it has arrived. Returns the bytes of memory that the handler needs in addition.
  virtual absl::StatusOr<int64_t> ExtraBytes(int64_t /*bytes*/) { return 0; }

  // Leads to call.Respond() or call.End(). The body and the call stay valid until then.
  virtual void OnBody(const MessageBytes& body, MethodCall& call) = 0;
};

struct CallMethod {
  CallObserver observe = {};
  MethodTraits traits = {};
  std::function<std::unique_ptr<BodyHandler>(const Request& request, PathValues values)>
      new_handler = {};
};

}  // namespace rapt::http

#endif  // RAPT_SERVER_WIRE_HTTP_CALL_METHOD_H_
