// Server reflection, as its clients use it.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "proto/grpc/reflection/v1/reflection.grpc.pb.h"
#include "proto/grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "tests/support/raw_call.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

using google::protobuf::DescriptorPool;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;

struct V1 {
  using Service = grpc::reflection::v1::ServerReflection;
  using Request = grpc::reflection::v1::ServerReflectionRequest;
  using Response = grpc::reflection::v1::ServerReflectionResponse;
  static constexpr char kPath[] = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
};

struct V1Alpha {
  using Service = grpc::reflection::v1alpha::ServerReflection;
  using Request = grpc::reflection::v1alpha::ServerReflectionRequest;
  using Response = grpc::reflection::v1alpha::ServerReflectionResponse;
  static constexpr char kPath[] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
};

std::shared_ptr<grpc::Channel> ChannelTo(const ServerProcess& server) {
  return grpc::CreateChannel(server.grpc_address(), grpc::InsecureChannelCredentials());
}

// A call that stays open.
template <typename Version>
class Client {
 public:
  explicit Client(const ServerProcess& server)
      : stub_(Version::Service::NewStub(ChannelTo(server))) {
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
    context_.set_wait_for_ready(true);
    stream_ = stub_->ServerReflectionInfo(&context_);
  }
  ~Client() { context_.TryCancel(); }

  typename Version::Response Ask(const typename Version::Request& request) {
    typename Version::Response response;
    EXPECT_TRUE(stream_->Write(request));
    EXPECT_TRUE(stream_->Read(&response));
    return response;
  }

  // Half-closes.
  grpc::Status Finish() {
    stream_->WritesDone();
    return Wait();
  }

  // The status of a call that the request ends.
  grpc::Status Refused(const typename Version::Request& request) {
    stream_->Write(request);
    return Wait();
  }

  // Waits for the server to end the call.
  grpc::Status Wait() {
    typename Version::Response response;
    while (stream_->Read(&response)) {
    }
    return stream_->Finish();
  }

 private:
  const std::unique_ptr<typename Version::Service::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<typename Version::Request, typename Version::Response>>
      stream_;
};

template <typename Version>
class ReflectionTest : public ::testing::Test {
 protected:
  using Request = typename Version::Request;
  using Response = typename Version::Response;

  Response AskForSymbol(const std::string& name) {
    Request request;
    request.set_file_containing_symbol(name);
    return client_.Ask(request);
  }

  Response AskForFile(const std::string& name) {
    Request request;
    request.set_file_by_filename(name);
    return client_.Ask(request);
  }

  // Builds the files of an answer, in order, which requires that each follows its imports.
  static const google::protobuf::FileDescriptor* Build(const Response& response,
                                                       DescriptorPool& pool) {
    const google::protobuf::FileDescriptor* last = nullptr;
    for (const std::string& bytes : response.file_descriptor_response().file_descriptor_proto()) {
      google::protobuf::FileDescriptorProto file;
      EXPECT_TRUE(file.ParseFromString(bytes));
      last = pool.BuildFile(file);
      EXPECT_NE(last, nullptr) << file.name();
    }
    return last;
  }

  static std::vector<std::string> NamesOf(const Response& response) {
    std::vector<std::string> names;
    for (const auto& service : response.list_services_response().service()) {
      names.push_back(service.name());
    }
    return names;
  }

  const ServerProcess server_;
  Client<Version> client_{server_};
};

using Versions = ::testing::Types<V1, V1Alpha>;
TYPED_TEST_SUITE(ReflectionTest, Versions);

TYPED_TEST(ReflectionTest, ListsTheServicesThatAreServed) {
  typename TypeParam::Request request;
  request.set_host("rapt.example");
  request.set_list_services("*");
  const auto response = this->client_.Ask(request);
  EXPECT_THAT(
      this->NamesOf(response),
      ElementsAre("grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection",
                  "grpc.reflection.v1alpha.ServerReflection", "inference.GRPCInferenceService",
                  "rapt.v1.AttentionService", "rapt.v1.CacheService"));
  EXPECT_EQ(response.valid_host(), "rapt.example");
  EXPECT_EQ(response.original_request().SerializeAsString(), request.SerializeAsString());
  EXPECT_TRUE(this->client_.Finish().ok());
}

TYPED_TEST(ReflectionTest, DescribesEachServiceWithAllImports) {
  typename TypeParam::Request request;
  request.set_list_services("");
  for (const std::string& name : this->NamesOf(this->client_.Ask(request))) {
    DescriptorPool pool;
    const auto* const file = this->Build(this->AskForSymbol(name), pool);
    ASSERT_NE(file, nullptr) << name;
    EXPECT_NE(pool.FindServiceByName(name), nullptr) << name;
    const auto again = this->AskForFile(file->name());
    EXPECT_EQ(again.file_descriptor_response().file_descriptor_proto_size(),
              this->AskForSymbol(name).file_descriptor_response().file_descriptor_proto_size());
  }
}

