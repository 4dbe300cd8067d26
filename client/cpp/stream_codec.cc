#include "client/cpp/stream_codec.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "base/wire_format.h"
#include "client/cpp/byte_size.h"
#include "client/cpp/call_fields.h"
#include "client/cpp/codec.h"

namespace rapt::client {
namespace {

using Request = v1::AttendStreamRequest;
using Response = v1::AttendStreamResponse;
using Field = google::protobuf::FieldDescriptor;

constexpr int64_t kChunkBytes = 8 << 20;  // computing it takes longer than updating the state
constexpr int64_t kFieldBytes = 1024;     // of a chunk's message in addition to its tensors
constexpr int64_t kHeaderTensorBytes = 63 << 10;  // the server takes headers of 64 KiB

constexpr wire::PayloadField kOutputFields[] = {{v1::OutputChunk::kYFieldNumber, nullptr},
                                                {v1::OutputChunk::kLseFieldNumber, nullptr},
                                                {v1::OutputChunk::kScoresFieldNumber, nullptr}};
constexpr wire::MessageSchema kOutputSchema = {kOutputFields};
constexpr wire::PayloadField kScoreFields[] = {{v1::ScoreChunk::kScoresFieldNumber, nullptr}};
constexpr wire::MessageSchema kScoreSchema = {kScoreFields};
constexpr wire::PayloadField kResponseFields[] = {{Response::kOutputFieldNumber, &kOutputSchema},
                                                  {Response::kScoresFieldNumber, &kScoreSchema}};
constexpr wire::MessageSchema kResponseSchema = {kResponseFields};

absl::Status CheckShape(const char* name, const TensorView& view, const Shape& expected) {
  if (view.shape == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s has shape %s; the shapes of the other tensors require %s", name,
                      ToString(view.shape), ToString(expected)));
}

bool IsStreamed(absl::string_view tensor) {
  constexpr absl::string_view kStreamed[] = {"q", "k", "v", "past_key", "past_value"};
  return std::find(std::begin(kStreamed), std::end(kStreamed), tensor) != std::end(kStreamed);
}

bool IsMask(absl::string_view tensor) { return tensor == "mask" || tensor == "attention_bias"; }

// Returns the field of the header that holds the tensor; null if the header has none.
const Field* HeaderField(const CallTensor& tensor) {
  const Field* field = v1::AttendStreamHeader::descriptor()->FindFieldByName(tensor.name);
  const bool is_tensor = field != nullptr && field->message_type() == v1::Tensor::descriptor();
  return is_tensor ? field : nullptr;
}

absl::Status CheckFeatures(const AttendCall& call) {
  for (const auto& [is_set, what] :
       {std::pair(call.wants_present, "present keys and values are"),
        {call.v_head_size.has_value(), "v_head_size is"},
        {call.score_function != ScoreFunction::kDotProduct, "additive scores are"}}) {
    if (is_set) return Invalid(what, " not supported in streams");
  }
  for (const CallTensor& tensor : CallTensors()) {
    if (tensor.In(call) == nullptr || IsStreamed(tensor.name) || IsMask(tensor.name) ||
        HeaderField(tensor)) {
      continue;
    }
    return Invalid(tensor.name, " is not supported in streams");
  }
  return absl::OkStatus();
}

void Write(const Field* field, const TensorView& view, v1::AttendStreamHeader& header) {
  auto& tensor = *google::protobuf::DynamicCastToGenerated<v1::Tensor>(
      v1::AttendStreamHeader::GetReflection()->MutableMessage(&header, field));
  tensor.set_dtype(ToProto(view.dtype));
  tensor.mutable_shape()->Add(view.shape.begin(), view.shape.end());
  tensor.set_data(view.data.data(), view.data.size());
}

// The size of a chunk's part of a mask of this shape.
int64_t MaskBytes(const TensorView& mask, const Shape& shape, const StreamChunk& chunk) {
  const size_t streaming_axis = chunk.is_keys ? 3 : 2;
  int64_t bytes = SizeOf(mask.dtype);
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    bytes *= axis == streaming_axis && shape[axis] != 1 ? chunk.count : shape[axis];
  }
  return bytes;
}

