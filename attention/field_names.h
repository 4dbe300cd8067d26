// The names of tensors and attributes in each interface, so that errors and reports use the
// caller's terms.
#ifndef RAPT_ATTENTION_FIELD_NAMES_H_
#define RAPT_ATTENTION_FIELD_NAMES_H_

#include "absl/strings/string_view.h"
#include "attention/attributes.h"
#include "attention/roles.h"

namespace rapt {

struct FieldNames {
  RoleMap<absl::string_view> tensors;
  AttributeMap<absl::string_view> attributes;

  absl::string_view operator[](Role role) const { return tensors[role]; }
  absl::string_view operator[](Attribute attribute) const { return attributes[attribute]; }
};

// Each is one column of the tables.
extern const FieldNames kOnnxNames;    // the ONNX operator and the Open Inference Protocol
extern const FieldNames kNativeNames;  // rapt.v1.AttendRequest
extern const FieldNames kCNames;       // rapt_problem and rapt_arguments

}  // namespace rapt

#endif  // RAPT_ATTENTION_FIELD_NAMES_H_
