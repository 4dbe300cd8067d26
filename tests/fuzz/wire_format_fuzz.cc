// Any bytes as a message in slices: the wire format must accept, reject and read the same as
// generated code, and the codecs must not accept what generated code rejects. The first two bytes
// choose the message and the slices.
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/message.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "base/wire_format.h"
#include "proto/inference/grpc_service.pb.h"
#include "proto/rapt/v1/attention.pb.h"
#include "proto/rapt/v1/cache.pb.h"
#include "server/protocols/message_parts.h"
#include "server/protocols/oip/codec.h"
#include "server/protocols/rapt/cache_codec.h"
#include "server/protocols/rapt/codec.h"
#include "tests/fuzz/operator_codecs.h"
#include "tests/support/wire_message.h"

namespace rapt {
namespace {

using inference::ModelInferRequest;
using ::rapt::v1::AppendRequest;
using ::rapt::v1::AttendBackwardRequest;
using ::rapt::v1::AttendCachedRequest;
using ::rapt::v1::AttendRequest;
using ::rapt::v1::DiagnoseRequest;
using ::rapt::v1::LinearAttendRequest;

constexpr wire::PayloadField kRawFields[] = {{7, nullptr}};
constexpr wire::MessageSchema kRawSchema = {kRawFields};
constexpr wire::SplitLimits kNoLimits = {.rest_bytes = 1 << 30, .payloads = 1 << 30};

void PutBack(const wire::Payload&, std::string bytes, ModelInferRequest& message) {
  message.add_raw_input_contents(std::move(bytes));
}

void PutBack(const wire::Payload& payload, std::string bytes, google::protobuf::Message& request) {
  google::protobuf::Message* message = &request;
  for (size_t n = 0; n + 1 < payload.path.size(); ++n) {
    const auto* field = message->GetDescriptor()->FindFieldByNumber(payload.path[n]);
    message = message->GetReflection()->MutableMessage(message, field);
  }
  static_cast<rapt::v1::Tensor*>(message)->set_data(std::move(bytes));
}

void PutBack(const wire::Payload& payload, std::string bytes, AppendRequest& request) {
  v1::AppendPart& part = *request.mutable_parts(payload.index);
  const bool is_key = payload.path[1] == v1::AppendPart::kKFieldNumber;
  (is_key ? part.mutable_k() : part.mutable_v())->set_data(std::move(bytes));
}

// Serializes deterministically, because the order of maps may differ from call to call.
template <typename Message>
std::string Serialize(const Message& message) {
  std::string bytes;
  google::protobuf::io::StringOutputStream stream(&bytes);
  google::protobuf::io::CodedOutputStream out(&stream);
  out.SetSerializationDeterministic(true);
  message.SerializeToCodedStream(&out);
  out.Trim();
  return bytes;
}

// Checks against generated code. Returns whether it accepts the bytes.
template <typename Message>
bool CheckSplit(const std::string& bytes, const test::WireMessage& sliced,
                const wire::MessageSchema& schema) {
  Message generated;
  const bool accepted = generated.ParseFromString(bytes);
  const MessageBytes message = sliced.bytes();
  const auto split = wire::Split(message.bytes, message.size, schema, kNoLimits);
  Message ours;
  const bool ours_accepted = split.ok() && ours.ParseFromString(split->rest);
  RAPT_CHECK(ours_accepted == accepted, "only one of the parsers accepts the bytes");
  if (!accepted) return false;
  for (const wire::Payload& payload : split->payloads) {
    PutBack(payload, test::Gather(message.Part(payload.begin, payload.size)), ours);
  }
  RAPT_CHECK(Serialize(ours) == Serialize(generated), "the parsers read different values");
  return true;
}

void Check(const std::string& bytes, int kind, int64_t slice_bytes) {
  const test::WireMessage sliced(bytes, slice_bytes);
  bool accepted, decoded;
  switch (kind % 7) {
    case 0:
      accepted = CheckSplit<ModelInferRequest>(bytes, sliced, kRawSchema);
      decoded = oip::DecodeInfer(sliced.bytes(), Instant{}, SharedMemory({}), nullptr,
                                 {.sequence_lease = std::chrono::minutes(1)})
                    .ok();
      break;
    case 1:
      accepted = CheckSplit<AttendRequest>(bytes, sliced, native::AttendSchema());
      decoded = native::DecodeAttend(sliced.bytes(), SharedMemory({})).ok();
      break;
    case 2:
      accepted = CheckSplit<DiagnoseRequest>(bytes, sliced, native::DiagnoseSchema());
      decoded = native::DecodeDiagnose(sliced.bytes(), SharedMemory({})).ok();
      break;
    case 3:
      accepted = CheckSplit<AttendBackwardRequest>(bytes, sliced, native::BackwardSchema());
      decoded = native::DecodeBackward(sliced.bytes(), SharedMemory({})).ok();
      break;
    case 4:
      accepted = CheckSplit<LinearAttendRequest>(bytes, sliced, CodecOf("LinearAttend").payloads());
      decoded = CodecOf("LinearAttend").Decode(sliced.bytes(), SharedMemory({})).ok();
      break;
    case 5:
      accepted = CheckSplit<AttendCachedRequest>(bytes, sliced, native::AttendCachedSchema());
      decoded = native::DecodeAttendCached(sliced.bytes()).ok();
      break;
    default:
      accepted = CheckSplit<AppendRequest>(bytes, sliced, native::AppendSchema());
      decoded = native::DecodeAppend(sliced.bytes()).ok();
  }
  RAPT_CHECK(accepted || !decoded, "a codec accepted an invalid message");
}

}  // namespace
}  // namespace rapt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  rapt::Check({reinterpret_cast<const char*>(data) + 2, size - 2}, data[0], data[1]);
  return 0;
}
