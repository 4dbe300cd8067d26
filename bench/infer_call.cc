#include "bench/infer_call.h"

#include <cstdio>
#include <initializer_list>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "proto/inference/grpc_service.pb.h"

namespace rapt::bench {
namespace {

constexpr char kPath[] = "/inference.GRPCInferenceService/ModelInfer";
constexpr std::chrono::seconds kDeadline{20};

}  // namespace

std::string SerializedInfer(const InferShape& shape) {
  inference::ModelInferRequest request;
  request.set_model_name("attention");
  int64_t offset = 0;
  const auto add = [&](const char* name, int64_t rows) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype("FP32");
    for (int64_t axis : {int64_t{1}, shape.heads, rows, shape.size}) input.add_shape(axis);
    const int64_t bytes = shape.heads * rows * shape.size * 4;
    if (shape.region.empty()) {
      request.add_raw_input_contents(std::string(bytes, '\0'));
      return;
    }
    auto& parameters = *input.mutable_parameters();
    parameters["shared_memory_region"].set_string_param(shape.region);
    parameters["shared_memory_offset"].set_int64_param(offset);
    parameters["shared_memory_byte_size"].set_int64_param(bytes);
    offset += bytes;
  };
  add("Q", shape.queries);
  add("K", shape.keys);
  add("V", shape.keys);
  if (shape.window) {
    for (const char* side : {"left_window_size", "right_window_size"}) {
      (*request.mutable_parameters())[side].set_int64_param(*shape.window);
    }
  }
  return request.SerializeAsString();
}

grpc::ByteBuffer BufferOf(const std::string& message) {
  const grpc::Slice slice(message.data(), message.size(), grpc::Slice::STATIC_SLICE);
  return grpc::ByteBuffer(&slice, 1);
}

std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

struct InferCaller::Call {
  grpc::ClientContext context;
  grpc::ByteBuffer response;
  grpc::Status status;
  std::unique_ptr<grpc::ClientAsyncResponseReader<grpc::ByteBuffer>> reader;
  std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();
};

InferCaller::InferCaller(const std::string& address, int connections) {
  for (int i = 0; i < connections; ++i) stubs_.emplace_back(Connect(address));
}

InferCaller::~InferCaller() {
  CancelAll();
  queue_.Shutdown();  // after the calls in flight have ended
  void* tag;
  bool ok;
  while (queue_.Next(&tag, &ok)) {
  }
}

void InferCaller::Start(const grpc::ByteBuffer& request) {
  auto call = std::make_unique<Call>();
  call->context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  call->reader =
      stubs_[next_++ % stubs_.size()].PrepareUnaryCall(&call->context, kPath, request, &queue_);
  call->reader->StartCall();
  Call* const key = call.get();
  MutexLock lock(mutex_);  // a call must not complete before it is registered
  call->reader->Finish(&call->response, &call->status, key);
  calls_.emplace(key, std::move(call));
}

void InferCaller::CancelAll() {
  MutexLock lock(mutex_);
  for (const auto& [key, call] : calls_) call->context.TryCancel();
}

InferCaller::Ended InferCaller::WaitForOne() {
  void* tag;
  bool ok;
  RAPT_CHECK(queue_.Next(&tag, &ok), "the queue is shut down");
  MutexLock lock(mutex_);
  const auto call = calls_.extract(static_cast<Call*>(tag));
  return {call.mapped()->status, Since(call.mapped()->began)};
}

Seconds InferCaller::ExpectOne() {
  const Ended ended = WaitForOne();
  if (!ended.status.ok()) std::fprintf(stderr, "%s\n", ended.status.error_message().c_str());
  RAPT_CHECK(ended.status.ok(), "a call failed");
  return ended.took;
}

Seconds InferCaller::CallOnce(const grpc::ByteBuffer& request) {
  Start(request);
  return ExpectOne();
}

}  // namespace rapt::bench
