// Any sequence of messages of CacheService on a few caches, through all layers. An input is a list
// of messages: a byte for the method, two for the length, and the message, in which the id "0"
// stands for the first cache that was made, and so on. At the end all memory must be free.
#include <cstddef>
#include <cstdint>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer_pool.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/timer.h"
#include "proto/rapt/v1/cache.pb.h"
#include "server/admission/gate.h"
#include "server/cache/arena.h"
#include "server/cache/cache_store.h"
#include "server/cache/cached_attention.h"
#include "server/cache/cached_diagnosis.h"
#include "server/engine.h"
#include "server/execution/executor.h"
#include "server/protocols/message_parts.h"
#include "server/protocols/rapt/cache_codec.h"
#include "server/protocols/response_size.h"
#include "tests/support/wire_message.h"

namespace rapt {
namespace {

// A few megabytes, so that no input takes long.
constexpr int64_t kBudgetBytes = 4 << 20;
constexpr int64_t kCacheBytes = 8 << 20;
constexpr int64_t kSliceBytes = 100;
constexpr char kOwner[] = "fuzzer";

// The components that process a request.
struct Server {
  SteadyClock clock;
  Timer timer{clock};
  AdmissionGate gate{
      {.budget_bytes = kBudgetBytes, .max_queued = 0, .max_queue_delay = {}}, timer, clock};
  BufferPool pool{kBudgetBytes, clock};
  Executor executor{1, clock};
  Engine engine{{.threads = 1}, gate, pool, executor};
};

Server& TheServer() {
  static auto* const server = new Server;
  return *server;
}

// An error states its reason.
void CheckRefusal(const absl::Status& status) {
  RAPT_CHECK(!status.message().empty(), "an error has no message");
  RAPT_CHECK(!absl::IsInternal(status) && !absl::IsUnknown(status),
             "an input caused an internal error");
}

// The caches of one input.
class Session {
 public:
  Session() {
    // One without and one with eviction, which stores 8 bits.
    for (int64_t keep_last : {0, 3}) {
      cache::CacheSpec spec;
      const bool q8_0 = keep_last > 0;
      spec.shapes = {{.layers = 2,
                      .token = {.kv_heads = 1, .head_size = 2, .value_head_size = 1, .q8_0 = q8_0},
                      .keep_first = keep_last / 2,
                      .keep_last = keep_last}};
      Note(store_.Create(kOwner, spec));
    }
  }

  ~Session() {
    store_.Close(kOwner, ids_).IgnoreError();
    RAPT_CHECK(store_.caches() == 0, "a cache stays");
    RAPT_CHECK(arena_.committed_bytes() == 0, "memory of caches is lost");
    RAPT_CHECK(TheServer().gate.reserved_bytes() == 0, "a completed request holds memory");
  }

  void Call(int method, const std::string& bytes) {
    switch (method % 8) {
      case 0:
        return Create(bytes);
      case 1:
        return Fork(bytes);
      case 2:
        return Truncate(bytes);
      case 3:
        return Append(bytes);
      case 4:
        return Attend(bytes);
      case 5:
        return List(bytes);
      case 6:
        return Diagnose(bytes);
      default:
        return Get(bytes);
    }
  }

 private:
  void Note(const absl::StatusOr<cache::CacheInfo>& info) {
    if (!info.ok()) return CheckRefusal(info.status());
    v1::Cache message;
    native::Encode(*info, message);
    ids_.push_back(info->id);
  }

  std::string IdOf(const std::string& name) const {
    const size_t n = name.size() == 1 ? static_cast<size_t>(name[0] - '0') : ids_.size();
    return n < ids_.size() ? ids_[n] : name;
  }

  void Create(const std::string& bytes) {
    v1::CreateRequest request;
    if (!request.ParseFromString(bytes)) return;
    const auto spec = native::DecodeCreate(request);
    if (!spec.ok()) return CheckRefusal(spec.status());
    Note(store_.Create(kOwner, *spec));
  }

  void Fork(const std::string& bytes) {
    v1::ForkRequest request;
    if (!request.ParseFromString(bytes)) return;
    request.set_cache(IdOf(request.cache()));
    Note(store_.Fork(kOwner, native::DecodeFork(request)));
  }

