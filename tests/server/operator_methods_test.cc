// The methods of rapt.v1 that compute the operators with a table: their messages have the table's
// names, and a call returns the bits of the same call of the operator's model.
#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "proto/rapt/v1/attention.grpc.pb.h"
#include "server/protocols/rapt/operator_codec.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

namespace pb = google::protobuf;
using ::testing::HasSubstr;

constexpr char kPath[] = "/rapt.v1.AttentionService/";

std::string FieldName(absl::string_view name) { return absl::AsciiStrToLower(name); }

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
    for (const TensorSchema& input : schema.inputs) request.insert(FieldName(input.name));
    for (const AttributeSchema& attribute : schema.attributes) {
      request.insert(std::string(attribute.name));
    }
    for (const TensorSchema& output : schema.outputs) {
      response.insert(FieldName(output.name));
      if (output.want != nullptr) request.insert(absl::StrCat("want_", output.name));
    }
    EXPECT_EQ(FieldNames(codec.request()), request);
    EXPECT_EQ(FieldNames(codec.response()), response);
  }
}

TEST(OperatorMessagesTest, NameChoicesAsTheTableDoes) {
  for (const native::OperatorCodec& codec : native::OperatorCodecs()) {
    for (const AttributeSchema& attribute : codec.schema().attributes) {
      for (size_t n = 0; n < attribute.choices.size(); ++n) {
        const auto& type = *codec.request()
                                .GetDescriptor()
                                ->FindFieldByName(std::string(attribute.name))
                                ->enum_type();
        const std::string& name = type.FindValueByNumber(static_cast<int>(n))->name();
        EXPECT_TRUE(absl::EndsWith(absl::AsciiStrToLower(name), attribute.choices[n])) << name;
      }
    }
  }
}

// A message in text; a tensor has a type and a shape there, and gets numbers here.
struct Case {
  const char* method;
  const char* text;
};

constexpr char kLinear[] = R"(
    query { dtype: FP32 shape: [2, 9, 12] } key { dtype: FP32 shape: [2, 9, 6] }
    value { dtype: FP32 shape: [2, 9, 10] } q_num_heads: 4 kv_num_heads: 2)";
constexpr char kLsh[] = R"(
    q { dtype: FP16 shape: [2, 3, 24, 8] } v { dtype: FP16 shape: [2, 3, 24, 5] } chunk_length: 4)";

const Case kCases[] = {
    {"LinearAttend", R"(update_rule: UPDATE_LINEAR)"},
    {"LinearAttend",
     R"(past_state { dtype: FP64 shape: [2, 2, 3, 5] } decay { dtype: FP32 shape: [2, 9, 6] }
        beta { dtype: FP32 shape: [2, 9, 1] } nonpad_kv_seqlen: [9, 4] scale: 0.3 chunk_size: 2
        state_type: BF16 want_present_state: true)"},
    {"LinearAttend",
     R"(update_rule: UPDATE_LINEAR feature_map: FEATURE_MAP_FAVOR seed: 3 num_features: 7 is_causal: false
        error_rows: 4 want_present_normalizer: true)"},
    {"LinearAttend", R"(update_rule: UPDATE_LINEAR feature_map: FEATURE_MAP_ELU1 normalize: true)"},
    {"LshAttend", R"(seed: 5)"},
    {"LshAttend", R"(seed: 5 want_buckets: true num_hashes: 3 num_buckets: 6 chunks_before: 0
                     chunks_after: 1 is_causal: true scale: 0.4 nonpad_kv_seqlen: [24, 11])"},
    {"LshAttend", R"(k { dtype: FP16 shape: [2, 3, 24, 8] } form: LSH_SIMPLE
                     rotations { dtype: FP32 shape: [1, 8, 2, 8] } num_hashes: 2)"},
    {"RotaryEmbed", R"(x { dtype: FP32 shape: [2, 3, 7, 8] } rope_theta: 100)"},
    {"RotaryEmbed", R"(x { dtype: BF16 shape: [2, 7, 24] } num_heads: 3 rotary_embedding_dim: 4
                       interleaved: true cos_cache { dtype: FP32 shape: [7, 2] }
                       sin_cache { dtype: FP32 shape: [7, 2] })"},
    {"RotaryEmbed", R"(x { dtype: FP32 shape: [2, 3, 7, 8] } rope_theta: 100
                       position_ids { dtype: INT64 shape: [2, 7] })"},
    {"EncodePositions", R"(x { dtype: FP32 shape: [2, 7, 8] } base: 500)"},
    {"EncodePositions",
     R"(x { dtype: FP64 shape: [1, 2, 1, 2, 7, 8] } table { dtype: FP32 shape: [9, 8] })"},
};

