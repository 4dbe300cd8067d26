// Every integer of every request at its bounds, just outside and at those of its type, in a real
// server in this process, so that sanitizers see what it does with them.
#include "server/protocols/bounds.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/rpc_method.h>
#include <grpcpp/support/sync_stream.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "attention/attributes.h"
#include "base/host_limits.h"
#include "proto/grpc/health/v1/health.pb.h"
#include "proto/grpc/reflection/v1/reflection.pb.h"
#include "proto/grpc/reflection/v1alpha/reflection.pb.h"
#include "proto/inference/grpc_service.pb.h"
#include "proto/rapt/v1/cache.pb.h"
#include "server/options.h"
#include "server/server.h"
#include "tests/support/kv_chunks.h"
#include "tests/support/raw_http.h"
#include "tests/support/shared_object.h"

namespace rapt::test {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::DescriptorPool;
using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using grpc::StatusCode;
using ::testing::HasSubstr;

constexpr int64_t kLeast64 = std::numeric_limits<int64_t>::min();
constexpr int64_t kMost64 = std::numeric_limits<int64_t>::max();

const FieldBounds* BoundsOf(const FieldDescriptor& field) {
  static const auto* const rows = [] {
    auto* all = new std::map<std::string, const FieldBounds*>;
    for (const FieldBounds& row : IntegerBounds()) (*all)[std::string(row.field)] = &row;
    return all;
  }();
  const auto row = rows->find(field.full_name());
  return row == rows->end() ? nullptr : row->second;
}

bool IsInteger(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
    case FieldDescriptor::CPPTYPE_INT64:
    case FieldDescriptor::CPPTYPE_UINT32:
    case FieldDescriptor::CPPTYPE_UINT64:
      return true;
    default:
      return false;
  }
}

// --- The table -----------------------------------------------------------------------------------

// The requests of all services.
std::vector<const Descriptor*> Requests() {
  std::vector<const Descriptor*> requests;
  for (const Descriptor* message :
       {inference::ModelInferRequest::descriptor(), v1::AttendRequest::descriptor(),
        v1::CreateRequest::descriptor(), grpc::health::v1::HealthCheckRequest::descriptor(),
        grpc::reflection::v1::ServerReflectionRequest::descriptor(),
        grpc::reflection::v1alpha::ServerReflectionRequest::descriptor()}) {
    const google::protobuf::ServiceDescriptor& service = *message->file()->service(0);
    for (int n = 0; n < service.method_count(); ++n) {
      requests.push_back(service.method(n)->input_type());
    }
  }
  return requests;
}

void AddIntegers(const Descriptor& message, std::set<const Descriptor*>& seen,
                 std::set<std::string>& integers) {
  if (!seen.insert(&message).second) return;
  for (int n = 0; n < message.field_count(); ++n) {
    const FieldDescriptor& field = *message.field(n);
    if (IsInteger(field)) integers.insert(field.full_name());
    if (field.message_type() != nullptr) AddIntegers(*field.message_type(), seen, integers);
  }
}

TEST(BoundsTableTest, EveryIntegerOfEveryRequestHasARow) {
  std::set<const Descriptor*> seen;
  std::set<std::string> integers, rows;
  for (const Descriptor* request : Requests()) AddIntegers(*request, seen, integers);
  for (const FieldBounds& row : IntegerBounds()) {
    EXPECT_TRUE(rows.insert(std::string(row.field)).second) << row.field << " has two rows";
    EXPECT_LE(row.range.least, row.range.most) << row.field;
  }
  EXPECT_GT(integers.size(), 80u);
  for (const std::string& field : integers) {
    EXPECT_TRUE(rows.contains(field)) << field << " has no row in server/protocols/bounds.cc";
  }
  for (const std::string& field : rows) {
    EXPECT_TRUE(integers.contains(field)) << field << " is in no request";
  }
}

TEST(BoundsTableTest, NumbersOfEveryTypeAreCheckedInMessagesWithinThemselves) {
  const FieldBounds table[] = {
      {"google.protobuf.FieldDescriptorProto.number", {1, 9}},
      {"google.protobuf.UninterpretedOption.positive_int_value", {0, kMost64}},
      {"google.protobuf.UninterpretedOption.negative_int_value", {-5, -1}},
      {"google.protobuf.SourceCodeInfo.Location.path", {0, 3}}};
  google::protobuf::FileDescriptorProto file;
  google::protobuf::DescriptorProto& inner = *file.add_message_type()->add_nested_type();
  google::protobuf::UninterpretedOption& option =
      *inner.mutable_options()->add_uninterpreted_option();
  option.set_positive_int_value(kMost64);
  EXPECT_TRUE(CheckIntegers(table, file).ok());
  option.set_positive_int_value(~uint64_t{0});
  EXPECT_EQ(CheckIntegers(table, file).message(),
            "message_type[0].nested_type[0].options.uninterpreted_option[0].positive_int_value is "
            "18446744073709551615; it must be in [0, 2^63)");
  option.set_positive_int_value(0);
  option.set_negative_int_value(0);
  EXPECT_THAT(std::string(CheckIntegers(table, file).message()),
              HasSubstr("negative_int_value is 0; it must be in [-5, -1]"));
  option.set_negative_int_value(-1);
  inner.add_nested_type()->add_field()->set_number(10);
  EXPECT_EQ(CheckIntegers(table, file).message(),
            "message_type[0].nested_type[0].nested_type[0].field[0].number is 10; it must be in "
            "[1, 9]");
  inner.clear_nested_type();
  file.mutable_source_code_info()->add_location()->add_path(4);
  EXPECT_EQ(CheckIntegers(table, file).message(),
            "source_code_info.location[0].path[0] is 4; it must be in [0, 3]");
}

