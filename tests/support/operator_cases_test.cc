// The table of cases is complete: what an interface drops or changes is noticed.
#include "tests/support/operator_cases.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <variant>

#include "absl/strings/str_cat.h"

namespace rapt::test {
namespace {

// The call without an input or attribute.
OperatorCase Without(OperatorCase c, absl::string_view name) {
  std::erase_if(c.inputs, [&](const CaseInput& input) { return input.name == name; });
  std::erase_if(c.attributes, [&](const auto& attribute) { return attribute.first == name; });
  return c;
}

// Whether a case fails or gives something else without the input or attribute.
bool IsNoticed(absl::string_view op, absl::string_view name) {
  return std::any_of(OperatorCases().begin(), OperatorCases().end(), [&](const OperatorCase& c) {
    const OperatorCase without = Without(c, name);
    if (c.op != op || ToText(without) == ToText(c)) return false;
    const CaseTensors inputs = InputsOf(c);
    const absl::StatusOr<CaseTensors> outputs = Compute(without, inputs);
    return !outputs.ok() || *outputs != Compute(c, inputs).value();
  });
}

template <typename Predicate>
bool AnyOf(const OperatorSchema& schema, Predicate predicate) {
  return std::any_of(OperatorCases().begin(), OperatorCases().end(),
                     [&](const OperatorCase& c) { return c.op == schema.name && predicate(c); });
}

TEST(OperatorCasesTest, HaveEveryRowOfEveryTable) {
  for (const OperatorSchema* schema : OperatorSchemas()) {
    SCOPED_TRACE(schema->name);
    for (const TensorSchema& input : schema->inputs) {
      EXPECT_TRUE(IsNoticed(schema->name, input.name)) << input.name;
    }
    for (const AttributeSchema& attribute : schema->attributes) {
      EXPECT_TRUE(IsNoticed(schema->name, attribute.name)) << attribute.name;
    }
    for (const TensorSchema& output : schema->outputs) {
      EXPECT_TRUE(AnyOf(*schema, [&](const OperatorCase& c) {
        return Compute(c, InputsOf(c)).value().contains(std::string(output.name));
      })) << output.name;
    }
  }
}

TEST(OperatorCasesTest, HaveEveryChoiceAndFloatType) {
  for (const OperatorSchema* schema : OperatorSchemas()) {
    SCOPED_TRACE(schema->name);
    for (const AttributeSchema& attribute : schema->attributes) {
      for (const absl::string_view choice : attribute.choices) {
        EXPECT_TRUE(AnyOf(*schema,
                          [&](const OperatorCase& c) {
                            return std::count(c.attributes.begin(), c.attributes.end(),
                                              std::pair(std::string(attribute.name),
                                                        std::string(choice))) > 0;
                          }))
            << attribute.name << " " << choice;
      }
    }
    for (DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
      EXPECT_TRUE(AnyOf(*schema, [&](const OperatorCase& c) { return c.inputs[0].dtype == type; }))
          << NameOf(type);
    }
  }
}

TEST(OperatorCasesTest, HaveANumberOutOfEveryRange) {
  for (const OperatorSchema* schema : OperatorSchemas()) {
    for (const AttributeSchema& attribute : schema->attributes) {
      const bool is_number = std::holds_alternative<int64_t>(attribute.kind) ||
                             std::holds_alternative<double>(attribute.kind);
      if (!is_number) continue;
      EXPECT_TRUE(std::any_of(NumberRefusals().begin(), NumberRefusals().end(),
                              [&](const Refusal& refusal) {
                                return refusal.call.op == schema->name &&
                                       refusal.name == attribute.name;
                              }))
          << schema->name << " " << attribute.name;
    }
  }
}

// The operators in C++, by their tables.
class Direct final : public CaseInterface {
  absl::StatusOr<CaseTensors> Call(const OperatorCase& c, const CaseTensors& inputs) override {
    return Compute(c, inputs);
  }
};

TEST(OperatorCasesTest, NameWhatIsRefused) {
  Direct direct;
  ExpectNamesWhatIsRefused(direct);
}

}  // namespace
}  // namespace rapt::test
