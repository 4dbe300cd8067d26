#include "attention/mechanism/lsh/lsh_attention.h"

#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <string>

#include "attention/mechanism/lsh/definition.h"
#include "attention/mechanism/lsh/rounds.h"
#include "base/checked_math.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

// Positions and buckets are INT32.
constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostBuckets = std::numeric_limits<int32_t>::max() - 1;
// DrawNormals() draws no more.
constexpr int64_t kMostDraws = int64_t{1} << 34;

class LshAttention final : public TensorOperator {
 public:
  explicit LshAttention(const LshShape& shape) : s_(shape) {
    outputs_[Role::kY] = TensorSpec{s_.dtype, {s_.batch, s_.heads, s_.length, s_.value_head_size}};
    if (!s_.wants_buckets) return;
    outputs_[kLshBuckets] =
        TensorSpec{DType::kInt32, {s_.batch, s_.heads, s_.num_hashes, s_.length}};
  }

  const OutputMap<std::optional<TensorSpec>>& outputs() const override { return outputs_; }

  bool checks_data() const override { return s_.has_lengths; }
  absl::Status CheckData(const Arguments& a) const override {
    if (!s_.has_lengths) return absl::OkStatus();
    return CheckLengths("nonpad_kv_seqlen", a.key_lengths, s_.batch, "length", s_.length);
  }

  void PlanTasks(Plan& plan) const override {
    if (s_.empty()) return;
    plan.flops = Flops();
    IsDefinition(plan) ? PlanDefinition(s_, plan) : PlanRounds(s_, plan);
  }

  void RunTask(const Plan& plan, const Arguments& a, std::byte* workspace, int stage, int64_t task,
               int worker, const Checkpoint& checkpoint) const override {
    WorkMeter meter(checkpoint, /*interval=*/int64_t{1} << 17);  // multiply-adds
    if (!IsDefinition(plan)) {
      return RunRounds(s_, plan, a, workspace, stage, task, worker, meter);
    }
    RunDefinition(s_, a, workspace + worker * plan.worker_workspace_bytes, task, meter);
  }

 private:
  // The reference has no instruction sets.
  static bool IsDefinition(const Plan& plan) { return plan.isa.empty(); }

  double Flops() const {
    const auto size = static_cast<double>(s_.head_size);
    double products =
        static_cast<double>(s_.window_rows()) * (size + static_cast<double>(s_.value_head_size));
    if (s_.hashes()) products += static_cast<double>(s_.columns()) * size;
    return 2 * products * static_cast<double>(s_.rounds()) * static_cast<double>(s_.all_heads()) *
           static_cast<double>(s_.length);
  }

  const LshShape s_;
  OutputMap<std::optional<TensorSpec>> outputs_;
};

absl::Status CheckInputs(const LshAttentionCall& call) {
  const auto& in = call.inputs;
  const bool simple = call.form == LshForm::kSimple;
  if (!in[Role::kQ]) return Invalid("Q is missing");
  if (simple && !in[Role::kK]) return Invalid("K is missing; form 'simple' needs it");
  if (!simple && in[Role::kK]) {
    return Invalid("K is given; in form 'reformer' the queries Q are the keys");
  }
  if (!in[Role::kV]) return Invalid("V is missing");
  for (const auto& [slot, name] : {std::pair{Slot(Role::kQ), "Q"},
                                   {Role::kK, "K"},
                                   {Role::kV, "V"},
                                   {kLshRotations, "rotations"},
                                   {Role::kKeyLengths, "nonpad_kv_seqlen"}}) {
    if (!in[slot]) continue;
    RAPT_RETURN_IF_ERROR(ByteSize(name, *in[slot]).status());
  }
  return absl::OkStatus();
}

