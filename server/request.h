// The types exchanged by protocols and the engine. Depends on neither.
#ifndef RAPT_SERVER_REQUEST_H_
#define RAPT_SERVER_REQUEST_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/attention_schema.h"
#include "attention/backend.h"
#include "attention/operator.h"
#include "attention/operator_schema.h"
#include "attention/tensor_operator.h"
#include "base/clock.h"
#include "base/device_memory.h"
#include "base/sliced_bytes.h"

namespace rapt {

// The stages of a call, for times and for the stage in which it ended.
enum class Stage : uint8_t {
  kReceive,  // receives its message
  kQueue,    // waits for memory or for a thread
  kCompute,
  kSend,  // sends its response
};
inline constexpr int kStages = 4;

// A tensor's row-major bytes, in the caller's layout: contiguous with any alignment, slices, or
// device memory.
struct InputBytes {
  InputBytes() = default;
  InputBytes(const std::byte* data, int64_t size) : size(size), data(data) {}
  InputBytes(SlicedBytes slices, int64_t size) : size(size), slices(slices) {}
  InputBytes(DevicePart device, int64_t size) : size(size), device(device) {}

  int64_t size = 0;
  const std::byte* data = nullptr;  // null: in slices or on the device
  SlicedBytes slices;
  DevicePart device;
  // The bytes are in shared memory, which the caller may write at any time: data that affects
  // control flow is copied before use.
  bool is_shared = false;

  // Copies bytes [begin, begin + count). REQUIRES: !on_device().
  void Copy(int64_t begin, int64_t count, std::byte* target) const {
    if (in_slices()) return slices.Copy(begin, count, target);
    if (count > 0) std::memcpy(target, data + begin, static_cast<size_t>(count));
  }

  // The same from host or device. Returns an error if the device fails.
  absl::Status Fetch(int64_t begin, int64_t count, std::byte* target) const {
    if (on_device()) {
      return device.memory->Read(device.offset + begin, {target, static_cast<size_t>(count)});
    }
    Copy(begin, count, target);
    return absl::OkStatus();
  }

  bool in_slices() const { return data == nullptr && !slices.slices.empty(); }
  bool on_device() const { return device.memory != nullptr; }
  bool present() const { return data != nullptr || in_slices() || on_device(); }
};

// Memory of the caller to which an output is written: host memory of the output's size, aligned to
// its elements, or device memory. If neither is set, the engine allocates a buffer.
struct OutputPlace {
  absl::Span<std::byte> bytes;
  DevicePart device;
};

// 1 is the most urgent priority. The default leaves levels above and below it. Levels less
// urgent than kLowestPriority are treated as that level.
inline constexpr uint64_t kDefaultPriority = 8;
inline constexpr uint64_t kLowestPriority = 15;
inline uint64_t PriorityLevel(uint64_t priority) {
  return priority == 0 ? kDefaultPriority : std::min(priority, kLowestPriority);
}

struct CallerMemory;  // of server/admission

// What a model computes. Each operator of the tables, and each layer of the repository, is a model
// of its own.
enum class Model : uint8_t {
  kAttention,
  kAttentionBackward,
  kAttentionSession,
  kOperator,
  kLayer,
};

// A model as statistics and metrics count it.
struct ModelId {
  ModelId() = default;
  // REQUIRES: neither kOperator nor kLayer.
  ModelId(Model kind) : kind(kind) {}  // NOLINT(google-explicit-constructor)
  explicit ModelId(const OperatorSchema& schema)
      : kind(&schema == &AttentionSchema()           ? Model::kAttention
             : &schema == &AttentionBackwardSchema() ? Model::kAttentionBackward
                                                     : Model::kOperator),
        schema(&schema) {}
  explicit ModelId(std::shared_ptr<const std::string> layer)
      : kind(Model::kLayer), layer(std::move(layer)) {}

  bool operator==(Model model) const { return kind == model; }

  // Its name in the Open Inference Protocol.
  absl::string_view name() const {
    if (layer != nullptr) return *layer;
    if (schema != nullptr) return schema->name;
    if (kind == Model::kAttentionSession) return "attention_session";
    return (kind == Model::kAttention ? AttentionSchema() : AttentionBackwardSchema()).name;
  }

