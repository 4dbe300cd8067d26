/* The C interface from C11: the header compiles, the struct layouts are those of the first version,
 * and a worked example gives the expected result. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "rapt/attention.h"

/* Existing fields keep their offsets; new fields are added at the end. */
_Static_assert(offsetof(rapt_context_options, isa) == 24, "rapt_context_options has changed");
_Static_assert(offsetof(rapt_problem, value_head_size) == 72, "rapt_problem has changed");
_Static_assert(offsetof(rapt_problem, softcap) == 96, "rapt_problem has changed");
_Static_assert(offsetof(rapt_problem, mask_shape) == 136, "rapt_problem has changed");
_Static_assert(offsetof(rapt_problem, wants_present) == 196, "rapt_problem has changed");
_Static_assert(offsetof(rapt_problem, gradients) == 536, "rapt_problem has changed");
_Static_assert(sizeof(rapt_input) == 40, "rapt_input has changed");
_Static_assert(sizeof(rapt_output) == 40, "rapt_output has changed");
_Static_assert(offsetof(rapt_arguments, key_lengths) == 248, "rapt_arguments has changed");
_Static_assert(offsetof(rapt_arguments, present_value) == 416, "rapt_arguments has changed");
_Static_assert(offsetof(rapt_arguments, output_gradient) == 1136, "rapt_arguments has changed");

static int failures = 0;

static void expect(int condition, const char* what, const char* message) {
  if (condition) return;
  fprintf(stderr, "failed: %s (%s)\n", what, message);
  ++failures;
}

static void expect_close(const float* got, const float* want, int size, const char* what) {
  for (int n = 0; n < size; ++n) {
    if (fabsf(got[n] - want[n]) <= 1e-4f) continue;
    fprintf(stderr, "failed: %s[%d] is %f, expected %f\n", what, n, got[n], want[n]);
    ++failures;
  }
}

/* Q = K = V = X, one head. */
static void run_example(rapt_context* context) {
  const float x[] = {1, 0, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0};
  const float want_weights[] = {.5065f, .1863f, .3072f, .1863f, .5065f,
                                .3072f, .2741f, .2741f, .4518f};
  const float want_output[] = {.8137f, .4935f, .5065f, .1863f, .4935f, .8137f,
                               .1863f, .5065f, .7259f, .7259f, .2741f, .2741f};
  float output[12], weights[9], lse[3];
  char message[RAPT_MESSAGE_BYTES] = "";

  rapt_problem problem = {.struct_size = sizeof(problem),
                          .dtype = RAPT_FP32,
                          .batch = 1,
                          .query_heads = 1,
                          .kv_heads = 1,
                          .query_length = 3,
                          .key_length = 3,
                          .head_size = 4,
                          .value_head_size = 4,
                          .score_output = RAPT_WEIGHTS,
                          .wants_lse = 1};
  rapt_plan* plan = NULL;
  rapt_code code = rapt_plan_create(context, &problem, &plan, message, sizeof(message));
  expect(code == RAPT_OK, "rapt_plan_create", message);
  if (code != RAPT_OK) return;

  rapt_arguments arguments = {.struct_size = sizeof(arguments),
                              .query = {.data = x},
                              .key = {.data = x},
                              .value = {.data = x},
                              .output = {.data = output},
                              .lse = {.data = lse},
                              .scores = {.data = weights}};
  code = rapt_run(context, plan, &arguments, NULL, 0, message, sizeof(message));
  expect(code == RAPT_OK, "rapt_run", message);
  expect_close(output, want_output, 12, "output");
  expect_close(weights, want_weights, 9, "weights");
  printf("%s, %zu bytes of workspace\n", rapt_plan_description(plan),
         rapt_plan_workspace_bytes(plan));
  rapt_plan_destroy(plan);
}

