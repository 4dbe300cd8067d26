#include "server/protocols/bounds.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/reflection.h>

#include <cmath>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/numeric/int128.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "attention/attributes.h"
#include "attention/operator_schema.h"
#include "attention/problem.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "server/cache/cache_store.h"
#include "server/cache/limits.h"

namespace rapt {
namespace {

namespace pb = google::protobuf;
using enum BoundCheck;

constexpr IntegerRange kAll = {};
constexpr IntegerRange kNotNegative = {0, std::numeric_limits<int64_t>::max()};
constexpr IntegerRange kPositive = {1, std::numeric_limits<int64_t>::max()};
// Of a tensor.
constexpr IntegerRange kAxis = {0, kMaxAxis};
constexpr IntegerRange kPresentAxis = {1, kMaxAxis};

constexpr FieldBounds kTable[] = {
    // rapt/v1/attention.proto. The library's tables of roles and attributes check what an Attention
    // and its tensors may have, for all interfaces; AddAttributes() and AddOperators() add rows.
    {"rapt.v1.SharedMemory.offset", kNotNegative},
    {"rapt.v1.SharedMemory.byte_size", kNotNegative},
    {"rapt.v1.Tensor.shape", kNotNegative, kByDecoder},
    {"rapt.v1.Dropout.seed", kAll},
    {"rapt.v1.Attention.query_heads", kAxis, kByDecoder},
    {"rapt.v1.Attention.kv_heads", kAxis, kByDecoder},
    {"rapt.v1.Attention.v_head_size", kPresentAxis, kByDecoder},
    {"rapt.v1.AttendRequest.key_lengths", kAxis, kByDecoder},
    {"rapt.v1.AttendRequest.priority", kAll},
    {"rapt.v1.StreamMask.shape", kAxis, kByDecoder},
    {"rapt.v1.AttendStreamHeader.batch", kAxis},
    {"rapt.v1.AttendStreamHeader.query_heads", kPresentAxis},
    {"rapt.v1.AttendStreamHeader.kv_heads", kPresentAxis},
    {"rapt.v1.AttendStreamHeader.query_length", kAxis},
    {"rapt.v1.AttendStreamHeader.key_length", kAxis},
    {"rapt.v1.AttendStreamHeader.past_length", kAxis, kByDecoder},
    {"rapt.v1.AttendStreamHeader.head_size", kPresentAxis},
    {"rapt.v1.AttendStreamHeader.value_head_size", kPresentAxis},
    {"rapt.v1.AttendStreamHeader.query_chunk", kPositive, kByDecoder},
    {"rapt.v1.AttendStreamHeader.key_chunk", kPositive, kByDecoder},
    {"rapt.v1.AttendStreamHeader.key_lengths", kAxis, kByDecoder},
    {"rapt.v1.AttendStreamHeader.priority", kAll},
    {"rapt.v1.QueryChunk.offset", kAxis, kByDecoder},
    {"rapt.v1.QueryChunk.count", kAxis, kByDecoder},
    {"rapt.v1.KeyChunk.offset", kAxis, kByDecoder},
    {"rapt.v1.KeyChunk.count", kAxis, kByDecoder},
    {"rapt.v1.EstimateMemoryRequest.batch", kPresentAxis},
    {"rapt.v1.EstimateMemoryRequest.query_heads", kAxis},
    {"rapt.v1.EstimateMemoryRequest.kv_heads", kAxis},
    {"rapt.v1.EstimateMemoryRequest.lengths", kPresentAxis},
    {"rapt.v1.EstimateMemoryRequest.head_size", kAxis},
    {"rapt.v1.EstimateMemoryRequest.value_head_size", kAxis},
    {"rapt.v1.EstimateMemoryRequest.block_q", kNotNegative, kByDecoder},
    {"rapt.v1.EstimateMemoryRequest.block_k", kNotNegative, kByDecoder},
    {"rapt.v1.EstimateMemoryRequest.selected_indices", kAxis, kByDecoder},
    {"rapt.v1.EstimateMemoryRequest.bias_table", kAxis, kByDecoder},
    {"rapt.v1.EstimateMemoryRequest.relative_bias", kAxis, kByDecoder},
    {"rapt.v1.EstimateMemoryRequest.lsh_hashes", kAxis, kByDecoder},
    {"rapt.v1.EstimateMemoryRequest.lsh_chunk_length", kAxis, kByDecoder},
    {"rapt.v1.EstimateMemoryRequest.favor_features", kAxis, kByDecoder},
    {"rapt.v1.LinearAttendRequest.nonpad_kv_seqlen", kAxis, kByDecoder},
    {"rapt.v1.LinearAttendRequest.q_num_heads", kAxis, kByDecoder},
    {"rapt.v1.LinearAttendRequest.kv_num_heads", kAxis, kByDecoder},
    {"rapt.v1.LinearAttendRequest.chunk_size", kNotNegative, kByDecoder},
    {"rapt.v1.LinearAttendRequest.num_features", kPresentAxis, kByDecoder},
    {"rapt.v1.LinearAttendRequest.error_rows", kAxis, kByDecoder},
    {"rapt.v1.LshAttendRequest.nonpad_kv_seqlen", kAxis, kByDecoder},
    {"rapt.v1.LshAttendRequest.num_hashes", kAxis, kByDecoder},
    {"rapt.v1.LshAttendRequest.num_buckets", kAxis, kByDecoder},
    {"rapt.v1.LshAttendRequest.chunk_length", kNotNegative, kByDecoder},
    {"rapt.v1.LshAttendRequest.chunks_before", kNotNegative, kByDecoder},
    {"rapt.v1.LshAttendRequest.chunks_after", kNotNegative, kByDecoder},
    {"rapt.v1.RotaryEmbedRequest.num_heads", kAxis, kByDecoder},
    {"rapt.v1.RotaryEmbedRequest.rotary_embedding_dim", kAxis, kByDecoder},

    // rapt/v1/cache.proto. A generation is compared; the places of tokens are, with what the layer
    // has.
    {"rapt.v1.LayerShape.layers", {1, cache::kMaxLayers}},
    {"rapt.v1.LayerShape.kv_heads", {1, cache::kMaxHeads}},
    {"rapt.v1.LayerShape.head_size", {1, cache::kMaxHeadSize}},
    {"rapt.v1.LayerShape.value_head_size", {0, cache::kMaxHeadSize}},
    {"rapt.v1.LayerShape.keep_first", kCounts},
    {"rapt.v1.LayerShape.keep_last", kCounts},
    {"rapt.v1.CreateRequest.reserve_tokens", kCounts},
    {"rapt.v1.CreateRequest.lease_ms", kCounts},
    {"rapt.v1.CreateRequest.first_position", kCounts},
    {"rapt.v1.ForkRequest.length", kCounts, kByDecoder},
    {"rapt.v1.ForkRequest.generation", kAll},
    {"rapt.v1.ForkRequest.reserve_tokens", kCounts},
    {"rapt.v1.ForkRequest.lease_ms", kCounts},
    {"rapt.v1.TruncateRequest.length", kCounts, kByDecoder},
    {"rapt.v1.TruncateRequest.generation", kAll},
    {"rapt.v1.ListRequest.page_size", {0, cache::CacheStore::kMaxListed}, kByDecoder},
    {"rapt.v1.AppendRequest.priority", kAll},
    {"rapt.v1.AppendPart.layer", {0, cache::kMaxLayers - 1}, kByDecoder},
    {"rapt.v1.AppendPart.at", kCounts, kByDecoder},
    {"rapt.v1.AppendPart.generation", kAll},
    {"rapt.v1.Item.rows", kCounts, kByDecoder},
    {"rapt.v1.Item.new_tokens", kCounts, kByDecoder},
    {"rapt.v1.Item.at", kCounts, kByDecoder},
    {"rapt.v1.Item.generation", kAll},
    {"rapt.v1.Item.position", kCounts, kByDecoder},
    {"rapt.v1.AttendCachedRequest.layer", {0, cache::kMaxLayers - 1}, kByDecoder},
    {"rapt.v1.AttendCachedRequest.priority", kAll},
    {"rapt.v1.ExportRequest.generation", kAll},
    {"rapt.v1.ExportRequest.chunk_tokens", kCounts},
    {"rapt.v1.KvHeader.lengths", kCounts},
    {"rapt.v1.KvHeader.crc32", kAll},
    {"rapt.v1.KvTokens.layer", {0, cache::kMaxLayers - 1}, kByDecoder},
    {"rapt.v1.KvTokens.at", kCounts},
    {"rapt.v1.KvTokens.tokens", {1, kCounts.most}},
    {"rapt.v1.KvTokens.crc32", kAll},
    {"rapt.v1.KvEnd.chunks", kCounts, kByDecoder},
    {"rapt.v1.KvEnd.crc32", kAll},

    // inference/grpc_service.proto. Parameters are checked by their names, contents are data, and
    // the log's settings are ignored.
    {"inference.InferParameter.int64_param", kAll, kByDecoder},
    {"inference.InferParameter.uint64_param", kAll, kByDecoder},
    {"inference.InferTensorContents.int_contents", kAll},
    {"inference.InferTensorContents.int64_contents", kAll},
    {"inference.InferTensorContents.uint_contents", kAll},
    {"inference.InferTensorContents.uint64_contents", kAll},
    {"inference.ModelInferRequest.InferInputTensor.shape", kNotNegative, kByDecoder},
    {"inference.ModelRepositoryParameter.int64_param", kAll, kByDecoder},
    {"inference.SystemSharedMemoryRegisterRequest.offset", kNotNegative, kByDecoder},
    {"inference.SystemSharedMemoryRegisterRequest.byte_size", kPositive, kByDecoder},
    {"inference.CudaSharedMemoryRegisterRequest.device_id", kNotNegative, kByDecoder},
    {"inference.CudaSharedMemoryRegisterRequest.byte_size", kPositive, kByDecoder},
    {"inference.LogSettingsRequest.SettingValue.uint32_param", kAll},

    {"grpc.reflection.v1.ExtensionRequest.extension_number", kAll},
    {"grpc.reflection.v1alpha.ExtensionRequest.extension_number", kAll},
};

// Of an Attention: the integers with a range in the library's table.
void AddAttributes(const pb::Descriptor& request, std::vector<FieldBounds>& rows) {
  for (const AttributeInfo& info : Attributes()) {
    if (info.allowed.empty()) continue;
    const pb::Descriptor* message = &request;
    const pb::FieldDescriptor* field = nullptr;
    for (absl::string_view name : absl::StrSplit(info.native, '.')) {
      field = message->FindFieldByName(std::string(name));
      message = field->message_type();
    }
    if (field->cpp_type() != pb::FieldDescriptor::CPPTYPE_INT64) continue;
    IntegerRange range = kAll;
    range.least = info.absent ? *info.absent + 1 : static_cast<int64_t>(info.least);
    if (std::isfinite(info.most)) range.most = static_cast<int64_t>(info.most);
    rows.push_back({field->full_name(), range, kByDecoder});
  }
}

// Of the other operators: the priority and seeds, which may have all values.
void AddOperators(const pb::ServiceDescriptor& service, std::vector<FieldBounds>& rows) {
  for (const OperatorSchema* schema : OperatorSchemas()) {
    if (schema->method.empty()) continue;
    const pb::Descriptor& request =
        *service.FindMethodByName(std::string(schema->method))->input_type();
    const auto add = [&](absl::string_view name) {
      rows.push_back({request.FindFieldByName(std::string(name))->full_name(), kAll});
    };
    add("priority");
    for (const AttributeSchema& attribute : schema->attributes) {
      if (std::holds_alternative<uint64_t>(attribute.kind)) add(attribute.name);
    }
  }
}

std::vector<FieldBounds> AllRows() {
  std::vector<FieldBounds> rows(std::begin(kTable), std::end(kTable));
  const auto* const service =
      pb::DescriptorPool::generated_pool()->FindServiceByName("rapt.v1.AttentionService");
  if (service == nullptr) return rows;  // a program may lack a protocol
  AddAttributes(*service->FindMethodByName("Attend")->input_type(), rows);
  AddOperators(*service, rows);
  return rows;
}

// A field to check, or one whose messages may have such fields.
struct Checked {
  const pb::FieldDescriptor* field;
  IntegerRange range;
};
// By message.
using Checks = absl::flat_hash_map<const pb::Descriptor*, std::vector<Checked>>;
using Ranges = absl::flat_hash_map<const pb::FieldDescriptor*, IntegerRange>;

Ranges RangesToCheck(absl::Span<const FieldBounds> table) {
  Ranges ranges;
  for (const FieldBounds& row : table) {
    if (row.check != kByTable || row.range == kAll) continue;
    const auto* field =
        pb::DescriptorPool::generated_pool()->FindFieldByName(std::string(row.field));
    if (field != nullptr) ranges[field] = row.range;  // a program may lack a protocol
  }
  return ranges;
}

// Returns whether a message may have fields to check.
bool Add(const pb::Descriptor& message, const Ranges& ranges, Checks& all) {
  if (const auto found = all.find(&message); found != all.end()) return !found->second.empty();
  all[&message].emplace_back();  // a message within itself may have some
  std::vector<Checked> checks;
  for (int n = 0; n < message.field_count(); ++n) {
    const pb::FieldDescriptor* field = message.field(n);
    const auto range = ranges.find(field);
    if (range != ranges.end()) {
      checks.push_back({field, range->second});
    } else if (field->message_type() != nullptr && Add(*field->message_type(), ranges, all)) {
      checks.push_back({field, {}});
    }
  }
  return !(all[&message] = std::move(checks)).empty();
}

Checks ChecksOf(absl::Span<const FieldBounds> table) {
  Checks all;
  const Ranges ranges = RangesToCheck(table);
  for (const auto& [field, range] : ranges) {
    for (int n = 0; n < field->file()->message_type_count(); ++n) {
      Add(*field->file()->message_type(n), ranges, all);
    }
  }
  return all;
}

// Where a message is in the request: field `name` of the outer one, or its element `index`.
struct Place {
  const Place* outer = nullptr;
  absl::string_view name = {};
  int index = -1;

