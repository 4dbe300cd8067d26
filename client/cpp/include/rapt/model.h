// Calls of a model of the Open Inference Protocol by its name: every operator, and every layer of
// the server's repository.
#ifndef RAPT_CLIENT_RAPT_MODEL_H_
#define RAPT_CLIENT_RAPT_MODEL_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "rapt/tensor.h"

namespace rapt::client {

// rapt/attention.h of the C library lists the tensors and parameters of each operator,
// docs/layers.md those of layers.
//
//     ModelCall call{.model = "rotary_embedding",
//                    .inputs = {{"X", View<float>({1, 8, 128, 64}, x)}},
//                    .parameters = {{"rope_theta", 10000.0}}};
struct ModelCall {
  // Of integers, an int or int64_t, or for numbers from 2^63 on a uint64_t.
  using Value = std::variant<bool, int64_t, uint64_t, double, std::string>;

  std::string model = {};
  std::vector<std::pair<std::string, TensorView>> inputs = {};
  // A type is its code in ONNX's TensorProto. `priority` is as in AttendCall.
  std::map<std::string, Value> parameters = {};
  std::vector<std::string> outputs = {};  // empty: those that the server chooses
};

struct ModelResult {
  std::map<std::string, Tensor> outputs;
  std::string backend, plan;  // as in AttendResult, of streams only
};

// Calls of an operator that has a state: the server keeps it from message to message. Results equal
// those of Infer() with the state of the call before as input, bit for bit. Not thread-safe.
// REQUIRES: destroyed before its client; destruction cancels the stream unless it has finished.
class ModelStream {
 public:
  virtual ~ModelStream() = default;

  // Sends tokens and blocks until the outputs, which the call names, have arrived. Only the first
  // call has parameters and inputs that are not of tokens; they hold for the whole stream. `model`
  // is not used. An error ends the stream, whose state is lost. FailedPrecondition after that.
  virtual absl::StatusOr<ModelResult> Infer(const ModelCall& tokens) = 0;

  // Ends the stream and returns its status. REQUIRES: call it once.
  virtual absl::Status Finish() = 0;
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_MODEL_H_
