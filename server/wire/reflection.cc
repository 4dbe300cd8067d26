#include "server/wire/reflection.h"

#include <google/protobuf/descriptor.pb.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/timer.h"
#include "proto/grpc/reflection/v1alpha/reflection.pb.h"
#include "server/protocols/bounds.h"

namespace rapt {

using google::protobuf::Descriptor;
using google::protobuf::DescriptorPool;
using google::protobuf::FieldDescriptor;
using google::protobuf::FileDescriptor;
using grpc::reflection::v1::ServerReflectionRequest;
using grpc::reflection::v1::ServerReflectionResponse;

namespace {

const DescriptorPool& Pool() { return *DescriptorPool::generated_pool(); }

// "package.Service" of "/package.Service/Method".
std::string ServiceOf(const std::string& path) { return path.substr(1, path.rfind('/') - 1); }

// The path of the method that takes these requests, from their file.
template <typename Request>
std::string PathOf() {
  const auto& method = *Request::descriptor()->file()->service(0)->method(0);
  return absl::StrCat("/", method.service()->full_name(), "/", method.name());
}

constexpr char kNotFound[] = "no file of the served services declares it";

// Appends the file after the files that it imports.
void AddWithImports(const FileDescriptor& file, std::vector<const FileDescriptor*>& files) {
  if (std::find(files.begin(), files.end(), &file) != files.end()) return;
  for (int i = 0; i < file.dependency_count(); ++i) AddWithImports(*file.dependency(i), files);
  files.push_back(&file);
}

void SetError(absl::StatusCode code, const std::string& message,
              ServerReflectionResponse& response) {
  response.mutable_error_response()->set_error_code(static_cast<int>(code));
  response.mutable_error_response()->set_error_message(message);
}

}  // namespace

// Responds to one request at a time. A caller may be silent, or not read, until its deadline.
class Reflection::Call final : public StreamCall {
 public:
  Call(const Reflection& reflection, MessageStream& stream)
      : StreamCall(stream),
        reflection_(reflection),
        call_(reflection.environment_, reflection.observe_,
              {.carries_tensors = false, .is_public = true}),
        alarm_(reflection.environment_.timer, [this] { this->stream().Cancel(); }) {}

  void Begin() override {
    const CallHeaders headers = stream().Headers(call_.arrived());
    absl::Status status = call_.Enter(headers);
    if (status.ok()) status = call_.SetDeadline(headers.deadline);
    if (!status.ok()) return Finish(status);
    alarm_.Set(call_.deadline());
    Read();
  }

 private:
  void Read() { stream().StartRead(/*max_bytes=*/0); }
  void Finish(const absl::Status& status) { stream().StartFinish(status, call_); }

  void OnSize(int64_t bytes) override {
    const absl::Status status = call_.CheckMessageSize(bytes);
    if (!status.ok()) return Finish(status);
    // Twice: the response repeats the request.
    call_.KeepMessageMemory(call_.engine().ChargeMessage(2 * bytes, call_.caller_memory()));
    stream().StartRead(bytes);
  }

  // `ok` is false at the end of the requests, or if the caller has left, which reads no status.
  void OnReadDone(bool ok) override {
    if (!ok) return Finish(absl::OkStatus());
    const IncomingMessage message = stream().TakeMessage();
    ServerReflectionRequest request;
    if (absl::Status status = ParseRequest(message.bytes.ToString(), request); !status.ok()) {
      return Finish(status);
    }
    stream().StartWrite(reflection_.Respond(request));
  }

  void OnWriteDone(bool ok) override {
    call_.ReleaseMessageMemory();
    ok ? Read() : Finish(absl::OkStatus());
  }
  void OnCancel() override {}
  void OnDone() override { alarm_.Cancel(); }

