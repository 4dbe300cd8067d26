// Lines that make a call of the C interface: refused with a terminated message, or planned, and
// computed if small.
//
//     linear_attention              the operator
//     i query 1 2 9 20              input, type, shape
//     a update_rule linear          attribute, text
//     w present_state               wanted output
#include <rapt/attention.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "base/check.h"
#include "tests/fuzz/c_context.h"

namespace {

// The product of all axes, and the bytes of outputs and workspace, beyond which a call is not
// computed.
constexpr double kLargest = 1e6;
constexpr const char* kOutputs[] = {"output",
                                    "present_state",
                                    "present_normalizer",
                                    "relative_error",
                                    "Y",
                                    "buckets",
                                    "present_key",
                                    "present_value",
                                    "qk_matmul_output",
                                    "lse",
                                    "dQ",
                                    "dK",
                                    "dV",
                                    "d_attn_mask"};

std::array<char, RAPT_MESSAGE_BYTES> message;

// Returns whether the code is OK. An error has a message.
bool Accepted(rapt_code code) {
  const void* const end = std::memchr(message.data(), '\0', message.size());
  RAPT_CHECK(code == RAPT_OK || (end != nullptr && end != message.data()), "no message");
  message = {};
  return code == RAPT_OK;
}

// The tensors of a call, each in an allocation of exactly its size.
class Tensors {
 public:
  void Set(const std::string& name, int32_t dtype, const std::vector<int64_t>& shape) {
    specs_[name] = {dtype, shape};
  }

  // Whether the call takes little memory and time.
  bool IsSmall(const rapt_plan& plan) const {
    if (rapt_plan_workspace_bytes(&plan) > kLargest) return false;
    double product = 1;
    for (const auto& [name, spec] : specs_) {
      for (const int64_t axis : spec.shape) product *= static_cast<double>(axis + 1);
      if (product > kLargest) return false;
    }
    for (const auto& [name, spec] : OutputsOf(plan)) {
      double bytes = 8;
      for (const int64_t axis : spec.shape) bytes *= static_cast<double>(axis);
      if (bytes > kLargest) return false;
    }
    return true;
  }

  void Run(const rapt_plan& plan) const {
    std::map<std::string, std::vector<char>> data;
    for (const auto& [name, spec] : specs_) {
      // Lengths and positions of 0; small numbers.
      data[name] = std::vector<char>(BytesOf(spec), spec.dtype == RAPT_INT64 ? '\0' : '\x3C');
    }
    for (const auto& [name, spec] : OutputsOf(plan)) data[name].resize(BytesOf(spec));
    std::vector<rapt_tensor> tensors;
    for (auto& [name, bytes] : data) tensors.push_back({name.c_str(), bytes.data()});
    Accepted(rapt_call_run(&TheContext(), &plan, tensors.data(), tensors.size(), nullptr, 0,
                           message.data(), message.size()));
  }

 private:
  struct Spec {
    int32_t dtype;
    std::vector<int64_t> shape;
  };

  static std::map<std::string, Spec> OutputsOf(const rapt_plan& plan) {
    std::map<std::string, Spec> outputs;
    for (const char* name : kOutputs) {
      int32_t dtype = 0, rank = 0;
      int64_t shape[RAPT_MAX_RANK];
      if (Accepted(rapt_plan_output(&plan, name, &dtype, &rank, shape, message.data(),
                                    message.size()))) {
        outputs[name] = {dtype, {shape, shape + rank}};
      }
    }
    return outputs;
  }

  static size_t BytesOf(const Spec& spec) {
    constexpr size_t kSizes[] = {0, 4, 2, 2, 8, 1, 1, 1, 4, 8};  // by rapt_dtype
    size_t bytes = kSizes[spec.dtype];
    for (const int64_t axis : spec.shape) bytes *= static_cast<size_t>(axis);
    return bytes;
  }

  std::map<std::string, Spec> specs_;
};

void Apply(const std::string& line, rapt_call* call, Tensors& tensors) {
  std::istringstream words(line);
  std::string kind, name, text;
  words >> kind >> name;
  name = name.c_str();  // The library reads a name up to its first NUL.
  if (kind == "i") {
    int32_t dtype = 0;
    words >> dtype;
    std::vector<int64_t> shape;
    for (int64_t axis; words >> axis;) shape.push_back(axis);
    if (Accepted(rapt_call_set_input(call, name.c_str(), dtype, static_cast<int32_t>(shape.size()),
                                     shape.data(), message.data(), message.size()))) {
      tensors.Set(name, dtype, shape);
    }
  } else if (kind == "a") {
    words >> text;
    Accepted(rapt_call_set_text(call, name.c_str(), text.c_str(), message.data(), message.size()));
  } else {
    Accepted(rapt_call_want(call, name.c_str(), message.data(), message.size()));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::istringstream lines(std::string(reinterpret_cast<const char*>(data), size));
  std::string line;
  std::getline(lines, line);
  rapt_call* call = nullptr;
  if (!Accepted(rapt_call_create(line.c_str(), &call, message.data(), message.size()))) return 0;
  Tensors tensors;
  while (std::getline(lines, line)) Apply(line, call, tensors);
  rapt_plan* plan = nullptr;
  if (Accepted(rapt_call_plan(&TheContext(), call, &plan, message.data(), message.size())) &&
      tensors.IsSmall(*plan)) {
    tensors.Run(*plan);
  }
  rapt_plan_destroy(plan);
  rapt_call_destroy(call);
  return 0;
}
