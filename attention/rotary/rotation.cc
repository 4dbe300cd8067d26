#include "attention/rotary/rotation.h"

#include <algorithm>
#include <cstring>

#include "attention/rotary/rotate.h"
#include "attention/score/score_params.h"
#include "base/round_up.h"

namespace rapt {
namespace {

constexpr int64_t kAlignment = 64;

// Numbers that a task writes, approximately.
constexpr int64_t kTaskNumbers = 64 * 1024;
// The most tokens of a task, whose angles are kept.
constexpr int64_t kMostTokens = 64;
// Numbers between two checkpoints.
constexpr int64_t kCheckpointNumbers = 64 * 1024;

int64_t QueryTokens(const Problem& p) { return p.empty() ? 0 : p.query_length; }
int64_t KeyTokens(const Problem& p) { return p.rotates_keys() ? p.key_length : 0; }

int64_t RealBytes(const Problem& p) { return p.dtype == DType::kFloat64 ? 8 : 4; }

// Of one token.
int64_t AnglesBytes(const Problem& p) { return p.rotary_size() * RealBytes(p); }

// Whether the angles of a key depend on the batch row.
bool KeyAnglesVary(const Problem& p) {
  return p.has_key_position_ids || (p.rotary_cache && !p.rotary_cache->by_position());
}

// The bytes of the rotated keys or of their angles.
int64_t KeyBytes(const Problem& p, KeyRotation keys) {
  if (keys == KeyRotation::kOnRead) {
    return RoundUp((KeyAnglesVary(p) ? p.batch : 1) * KeyTokens(p) * AnglesBytes(p), kAlignment);
  }
  return RoundUp(p.batch * p.kv_heads * KeyTokens(p) * p.head_size * SizeOf(p.dtype), kAlignment);
}

// The first key to rotate, by index among the problem's new keys. Those of a section may be past
// ones, which are rotated already.
int64_t FirstKeyToRotate(const Problem& p) {
  return std::clamp<int64_t>(SectionOrFull(p).past_length - KeyPosition(p, 0), 0, p.key_length);
}

// Tasks are blocks of tokens of some batch rows. Positions are mostly the same in all batch rows,
// which then share the angles.
struct Blocks {
  Blocks(const Problem& p, KeyRotation keys) : length(std::max(QueryTokens(p), KeyTokens(p))) {
    const int64_t numbers = keys == KeyRotation::kOnRead
                                ? p.rotary_size()
                                : std::max<int64_t>(p.kv_heads * p.head_size, 1);
    batch = std::clamp<int64_t>(kTaskNumbers / numbers, 1, std::max<int64_t>(p.batch, 1));
    tokens = std::clamp<int64_t>(kTaskNumbers / numbers / batch, 1, kMostTokens);
    count = CeilDiv(length, tokens) * CeilDiv(p.batch, batch);
  }