// --- Values --------------------------------------------------------------------------------------

// A value that a field's type has, and whether its row or its enumeration allows it.
struct Value {
  int64_t number;  // the bits of an unsigned one
  bool allowed;
};

std::vector<Value> ValuesOf(const FieldDescriptor& field) {
  std::map<int64_t, bool> values;
  if (const EnumDescriptor* const type = field.enum_type()) {
    for (const int64_t number : {int64_t{std::numeric_limits<int32_t>::min()}, int64_t{-1},
                                 int64_t{0}, int64_t{type->value_count()}, int64_t{1000},
                                 int64_t{std::numeric_limits<int32_t>::max()}}) {
      values[number] = type->FindValueByNumber(static_cast<int>(number)) != nullptr;
    }
  } else {
    const int64_t least = BoundsOf(field)->range.least, most = BoundsOf(field)->range.most;
    const bool is_unsigned = field.cpp_type() == FieldDescriptor::CPPTYPE_UINT32 ||
                             field.cpp_type() == FieldDescriptor::CPPTYPE_UINT64;
    const bool is_short = field.cpp_type() == FieldDescriptor::CPPTYPE_INT32 ||
                          field.cpp_type() == FieldDescriptor::CPPTYPE_UINT32;
    const int64_t begin = is_unsigned ? 0
                          : is_short  ? std::numeric_limits<int32_t>::min()
                                      : kLeast64;
    const int64_t end = !is_short     ? kMost64
                        : is_unsigned ? std::numeric_limits<uint32_t>::max()
                                      : std::numeric_limits<int32_t>::max();
    const auto add = [&](int64_t number, int64_t difference) {
      if (__builtin_add_overflow(number, difference, &number)) return;
      if (number >= begin && number <= end) values[number] = number >= least && number <= most;
    };
    for (const int64_t number :
         {begin, end, least, most, int64_t{0}, int64_t{1} << 62, int64_t{1} << 40, kMost64 - 63}) {
      for (const int64_t difference : {-1, 0, 1}) add(number, difference);
    }
    // 2^64 - 1, 2^63
    for (const int64_t bits : {int64_t{-1}, kLeast64}) {
      if (is_unsigned && !is_short) values[bits] = least == kLeast64;
    }
  }
  std::vector<Value> list;
  for (const auto& [number, allowed] : values) list.push_back({number, allowed});
  return list;
}

void SetNumber(Message& message, const FieldDescriptor& field, int64_t number) {
  const Reflection& r = *message.GetReflection();
  const bool adds = field.is_repeated() && r.FieldSize(message, &field) == 0;
  const bool is_element = field.is_repeated();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return adds         ? r.AddInt32(&message, &field, static_cast<int32_t>(number))
             : is_element ? r.SetRepeatedInt32(&message, &field, 0, static_cast<int32_t>(number))
                          : r.SetInt32(&message, &field, static_cast<int32_t>(number));
    case FieldDescriptor::CPPTYPE_INT64:
      return adds         ? r.AddInt64(&message, &field, number)
             : is_element ? r.SetRepeatedInt64(&message, &field, 0, number)
                          : r.SetInt64(&message, &field, number);
    case FieldDescriptor::CPPTYPE_UINT32:
      return adds         ? r.AddUInt32(&message, &field, static_cast<uint32_t>(number))
             : is_element ? r.SetRepeatedUInt32(&message, &field, 0, static_cast<uint32_t>(number))
                          : r.SetUInt32(&message, &field, static_cast<uint32_t>(number));
    case FieldDescriptor::CPPTYPE_UINT64:
      return adds         ? r.AddUInt64(&message, &field, static_cast<uint64_t>(number))
             : is_element ? r.SetRepeatedUInt64(&message, &field, 0, static_cast<uint64_t>(number))
                          : r.SetUInt64(&message, &field, static_cast<uint64_t>(number));
    default:
      r.SetEnumValue(&message, &field, static_cast<int>(number));
  }
}

using Path = std::vector<const FieldDescriptor*>;

std::string ToText(const Path& path) {
  std::string text = path.front()->containing_type()->name();
  for (const FieldDescriptor* field : path) absl::StrAppend(&text, ".", field->name());
  return text;
}