void Write(const TensorView& mask, const Shape& shape, v1::StreamMask& message) {
  message.set_dtype(ToProto(mask.dtype));
  message.mutable_shape()->Add(shape.begin(), shape.end());
}

}  // namespace

absl::StatusOr<ChunkedCall> ChunkedCall::Make(const AttendCall& call, const StreamOptions& options,
                                              int64_t max_bytes) {
  ChunkedCall chunked(call, options);
  absl::Status status = chunked.ReadShapes();
  if (status.ok() && call.mask) status = chunked.ReadMask("mask", *call.mask, chunked.mask_shape_);
  if (status.ok() && call.attention_bias) {
    status = chunked.ReadMask("attention_bias", *call.attention_bias, chunked.bias_shape_);
  }
  if (status.ok()) chunked.ChooseStreaming();
  if (status.ok()) status = chunked.CheckData();
  if (status.ok()) status = chunked.CheckHeader();
  if (status.ok()) status = chunked.ChooseChunks(max_bytes);
  if (!status.ok()) return status;
  const bool keys_stream = chunked.keys_stream();
  chunked.AddChunks(/*is_keys=*/!keys_stream, /*streams=*/false);
  chunked.AddChunks(/*is_keys=*/keys_stream, /*streams=*/true);
  return chunked;
}

// Reads the heads of q and k, which if these have rank 3 are those of the call.
absl::Status ChunkedCall::ReadHeads(bool is_3d) {
  const int64_t query_heads = call_.query_heads;
  const int64_t kv_heads = call_.kv_heads;
  Axes& a = axes_;
  if (is_3d) {
    a.query_heads = std::max<int64_t>(query_heads, 1);
    a.kv_heads = std::max<int64_t>(kv_heads, 1);
    if ((query_heads > 0 && kv_heads > 0) || (query_heads == 0 && kv_heads == 0)) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrFormat(
        "query_heads is %d and kv_heads %d; both must be positive, or both 0 for one head",
        query_heads, kv_heads));
  }
  const int axis = heads_outside_ ? 1 : 2;
  a.query_heads = call_.q.shape[axis];
  a.kv_heads = call_.k.shape[axis];
  if ((query_heads == 0 || query_heads == a.query_heads) &&
      (kv_heads == 0 || kv_heads == a.kv_heads)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "query_heads is %d and kv_heads %d; they must be 0, or those of q and k: %d and %d",
      query_heads, kv_heads, a.query_heads, a.kv_heads));
}

absl::Status ChunkedCall::ReadShapes() {
  RAPT_RETURN_IF_ERROR(CheckFeatures(call_));
  const Shape& q = call_.q.shape;
  const Shape& k = call_.k.shape;
  const Shape& v = call_.v.shape;
  const bool is_3d =
      call_.layout == Layout::kBse || (call_.layout == Layout::kByRank && q.size() == 3);
  const size_t rank = is_3d ? 3 : 4;
  for (const auto& [name, shape] : {std::pair("q", &q), {"k", &k}, {"v", &v}}) {
    if (shape->size() == rank && *std::min_element(shape->begin(), shape->end()) >= 0) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has shape %s; it must have rank %d and no negative axis", name,
                        ToString(*shape), rank));
  }
  heads_outside_ = !is_3d && call_.layout != Layout::kBshd;
  RAPT_RETURN_IF_ERROR(ReadHeads(is_3d));
  Axes& a = axes_;
  const int row_axis = heads_outside_ ? 2 : 1;
  a.batch = q[0];
  a.query_length = q[row_axis];
  a.key_length = k[row_axis];
  // Of rank 3, the last axis has the numbers of all heads.
  const int64_t query_parts = is_3d ? a.query_heads : 1;
  const int64_t kv_parts = is_3d ? a.kv_heads : 1;
  if (q.back() % query_parts != 0 || v.back() % kv_parts != 0) {
    return Invalid("the last axes of q and v must be multiples of the heads");
  }
  a.head_size = q.back() / query_parts;
  a.value_head_size = v.back() / kv_parts;
  const auto shape_of = [&](int64_t size) {
    if (is_3d) return Shape{a.batch, a.key_length, a.kv_heads * size};
    return heads_outside_ ? Shape{a.batch, a.kv_heads, a.key_length, size}
                          : Shape{a.batch, a.key_length, a.kv_heads, size};
  };
  RAPT_RETURN_IF_ERROR(CheckShape("k", call_.k, shape_of(a.head_size)));
  RAPT_RETURN_IF_ERROR(CheckShape("v", call_.v, shape_of(a.value_head_size)));
  if (call_.past_key.has_value() != call_.past_value.has_value()) {
    return Invalid("past_key and past_value must be set together");
  }
  if (!call_.past_key) return absl::OkStatus();
  if (call_.past_key->shape.size() == 4) a.past_length = call_.past_key->shape[2];
  const Shape past = {a.batch, a.kv_heads, a.past_length, a.head_size};
  const Shape past_value = {a.batch, a.kv_heads, a.past_length, a.value_head_size};
  RAPT_RETURN_IF_ERROR(CheckShape("past_key", *call_.past_key, past));
  RAPT_RETURN_IF_ERROR(CheckShape("past_value", *call_.past_value, past_value));
  a.key_length += a.past_length;
  return absl::OkStatus();
}

