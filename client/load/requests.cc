#include "client/load/requests.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "base/wire_format.h"
#include "client/console/json.h"
#include "client/cpp/byte_buffer.h"
#include "client/cpp/codec.h"
#include "client/cpp/deadline.h"
#include "client/cpp/stream_codec.h"
#include "proto/inference/grpc_service.pb.h"

namespace rapt::load {
namespace {

using inference::ModelInferRequest;
using inference::ModelInferResponse;

constexpr int64_t kMaxMessageBytes = std::numeric_limits<int32_t>::max();
constexpr std::chrono::seconds kRegistrationTimeout{10};
constexpr int64_t kSharedAlignment = 64;

struct NamedInput {
  const char* name;  // of the ONNX operator
  client::TensorView view;
};

std::vector<NamedInput> InputsOf(const client::AttendCall& call) {
  std::vector<NamedInput> inputs = {{"Q", call.q}, {"K", call.k}, {"V", call.v}};
  if (call.mask) inputs.push_back({"attn_mask", *call.mask});
  if (!call.key_lengths.empty()) {
    const auto batch = static_cast<int64_t>(call.key_lengths.size());
    inputs.push_back({"nonpad_kv_seqlen", client::View<int64_t>({batch}, call.key_lengths)});
  }
  return inputs;
}

int64_t Aligned(int64_t offset) {
  return (offset + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
}

// Returns the request without the tensors' bytes.
ModelInferRequest DescribeOip(const Interface& interface, const client::AttendCall& call) {
  ModelInferRequest request;
  request.set_model_name(interface.model);
  if (call.causal) (*request.mutable_parameters())["is_causal"].set_int64_param(1);
  for (const NamedInput& input : InputsOf(call)) {
    ModelInferRequest::InferInputTensor& tensor = *request.add_inputs();
    tensor.set_name(input.name);
    const absl::string_view datatype = client::NameOf(input.view.dtype);
    tensor.set_datatype(datatype.data(), datatype.size());
    tensor.mutable_shape()->Add(input.view.shape.begin(), input.view.shape.end());
  }
  request.add_outputs()->set_name("Y");
  return request;
}

client::RequestMessage EncodeOip(const Interface& interface, const client::AttendCall& call) {
  client::RequestMessage message;
  message.Append(DescribeOip(interface, call).SerializeAsString());
  for (const NamedInput& input : InputsOf(call)) {
    std::string header;
    wire::AppendFieldHeader(ModelInferRequest::kRawInputContentsFieldNumber,
                            static_cast<int64_t>(input.view.data.size()), header);
    message.Append(header);
    message.AppendPayload(input.view.data);
  }
  return message;
}

// The inputs follow the JSON as binary data, and so does Y in the response.
EncodedCall EncodeHttp(const client::AttendCall& call) {
  JsonWriter json;
  json.BeginObject().Key("inputs").BeginArray();
  for (const NamedInput& input : InputsOf(call)) {
    json.BeginObject().Key("name").String(input.name);
    json.Key("datatype").String(std::string(client::NameOf(input.view.dtype)));
    json.Key("shape").Integers(input.view.shape);
    json.Key("parameters").BeginObject().Key("binary_data_size");
    json.Integer(static_cast<int64_t>(input.view.data.size())).EndObject().EndObject();
  }
  json.EndArray().Key("outputs").BeginArray().BeginObject().Key("name").String("Y");
  json.Key("parameters").BeginObject().Key("binary_data").Boolean(true).EndObject();
  json.EndObject().EndArray();
  if (call.causal) json.Key("parameters").BeginObject().Key("is_causal").Integer(1).EndObject();
  client::RequestMessage message;
  message.Append(json.EndObject().Take());
  const int64_t json_bytes = message.size();
  for (const NamedInput& input : InputsOf(call)) message.AppendPayload(input.view.data);
  return {.messages = {ToByteBuffer(message)},
          .message_bytes = message.size(),
          .json_bytes = json_bytes};
}

template <typename Tensor>
void SetSharedMemory(const client::SharedRegion& region, int64_t offset, int64_t bytes,
                     Tensor& tensor) {
  auto& parameters = *tensor.mutable_parameters();
  parameters["shared_memory_region"].set_string_param(region.name());
  parameters["shared_memory_offset"].set_int64_param(offset);
  parameters["shared_memory_byte_size"].set_int64_param(bytes);
}

// Returns the offset of Y in a region: after the inputs.
int64_t OffsetOfY(const client::AttendCall& call) {
  int64_t offset = 0;
  for (const NamedInput& input : InputsOf(call)) {
    offset = Aligned(offset + static_cast<int64_t>(input.view.data.size()));
  }
  return offset;
}

client::RequestMessage EncodeOipIn(const client::SharedRegion& region, const Interface& interface,
                                   const CallData& data) {
  ModelInferRequest request = DescribeOip(interface, data.call());
  int64_t offset = 0;
  int index = 0;
  for (const NamedInput& input : InputsOf(data.call())) {
    const auto bytes = static_cast<int64_t>(input.view.data.size());
    std::memcpy(region.bytes().data() + offset, input.view.data.data(), input.view.data.size());
    SetSharedMemory(region, offset, bytes, *request.mutable_inputs(index++));
    offset = Aligned(offset + bytes);
  }
  SetSharedMemory(region, offset, data.y_bytes(), *request.mutable_outputs(0));
  client::RequestMessage message;
  message.Append(request.SerializeAsString());
  return message;
}

template <typename Message>
absl::StatusOr<Message> Parse(const grpc::ByteBuffer& bytes) {
  grpc::ByteBuffer copy = bytes;  // deserialization consumes the buffer
  Message message;
  if (!grpc::SerializationTraits<Message>::Deserialize(&copy, &message).ok()) {
    return absl::InternalError("malformed response from server: it can't be parsed");
  }
  return message;
}

absl::StatusOr<std::shared_ptr<client::SharedRegion>> NewRegion(
    int64_t bytes, const client::Connection* connection) {
  std::shared_ptr<client::SharedRegion> region = client::SharedRegion::Make(bytes);
  if (region == nullptr) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "can't allocate %d bytes of shared memory; --concurrency times the size of the shapes "
        "must fit",
        bytes));
  }
  const grpc::Status status =
      client::Register(*region, *connection, client::Deadline::After(kRegistrationTimeout));
  if (status.ok()) return region;
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

absl::StatusOr<EncodedCall> EncodeShared(const Interface& interface, const CallData& data,
                                         const client::Connection* connection) {
  const int64_t bytes = OffsetOfY(data.call()) + data.y_bytes();
  RAPT_ASSIGN_OR_RETURN(auto region, NewRegion(bytes, connection));
  const client::RequestMessage message = interface.protocol == Protocol::kRapt
                                             ? client::EncodeAttendIn(*region, data.call())
                                             : EncodeOipIn(*region, interface, data);
  return EncodedCall{.messages = {ToByteBuffer(message)},
                     .message_bytes = message.size(),
                     .region = std::move(region)};
}

// --- A stream of rapt.v1: a header, then chunks ---

// Chunks of about 1 MB of keys and values, as in a call of several GB. The longer side streams.
absl::StatusOr<client::ChunkedCall> Divide(const CallData& data) {
  constexpr int64_t kChunkRows = 256;
  const bool keys_stream = data.shape().keys > data.shape().queries;
  return client::ChunkedCall::Make(
      data.call(),
      {.streaming = keys_stream ? client::Streaming::kKeys : client::Streaming::kQueries,
       .query_chunk = kChunkRows,
       .key_chunk = kChunkRows},
      kMaxMessageBytes);
}

absl::StatusOr<EncodedCall> EncodeStream(const CallData& data) {
  RAPT_ASSIGN_OR_RETURN(const client::ChunkedCall chunked, Divide(data));
  EncodedCall call;
  const auto add = [&call](const client::RequestMessage& message) {
    call.messages.push_back(ToByteBuffer(message));
    call.message_bytes += message.size();
  };
  add(chunked.Header());
  for (const client::StreamChunk& chunk : chunked.chunks()) add(chunked.Chunk(chunk));
  return call;
}

std::string TextOf(absl::Span<const std::byte> bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Assembles Y from the chunks received.
absl::StatusOr<std::string> GatherY(const CallData& data,
                                    const std::vector<grpc::ByteBuffer>& responses) {
  RAPT_ASSIGN_OR_RETURN(const client::ChunkedCall chunked, Divide(data));
  client::StreamResult result(chunked);
  for (const grpc::ByteBuffer& received : responses) {
    RAPT_RETURN_IF_ERROR(client::DecodeBytes(received, [&](const SlicedBytes& bytes, int64_t size) {
      return result.Take(bytes, size);
    }));
  }
  RAPT_ASSIGN_OR_RETURN(const client::AttendResult whole, result.Finish());
  return TextOf(whole.y.bytes());
}

}  // namespace

std::string MethodOf(const Interface& interface) {
  if (interface.protocol == Protocol::kHttp) {
    return absl::StrCat("/v2/models/", interface.model, "/infer");
  }
  if (interface.protocol == Protocol::kRapt) {
    return interface.transport == Transport::kStream ? "/rapt.v1.AttentionService/AttendStream"
                                                     : "/rapt.v1.AttentionService/Attend";
  }
  return interface.transport == Transport::kStream
             ? "/inference.GRPCInferenceService/ModelStreamInfer"
             : "/inference.GRPCInferenceService/ModelInfer";
}

grpc::ByteBuffer ToByteBuffer(const client::RequestMessage& message) {
  return client::ToByteBuffer(message, [](absl::Span<const std::byte> payload) {
    return grpc::Slice(const_cast<std::byte*>(payload.data()), payload.size(), [](void*) {});
  });
}

absl::StatusOr<EncodedCall> Encode(const Interface& interface, const CallData& data,
                                   const client::Connection* connection) {
  if (interface.transport == Transport::kSharedMemory) {
    return EncodeShared(interface, data, connection);
  }
  if (interface.protocol == Protocol::kRapt && interface.transport == Transport::kStream) {
    return EncodeStream(data);
  }
  if (interface.protocol == Protocol::kHttp) return EncodeHttp(data.call());
  RAPT_ASSIGN_OR_RETURN(const client::RequestMessage message,
                        interface.protocol == Protocol::kRapt
                            ? client::EncodeAttend(data.call(), kMaxMessageBytes)
                            : EncodeOip(interface, data.call()));
  if (message.size() > kMaxMessageBytes) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("a request of %s has %d bytes; a message must have at most %d",
                        Describe(data.shape()), message.size(), kMaxMessageBytes));
  }
  return EncodedCall{.messages = {ToByteBuffer(message)}, .message_bytes = message.size()};
}