absl::Status ReadTensors(const LshAttentionCall& call, LshShape& s) {
  const TensorSpec& q = *call.inputs[Role::kQ];
  const TensorSpec& v = *call.inputs[Role::kV];
  if (!IsFloat(q.dtype)) {
    return Invalid("Q has type ", NameOf(q.dtype), "; it must be FP32, FP16, BF16 or FP64");
  }
  if (q.shape.size() != 4 || q.shape[3] < 1) {
    return Invalid("Q has shape ", ToString(q.shape),
                   "; it must be [B, H, S, D] with D at least 1");
  }
  if (q.shape[2] > kMostTokens) {
    return Invalid("the length of Q is ", q.shape[2], "; it must be at most ", kMostTokens);
  }
  s.dtype = q.dtype;
  s.batch = q.shape[0];
  s.heads = q.shape[1];
  s.length = q.shape[2];
  s.head_size = q.shape[3];
  if (const auto& k = call.inputs[Role::kK]; k && (k->dtype != q.dtype || k->shape != q.shape)) {
    return Invalid("K is ", NameOf(k->dtype), " ", ToString(k->shape), "; it must be as Q, ",
                   NameOf(q.dtype), " ", ToString(q.shape));
  }
  if (v.dtype != q.dtype) {
    return Invalid("V has type ", NameOf(v.dtype), "; it must have that of Q, ", NameOf(q.dtype));
  }
  if (v.shape.size() != 4 || v.shape[0] != s.batch || v.shape[1] != s.heads ||
      v.shape[2] != s.length || v.shape[3] < 1) {
    return Invalid("V has shape ", ToString(v.shape), "; it must be [", s.batch, ", ", s.heads,
                   ", ", s.length, ", Dv] with Dv at least 1");
  }
  s.value_head_size = v.shape[3];
  const auto& lengths = call.inputs[Role::kKeyLengths];
  if (!lengths) return absl::OkStatus();
  s.has_lengths = true;
  if (lengths->dtype == DType::kInt64 && lengths->shape == Shape{s.batch}) return absl::OkStatus();
  return Invalid("nonpad_kv_seqlen is ", NameOf(lengths->dtype), " ", ToString(lengths->shape),
                 "; it must be INT64 [", s.batch, "]");
}

absl::Status ReadScale(const LshAttentionCall& call, LshShape& s) {
  s.scale = call.scale.value_or(1 / std::sqrt(static_cast<double>(s.head_size)));
  s.is_causal = call.is_causal;
  if (!std::isfinite(s.scale)) return Invalid("scale is ", s.scale, "; it must be finite");
  if (call.is_causal && call.form == LshForm::kSimple) {
    return Invalid("is_causal is true; form 'simple' hides only padding");
  }
  return absl::OkStatus();
}

absl::Status ReadChunks(const LshAttentionCall& call, LshShape& s) {
  const bool simple = call.form == LshForm::kSimple;
  s.num_hashes = call.num_hashes;
  s.chunk_length = call.chunk_length;
  s.chunks_before = call.chunks_before.value_or(simple ? 0 : 1);
  s.chunks_after = call.chunks_after.value_or(0);
  if (s.num_hashes < 1 || s.num_hashes > kMostHashes) {
    return Invalid("num_hashes is ", s.num_hashes, "; it must be from 1 to ", kMostHashes);
  }
  if (s.chunk_length < 1) {
    return Invalid("chunk_length is ", s.chunk_length, "; it must be at least 1");
  }
  if (s.hashes() && s.length % s.chunk_length != 0) {
    return Invalid("chunk_length is ", s.chunk_length, "; it must divide the length ", s.length,
                   " or be at least that");
  }
  for (const auto& [name, chunks] :
       {std::pair{"chunks_before", s.chunks_before}, {"chunks_after", s.chunks_after}}) {
    if (simple && chunks != 0) {
      return Invalid(name, " is ", chunks, "; it must be 0 in form 'simple'");
    }
    if (chunks < 0) return Invalid(name, " is ", chunks, "; it must be at least 0");
  }
  if (!s.hashes()) return absl::OkStatus();
  const int64_t others = s.num_hashes * s.round_chunks() - 1;
  if (s.chunks_before <= others && s.chunks_after <= others - s.chunks_before) {
    return absl::OkStatus();
  }
  return Invalid("chunks_before is ", s.chunks_before, " and chunks_after ", s.chunks_after,
                 "; together they must be at most ", others, ", as num_hashes ", s.num_hashes,
                 " and chunk_length ", s.chunk_length, " give ", others + 1, " chunks");
}

