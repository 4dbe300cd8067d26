// Any bytes as the head of an HTTP request, as a chunked body, or as a request for inference in
// JSON with binary data, from its decoding to its answer, which must be JSON, or as tensors of
// rapt.v1 in JSON. The first byte chooses.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "base/buffer_pool.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/timer.h"
#include "proto/rapt/v1/attention.pb.h"
#include "server/admission/gate.h"
#include "server/engine.h"
#include "server/execution/executor.h"
#include "server/protocols/message_parts.h"
#include "server/protocols/oip/codec.h"
#include "server/protocols/oip/json_codec.h"
#include "server/protocols/rapt/json_tensors.h"
#include "server/wire/http/body_framing.h"
#include "server/wire/http/head_parser.h"

namespace rapt {
namespace {

// A few megabytes, so that no input takes long.
constexpr int64_t kBudgetBytes = 4 << 20;
constexpr int64_t kMaxJsonBytes = 1 << 16;

// The components that process a request.
struct Server {
  SteadyClock clock;
  Timer timer{clock};
  AdmissionGate gate{
      {.budget_bytes = kBudgetBytes, .max_queued = 0, .max_queue_delay = {}}, timer, clock};
  BufferPool pool{kBudgetBytes, clock};
  Executor executor{1, clock};
  Engine engine{{.threads = 1}, gate, pool, executor};
  const SharedMemory shared_memory{{.allowed = false}};
};

Server& TheServer() {
  static auto* const server = new Server;
  return *server;
}

// Bytes that arrive one by one lead to the same result as all at once.
void ParseHead(absl::string_view bytes) {
  http::HeadParser whole, parts;
  const http::HeadParser::Result result = whole.Parse(bytes);
  http::HeadParser::Result last = http::HeadParser::Result::kIncomplete;
  for (size_t n = 1; n <= bytes.size() && last == http::HeadParser::Result::kIncomplete; ++n) {
    last = parts.Parse(bytes.substr(0, n));
  }
  if (result != http::HeadParser::Result::kComplete) return;
  RAPT_CHECK(last == result && parts.size() == whole.size(), "the parts of a head differ");
  const http::Request request = whole.TakeRequest();
  RAPT_CHECK(!request.is_chunked || request.content_length == 0, "a body has two lengths");
  RAPT_CHECK(request.Values("content-length").size() <= 1, "a body has two lengths");
}

void ReadChunks(absl::string_view bytes) {
  http::BodyFraming framing = http::BodyFraming::Chunked();
  for (;;) {
    const http::BodyFraming::Next next = framing.Advance(bytes);
    if (next != http::BodyFraming::Next::kData || bytes.empty()) return;
    const uint64_t count = std::min<uint64_t>(bytes.size(), framing.data_left());
    framing.TakeData(count);
    bytes.remove_prefix(count);
  }
}

// An error states its reason.
void CheckRefusal(const absl::Status& status) {
  RAPT_CHECK(!status.message().empty(), "an error has no message");
  RAPT_CHECK(!absl::IsInternal(status) && !absl::IsUnknown(status),
             "an input caused an internal error");
}

void ReadTensors(absl::string_view json) {
  const auto message = native::ReadJson(*v1::DiagnoseRequest::descriptor(), json, TheServer().pool);
  if (!message.ok()) return CheckRefusal(message.status());
  RAPT_CHECK(message->bytes().size <= native::MessageBytesOf(static_cast<int64_t>(json.size())),
             "the message has more bytes than were reserved");
  RAPT_CHECK(v1::DiagnoseRequest().ParseFromString(message->bytes().ToString()),
             "the message is malformed");
}

void Infer(const std::string& body, int64_t json_bytes) {
  const ByteSlice slice = {reinterpret_cast<const std::byte*>(body.data()), 0,
                           static_cast<int64_t>(body.size())};
  const MessageBytes message = {{{&slice, body.empty() ? 0U : 1U}, 0}, slice.end};
  auto fields = oip::ReadJsonInfer(message, json_bytes, kMaxJsonBytes, TheServer().pool);
  if (!fields.ok()) return CheckRefusal(fields.status());
  const oip::BinaryOutputs binary = (*fields)->binary;
  const auto model = oip::FindModel("attention", "", {});
  auto decoded = oip::DecodeInfer(*std::move(fields), **model, TheServer().clock.Now(),
                                  TheServer().shared_memory, {});
  if (!decoded.ok()) return CheckRefusal(decoded.status());
  std::promise<Result> promise;
  TheServer().engine.Submit(std::move(decoded->request),
                            [&promise](Result r) { promise.set_value(std::move(r)); });
  const Result result = promise.get_future().get();
  if (!result.status.ok()) return CheckRefusal(result.status);
  const auto answer = oip::EncodeJsonInfer(binary, *decoded, result, kMaxJsonBytes);
  if (!answer.ok()) return CheckRefusal(answer.status());
  RAPT_CHECK(nlohmann::json::accept(answer->json), "the answer is no JSON");
  RAPT_CHECK(static_cast<int64_t>(answer->json.size()) <= decoded->encoding_bytes,
             "the answer has more bytes than were reserved");
}

}  // namespace
}  // namespace rapt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 3) return 0;
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  switch (data[0] % 5) {
    case 0:
      rapt::ParseHead(bytes.substr(1));
      return 0;
    case 1:
      rapt::ReadChunks(bytes.substr(1));
      return 0;
    case 2:
      rapt::Infer(std::string(bytes.substr(1)), static_cast<int64_t>(size) - 1);
      return 0;
    case 3:
      rapt::Infer(std::string(bytes.substr(3)),
                  std::min<int64_t>(data[1] * 256 + data[2], static_cast<int64_t>(size) - 3));
      return 0;
    default:
      rapt::ReadTensors(bytes.substr(1));
      return 0;
  }
}