TYPED_TEST(ReflectionTest, FindsMethodsMessagesFieldsAndImports) {
  for (const char* symbol :
       {"inference.GRPCInferenceService.ModelInfer", "inference.ModelInferRequest",
        "inference.ModelInferRequest.InferInputTensor", "inference.ModelInferRequest.model_name",
        "inference.ModelConfig", "grpc.health.v1.HealthCheckResponse.ServingStatus"}) {
    const auto response = this->AskForSymbol(symbol);
    EXPECT_TRUE(response.has_file_descriptor_response()) << symbol;
    EXPECT_EQ(response.original_request().file_containing_symbol(), symbol);
  }
  EXPECT_TRUE(this->AskForFile("inference/model_config.proto").has_file_descriptor_response());
}

// descriptor.proto is linked into the server, but no service uses it.
TYPED_TEST(ReflectionTest, DoesNotFindWhatIsNotServed) {
  std::vector<typename TypeParam::Response> responses;
  for (const std::string& name :
       {std::string(), std::string("."), std::string("no.such.Symbol"),
        std::string("google.protobuf.FileDescriptorProto"), std::string(60000, 'x')}) {
    responses.push_back(this->AskForSymbol(name));
    EXPECT_EQ(responses.back().original_request().file_containing_symbol(), name);
  }
  for (const char* name :
       {"", "no_such.proto", "google/protobuf/descriptor.proto", "/etc/passwd"}) {
    responses.push_back(this->AskForFile(name));
  }
  for (const auto& response : responses) {
    EXPECT_EQ(response.error_response().error_code(), grpc::StatusCode::NOT_FOUND);
    EXPECT_THAT(response.error_response().error_message(), Not(IsEmpty()));
  }
  EXPECT_TRUE(this->client_.Finish().ok());
}

TYPED_TEST(ReflectionTest, KnowsNoExtensions) {
  typename TypeParam::Request request;
  request.set_all_extension_numbers_of_type("inference.ModelInferRequest");
  const auto numbers = this->client_.Ask(request);
  EXPECT_EQ(numbers.all_extension_numbers_response().base_type_name(),
            "inference.ModelInferRequest");
  EXPECT_THAT(numbers.all_extension_numbers_response().extension_number(), IsEmpty());

  std::vector<typename TypeParam::Response> responses;
  for (const char* type : {"no.such.Type", "google.protobuf.FieldOptions"}) {
    request.set_all_extension_numbers_of_type(type);
    responses.push_back(this->client_.Ask(request));
  }
  for (const char* type :
       {"inference.ModelInferRequest", "no.such.Type", "google.protobuf.FieldOptions"}) {
    request.mutable_file_containing_extension()->set_containing_type(type);
    request.mutable_file_containing_extension()->set_extension_number(1000);
    responses.push_back(this->client_.Ask(request));
  }
  for (const auto& response : responses) {
    EXPECT_EQ(response.error_response().error_code(), grpc::StatusCode::NOT_FOUND);
  }
}

TYPED_TEST(ReflectionTest, RequestsWithoutAQuestionGetAnErrorAndTheCallGoesOn) {
  const auto response = this->client_.Ask({});
  EXPECT_EQ(response.error_response().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(this->AskForSymbol("grpc.health.v1.Health").has_file_descriptor_response());
}

TYPED_TEST(ReflectionTest, BadMessagesEndTheCall) {
  RawCall call(this->server_.grpc_address(), TypeParam::kPath);
  call.SendMessage("\x0F");
  EXPECT_EQ(call.WaitForStatus(), grpc::StatusCode::INVALID_ARGUMENT);
  typename TypeParam::Request request;
  request.set_file_containing_symbol(std::string(65 * 1024, 'x'));
  EXPECT_EQ(this->client_.Refused(request).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST(ReflectionLimitsTest, CallsAreCountedAndEndAtTheirDeadline) {
  const ServerProcess server({"--max_calls_per_caller=1", "--default_deadline=2s"});
  RawCall silent(server.grpc_address(), V1::kPath);
  // The second is refused while the first is open.
  const auto is_refused = [&] {
    RawCall call(server.grpc_address(), V1::kPath);
    call.HalfClose();
    return call.WaitForStatus() == grpc::StatusCode::RESOURCE_EXHAUSTED;
  };
  EXPECT_TRUE(is_refused());
  EXPECT_THAT(silent.WaitForStatus(), AnyOf(-1, grpc::StatusCode::CANCELLED));
  while (is_refused()) {
  }
}

TEST(ReflectionLimitsTest, CanBeTurnedOff) {
  const ServerProcess server({"--reflection=false"});
  EXPECT_EQ(Client<V1>(server).Wait().error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(Client<V1Alpha>(server).Wait().error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

}  // namespace
}  // namespace rapt::test
