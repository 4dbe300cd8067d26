// Any bytes as a message of one of the protocols, through all layers: codec, validation, plan,
// admission, execution and the response, which generated code must parse. The first two bytes
// choose the message and the slices.
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <utility>

#include "base/buffer_pool.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/timer.h"
#include "proto/inference/grpc_service.pb.h"
#include "proto/rapt/v1/attention.pb.h"
#include "server/admission/gate.h"
#include "server/engine.h"
#include "server/execution/executor.h"
#include "server/protocols/message_parts.h"
#include "server/protocols/oip/codec.h"
#include "server/protocols/rapt/codec.h"
#include "server/protocols/rapt/operator_stream.h"
#include "server/protocols/response_size.h"
#include "tests/fuzz/operator_codecs.h"
#include "tests/support/wire_message.h"

namespace rapt {
namespace {

// A few megabytes, so that no input takes long.
constexpr int64_t kBudgetBytes = 4 << 20;
constexpr int kThreads = 2;

// The components that process a request.
struct Server {
  SteadyClock clock;
  Timer timer{clock};
  AdmissionGate gate{
      {.budget_bytes = kBudgetBytes, .max_queued = 0, .max_queue_delay = {}}, timer, clock};
  BufferPool pool{kBudgetBytes, clock};
  Executor executor{kThreads, clock};
  Engine engine{{.threads = kThreads}, gate, pool, executor};
};

Server& TheServer() {
  static auto* const server = new Server;
  return *server;
}

Result Compute(Request request) {
  std::promise<Result> result;
  TheServer().engine.Submit(std::move(request),
                            [&result](Result r) { result.set_value(std::move(r)); });
  return result.get_future().get();
}

// An error states its reason.
void CheckRefusal(const absl::Status& status) {
  RAPT_CHECK(!status.message().empty(), "an error has no message");
  RAPT_CHECK(!absl::IsInternal(status) && !absl::IsUnknown(status),
             "an input caused an internal error");
}

template <typename Message>
void CheckResponse(ResponseMessage response) {
  Message message;
  RAPT_CHECK(message.ParseFromString(test::Gather(std::move(response))),
             "the response cannot be parsed");
}

void Infer(const MessageBytes& message, const SharedMemory& shared_memory) {
  auto decoded = oip::DecodeInfer(message, TheServer().clock.Now(), shared_memory);
  if (!decoded.ok()) return CheckRefusal(decoded.status());
  const Result result = Compute(std::move(decoded->request));
  if (!result.status.ok()) return CheckRefusal(result.status);
  CheckResponse<inference::ModelInferResponse>(oip::EncodeInfer(*decoded, result));
}

// A message of Attend or AttendBackward.
template <typename Response, typename Decode>
void Attend(const MessageBytes& message, const SharedMemory& shared_memory, Decode decode) {
  auto decoded = decode(message, shared_memory);
  if (!decoded.ok()) return CheckRefusal(decoded.status());
  if (absl::Status status = CheckResponseSize(native::OutputsInResponse(*decoded)); !status.ok()) {
    return CheckRefusal(status);
  }
  const ResolvedCall call = decoded->request.call;
  const Result result = Compute(std::move(decoded->request));
  if (!result.status.ok()) return CheckRefusal(result.status);
  CheckResponse<Response>(native::EncodeResult(call, decoded->fields.places(), result));
}

void Diagnose(const MessageBytes& message, const SharedMemory& shared_memory) {
  auto decoded = native::DecodeDiagnose(message, shared_memory);
  if (!decoded.ok()) return CheckRefusal(decoded.status());
  std::promise<absl::Status> done;
  TheServer().engine.Diagnose(
      std::move(decoded->request),
      [&done](const absl::StatusOr<DiagnosisReport>& report) { done.set_value(report.status()); });
  const absl::Status status = done.get_future().get();
  if (!status.ok()) CheckRefusal(status);
}

void Operator(const native::OperatorCodec& codec, const MessageBytes& message,
              const SharedMemory& shared_memory) {
  auto request = codec.Decode(message, shared_memory);
  if (!request.ok()) return CheckRefusal(request.status());
  const auto op = request->tensor_operator;
  const SlotSet outputs = request->Outputs();
  const Result result = Compute(*std::move(request));
  if (!result.status.ok()) return CheckRefusal(result.status);
  const std::unique_ptr<google::protobuf::Message> response(codec.response().New());
  RAPT_CHECK(response->ParseFromString(test::Gather(codec.Encode(*op, outputs, result))),
             "the response cannot be parsed");
}

// Of a stream whose messages all have the tokens of the first one.
void LinearAttendStream(const std::string& bytes, int64_t slice_bytes) {
  native::OperatorStream stream(CodecOf("LinearAttend"));
  v1::LinearAttendRequest tokens;
  std::string next = bytes;
  for (int n = 0; n < 3; ++n) {
    const test::WireMessage message(next, slice_bytes);
    auto request = stream.Decode(message.bytes());
    if (!request.ok()) return CheckRefusal(request.status());
    const Result result = Compute(*std::move(request));
    if (!result.status.ok()) return CheckRefusal(result.status);
    CheckResponse<v1::LinearAttendResponse>(stream.Encode(result));
    v1::LinearAttendRequest first;
    if (n > 0 || !first.ParseFromString(bytes)) continue;
    *tokens.mutable_query() = first.query();
    *tokens.mutable_key() = first.key();
    *tokens.mutable_value() = first.value();
    if (first.has_decay()) *tokens.mutable_decay() = first.decay();
    if (first.has_beta()) *tokens.mutable_beta() = first.beta();
    next = tokens.SerializeAsString();
  }
}

void Check(const std::string& bytes, int kind, int64_t slice_bytes) {
  const test::WireMessage message(bytes, slice_bytes);
  const SharedMemory shared_memory({});
  switch (kind % 9) {
    case 0:
      Infer(message.bytes(), shared_memory);
      break;
    case 1:
      Attend<v1::AttendResponse>(message.bytes(), shared_memory, native::DecodeAttend);
      break;
    case 2:
      Diagnose(message.bytes(), shared_memory);
      break;
    case 3:
      Attend<v1::AttendBackwardResponse>(message.bytes(), shared_memory, native::DecodeBackward);
      break;
    case 4:
      Operator(CodecOf("LinearAttend"), message.bytes(), shared_memory);
      break;
    case 5:
      LinearAttendStream(bytes, slice_bytes);
      break;
    case 6:
      Operator(CodecOf("LshAttend"), message.bytes(), shared_memory);
      break;
    case 7:
      Operator(CodecOf("RotaryEmbed"), message.bytes(), shared_memory);
      break;
    default:
      Operator(CodecOf("EncodePositions"), message.bytes(), shared_memory);
  }
  RAPT_CHECK(TheServer().gate.reserved_bytes() == 0, "a completed request holds memory");
}

}  // namespace
}  // namespace rapt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  rapt::Check({reinterpret_cast<const char*>(data) + 2, size - 2}, data[0], data[1]);
  return 0;
}
