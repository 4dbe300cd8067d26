// Every operator through every interface of the server, by the table of cases: the Open Inference
// Protocol and rapt.v1, over gRPC and in JSON over HTTP.
#include <gmock/gmock.h>
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "attention/attention_schema.h"
#include "attention/attributes.h"
#include "attention/half.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "proto/rapt/v1/attention.grpc.pb.h"
#include "server/protocols/rapt/operator_codec.h"
#include "tests/support/operator_cases.h"
#include "tests/support/raw_http.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

namespace pb = google::protobuf;

// --- Fields of rapt.v1 ---------------------------------------------------------------------------

std::set<std::string> FieldNames(const pb::Message& message) {
  std::set<std::string> names;
  for (int n = 0; n < message.GetDescriptor()->field_count(); ++n) {
    names.insert(message.GetDescriptor()->field(n)->name());
  }
  return names;
}

TEST(OperatorMessagesTest, HaveTheNamesOfTheTableAndNoOthers) {
  // Attention and its backward pass have a codec of their own.
  ASSERT_EQ(native::OperatorCodecs().size(), OperatorSchemas().size() - 2);
  for (const native::OperatorCodec& codec : native::OperatorCodecs()) {
    const OperatorSchema& schema = codec.schema();
    SCOPED_TRACE(schema.name);
    std::set<std::string> request = {"priority"};
    std::set<std::string> response = {"backend", "plan", "timing"};
    for (const TensorSchema& input : schema.inputs) {
      request.insert(absl::AsciiStrToLower(input.name));
    }
    for (const AttributeSchema& attribute : schema.attributes) {
      request.insert(std::string(attribute.name));
    }
    for (const TensorSchema& output : schema.outputs) {
      response.insert(absl::AsciiStrToLower(output.name));
      if (output.want != nullptr) request.insert(absl::StrCat("want_", output.name));
    }
    EXPECT_EQ(FieldNames(codec.request()), request);
    EXPECT_EQ(FieldNames(codec.response()), response);
  }
}

// The number of the value whose name ends with that of a choice. Without one: no value.
int EnumValueOf(const pb::EnumDescriptor& type, const std::string& choice) {
  const pb::EnumValueDescriptor* found = nullptr;
  for (int n = 0; n < type.value_count(); ++n) {
    const pb::EnumValueDescriptor& value = *type.value(n);
    const bool matches = absl::EndsWithIgnoreCase(value.name(), choice);
    const bool is_shorter = found == nullptr || value.name().size() < found->name().size();
    if (matches && is_shorter) found = &value;
  }
  return found == nullptr ? 99 : found->number();
}

// The path of an attribute's field from the request. Attributes of attention that are not in
// Attributes() have other fields.
std::string PathOf(const OperatorSchema& schema, const std::string& attribute) {
  if (!schema.method.empty()) return attribute;
  static const std::pair<const char*, const char*> kPaths[] = {
      {"layout", "attention.layout"},
      {"alignment", "attention.alignment"},
      {"softmax_precision", "attention.softmax_in_fp64"},
      {"dropout_seed", "attention.dropout.seed"},
      {"qk_matmul_output_mode", "score_output"}};
  for (const auto& [name, path] : kPaths) {
    if (attribute == name) return path;
  }
  for (const AttributeInfo& info : Attributes()) {
    if (attribute == info.onnx) return std::string(info.native);
  }
  ADD_FAILURE() << "rapt.v1 has no field for " << attribute;
  return "";
}

std::string FieldOf(const OperatorSchema& schema, const TensorSchema& tensor) {
  return schema.method.empty() ? std::string(InfoOf(tensor.slot.role()).native)
                               : absl::AsciiStrToLower(tensor.name);
}

const pb::FieldDescriptor* FindField(const pb::Message& message, const std::string& name) {
  const pb::FieldDescriptor* const field = message.GetDescriptor()->FindFieldByName(name);
  EXPECT_NE(field, nullptr) << message.GetDescriptor()->full_name() << " has no " << name;
  return field;
}

