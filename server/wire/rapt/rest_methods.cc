#include "server/wire/rapt/rest_methods.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/byte_slice.h"
#include "base/json_string.h"
#include "proto/rapt/v1/attention.pb.h"
#include "proto/rapt/v1/cache.pb.h"
#include "server/protocols/json_limits.h"
#include "server/protocols/rapt/json_tensors.h"
#include "server/wire/http/call_method.h"
#include "server/wire/json_message.h"
#include "server/wire/rapt/cache_methods.h"
#include "server/wire/rapt/methods.h"

namespace rapt::native {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::Message;

constexpr char kProtobuf[] = "application/x-protobuf";

// The text with binary tensors, the message and its parser take at most this many times the bytes
// of the JSON.
constexpr int64_t kMessageBytesPerJsonByte = 2 * kTextBytesPerJsonByte;
// Copies of a response while it becomes JSON: serialized, in the parser, and in base64.
constexpr int64_t kBytesPerResponseByte = 4;

// A method of gRPC as a route.
struct Route {
  const UnaryMethod& method;
  const Descriptor& request;
  const Descriptor& response;
  bool is_query;  // the fields of the request are parameters of the query instead of the body
  JsonThreads& threads;
  int64_t max_json_bytes;
};

bool IsProtobuf(const http::Request& request, absl::string_view header) {
  const absl::string_view value = request.Value(header).value_or("");
  return absl::EqualsIgnoreCase(value.substr(0, value.find(';')), kProtobuf);
}

// {"pageSize": "10"}: Protocol Buffers' JSON takes numbers as strings.
absl::StatusOr<std::string> JsonOfQuery(absl::string_view target) {
  const std::optional<http::Query> query = http::QueryOf(target);
  if (!query) return absl::InvalidArgumentError("the query of the path is malformed");
  std::string json = "{";
  for (const auto& [name, value] : *query) {
    if (json.size() > 1) json += ',';
    AppendJsonString(name, json);
    json += ':';
    AppendJsonString(value, json);
  }
  return json + '}';
}

// Translates the message of a call and its response, unless they are Protocol Buffers.
class RestHandler final : public http::BodyHandler, private MethodCall {
 public:
  RestHandler(const Route& route, const http::Request& request)
      : route_(route),
        target_(request.target),
        handler_(route.method.new_handler()),
        is_chunked_(request.is_chunked),
        sends_protobuf_(!route.is_query && IsProtobuf(request, "content-type")),
        accepts_protobuf_(IsProtobuf(request, "accept")) {}

 private:
  absl::StatusOr<int64_t> ExtraBytes(int64_t bytes) override {
    if (sends_protobuf_) return 0;
    if (bytes <= route_.max_json_bytes) return bytes * kMessageBytesPerJsonByte;
    return RequestHasTooMuchJson(bytes, route_.max_json_bytes);
  }

  void OnBody(const MessageBytes& body, http::MethodCall& call) override {
    call_ = &call;
    if (sends_protobuf_) return handler_->OnMessage(body, *this);
    if (body.size <= kQuickJsonBytes) return Handle(body);
    route_.threads.Post([this, body] { Handle(body); });
  }

  void Handle(const MessageBytes& body) {
    if (call().is_over()) return call_->End(call().CancelledOrLate());
    // The size of a chunked body was not known when its memory was reserved.
    if (is_chunked_) {
      message_memory_ = call().engine().ChargeMessage(body.size * kMessageBytesPerJsonByte,
                                                      call().caller_memory());
    }
    absl::StatusOr<std::string> message = Translate(body);
    if (!message.ok()) return call_->End(message.status());
    message_ = *std::move(message);
    slice_ = {reinterpret_cast<const std::byte*>(message_.data()), 0,
              static_cast<int64_t>(message_.size())};
    const absl::Span<const ByteSlice> slices(&slice_, message_.empty() ? 0 : 1);
    handler_->OnMessage({{slices, 0}, slice_.end}, *this);
  }

  absl::StatusOr<std::string> Translate(const MessageBytes& body) const {
    if (body.size > route_.max_json_bytes) {  // of a chunked body
      return RequestHasTooMuchJson(body.size, route_.max_json_bytes);
    }
    if (route_.is_query && body.size > 0) {
      return absl::InvalidArgumentError(
          "the request has a body; its fields must be parameters of the query");
    }
    if (!route_.is_query && body.size == 0) return std::string();
    absl::StatusOr<std::string> json =
        route_.is_query ? JsonOfQuery(target_) : WithBinaryTensors(route_.request, body.ToString());
    if (!json.ok()) return json;
    return FromProtoJson(route_.request, *json);
  }

  Call& call() override { return call_->call(); }
  void End(absl::Status status) override { call_->End(std::move(status)); }

