#include "server/wire/rapt/cache_methods.h"

#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "server/cache/cached_attention.h"
#include "server/cache/cached_diagnosis.h"
#include "server/protocols/rapt/cache_codec.h"
#include "server/protocols/response_size.h"
#include "server/wire/rapt/cache_export_call.h"
#include "server/wire/rapt/cache_import_call.h"

namespace rapt::native {
namespace {

// Calls that the engine computes.
class ComputedHandler : public MessageHandler {
 public:
  explicit ComputedHandler(cache::CacheStore* store) : store_(store) {}

 private:
  virtual absl::StatusOr<Request> Decode(const MessageBytes& message, cache::CacheStore& store,
                                         MethodCall& call) = 0;
  // Leads to call.Respond() or call.End().
  virtual void OnResult(Result result, MethodCall& call) = 0;

  void OnMessage(const MessageBytes& message, MethodCall& call) final {
    if (store_ == nullptr) return call.End(NoCaches());
    absl::StatusOr<Request> request = Decode(message, *store_, call);
    if (!request.ok()) return call.End(request.status());
    call.call().Bind(*request);
    call.call().engine().Submit(
        *std::move(request), [this, &call](Result result) { OnResult(std::move(result), call); });
  }

  cache::CacheStore* const store_;
};

class AttendCachedHandler final : public ComputedHandler {
 public:
  using ComputedHandler::ComputedHandler;

 private:
  absl::StatusOr<Request> Decode(const MessageBytes& message, cache::CacheStore& store,
                                 MethodCall& call) override {
    RAPT_ASSIGN_OR_RETURN(DecodedAttend decoded, DecodeAttendCached(message));
    RAPT_ASSIGN_OR_RETURN(Request request,
                          attention_.Start(store, call.call().caller(), std::move(decoded.call)));
    request.priority = decoded.priority;
    operator_ = request.tensor_operator;
    RAPT_ASSIGN_OR_RETURN(request.encoding_bytes,
                          call.EncodingBytes(OutputsOf(*operator_, request.Outputs())));
    return request;
  }

  void OnResult(Result result, MethodCall& call) override {
    call.call().Record(result);
    if (!result.status.ok()) return call.End(std::move(result.status));
    ResponseMessage response = EncodeAttendCached(*operator_, attention_.results(), result);
    attention_.Release();
    call.Respond(std::move(response));
  }

  cache::CachedAttention attention_;
  std::shared_ptr<const TensorOperator> operator_;
};

class AppendHandler final : public ComputedHandler {
 public:
  using ComputedHandler::ComputedHandler;

 private:
  absl::StatusOr<Request> Decode(const MessageBytes& message, cache::CacheStore& store,
                                 MethodCall& call) override {
    RAPT_ASSIGN_OR_RETURN(DecodedAppend decoded, DecodeAppend(message));
    absl::StatusOr<Request> request =
        append_.Start(store, call.call().caller(), std::move(decoded.parts), decoded.partial);
    if (request.ok()) request->priority = decoded.priority;
    return request;
  }

  void OnResult(Result result, MethodCall& call) override {
    call.call().Record(result);
    if (!result.status.ok()) return call.End(std::move(result.status));
    ResponseMessage response = EncodeAppend(append_.results());
    append_.Release();
    call.Respond(std::move(response));
  }

  cache::CachedAppend append_;
};

class DiagnoseCachedHandler final : public ComputedHandler {
 public:
  using ComputedHandler::ComputedHandler;

 private:
  absl::StatusOr<Request> Decode(const MessageBytes& message, cache::CacheStore& store,
                                 MethodCall& call) override {
    RAPT_ASSIGN_OR_RETURN(DecodedAttend decoded, DecodeAttendCached(message));
    absl::StatusOr<Request> request =
        diagnosis_.Start(store, call.call().caller(), std::move(decoded.call));
    if (request.ok()) request->priority = decoded.priority;
    return request;
  }

  void OnResult(Result result, MethodCall& call) override {
    if (!result.status.ok()) return call.End(std::move(result.status));
    call.Respond(EncodeDiagnosis(diagnosis_, call.call().engine().plan_options()));
  }

