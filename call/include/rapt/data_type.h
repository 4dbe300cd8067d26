// The element types of tensors: one row a type, whose name and size hold in every interface.
#ifndef RAPT_CALL_RAPT_DATA_TYPE_H_
#define RAPT_CALL_RAPT_DATA_TYPE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"

namespace rapt {

// In the order of rapt.v1.DataType, where they begin at 1. Q, K, V, past and outputs have a float
// type. Masks may have any type: kBool, or integers 0 and 1, select the keys to attend to; floats
// are added to the scores.
enum class DType : uint8_t {
  kFloat32,
  kFloat16,   // IEEE 754 binary16
  kBFloat16,  // the upper half of a float
  kFloat64,
  kBool,  // one byte, 0 is false
  kInt8,  // in attention also a byte of resident keys and values in 8 bits
  kUint8,
  kInt32,
  kInt64,
};

struct DTypeInfo {
  DType dtype;
  absl::string_view name;  // of the Open Inference Protocol and rapt.v1
  int64_t bytes;           // of one element
  int onnx;                // of ONNX's TensorProto, also in parameters
  bool is_float = false;
};

inline constexpr std::array kDTypes = {
    DTypeInfo{DType::kFloat32, "FP32", 4, 1, true},
    DTypeInfo{DType::kFloat16, "FP16", 2, 10, true},
    DTypeInfo{DType::kBFloat16, "BF16", 2, 16, true},
    DTypeInfo{DType::kFloat64, "FP64", 8, 11, true},
    DTypeInfo{DType::kBool, "BOOL", 1, 9},
    DTypeInfo{DType::kInt8, "INT8", 1, 3},
    DTypeInfo{DType::kUint8, "UINT8", 1, 2},
    DTypeInfo{DType::kInt32, "INT32", 4, 6},
    DTypeInfo{DType::kInt64, "INT64", 8, 7},
};

constexpr const DTypeInfo& InfoOf(DType dtype) { return kDTypes[static_cast<size_t>(dtype)]; }
constexpr int64_t SizeOf(DType dtype) { return InfoOf(dtype).bytes; }
constexpr absl::string_view NameOf(DType dtype) { return InfoOf(dtype).name; }
constexpr bool IsFloat(DType dtype) { return InfoOf(dtype).is_float; }
// Returns whether it is an integer type; kBool is none.
constexpr bool IsInteger(DType dtype) { return !IsFloat(dtype) && dtype != DType::kBool; }

// Returns nullopt if no type has this name.
constexpr std::optional<DType> DTypeNamed(absl::string_view name) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.name == name) return info.dtype;
  }
  return std::nullopt;
}

}  // namespace rapt

#endif  // RAPT_CALL_RAPT_DATA_TYPE_H_
