// Calls of all operators, for the tests of every interface: a case for every tensor, attribute and
// choice of the operators' tables, and values that are refused. A new row of a table needs a case
// here; operator_cases_test says which one is missing.
#ifndef RAPT_TESTS_SUPPORT_OPERATOR_CASES_H_
#define RAPT_TESTS_SUPPORT_OPERATOR_CASES_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/operator_schema.h"

namespace rapt::test {

struct CaseInput {
  std::string name;
  Shape shape;
  double low = -1, high = 1;           // of random numbers
  std::vector<int64_t> integers = {};  // instead of them, INT64 unless `dtype` is another
  DType dtype = DType::kFloat32;

  DType type() const {
    return integers.empty() || dtype != DType::kFloat32 ? dtype : DType::kInt64;
  }
};

struct OperatorCase {
  std::string op;
  std::vector<CaseInput> inputs;
  std::vector<std::pair<std::string, std::string>> attributes;
  std::vector<std::string> wants = {};  // outputs that are asked for

  const OperatorSchema& schema() const { return *FindOperator(op); }
  // Those that a caller who names all outputs asks for.
  std::vector<std::string> outputs() const;
};

// "linear_attention query key value scale=0.3"
std::string ToText(const OperatorCase& c);

const std::vector<OperatorCase>& OperatorCases();

// A call that is valid but for `name`, an attribute or an input.
struct Refusal {
  OperatorCase call;
  std::string name;
  std::string message;  // a part of the error in the names of the table
};
// Each number out of its range.
const std::vector<Refusal>& NumberRefusals();
// A value of another kind for each other attribute: the number 2, a type of integers, no choice.
std::vector<Refusal> ValueRefusals();
// Each input with an axis too many; of lengths, one too many.
std::vector<Refusal> ShapeRefusals();
// Without a required input.
std::vector<Refusal> MissingRefusals();

// Returns null if the table has none of this name.
template <typename Row>
const Row* FindRow(absl::Span<const Row> rows, absl::string_view name) {
  for (const Row& row : rows) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

struct CaseTensor {
  DType dtype;
  Shape shape;
  std::string bytes;  // row-major

  bool operator==(const CaseTensor&) const = default;
};
using CaseTensors = std::map<std::string, CaseTensor>;

CaseTensors InputsOf(const OperatorCase& c);

// The checked call.
absl::StatusOr<BoundCall> Bind(const OperatorCase& c);

// The outputs by the operator in C++.
absl::StatusOr<CaseTensors> Compute(const OperatorCase& c, const CaseTensors& inputs);

// An interface that carries calls.
class CaseInterface {
 public:
  virtual ~CaseInterface() = default;

  // Whether the interface has the operator.
  virtual bool Carries(const OperatorCase& /*c*/) { return true; }
  // REQUIRES: Carries(c). Errors have the text of the interface.
  virtual absl::StatusOr<CaseTensors> Call(const OperatorCase& c, const CaseTensors& inputs) = 0;

  // The name of a tensor or attribute in errors. Empty: the table's, and the words as well.
  virtual std::string NameOf(const OperatorCase& /*c*/, const std::string& /*name*/) { return ""; }
  // Whether the interface can express values that an attribute does not take.
  virtual bool CanExpress(const OperatorCase& /*c*/, const AttributeSchema& /*attribute*/) {
    return true;
  }
};

// Calls return the bits of the operator in C++.
void ExpectReturnsTheBitsOfTheOperator(CaseInterface& interface);
// Errors name what is refused.
void ExpectNamesWhatIsRefused(CaseInterface& interface);

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_OPERATOR_CASES_H_
