#include "server/wire/oip/rest_methods.h"

#include <functional>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "base/strict_json.h"
#include "server/protocols/json_limits.h"
#include "server/protocols/oip/json_codec.h"
#include "server/protocols/oip/model.h"
#include "server/rejection.h"
#include "server/wire/http/call_method.h"
#include "server/wire/json_message.h"
#include "server/wire/oip/infer_run.h"

namespace rapt::oip {
namespace {

using http::PathValues;
using Json = nlohmann::ordered_json;  // of answers; finding a key takes linear time
using Fields = nlohmann::json;        // of bodies

constexpr char kJsonLengthHeader[] = "inference-header-content-length";

// --- Inference -----------------------------------------------------------------------------------

// The model that a path names; the version is empty if it names none.
struct ModelPath {
  explicit ModelPath(PathValues values)
      : name(std::move(values[0])), version(values.size() > 1 ? std::move(values[1]) : "") {}

  std::string name, version;
};

// Returns a message of the text and what follows it. The text keeps `memory` until it is sent.
ResponseMessage MessageOf(JsonAnswer answer, std::shared_ptr<const void> memory) {
  struct Text {
    std::string bytes;
    std::shared_ptr<const void> memory;
  };
  auto text = std::make_shared<Text>(Text{std::move(answer.json), std::move(memory)});
  ResponseMessage message;
  const absl::Span<const std::byte> bytes(reinterpret_cast<const std::byte*>(text->bytes.data()),
                                          text->bytes.size());
  message.Append(OutputBuffer{bytes, std::move(text)});
  for (const OutputBuffer& output : answer.binary) message.Append(output);
  return message;
}

class InferBodyHandler final : public http::BodyHandler {
 public:
  InferBodyHandler(const JsonInference& inference, const http::Request& request, PathValues values)
      : inference_(inference), path_(std::move(values)) {
    const HeaderValues lengths = request.Values(kJsonLengthHeader);
    if (!lengths.empty()) json_length_ = absl::StrJoin(lengths, ", ");
  }

 private:
  absl::StatusOr<int64_t> ExtraBytes(int64_t bytes) override {
    RAPT_ASSIGN_OR_RETURN(const int64_t json, JsonBytesOf(bytes));
    return json * kTypedBytesPerJsonByte;
  }

  absl::StatusOr<int64_t> JsonBytesOf(int64_t body) const {
    int64_t json = body;
    if (json_length_ && (json_length_->find_first_not_of("0123456789") != std::string::npos ||
                         !absl::SimpleAtoi(*json_length_, &json) || json > body)) {
      return Invalid("header ", kJsonLengthHeader, " is ", json_length_->substr(0, 32),
                     "; it must be one number, at most the ", body, " bytes of the body");
    }
    if (json <= inference_.max_json_bytes) return json;
    return RequestHasTooMuchJson(json, inference_.max_json_bytes);
  }

  void OnBody(const MessageBytes& body, http::MethodCall& call) override {
    auto model = FindModel(path_.name, path_.version, inference_.methods.model_context());
    if (!model.ok()) return call.End(model.status());
    model_ = *std::move(model);
    call.call().report().model = model_->model;
    const absl::StatusOr<int64_t> json_bytes = JsonBytesOf(body.size);
    if (!json_bytes.ok()) return call.End(json_bytes.status());
    if (*json_bytes <= kQuickJsonBytes) return Decode(body, *json_bytes, call);
    inference_.threads.Post(
        [this, body, bytes = *json_bytes, &call] { Decode(body, bytes, call); });
  }

  void Decode(const MessageBytes& body, int64_t json_bytes, http::MethodCall& http_call) {
    Call& call = http_call.call();
    if (call.is_over()) return http_call.End(call.CancelledOrLate());
    absl::StatusOr<std::shared_ptr<JsonInfer>> fields = Read(body, json_bytes);
    if (!fields.ok()) return http_call.End(fields.status());
    binary_ = (*fields)->binary;
    const Methods& methods = inference_.methods;
    absl::StatusOr<DecodedInfer> decoded =
        DecodeInfer(*std::move(fields), *model_, call.arrived(), methods.shared_memory(),
                    methods.model_context());
    if (!decoded.ok()) return http_call.End(decoded.status());
    run_.Start(methods.sequences(), *std::move(decoded), call,
               [this, &http_call](Result result) { OnResult(std::move(result), http_call); });
  }