  void Respond(ResponseMessage response) override {
    if (accepts_protobuf_) return call_->Respond({.content_type = kProtobuf}, std::move(response));
    absl::StatusOr<ResponseMessage> json = Translate(std::move(response));
    if (!json.ok()) return call_->End(json.status());
    message_ = {};
    message_memory_ = {};
    call_->Respond({}, *std::move(json));
  }

  absl::StatusOr<ResponseMessage> Translate(ResponseMessage response) {
    // Nothing gets shorter than the 8 bytes of a double, as "0,".
    if (response.size() / 4 > route_.max_json_bytes) {
      return AnswerHasTooMuchJson(route_.max_json_bytes);
    }
    const MessageReservation memory = call().engine().ChargeMessage(
        response.size() * kBytesPerResponseByte, call().caller_memory());
    std::string bytes;
    for (const ResponseMessage::Piece& piece : response.TakePieces()) {
      bytes += piece.bytes;
      bytes.append(reinterpret_cast<const char*>(piece.payload.bytes.data()),
                   piece.payload.bytes.size());
    }
    return ToProtoJson(route_.response, bytes, route_.max_json_bytes, call());
  }

  const Route& route_;
  const std::string target_;
  const std::unique_ptr<MessageHandler> handler_;
  const bool is_chunked_;
  const bool sends_protobuf_;
  const bool accepts_protobuf_;
  http::MethodCall* call_ = nullptr;
  MessageReservation message_memory_;
  std::string message_;
  ByteSlice slice_ = {};
};

}  // namespace

void AddRestMethods(const JsonMethods& json, const CallObserverFactory& observe,
                    http::Router& router) {
  const auto add = [&](const char* http_method, const char* path, const char* service,
                       const char* name, const Message& request, const Message& response) {
    const auto found = json.methods.find(absl::StrCat("/", service, "/", name));
    const auto route = std::make_shared<const Route>(
        Route{found->second, *request.GetDescriptor(), *response.GetDescriptor(),
              absl::string_view(http_method) == "GET", json.threads, json.max_json_bytes});
    router.Add(http_method, path,
               {.observe = observe(absl::StrCat("rapt/v1/", name)),
                .traits = found->second.traits,
                .new_handler = [route](const http::Request& request, const http::PathValues&) {
                  return std::make_unique<RestHandler>(*route, request);
                }});
  };
  const auto add_attention = [&](const char* http_method, const char* path, const char* name,
                                 const Message& request, const Message& response) {
    add(http_method, path, kServiceName, name, request, response);
  };
  const auto add_cache = [&](const char* http_method, const char* path, const char* name,
                             const Message& request, const Message& response) {
    add(http_method, path, kCacheServiceName, name, request, response);
  };
  add_attention("GET", "/rapt/v1/server", "GetServerInfo",
                v1::GetServerInfoRequest::default_instance(),
                v1::GetServerInfoResponse::default_instance());
  add_attention("POST", "/rapt/v1/attend", "Attend", v1::AttendRequest::default_instance(),
                v1::AttendResponse::default_instance());
  add_attention("POST", "/rapt/v1/estimate-memory", "EstimateMemory",
                v1::EstimateMemoryRequest::default_instance(),
                v1::EstimateMemoryResponse::default_instance());
  add_attention("POST", "/rapt/v1/diagnose", "Diagnose", v1::DiagnoseRequest::default_instance(),
                v1::DiagnoseResponse::default_instance());
  const Message& cache = v1::Cache::default_instance();
  const Message& caches = v1::Caches::default_instance();
  const Message& ids = v1::Ids::default_instance();
  const Message& attend = v1::AttendCachedRequest::default_instance();
  add_cache("GET", "/rapt/v1/caches", "List", v1::ListRequest::default_instance(), caches);
  add_cache("POST", "/rapt/v1/caches", "Create", v1::CreateRequest::default_instance(), cache);
  add_cache("POST", "/rapt/v1/caches/fork", "Fork", v1::ForkRequest::default_instance(), cache);
  add_cache("POST", "/rapt/v1/caches/truncate", "Truncate", v1::TruncateRequest::default_instance(),
            cache);
  add_cache("POST", "/rapt/v1/caches/renew", "Renew", ids, caches);
  add_cache("POST", "/rapt/v1/caches/close", "Close", ids, caches);
  add_cache("POST", "/rapt/v1/caches/get", "Get", ids, caches);
  add_cache("POST", "/rapt/v1/caches/append", "Append", v1::AppendRequest::default_instance(),
            v1::AppendResponse::default_instance());
  add_cache("POST", "/rapt/v1/caches/attend", "Attend", attend,
            v1::AttendCachedResponse::default_instance());
  add_cache("POST", "/rapt/v1/caches/diagnose", "Diagnose", attend,
            v1::DiagnoseResponse::default_instance());
}

}  // namespace rapt::native