// Sets the field, in the first element of each repeated message.
void SetAt(Message& message, const Path& path, int64_t number) {
  Message* at = &message;
  for (const FieldDescriptor* field : path) {
    const Reflection& r = *at->GetReflection();
    if (field->message_type() == nullptr) return SetNumber(*at, *field, number);
    if (!field->is_repeated()) {
      at = r.MutableMessage(at, field);
    } else if (r.FieldSize(*at, field) == 0) {
      at = r.AddMessage(at, field);
    } else {
      at = r.MutableRepeatedMessage(at, field, 0);
    }
  }
}

// Calls visit(path) for each integer and enumeration of a message, also in fields that it does not
// set, except for entries of maps and other cases of its oneofs.
void ForEachNumber(const Message* message, const Descriptor& type, Path& path,
                   const std::function<void(const Path&)>& visit) {
  for (int n = 0; n < type.field_count(); ++n) {
    const FieldDescriptor* const field = type.field(n);
    const bool is_other_case =
        message != nullptr && field->real_containing_oneof() != nullptr &&
        !message->GetReflection()->HasField(*message, field) &&
        message->GetReflection()->HasOneof(*message, field->real_containing_oneof());
    if (field->is_map() || is_other_case) continue;
    path.push_back(field);
    if (IsInteger(*field) || field->enum_type() != nullptr) {
      visit(path);
    } else if (field->message_type() != nullptr) {
      const Message* part = nullptr;
      if (message != nullptr) {
        const Reflection& r = *message->GetReflection();
        if (!field->is_repeated()) {
          part = &r.GetMessage(*message, field);
        } else if (r.FieldSize(*message, field) > 0) {
          part = &r.GetRepeatedMessage(*message, field, 0);
        }
      }
      ForEachNumber(part, *field->message_type(), path, visit);
    }
    path.pop_back();
  }
}

// --- Calls ---------------------------------------------------------------------------------------

// A number in one of the messages that a script sends.
struct Change {
  int message;
  Path path;
  int64_t number;
};

// Sends the messages of a script, one of them changed.
class Talk {
 public:
  Talk(std::shared_ptr<grpc::Channel> channel, std::optional<Change> change)
      : channel_(std::move(channel)), change_(std::move(change)) {}

  // Calls a method, "rapt.v1.CacheService/Create", whose answers have the type of `Answer`. Returns
  // nullopt and keeps the status if it fails.
  template <typename Answer>
  std::optional<std::vector<Answer>> Call(const std::string& method,
                                          std::vector<std::unique_ptr<Message>> messages) {
    const std::string path = "/" + method;
    const grpc::internal::RpcMethod rpc(path.c_str(), grpc::internal::RpcMethod::BIDI_STREAMING,
                                        channel_);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    using Bytes = grpc::ByteBuffer;
    const std::unique_ptr<grpc::ClientReaderWriter<Bytes, Bytes>> stream(
        grpc::internal::ClientReaderWriterFactory<Bytes, Bytes>::Create(channel_.get(), rpc,
                                                                        &context));
    for (auto& message : messages) {
      if (change_ && change_->message == static_cast<int>(sent_.size())) {
        SetAt(*message, change_->path, change_->number);
        auto* chunk = google::protobuf::DynamicCastToGenerated<v1::KvChunk>(message.get());
        if (chunk != nullptr && change_->path.back()->name() != "crc32") Seal(*chunk);
      }
      const std::string bytes = message->SerializeAsString();
      sent_.push_back(std::move(message));
      const grpc::Slice slice(bytes);
      stream->Write(Bytes(&slice, 1));
    }
    stream->WritesDone();
    std::vector<Answer> answers;
    for (Bytes bytes; stream->Read(&bytes);) {
      std::vector<grpc::Slice> slices;
      EXPECT_TRUE(bytes.Dump(&slices).ok());
      std::string text;
      for (const grpc::Slice& slice : slices) {
        text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
      }
      EXPECT_TRUE(answers.emplace_back().ParseFromString(text));
    }
    status_ = stream->Finish();
    if (!status_.ok()) return std::nullopt;
    return answers;
  }

  // A call with one message, and one answer.
  template <typename Answer>
  std::optional<Answer> Call(const std::string& method, const Message& message) {
    std::vector<std::unique_ptr<Message>> messages;
    messages.emplace_back(message.New())->CopyFrom(message);
    auto answers = Call<Answer>(method, std::move(messages));
    if (!answers) return std::nullopt;
    EXPECT_EQ(answers->size(), 1u) << method;
    return std::move(answers->front());
  }

  const grpc::Status& status() const { return status_; }
  const std::vector<std::unique_ptr<Message>>& sent() const { return sent_; }

 private:
  const std::shared_ptr<grpc::Channel> channel_;
  const std::optional<Change> change_;
  std::vector<std::unique_ptr<Message>> sent_;
  grpc::Status status_;
};

// Calls methods until one fails.
using Script = std::function<void(Talk&)>;

constexpr char kCaches[] = "rapt.v1.CacheService/";
constexpr char kNative[] = "rapt.v1.AttentionService/";
constexpr char kOip[] = "inference.GRPCInferenceService/";
constexpr int64_t kHeads = 2, kSize = 4;

