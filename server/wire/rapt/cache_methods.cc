#include "server/wire/rapt/cache_methods.h"

#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "server/cache/cached_attention.h"
#include "server/cache/cached_diagnosis.h"
#include "server/protocols/rapt/cache_codec.h"
#include "server/protocols/response_size.h"
#include "server/wire/rapt/cache_transfer_calls.h"

namespace rapt::native {
namespace {

// Calls that the engine computes.
class CacheHandler : public ComputedHandler {
 public:
  explicit CacheHandler(cache::CacheStore* store) : store_(store) {}

 private:
  virtual absl::StatusOr<Request> DecodeFor(cache::CacheStore& store, const MessageBytes& message,
                                            MethodCall& call) = 0;

  absl::StatusOr<Request> Decode(const MessageBytes& message, MethodCall& call) final {
    if (store_ == nullptr) return NoCaches();
    return DecodeFor(*store_, message, call);
  }

  cache::CacheStore* const store_;
};

class AttendCachedHandler final : public CacheHandler {
 public:
  using CacheHandler::CacheHandler;

 private:
  absl::StatusOr<Request> DecodeFor(cache::CacheStore& store, const MessageBytes& message,
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

  ResponseMessage Encode(const Result& result, MethodCall&) override {
    ResponseMessage response = EncodeAttendCached(*operator_, attention_.results(), result);
    attention_.Release();
    return response;
  }

  cache::CachedAttention attention_;
  std::shared_ptr<const TensorOperator> operator_;
};

class AppendHandler final : public CacheHandler {
 public:
  using CacheHandler::CacheHandler;

 private:
  absl::StatusOr<Request> DecodeFor(cache::CacheStore& store, const MessageBytes& message,
                                    MethodCall& call) override {
    RAPT_ASSIGN_OR_RETURN(DecodedAppend decoded, DecodeAppend(message));
    absl::StatusOr<Request> request =
        append_.Start(store, call.call().caller(), std::move(decoded.parts), decoded.partial);
    if (request.ok()) request->priority = decoded.priority;
    return request;
  }

  ResponseMessage Encode(const Result&, MethodCall&) override {
    ResponseMessage response = EncodeAppend(append_.results());
    append_.Release();
    return response;
  }

  cache::CachedAppend append_;
};

class DiagnoseCachedHandler final : public CacheHandler {
 public:
  using CacheHandler::CacheHandler;

 private:
  absl::StatusOr<Request> DecodeFor(cache::CacheStore& store, const MessageBytes& message,
                                    MethodCall& call) override {
    RAPT_ASSIGN_OR_RETURN(DecodedAttend decoded, DecodeAttendCached(message));
    absl::StatusOr<Request> request =
        diagnosis_.Start(store, call.call().caller(), std::move(decoded.call));
    if (request.ok()) request->priority = decoded.priority;
    return request;
  }

  void Record(const Result&, MethodCall&) override {}  // as Diagnose of other calls

