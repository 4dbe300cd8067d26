#include "attention/operators/operator_schema.h"

#include <algorithm>

#include "attention/mechanism/linear/linear_attention.h"
#include "attention/mechanism/lsh/lsh_attention.h"
#include "attention/positions/positional_encoding.h"
#include "attention/positions/rotary_embedding.h"

namespace rapt {
namespace {

constexpr DType kFloat = DType::kFloat32;

template <typename Call, auto kMake>
std::unique_ptr<SchemaCall> NewCall() {
  class Made final : public TypedCall<Call> {
    absl::StatusOr<std::shared_ptr<const TensorOperator>> Make() const override {
      return kMake(this->call);
    }
  };
  return std::make_unique<Made>();
}

// The caches are listed as a caller with ids sends them.
constexpr TensorSchema kRotaryInputs[] = {{"X", kTokens, kFloat, 4, true},
                                          {"cos_cache", Role::kCosCache, kFloat, 2},
                                          {"sin_cache", Role::kSinCache, kFloat, 2},
                                          {"position_ids", Role::kPositionIds, DType::kInt64, 2}};
constexpr TensorSchema kRotaryOutputs[] = {{"Y", Role::kY, kFloat, 4, true}};
constexpr AttributeSchema kRotaryAttributes[] = {
    AttributeOf<&RotaryEmbeddingCall::interleaved>("interleaved"),
    AttributeOf<&RotaryEmbeddingCall::num_heads>("num_heads"),
    AttributeOf<&RotaryEmbeddingCall::rotary_embedding_dim>("rotary_embedding_dim"),
    AttributeOf<&RotaryEmbeddingCall::rope_theta>("rope_theta")};

constexpr TensorSchema kPositionalInputs[] = {{"X", kTokens, kFloat, 3, true},
                                              {"table", kTokenTable, kFloat, 2}};
constexpr TensorSchema kPositionalOutputs[] = {{"Y", Role::kY, kFloat, 3, true}};
constexpr AttributeSchema kPositionalAttributes[] = {
    AttributeOf<&PositionalEncodingCall::base>("base")};

constexpr TensorSchema kLinearInputs[] = {{"query", Role::kQ, kFloat, 3, true},
                                          {"key", Role::kK, kFloat, 3, true},
                                          {"value", Role::kV, kFloat, 3, true},
                                          {"past_state", linear::kPastState, kFloat, 4},
                                          {"decay", linear::kDecay, kFloat, 3},
                                          {"beta", linear::kBeta, kFloat, 3},
                                          {"nonpad_kv_seqlen", Role::kKeyLengths, DType::kInt64, 1},
                                          {"projection", linear::kProjection, kFloat, 2},
                                          {"past_normalizer", linear::kPastNormalizer, kFloat, 3}};
constexpr TensorSchema kLinearOutputs[] = {
    {"output", Role::kY, kFloat, 3, true},
    {.name = "present_state",
     .role = linear::kPresentState,
     .dtype = kFloat,
     .rank = 4,
     .want = Want<&LinearAttentionCall::wants_present_state>},
    {.name = "present_normalizer",
     .role = linear::kPresentNormalizer,
     .dtype = kFloat,
     .rank = 3,
     .want = Want<&LinearAttentionCall::wants_present_normalizer>},
    {.name = "relative_error",
     .role = linear::kRelativeError,
     .dtype = kFloat,
     .rank = 1,
     .follows = "error_rows"}};
constexpr AttributeSchema kLinearAttributes[] = {
    AttributeOf<&LinearAttentionCall::update_rule>("update_rule"),
    AttributeOf<&LinearAttentionCall::feature_map>("feature_map"),
    AttributeOf<&LinearAttentionCall::state_type>("state_type"),
    AttributeOf<&LinearAttentionCall::q_num_heads>("q_num_heads"),
    AttributeOf<&LinearAttentionCall::kv_num_heads>("kv_num_heads"),
    AttributeOf<&LinearAttentionCall::scale>("scale"),
    AttributeOf<&LinearAttentionCall::chunk_size>("chunk_size"),
    AttributeOf<&LinearAttentionCall::is_causal>("is_causal"),
    AttributeOf<&LinearAttentionCall::normalize>("normalize"),
    AttributeOf<&LinearAttentionCall::num_features>("num_features"),
    AttributeOf<&LinearAttentionCall::seed>("seed"),
    AttributeOf<&LinearAttentionCall::error_rows>("error_rows")};

// K is of the simple form alone, so that tools which send every listed input could not call it.
constexpr TensorSchema kLshInputs[] = {
    {"QK", Role::kQ, kFloat, 4, true},
    {"V", Role::kV, kFloat, 4, true},
    {.name = "K", .role = Role::kK, .dtype = kFloat, .rank = 4, .unlisted = true},
    {"rotations", kLshRotations, kFloat, 4},
    {"nonpad_kv_seqlen", Role::kKeyLengths, DType::kInt64, 1}};
constexpr TensorSchema kLshOutputs[] = {{"Y", Role::kY, kFloat, 4, true},
                                        {.name = "buckets",
                                         .role = kLshBuckets,
                                         .dtype = DType::kInt32,
                                         .rank = 4,
                                         .want = Want<&LshAttentionCall::wants_buckets>}};
constexpr AttributeSchema kLshAttributes[] = {
    AttributeOf<&LshAttentionCall::form>("form"),
    AttributeOf<&LshAttentionCall::num_hashes>("num_hashes"),
    AttributeOf<&LshAttentionCall::num_buckets>("num_buckets"),
    AttributeOf<&LshAttentionCall::chunk_length>("chunk_length"),
    AttributeOf<&LshAttentionCall::chunks_before>("chunks_before"),
    AttributeOf<&LshAttentionCall::chunks_after>("chunks_after"),
    AttributeOf<&LshAttentionCall::is_causal>("is_causal"),
    AttributeOf<&LshAttentionCall::scale>("scale"),
    AttributeOf<&LshAttentionCall::seed>("seed")};

constexpr OperatorSchema kOperators[] = {
    {"rotary_embedding", kRotaryInputs, kRotaryOutputs, kRotaryAttributes,
     NewCall<RotaryEmbeddingCall, MakeRotaryEmbedding>},
    {"positional_encoding", kPositionalInputs, kPositionalOutputs, kPositionalAttributes,
     NewCall<PositionalEncodingCall, MakePositionalEncoding>},
    {"linear_attention", kLinearInputs, kLinearOutputs, kLinearAttributes,
     NewCall<LinearAttentionCall, MakeLinearAttention>},
    {"lsh_attention", kLshInputs, kLshOutputs, kLshAttributes,
     NewCall<LshAttentionCall, MakeLshAttention>},
};

}  // namespace

absl::Span<const OperatorSchema> OperatorSchemas() { return kOperators; }

const OperatorSchema* FindOperator(absl::string_view name) {
  const auto found =
      std::find_if(std::begin(kOperators), std::end(kOperators),
                   [&](const OperatorSchema& schema) { return schema.name == name; });
  return found == std::end(kOperators) ? nullptr : found;
}

}  // namespace rapt
