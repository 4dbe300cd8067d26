// Calls a checkpoint at intervals of work, and remembers that it abandoned the task.
#ifndef RAPT_ATTENTION_MECHANISM_LSH_PACER_H_
#define RAPT_ATTENTION_MECHANISM_LSH_PACER_H_

#include <cstdint>

#include "attention/checkpoint.h"

namespace rapt {

class Pacer {
 public:
  explicit Pacer(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}
  Pacer(const Pacer&) = delete;
  Pacer& operator=(const Pacer&) = delete;

  // Returns false to abandon the task. `work`: multiply-adds, or as much time.
  bool Pass(int64_t work) {
    if (abandoned_ || checkpoint_.go_on == nullptr) return !abandoned_;
    work_ += work;
    if (work_ < kWork) return true;
    work_ = 0;
    abandoned_ = !checkpoint_.go_on(checkpoint_.context);
    return !abandoned_;
  }

  // The same for a task of a backend, whose result does not tell.
  Checkpoint ForParts() {
    if (checkpoint_.go_on == nullptr) return {};
    return {[](void* self) { return static_cast<Pacer*>(self)->Pass(kWork); }, this};
  }

 private:
  static constexpr int64_t kWork = int64_t{1} << 17;  // tens of microseconds

  const Checkpoint checkpoint_;
  int64_t work_ = 0;
  bool abandoned_ = false;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_LSH_PACER_H_