// Expands the shape of the mask or the bias to rank 4.
absl::Status ChunkedCall::ReadMask(absl::string_view name, const TensorView& mask,
                                   Shape& shape) const {
  const bool is_float = mask.dtype == DType::kFloat32 || mask.dtype == DType::kFloat16 ||
                        mask.dtype == DType::kBFloat16 || mask.dtype == DType::kFloat64;
  const bool may_be_bool = name == "mask";
  if (!is_float && !(may_be_bool && mask.dtype == DType::kBool)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has type %s; in a stream it must be %sa float type", name,
                        NameOf(mask.dtype), may_be_bool ? "BOOL or " : ""));
  }
  shape = mask.shape;
  const bool is_batched = !heads_outside_ && call_.q.shape.size() == 3 && call_.query_heads == 0;
  if (shape.size() == 3 && is_batched) shape.insert(shape.begin() + 1, 1);
  while (shape.size() < 4) shape.insert(shape.begin(), 1);
  const Axes& a = axes_;
  const Shape whole = {a.batch, a.query_heads, a.query_length, a.key_length};
  bool fits = shape.size() == 4;
  for (int axis = 0; axis < 4 && fits; ++axis) {
    fits = shape[axis] == 1 || shape[axis] == whole[axis];
  }
  if (fits) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s has shape %s; in a stream it must broadcast to %s", name,
                      ToString(mask.shape), ToString(whole)));
}

void ChunkedCall::ChooseStreaming() {
  const auto bytes = [&](int64_t heads, int64_t length, int64_t elements, int64_t element_bytes) {
    return static_cast<double>(heads) * static_cast<double>(length) *
           static_cast<double>(elements) * static_cast<double>(element_bytes);
  };
  const Axes& a = axes_;
  const int64_t element = SizeOf(call_.q.dtype);
  // If keys stream, the server holds Q and the accumulators of Y in float, otherwise K and V.
  const double kept_queries = bytes(a.query_heads, a.query_length, a.head_size, element) +
                              bytes(a.query_heads, a.query_length, a.value_head_size, 4);
  const double kept_keys = bytes(a.kv_heads, a.key_length, a.head_size, element) +
                           bytes(a.kv_heads, a.key_length, a.value_head_size, element);
  const bool needs_queries =
      call_.score_output == ScoreOutput::kWeights || call_.normalizer != Normalizer::kSoftmax;
  streaming_ = options_.streaming.value_or(
      needs_queries || kept_keys < kept_queries ? Streaming::kQueries : Streaming::kKeys);
}