/* A query of 0 sees two keys equally: P = 1/2, dO V^T = (1, 0), delta = 1/2, dS = (1/4, -1/4). */
static void run_backward(rapt_context* context) {
  const float q[] = {0, 0}, k[] = {1, 2, 3, 4}, v[] = {1, 0, 0, 1}, d_output[] = {1, 0};
  const float want_d_query[] = {-.5f, -.5f}, want_d_key[] = {0, 0, 0, 0};
  const float want_d_value[] = {.5f, 0, .5f, 0};
  float d_query[2], d_key[4], d_value[4];
  char message[RAPT_MESSAGE_BYTES] = "";

  rapt_problem problem = {.struct_size = sizeof(problem),
                          .dtype = RAPT_FP32,
                          .batch = 1,
                          .query_heads = 1,
                          .kv_heads = 1,
                          .query_length = 1,
                          .key_length = 2,
                          .head_size = 2,
                          .value_head_size = 2,
                          .scale = 1,
                          .has_scale = 1,
                          .gradients = RAPT_D_QUERY | RAPT_D_KEY | RAPT_D_VALUE};
  rapt_plan* plan = NULL;
  rapt_code code = rapt_plan_create(context, &problem, &plan, message, sizeof(message));
  expect(code == RAPT_OK, "rapt_plan_create of gradients", message);
  if (code != RAPT_OK) return;
  rapt_arguments arguments = {.struct_size = sizeof(arguments),
                              .query = {.data = q},
                              .key = {.data = k},
                              .value = {.data = v},
                              .output_gradient = {.data = d_output},
                              .d_query = {.data = d_query},
                              .d_key = {.data = d_key},
                              .d_value = {.data = d_value}};
  code = rapt_run(context, plan, &arguments, NULL, 0, message, sizeof(message));
  expect(code == RAPT_OK, "rapt_run of gradients", message);
  expect_close(d_query, want_d_query, 2, "d_query");
  expect_close(d_key, want_d_key, 4, "d_key");
  expect_close(d_value, want_d_value, 4, "d_value");
  rapt_plan_destroy(plan);
}

/* An operator by its name, in C. */
static void run_call(rapt_context* context) {
  char message[RAPT_MESSAGE_BYTES] = "";
  float x[2] = {1, 2}, table[2] = {10, 20}, y[2] = {0, 0};
  const float want[2] = {11, 22};
  const int64_t shape[2] = {1, 2};
  const rapt_tensor tensors[] = {{"X", x}, {"table", table}, {"Y", y}};
  rapt_call* call = NULL;
  rapt_plan* plan = NULL;
  rapt_code code = rapt_call_create("positional_encoding", &call, message, sizeof(message));
  expect(code == RAPT_OK, "rapt_call_create", message);
  if (code != RAPT_OK) return;
  rapt_call_set_input(call, "X", RAPT_FP32, 2, shape, message, sizeof(message));
  rapt_call_set_input(call, "table", RAPT_FP32, 2, shape, message, sizeof(message));
  code = rapt_call_plan(context, call, &plan, message, sizeof(message));
  expect(code == RAPT_OK, "rapt_call_plan", message);
  rapt_call_destroy(call);
  if (code != RAPT_OK) return;
  code = rapt_call_run(context, plan, tensors, 3, NULL, 0, message, sizeof(message));
  expect(code == RAPT_OK, "rapt_call_run", message);
  expect_close(y, want, 2, "Y");
  rapt_plan_destroy(plan);
}

_Static_assert(sizeof(rapt_tensor) == 2 * sizeof(void*), "rapt_tensor keeps its size");

int main(void) {
  char message[RAPT_MESSAGE_BYTES] = "";
  rapt_context_options options = {.struct_size = sizeof(options), .threads = 2};
  rapt_context* context = NULL;
  expect(rapt_context_create(&options, &context, message, sizeof(message)) == RAPT_OK,
         "rapt_context_create", message);
  if (context != NULL) run_example(context);
  if (context != NULL) run_backward(context);
  if (context != NULL) run_call(context);
  rapt_context_destroy(context);
  expect(strcmp(rapt_version(), RAPT_TEST_VERSION) == 0, "rapt_version", rapt_version());
  return failures == 0 ? 0 : 1;
}
