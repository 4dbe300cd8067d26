#include "server/wire/grpc/rapt/service.h"

#include "proto/rapt/v1/attention.grpc.pb.h"
#include "server/wire/grpc/unary_response.h"

namespace rapt::native {
namespace {

using Rpcs = v1::AttentionService;

// Attend, AttendStream and Diagnose are tensor methods.
class Service final
    : public Rpcs::WithGenericMethod_Attend<
          Rpcs::WithGenericMethod_AttendStream<Rpcs::WithGenericMethod_Diagnose<Rpcs::Service>>> {
 public:
  Service(const CallEnvironment& environment, const Methods& methods)
      : environment_(environment), methods_(methods) {}

  grpc::Status EstimateMemory(grpc::ServerContext* context,
                              const v1::EstimateMemoryRequest* request,
                              v1::EstimateMemoryResponse* response) override {
    return RespondAtOnce(*context, environment_, methods_.observe_estimate_memory(),
                         [&] { return methods_.Respond(*request, *response); });
  }

  grpc::Status GetServerInfo(grpc::ServerContext* context, const v1::GetServerInfoRequest* request,
                             v1::GetServerInfoResponse* response) override {
    return RespondAtOnce(*context, environment_, methods_.observe_get_server_info(),
                         [&] { return methods_.Respond(*request, *response); });
  }

 private:
  const CallEnvironment& environment_;
  const Methods& methods_;
};

}  // namespace

std::unique_ptr<grpc::Service> NewService(const CallEnvironment& environment,
                                          const Methods& methods) {
  return std::make_unique<Service>(environment, methods);
}

}  // namespace rapt::native