absl::Status ChunkedCall::CheckData() const {
  for (const CallTensor& tensor : CallTensors()) {
    const TensorView* view = tensor.In(call_);
    if (view == nullptr) continue;
    const absl::string_view name = tensor.name;
    const bool is_mask = IsMask(name);
    const bool is_in_header = HeaderField(tensor) != nullptr;
    const bool is_read =
        options_.read && !is_in_header && (is_mask || keys_stream() == (name != "q"));
    if (view->dtype != call_.q.dtype && !is_mask && !is_in_header) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s has type %s; it must be %s, the type of q", name, NameOf(view->dtype),
                          NameOf(call_.q.dtype)));
    }
    const auto has = static_cast<int64_t>(view->data.size());
    const std::optional<int64_t> bytes = ByteSize(view->dtype, view->shape);
    if (bytes && has == (is_read ? 0 : *bytes)) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s has shape %s of %s%s, but its data has %d bytes", name, ToString(view->shape),
        NameOf(view->dtype), is_read ? " and is read by a function" : "", has));
  }
  const Axes& a = axes_;
  if (ByteSize(DType::kFloat64, {a.batch, a.query_heads, a.query_length, a.key_length})) {
    return absl::OkStatus();
  }
  return Invalid("the size of the score matrix overflows 64 bits");
}

absl::Status ChunkedCall::CheckHeader() const {
  int64_t bytes = 0;
  for (const CallTensor& tensor : CallTensors()) {
    const TensorView* view = tensor.In(call_);
    if (view == nullptr || HeaderField(tensor) == nullptr) continue;
    bytes += static_cast<int64_t>(view->data.size());
    if (bytes <= kHeaderTensorBytes) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s and the tensors before it have %d bytes; in a stream, those that do not arrive in "
        "chunks may have %d together",
        tensor.name, bytes, kHeaderTensorBytes));
  }
  return absl::OkStatus();
}

absl::Status ChunkedCall::ChooseChunks(int64_t max_bytes) {
  const auto choose = [&](bool is_keys, int64_t length, int64_t asked, int64_t& chunk) {
    const StreamChunk row = {is_keys, is_keys == keys_stream(), 0, 1};
    const int64_t row_bytes = std::max<int64_t>({SizesOf(row).total(), ResultBytes(row), 1});
    if (row_bytes > max_bytes - kFieldBytes) {
      return absl::ResourceExhaustedError(absl::StrFormat(
          "a row of %s, or of its results, takes %d bytes; a message may have at most %d",
          is_keys ? "k and v" : "q", row_bytes, max_bytes));
    }
    const int64_t most = std::min(kChunkBytes, max_bytes - kFieldBytes) / row_bytes;
    chunk = std::max<int64_t>(1, std::min(asked == 0 ? most : asked, length));
    return absl::OkStatus();
  };
  if (options_.query_chunk < 0 || options_.key_chunk < 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("query_chunk is %d and key_chunk %d; both must be at least 0",
                        options_.query_chunk, options_.key_chunk));
  }
  RAPT_RETURN_IF_ERROR(choose(false, axes_.query_length, options_.query_chunk, query_chunk_));
  return choose(true, axes_.key_length, options_.key_chunk, key_chunk_);
}

// Returns the size of the results of a chunk.
int64_t ChunkedCall::ResultBytes(const StreamChunk& chunk) const {
  const Axes& a = axes_;
  const int64_t element = a.batch * a.query_heads * chunk.count * SizeOf(call_.q.dtype);
  const bool has_scores = call_.score_output.has_value() && chunk.streams;
  if (chunk.is_keys) return has_scores ? a.query_length * element : 0;
  return (a.value_head_size + (has_scores ? a.key_length : 0)) * element;
}

void ChunkedCall::AddChunks(bool is_keys, bool streams) {
  const int64_t length = is_keys ? axes_.key_length : axes_.query_length;
  const int64_t chunk = is_keys ? key_chunk_ : query_chunk_;
  for (int64_t begin = 0; begin < length; begin += chunk) {
    chunks_.push_back({is_keys, streams, begin, std::min(chunk, length - begin)});
  }
}