int64_t BytesOf(v1::DataType type) {
  switch (type) {
    case v1::FP16:
    case v1::BF16:
      return 2;
    case v1::FP32:
      return 4;
    default:
      return 8;
  }
}

// Fills a tensor with numbers near 1, or with small integers.
void Fill(v1::Tensor& tensor, std::mt19937& rng) {
  int64_t count = 1;
  for (const int64_t axis : tensor.shape()) count *= axis;
  std::string& data = *tensor.mutable_data();
  for (int64_t n = 0; n < count; ++n) {
    const auto random = static_cast<int64_t>(rng() % 97);
    const double number = static_cast<double>(random) / 97 - 0.5;
    const auto single = static_cast<float>(number);
    uint32_t bits;
    std::memcpy(&bits, &single, sizeof(bits));
    const int64_t position = random % 5;
    const auto half = static_cast<uint16_t>(0x3800 + random);  // FP16 from 0.5 on
    const auto brain = static_cast<uint16_t>(bits >> 16);
    const void* from = tensor.dtype() == v1::INT64  ? static_cast<const void*>(&position)
                       : tensor.dtype() == v1::FP64 ? static_cast<const void*>(&number)
                       : tensor.dtype() == v1::FP32 ? static_cast<const void*>(&single)
                       : tensor.dtype() == v1::FP16 ? static_cast<const void*>(&half)
                                                    : static_cast<const void*>(&brain);
    data.append(static_cast<const char*>(from), static_cast<size_t>(BytesOf(tensor.dtype())));
  }
}

const pb::FieldDescriptor* FieldOf(const pb::Message& message, absl::string_view name) {
  return message.GetDescriptor()->FindFieldByName(FieldName(name));
}

const v1::Tensor* TensorOf(const pb::Message& message, absl::string_view name) {
  const pb::FieldDescriptor* const field = FieldOf(message, name);
  if (!message.GetReflection()->HasField(message, field)) return nullptr;
  return static_cast<const v1::Tensor*>(&message.GetReflection()->GetMessage(message, field));
}

std::unique_ptr<pb::Message> RequestOf(const Case& c) {
  std::unique_ptr<pb::Message> request(native::CodecOf(c.method).request().New());
  const std::string method = c.method;
  const std::string text = absl::StrCat(method == "LinearAttend" ? kLinear
                                        : method == "LshAttend"  ? kLsh
                                                                 : "",
                                        " ", c.text);
  EXPECT_TRUE(pb::TextFormat::ParseFromString(text, request.get())) << text;
  std::mt19937 rng(7);
  for (const TensorSchema& input : native::CodecOf(c.method).schema().inputs) {
    if (input.slot == Role::kKeyLengths || TensorOf(*request, input.name) == nullptr) continue;
    Fill(static_cast<v1::Tensor&>(*request->GetReflection()->MutableMessage(
             request.get(), FieldOf(*request, input.name))),
         rng);
  }
  return request;
}

void AddInput(absl::string_view name, const std::string& type, const std::vector<int64_t>& shape,
              const std::string& data, inference::ModelInferRequest& request) {
  auto& input = *request.add_inputs();
  input.set_name(std::string(name));
  input.set_datatype(type);
  input.mutable_shape()->Add(shape.begin(), shape.end());
  request.add_raw_input_contents(data);
}