  std::string ToText() const {
    std::string text = outer != nullptr && !outer->name.empty() ? outer->ToText() + "." : "";
    absl::StrAppend(&text, name);
    if (index >= 0) absl::StrAppend(&text, "[", index, "]");
    return text;
  }
};

absl::Status Check(const Checks& all, const pb::Message& message, const Place& place);

template <typename Number>
absl::int128 NumberIn(const pb::Message& message, const pb::FieldDescriptor& field, int index,
                      Number (pb::Reflection::*get)(const pb::Message&, const pb::FieldDescriptor*)
                          const) {
  const pb::Reflection& fields = *message.GetReflection();
  return index < 0 ? (fields.*get)(message, &field)
                   : fields.GetRepeatedFieldRef<Number>(message, &field).Get(index);
}

absl::int128 NumberIn(const pb::Message& message, const pb::FieldDescriptor& field, int index) {
  switch (field.cpp_type()) {
    case pb::FieldDescriptor::CPPTYPE_INT32:
      return NumberIn(message, field, index, &pb::Reflection::GetInt32);
    case pb::FieldDescriptor::CPPTYPE_UINT32:
      return NumberIn(message, field, index, &pb::Reflection::GetUInt32);
    case pb::FieldDescriptor::CPPTYPE_UINT64:
      return NumberIn(message, field, index, &pb::Reflection::GetUInt64);
    default:
      return NumberIn(message, field, index, &pb::Reflection::GetInt64);
  }
}

// Checks the field, or if it is repeated, its element `index`.
absl::Status Check(const Checks& all, const pb::Message& message, const Checked& checked, int index,
                   const Place& outer) {
  const pb::FieldDescriptor& field = *checked.field;
  const Place place = {&outer, field.name(), index};
  if (field.message_type() != nullptr) {
    const pb::Reflection& fields = *message.GetReflection();
    return Check(all,
                 index < 0 ? fields.GetMessage(message, &field)
                           : fields.GetRepeatedMessage(message, &field, index),
                 place);
  }
  const absl::int128 number = NumberIn(message, field, index);
  const auto [least, most] = checked.range;
  if (number >= least && number <= most) return absl::OkStatus();
  return CheckRange(place.ToText(), number, checked.range);
}

absl::Status Check(const Checks& all, const pb::Message& message, const Place& place) {
  const auto checks = all.find(message.GetDescriptor());
  if (checks == all.end()) return absl::OkStatus();
  const pb::Reflection& fields = *message.GetReflection();
  for (const Checked& checked : checks->second) {
    const pb::FieldDescriptor* field = checked.field;
    if (!field->is_repeated()) {
      if (field->has_presence() && !fields.HasField(message, field)) continue;
      RAPT_RETURN_IF_ERROR(Check(all, message, checked, -1, place));
      continue;
    }
    for (int n = 0; n < fields.FieldSize(message, field); ++n) {
      RAPT_RETURN_IF_ERROR(Check(all, message, checked, n, place));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Span<const FieldBounds> IntegerBounds() {
  static const auto& rows = *new std::vector<FieldBounds>(AllRows());
  return rows;
}

absl::Status CheckIntegers(absl::Span<const FieldBounds> table, const pb::Message& message) {
  return Check(ChecksOf(table), message, Place());
}

absl::Status ParseRequest(const std::string& bytes, pb::Message& request) {
  static const auto* const checks = new Checks(ChecksOf(IntegerBounds()));
  if (request.ParseFromString(bytes)) return Check(*checks, request, Place());
  return Invalid("the message is not a valid ", request.GetTypeName());
}

}  // namespace rapt