ChunkedCall::Sizes ChunkedCall::SizesOf(const StreamChunk& chunk) const {
  const Axes& a = axes_;
  const int64_t element = SizeOf(call_.q.dtype);
  Sizes sizes;
  if (chunk.is_keys) {
    const int64_t rows = a.batch * a.kv_heads * chunk.count * element;
    sizes.k = rows * a.head_size;
    sizes.v = rows * a.value_head_size;
  } else {
    sizes.q = a.batch * a.query_heads * chunk.count * a.head_size * element;
  }
  if (chunk.streams && call_.mask) sizes.mask = MaskBytes(*call_.mask, mask_shape_, chunk);
  if (chunk.streams && call_.attention_bias) {
    sizes.bias = MaskBytes(*call_.attention_bias, bias_shape_, chunk);
  }
  return sizes;
}

int64_t ChunkedCall::BytesOf(const StreamChunk& chunk) const { return SizesOf(chunk).total(); }

int64_t ChunkedCall::bytes() const {
  int64_t bytes = 0;
  for (const StreamChunk& chunk : chunks_) bytes += BytesOf(chunk);
  return bytes;
}

RequestMessage ChunkedCall::Header() const {
  const v1::AttendRequest whole = WithoutTensors(call_);
  Request request;
  v1::AttendStreamHeader& header = *request.mutable_header();
  header.set_direction(keys_stream() ? v1::KEYS_STREAM : v1::QUERIES_STREAM);
  header.set_dtype(ToProto(call_.q.dtype));
  const Axes& a = axes_;
  header.set_batch(a.batch);
  header.set_query_heads(a.query_heads);
  header.set_kv_heads(a.kv_heads);
  header.set_query_length(a.query_length);
  header.set_key_length(a.key_length);
  header.set_past_length(a.past_length);
  header.set_head_size(a.head_size);
  header.set_value_head_size(a.value_head_size);
  header.set_query_chunk(query_chunk_);
  header.set_key_chunk(key_chunk_);
  *header.mutable_attention() = whole.attention();
  header.mutable_attention()->set_layout(heads_outside_ ? v1::BHSD : v1::BSHD);
  *header.mutable_key_lengths() = whole.key_lengths();
  if (call_.mask) {
    Write(*call_.mask, mask_shape_, *header.mutable_mask());
  }
  if (call_.attention_bias) {
    Write(*call_.attention_bias, bias_shape_, *header.mutable_attention_bias());
  }
  header.set_score_output(whole.score_output());
  header.set_want_lse(whole.want_lse());
  header.set_priority(whole.priority());
  for (const CallTensor& tensor : CallTensors()) {
    const TensorView* view = tensor.In(call_);
    const Field* field = HeaderField(tensor);
    if (view != nullptr && field != nullptr) Write(field, *view, header);
  }
  RequestMessage message;
  message.Append(request.SerializeAsString());
  return message;
}

// Appends rows of `view`, which has the call's layout and heads of `size` elements.
void ChunkedCall::AppendRows(const TensorView& view, int64_t heads, int64_t size, int64_t begin,
                             int64_t count, RequestMessage& message) const {
  const int64_t runs = heads_outside_ ? axes_.batch * heads : axes_.batch;
  const int64_t row = (heads_outside_ ? size : heads * size) * SizeOf(view.dtype);
  if (runs == 0) return;
  const int64_t stride = static_cast<int64_t>(view.data.size()) / runs;
  for (int64_t run = 0; run < runs; ++run) {
    message.AppendPayload(view.data.subspan(run * stride + begin * row, count * row));
  }
}

