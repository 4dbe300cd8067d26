#include "server/cache/cached_diagnosis.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "attention/field_names.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt::cache {
namespace {

absl::Status CheckItems(absl::Span<const AttendItem> items) {
  if (items.size() != 1) {
    return Invalid("items has ", items.size(), " entries; Diagnose takes one");
  }
  const AttendItem& item = items.front();
  if (item.call.count != 0) {
    return Invalid("items[0]: new_tokens is ", item.call.count,
                   "; it must be 0, as Diagnose appends nothing: `at` tokens are seen");
  }
  if (item.rows >= 1) return absl::OkStatus();
  return Invalid("items[0]: rows is ", item.rows, "; it must be at least 1");
}

// A view of rank 4 of all tokens, of which there may be none. Its last axis counts numbers.
TensorView TokensOf(const Snapshot& snapshot, TensorView (Snapshot::*view)() const,
                    const TensorSpec& spec) {
  TensorView tokens{.dtype = spec.dtype};
  if (snapshot.length() > 0) tokens = (snapshot.*view)();
  tokens.dims = {1, spec.shape[1], snapshot.length(), spec.shape[2]};
  return tokens;
}

}  // namespace

// The tasks of a diagnosis as an operator: the inputs are bound to its arguments, then it runs.
class CachedDiagnosis::Tasks final : public TensorOperator {
 public:
  explicit Tasks(CachedDiagnosis& owner) : owner_(owner) {
    outputs_[Role::kY] = TensorSpec{DType::kFloat32, {0}};
  }

  const OutputMap<std::optional<TensorSpec>>& outputs() const override { return outputs_; }

  void PlanTasks(Plan& plan) const override {
    const Problem& p = owner_.problem_;
    const auto stages = owner_.diagnosis_->stages();
    plan.stages = {1};
    plan.stages.insert(plan.stages.end(), stages.begin(), stages.end());
    plan.shared_workspace_bytes = Diagnosis::WorkspaceBytes(p, plan.threads);
    plan.flops = 2 * static_cast<double>(p.query_heads) * static_cast<double>(p.query_length) *
                 static_cast<double>(p.key_length) *
                 static_cast<double>(p.head_size + p.value_head_size);
  }

  void RunTask(const Plan& /*plan*/, const Arguments& arguments, std::byte* workspace, int stage,
               int64_t task, int worker, const Checkpoint& checkpoint) const override {
    if (stage > 0) {
      return owner_.diagnosis_->RunTask(stage - 1, task, worker, workspace, checkpoint);
    }
    for (Role role : {Role::kQ, Role::kHeadSink}) {
      owner_.arguments_.inputs[role].data = arguments.inputs[role].data;
    }
  }

 private:
  CachedDiagnosis& owner_;
  OutputMap<std::optional<TensorSpec>> outputs_;
};

absl::StatusOr<Request> CachedDiagnosis::Start(CacheStore& store, const std::string& owner,
                                               AttendCall call) {
  RAPT_RETURN_IF_ERROR(CheckItems(call.items));
  call.partial = false;
  RAPT_ASSIGN_OR_RETURN(attend_,
                        attention_.Open(store, owner, std::move(call), CacheStore::Leases::kKept));
  tokens_ = attention_.states().front().before;
  RAPT_RETURN_IF_ERROR(Check(store));
  problem_ = ProblemOf(attention_.ragged(), attention_.ragged().items.front());
  RAPT_RETURN_IF_ERROR(Validate(problem_, kNativeNames));
  SetArguments();
  diagnosis_.emplace(problem_, arguments_, /*workers=*/1, kNativeNames);
  Request request;
  request.model = Model::kAttentionSession;
  request.SetOperator(std::make_shared<const Tasks>(*this));
  request.inputs[Role::kQ] = attention_.call().q.bytes;
  request.inputs[Role::kHeadSink] = attention_.call().head_sink.bytes;
  return request;
}

absl::Status CachedDiagnosis::Check(CacheStore& store) const {
  const auto pages = tokens_->pages();
  const auto evicted = std::find(pages.begin(), pages.end(), nullptr);
  if (evicted == pages.end()) return absl::OkStatus();
  const auto kept = std::find_if(evicted, pages.end(), [](const auto* page) { return page; });
  return store.Fail(Reason::kEvicted, absl::StatusCode::kFailedPrecondition,
                    absl::StrCat("items[0]: Diagnose reads every token that the item has; the "
                                 "layer has evicted ",
                                 (evicted - pages.begin()) * kPageTokens, " to ",
                                 (kept - pages.begin()) * kPageTokens));
}

void CachedDiagnosis::SetArguments() {
  const AttendCall& call = attention_.call();
  const RaggedCall& ragged = attention_.ragged();
  specs_[Role::kQ] = call.q.spec;
  specs_[Role::kK] = {ragged.dtype, {tokens_->length(), ragged.kv_heads, ragged.head_size}};
  specs_[Role::kV] = {ragged.dtype, {tokens_->length(), ragged.kv_heads, ragged.value_head_size}};
  specs_[Role::kHeadSink] = call.head_sink.spec;
  const int64_t heads = ragged.query_heads, size = ragged.head_size;
  arguments_.inputs[Role::kQ] = {.dtype = ragged.dtype,
                                 .dims = {1, heads, problem_.query_length, size},
                                 .strides = {0, size, heads * size, 1}};
  arguments_.inputs[Role::kK] = TokensOf(*tokens_, &Snapshot::keys, spec(Role::kK));
  arguments_.inputs[Role::kV] = TokensOf(*tokens_, &Snapshot::values, spec(Role::kV));
  if (!ragged.head_sink) return;
  arguments_.inputs[Role::kHeadSink] = {
      .dtype = *ragged.head_sink, .dims = {heads, 1, 1, 1}, .strides = {1, 0, 0, 0}};
}

DiagnosisReport CachedDiagnosis::Finish(const PlanOptions& options) {
  DiagnosisReport report = diagnosis_->Finish(options);
  report.backends = ExplainChoice(*attend_, options);
  return report;
}

}  // namespace rapt::cache