  ResponseMessage Encode(const Result&, MethodCall& call) override {
    return EncodeDiagnosis(diagnosis_, call.call().engine().plan_options());
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

absl::Status Create(cache::CacheStore& store, const Call& call, const v1::CreateRequest& request,
                    v1::Cache& response) {
  RAPT_ASSIGN_OR_RETURN(const cache::CacheSpec spec, DecodeCreate(request));
  return Answer(store.Create(call.caller(), spec), response);
}

absl::Status Fork(cache::CacheStore& store, const Call& call, const v1::ForkRequest& request,
                  v1::Cache& response) {
  return Answer(store.Fork(call.caller(), DecodeFork(request)), response);
}

absl::StatusOr<cache::CacheInfo> Truncate(cache::CacheStore& store, const std::string& caller,
                                          const v1::TruncateRequest& request) {
  return store.Truncate(caller, request.cache(), request.length(), request.generation());
}

absl::Status Truncate(cache::CacheStore& store, const Call& call,
                      const v1::TruncateRequest& request, v1::Cache& response) {
  return Answer(Truncate(store, call.caller(), request), response);
}

absl::StatusOr<cache::CacheInfo> Close(cache::CacheStore& store, const std::string& caller,
                                       const std::string& id) {
  RAPT_ASSIGN_OR_RETURN(cache::CacheList closed, store.Close(caller, absl::MakeConstSpan(&id, 1)));
  return std::move(closed.caches.front());
}

absl::Status Update(cache::CacheStore& store, const Call& call, const v1::UpdateRequest& request,
                    v1::UpdateResponse& response) {
  RAPT_RETURN_IF_ERROR(CheckUpdate(request));
  const std::string& caller = call.caller();
  absl::Status status;
  const auto answer = [&](const absl::StatusOr<cache::CacheInfo>& info, v1::UpdateResult& result) {
    Encode(info, result);
    status.Update(info.status());
  };
  for (const v1::ForkRequest& fork : request.forks()) {
    if (call.is_over()) return call.CancelledOrLate();
    answer(store.Fork(caller, DecodeFork(fork)), *response.add_forks());
  }
  // A truncation would change the generation that the fork needs when it is sent again.
  if (!status.ok()) return absl::OkStatus();
  for (const v1::TruncateRequest& truncate : request.truncates()) {
    if (call.is_over()) return call.CancelledOrLate();
    answer(Truncate(store, caller, truncate), *response.add_truncates());
  }
  if (!status.ok()) return absl::OkStatus();
  for (const std::string& id : request.closes()) {
    Encode(Close(store, caller, id), *response.add_closes());
  }
  return absl::OkStatus();
}

absl::Status List(cache::CacheStore& store, const Call& call, const v1::ListRequest& request,
                  v1::Caches& response) {
  return Answer(
      store.List(call.caller(), request.page_size(), request.page_token(), request.name_prefix()),
      response);
}

// Renew, Close and Get, which have the same messages.
template <auto run>
absl::Status OnIds(cache::CacheStore& store, const Call& call, const v1::Ids& request,
                   v1::Caches& response) {
  RAPT_ASSIGN_OR_RETURN(const std::vector<std::string> ids, DecodeIds(request));
  return Answer((store.*run)(call.caller(), ids), response);
}

// A method without tensors.
template <typename ProtoRequest, typename ProtoResponse>
UnaryMethod OnStore(cache::CacheStore* store,
                    absl::Status (*respond)(cache::CacheStore&, const Call&, const ProtoRequest&,
                                            ProtoResponse&)) {
  return SmallMethod<ProtoRequest, ProtoResponse>(
      [store, respond](const Call& call, const ProtoRequest& request, ProtoResponse& response) {
        return store == nullptr ? NoCaches() : respond(*store, call, request, response);
      },
      {});
}

}  // namespace

absl::Status NoCaches() {
  return absl::UnimplementedError(
      "this server keeps no caches; --kv_cache_bytes gives it memory for them");
}

CacheMethods::CacheMethods(cache::CacheStore* store, const CallObserverFactory& observe)
    : store_(store),
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
  constexpr int64_t kMaxIdsBytes = 128 * 1024;     // of 1024 ids
  constexpr int64_t kMaxUpdateBytes = 512 * 1024;  // of 1024 forks
  const auto add = [&](absl::string_view method, UnaryMethod unary) -> UnaryMethod& {
    unary.observe = observe_(NameOf(method));
    return methods[absl::StrCat("/", NameOf(method))] = std::move(unary);
  };
  const auto add_of_ids = [&](absl::string_view method, UnaryMethod unary) {
    add(method, std::move(unary)).traits.max_small_bytes = kMaxIdsBytes;
  };
  add("Create", OnStore(store_, Create));
  add("Fork", OnStore(store_, Fork));
  add("Truncate", OnStore(store_, Truncate));
  add("Update", OnStore(store_, Update)).traits.max_small_bytes = kMaxUpdateBytes;
  add_of_ids("Renew", OnStore(store_, OnIds<&cache::CacheStore::Renew>));
  add_of_ids("Close", OnStore(store_, OnIds<&cache::CacheStore::Close>));
  add_of_ids("Get", OnStore(store_, OnIds<&cache::CacheStore::Get>));
  add("List", OnStore(store_, List));
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

}  // namespace rapt::native