// Sets the field at a path from a text.
void SetField(pb::Message& message, absl::string_view path, const std::string& text) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(path, absl::MaxSplits('.', 1));
  const pb::FieldDescriptor* const field = FindField(message, std::string(parts.first));
  const pb::Reflection& set = *message.GetReflection();
  if (!parts.second.empty()) {
    return SetField(*set.MutableMessage(&message, field), parts.second, text);
  }
  switch (field->cpp_type()) {
    case pb::FieldDescriptor::CPPTYPE_BOOL:
      return set.SetBool(&message, field, text == "1" || text == "true" || text == "FP64");
    case pb::FieldDescriptor::CPPTYPE_INT64:
      return set.SetInt64(&message, field, std::stoll(text));
    case pb::FieldDescriptor::CPPTYPE_UINT64:
      return set.SetUInt64(&message, field, std::stoull(text));
    case pb::FieldDescriptor::CPPTYPE_DOUBLE:
      return set.SetDouble(&message, field, std::stod(text));
    case pb::FieldDescriptor::CPPTYPE_ENUM:
      return set.SetEnumValue(&message, field,
                              field->name() == "score_output"
                                  ? std::stoi(text) + 1
                                  : EnumValueOf(*field->enum_type(), text));
    default:
      ADD_FAILURE() << field->full_name();
  }
}

void SetTensor(pb::Message& message, const std::string& name, const CaseTensor& tensor) {
  const pb::FieldDescriptor* const field = FindField(message, name);
  const pb::Reflection& set = *message.GetReflection();
  if (field->is_repeated()) {
    for (size_t n = 0; n < tensor.bytes.size(); n += sizeof(int64_t)) {
      int64_t value;
      std::memcpy(&value, &tensor.bytes[n], sizeof(value));
      set.AddInt64(&message, field, value);
    }
    return;
  }
  auto& out = static_cast<v1::Tensor&>(*set.MutableMessage(&message, field));
  v1::DataType type = v1::DATA_TYPE_UNSPECIFIED;
  EXPECT_TRUE(v1::DataType_Parse(std::string(rapt::NameOf(tensor.dtype)), &type));
  out.set_dtype(type);
  out.mutable_shape()->Assign(tensor.shape.begin(), tensor.shape.end());
  out.set_data(tensor.bytes);
}

void SetWant(const OperatorCase& c, const std::string& name, pb::Message& request) {
  const TensorSchema& output = *FindRow(c.schema().outputs, name);
  if (c.op == "attention_backward") {
    request.GetReflection()->AddString(&request, FindField(request, "gradients"),
                                       FieldOf(c.schema(), output));
  } else if (name == "qk_matmul_output") {
    SetField(request, "score_output", "0");  // and the mode after it
  } else if (output.want != nullptr) {
    const bool is_present = c.op == "attention" && absl::StartsWith(name, "present_");
    SetField(request, is_present ? "want_present" : "want_" + name, "1");
  }
}

const pb::MethodDescriptor& MethodOf(const OperatorSchema& schema) {
  const std::string name = !schema.method.empty()       ? std::string(schema.method)
                           : schema.name == "attention" ? "Attend"
                                                        : "AttendBackward";
  return *pb::DescriptorPool::generated_pool()
              ->FindServiceByName("rapt.v1.AttentionService")
              ->FindMethodByName(name);
}

std::unique_ptr<pb::Message> New(const pb::Descriptor& type) {
  return std::unique_ptr<pb::Message>(
      pb::MessageFactory::generated_factory()->GetPrototype(&type)->New());
}

std::unique_ptr<pb::Message> RequestOf(const OperatorCase& c, const CaseTensors& inputs) {
  const OperatorSchema& schema = c.schema();
  std::unique_ptr<pb::Message> request = New(*MethodOf(schema).input_type());
  pb::Message* call = request.get();
  if (c.op == "attention_backward") {
    call = static_cast<v1::AttendBackwardRequest&>(*request).mutable_call();
  }
  for (const auto& [name, tensor] : inputs) {
    const TensorSchema& input = *FindRow(schema.inputs, name);
    const bool is_of_backward = FindRow(AttentionSchema().inputs, name) == nullptr;
    SetTensor(is_of_backward ? *request : *call, FieldOf(schema, input), tensor);
  }
  for (const std::string& name : c.wants) SetWant(c, name, *request);
  if (schema.method.empty()) SetField(*call, "attention.alignment", "onnx");  // the table's default
  for (const auto& [name, text] : c.attributes) SetField(*call, PathOf(schema, name), text);
  return request;
}

CaseTensors TensorsOf(const OperatorSchema& schema, const pb::Message& response) {
  CaseTensors tensors;
  for (const TensorSchema& output : schema.outputs) {
    const pb::FieldDescriptor* const field = FindField(response, FieldOf(schema, output));
    const pb::Reflection& get = *response.GetReflection();
    if (!get.HasField(response, field)) continue;
    const auto& tensor = static_cast<const v1::Tensor&>(get.GetMessage(response, field));
    tensors[std::string(output.name)] = {*DTypeNamed(v1::DataType_Name(tensor.dtype())),
                                         Shape(tensor.shape().begin(), tensor.shape().end()),
                                         tensor.data()};
  }
  return tensors;
}

