#include "server/wire/rapt/rest_methods.h"

#include <google/protobuf/descriptor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "attention/operator.h"
#include "base/json_string.h"
#include "base/status_macros.h"
#include "server/protocols/json_limits.h"
#include "server/protocols/rapt/json_tensors.h"
#include "server/protocols/rapt/operator_codec.h"
#include "server/protocols/response_size.h"
#include "server/rejection.h"
#include "server/wire/http/call_method.h"
#include "server/wire/json_message.h"
#include "server/wire/rapt/cache_methods.h"
#include "server/wire/rapt/methods.h"

namespace rapt::native {
namespace {

using google::protobuf::Descriptor;

constexpr char kProtobuf[] = "application/x-protobuf";

// Copies of a response while it becomes JSON: serialized, in the parser, and in base64.
constexpr int64_t kBytesPerResponseByte = 4;
// Ample for the JSON of a response without its tensors' data, apart from lists.
constexpr int64_t kMaxFieldBytes = 8 * 1024;

// A method of gRPC as a route.
struct Route {
  const UnaryMethod& method;
  const Descriptor& request;
  const Descriptor& response;
  bool is_query;  // the fields of the request are parameters of the query instead of the body
  BufferPool& pool;
  JsonThreads& threads;
  int64_t max_json_bytes;
};

// Whether a header has the media type of Protocol Buffers, alone or in a list.
bool IsProtobuf(const http::Request& request, absl::string_view header) {
  for (absl::string_view type : absl::StrSplit(request.Value(header).value_or(""), ',')) {
    type = absl::StripAsciiWhitespace(type.substr(0, type.find(';')));
    if (absl::EqualsIgnoreCase(type, kProtobuf)) return true;
  }
  return false;
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
        sends_protobuf_(!route.is_query && IsProtobuf(request, "content-type")),
        accepts_protobuf_(IsProtobuf(request, "accept")) {}

 private:
  absl::StatusOr<int64_t> ExtraBytes(int64_t bytes) override {
    if (sends_protobuf_) return 0;
    if (bytes <= route_.max_json_bytes) return MessageBytesOf(bytes);
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
    absl::StatusOr<JsonMessage> message =
        UnlessOutOfMemory("the request's JSON", [&] { return Translate(body); });
    if (!message.ok()) return call_->End(message.status());
    message_ = *std::move(message);
    handler_->OnMessage(message_.bytes(), *this);
  }

  absl::StatusOr<JsonMessage> Translate(const MessageBytes& body) const {
    if (!route_.is_query) return TranslateBody(body);
    if (body.size > 0) {
      return absl::InvalidArgumentError(
          "the request has a body; its fields must be parameters of the query");
    }
    RAPT_ASSIGN_OR_RETURN(const std::string json, JsonOfQuery(target_));
    return ReadJson(route_.request, json, route_.pool);
  }

  absl::StatusOr<JsonMessage> TranslateBody(const MessageBytes& body) const {
    if (body.size == 0) return JsonMessage();
    const InputBytes bytes = body.Part(0, body.size);
    const std::string copy = bytes.in_slices() ? body.ToString() : "";
    const absl::string_view json =
        bytes.in_slices() ? absl::string_view(copy)
                          : absl::string_view(reinterpret_cast<const char*>(bytes.data),
                                              static_cast<size_t>(bytes.size));
    return ReadJson(route_.request, json, route_.pool);
  }

  Call& call() override { return call_->call(); }
  void End(absl::Status status) override { call_->End(std::move(status)); }

  // A response that is too large for sure is refused before it is computed.
  absl::StatusOr<int64_t> EncodingBytes(absl::Span<const TensorSpec* const> outputs) override {
    if (accepts_protobuf_) return MethodCall::EncodingBytes(outputs);
    RAPT_ASSIGN_OR_RETURN(const std::optional<int64_t> total, TotalBytes(outputs));
    if (!total || *total / 3 > route_.max_json_bytes / 4) {  // base64
      return AnswerHasTooMuchJson(route_.max_json_bytes);
    }
    reserved_copy_bytes_ = *total * kBytesPerResponseByte;
    reserved_text_bytes_ = TextMemoryBytes(*total / 3 * 4 + kMaxFieldBytes);
    return reserved_copy_bytes_ + reserved_text_bytes_;
  }

  void Respond(ResponseMessage response) override {
    message_ = {};
    if (accepts_protobuf_) return call_->Respond({.content_type = kProtobuf}, std::move(response));
    if (response.size() <= kQuickJsonBytes) return RespondInJson(std::move(response));
    route_.threads.Post(
        [this, response = std::move(response)]() mutable { RespondInJson(std::move(response)); });
  }

  void RespondInJson(ResponseMessage response) {
    if (call().is_over()) return call_->End(call().CancelledOrLate());
    absl::StatusOr<ResponseMessage> json =
        UnlessOutOfMemory("the answer's JSON", [&] { return Translate(std::move(response)); });
    if (!json.ok()) return call_->End(json.status());
    call_->Respond({}, *std::move(json));
  }

  absl::StatusOr<ResponseMessage> Translate(ResponseMessage response) {
    // Nothing gets shorter than the 8 bytes of a double, as "0,".
    if (response.size() / 4 > route_.max_json_bytes) {
      return AnswerHasTooMuchJson(route_.max_json_bytes);
    }
    const std::shared_ptr<EncodingMemory> reserved = response.TakeEncodingMemory();
    MessageReservation copies;
    if (reserved == nullptr) {
      copies = call().engine().ChargeMessage(response.size() * kBytesPerResponseByte,
                                             call().caller_memory());
    }
    std::string bytes;
    bytes.reserve(static_cast<size_t>(response.size()));
    for (const ResponseMessage::Piece& piece : response.TakePieces()) {
      bytes += piece.bytes;
      bytes.append(reinterpret_cast<const char*>(piece.payload.bytes.data()),
                   piece.payload.bytes.size());
    }
    absl::StatusOr<ResponseMessage> text = ToProtoJson(
        route_.response, bytes, route_.max_json_bytes, {reserved, reserved_text_bytes_}, call());
    // The text may be sent slowly.
    if (reserved != nullptr) reserved->Release(reserved_copy_bytes_);
    return text;
  }

  const Route& route_;
  const std::string target_;
  const std::unique_ptr<MessageHandler> handler_;
  const bool sends_protobuf_;
  const bool accepts_protobuf_;
  http::MethodCall* call_ = nullptr;
  JsonMessage message_;
  int64_t reserved_copy_bytes_ = 0;  // of the answer
  int64_t reserved_text_bytes_ = 0;
};

// "linear-attend" of LinearAttend.
std::string InKebabCase(absl::string_view name) {
  std::string kebab;
  for (const char c : name) {
    if (absl::ascii_isupper(c) && !kebab.empty()) kebab += '-';
    kebab += absl::ascii_tolower(c);
  }
  return kebab;
}

}  // namespace

void AddRestMethods(const JsonMethods& json, const CallObserverFactory& observe,
                    http::Router& router) {
  const auto add = [&](const char* http_method, const std::string& path, const char* service,
                       absl::string_view name) {
    const auto found = json.methods.find(absl::StrCat("/", service, "/", name));
    const auto& method = *google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(
        absl::StrCat(service, ".", name));
    const auto route = std::make_shared<const Route>(Route{
        found->second, *method.input_type(), *method.output_type(),
        absl::string_view(http_method) == "GET", json.pool, json.threads, json.max_json_bytes});
    router.Add(http_method, path,
               {.observe = observe(absl::StrCat("rapt/v1/", name)),
                .traits = found->second.traits,
                .new_handler = [route](const http::Request& request, const http::PathValues&) {
                  return std::make_unique<RestHandler>(*route, request);
                }});
  };
  add("GET", "/rapt/v1/server", kServiceName, "GetServerInfo");
  add("POST", "/rapt/v1/attend", kServiceName, "Attend");
  add("POST", "/rapt/v1/attend-backward", kServiceName, "AttendBackward");
  for (const OperatorCodec& codec : OperatorCodecs()) {
    const absl::string_view method = codec.schema().method;
    add("POST", absl::StrCat("/rapt/v1/", InKebabCase(method)), kServiceName, method);
  }
  add("POST", "/rapt/v1/estimate-memory", kServiceName, "EstimateMemory");
  add("POST", "/rapt/v1/diagnose", kServiceName, "Diagnose");
  add("GET", "/rapt/v1/caches", kCacheServiceName, "List");
  add("POST", "/rapt/v1/caches", kCacheServiceName, "Create");
  add("POST", "/rapt/v1/caches/fork", kCacheServiceName, "Fork");
  add("POST", "/rapt/v1/caches/truncate", kCacheServiceName, "Truncate");
  add("POST", "/rapt/v1/caches/update", kCacheServiceName, "Update");
  add("POST", "/rapt/v1/caches/renew", kCacheServiceName, "Renew");
  add("POST", "/rapt/v1/caches/close", kCacheServiceName, "Close");
  add("POST", "/rapt/v1/caches/get", kCacheServiceName, "Get");
  add("POST", "/rapt/v1/caches/append", kCacheServiceName, "Append");
  add("POST", "/rapt/v1/caches/attend", kCacheServiceName, "Attend");
  add("POST", "/rapt/v1/caches/diagnose", kCacheServiceName, "Diagnose");
}

}  // namespace rapt::native
