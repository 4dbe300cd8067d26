// Rotary position embedding inside of attention. A first stage collects the angles of the queries,
// whose rows are rotated when they are read, and rotates the new keys once or collects their
// angles.
#ifndef RAPT_ATTENTION_ROTARY_ROTATION_H_
#define RAPT_ATTENTION_ROTARY_ROTATION_H_

#include <cstddef>
#include <cstdint>

#include "attention/checkpoint.h"
#include "attention/problem.h"
#include "attention/rotary/angles.h"
#include "attention/rotary/rotary_row.h"

namespace rapt {

// What the first stage does with the new keys.
enum class KeyRotation : uint8_t {
  kStored,  // stores them rotated, for keys that are read more than once
  kOnRead,  // stores their angles, with which kernels rotate the rows that they read
};

// Of a problem with has_rotary(), in memory of the caller. Borrows the problem.
class Rotation {
 public:
  // The sizes of the memory for rotated keys and angles, and of that of a worker during a task.
  static int64_t SharedBytes(const Problem& problem, KeyRotation keys = KeyRotation::kStored);
  static int64_t WorkerBytes(const Problem& problem, KeyRotation keys = KeyRotation::kStored);
  static int64_t Tasks(const Problem& problem, KeyRotation keys = KeyRotation::kStored);
  // Of all rows, keys and queries.
  static double Flops(const Problem& problem);

  // `rotate` is for other types than FP64. REQUIRES: `shared` has SharedBytes() bytes, aligned to
  // 64.
  Rotation(const Problem& problem, std::byte* shared, RotateFunction rotate,
           KeyRotation keys = KeyRotation::kStored);

  // The same with the rotated keys in `keys`, whose rows are contiguous, for a problem without
  // queries.
  Rotation(const Problem& problem, const MutableTensorView& keys, RotateFunction rotate);

  // Tasks are independent. REQUIRES: `worker` has WorkerBytes() bytes, aligned to 8.
  void RunTask(const Arguments& arguments, int64_t task, std::byte* worker,
               const Checkpoint& checkpoint) const;

  // Returns the arguments with the keys that are stored rotated. REQUIRES: all tasks are done
  // before they are read.
  Arguments WithKeys(const Arguments& arguments) const;

  // Returns what a kernel has to rotate, by index among the T keys. REQUIRES: all tasks are done.
  RotaryKeys KeysToRotate(int64_t b) const;

  // Writes the D elements of a rotated query. REQUIRES: all tasks are done.
  void RotateQuery(const Arguments& arguments, int64_t b, int64_t h, int64_t i,
                   std::byte* out) const;

  // Return the angles that a query, or the new key j of batch row b, is rotated by, for
  // RotateBack(). REQUIRES: all tasks are done; key j is rotated, and KeyRotation is kOnRead.
  RotaryRow QueryAngles(int64_t b, int64_t i) const;
  RotaryRow KeyAngles(int64_t b, int64_t j) const;

 private:
  bool RotateKeys(const Arguments& arguments, int64_t b, int64_t begin, int64_t end, Angles& angles,
                  const Checkpoint& checkpoint) const;
  void StoreKeyAngles(const Arguments& arguments, int64_t b, int64_t begin, int64_t end,
                      Angles& angles) const;
  void Rotate(const TensorView& tensor, int64_t b, int64_t h, int64_t s, const std::byte* angles,
              std::byte* out) const;
  RotaryRow RowWith(const std::byte* angles) const;

  const Problem& problem_;
  KeyRotation key_rotation_;
  MutableTensorView keys_;  // if stored
  std::byte* key_angles_;   // otherwise
  std::byte* angles_;       // of the queries
  RotateFunction rotate_;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_ROTARY_ROTATION_H_