  cache::CachedDiagnosis diagnosis_;
};

std::string NameOf(absl::string_view method) {
  return absl::StrCat(kCacheServiceName, "/", method);
}

absl::Status Answer(const absl::StatusOr<cache::CacheInfo>& info, v1::Cache& response) {
  if (info.ok()) Encode(*info, response);
  return info.status();
}

absl::Status Answer(const absl::StatusOr<cache::CacheList>& list, v1::Caches& response) {
  if (list.ok()) Encode(*list, response);
  return list.status();
}

}  // namespace

absl::Status NoCaches() {
  return absl::UnimplementedError(
      "this server keeps no caches; --kv_cache_bytes gives it memory for them");
}

CacheMethods::CacheMethods(cache::CacheStore* store, const CallObserverFactory& observe)
    : store_(store),
      renew_{store, &cache::CacheStore::Renew},
      close_{store, &cache::CacheStore::Close},
      get_{store, &cache::CacheStore::Get},
      observe_(observe),
      observe_export_(observe(NameOf("Export"))),
      observe_import_(observe(NameOf("Import"))) {}

void CacheMethods::AddTo(StreamMethods& methods, const CallEnvironment& environment) {
  methods[absl::StrCat("/", NameOf("Export"))] = [this, &environment](MessageStream& stream) {
    return std::make_unique<CacheExportCall>(environment, observe_export_, stream, store_);
  };
  methods[absl::StrCat("/", NameOf("Import"))] = [this, &environment](MessageStream& stream) {
    return std::make_unique<CacheImportCall>(environment, observe_import_, stream, store_);
  };
}

void CacheMethods::AddTo(UnaryMethods& methods) {
  constexpr int64_t kMaxIdsBytes = 128 * 1024;  // of 1024 ids
  const auto add_of_ids = [&](absl::string_view method, const OnIds& service) {
    UnaryMethod& unary = methods[absl::StrCat("/", NameOf(method))];
    unary = SmallMethod<v1::Ids, v1::Caches>(service, observe_(NameOf(method)));
    unary.traits.max_small_bytes = kMaxIdsBytes;
  };
  const auto add = [&](absl::string_view method, UnaryMethod unary) {
    unary.observe = observe_(NameOf(method));
    methods[absl::StrCat("/", NameOf(method))] = std::move(unary);
  };
  add("Create", SmallMethod<v1::CreateRequest, v1::Cache>(*this, {}));
  add("Fork", SmallMethod<v1::ForkRequest, v1::Cache>(*this, {}));
  add("Truncate", SmallMethod<v1::TruncateRequest, v1::Cache>(*this, {}));
  add_of_ids("Renew", renew_);
  add_of_ids("Close", close_);
  add_of_ids("Get", get_);
  add("List", SmallMethod<v1::ListRequest, v1::Caches>(*this, {}));
  // While caches live, their callers go on.
  constexpr MethodTraits kTraits = {.serves_while_draining = true};
  add("Append", {.traits = kTraits,
                 .new_handler = [this] { return std::make_unique<AppendHandler>(store_); }});
  add("Attend", {.traits = kTraits,
                 .new_handler = [this] { return std::make_unique<AttendCachedHandler>(store_); }});
  add("Diagnose", {.traits = kTraits, .new_handler = [this] {
                     return std::make_unique<DiagnoseCachedHandler>(store_);
                   }});
}

absl::Status CacheMethods::Respond(const std::string& caller, const v1::CreateRequest& request,
                                   v1::Cache& response) const {
  if (store_ == nullptr) return NoCaches();
  RAPT_ASSIGN_OR_RETURN(const cache::CacheSpec spec, DecodeCreate(request));
  return Answer(store_->Create(caller, spec), response);
}

absl::Status CacheMethods::Respond(const std::string& caller, const v1::ForkRequest& request,
                                   v1::Cache& response) const {
  if (store_ == nullptr) return NoCaches();
  return Answer(store_->Fork(caller, DecodeFork(request)), response);
}

absl::Status CacheMethods::Respond(const std::string& caller, const v1::TruncateRequest& request,
                                   v1::Cache& response) const {
  if (store_ == nullptr) return NoCaches();
  return Answer(store_->Truncate(caller, request.cache(), request.length(), request.generation()),
                response);
}

absl::Status CacheMethods::Respond(const std::string& caller, const v1::ListRequest& request,
                                   v1::Caches& response) const {
  if (store_ == nullptr) return NoCaches();
  return Answer(
      store_->List(caller, request.page_size(), request.page_token(), request.name_prefix()),
      response);
}

absl::Status CacheMethods::OnIds::Respond(const std::string& caller, const v1::Ids& request,
                                          v1::Caches& response) const {
  if (store == nullptr) return NoCaches();
  RAPT_ASSIGN_OR_RETURN(const std::vector<std::string> ids, DecodeIds(request));
  return Answer((store->*run)(caller, ids), response);
}

}  // namespace rapt::native
