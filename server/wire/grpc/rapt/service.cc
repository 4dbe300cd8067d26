#include "server/wire/grpc/rapt/service.h"

#include "proto/rapt/v1/attention.grpc.pb.h"
#include "server/wire/grpc/unary_response.h"

namespace rapt::native {
namespace {

using Rpcs = v1::AttentionService;

// Attend, AttendStream and Diagnose are tensor methods.
class Service final
    : public UnaryService<Rpcs::WithGenericMethod_Attend<Rpcs::WithGenericMethod_AttendStream<
                              Rpcs::WithGenericMethod_Diagnose<Rpcs::Service>>>,
                          Methods> {
 public:
  using UnaryService::UnaryService;

  grpc::Status EstimateMemory(grpc::ServerContext* context,
                              const v1::EstimateMemoryRequest* request,
                              v1::EstimateMemoryResponse* response) override {
    return Respond(context, methods().observe_estimate_memory(), request, response);
  }

  grpc::Status GetServerInfo(grpc::ServerContext* context, const v1::GetServerInfoRequest* request,
                             v1::GetServerInfoResponse* response) override {
    return Respond(context, methods().observe_get_server_info(), request, response);
  }
};

}  // namespace

std::unique_ptr<grpc::Service> NewService(const CallEnvironment& environment,
                                          const Methods& methods) {
  return std::make_unique<Service>(environment, methods);
}

}  // namespace rapt::native
