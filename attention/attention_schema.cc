#include "attention/attention_schema.h"

#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "attention/attributes.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

class AttentionCall final : public TypedCall<OperatorCall> {
 public:
  AttentionCall() { call.alignment = Alignment::kOnnx; }

  absl::StatusOr<BoundCall> Bind() const override {
    RAPT_ASSIGN_OR_RETURN(ResolvedCall resolved, ResolveAttention(*this));
    return BoundCall(std::move(resolved));
  }

  int64_t score_mode = 0;
};

AttentionCall& Of(SchemaCall& call) { return static_cast<AttentionCall&>(call); }

void WantScores(SchemaCall& call) {
  Of(call).call.score_output = static_cast<ScoreOutput>(Of(call).score_mode);
}

void SetScoreMode(SchemaCall& call, const AttributeValue& value) {
  Of(call).score_mode = std::get<int64_t>(value);
  if (Of(call).call.score_output) WantScores(call);
}

// Types narrower than FP32 are accepted and computed in FP32.
void SetSoftmaxPrecision(SchemaCall& call, const AttributeValue& value) {
  Of(call).call.softmax_in_fp64 = std::get<DType>(value) == DType::kFloat64;
}

template <auto kMember>
void SetDropout(SchemaCall& call, const AttributeValue& value) {
  std::optional<Dropout>& dropout = Of(call).call.dropout;
  if (!dropout) dropout.emplace();
  auto& member = (*dropout).*kMember;
  member = std::get<std::decay_t<decltype(member)>>(value);
}

template <Role kGradient>
void WantGradient(SchemaCall& call) {
  Of(call).call.gradients->Add(kGradient);
}

template <size_t... kIndices>
constexpr auto GradientWants(std::index_sequence<kIndices...> /*of kGradients*/) {
  return std::array<void (*)(SchemaCall&), sizeof...(kIndices)>{
      WantGradient<kGradients[kIndices]>...};
}

struct OutputRow {
  Role role;
  absl::string_view help;
  void (*want)(SchemaCall&) = nullptr;
};
constexpr void (*kWantPresent)(SchemaCall&) = WantedBy<&OperatorCall::wants_present>({}).want;
constexpr OutputRow kOutputRows[] = {
    {Role::kY, "shaped as Q, with the head size of V"},
    {Role::kPresentKey, "past_key, then K", kWantPresent},
    {Role::kPresentValue, "past_value, then V", kWantPresent},
    {Role::kScores, "[B, Hq, Sq, T], after the step of qk_matmul_output_mode", WantScores},
    {Role::kLse, "log of the sum of the exponentials of each row's scores, [B, Hq, Sq]",
     WantedBy<&OperatorCall::wants_lse>({}).want},
};

TensorSchema RowOf(Role role, absl::string_view help) {
  const RoleInfo& info = InfoOf(role);
  TensorSchema row = TensorRow(info.onnx, role, info.rank, help, info.usual_dtype);
  row.required = info.required;
  row.unlisted = info.unlisted;
  row.any_rank = true;
  return row;
}

// Of the flags of `rapt attend`, except where those are called otherwise here.
absl::string_view HelpOf(Role role) {
  if (role == Role::kQ) return "queries, [B, Hq, Sq, D], or [B, Sq, Hq * D] with --q-num-heads";
  if (role == Role::kK) return "keys, [B, Hkv, Sk, D], or [B, Sk, Hkv * D] with --kv-num-heads";
  if (role == Role::kV) return "values, shaped as K; absent with --v-head-size";
  if (role == Role::kForwardLse) return "lse of the forward pass, with --y";
  const char* const help = InfoOf(role).help;
  return help == nullptr ? "" : help;
}

TensorSchema InputRow(Role role) {
  TensorSchema row = RowOf(role, HelpOf(role));
  if (role == Role::kV) row.replaced_by = "v_head_size";
  return row;
}