// --- The interfaces ------------------------------------------------------------------------------

absl::Status StatusOf(const grpc::Status& status) {
  return {static_cast<absl::StatusCode>(status.error_code()), status.error_message()};
}

// Returns the body of the answer; of another than 200, as an error.
absl::StatusOr<std::string> Post(const ServerProcess& server, const std::string& path,
                                 const std::string& body) {
  const RawResponse response = RawHttp(server.http_address()).Ask(RequestText("POST", path, body));
  if (response.status == 200) return response.body;
  return absl::Status(
      response.status == 400 ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kUnknown,
      response.body);
}

class Native : public CaseInterface {
 public:
  explicit Native(const ServerProcess& server) : server_(server) {}

  absl::StatusOr<CaseTensors> Call(const OperatorCase& c, const CaseTensors& inputs) final {
    const std::unique_ptr<pb::Message> request = RequestOf(c, inputs);
    const std::unique_ptr<pb::Message> response = New(*MethodOf(c.schema()).output_type());
    const absl::Status status = Send(MethodOf(c.schema()).name(), *request, *response);
    if (!status.ok()) return status;
    return TensorsOf(c.schema(), *response);
  }

  // Enumerations have words of their own.
  std::string NameOf(const OperatorCase& c, const std::string& name) final {
    const AttributeSchema* const attribute = FindRow(c.schema().attributes, name);
    if (attribute != nullptr) {
      const bool is_enum =
          !attribute->choices.empty() || std::holds_alternative<DType>(attribute->kind);
      return is_enum || c.schema().method.empty() ? PathOf(c.schema(), name) : "";
    }
    const TensorSchema& input = *FindRow(c.schema().inputs, name);
    return c.schema().method.empty() ? FieldOf(c.schema(), input) : "";
  }

  bool CanExpress(const OperatorCase&, const AttributeSchema& attribute) final {
    return !std::holds_alternative<bool>(attribute.kind) &&
           !std::holds_alternative<uint64_t>(attribute.kind) &&
           attribute.name != "softmax_precision";
  }

 protected:
  virtual absl::Status Send(const std::string& method, const pb::Message& request,
                            pb::Message& response) = 0;

  const ServerProcess& server_;
};

class NativeOverGrpc final : public Native {
 public:
  using Native::Native;