  void Truncate(const std::string& bytes) {
    v1::TruncateRequest request;
    if (!request.ParseFromString(bytes)) return;
    const auto info =
        store_.Truncate(kOwner, IdOf(request.cache()), request.length(), request.generation());
    if (!info.ok()) CheckRefusal(info.status());
  }

  void List(const std::string& bytes) {
    v1::ListRequest request;
    if (!request.ParseFromString(bytes)) return;
    const auto list =
        store_.List(kOwner, request.page_size(), request.page_token(), request.name_prefix());
    if (!list.ok()) CheckRefusal(list.status());
  }

  void Get(const std::string& bytes) {
    v1::Ids request;
    if (!request.ParseFromString(bytes)) return;
    const auto ids = native::DecodeIds(request);
    if (!ids.ok()) return CheckRefusal(ids.status());
    const auto list = store_.Get(kOwner, *ids);
    if (!list.ok()) CheckRefusal(list.status());
  }

  void Append(const std::string& bytes) {
    const test::WireMessage message(bytes, kSliceBytes);
    auto decoded = native::DecodeAppend(message.bytes());
    if (!decoded.ok()) return CheckRefusal(decoded.status());
    for (cache::AppendPart& part : decoded->parts) part.call.cache = IdOf(part.call.cache);
    cache::CachedAppend append;
    Run(append.Start(store_, kOwner, std::move(decoded->parts), decoded->partial));
  }

  void Attend(const std::string& bytes) {
    const test::WireMessage message(bytes, kSliceBytes);
    auto decoded = native::DecodeAttendCached(message.bytes());
    if (!decoded.ok()) return CheckRefusal(decoded.status());
    for (cache::AttendItem& item : decoded->call.items) item.call.cache = IdOf(item.call.cache);
    cache::CachedAttention attention;
    auto request = attention.Start(store_, kOwner, std::move(decoded->call));
    if (!request.ok()) return CheckRefusal(request.status());
    const auto op = request->tensor_operator;
    const absl::Status size = CheckResponseSize(OutputsOf(*op, request->Outputs()));
    if (!size.ok()) return CheckRefusal(size);
    const Result result = Compute(*std::move(request));
    if (!result.status.ok()) return CheckRefusal(result.status);
    v1::AttendCachedResponse response;
    RAPT_CHECK(response.ParseFromString(
                   test::Gather(native::EncodeAttendCached(*op, attention.results(), result))),
               "the response cannot be parsed");
  }

  void Diagnose(const std::string& bytes) {
    const test::WireMessage message(bytes, kSliceBytes);
    auto decoded = native::DecodeAttendCached(message.bytes());
    if (!decoded.ok()) return CheckRefusal(decoded.status());
    for (cache::AttendItem& item : decoded->call.items) item.call.cache = IdOf(item.call.cache);
    cache::CachedDiagnosis diagnosis;
    auto request = diagnosis.Start(store_, kOwner, std::move(decoded->call));
    if (!request.ok()) return CheckRefusal(request.status());
    const Result result = Compute(*std::move(request));
    if (!result.status.ok()) return CheckRefusal(result.status);
    v1::DiagnoseResponse response;
    RAPT_CHECK(response.ParseFromString(test::Gather(
                   native::EncodeDiagnosis(diagnosis, TheServer().engine.plan_options()))),
               "the report cannot be parsed");
  }

  static void Run(absl::StatusOr<Request> request) {
    if (!request.ok()) return CheckRefusal(request.status());
    const Result result = Compute(*std::move(request));
    if (!result.status.ok()) CheckRefusal(result.status);
  }

  static Result Compute(Request request) {
    std::promise<Result> result;
    TheServer().engine.Submit(std::move(request),
                              [&result](Result r) { result.set_value(std::move(r)); });
    return result.get_future().get();
  }

  cache::Arena arena_{kCacheBytes};
  cache::CacheStore store_{{.instance = "fuzz"}, arena_, TheServer().clock};
  std::vector<std::string> ids_;
};

void Check(const uint8_t* data, size_t size) {
  constexpr size_t kHead = 3;
  Session session;
  for (size_t at = 0; at + kHead <= size;) {
    const size_t length = data[at + 1] + 256 * size_t{data[at + 2]};
    const size_t most = size - at - kHead;
    session.Call(data[at],
                 {reinterpret_cast<const char*>(data) + at + kHead, length < most ? length : most});
    at += kHead + length;
  }
}

}  // namespace
}  // namespace rapt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  rapt::Check(data, size);
  return 0;
}