void Release(const EncodedCall& call, const client::Connection* connection) {
  if (call.region == nullptr) return;
  client::Unregister(*call.region, *connection, client::Deadline::After(kRegistrationTimeout));
}

absl::Status StatusInResponse(const Interface& interface, const grpc::ByteBuffer& received) {
  if (interface.protocol != Protocol::kOip || interface.transport != Transport::kStream) {
    return absl::OkStatus();
  }
  // An error is a short message with that field only. Larger messages are not parsed.
  constexpr int64_t kMaxErrorBytes = 64 * 1024;
  if (static_cast<int64_t>(received.Length()) > kMaxErrorBytes) return absl::OkStatus();
  RAPT_ASSIGN_OR_RETURN(const auto message, Parse<inference::ModelStreamInferResponse>(received));
  if (message.error_message().empty()) return absl::OkStatus();
  return absl::UnknownError(message.error_message());
}

absl::StatusOr<std::string> ReadY(const Interface& interface, const CallData& data,
                                  const EncodedCall& call,
                                  const std::vector<grpc::ByteBuffer>& responses) {
  if (responses.empty()) {
    return absl::InternalError(
        interface.protocol == Protocol::kHttp
            ? "malformed response from server: it has no binary data"
            : "malformed response from server: the stream ended without a message");
  }
  const grpc::ByteBuffer& received = responses.back();
  if (interface.protocol == Protocol::kRapt && interface.transport == Transport::kStream) {
    return GatherY(data, responses);
  }
  if (interface.protocol == Protocol::kRapt) {
    const absl::Span<const std::byte> region =
        call.region == nullptr ? absl::Span<const std::byte>() : call.region->bytes();
    RAPT_ASSIGN_OR_RETURN(
        const client::AttendResult result,
        client::DecodeBytes(received, [&](const SlicedBytes& bytes, int64_t size) {
          return client::DecodeAttend(client::WantedBy({}), bytes, size, region);
        }));
    return TextOf(result.y.bytes());
  }
  if (call.region != nullptr) {
    return TextOf(call.region->bytes().subspan(static_cast<size_t>(OffsetOfY(data.call())),
                                               static_cast<size_t>(data.y_bytes())));
  }
  if (interface.protocol == Protocol::kHttp) {
    grpc::Slice y;
    if (!received.DumpToSingleSlice(&y).ok()) {
      return absl::InternalError("malformed response from server: its bytes can't be read");
    }
    return std::string(reinterpret_cast<const char*>(y.begin()), y.size());
  }
  absl::StatusOr<ModelInferResponse> response;
  if (interface.transport == Transport::kStream) {
    RAPT_ASSIGN_OR_RETURN(const auto streamed,
                          Parse<inference::ModelStreamInferResponse>(received));
    response = streamed.infer_response();
  } else {
    response = Parse<ModelInferResponse>(received);
  }
  if (!response.ok()) return response.status();
  if (response->raw_output_contents_size() != 1) {
    return absl::InternalError(
        absl::StrFormat("malformed response from server: %d raw outputs; expected 1",
                        response->raw_output_contents_size()));
  }
  return response->raw_output_contents(0);
}

}  // namespace rapt::load