// ONNX's number of a float type.
int64_t OnnxTypeOf(v1::DataType type) {
  return type == v1::FP32 ? 1 : type == v1::FP16 ? 10 : type == v1::FP64 ? 11 : 16;
}

// Sets a parameter to the attribute's field.
void SetParameter(const pb::Message& request, const AttributeSchema& attribute,
                  inference::InferParameter& parameter) {
  const pb::Reflection& get = *request.GetReflection();
  const pb::FieldDescriptor* const field = FieldOf(request, attribute.name);
  switch (field->cpp_type()) {
    case pb::FieldDescriptor::CPPTYPE_BOOL:
      return parameter.set_bool_param(get.GetBool(request, field));
    case pb::FieldDescriptor::CPPTYPE_INT64:
      return parameter.set_int64_param(get.GetInt64(request, field));
    case pb::FieldDescriptor::CPPTYPE_UINT64:
      return parameter.set_uint64_param(get.GetUInt64(request, field));
    case pb::FieldDescriptor::CPPTYPE_DOUBLE:
      return parameter.set_double_param(get.GetDouble(request, field));
    default:
      break;
  }
  const int value = get.GetEnumValue(request, field);
  if (attribute.choices.empty()) {
    parameter.set_int64_param(OnnxTypeOf(static_cast<v1::DataType>(value)));
  } else {
    parameter.set_string_param(std::string(attribute.choices[static_cast<size_t>(value)]));
  }
}

// The same call of the operator's model.
inference::ModelInferRequest InferOf(const OperatorSchema& schema, const pb::Message& request) {
  inference::ModelInferRequest infer;
  infer.set_model_name(std::string(schema.name));
  const pb::Reflection& get = *request.GetReflection();
  for (const TensorSchema& input : schema.inputs) {
    if (input.slot == Role::kKeyLengths) {
      const pb::FieldDescriptor* const field = FieldOf(request, input.name);
      std::vector<int64_t> values;
      for (int n = 0; n < get.FieldSize(request, field); ++n) {
        values.push_back(get.GetRepeatedInt64(request, field, n));
      }
      if (values.empty()) continue;
      AddInput(input.name, "INT64", {static_cast<int64_t>(values.size())},
               {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int64_t)},
               infer);
    } else if (const v1::Tensor* tensor = TensorOf(request, input.name)) {
      AddInput(input.name, v1::DataType_Name(tensor->dtype()),
               {tensor->shape().begin(), tensor->shape().end()}, tensor->data(), infer);
    }
  }
  for (const AttributeSchema& attribute : schema.attributes) {
    if (!get.HasField(request, FieldOf(request, attribute.name))) continue;
    SetParameter(request, attribute, (*infer.mutable_parameters())[std::string(attribute.name)]);
  }
  return infer;
}

class OperatorMethodsTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = new ServerProcess({"--threads=2"}); }
  static void TearDownTestSuite() { delete server_; }

  // The response of a method, which the generated stubs take by their own types.
  grpc::Status Call(const std::string& method, const pb::Message& request, pb::Message& response) {
    grpc::TemplatedGenericStub<pb::Message, pb::Message> stub(channel_);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    std::promise<grpc::Status> done;
    stub.UnaryCall(&context, kPath + method, {}, &request, &response,
                   [&done](grpc::Status status) { done.set_value(std::move(status)); });
    return done.get_future().get();
  }

  std::string ErrorOf(const char* method, const char* text) {
    const std::unique_ptr<pb::Message> request = RequestOf({method, text});
    const std::unique_ptr<pb::Message> response(native::CodecOf(method).response().New());
    const grpc::Status status = Call(method, *request, *response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << text;
    return status.error_message();
  }

  static ServerProcess* server_;
  const std::shared_ptr<grpc::Channel> channel_ =
      grpc::CreateChannel(server_->grpc_address(), grpc::InsecureChannelCredentials());
};
ServerProcess* OperatorMethodsTest::server_ = nullptr;