  const Reflection& reflection_;
  rapt::Call call_;
  Alarm alarm_;
};

Reflection::Reflection(const CallEnvironment& environment, const UnaryMethods& methods,
                       const StreamMethods& stream_methods)
    : environment_(environment) {
  for (const auto& [path, method] : methods) services_.insert(ServiceOf(path));
  for (const auto& [path, method] : stream_methods) services_.insert(ServiceOf(path));
  services_.insert(ServiceOf(PathOf<ServerReflectionRequest>()));
  services_.insert(ServiceOf(PathOf<grpc::reflection::v1alpha::ServerReflectionRequest>()));
  for (const std::string& name : services_) {
    const auto* const service = Pool().FindServiceByName(name);
    RAPT_CHECK(service != nullptr, "a service without descriptor");
    AddFile(*service->file());
  }
}

void Reflection::AddFile(const FileDescriptor& file) {
  std::vector<const FileDescriptor*> files;
  AddWithImports(file, files);
  for (const FileDescriptor* described : files) {
    std::vector<const FileDescriptor*> all;
    AddWithImports(*described, all);
    ServerReflectionResponse whole;
    for (const FileDescriptor* part : all) {
      google::protobuf::FileDescriptorProto proto;
      part->CopyTo(&proto);
      whole.mutable_file_descriptor_response()->add_file_descriptor_proto(
          proto.SerializeAsString());
    }
    files_[described] = std::make_shared<const std::string>(whole.SerializeAsString());
  }
}

// The messages of both versions have the same fields.
void Reflection::AddTo(StreamMethods& methods) {
  const auto new_call = [this](MessageStream& stream) {
    return std::make_unique<Call>(*this, stream);
  };
  methods[PathOf<ServerReflectionRequest>()] = new_call;
  methods[PathOf<grpc::reflection::v1alpha::ServerReflectionRequest>()] = new_call;
}

ResponseMessage Reflection::Respond(const ServerReflectionRequest& request) const {
  ServerReflectionResponse response;
  response.set_valid_host(request.host());
  *response.mutable_original_request() = request;
  ResponseMessage message;
  switch (request.message_request_case()) {
    case ServerReflectionRequest::kListServices:
      for (const std::string& name : services_) {
        response.mutable_list_services_response()->add_service()->set_name(name);
      }
      break;
    case ServerReflectionRequest::kAllExtensionNumbersOfType:
      ListExtensions(request.all_extension_numbers_of_type(), response);
      break;
    case ServerReflectionRequest::MESSAGE_REQUEST_NOT_SET:
      SetError(absl::StatusCode::kInvalidArgument, "message_request is not set", response);
      break;
    default:
      if (const auto file = files_.find(FileOf(request)); file != files_.end()) {
        // A message may be serialized in parts: the parser merges the fields of all parts.
        message.Append(response.SerializeAsString());
        message.Append({std::as_bytes(std::span(*file->second)), file->second});
        return message;
      }
      SetError(absl::StatusCode::kNotFound, kNotFound, response);
  }
  message.Append(response.SerializeAsString());
  return message;
}

const FileDescriptor* Reflection::FileOf(const ServerReflectionRequest& request) const {
  if (request.has_file_by_filename()) return Pool().FindFileByName(request.file_by_filename());
  if (request.has_file_containing_symbol()) {
    return Pool().FindFileContainingSymbol(request.file_containing_symbol());
  }
  const auto& wanted = request.file_containing_extension();
  const Descriptor* const type = FindType(wanted.containing_type());
  if (type == nullptr) return nullptr;
  const FieldDescriptor* const extension =
      Pool().FindExtensionByNumber(type, wanted.extension_number());
  return extension == nullptr ? nullptr : extension->file();
}

// Null if no served file has the type.
const Descriptor* Reflection::FindType(const std::string& name) const {
  const Descriptor* const type = Pool().FindMessageTypeByName(name);
  return type != nullptr && files_.contains(type->file()) ? type : nullptr;
}

void Reflection::ListExtensions(const std::string& name, ServerReflectionResponse& response) const {
  const Descriptor* const type = FindType(name);
  if (type == nullptr) {
    return SetError(absl::StatusCode::kNotFound, kNotFound, response);
  }
  std::vector<const FieldDescriptor*> extensions;
  Pool().FindAllExtensions(type, &extensions);
  auto& numbers = *response.mutable_all_extension_numbers_response();
  numbers.set_base_type_name(name);
  for (const FieldDescriptor* extension : extensions) {
    if (files_.contains(extension->file())) numbers.add_extension_number(extension->number());
  }
}

}  // namespace rapt
