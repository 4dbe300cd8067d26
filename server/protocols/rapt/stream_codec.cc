#include "server/protocols/rapt/stream_codec.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "attention/field_names.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "base/wire_format.h"
#include "server/protocols/bounds.h"
#include "server/protocols/rapt/codec.h"
#include "server/protocols/response_size.h"
#include "server/rejection.h"

namespace rapt::native {
namespace {

using Message = v1::AttendStreamRequest;
using v1::KeyChunk;
using v1::OutputChunk;
using v1::QueryChunk;

// The field names of an AttendStreamHeader.
const FieldNames& StreamNames() {
  static const FieldNames names = [] {
    FieldNames header = kNativeNames;
    header.attributes[Attribute::kQueryHeads] = "query_heads";
    header.attributes[Attribute::kKvHeads] = "kv_heads";
    return header;
  }();
  return names;
}

constexpr wire::PayloadField kQueryFields[] = {{QueryChunk::kQFieldNumber, nullptr},
                                               {QueryChunk::kMaskFieldNumber, nullptr},
                                               {QueryChunk::kAttentionBiasFieldNumber, nullptr}};
constexpr wire::MessageSchema kQuerySchema = {kQueryFields};
constexpr wire::PayloadField kKeyFields[] = {{KeyChunk::kKFieldNumber, nullptr},
                                             {KeyChunk::kVFieldNumber, nullptr},
                                             {KeyChunk::kMaskFieldNumber, nullptr},
                                             {KeyChunk::kAttentionBiasFieldNumber, nullptr}};
constexpr wire::MessageSchema kKeySchema = {kKeyFields};
constexpr wire::PayloadField kChunkFields[] = {{Message::kQueriesFieldNumber, &kQuerySchema},
                                               {Message::kKeysFieldNumber, &kKeySchema}};
constexpr wire::MessageSchema kChunkSchema = {kChunkFields};

using Field = google::protobuf::FieldDescriptor;

// The inputs that are tensors of the header, and their fields.
const std::vector<std::pair<Role, const Field*>>& HeaderTensors() {
  static const auto* const tensors = [] {
    auto* const all = new std::vector<std::pair<Role, const Field*>>;
    for (Role role : kInputTensors) {
      const Field* field =
          v1::AttendStreamHeader::descriptor()->FindFieldByName(std::string(kNativeNames[role]));
      if (field != nullptr && field->message_type() == v1::Tensor::descriptor()) {
        all->emplace_back(role, field);
      }
    }
    return all;
  }();
  return *tensors;
}

absl::Status ReadDirection(v1::StreamDirection direction, Streaming& out) {
  switch (direction) {
    case v1::KEYS_STREAM:
      out = Streaming::kKeys;
      return absl::OkStatus();
    case v1::QUERIES_STREAM:
      out = Streaming::kQueries;
      return absl::OkStatus();
    default:
      return UnknownValue("direction", direction, "KEYS_STREAM (1) or QUERIES_STREAM (2)");
  }
}

absl::Status ReadType(absl::string_view field, v1::DataType code, bool may_be_bool, DType& out) {
  const std::optional<DType> dtype = ToDType(code);
  if (dtype && (IsFloat(*dtype) || (may_be_bool && *dtype == DType::kBool))) {
    out = *dtype;
    return absl::OkStatus();
  }
  return Invalid(field, " is ", NameOf(code), "; it must be ", may_be_bool ? "BOOL, " : "",
                 "FP32, FP16, BF16 or FP64");
}

// Reads the mask or the bias.
absl::Status ReadMask(Role role, const v1::StreamMask& mask, TensorSpec& out) {
  const absl::string_view name = kNativeNames[role];
  RAPT_RETURN_IF_ERROR(
      ReadType(absl::StrCat(name, ".dtype"), mask.dtype(), role == Role::kMask, out.dtype));
  if (mask.shape_size() != 4) {
    return Invalid(name, ".shape has rank ", mask.shape_size(),
                   "; it must be [B, Hq, Sq, T], rank 4");
  }
  out.shape.assign(mask.shape().begin(), mask.shape().end());
  return absl::OkStatus();
}

absl::Status CheckPast(const v1::AttendStreamHeader& header) {
  if (header.past_length() >= 0 && header.past_length() <= header.key_length()) {
    return absl::OkStatus();
  }
  return Invalid("past_length is ", header.past_length(),
                 "; it must be from 0 to key_length = ", header.key_length());
}

absl::Status ReadTensors(const v1::AttendStreamHeader& header, OperatorCall& call,
                         InputMap<std::string>& tensors) {
  const google::protobuf::Reflection& fields = *v1::AttendStreamHeader::GetReflection();
  for (const auto& [role, field] : HeaderTensors()) {
    if (!fields.HasField(header, field)) continue;
    const auto& tensor =
        *google::protobuf::DynamicCastToGenerated<v1::Tensor>(&fields.GetMessage(header, field));
    InputBytes data(reinterpret_cast<const std::byte*>(tensor.data().data()),
                    static_cast<int64_t>(tensor.data().size()));
    RAPT_ASSIGN_OR_RETURN(call.inputs[role], ReadTensor(TensorFieldOf(role, kNativeNames[role]),
                                                        tensor, /*shared_tensors=*/nullptr, data));
    tensors[role] = tensor.data();
  }
  return absl::OkStatus();
}

// Converts the header to a call of the operator, so that both have the same meaning.
absl::Status ReadHeader(const v1::AttendStreamHeader& header, OperatorCall& call) {
  DType dtype = {};
  RAPT_RETURN_IF_ERROR(ReadType("dtype", header.dtype(), /*may_be_bool=*/false, dtype));
  RAPT_RETURN_IF_ERROR(CheckPast(header));
  RAPT_RETURN_IF_ERROR(ReadAttention(header.attention(), call));
  RAPT_RETURN_IF_ERROR(ReadScoreOutput(header.score_output(), call.score_output));
  if (header.has_mask()) {
    RAPT_RETURN_IF_ERROR(ReadMask(Role::kMask, header.mask(), call.inputs[Role::kMask].emplace()));
  }
  if (header.has_attention_bias()) {
    RAPT_RETURN_IF_ERROR(
        ReadMask(Role::kBias, header.attention_bias(), call.inputs[Role::kBias].emplace()));
  }
  if (call.v_head_size) {
    return Invalid(kNativeNames[Attribute::kValueHeadSize], " is not supported in streams");
  }
  if (call.score_function != ScoreFunction::kDotProduct) {
    return Invalid(kNativeNames[Attribute::kScoreFunction],
                   " is ADDITIVE; in streams it must be DOT_PRODUCT");
  }
  for (const auto& [size, attribute] :
       {std::pair{call.block_q, Attribute::kBlockQ}, {call.block_k, Attribute::kBlockK}}) {
    if (!size) continue;
    return Invalid(kNativeNames[attribute], " is not supported in streams");
  }
  const std::tuple<Attribute, std::optional<int64_t>, int64_t> heads_of[] = {
      {Attribute::kQueryHeads, call.q_num_heads, header.query_heads()},
      {Attribute::kKvHeads, call.kv_num_heads, header.kv_heads()}};
  for (const auto& [attribute, heads, own] : heads_of) {
    if (heads.value_or(own) == own) continue;
    return Invalid(kNativeNames[attribute], " is ", *heads,
                   "; it must be absent or the header's own, ", own);
  }
  const auto tensor = [&](int64_t heads, int64_t length, int64_t size) {
    return TensorSpec{dtype, {header.batch(), heads, length, size}};
  };
  const int64_t past = header.past_length();
  const int64_t length = header.key_length() - past;
  call.inputs[Role::kQ] = tensor(header.query_heads(), header.query_length(), header.head_size());
  call.inputs[Role::kK] = tensor(header.kv_heads(), length, header.head_size());
  call.inputs[Role::kV] = tensor(header.kv_heads(), length, header.value_head_size());
  if (past > 0) {
    call.inputs[Role::kPastKey] = tensor(header.kv_heads(), past, header.head_size());
    call.inputs[Role::kPastValue] = tensor(header.kv_heads(), past, header.value_head_size());
  }
  if (header.key_lengths_size() > 0) {
    call.inputs[Role::kKeyLengths] = {DType::kInt64, {header.key_lengths_size()}};
  }
  call.layout = Layout::kBhsd;  // of these shapes
  call.q_num_heads = call.kv_num_heads = std::nullopt;
  call.wants_lse = header.want_lse();
  return absl::OkStatus();
}

// The required sizes of a chunk in bytes: of Q, or of K and V, and of its parts of mask and bias.
struct ChunkSizes {
  int64_t query = 0, key = 0, value = 0, mask = 0, bias = 0;
  int64_t total() const { return query + key + value + mask + bias; }
};

// The size of a streaming chunk's part of the mask or bias.
int64_t MaskBytes(const std::optional<MaskShape>& mask, const ChunkOrder::Expected& expected) {
  if (!mask) return 0;
  const int streaming_axis = expected.is_keys ? 3 : 2;
  int64_t bytes = SizeOf(mask->dtype);
  for (int axis = 0; axis < 4; ++axis) {
    const int64_t size = mask->dims[axis];
    bytes *= axis == streaming_axis && size != 1 ? expected.rows.count : size;
  }
  return bytes;
}

ChunkSizes SizesOf(const ChunkedPlan& plan, const ChunkOrder::Expected& expected) {
  const Problem& p = plan.problem;
  const int64_t count = expected.rows.count;
  ChunkSizes sizes;
  if (expected.is_keys) {
    const int64_t rows = p.batch * p.kv_heads * count * SizeOf(p.dtype);
    sizes.key = rows * p.head_size;
    sizes.value = rows * p.value_head_size;
  } else {
    sizes.query = p.batch * p.query_heads * count * p.head_size * SizeOf(p.dtype);
  }
  if (expected.streams) {
    sizes.mask = MaskBytes(p.mask, expected);
    sizes.bias = MaskBytes(p.bias, expected);
  }
  return sizes;
}

absl::Status CheckRow(absl::string_view field, int64_t received, int64_t expected) {
  if (received == expected) return absl::OkStatus();
  return Invalid(field, " is ", received, "; it must be ", expected);
}

absl::Status CheckBytes(absl::string_view field, const InputBytes& bytes, int64_t expected,
                        int64_t rows) {
  if (bytes.size == expected) return absl::OkStatus();
  return Invalid(field, " has ", bytes.size, " bytes; ", rows, " rows of it have ", expected);
}

absl::string_view NameOf(Message::PartCase part) {
  switch (part) {
    case Message::kHeader:
      return "a header";
    case Message::kQueries:
      return "a chunk of queries";
    case Message::kKeys:
      return "a chunk of keys";
    default:
      return "an empty message";
  }
}

absl::Status CheckPart(Message::PartCase part,
                       const std::optional<ChunkOrder::Expected>& expected) {
  if (!expected) {
    return Invalid("received ", NameOf(part), " after the last chunk that the header declares");
  }
  if (part == (expected->is_keys ? Message::kKeys : Message::kQueries)) return absl::OkStatus();
  return Invalid("received ", NameOf(part), "; expected ", ToText(*expected));
}

struct ChunkField {
  Message::PartCase part;
  int number;
  InputBytes StreamChunk::*bytes;
  int64_t ChunkSizes::*size;
  absl::string_view name;
};

constexpr ChunkField kFields[] = {
    {Message::kQueries, QueryChunk::kQFieldNumber, &StreamChunk::query, &ChunkSizes::query,
     "queries.q"},
    {Message::kQueries, QueryChunk::kMaskFieldNumber, &StreamChunk::mask, &ChunkSizes::mask,
     "queries.mask"},
    {Message::kQueries, QueryChunk::kAttentionBiasFieldNumber, &StreamChunk::bias,
     &ChunkSizes::bias, "queries.attention_bias"},
    {Message::kKeys, KeyChunk::kKFieldNumber, &StreamChunk::key, &ChunkSizes::key, "keys.k"},
    {Message::kKeys, KeyChunk::kVFieldNumber, &StreamChunk::value, &ChunkSizes::value, "keys.v"},
    {Message::kKeys, KeyChunk::kMaskFieldNumber, &StreamChunk::mask, &ChunkSizes::mask,
     "keys.mask"},
    {Message::kKeys, KeyChunk::kAttentionBiasFieldNumber, &StreamChunk::bias, &ChunkSizes::bias,
     "keys.attention_bias"},
};

// Sets the payloads of the chunk. The last field of a number wins.
void FindPayloads(const MessageBytes& message, const wire::Payloads& payloads,
                  Message::PartCase part, StreamChunk& chunk) {
  for (const wire::Payload& payload : payloads) {
    for (const ChunkField& field : kFields) {
      if (field.part == part && payload.path[0] == part && payload.path[1] == field.number) {
        chunk.*field.bytes = message.Part(payload.begin, payload.size);
      }
    }
  }
}

absl::Status CheckSizes(const StreamChunk& chunk, Message::PartCase part, const ChunkSizes& sizes) {
  for (const ChunkField& field : kFields) {
    if (field.part != part) continue;
    RAPT_RETURN_IF_ERROR(
        CheckBytes(field.name, chunk.*field.bytes, sizes.*field.size, chunk.rows.count));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<StreamRequest> DecodeStreamHeader(const MessageBytes& message) {
  if (message.size > kMaxHeaderBytes) {
    return Invalid("the header has ", message.size, " bytes; at most ", kMaxHeaderBytes,
                   " are allowed");
  }
  RAPT_ASSIGN_OR_RETURN(
      wire::SplitMessage split,
      wire::Split(message.bytes, message.size, kChunkSchema, {.rest_bytes = kMaxHeaderBytes}));
  Message fields;
  RAPT_RETURN_IF_ERROR(ParseRequest(split.rest, fields));
  if (!fields.has_header()) {
    return Invalid("received ", NameOf(fields.part_case()), "; expected a header");
  }
  const v1::AttendStreamHeader& header = fields.header();
  StreamRequest request;
  OperatorCall call;
  RAPT_RETURN_IF_ERROR(ReadDirection(header.direction(), request.chunking.streaming));
  RAPT_RETURN_IF_ERROR(ReadHeader(header, call));
  RAPT_RETURN_IF_ERROR(ReadTensors(header, call, request.tensors));
  RAPT_ASSIGN_OR_RETURN(const ResolvedCall resolved, Resolve(call, StreamNames()));
  request.problem = resolved.problem;
  request.names = &StreamNames();
  request.chunking.query_chunk = header.query_chunk();
  request.chunking.key_chunk = header.key_chunk();
  const v1::Layout layout = header.attention().layout();
  request.layout = layout == v1::BSHD || layout == v1::BSE ? Layout::kBshd : Layout::kBhsd;
  request.key_lengths.assign(header.key_lengths().begin(), header.key_lengths().end());
  request.priority = header.priority();
  return request;
}

int64_t MaxChunkMessageBytes(const ChunkedPlan& plan) {
  const bool keys_stream = plan.keys_stream();
  const auto bytes_of = [&](bool is_keys, int64_t rows) {
    const ChunkOrder::Expected chunk = {is_keys, is_keys == keys_stream, {0, rows}};
    return SizesOf(plan, chunk).total();
  };
  const Problem& p = plan.problem;
  const int64_t queries = std::min(p.query_length, plan.chunking.query_chunk);
  const int64_t keys = std::min(p.total_keys(), plan.chunking.key_chunk);
  return std::max(bytes_of(false, queries), bytes_of(true, keys)) + kMaxChunkFieldBytes;
}

absl::Status CheckMessageSizes(const ChunkedPlan& plan, int64_t max_message_bytes) {
  const int64_t bytes = MaxChunkMessageBytes(plan);
  if (bytes > max_message_bytes) {
    return Reject(Rejection::kTooLarge, absl::StatusCode::kResourceExhausted,
                  absl::StrCat("a chunk may have ", bytes, " bytes; a message may have at most ",
                               max_message_bytes, "; query_chunk or key_chunk must be smaller"));
  }
  const Problem& p = plan.problem;
  const int64_t heads = p.query_heads;
  const int64_t rows = plan.chunking.query_chunk;
  const TensorSpec y = {p.dtype, {p.batch, heads, rows, p.value_head_size}};
  const TensorSpec lse = {p.lse_dtype(), {p.batch, heads, rows}};
  std::vector<const TensorSpec*> output = {&y, &lse};
  if (!p.score_output) return CheckResponseSize(output);
  const TensorSpec scores = {
      p.dtype, plan.keys_stream() ? Shape{p.batch, heads, p.query_length, plan.chunking.key_chunk}
                                  : Shape{p.batch, heads, rows, p.total_keys()}};
  output.push_back(&scores);
  return CheckResponseSize(output);
}

std::optional<ChunkOrder::Expected> ChunkOrder::next() const {
  if (begin_ == Length()) return std::nullopt;
  const int64_t count = std::min(ChunkLength(), Length() - begin_);
  return Expected{IsKeys(), streams_, {begin_, count}};
}

void ChunkOrder::Advance() {
  begin_ += next()->rows.count;
  SkipCompletedSide();
}

int64_t ChunkOrder::Length() const {
  return IsKeys() ? plan_.problem.total_keys() : plan_.problem.query_length;
}

int64_t ChunkOrder::ChunkLength() const {
  return IsKeys() ? plan_.chunking.key_chunk : plan_.chunking.query_chunk;
}

void ChunkOrder::SkipCompletedSide() {
  if (streams_ || begin_ < Length()) return;
  streams_ = true;
  begin_ = 0;
}

std::string ToText(const ChunkOrder::Expected& expected) {
  return absl::StrCat(expected.is_keys ? "keys" : "queries", " [", expected.rows.begin, ", ",
                      expected.rows.begin + expected.rows.count, ")");
}

absl::StatusOr<StreamChunk> DecodeChunk(const MessageBytes& message, const ChunkedPlan& plan,
                                        const std::optional<ChunkOrder::Expected>& expected) {
  if (expected && message.size > MaxChunkMessageBytes(plan)) {
    return Invalid("the message has ", message.size, " bytes; a chunk of the header's size has ",
                   "at most ", MaxChunkMessageBytes(plan));
  }
  RAPT_ASSIGN_OR_RETURN(
      wire::SplitMessage split,
      wire::Split(message.bytes, message.size, kChunkSchema, {.rest_bytes = kMaxHeaderBytes}));
  Message fields;
  RAPT_RETURN_IF_ERROR(ParseRequest(split.rest, fields));
  const Message::PartCase part = fields.part_case();
  RAPT_RETURN_IF_ERROR(CheckPart(part, expected));

  const bool is_keys = expected->is_keys;
  const absl::string_view name = is_keys ? "keys" : "queries";
  const int64_t offset = is_keys ? fields.keys().offset() : fields.queries().offset();
  const int64_t count = is_keys ? fields.keys().count() : fields.queries().count();
  RAPT_RETURN_IF_ERROR(CheckRow(absl::StrCat(name, ".offset"), offset, expected->rows.begin));
  RAPT_RETURN_IF_ERROR(CheckRow(absl::StrCat(name, ".count"), count, expected->rows.count));
  StreamChunk chunk{.rows = expected->rows};
  FindPayloads(message, split.payloads, part, chunk);
  RAPT_RETURN_IF_ERROR(CheckSizes(chunk, part, SizesOf(plan, *expected)));
  return chunk;
}

ResponseMessage EncodeOutput(const StepResult& result) {
  const bool has_rows = result.outputs == StepResult::Outputs::kRows;
  v1::OutputChunk fields;  // ScoreChunk begins with the same fields
  fields.set_offset(result.rows.begin);
  fields.set_count(result.rows.count);
  std::string head = fields.SerializeAsString();

  struct Payload {
    int number;
    const OutputBuffer* bytes;
  };
  std::vector<Payload> payloads;
  if (has_rows) {
    payloads = {{OutputChunk::kYFieldNumber, &result.y},
                {OutputChunk::kLseFieldNumber, &result.lse},
                {OutputChunk::kScoresFieldNumber, &result.scores}};
  } else {
    payloads = {{v1::ScoreChunk::kScoresFieldNumber, &result.scores}};
  }
  auto size = static_cast<int64_t>(head.size());
  for (const Payload& payload : payloads) {
    const auto bytes = static_cast<int64_t>(payload.bytes->bytes.size());
    if (bytes > 0) size += wire::FieldHeaderSize(payload.number, bytes) + bytes;
  }
  std::string header;
  wire::AppendFieldHeader(has_rows ? v1::AttendStreamResponse::kOutputFieldNumber
                                   : v1::AttendStreamResponse::kScoresFieldNumber,
                          size, header);
  ResponseMessage response;
  response.Append(header + head);
  for (const Payload& payload : payloads) {
    if (payload.bytes->bytes.empty()) continue;
    std::string field_header;
    wire::AppendFieldHeader(payload.number, static_cast<int64_t>(payload.bytes->bytes.size()),
                            field_header);
    response.Append(field_header);
    response.Append(*payload.bytes);
  }
  return response;
}

ResponseMessage EncodeEnd(const ChunkedPlan& plan, std::chrono::nanoseconds queue_time,
                          std::chrono::nanoseconds compute_time) {
  v1::AttendStreamResponse response;
  v1::StreamEnd& end = *response.mutable_end();
  end.set_backend(std::string(plan.full.routing.backend->name()));
  end.set_plan(plan.full.Describe());
  WriteTiming(queue_time, compute_time, *end.mutable_timing());
  ResponseMessage serialized;
  serialized.Append(response.SerializeAsString());
  return serialized;
}

}  // namespace rapt::native