TEST_F(OperatorMethodsTest, ReturnTheBitsOfTheModel) {
  const auto models = inference::GRPCInferenceService::NewStub(channel_);
  for (const Case& c : kCases) {
    SCOPED_TRACE(absl::StrCat(c.method, " ", c.text));
    const native::OperatorCodec& codec = native::CodecOf(c.method);
    const std::unique_ptr<pb::Message> request = RequestOf(c);
    const std::unique_ptr<pb::Message> response(codec.response().New());
    const grpc::Status status = Call(c.method, *request, *response);
    ASSERT_TRUE(status.ok()) << status.error_message();

    inference::ModelInferRequest infer = InferOf(codec.schema(), *request);
    for (const TensorSchema& output : codec.schema().outputs) {
      if (TensorOf(*response, output.name) == nullptr) continue;
      infer.add_outputs()->set_name(std::string(output.name));
    }
    inference::ModelInferResponse model_response;
    grpc::ClientContext context;
    const grpc::Status model_status = models->ModelInfer(&context, infer, &model_response);
    ASSERT_TRUE(model_status.ok()) << model_status.error_message();
    ASSERT_GE(model_response.outputs_size(), 1);
    for (int n = 0; n < model_response.outputs_size(); ++n) {
      const auto& want = model_response.outputs(n);
      const v1::Tensor& got = *TensorOf(*response, want.name());
      EXPECT_EQ(v1::DataType_Name(got.dtype()), want.datatype());
      EXPECT_THAT(got.shape(), ::testing::ElementsAreArray(want.shape()));
      EXPECT_TRUE(got.data() == model_response.raw_output_contents(n)) << want.name();
    }
    // What is asked for by a field is there, and nothing else.
    for (const TensorSchema& output : codec.schema().outputs) {
      if (output.want == nullptr) continue;
      const pb::FieldDescriptor* want = FieldOf(*request, absl::StrCat("want_", output.name));
      EXPECT_EQ(TensorOf(*response, output.name) != nullptr,
                request->GetReflection()->GetBool(*request, want));
    }
  }
}

TEST_F(OperatorMethodsTest, RefuseBadFieldsByName) {
  struct {
    const char* method;
    const char* text;
    const char* error;
  } const kErrors[] = {
      {"LshAttend", "", "rotations is missing; it or seed must be given"},
      {"LshAttend", "seed: 1 form: 7", "form is 7; it must be LSH_REFORMER (0) or LSH_SIMPLE (1)"},
      {"LshAttend", "seed: 1 num_hashes: -1", "num_hashes is -1; it must be from 1 to 1024"},
      {"LshAttend", "seed: 1 k { dtype: FP16 shape: [2, 3, 24, 8] }", "K is given"},
      {"RotaryEmbed", "", "X is missing"},
      {"RotaryEmbed", "x { dtype: FP32 shape: [1, 1, 2, 8] }", "cos_cache is missing"},
      {"RotaryEmbed", "x { dtype: FP32 shape: [1, 1, 2, 8] } rope_theta: 0", "rope_theta is 0"},
      {"RotaryEmbed",
       "x { dtype: FP32 shape: [1, 1, 2, 8] } rope_theta: 9 position_ids { dtype: FP32 shape: [1, "
       "2] }",
       "position_ids has dtype FP32; it must be INT64"},
      {"EncodePositions", "x { dtype: INT64 shape: [2, 8] }", "x has dtype INT64; it must be FP32"},
      {"EncodePositions", "x { dtype: FP32 shape: [1, 1, 1, 1, 1, 1, 1, 1, 8] }",
       "x has a shape of rank 9; it must be at most 8"},
      {"EncodePositions", "x { dtype: FP32 shape: [2, 8] } base: -1",
       "base is -1; it must be positive"},
  };
  for (const auto& c : kErrors) EXPECT_THAT(ErrorOf(c.method, c.text), HasSubstr(c.error));
}

}  // namespace
}  // namespace rapt::test
