#include "attention/field_names.h"

namespace rapt {
namespace {

FieldNames NamesIn(absl::string_view RoleInfo::*tensor,
                   absl::string_view AttributeInfo::*attribute) {
  FieldNames names;
  for (Role role : kAllInputs) names.tensors[role] = InfoOf(role).*tensor;
  for (Role role : kAllOutputs) names.tensors[role] = InfoOf(role).*tensor;
  for (const AttributeInfo& info : Attributes()) {
    names.attributes[info.attribute] = info.*attribute;
  }
  return names;
}

}  // namespace

const FieldNames kOnnxNames = NamesIn(&RoleInfo::onnx, &AttributeInfo::onnx);
const FieldNames kNativeNames = NamesIn(&RoleInfo::native, &AttributeInfo::native);
const FieldNames kCNames = NamesIn(&RoleInfo::c, &AttributeInfo::c);

}  // namespace rapt