  absl::StatusOr<std::shared_ptr<JsonInfer>> Read(const MessageBytes& body, int64_t json_bytes) {
    return UnlessOutOfMemory("the request's JSON", [&] {
      return ReadJsonInfer(body, json_bytes, inference_.max_json_bytes, inference_.pool);
    });
  }

  void OnResult(Result result, http::MethodCall& call) {
    call.call().Record(result);
    if (!result.status.ok()) return call.End(std::move(result.status));
    int64_t bytes_in_json = 0;
    for (size_t i = 0; i < run_.decoded().outputs.size(); ++i) {
      const RequestedOutput& output = run_.decoded().outputs[i];
      if (binary_.IsBinary(i) || output.shared) continue;
      bytes_in_json += static_cast<int64_t>(result.outputs[output.slot].bytes.size());
    }
    if (bytes_in_json <= kQuickJsonBytes) return Answer(result, call);
    inference_.threads.Post([this, result = std::move(result), &call] { Answer(result, call); });
  }

  void Answer(const Result& result, http::MethodCall& call) const {
    if (call.call().is_over()) return call.End(call.call().CancelledOrLate());
    absl::StatusOr<JsonAnswer> answer = UnlessOutOfMemory("the answer's JSON", [&] {
      return EncodeJsonInfer(binary_, run_.decoded(), result, inference_.max_json_bytes);
    });
    if (!answer.ok()) return call.End(answer.status());
    http::ResponseHead head;
    if (!answer->binary.empty()) {
      head.content_type = "application/octet-stream";
      head.headers.push_back(
          {"Inference-Header-Content-Length", absl::StrCat(answer->json.size())});
    }
    call.Respond(std::move(head), MessageOf(*std::move(answer), result.encoding_memory));
  }

  const JsonInference& inference_;
  const ModelPath path_;
  ModelInfoPtr model_;
  std::optional<std::string> json_length_;
  BinaryOutputs binary_;
  InferRun run_;
};

// --- Methods without tensors ---------------------------------------------------------------------

// How a method of `Methods` appears in HTTP.
template <typename ProtoRequest, typename ProtoResponse>
struct SmallRoute {
  // Reads a request; null: it has no fields.
  std::function<absl::Status(const PathValues& values, const Fields& body, ProtoRequest& request)>
      read = nullptr;
  // Writes a response; null: all its fields.
  std::function<Json(const ProtoResponse& response)> write = nullptr;
  // Returns an error for a response that is one in HTTP; null: none is.
  std::function<absl::Status(const ProtoResponse& response)> check = nullptr;
  // It runs on the thread that loads models.
  bool loads = false;
  absl::Status (Methods::*function)(const ProtoRequest&, ProtoResponse&) const = nullptr;
};

template <typename ProtoRequest, typename ProtoResponse>
class SmallHandler final : public http::BodyHandler {
 public:
  using Route = SmallRoute<ProtoRequest, ProtoResponse>;

  SmallHandler(const Methods& methods, const Route& route, PathValues values)
      : methods_(methods), route_(route), values_(std::move(values)) {}

 private:
  void OnBody(const MessageBytes& body, http::MethodCall& call) override {
    if (!route_.loads || methods_.model_context().repository == nullptr) return Respond(body, call);
    methods_.PostToLoader([this, body, &call] {
      if (call.call().is_over()) return call.End(call.call().CancelledOrLate());
      Respond(body, call);
    });
  }

  void Respond(const MessageBytes& body, http::MethodCall& call) const {
    absl::StatusOr<std::string> text = Answer(body.ToString());
    if (!text.ok()) return call.End(text.status());
    ResponseMessage message;
    message.Append(*text);
    call.Respond({}, std::move(message));
  }