  int64_t length, batch, tokens, count;
};

int64_t PositionOf(const TensorView& ids, int64_t b, int64_t s) {
  int64_t position;
  std::memcpy(&position, ids.Row(b, s, 0), sizeof(position));
  return position;
}

int64_t QueryPositionOf(const Problem& p, const Arguments& a, int64_t b, int64_t i) {
  return p.has_position_ids ? PositionOf(a.inputs[Role::kPositionIds], b, i)
                            : QueryPosition(p, a.key_lengths, b, i);
}

int64_t KeyPositionOf(const Problem& p, const Arguments& a, int64_t b, int64_t j) {
  return p.has_key_position_ids ? PositionOf(a.inputs[Role::kKeyPositionIds], b, j)
                                : KeyPosition(p, j);
}

MutableTensorView RowMajorKeys(const Problem& p, std::byte* data) {
  MutableTensorView keys{data, p.dtype, {p.batch, p.kv_heads, p.key_length, p.head_size}};
  keys.strides = RowMajorStrides(keys.dims);
  return keys;
}

AngleSource SourceOf(const Problem& p, const Arguments& a) {
  return {.cos = a.inputs[Role::kCosCache],
          .sin = a.inputs[Role::kSinCache],
          .by_token = p.rotary_cache && !p.rotary_cache->by_position(),
          .theta = p.rope_theta,
          .scaling = p.rope_scaling,
          .pairs = p.rotary_size() / 2};
}

}  // namespace

int64_t Rotation::SharedBytes(const Problem& p, KeyRotation keys) {
  const int64_t angles = p.batch * QueryTokens(p) * AnglesBytes(p);
  return KeyBytes(p, keys) + RoundUp(angles, kAlignment);
}

int64_t Rotation::WorkerBytes(const Problem& p, KeyRotation keys) {
  return RoundUp(Angles::Bytes(p.rotary_size() / 2, p.dtype, Blocks(p, keys).tokens), kAlignment);
}

int64_t Rotation::Tasks(const Problem& p, KeyRotation keys) { return Blocks(p, keys).count; }

double Rotation::Flops(const Problem& p) {
  constexpr double kPerNumber = 3;  // 6 for a pair
  const int64_t rows = p.query_heads * QueryTokens(p) + p.kv_heads * KeyTokens(p);
  return kPerNumber * static_cast<double>(p.batch) * static_cast<double>(rows) *
         static_cast<double>(p.rotary_size());
}

Rotation::Rotation(const Problem& problem, std::byte* shared, RotateFunction rotate,
                   KeyRotation keys)
    : problem_(problem),
      key_rotation_(keys),
      keys_(RowMajorKeys(problem, shared)),
      key_angles_(shared),
      angles_(shared + KeyBytes(problem, keys)),
      rotate_(problem.dtype == DType::kFloat64 ? RotateRow : rotate) {}

Rotation::Rotation(const Problem& problem, const MutableTensorView& keys, RotateFunction rotate)
    : problem_(problem),
      key_rotation_(KeyRotation::kStored),
      keys_(keys),
      key_angles_(nullptr),
      angles_(nullptr),
      rotate_(problem.dtype == DType::kFloat64 ? RotateRow : rotate) {}

void Rotation::RunTask(const Arguments& a, int64_t task, std::byte* worker,
                       const Checkpoint& checkpoint) const {
  const Problem& p = problem_;
  const Blocks blocks(p, key_rotation_);
  const int64_t batch_blocks = CeilDiv(p.batch, blocks.batch);
  const int64_t first_b = task % batch_blocks * blocks.batch;
  const int64_t end_b = std::min(first_b + blocks.batch, p.batch);
  const int64_t first_s = task / batch_blocks * blocks.tokens;
  const int64_t end_s = std::min(first_s + blocks.tokens, blocks.length);
  Angles angles(SourceOf(p, a), p.dtype, blocks.tokens, worker);
  for (int64_t b = first_b; b < end_b; ++b) {
    for (int64_t s = first_s; s < std::min(end_s, QueryTokens(p)); ++s) {
      angles.Set(s - first_s, b, s, QueryPositionOf(p, a, b, s));
      std::memcpy(angles_ + (b * p.query_length + s) * AnglesBytes(p), angles.of(s - first_s),
                  static_cast<size_t>(AnglesBytes(p)));
    }
  }
  const int64_t end_key = std::min(end_s, KeyTokens(p));
  for (int64_t b = first_b; b < end_b; ++b) {
    if (key_rotation_ == KeyRotation::kOnRead) {
      if (b == 0 || KeyAnglesVary(p)) StoreKeyAngles(a, b, first_s, end_key, angles);
    } else if (!RotateKeys(a, b, first_s, end_key, angles, checkpoint)) {
      return;
    }
  }
}

void Rotation::StoreKeyAngles(const Arguments& a, int64_t b, int64_t begin, int64_t end,
                              Angles& angles) const {
  const Problem& p = problem_;
  for (int64_t s = begin; s < end; ++s) {
    angles.Set(s - begin, b, s, KeyPositionOf(p, a, b, s));
    std::memcpy(key_angles_ + (b * p.key_length + s) * AnglesBytes(p), angles.of(s - begin),
                static_cast<size_t>(AnglesBytes(p)));
  }
}

// Returns false if the checkpoint abandoned the task.
bool Rotation::RotateKeys(const Arguments& a, int64_t b, int64_t begin, int64_t end, Angles& angles,
                          const Checkpoint& checkpoint) const {
  const Problem& p = problem_;
  const TensorView& keys = a.inputs[Role::kK];
  const int64_t first = FirstKeyToRotate(p);
  for (int64_t s = begin; s < end; ++s) angles.Set(s - begin, b, s, KeyPositionOf(p, a, b, s));
  int64_t numbers = 0;
  for (int64_t h = 0; h < p.kv_heads; ++h) {
    for (int64_t s = begin; s < end; ++s) {
      std::byte* const out = keys_.Row(b, h, s);
      if (s < first) {
        keys.CopyRow(b, h, s, out);
      } else {
        Rotate(keys, b, h, s, angles.of(s - begin), out);
      }
    }
    numbers += (end - begin) * p.head_size;
    if (numbers < kCheckpointNumbers || checkpoint.go_on == nullptr) continue;
    numbers = 0;
    if (!checkpoint.go_on(checkpoint.context)) return false;
  }
  return true;
}

Arguments Rotation::WithKeys(const Arguments& arguments) const {
  Arguments rotated = arguments;
  if (!problem_.rotates_keys() || key_rotation_ == KeyRotation::kOnRead) return rotated;
  rotated.inputs[Role::kK] = {keys_.data, keys_.dtype, keys_.dims, keys_.strides};
  return rotated;
}

RotaryKeys Rotation::KeysToRotate(int64_t b) const {
  const Problem& p = problem_;
  if (!p.rotates_keys() || key_rotation_ == KeyRotation::kStored) return {};
  const int64_t first = FirstKeyToRotate(p);
  return {.rotate = rotate_,
          .begin = p.past_length + first,
          .row = KeyAngles(b, first),
          .angles_step = AnglesBytes(p)};
}

RotaryRow Rotation::QueryAngles(int64_t b, int64_t i) const {
  return RowWith(angles_ + (b * problem_.query_length + i) * AnglesBytes(problem_));
}

RotaryRow Rotation::KeyAngles(int64_t b, int64_t j) const {
  const int64_t row = (KeyAnglesVary(problem_) ? b * problem_.key_length : 0) + j;
  return RowWith(key_angles_ + row * AnglesBytes(problem_));
}

void Rotation::RotateQuery(const Arguments& a, int64_t b, int64_t h, int64_t i,
                           std::byte* out) const {
  Rotate(a.inputs[Role::kQ], b, h, i,
         angles_ + (b * problem_.query_length + i) * AnglesBytes(problem_), out);
}

void Rotation::Rotate(const TensorView& tensor, int64_t b, int64_t h, int64_t s,
                      const std::byte* angles, std::byte* out) const {
  const std::byte* row = tensor.FindRow(b, h, s);
  if (row == nullptr) {
    tensor.CopyRow(b, h, s, out);
    row = out;
  }
  RotaryRow rotated = RowWith(angles);
  rotated.from = row;
  rotated.to = out;
  rotate_(rotated);
}

RotaryRow Rotation::RowWith(const std::byte* angles) const {
  return {.from = nullptr,
          .to = nullptr,
          .cos = angles,
          .sin = angles + AnglesBytes(problem_) / 2,
          .pairs = problem_.rotary_size() / 2,
          .size = problem_.head_size,
          .interleaved = problem_.interleaved,
          .element = ElementOf(problem_.dtype)};
}

}  // namespace rapt
