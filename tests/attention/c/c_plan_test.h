// A context of the C interface, a plan and the last message.
#ifndef RAPT_TESTS_ATTENTION_C_C_PLAN_TEST_H_
#define RAPT_TESTS_ATTENTION_C_C_PLAN_TEST_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "rapt/attention.h"

namespace rapt::test {

// For the functions of one kind of plan: rapt_linear_plan_create and rapt_linear_run.
template <typename Problem, typename Arguments>
class CPlanTest : public ::testing::Test {
 protected:
  using CreateFunction = rapt_code (*)(const rapt_context*, const Problem*, rapt_plan**, char*,
                                       size_t);
  using RunFunction = rapt_code (*)(rapt_context*, const rapt_plan*, const Arguments*, void*,
                                    size_t, char*, size_t);

  CPlanTest(CreateFunction create, RunFunction run) : create_(create), run_(run) {
    const rapt_context_options options = {.struct_size = sizeof(options), .threads = 2};
    EXPECT_EQ(rapt_context_create(&options, &context_, message_, sizeof(message_)), RAPT_OK);
  }
  ~CPlanTest() override {
    rapt_plan_destroy(plan_);
    rapt_context_destroy(context_);
  }

  rapt_code Create(const Problem& problem) {
    rapt_plan_destroy(plan_);
    plan_ = nullptr;
    return create_(context_, &problem, &plan_, message_, sizeof(message_));
  }
  rapt_code Run(const Arguments& arguments) {
    return run_(context_, plan_, &arguments, nullptr, 0, message_, sizeof(message_));
  }
  std::string ErrorOf(const Problem& problem) {
    EXPECT_EQ(Create(problem), RAPT_INVALID_ARGUMENT);
    return message_;
  }

  // Replaces the plan by one of attention.
  void CreateOfAttention() {
    rapt_plan_destroy(plan_);
    const rapt_problem problem = {.struct_size = sizeof(problem),
                                  .dtype = RAPT_FP32,
                                  .batch = 1,
                                  .query_heads = 1,
                                  .kv_heads = 1,
                                  .query_length = 1,
                                  .key_length = 1,
                                  .head_size = 1,
                                  .value_head_size = 1};
    ASSERT_EQ(rapt_plan_create(context_, &problem, &plan_, message_, sizeof(message_)), RAPT_OK);
  }
  // Runs the plan as one of attention, which it is not.
  std::string ErrorOfAttention() {
    const rapt_arguments arguments = {.struct_size = sizeof(arguments)};
    EXPECT_EQ(rapt_run(context_, plan_, &arguments, nullptr, 0, message_, sizeof(message_)),
              RAPT_INVALID_ARGUMENT);
    return message_;
  }

  rapt_context* context_ = nullptr;
  rapt_plan* plan_ = nullptr;
  char message_[RAPT_MESSAGE_BYTES] = "";

 private:
  const CreateFunction create_;
  const RunFunction run_;
};

}  // namespace rapt::test

#endif  // RAPT_TESTS_ATTENTION_C_C_PLAN_TEST_H_