// Appends rows of K or V. The first rows are those of the past, [B, H, P, D] in every layout.
void ChunkedCall::AppendKeyRows(const std::optional<TensorView>& past, const TensorView& view,
                                int64_t size, const StreamChunk& chunk,
                                RequestMessage& message) const {
  const int64_t past_length = axes_.past_length;
  const int64_t end = chunk.begin + chunk.count;
  if (!past || chunk.begin >= past_length) {
    return AppendRows(view, axes_.kv_heads, size, chunk.begin - past_length, chunk.count, message);
  }
  const int64_t past_rows = std::min(end, past_length) - chunk.begin;
  const int64_t new_rows = chunk.count - past_rows;
  const int64_t head_row = size * SizeOf(view.dtype);
  const auto past_run = [&](int64_t b, int64_t h, int64_t begin, int64_t count) {
    const int64_t first = (b * axes_.kv_heads + h) * past_length + begin;
    message.AppendPayload(past->data.subspan(first * head_row, count * head_row));
  };
  const int64_t length = axes_.key_length - past_length;
  for (int64_t b = 0; b < axes_.batch; ++b) {
    if (!heads_outside_) {
      for (int64_t s = 0; s < past_rows; ++s) {
        for (int64_t h = 0; h < axes_.kv_heads; ++h) past_run(b, h, chunk.begin + s, 1);
      }
      const int64_t row = axes_.kv_heads * head_row;
      message.AppendPayload(view.data.subspan(b * length * row, new_rows * row));
      continue;
    }
    for (int64_t h = 0; h < axes_.kv_heads; ++h) {
      past_run(b, h, chunk.begin, past_rows);
      const int64_t first = (b * axes_.kv_heads + h) * length;
      message.AppendPayload(view.data.subspan(first * head_row, new_rows * head_row));
    }
  }
}

void ChunkedCall::AppendMask(const TensorView& mask, const Shape& shape, const StreamChunk& chunk,
                             RequestMessage& message) {
  const int axis = chunk.is_keys ? 3 : 2;
  if (shape[axis] == 1) return message.AppendPayload(mask.data);
  int64_t runs = 1;
  for (int before = 0; before < axis; ++before) runs *= shape[before];
  const int64_t row = SizeOf(mask.dtype) * (axis == 2 ? shape[3] : 1);
  const int64_t stride = shape[axis] * row;
  for (int64_t run = 0; run < runs; ++run) {
    message.AppendPayload(mask.data.subspan(run * stride + chunk.begin * row, chunk.count * row));
  }
}

RequestMessage ChunkedCall::Message(const StreamChunk& chunk, const Sizes& sizes,
                                    const Appends& append) {
  using Queries = v1::QueryChunk;
  using Keys = v1::KeyChunk;
  struct Part {
    int field;
    int64_t bytes;
    Append append;
  };
  const Part queries[] = {{Queries::kQFieldNumber, sizes.q, append.q},
                          {Queries::kMaskFieldNumber, sizes.mask, append.mask},
                          {Queries::kAttentionBiasFieldNumber, sizes.bias, append.bias}};
  const Part keys[] = {{Keys::kKFieldNumber, sizes.k, append.k},
                       {Keys::kVFieldNumber, sizes.v, append.v},
                       {Keys::kMaskFieldNumber, sizes.mask, append.mask},
                       {Keys::kAttentionBiasFieldNumber, sizes.bias, append.bias}};
  const absl::Span<const Part> parts =
      chunk.is_keys ? absl::MakeConstSpan(keys) : absl::MakeConstSpan(queries);
  Keys fields;  // QueryChunk begins with the same fields
  fields.set_offset(chunk.begin);
  fields.set_count(chunk.count);
  const std::string rows = fields.SerializeAsString();
  auto size = static_cast<int64_t>(rows.size());
  for (const Part& part : parts) {
    if (part.bytes > 0) size += wire::FieldHeaderSize(part.field, part.bytes) + part.bytes;
  }
  std::string header;
  wire::AppendFieldHeader(chunk.is_keys ? Request::kKeysFieldNumber : Request::kQueriesFieldNumber,
                          size, header);
  RequestMessage message;
  message.Append(header + rows);
  for (const Part& part : parts) {
    if (part.bytes == 0) continue;
    std::string part_header;
    wire::AppendFieldHeader(part.field, part.bytes, part_header);
    message.Append(part_header);
    part.append(message);
  }
  return message;
}