absl::Status ReadBuckets(const LshAttentionCall& call, LshShape& s) {
  s.buckets = call.num_buckets;
  s.wants_buckets = call.wants_buckets;
  if (s.wants_buckets && !s.hashes()) {
    return Invalid("buckets are asked for, but nothing is hashed: the length ", s.length,
                   " is at most the chunk_length ", s.chunk_length);
  }
  if (call.form == LshForm::kSimple) {
    if (s.buckets != 0 && s.buckets != s.head_size) {
      return Invalid("num_buckets is ", s.buckets, "; in form 'simple' it must be D, ",
                     s.head_size);
    }
    s.buckets = s.head_size;
  } else if (s.buckets == 0) {
    const int64_t most = s.hashes() ? 2 * s.round_chunks() : 2;
    s.buckets = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(most)));
  } else if (s.buckets < 2 || s.buckets % 2 != 0) {
    return Invalid("num_buckets is ", s.buckets, "; it must be even and at least 2");
  }
  if (s.buckets <= kMostBuckets) return absl::OkStatus();
  return Invalid("num_buckets is ", s.buckets, "; it must be at most ", kMostBuckets);
}

absl::Status ReadRotations(const LshAttentionCall& call, LshShape& s) {
  const std::optional<TensorSpec>& rotations = call.inputs[kLshRotations];
  s.rotation_heads = s.heads;
  if (rotations && call.seed) {
    return Invalid("rotations and seed are both set; the seed draws the rotations");
  }
  if (rotations) {
    s.rotations = rotations->dtype;
    if (rotations->dtype != DType::kFloat32 && rotations->dtype != DType::kFloat64 &&
        rotations->dtype != s.dtype) {
      return Invalid("rotations has type ", NameOf(rotations->dtype),
                     "; it must be FP32, FP64 or the type of Q, ", NameOf(s.dtype));
    }
    const Shape& shape = rotations->shape;
    const Shape rest = {s.head_size, s.num_hashes, s.columns()};
    if (shape.size() != 4 || (shape[0] != 1 && shape[0] != s.heads) ||
        !std::equal(rest.begin(), rest.end(), shape.begin() + 1)) {
      return Invalid("rotations has shape ", ToString(shape), "; it must be [", s.heads, " or 1, ",
                     rest[0], ", ", rest[1], ", ", rest[2], "]");
    }
    s.rotation_heads = shape[0];
    return absl::OkStatus();
  }
  if (!s.hashes()) return absl::OkStatus();
  if (!call.seed) return Invalid("rotations is missing; it or seed must be given");
  s.seed = *call.seed;
  const int64_t factors[] = {s.head_size, s.num_hashes, s.columns()};
  if (CheckedProduct(factors).value_or(kMostDraws + 1) <= kMostDraws &&
      s.heads <= std::numeric_limits<uint32_t>::max()) {
    return absl::OkStatus();
  }
  return Invalid("rotations of ", s.heads, " heads with D ", s.head_size, ", num_hashes ",
                 s.num_hashes, " and num_buckets ", s.buckets,
                 " can't be drawn; a head has at most ", kMostDraws, " numbers");
}

absl::Status CheckMemory(const LshShape& s) {
  if (s.empty() || (FitsRounds(s) && FitsDefinition(s))) return absl::OkStatus();
  return Invalid("num_hashes is ", s.num_hashes, " and num_buckets ", s.buckets, "; with ",
                 s.all_heads(), " heads of ", s.length,
                 " tokens they must need less than 2^50 bytes of memory");
}