  absl::StatusOr<std::string> Answer(const std::string& body) const {
    absl::StatusOr<Fields> fields = Fields::object();
    if (!body.empty()) fields = ParseStrictJson(body);
    if (!fields.ok()) return fields.status();
    if (!fields->is_object()) {
      return Invalid("the body must be a JSON object, or empty");
    }
    ProtoRequest request;
    absl::Status status;
    if (route_.read != nullptr) status = route_.read(values_, *fields, request);
    ProtoResponse response;
    status.Update(status.ok() ? (methods_.*route_.function)(request, response) : status);
    if (status.ok() && route_.check != nullptr) status = route_.check(response);
    if (!status.ok()) return status;
    const Json json = route_.write == nullptr ? ToJson(response) : route_.write(response);
    return json.dump(-1, ' ', false, Json::error_handler_t::replace);
  }

  const Methods& methods_;
  const Route& route_;
  const PathValues values_;
};

absl::Status WrongType(const std::string& field, absl::string_view type) {
  return Invalid("field ", field, " must be ", type);
}

// Reads a field of a body, if it is there.
absl::Status Read(const Fields& body, const char* field, std::string& value) {
  const auto found = body.find(field);
  if (found == body.end()) return absl::OkStatus();
  if (!found->is_string()) return WrongType(field, "a string");
  value = found->get<std::string>();
  return absl::OkStatus();
}
absl::Status Read(const Fields& body, const char* field, bool& value) {
  const auto found = body.find(field);
  if (found == body.end()) return absl::OkStatus();
  if (!found->is_boolean()) return WrongType(field, "true or false");
  value = found->get<bool>();
  return absl::OkStatus();
}
absl::Status Read(const Fields& body, const char* field, uint64_t& value) {
  const auto found = body.find(field);
  if (found == body.end()) return absl::OkStatus();
  if (!found->is_number_unsigned()) return WrongType(field, "an integer of at least 0");
  value = found->get<uint64_t>();
  return absl::OkStatus();
}

// Reads the name and version of a model, if the path has them.
template <typename ProtoRequest>
absl::Status ReadModel(const PathValues& values, const Fields&, ProtoRequest& request) {
  if (!values.empty()) request.set_name(values[0]);
  if (values.size() > 1) request.set_version(values[1]);
  return absl::OkStatus();
}

template <typename ProtoRequest>
absl::Status ReadName(const PathValues& values, const Fields&, ProtoRequest& request) {
  if (!values.empty()) request.set_name(values[0]);
  return absl::OkStatus();
}

// Sets every field of the body, as the settings of tracing and logging are read.
template <typename ProtoRequest>
absl::Status ReadSettings(const PathValues&, const Fields& body, ProtoRequest& request) {
  for (const auto& [name, value] : body.items()) (*request.mutable_settings())[name];
  return absl::OkStatus();
}

absl::Status ReadTraceSettings(const PathValues& values, const Fields& body,
                               inference::TraceSettingRequest& request) {
  if (!values.empty()) request.set_model_name(values[0]);
  return ReadSettings(values, body, request);
}

absl::Status ReadSystemRegion(const PathValues& values, const Fields& body,
                              inference::SystemSharedMemoryRegisterRequest& request) {
  uint64_t offset = 0, byte_size = 0;
  absl::Status status = Read(body, "key", *request.mutable_key());
  status.Update(Read(body, "offset", offset));
  status.Update(Read(body, "byte_size", byte_size));
  request.set_name(values[0]);
  request.set_offset(offset);
  request.set_byte_size(byte_size);
  return status;
}

absl::Status ReadCudaRegion(const PathValues& values, const Fields& body,
                            inference::CudaSharedMemoryRegisterRequest& request) {
  uint64_t device = 0, byte_size = 0;
  std::string handle;
  absl::Status status;
  if (const auto found = body.find("raw_handle"); found != body.end() && found->is_object()) {
    status = Read(*found, "b64", handle);
  }
  status.Update(Read(body, "device_id", device));
  status.Update(Read(body, "byte_size", byte_size));
  if (!status.ok()) return status;
  if (!absl::Base64Unescape(handle, request.mutable_raw_handle())) {
    return WrongType("raw_handle.b64", "in base64");
  }
  request.set_name(values[0]);
  request.set_device_id(static_cast<int64_t>(device));
  request.set_byte_size(byte_size);
  return absl::OkStatus();
}

absl::Status ReadIndex(const PathValues&, const Fields& body,
                       inference::RepositoryIndexRequest& request) {
  bool ready = false;
  absl::Status status = Read(body, "ready", ready);
  request.set_ready(ready);
  return status;
}

absl::Status ReadLoad(const PathValues& values, const Fields& body,
                      inference::RepositoryModelLoadRequest& request) {
  request.set_model_name(values[0]);
  const auto parameters = body.find("parameters");
  if (parameters == body.end()) return absl::OkStatus();
  for (const auto& [name, value] : parameters->items()) (*request.mutable_parameters())[name];
  return absl::OkStatus();
}

absl::Status ReadUnload(const PathValues& values, const Fields&,
                        inference::RepositoryModelUnloadRequest& request) {
  request.set_model_name(values[0]);
  return absl::OkStatus();
}

template <typename ProtoResponse>
Json RegionsOf(const ProtoResponse& response) {
  Json regions = Json::array();
  for (const auto& [name, region] : response.regions()) regions.push_back(ToJson(region));
  return regions;
}

absl::Status Unready(bool is_ready, absl::string_view what) {
  return is_ready ? absl::OkStatus()
                  : absl::UnavailableError(absl::StrCat("the ", what, " is not ready"));
}

Json Nothing(const google::protobuf::Message&) { return Json::object(); }

// Adds routes. Each lives as long as its method.
class Routes {
 public:
  Routes(const Methods& methods, const CallObserverFactory& observe, http::Router& router)
      : methods_(methods), observe_(observe), router_(router) {}