  Model kind = Model::kAttention;
  const OperatorSchema* schema = nullptr;    // of an operator; may be null of attention
  std::shared_ptr<const std::string> layer;  // the name of a layer
};

// The models but layers, in the order in which they are listed.
inline const std::vector<ModelId>& BuiltInModels() {
  static const auto* const kModels = [] {
    auto* models = new std::vector<ModelId>;
    for (const OperatorSchema* schema : OperatorSchemas()) models->emplace_back(*schema);
    models->emplace_back(Model::kAttentionSession);
    return models;
  }();
  return *kModels;
}

// Whether the model's calls have an attention problem, or its backward pass.
inline bool IsAttention(const ModelId& model) {
  return model == Model::kAttention || model == Model::kAttentionBackward;
}

// One call whose shapes have been checked.
struct Request {
  ModelId model;
  ResolvedCall call;
  // Null: attention or its backward pass. Otherwise the call has a problem without axes, and the
  // operator's outputs.
  std::shared_ptr<const TensorOperator> tensor_operator;
  // The outputs that the request has.
  SlotSet Outputs() const {
    if (tensor_operator == nullptr) return OutputsOf(call.problem);
    SlotSet outputs;
    for (Slot slot : kAllOutputs) outputs.Add(slot, tensor_operator->outputs()[slot].has_value());
    return outputs;
  }
  // Makes the request one for an operator other than attention.
  void SetOperator(std::shared_ptr<const TensorOperator> op) {
    tensor_operator = std::move(op);
    for (Slot slot : Outputs()) call.outputs[slot] = *tensor_operator->outputs()[slot];
    call.problem.dtype = call.outputs[Role::kY].dtype;
  }
  // Each has the size stated by the call; absent if the call has no such tensor.
  InputMap<InputBytes> inputs;
  std::vector<int64_t> key_lengths;  // a copy of Role::kKeyLengths, aligned
  // Writes the converted mask, if it needs conversion. inputs[kMask] then has a size and no bytes.
  // Called once memory is reserved for it, on any thread. Null: no conversion.
  absl::AnyInvocable<absl::Status(absl::Span<std::byte> mask)> write_mask;
  // Runs once after the inputs are complete and before the tasks of `tensor_operator`; the request
  // fails with its error. Its workspace, of `preparation_bytes` bytes with any content, ends with
  // it. Called on any thread. Null: nothing to do.
  absl::AnyInvocable<absl::Status(absl::Span<std::byte> workspace)> prepare;
  int64_t preparation_bytes = 0;
  int64_t prepared_bytes = 0;  // that it reads or writes, apart from its workspace
  OutputMap<OutputPlace> places;
  // Memory that the caller needs to encode the result, reserved together with that of the outputs.
  int64_t encoding_bytes = 0;
  // Keeps the inputs' bytes and the outputs' memory alive until `done` has run. Null: the caller
  // does.
  std::shared_ptr<const void> owner;
  // Returns an error once shared memory of the request was revoked; the request then fails with it.
  // Thread-safe. Null: the request uses no shared memory.
  absl::AnyInvocable<absl::Status() const> check_shared_memory;

  Instant deadline = Instant::max();
  // Set by the caller at any time to cancel the request; outlives done. Null: never.
  const std::atomic<bool>* cancelled = nullptr;
  // 0: kDefaultPriority.
  uint64_t priority = 0;
  // The caller whose share of the memory the request takes. Null: the server.
  std::shared_ptr<CallerMemory> caller;
  // Its message was admitted before Engine::StopAccepting(), so it is not refused afterwards.
  bool is_accepted = false;
  // Even a tiny request is computed on a compute thread, as the one that submits it has other work.
  bool leaves_thread = false;
};

// Memory reserved for the encoding of a result, until destruction.
class EncodingMemory {
 public:
  virtual ~EncodingMemory() = default;
  // Releases a part of it early. REQUIRES: no other thread uses this; at most what is left.
  virtual void Release(int64_t bytes) = 0;
};

// An output's bytes, row-major, aligned to a cache line unless they are in the caller's memory.
// Copies share them; the memory and its reservation are released with the last copy.
struct OutputBuffer {
  absl::Span<const std::byte> bytes;
  std::shared_ptr<const void> owner;
};

struct Result {
  absl::Status status;

  OutputMap<OutputBuffer> outputs;  // empty unless the status is OK and the call wants them
  // Keeps the request's `encoding_bytes` reserved. Null: there are none.
  std::shared_ptr<EncodingMemory> encoding_memory;

  Stage ended_in = Stage::kQueue;            // or kCompute
  Routing routing;                           // backend is null without a plan
  std::string plan;                          // Plan::Describe()
  double flops = 0;                          // Plan::flops
  std::chrono::nanoseconds queue_time{0};    // until the first task: for memory, then for a thread
  std::chrono::nanoseconds compute_time{0};  // from the first task to the last
  int64_t batch_size = 0;  // requests computed by the same run, including this one; or 0
};

// Runs exactly once for each request, on any thread.
using Done = absl::AnyInvocable<void(Result)>;

}  // namespace rapt

#endif  // RAPT_SERVER_REQUEST_H_