// --- The table ---

// K is of the simple form alone, so that tools which send every listed input could not call it.
constexpr TensorSchema kLshInputs[] = {
    Required(TensorRow("Q", Role::kQ, 4, "[B, H, S, D]: queries; of form reformer also keys")),
    Required(TensorRow("V", Role::kV, 4, "[B, H, S, Dv]")),
    {.name = "K",
     .slot = Role::kK,
     .dtype = DType::kFloat32,
     .rank = 4,
     .unlisted = true,
     .help = "keys of form simple, [B, H, S, D]"},
    TensorRow("rotations", kLshRotations, 4,
              "[H or 1, D, num_hashes, num_buckets/2]; of form simple [H or 1, D, num_hashes, D]"),
    TensorRow("nonpad_kv_seqlen", Role::kKeyLengths, 1, "integers [B]: later tokens do not count",
              DType::kInt64)};
constexpr TensorSchema kLshOutputs[] = {
    Required(TensorRow("Y", Role::kY, 4, "[B, H, S, Dv]")),
    WantedBy<&LshAttentionCall::wants_buckets>(
        TensorRow("buckets", kLshBuckets, 4, "the bucket of each token, [B, H, num_hashes, S]",
                  DType::kInt32))};
constexpr AttributeSchema kLshAttributes[] = {
    AttributeOf<&LshAttentionCall::form>(
        "form", "reformer: queries are keys; simple: as in tutorials (default: reformer)"),
    AttributeOf<&LshAttentionCall::num_hashes>("num_hashes", "rounds of hashing (default: 1)"),
    AttributeOf<&LshAttentionCall::num_buckets>(
        "num_buckets",
        "buckets of a round, even (default: the power of two up to 2S/chunk_length)"),
    Required(AttributeOf<&LshAttentionCall::chunk_length>(
        "chunk_length", "tokens of a chunk, a divisor of S, or at least S")),
    AttributeOf<&LshAttentionCall::chunks_before>(
        "chunks_before", "chunks that a chunk sees before itself (default: 1, of form simple 0)"),
    AttributeOf<&LshAttentionCall::chunks_after>("chunks_after", "and after itself (default: 0)"),
    AttributeOf<&LshAttentionCall::is_causal>("is_causal",
                                              "a token sees only itself and those before it"),
    AttributeOf<&LshAttentionCall::scale>("scale", "factor of the scores (default: 1/sqrt(D))"),
    AttributeOf<&LshAttentionCall::seed>(
        "seed", "draws the rotations if they are not given, and is needed then")};

}  // namespace

const OperatorSchema kLshAttention = {
    "lsh_attention",
    "LshAttend",
    "Attention by locality-sensitive hashing (Reformer): chunks of tokens with like hashes see "
    "themselves and their neighbours.",
    kLshInputs,
    kLshOutputs,
    kLshAttributes,
    NewCall<LshAttentionCall, MakeLshAttention>};

absl::StatusOr<std::shared_ptr<const TensorOperator>> MakeLshAttention(
    const LshAttentionCall& call) {
  LshShape shape{.form = call.form};
  RAPT_RETURN_IF_ERROR(CheckInputs(call));
  RAPT_RETURN_IF_ERROR(ReadTensors(call, shape));
  RAPT_RETURN_IF_ERROR(ReadScale(call, shape));
  RAPT_RETURN_IF_ERROR(ReadChunks(call, shape));
  RAPT_RETURN_IF_ERROR(ReadBuckets(call, shape));
  RAPT_RETURN_IF_ERROR(ReadRotations(call, shape));
  RAPT_RETURN_IF_ERROR(CheckMemory(shape));
  return std::shared_ptr<const TensorOperator>(std::make_shared<const LshAttention>(shape));
}

}  // namespace rapt
