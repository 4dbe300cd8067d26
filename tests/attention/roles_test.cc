#include "attention/roles.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "attention/attributes.h"
#include "attention/field_names.h"
#include "attention/problem.h"
#include "tests/support/table_values.h"

namespace rapt {

// Failures name roles.
void PrintTo(Role role, std::ostream* out) { *out << InfoOf(role).onnx; }

namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using ::testing::MatchesRegex;
using ::testing::Ne;

std::vector<Role> AllRoles() {
  std::vector<Role> roles(kAllInputs.begin(), kAllInputs.end());
  for (Role role : kAllOutputs) roles.push_back(role);
  return roles;
}

TEST(RolesTest, EveryRowIsFoundByItsRole) {
  for (Role role : AllRoles()) EXPECT_EQ(InfoOf(role).role, role);
}

TEST(RolesTest, NamesAreDistinctInEveryInterface) {
  for (const FieldNames* names : {&kOnnxNames, &kNativeNames, &kCNames}) {
    // A tensor and an attribute may have the same name: alpha. Y and lse are outputs, and inputs of
    // the backward pass.
    std::set<absl::string_view> inputs, outputs, attributes;
    for (Role role : kAllInputs) inputs.insert((*names)[role]);
    for (Role role : kAllOutputs) outputs.insert((*names)[role]);
    for (const AttributeInfo& info : Attributes()) attributes.insert((*names)[info.attribute]);
    EXPECT_EQ(inputs.size(), kAllInputs.size());
    EXPECT_EQ(outputs.size(), kAllOutputs.size());
    EXPECT_EQ(attributes.size(), kAttributes);
    EXPECT_EQ(inputs.count("") + outputs.count("") + attributes.count(""), 0u);
  }
}

std::vector<Role> InOrder(const RoleSet& set) {
  std::vector<Role> roles;
  for (Role role : set) roles.push_back(role);
  return roles;
}

TEST(RolesTest, AProblemWantsWhatItStates) {
  const Problem p;
  EXPECT_THAT(InOrder(InputTensorsOf(p)), ElementsAre(Role::kQ, Role::kK, Role::kV));
  EXPECT_THAT(InOrder(OutputsOf(p)), ElementsAre(Role::kY));
  for (Role role : AllRoles()) {
    EXPECT_EQ(InfoOf(role).wanted(p), InfoOf(role).required) << InfoOf(role).onnx;
  }
  std::set<Role> inputs, outputs;
  for (Role table : test::kRelativeTables) {
    const Problem full = test::EveryTensorWith(table);
    const std::vector<Role> wanted = InOrder(InputTensorsOf(full));
    EXPECT_TRUE(std::is_sorted(wanted.begin(), wanted.end()));
    inputs.insert(wanted.begin(), wanted.end());
    for (Role role : InOrder(OutputsOf(full))) outputs.insert(role);
  }
  EXPECT_THAT(inputs, ElementsAreArray(kInputTensors));
  EXPECT_THAT(outputs, ElementsAreArray(kOutputs));
}

TEST(RolesTest, ASetContainsWhatWasAdded) {
  RoleSet roles;
  EXPECT_THAT(InOrder(roles), IsEmpty());
  roles.Add(Role::kLse);
  roles.Add(Role::kQ);
  roles.Add(Role::kMask, false);
  EXPECT_THAT(InOrder(roles), ElementsAre(Role::kQ, Role::kLse));
  EXPECT_TRUE(roles.contains(Role::kLse));
  EXPECT_FALSE(roles.contains(Role::kMask));
}

TEST(RolesTest, AxesAndTypesFollowTheProblem) {
  const Problem p{.dtype = DType::kFloat64,
                  .batch = 2,
                  .query_heads = 8,
                  .kv_heads = 4,
                  .query_length = 5,
                  .key_length = 7,
                  .past_length = 3,
                  .head_size = 16,
                  .value_head_size = 6,
                  .mask = MaskShape{DType::kFloat16, {1, 8, 1, 9}}};
  EXPECT_THAT(InfoOf(Role::kQ).dims(p), ElementsAre(2, 8, 5, 16));
  EXPECT_THAT(InfoOf(Role::kV).dims(p), ElementsAre(2, 4, 7, 6));
  EXPECT_THAT(InfoOf(Role::kMask).dims(p), ElementsAre(1, 8, 1, 9));
  EXPECT_THAT(InfoOf(Role::kPastKey).dims(p), ElementsAre(2, 4, 3, 16));
  EXPECT_THAT(InfoOf(Role::kPresentValue).dims(p), ElementsAre(2, 4, 10, 6));
  EXPECT_THAT(InfoOf(Role::kScores).dims(p), ElementsAre(2, 8, 5, 10));
  EXPECT_EQ(InfoOf(Role::kMask).dtype(p), DType::kFloat16);
  EXPECT_EQ(InfoOf(Role::kLse).dtype(p), DType::kFloat64);
  EXPECT_EQ(InfoOf(Role::kKeyLengths).dtype(p), DType::kInt64);
}

TEST(RolesTest, InputsComeBeforeOutputsWithoutGaps) {
  const std::vector<Role> roles = AllRoles();
  ASSERT_EQ(roles.size(), static_cast<size_t>(Role::kEnd));
  for (size_t n = 0; n < roles.size(); ++n) EXPECT_EQ(roles[n], static_cast<Role>(n));
  EXPECT_EQ(kOutputs.front(), Role::kY);
  EXPECT_EQ(kInputTensors.size(), kInputs.size() - 1);
  EXPECT_THAT(kInputTensors, Each(Ne(Role::kKeyLengths)));
  EXPECT_THAT(kInputs, IsSupersetOf(kInputTensors));
}

TEST(RolesTest, GradientsHaveTheAxesOfInputs) {
  for (Role role : kGradients) {
    const RoleInfo& info = InfoOf(role);
    ASSERT_NE(info.gradient_of, Role::kEnd) << info.onnx;
    const RoleInfo& input = InfoOf(info.gradient_of);
    EXPECT_EQ(info.dims, input.dims) << info.onnx;
    EXPECT_EQ(info.dtype, input.dtype) << info.onnx;
    EXPECT_EQ(info.rank, input.rank) << info.onnx;
    EXPECT_THAT(std::string(info.onnx), MatchesRegex("d_?" + std::string(input.onnx)));
  }
}

TEST(RolesTest, EveryInputHasHelp) {
  for (Role role : kAllInputs) EXPECT_NE(InfoOf(role).help, nullptr) << InfoOf(role).onnx;
  for (const AttributeInfo& info : Attributes()) {
    EXPECT_TRUE(info.help != nullptr || info.flag == nullptr) << info.c;
  }
}

TEST(RolesTest, MapsKeepAValueForEachRole) {
  OutputMap<int> map;
  for (Role role : kOutputs) EXPECT_EQ(map[role], 0);
  for (Role role : kOutputs) map[role] = static_cast<int>(role);
  for (Role role : kOutputs) EXPECT_EQ(map[role], static_cast<int>(role));
}

}  // namespace
}  // namespace rapt
