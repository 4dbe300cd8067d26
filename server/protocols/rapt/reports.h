// The responses of Diagnose, EstimateMemory and GetServerInfo. Pure functions.
#ifndef RAPT_SERVER_PROTOCOLS_RAPT_REPORTS_H_
#define RAPT_SERVER_PROTOCOLS_RAPT_REPORTS_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "attention/diagnosis.h"
#include "attention/plan.h"
#include "proto/rapt/v1/attention.pb.h"
#include "server/models/model_repository.h"

namespace rapt::native {

// `report` is the diagnosis of `call`, and of `backward` if it is not empty; the response shows
// their tensors as received.
void EncodeDiagnosis(const v1::AttendRequest& call, const v1::AttendBackwardRequest& backward,
                     const DiagnosisReport& report, v1::DiagnoseResponse& response);
// The same for another call: `sent` returns type and shape of each input of the report.
void EncodeDiagnosis(const DiagnosisReport& report, absl::FunctionRef<const v1::Tensor&(Role)> sent,
                     v1::DiagnoseResponse& response);

// `repository` may be null: the server has no layers. REQUIRES: ParseRequest() accepted the
// request. InvalidArgument names the field, the value received and the values allowed; NotFound for
// an unknown model; otherwise as MakePlan.
absl::Status EstimateMemory(const v1::EstimateMemoryRequest& request, const PlanOptions& options,
                            const ModelRepository* repository,
                            v1::EstimateMemoryResponse& response);

// Returns version, options and all backends of this build.
void DescribeServer(const PlanOptions& options, v1::GetServerInfoResponse& response);

}  // namespace rapt::native

#endif  // RAPT_SERVER_PROTOCOLS_RAPT_REPORTS_H_