v1::Tensor Ones(const std::vector<int64_t>& shape) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::FP32);
  int64_t count = 1;
  for (const int64_t axis : shape) count *= axis;
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  const std::vector<float> values(static_cast<size_t>(count), 1.0f);
  tensor.set_data(values.data(), values.size() * sizeof(float));
  return tensor;
}

v1::CreateRequest CreateMessage() {
  v1::CreateRequest request;
  request.set_dtype(v1::FP32);
  v1::LayerShape& shape = *request.add_shapes();
  shape.set_layers(1);
  shape.set_kv_heads(kHeads);
  shape.set_head_size(kSize);
  shape.set_keep_first(64);
  shape.set_keep_last(100);
  request.set_first_position(10);
  return request;
}

v1::AttendCachedRequest AttendMessage(const v1::Cache& cache, int64_t at) {
  v1::AttendCachedRequest request;
  v1::Item& item = *request.add_items();
  item.set_cache(cache.id());
  item.set_generation(cache.generation());
  item.set_rows(2);
  item.set_new_tokens(2);
  item.set_at(at);
  *request.mutable_q() = Ones({2, kHeads, kSize});
  *request.mutable_k() = Ones({2, kHeads, kSize});
  *request.mutable_v() = Ones({2, kHeads, kSize});
  request.mutable_window()->set_left(kMost64);
  return request;
}

void CloseAll(Talk& talk, const std::vector<v1::Cache>& caches) {
  v1::Ids ids;
  for (const v1::Cache& cache : caches) ids.add_caches(cache.id());
  talk.Call<v1::Caches>(absl::StrCat(kCaches, "Close"), ids);
}

