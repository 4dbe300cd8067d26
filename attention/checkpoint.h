#ifndef RAPT_ATTENTION_CHECKPOINT_H_
#define RAPT_ATTENTION_CHECKPOINT_H_

namespace rapt {

// What a long task passes every now and then. A plain struct, without a function, so that kernels
// can share it.
struct Checkpoint {
  // Other work may be done on this thread before it returns. False: give the task up, whatever it
  // leaves behind does not matter. Null: nobody ever interrupts.
  bool (*go_on)(void* context) = nullptr;
  void* context = nullptr;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_CHECKPOINT_H_
