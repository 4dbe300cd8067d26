#ifndef RAPT_ATTENTION_CHECKPOINT_H_
#define RAPT_ATTENTION_CHECKPOINT_H_

namespace rapt {

// A callback that a long task invokes periodically. A plain struct without functions, so that
// kernels can share it.
struct Checkpoint {
  // May run other work on this thread before it returns. Returns false to abandon the task, whose
  // partial output is then discarded. Null: the task is never interrupted.
  bool (*go_on)(void* context) = nullptr;
  void* context = nullptr;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_CHECKPOINT_H_