// Steps of a cache that evicts tokens. Returns at the first that fails.
void UseCaches(Talk& talk, std::vector<v1::Cache>& made, const v1::CreateRequest& create) {
  const auto keep = [&](std::optional<v1::Cache> cache) {
    if (cache) made.push_back(*cache);
    return cache;
  };
  const auto cache = keep(talk.Call<v1::Cache>(absl::StrCat(kCaches, "Create"), create));
  if (!cache) return;
  v1::AppendRequest append;
  v1::AppendPart& part = *append.add_parts();
  part.set_cache(cache->id());
  part.set_generation(cache->generation());
  part.set_at(0);
  const v1::LayerShape& shape = cache->shapes(0);
  if (shape.kv_heads() * (shape.head_size() + shape.value_head_size()) > 1000) return;
  *part.mutable_k() = Ones({400, shape.kv_heads(), shape.head_size()});
  *part.mutable_v() = Ones({400, shape.kv_heads(), shape.value_head_size()});
  if (!talk.Call<v1::AppendResponse>(absl::StrCat(kCaches, "Append"), append)) return;
  const v1::AttendCachedRequest attend = AttendMessage(*cache, 400);
  if (!talk.Call<v1::AttendCachedResponse>(absl::StrCat(kCaches, "Attend"), attend)) return;
  v1::ListRequest list;
  list.set_page_size(10);
  if (!talk.Call<v1::Caches>(absl::StrCat(kCaches, "List"), list)) return;
  v1::ForkRequest fork;
  fork.set_cache(cache->id());
  fork.set_generation(cache->generation());
  fork.set_length(401);
  fork.set_lease_ms(60'000);
  const auto copy = keep(talk.Call<v1::Cache>(absl::StrCat(kCaches, "Fork"), fork));
  if (!copy) return;
  if (!talk.Call<v1::AttendCachedResponse>(absl::StrCat(kCaches, "Attend"),
                                           AttendMessage(*copy, 401))) {
    return;
  }
  v1::TruncateRequest truncate;
  truncate.set_cache(cache->id());
  truncate.set_generation(cache->generation());
  truncate.set_length(400);
  const auto cut = talk.Call<v1::Cache>(absl::StrCat(kCaches, "Truncate"), truncate);
  if (!cut) return;
  v1::AttendCachedRequest diagnose = AttendMessage(*cut, 400);
  diagnose.mutable_items(0)->set_new_tokens(0);
  diagnose.clear_k();
  diagnose.clear_v();
  // It reads what is evicted, so it fails.
  talk.Call<v1::DiagnoseResponse>(absl::StrCat(kCaches, "Diagnose"), diagnose);
  if (talk.status().error_code() != StatusCode::FAILED_PRECONDITION) return;
  v1::ExportRequest export_request;
  export_request.set_cache(cut->id());
  export_request.set_generation(cut->generation());
  export_request.set_chunk_tokens(100);
  std::vector<std::unique_ptr<Message>> messages;
  messages.push_back(std::make_unique<v1::ExportRequest>(export_request));
  const auto chunks = talk.Call<v1::KvChunk>(absl::StrCat(kCaches, "Export"), std::move(messages));
  if (!chunks) return;
  messages.clear();
  for (const v1::KvChunk& chunk : *chunks) {
    messages.push_back(std::make_unique<v1::KvChunk>(chunk));
  }
  const auto imported = talk.Call<v1::Cache>(absl::StrCat(kCaches, "Import"), std::move(messages));
  if (!imported || !keep(imported->front())) return;
  talk.Call<v1::AttendCachedResponse>(absl::StrCat(kCaches, "Attend"),
                                      AttendMessage(imported->front(), 400));
}

v1::AttendRequest AttentionMessage() {
  v1::AttendRequest request;
  for (v1::Tensor* tensor : {request.mutable_q(), request.mutable_k(), request.mutable_v()}) {
    *tensor = Ones({1, kHeads, 3, kSize});
  }
  request.mutable_attention()->set_causal(true);
  return request;
}

v1::AttendBackwardRequest BackwardMessage() {
  v1::AttendBackwardRequest request;
  *request.mutable_call() = AttentionMessage();
  *request.mutable_dy() = request.call().q();
  return request;
}

v1::LinearAttendRequest LinearMessage() {
  v1::LinearAttendRequest request;
  for (v1::Tensor* tensor :
       {request.mutable_query(), request.mutable_key(), request.mutable_value()}) {
    *tensor = Ones({1, 3, kHeads * kSize});
  }
  request.set_update_rule(v1::UPDATE_LINEAR);
  request.set_q_num_heads(kHeads);
  request.set_kv_num_heads(kHeads);
  return request;
}

v1::LinearAttendRequest FavorMessage() {
  v1::LinearAttendRequest request = LinearMessage();
  request.set_feature_map(v1::FEATURE_MAP_FAVOR);
  request.set_num_features(8);
  request.set_error_rows(1);
  return request;
}

v1::LshAttendRequest LshMessage() {
  v1::LshAttendRequest request;
  *request.mutable_q() = *request.mutable_v() = Ones({1, kHeads, 8, kSize});
  request.set_chunk_length(4);
  request.set_seed(1);
  return request;
}

v1::RotaryEmbedRequest RotaryMessage() {
  v1::RotaryEmbedRequest request;
  *request.mutable_x() = Ones({1, 3, kHeads * kSize});
  request.set_num_heads(kHeads);
  request.set_rope_theta(10000);
  return request;
}

v1::EncodePositionsRequest PositionsMessage() {
  v1::EncodePositionsRequest request;
  *request.mutable_x() = Ones({1, 3, kSize});
  return request;
}

std::vector<std::unique_ptr<Message>> StreamMessages(v1::StreamDirection direction) {
  std::vector<std::unique_ptr<Message>> messages;
  auto& header = *static_cast<v1::AttendStreamRequest*>(
                      messages.emplace_back(std::make_unique<v1::AttendStreamRequest>()).get())
                      ->mutable_header();
  header.set_direction(direction);
  header.set_dtype(v1::FP32);
  header.set_batch(1);
  header.set_query_heads(kHeads);
  header.set_kv_heads(kHeads);
  header.set_query_length(4);
  header.set_key_length(4);
  header.set_head_size(kSize);
  header.set_value_head_size(kSize);
  header.set_query_chunk(2);
  header.set_key_chunk(2);
  header.mutable_attention()->set_causal(true);
  const std::string data = Ones({kHeads, 2, kSize}).data();
  const auto add = [&](bool is_keys) {
    for (const int64_t begin : {0, 2}) {
      auto message = std::make_unique<v1::AttendStreamRequest>();
      if (is_keys) {
        message->mutable_keys()->set_offset(begin);
        message->mutable_keys()->set_count(2);
        message->mutable_keys()->set_k(data);
        message->mutable_keys()->set_v(data);
      } else {
        message->mutable_queries()->set_offset(begin);
        message->mutable_queries()->set_count(2);
        message->mutable_queries()->set_q(data);
      }
      messages.push_back(std::move(message));
    }
  };
  add(direction == v1::QUERIES_STREAM);
  add(direction == v1::KEYS_STREAM);
  return messages;
}

using Shapes = std::vector<std::pair<const char*, std::vector<int64_t>>>;

const std::vector<int64_t> kOfHeads = {1, kHeads, 3, kSize};

// `shapes` are of FP32 inputs.
inference::ModelInferRequest InferMessage(const std::string& model = "attention",
                                          const Shapes& shapes = {
                                              {"Q", kOfHeads}, {"K", kOfHeads}, {"V", kOfHeads}}) {
  inference::ModelInferRequest request;
  request.set_model_name(model);
  for (const auto& [name, shape] : shapes) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype("FP32");
    input.mutable_shape()->Assign(shape.begin(), shape.end());
    request.add_raw_input_contents(Ones(shape).data());
  }
  return request;
}

class BoundsTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    const std::vector<const char*> flags = {
        "--grpc_address=127.0.0.1:0",     "--metrics_address=127.0.0.1:0",
        "--http_address=127.0.0.1:0",     "--threads=2",
        "--memory_budget_bytes=67108864", "--kv_cache_bytes=67108864",
        "--allow_shared_memory",          "--drain_pause=0",
        "--drain_refusal_time=0",         "--grace_period=0s"};
    const absl::StatusOr<Options> options = ParseOptions(flags, Environment(), HostLimits{});
    ASSERT_TRUE(options.ok()) << options.status();
    auto server = Server::Create(*options);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = server->release();
    ASSERT_TRUE(server_->Start([] { return false; }).ok());
  }
  static void TearDownTestSuite() {
    server_->Drain();
    delete server_;
  }

  void SetUp() override {
    channel_ = grpc::CreateChannel(server_->grpc_address(), grpc::InsecureChannelCredentials());
  }

  // Runs a script of calls once as it is, then with each number of its messages at each value.
  void TryAllNumbers(const Script& script) {
    Talk plain(channel_, std::nullopt);
    script(plain);
    ASSERT_TRUE(plain.status().ok()) << plain.status().error_message();
    for (size_t n = 0; n < plain.sent().size(); ++n) {
      Path path;
      ForEachNumber(
          plain.sent()[n].get(), *plain.sent()[n]->GetDescriptor(), path, [&](const Path& found) {
            for (const Value& value : ValuesOf(*found.back())) {
              TryNumber(script, {static_cast<int>(n), found, value.number}, value.allowed);
            }
          });
    }
    Talk again(channel_, std::nullopt);
    script(again);
    EXPECT_TRUE(again.status().ok()) << "afterwards: " << again.status().error_message();
  }

  void TryNumber(const Script& script, const Change& change, bool allowed) {
    ++tried_;
    Talk talk(channel_, change);
    script(talk);
    const std::string what =
        absl::StrCat(ToText(change.path), " = ", change.number, " in message ", change.message);
    ExpectAnswered(talk.status(), what);
    if (allowed) return;
    EXPECT_FALSE(talk.status().ok()) << what << " is outside its bounds";
    if (talk.status().error_code() != StatusCode::INVALID_ARGUMENT) return;
    EXPECT_TRUE(Names(talk.status().error_message(), change.path))
        << what << ": " << talk.status().error_message();
  }

  // Whether an error names the field, or if its decoder says more, a message that it is in.
  static bool Names(const std::string& error, const Path& path) {
    const FieldBounds* const row = BoundsOf(*path.back());
    if (row != nullptr && row->check == BoundCheck::kByTable) {
      return absl::StrContains(error, path.back()->name() + " is ") ||
             absl::StrContains(error, path.back()->name() + "[0] is ");
    }
    return std::any_of(path.begin(), path.end(), [&](const FieldDescriptor* field) {
      return absl::StrContains(error, field->name());
    });
  }

  static void ExpectAnswered(const grpc::Status& status, const std::string& what) {
    switch (status.error_code()) {
      case StatusCode::INTERNAL:
      case StatusCode::UNKNOWN:
      case StatusCode::UNAVAILABLE:
      case StatusCode::CANCELLED:
      case StatusCode::DEADLINE_EXCEEDED:
        FAIL() << what << ": code " << status.error_code() << ", " << status.error_message();
      default:
        break;
    }
  }

  template <typename Answer>
  static Script Once(std::string method, const Message& message) {
    std::shared_ptr<Message> kept(message.New());
    kept->CopyFrom(message);
    return [method = std::move(method), kept](Talk& talk) { talk.Call<Answer>(method, *kept); };
  }

  static Server* server_;
  std::shared_ptr<grpc::Channel> channel_;
  int64_t tried_ = 0;
};

Server* BoundsTest::server_ = nullptr;

TEST_F(BoundsTest, Caches) {
  TryAllNumbers([this](Talk& talk) {
    std::vector<v1::Cache> made;
    UseCaches(talk, made, CreateMessage());
    Talk close(channel_, std::nullopt);
    if (!made.empty()) CloseAll(close, made);
  });
  EXPECT_GT(tried_, 1000);
}

// Sums of several numbers at their most.
TEST_F(BoundsTest, CachesWithEveryPositionAtItsMost) {
  v1::CreateRequest create = CreateMessage();
  v1::LayerShape& shape = *create.mutable_shapes(0);
  for (const int64_t first_position : {int64_t{0}, kCounts.most}) {
    for (const int64_t keep_first : {int64_t{0}, kCounts.most}) {
      for (const int64_t keep_last : {int64_t{1}, kCounts.most}) {
        create.set_first_position(first_position);
        shape.set_keep_first(keep_first);
        shape.set_keep_last(keep_last);
        Talk talk(channel_, std::nullopt);
        std::vector<v1::Cache> made;
        UseCaches(talk, made, create);
        ExpectAnswered(talk.status(), create.ShortDebugString());
        ASSERT_FALSE(made.empty()) << talk.status().error_message();
        for (const int64_t position : {int64_t{0}, kCounts.most}) {
          v1::AttendCachedRequest attend = AttendMessage(made[0], 400);
          attend.mutable_items(0)->set_position(position);
          attend.mutable_items(0)->set_generation(2);
          attend.mutable_window()->set_left(kMost64);
          talk.Call<v1::AttendCachedResponse>(absl::StrCat(kCaches, "Attend"), attend);
          ExpectAnswered(talk.status(), attend.ShortDebugString());
        }
        CloseAll(talk, made);
      }
    }
  }
}