std::vector<AttributeSchema> AttributesOfBoth() {
  std::vector<AttributeSchema> rows = AttentionAttributes();
  rows.push_back(
      AttributeOf<&OperatorCall::layout>("layout", "the order of the axes of Q, K and V"));
  rows.push_back(AttributeOf<&OperatorCall::alignment>(
      "alignment", "where the queries are among the keys (default: onnx)"));
  rows.push_back(
      {"softmax_precision", DType(), {}, SetSoftmaxPrecision, "FP64 or any other float"});
  rows.push_back({"dropout_probability",
                  double(),
                  {},
                  SetDropout<&Dropout::probability>,
                  "the probability that a weight is dropped"});
  rows.push_back({"dropout_seed",
                  uint64_t(),
                  {},
                  SetDropout<&Dropout::seed>,
                  "of the weights that are dropped"});
  return rows;
}

struct Tables {
  std::vector<TensorSchema> inputs, outputs;
  std::vector<AttributeSchema> attributes = AttributesOfBoth();
};

const Tables& ForwardTables() {
  static const auto* const tables = [] {
    auto* t = new Tables;
    for (Role role : kInputs) t->inputs.push_back(InputRow(role));
    for (const OutputRow& output : kOutputRows) {
      t->outputs.push_back(RowOf(output.role, output.help));
      t->outputs.back().want = output.want;
      if (output.role == Role::kPresentValue) t->outputs.back().replaced_by = "v_head_size";
    }
    t->attributes.push_back({.name = "qk_matmul_output_mode",
                             .kind = int64_t(),
                             .choices = {},
                             .set = SetScoreMode,
                             .help = "0: scores, 1: after softcap, 2: after bias, 3: weights",
                             .least = 0,
                             .most = 3,
                             .allowed = "0 (scores), 1 (after softcap), 2 (after bias) or 3 "
                                        "(weights)"});
    return t;
  }();
  return *tables;
}

const Tables& BackwardTables() {
  static const auto* const tables = [] {
    auto* t = new Tables;
    for (Role role : kAllInputs) {
      t->inputs.push_back(InputRow(role));
      if (role == Role::kOutputGradient) t->inputs.back().required = true;
      if (role == Role::kMask) t->inputs.back().dtype = DType::kFloat32;  // only then a gradient
    }
    constexpr auto kWants = GradientWants(std::make_index_sequence<kGradients.size()>());
    for (size_t n = 0; n < kGradients.size(); ++n) {
      t->outputs.push_back(RowOf(kGradients[n], "the gradient of the input"));
      t->outputs.back().want = kWants[n];
      if (kGradients[n] == Role::kDV) t->outputs.back().replaced_by = "v_head_size";
    }
    return t;
  }();
  return *tables;
}

std::unique_ptr<SchemaCall> NewForward() { return std::make_unique<AttentionCall>(); }

std::unique_ptr<SchemaCall> NewBackward() {
  auto made = std::make_unique<AttentionCall>();
  made->call.gradients.emplace();
  return made;
}

}  // namespace

const OperatorSchema& AttentionSchema() {
  static const OperatorSchema schema = {
      "attention",
      /*method=*/"",
      "The ONNX operator Attention: softmax(scale Q K^T + mask) V, with extensions.",
      ForwardTables().inputs,
      ForwardTables().outputs,
      ForwardTables().attributes,
      NewForward};
  return schema;
}

const OperatorSchema& AttentionBackwardSchema() {
  static const OperatorSchema schema = {"attention_backward",
                                        /*method=*/"",
                                        "The gradients of attention's inputs for dY, that of Y.",
                                        BackwardTables().inputs,
                                        BackwardTables().outputs,
                                        BackwardTables().attributes,
                                        NewBackward};
  return schema;
}

const OperatorCall& AttentionOf(const SchemaCall& call) {
  return static_cast<const AttentionCall&>(call).call;
}

absl::StatusOr<ResolvedCall> ResolveAttention(const SchemaCall& call) {
  const OperatorCall& given = AttentionOf(call);
  if (!given.gradients || !given.gradients->empty()) return Resolve(given);
  OperatorCall complete = given;
  complete.gradients = UsualGradients(given);
  return Resolve(complete);
}

}  // namespace rapt