RequestMessage ChunkedCall::Chunk(const StreamChunk& chunk) const {
  const Axes& a = axes_;
  return Message(
      chunk, SizesOf(chunk),
      {.q =
           [&](RequestMessage& m) {
             AppendRows(call_.q, a.query_heads, a.head_size, chunk.begin, chunk.count, m);
           },
       .k =
           [&](RequestMessage& m) {
             AppendKeyRows(call_.past_key, call_.k, a.head_size, chunk, m);
           },
       .v =
           [&](RequestMessage& m) {
             AppendKeyRows(call_.past_value, call_.v, a.value_head_size, chunk, m);
           },
       .mask = [&](RequestMessage& m) { AppendMask(*call_.mask, mask_shape_, chunk, m); },
       .bias =
           [&](RequestMessage& m) { AppendMask(*call_.attention_bias, bias_shape_, chunk, m); }});
}

absl::StatusOr<RequestMessage> ChunkedCall::ReadChunk(const StreamChunk& chunk,
                                                      std::shared_ptr<std::string>& owner) const {
  const Sizes sizes = SizesOf(chunk);
  owner = std::make_shared<std::string>(static_cast<size_t>(sizes.total()), '\0');
  absl::Span<std::byte> rest(reinterpret_cast<std::byte*>(owner->data()), owner->size());
  const auto take = [&rest](int64_t bytes) {
    const absl::Span<std::byte> taken = rest.first(bytes);
    rest.remove_prefix(bytes);
    return taken;
  };
  StreamRows rows;
  rows.begin = chunk.begin;
  rows.count = chunk.count;
  rows.q = take(sizes.q);
  rows.k = take(sizes.k);
  rows.v = take(sizes.v);
  rows.mask = take(sizes.mask);
  rows.attention_bias = take(sizes.bias);
  RAPT_RETURN_IF_ERROR(options_.read(rows));
  return Message(chunk, sizes,
                 {.q = [&](RequestMessage& m) { m.AppendPayload(rows.q); },
                  .k = [&](RequestMessage& m) { m.AppendPayload(rows.k); },
                  .v = [&](RequestMessage& m) { m.AppendPayload(rows.v); },
                  .mask = [&](RequestMessage& m) { m.AppendPayload(rows.mask); },
                  .bias = [&](RequestMessage& m) { m.AppendPayload(rows.attention_bias); }});
}

// --- The result ----------------------------------------------------------------------------------

StreamResult::StreamResult(const ChunkedCall& chunked) : chunked_(chunked) {
  const ChunkedCall::Axes& a = chunked.axes_;
  const AttendCall& call = chunked.call_;
  Shape y = call.q.shape;
  y.back() = y.size() == 3 ? a.query_heads * a.value_head_size : a.value_head_size;
  y_ = Allocate(call.q.dtype, y);
  if (call.wants_lse) {
    const DType dtype = call.q.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    lse_ = Allocate(dtype, {a.batch, a.query_heads, a.query_length});
  }
  if (call.score_output) {
    scores_ = Allocate(call.q.dtype, {a.batch, a.query_heads, a.query_length, a.key_length});
  }
}

StreamResult::Output StreamResult::Allocate(DType dtype, Shape shape) const {
  const int64_t bytes = ByteSize(dtype, shape).value();
  return {std::make_shared<AlignedBuffer>(static_cast<size_t>(bytes)), dtype, std::move(shape)};
}

absl::Status StreamResult::Put(const char* name, int field, const Output& output,
                               const Place& place) {
  const auto payload = std::find_if(payloads_.rbegin(), payloads_.rend(),
                                    [field](const Payload& p) { return p.field == field; });
  const int64_t size = payload == payloads_.rend() ? 0 : payload->size;
  if (size != place.runs * place.run) {
    return MalformedResponse(
        absl::StrFormat("%s has %d bytes; expected %d", name, size, place.runs * place.run));
  }
  for (int64_t run = 0; run < place.runs && size > 0; ++run) {
    bytes_.Copy(payload->begin + run * place.run, place.run,
                output.bytes->data() + run * place.stride + place.offset);
  }
  return absl::OkStatus();
}