  CallObserver Observer(absl::string_view name) const {
    return observe_(absl::StrCat("v2/", name));
  }

  template <typename ProtoRequest, typename ProtoResponse>
  void Add(const std::string& http_method, const std::vector<std::string>& patterns,
           absl::Status (Methods::*function)(const ProtoRequest&, ProtoResponse&) const,
           SmallRoute<ProtoRequest, ProtoResponse> route, bool is_public = false) {
    using Handler = SmallHandler<ProtoRequest, ProtoResponse>;
    const absl::string_view name = absl::StripSuffix(ProtoRequest::descriptor()->name(), "Request");
    route.function = function;
    const auto shared =
        std::make_shared<const SmallRoute<ProtoRequest, ProtoResponse>>(std::move(route));
    const http::CallMethod method = {
        .observe = Observer(name),
        .traits = {.carries_tensors = false,
                   .max_small_bytes = kQuickJsonBytes,
                   .is_public = is_public},
        .new_handler = [&methods = methods_, shared](const http::Request&, PathValues values) {
          return std::make_unique<Handler>(methods, *shared, std::move(values));
        }};
    for (const std::string& pattern : patterns) router_.Add(http_method, pattern, method);
  }

 private:
  const Methods& methods_;
  const CallObserverFactory& observe_;
  http::Router& router_;
};

// Health has no need of a token, so that any probe can ask for it.
void AddHealth(const Methods& methods, Routes& routes) {
  routes.Add("GET", {"/v2/health/live"}, &Methods::ServerLive,
             {.check = [](const auto& response) { return Unready(response.live(), "server"); }},
             /*is_public=*/true);
  routes.Add("GET", {"/v2/health/ready"}, &Methods::ServerReady,
             {.check = [](const auto& response) { return Unready(response.ready(), "server"); }},
             /*is_public=*/true);
  routes.Add(
      "GET", {"/v2/models/*/ready", "/v2/models/*/versions/*/ready"}, &Methods::ModelReady,
      {.read =
           [&methods](const PathValues& values, const Fields& body,
                      inference::ModelReadyRequest& request) {
             absl::Status status = ReadModel(values, body, request);
             // Otherwise an unknown model is merely not ready, which a caller would wait for.
             status.Update(
                 FindModel(request.name(), request.version(), methods.model_context()).status());
             return status;
           },
       .check = [](const auto& response) { return Unready(response.ready(), "model"); }});
}

void AddModels(Routes& routes) {
  routes.Add("GET", {"/v2"}, &Methods::ServerMetadata, {});
  // Before the pattern of a model's metadata.
  routes.Add("GET", {"/v2/models/stats", "/v2/models/*/stats", "/v2/models/*/versions/*/stats"},
             &Methods::ModelStatistics, {.read = ReadModel<inference::ModelStatisticsRequest>});
  routes.Add("GET", {"/v2/models/*", "/v2/models/*/versions/*"}, &Methods::ModelMetadata,
             {.read = ReadModel<inference::ModelMetadataRequest>});
  routes.Add("GET", {"/v2/models/*/config", "/v2/models/*/versions/*/config"},
             &Methods::ModelConfig,
             {.read = ReadModel<inference::ModelConfigRequest>,
              .write = [](const auto& response) { return ToJson(response.config()); }});
  routes.Add("POST", {"/v2/repository/index"}, &Methods::RepositoryIndex,
             {.read = ReadIndex,
              .write = [](const auto& response) { return ToJson(response).at("models"); }});
  routes.Add("POST", {"/v2/repository/models/*/load"}, &Methods::RepositoryModelLoad,
             {.read = ReadLoad, .write = Nothing, .loads = true});
  routes.Add("POST", {"/v2/repository/models/*/unload"}, &Methods::RepositoryModelUnload,
             {.read = ReadUnload, .write = Nothing, .loads = true});
}

void AddSharedMemory(Routes& routes) {
  routes.Add("GET", {"/v2/systemsharedmemory/status", "/v2/systemsharedmemory/region/*/status"},
             &Methods::SystemSharedMemoryStatus,
             {.read = ReadName<inference::SystemSharedMemoryStatusRequest>,
              .write = RegionsOf<inference::SystemSharedMemoryStatusResponse>});
  routes.Add("POST", {"/v2/systemsharedmemory/region/*/register"},
             &Methods::SystemSharedMemoryRegister, {.read = ReadSystemRegion});
  routes.Add("POST",
             {"/v2/systemsharedmemory/unregister", "/v2/systemsharedmemory/region/*/unregister"},
             &Methods::SystemSharedMemoryUnregister,
             {.read = ReadName<inference::SystemSharedMemoryUnregisterRequest>});
  routes.Add("GET", {"/v2/cudasharedmemory/status", "/v2/cudasharedmemory/region/*/status"},
             &Methods::CudaSharedMemoryStatus,
             {.read = ReadName<inference::CudaSharedMemoryStatusRequest>,
              .write = RegionsOf<inference::CudaSharedMemoryStatusResponse>});
  routes.Add("POST", {"/v2/cudasharedmemory/region/*/register"}, &Methods::CudaSharedMemoryRegister,
             {.read = ReadCudaRegion});
  routes.Add("POST",
             {"/v2/cudasharedmemory/unregister", "/v2/cudasharedmemory/region/*/unregister"},
             &Methods::CudaSharedMemoryUnregister,
             {.read = ReadName<inference::CudaSharedMemoryUnregisterRequest>});
}

void AddSettings(Routes& routes) {
  for (const char* http_method : {"GET", "POST"}) {
    routes.Add(http_method, {"/v2/trace/setting", "/v2/models/*/trace/setting"},
               &Methods::TraceSetting, {.read = ReadTraceSettings, .write = Nothing});
    routes.Add(http_method, {"/v2/logging"}, &Methods::LogSettings,
               {.read = ReadSettings<inference::LogSettingsRequest>, .write = Nothing});
  }
}

}  // namespace

void AddRestMethods(const JsonInference& inference, const CallObserverFactory& observe,
                    http::Router& router) {
  Routes routes(inference.methods, observe, router);
  const http::CallMethod infer = {
      .observe = inference.methods.Counted(routes.Observer("ModelInfer")),
      .traits = inference.methods.InferTraits(),
      .new_handler = [&inference](const http::Request& request, PathValues values) {
        return std::make_unique<InferBodyHandler>(inference, request, std::move(values));
      }};
  router.Add("POST", "/v2/models/*/infer", infer);
  router.Add("POST", "/v2/models/*/versions/*/infer", infer);
  AddHealth(inference.methods, routes);
  AddModels(routes);
  AddSharedMemory(routes);
  AddSettings(routes);
}

}  // namespace rapt::oip
