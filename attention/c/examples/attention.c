/* Attention in process, from C: three tokens attend to each other; prints the weights.
 *
 *     find_package(rapt REQUIRED COMPONENTS attention)
 *     target_link_libraries(app PRIVATE rapt::attention)
 */
#include <rapt/attention.h>
#include <stdio.h>

enum { kTokens = 3, kHeadSize = 4 };

int main(void) {
  const float x[kTokens][kHeadSize] = {{1, 0, 1, 0}, {0, 1, 0, 1}, {1, 1, 0, 0}};
  float y[kTokens][kHeadSize], weights[kTokens][kTokens];

  const rapt_context_options options = {.struct_size = sizeof(options), .threads = 1};
  const rapt_problem problem = {.struct_size = sizeof(problem),
                                .dtype = RAPT_FP32,
                                .batch = 1,
                                .query_heads = 1,
                                .kv_heads = 1,
                                .query_length = kTokens,
                                .key_length = kTokens,
                                .head_size = kHeadSize,
                                .value_head_size = kHeadSize,
                                .causal = 1,
                                .score_output = RAPT_WEIGHTS};
  const rapt_arguments arguments = {.struct_size = sizeof(arguments),
                                    .query = {.data = x},
                                    .key = {.data = x},
                                    .value = {.data = x},
                                    .output = {.data = y},
                                    .scores = {.data = weights}};

  char message[RAPT_MESSAGE_BYTES];
  rapt_context* context = NULL;
  rapt_plan* plan = NULL;
  rapt_code code = rapt_context_create(&options, &context, message, sizeof(message));
  if (code == RAPT_OK) code = rapt_plan_create(context, &problem, &plan, message, sizeof(message));
  if (code == RAPT_OK) {
    code = rapt_run(context, plan, &arguments, NULL, 0, message, sizeof(message));
  }
  if (code != RAPT_OK) {
    fprintf(stderr, "attention: %s\n", message);
  } else {
    for (int i = 0; i < kTokens; ++i) {
      printf("token %d: weights %.4f %.4f %.4f, y %.4f %.4f %.4f %.4f\n", i, weights[i][0],
             weights[i][1], weights[i][2], y[i][0], y[i][1], y[i][2], y[i][3]);
    }
  }
  rapt_plan_destroy(plan);
  rapt_context_destroy(context);
  return code == RAPT_OK ? 0 : 1;
}
