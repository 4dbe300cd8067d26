// Converts a problem to the parameters of the score policies.
#ifndef RAPT_ATTENTION_SCORE_SCORE_PARAMS_H_
#define RAPT_ATTENTION_SCORE_SCORE_PARAMS_H_

#include "attention/problem.h"
#include "attention/score/score.h"

namespace rapt {

Element ElementOf(DType dtype);
ScoreParams ScoreParamsOf(const Problem& problem, const Arguments& arguments);
// Returns -inf if the problem has no sinks.
double SinkOf(const Problem& problem, const Arguments& arguments, int64_t h);
ScoreRow ScoreRowOf(const Problem& problem, const Arguments& arguments, int64_t b, int64_t h,
                    int64_t i);

}  // namespace rapt

#endif  // RAPT_ATTENTION_SCORE_SCORE_PARAMS_H_