 private:
  absl::Status Send(const std::string& method, const pb::Message& request,
                    pb::Message& response) override {
    grpc::TemplatedGenericStub<pb::Message, pb::Message> stub(
        grpc::CreateChannel(server_.grpc_address(), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    std::promise<grpc::Status> done;
    stub.UnaryCall(&context, "/rapt.v1.AttentionService/" + method, {}, &request, &response,
                   [&done](grpc::Status status) { done.set_value(std::move(status)); });
    return StatusOf(done.get_future().get());
  }
};

class NativeInJson final : public Native {
 public:
  using Native::Native;

 private:
  absl::Status Send(const std::string& method, const pb::Message& request,
                    pb::Message& response) override {
    std::string path = "/rapt/v1/", body;
    for (const char c : method) {  // "lsh-attend" of LshAttend
      if (absl::ascii_isupper(c) && path.back() != '/') path += '-';
      path += absl::ascii_tolower(c);
    }
    EXPECT_TRUE(pb::util::MessageToJsonString(request, &body).ok());
    const absl::StatusOr<std::string> answer = Post(server_, path, body);
    if (answer.ok()) {
      EXPECT_TRUE(pb::util::JsonStringToMessage(*answer, &response).ok()) << *answer;
    }
    return answer.status();
  }
};

class Infer final : public CaseInterface {
 public:
  explicit Infer(const ServerProcess& server)
      : stub_(inference::GRPCInferenceService::NewStub(
            grpc::CreateChannel(server.grpc_address(), grpc::InsecureChannelCredentials()))) {}

  absl::StatusOr<CaseTensors> Call(const OperatorCase& c, const CaseTensors& inputs) override {
    inference::ModelInferRequest request;
    request.set_model_name(c.op);
    for (const auto& [name, tensor] : inputs) {
      auto& input = *request.add_inputs();
      input.set_name(name);
      input.set_datatype(std::string(rapt::NameOf(tensor.dtype)));
      input.mutable_shape()->Assign(tensor.shape.begin(), tensor.shape.end());
      request.add_raw_input_contents(tensor.bytes);
    }
    for (const auto& [name, text] : c.attributes) {
      SetParameter(FindRow(c.schema().attributes, name)->kind, text,
                   (*request.mutable_parameters())[name]);
    }
    for (const std::string& name : c.outputs()) request.add_outputs()->set_name(name);
    inference::ModelInferResponse response;
    grpc::ClientContext context;
    const grpc::Status status = stub_->ModelInfer(&context, request, &response);
    if (!status.ok()) return StatusOf(status);
    CaseTensors outputs;
    for (int n = 0; n < response.outputs_size(); ++n) {
      const auto& output = response.outputs(n);
      outputs[output.name()] = {*DTypeNamed(output.datatype()),
                                Shape(output.shape().begin(), output.shape().end()),
                                response.raw_output_contents(n)};
    }
    return outputs;
  }

 private:
  static void SetParameter(const AttributeValue& kind, const std::string& text,
                           inference::InferParameter& parameter) {
    int64_t whole;
    const bool is_whole = absl::SimpleAtoi(text, &whole);
    if (std::holds_alternative<double>(kind)) {
      parameter.set_double_param(std::stod(text));
    } else if (std::holds_alternative<DType>(kind)) {
      parameter.set_int64_param(InfoOf(*DTypeNamed(text)).onnx);
    } else if (std::holds_alternative<uint64_t>(kind) && !is_whole) {
      parameter.set_uint64_param(std::stoull(text));
    } else if (std::holds_alternative<bool>(kind) && text == "true") {
      parameter.set_bool_param(true);
    } else if (is_whole) {
      parameter.set_int64_param(whole);
    } else {
      parameter.set_string_param(text);
    }
  }

  const std::unique_ptr<inference::GRPCInferenceService::Stub> stub_;
};

// In numbers.
class InferInJson final : public CaseInterface {
 public:
  explicit InferInJson(const ServerProcess& server) : server_(server) {}

  absl::StatusOr<CaseTensors> Call(const OperatorCase& c, const CaseTensors& inputs) override {
    std::vector<std::string> tensors, parameters, outputs;
    for (const auto& [name, tensor] : inputs) {
      tensors.push_back(absl::StrCat(R"({"name":")", name, R"(","datatype":")",
                                     rapt::NameOf(tensor.dtype), R"(","shape":[)",
                                     absl::StrJoin(tensor.shape, ","), R"(],"data":[)",
                                     absl::StrJoin(NumbersOf(tensor), ","), "]}"));
    }
    for (const auto& [name, text] : c.attributes) {
      const AttributeValue& kind = FindRow(c.schema().attributes, name)->kind;
      const bool is_text = std::holds_alternative<uint8_t>(kind) ||
                           std::holds_alternative<DType>(kind) || text == "inf";
      const char* const quote = is_text ? "\"" : "";
      parameters.push_back(absl::StrCat("\"", name, "\":", quote, text, quote));
    }
    for (const std::string& name : c.outputs()) {
      outputs.push_back(absl::StrCat(R"({"name":")", name, R"("})"));
    }
    const std::string request = absl::StrCat(R"({"inputs":[)", absl::StrJoin(tensors, ","),
                                             R"(],"parameters":{)", absl::StrJoin(parameters, ","),
                                             R"(},"outputs":[)", absl::StrJoin(outputs, ","), "]}");
    const absl::StatusOr<std::string> answer =
        Post(server_, absl::StrCat("/v2/models/", c.op, "/infer"), request);
    if (!answer.ok()) return answer.status();
    return TensorsIn(*answer);
  }

 private:
  template <typename T>
  static T ElementOf(const CaseTensor& tensor, int64_t n) {
    T element;
    std::memcpy(&element, &tensor.bytes[static_cast<size_t>(n) * sizeof(T)], sizeof(T));
    return element;
  }

  static std::vector<std::string> NumbersOf(const CaseTensor& tensor) {
    std::vector<std::string> numbers;
    const auto* const bytes = reinterpret_cast<const std::byte*>(tensor.bytes.data());
    const int64_t count = static_cast<int64_t>(tensor.bytes.size()) / SizeOf(tensor.dtype);
    for (int64_t n = 0; n < count; ++n) {
      numbers.push_back(
          IsFloat(tensor.dtype) ? absl::StrFormat("%.17g", LoadElement(bytes, tensor.dtype, n))
          : tensor.dtype == DType::kBool  ? absl::StrCat(ElementOf<uint8_t>(tensor, n))
          : tensor.dtype == DType::kInt32 ? absl::StrCat(ElementOf<int32_t>(tensor, n))
                                          : absl::StrCat(ElementOf<int64_t>(tensor, n)));
    }
    return numbers;
  }

  static CaseTensors TensorsIn(const std::string& answer) {
    pb::Struct response;
    EXPECT_TRUE(pb::util::JsonStringToMessage(answer, &response).ok()) << answer;
    CaseTensors tensors;
    for (const pb::Value& output : response.fields().at("outputs").list_value().values()) {
      const auto& fields = output.struct_value().fields();
      CaseTensor& tensor = tensors[fields.at("name").string_value()];
      tensor.dtype = *DTypeNamed(fields.at("datatype").string_value());
      for (const pb::Value& axis : fields.at("shape").list_value().values()) {
        tensor.shape.push_back(static_cast<int64_t>(axis.number_value()));
      }
      for (const pb::Value& number : fields.at("data").list_value().values()) {
        Append(number, tensor);
      }
    }
    return tensors;
  }

  static void Append(const pb::Value& number, CaseTensor& tensor) {
    const bool is_text = number.kind_case() == pb::Value::kStringValue;  // "-Infinity"
    const double value = is_text ? std::stod(number.string_value()) : number.number_value();
    const size_t begin = tensor.bytes.size();
    tensor.bytes.resize(begin + static_cast<size_t>(SizeOf(tensor.dtype)));
    auto* const bytes = reinterpret_cast<std::byte*>(&tensor.bytes[begin]);
    if (IsFloat(tensor.dtype)) return StoreElement(bytes, tensor.dtype, 0, value);
    const auto integer = static_cast<int32_t>(value);
    std::memcpy(bytes, &integer, sizeof(integer));
  }

  const ServerProcess& server_;
};

// What no value of a tensor or attribute of the table has.
TEST(OperatorMessagesTest, ErrorsNameTheFieldAndItsValues) {
  const struct {
    const char* message;
    void (*change)(v1::LinearAttendRequest& request);
  } kCases[] = {
      {"decay has dtype INT32; it must be FP32, FP16, BF16 or FP64",
       [](auto& r) { r.mutable_decay()->set_dtype(v1::INT32); }},
      {"past_state has 10 bytes of data; its shape",
       [](auto& r) { r.mutable_past_state()->mutable_data()->resize(10); }},
      {"query has a shape of rank 9; it must be at most 8",
       [](auto& r) { r.mutable_query()->mutable_shape()->Resize(9, 1); }},
      {"update_rule is 7; it must be UPDATE_GATED_DELTA (0)",
       [](auto& r) { r.set_update_rule(static_cast<v1::UpdateRule>(7)); }},
      {"state_type is INT8; it must be FP32", [](auto& r) { r.set_state_type(v1::INT8); }},
      {"seed is given; it needs feature_map favor", [](auto& r) { r.set_seed(0); }},
      {"nonpad_kv_seqlen[1] is -1; it must be from 0 to the length 9",
       [](auto& r) { r.set_nonpad_kv_seqlen(1, -1); }},
  };
  const ServerProcess server({"--threads=2"});
  const auto stub = v1::AttentionService::NewStub(
      grpc::CreateChannel(server.grpc_address(), grpc::InsecureChannelCredentials()));
  const OperatorCase& c = OperatorCases().front();
  for (const auto& [message, change] : kCases) {
    const std::unique_ptr<pb::Message> request = RequestOf(c, InputsOf(c));
    change(static_cast<v1::LinearAttendRequest&>(*request));
    grpc::ClientContext context;
    v1::LinearAttendResponse response;
    const grpc::Status status = stub->LinearAttend(
        &context, static_cast<const v1::LinearAttendRequest&>(*request), &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << message;
    EXPECT_THAT(status.error_message(), ::testing::HasSubstr(message));
  }
}

template <typename Interface>
class OperatorCallsTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = new ServerProcess({"--threads=2"}); }
  static void TearDownTestSuite() { delete server_; }

  static ServerProcess* server_;
  Interface interface_{*server_};
};
template <typename Interface>
ServerProcess* OperatorCallsTest<Interface>::server_ = nullptr;

using Interfaces = ::testing::Types<Infer, InferInJson, NativeOverGrpc, NativeInJson>;
TYPED_TEST_SUITE(OperatorCallsTest, Interfaces);

TYPED_TEST(OperatorCallsTest, ReturnTheBitsOfTheOperator) {
  ExpectReturnsTheBitsOfTheOperator(this->interface_);
}

TYPED_TEST(OperatorCallsTest, NameWhatIsRefused) { ExpectNamesWhatIsRefused(this->interface_); }

}  // namespace
}  // namespace rapt::test
