// Rotary position embedding inside of attention. A first stage rotates the new keys, once, and
// collects the angles of the queries, whose rows are rotated when they are read.
#ifndef RAPT_ATTENTION_ROTARY_ROTATION_H_
#define RAPT_ATTENTION_ROTARY_ROTATION_H_

#include <cstddef>
#include <cstdint>

#include "attention/checkpoint.h"
#include "attention/problem.h"
#include "attention/rotary/angles.h"
#include "attention/rotary/rotary_row.h"

namespace rapt {

// Of a problem with has_rotary(), in memory of the caller. Borrows the problem.
class Rotation {
 public:
  // The sizes of the memory for the rotated keys and the queries' angles, and of that of a worker
  // during a task.
  static int64_t SharedBytes(const Problem& problem);
  static int64_t WorkerBytes(const Problem& problem);
  static int64_t Tasks(const Problem& problem);
  // Of all rows, keys and queries.
  static double Flops(const Problem& problem);

  // `rotate` is for other types than FP64. REQUIRES: `shared` has SharedBytes() bytes, aligned to
  // 64.
  Rotation(const Problem& problem, std::byte* shared, RotateFunction rotate);

  // The same with the rotated keys in `keys`, whose rows are contiguous, for a problem without
  // queries.
  Rotation(const Problem& problem, const MutableTensorView& keys, RotateFunction rotate);

  // Tasks are independent. REQUIRES: `worker` has WorkerBytes() bytes, aligned to 8.
  void RunTask(const Arguments& arguments, int64_t task, std::byte* worker,
               const Checkpoint& checkpoint) const;

  // Returns the arguments with the rotated keys. REQUIRES: all tasks are done before they are read.
  Arguments WithKeys(const Arguments& arguments) const;

  // Writes the D elements of a rotated query. REQUIRES: all tasks are done.
  void RotateQuery(const Arguments& arguments, int64_t b, int64_t h, int64_t i,
                   std::byte* out) const;

 private:
  bool RotateKeys(const Arguments& arguments, int64_t b, int64_t begin, int64_t end, Angles& angles,
                  const Checkpoint& checkpoint) const;
  void Rotate(const TensorView& tensor, int64_t b, int64_t h, int64_t s, const std::byte* angles,
              std::byte* out) const;
  int64_t AnglesBytes() const;

  const Problem& problem_;
  MutableTensorView keys_;
  std::byte* angles_;
  RotateFunction rotate_;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_ROTARY_ROTATION_H_