// The numbers that once ended the server at its first Attend.
TEST_F(BoundsTest, TokensToKeepBeyondTheBoundAreRefusedByName) {
  v1::CreateRequest create = CreateMessage();
  create.mutable_shapes(0)->set_keep_first(kMost64 - 62);
  create.mutable_shapes(0)->set_keep_last(1);
  Talk talk(channel_, std::nullopt);
  EXPECT_FALSE(talk.Call<v1::Cache>(absl::StrCat(kCaches, "Create"), create));
  EXPECT_EQ(talk.status().error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(talk.status().error_message(),
            "shapes[0].keep_first is 9223372036854775745; it must be in [0, 2^62)");
  v1::KvChunk chunk;
  *chunk.mutable_header()->mutable_cache() = create;
  Seal(chunk);
  EXPECT_FALSE(talk.Call<v1::Cache>(absl::StrCat(kCaches, "Import"), chunk));
  EXPECT_EQ(talk.status().error_message(),
            "header.cache.shapes[0].keep_first is 9223372036854775745; it must be in [0, 2^62)");
  create = CreateMessage();
  create.mutable_shapes(0)->set_head_size(int64_t{1} << 40);
  EXPECT_FALSE(talk.Call<v1::Cache>(absl::StrCat(kCaches, "Create"), create));
  EXPECT_EQ(talk.status().error_message(),
            "shapes[0].head_size is 1099511627776; it must be in [1, 1048576]");
}

TEST_F(BoundsTest, JsonHasTheSameBounds) {
  RawHttp connection(server_->http_address());
  const auto post = [&](const std::string& number) {
    return connection.Ask(RequestText(
        "POST", "/rapt/v1/caches",
        absl::StrCat(R"({"dtype": "FP32", "shapes": [{"layers": 1, "kv_heads": 1, )",
                     R"("head_size": 4, "keep_last": 1, "keep_first": )", number, "}]}")));
  };
  for (const char* number :
       {"9223372036854775807", R"("9223372036854775807")", "4611686018427387904", "-1"}) {
    const RawResponse refused = post(number);
    EXPECT_EQ(refused.status, 400) << number;
    EXPECT_THAT(refused.body, HasSubstr("shapes[0].keep_first is ")) << number;
  }
  for (const char* number : {"9223372036854775808", "1e30", "18446744073709551616", "0.5"}) {
    EXPECT_EQ(post(number).status, 400) << number;
  }
  EXPECT_EQ(post("4611686018427387903").status, 200);
}

TEST_F(BoundsTest, Attention) {
  const std::string native = kNative;
  TryAllNumbers(Once<v1::AttendResponse>(native + "Attend", AttentionMessage()));
  TryAllNumbers(Once<v1::AttendBackwardResponse>(native + "AttendBackward", BackwardMessage()));
  v1::DiagnoseRequest diagnose;
  *diagnose.mutable_call() = AttentionMessage();
  TryAllNumbers(Once<v1::DiagnoseResponse>(native + "Diagnose", diagnose));
  v1::EstimateMemoryRequest estimate;
  estimate.set_batch(1);
  estimate.set_query_heads(kHeads);
  estimate.add_lengths(64);
  estimate.set_block_q(8);
  estimate.set_block_k(8);
  TryAllNumbers(Once<v1::EstimateMemoryResponse>(native + "EstimateMemory", estimate));
}

TEST_F(BoundsTest, LinearAttention) {
  const std::string native = kNative;
  TryAllNumbers(Once<v1::LinearAttendResponse>(native + "LinearAttend", LinearMessage()));
  TryAllNumbers(Once<v1::LinearAttendResponse>(native + "LinearAttend", FavorMessage()));
  TryAllNumbers([&](Talk& talk) {
    std::vector<std::unique_ptr<Message>> messages;
    messages.push_back(std::make_unique<v1::LinearAttendRequest>(LinearMessage()));
    v1::LinearAttendRequest later = LinearMessage();
    later.clear_update_rule();
    later.clear_q_num_heads();
    later.clear_kv_num_heads();
    messages.push_back(std::make_unique<v1::LinearAttendRequest>(later));
    talk.Call<v1::LinearAttendResponse>(native + "LinearAttendStream", std::move(messages));
  });
}

TEST_F(BoundsTest, OtherOperators) {
  const std::string native = kNative;
  TryAllNumbers(Once<v1::LshAttendResponse>(native + "LshAttend", LshMessage()));
  TryAllNumbers(Once<v1::RotaryEmbedResponse>(native + "RotaryEmbed", RotaryMessage()));
  TryAllNumbers(Once<v1::EncodePositionsResponse>(native + "EncodePositions", PositionsMessage()));
}

TEST_F(BoundsTest, Streams) {
  for (const v1::StreamDirection direction : {v1::KEYS_STREAM, v1::QUERIES_STREAM}) {
    TryAllNumbers([&](Talk& talk) {
      talk.Call<v1::AttendStreamResponse>(absl::StrCat(kNative, "AttendStream"),
                                          StreamMessages(direction));
    });
  }
}

TEST_F(BoundsTest, Inference) {
  const std::string oip = kOip;
  TryAllNumbers(Once<inference::ModelInferResponse>(oip + "ModelInfer", InferMessage()));
  TryAllNumbers(
      Once<inference::LogSettingsResponse>(oip + "LogSettings", inference::LogSettingsRequest()));
}

TEST_F(BoundsTest, SharedMemory) {
  const SharedObject object(4096);
  inference::SystemSharedMemoryRegisterRequest request;
  request.set_name("bounds");
  request.set_key(object.key());
  request.set_byte_size(4096);
  inference::SystemSharedMemoryUnregisterRequest unregister;
  TryAllNumbers([&](Talk& talk) {
    const std::string oip = kOip;
    talk.Call<inference::SystemSharedMemoryRegisterResponse>(oip + "SystemSharedMemoryRegister",
                                                             request);
    Talk end(channel_, std::nullopt);
    end.Call<inference::SystemSharedMemoryUnregisterResponse>(oip + "SystemSharedMemoryUnregister",
                                                              unregister);
  });
}

// Integer parameters of requests, by the models that have them.
TEST_F(BoundsTest, Parameters) {
  struct Case {
    inference::ModelInferRequest request;  // is computed
    std::vector<std::string> names;
  };
  std::vector<std::string> attributes;
  for (const AttributeInfo& info : Attributes()) attributes.emplace_back(info.onnx);
  for (const char* name : {"dropout_seed", "qk_matmul_output_mode", "softmax_precision", "timeout",
                           "priority", "sequence_id"}) {
    attributes.emplace_back(name);
  }
  auto session = InferMessage("attention_session");
  (*session.mutable_parameters())["sequence_id"].set_int64_param(1);
  (*session.mutable_parameters())["sequence_start"].set_bool_param(true);
  (*session.mutable_parameters())["sequence_end"].set_bool_param(true);
  auto linear = InferMessage("linear_attention", {{"query", {1, 3, kHeads * kSize}},
                                                  {"key", {1, 3, kHeads * kSize}},
                                                  {"value", {1, 3, kHeads * kSize}}});
  (*linear.mutable_parameters())["q_num_heads"].set_int64_param(kHeads);
  (*linear.mutable_parameters())["kv_num_heads"].set_int64_param(kHeads);
  (*linear.mutable_parameters())["update_rule"].set_string_param("linear");
  auto lsh = InferMessage("lsh_attention", {{"Q", kOfHeads}, {"V", kOfHeads}});
  (*lsh.mutable_parameters())["chunk_length"].set_int64_param(1);
  (*lsh.mutable_parameters())["seed"].set_int64_param(1);
  const std::vector<Case> cases = {
      {InferMessage(), attributes},
      {InferMessage("attention_backward",
                    {{"Q", kOfHeads}, {"K", kOfHeads}, {"V", kOfHeads}, {"dY", kOfHeads}}),
       attributes},
      {session,
       {"q_num_heads", "kv_num_heads", "layer", "layers", "position", "sequence_id", "timeout",
        "priority"}},
      {InferMessage(
           "rotary_embedding",
           {{"X", kOfHeads}, {"cos_cache", {1, 3, kSize / 2}}, {"sin_cache", {1, 3, kSize / 2}}}),
       {"num_heads", "rotary_embedding_dim", "interleaved"}},
      {linear,
       {"q_num_heads", "kv_num_heads", "chunk_size", "num_features", "seed", "error_rows",
        "state_type"}},
      {lsh,
       {"num_hashes", "num_buckets", "chunk_length", "chunks_before", "chunks_after", "seed"}}};
  for (const auto& [valid, names] : cases) {
    Talk computed(channel_, std::nullopt);
    computed.Call<inference::ModelInferResponse>(absl::StrCat(kOip, "ModelInfer"), valid);
    ASSERT_TRUE(computed.status().ok())
        << valid.model_name() << ": " << computed.status().error_message();
    for (const std::string& name : names) {
      for (const int64_t number : {kLeast64, kLeast64 + 1, int64_t{-1}, int64_t{0}, int64_t{1},
                                   int64_t{1} << 40, int64_t{1} << 62, kMost64 - 63, kMost64}) {
        for (const bool is_unsigned : {false, true}) {
          inference::ModelInferRequest request = valid;
          auto& parameter = (*request.mutable_parameters())[name];
          is_unsigned ? parameter.set_uint64_param(static_cast<uint64_t>(number))
                      : parameter.set_int64_param(number);
          Talk talk(channel_, std::nullopt);
          talk.Call<inference::ModelInferResponse>(absl::StrCat(kOip, "ModelInfer"), request);
          // A timeout of a microsecond has its own code.
          if (name == "timeout" && number == 1) continue;
          ExpectAnswered(talk.status(), absl::StrCat(valid.model_name(), " ", name, " = ", number));
        }
      }
    }
  }
}

TEST_F(BoundsTest, Reflection) {
  grpc::reflection::v1::ServerReflectionRequest request;
  request.mutable_file_containing_extension()->set_containing_type("rapt.v1.Tensor");
  for (const char* version : {"v1", "v1alpha"}) {
    TryAllNumbers(Once<grpc::reflection::v1::ServerReflectionResponse>(
        absl::StrCat("grpc.reflection.", version, ".ServerReflection/ServerReflectionInfo"),
        request));
  }
}

}  // namespace
}  // namespace rapt::test
