// The trailer rapt-reason, which tells errors of one status apart.
#ifndef RAPT_TESTS_SUPPORT_RAPT_REASON_H_
#define RAPT_TESTS_SUPPORT_RAPT_REASON_H_

#include <grpcpp/grpcpp.h>

#include <string>

namespace rapt::test {

// Returns the trailer of a call that has ended; empty if it has none.
inline std::string ReasonOf(const grpc::ClientContext& context) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto reason = trailers.find("rapt-reason");
  if (reason == trailers.end()) return "";
  return {reason->second.data(), reason->second.size()};
}

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_RAPT_REASON_H_
