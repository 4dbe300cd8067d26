// Counts work and calls a checkpoint at intervals of it. Kernels of every instruction set include
// this header, so no function of it may be emitted (docs/decisions/0001).
#ifndef RAPT_ATTENTION_WORK_METER_H_
#define RAPT_ATTENTION_WORK_METER_H_

#include <cstdint>

#include "attention/checkpoint.h"

namespace rapt {

class WorkMeter {
 public:
  // `interval`: work of tens of microseconds, in any unit.
  inline __attribute__((always_inline)) WorkMeter(const Checkpoint& checkpoint, int64_t interval)
      : checkpoint_(checkpoint), interval_(interval) {}
  WorkMeter(const WorkMeter&) = delete;
  WorkMeter& operator=(const WorkMeter&) = delete;

  // Returns false to abandon the task, from then on.
  inline __attribute__((always_inline)) bool Pass(int64_t work) {
    if (abandoned_ || checkpoint_.go_on == nullptr) return !abandoned_;
    work_ += work;
    if (work_ < interval_) return true;
    work_ = 0;
    abandoned_ = !checkpoint_.go_on(checkpoint_.context);
    return !abandoned_;
  }

  // The checkpoint of a part of the task whose result does not tell whether it was abandoned.
  inline __attribute__((always_inline)) Checkpoint ForParts() {
    if (checkpoint_.go_on == nullptr) return {};
    return {[](void* self) {
              auto& meter = *static_cast<WorkMeter*>(self);
              return meter.Pass(meter.interval_);
            },
            this};
  }

 private:
  const Checkpoint checkpoint_;
  const int64_t interval_;
  int64_t work_ = 0;
  bool abandoned_ = false;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_WORK_METER_H_