absl::Status StreamResult::TakeRows(const v1::OutputChunk& fields) {
  using Message = v1::OutputChunk;
  const ChunkedCall::Axes& a = chunked_.axes_;
  const int64_t count = fields.count();
  if (fields.offset() != rows_ || count < 1 || count > a.query_length - rows_) {
    return MalformedResponse("rows of y are out of order");
  }
  // Runs of `row` bytes for each row of each of `heads`.
  const auto rows = [&](int64_t heads, int64_t row) {
    return Place{heads, count * row, a.query_length * row, rows_ * row};
  };
  const int64_t heads = a.batch * a.query_heads;
  const int64_t head_row = a.value_head_size * SizeOf(y_.dtype);
  absl::Status status = Put(
      "y", Message::kYFieldNumber, y_,
      chunked_.heads_outside_ ? rows(heads, head_row) : rows(a.batch, a.query_heads * head_row));
  if (status.ok() && lse_) {
    status = Put("lse", Message::kLseFieldNumber, *lse_, rows(heads, SizeOf(lse_->dtype)));
  }
  if (status.ok() && scores_ && !chunked_.keys_stream()) {
    status = Put("scores", Message::kScoresFieldNumber, *scores_,
                 rows(heads, a.key_length * SizeOf(scores_->dtype)));
  }
  rows_ += count;
  return status;
}

absl::Status StreamResult::TakeScores(const v1::ScoreChunk& fields) {
  const ChunkedCall::Axes& a = chunked_.axes_;
  const int64_t count = fields.count();
  if (!scores_ || !chunked_.keys_stream() || fields.offset() != keys_ || count < 1 ||
      count > a.key_length - keys_) {
    return MalformedResponse("scores are out of order");
  }
  const int64_t element = SizeOf(scores_->dtype);
  const Place place = {a.batch * a.query_heads * a.query_length, count * element,
                       a.key_length * element, keys_ * element};
  keys_ += count;
  return Put("scores", v1::ScoreChunk::kScoresFieldNumber, *scores_, place);
}

absl::Status StreamResult::Take(const SlicedBytes& bytes, int64_t size) {
  const absl::StatusOr<wire::SplitMessage> split = wire::Split(bytes, size, kResponseSchema);
  if (!split.ok()) return MalformedResponse(split.status().message());
  Response response;
  if (!response.ParseFromString(split->rest)) return MalformedResponse("its fields can't be read");
  bytes_ = bytes;
  payloads_.clear();
  for (const wire::Payload& payload : split->payloads) {
    if (payload.path[0] != response.part_case()) continue;
    payloads_.push_back({payload.path[1], payload.begin, payload.size});
  }
  if (end_) return MalformedResponse("received a message after the end");
  switch (response.part_case()) {
    case Response::kOutput:
      return TakeRows(response.output());
    case Response::kScores:
      return TakeScores(response.scores());
    case Response::kEnd:
      end_ = response.end();
      return absl::OkStatus();
    default:
      return MalformedResponse("a message is empty");
  }
}

absl::StatusOr<AttendResult> StreamResult::Finish() {
  const ChunkedCall::Axes& a = chunked_.axes_;
  const int64_t keys = scores_ && chunked_.keys_stream() ? a.key_length : 0;
  if (!end_ || rows_ != a.query_length || keys_ != keys)
    return MalformedResponse("the stream ended before the result was complete");
  const auto tensor = [](const Output& output) {
    return Tensor(output.dtype, output.shape, output.bytes, output.bytes->span());
  };
  AttendResult result;
  result.y = tensor(y_);
  if (scores_) result.scores = tensor(*scores_);
  if (lse_) result.lse = tensor(*lse_);
  result.path = Path::kStream;
  result.backend = end_->backend();
  result.plan = end_->plan();
  result.queue_time = std::chrono::microseconds(end_->timing().queue_us());
  result.compute_time = std::chrono::microseconds(end_->timing().compute_us());
  return result;
}

}  // namespace rapt::client
