// A CacheService between a client and a real server.
#ifndef RAPT_TESTS_CLIENT_CPP_CACHE_PROXY_H_
#define RAPT_TESTS_CLIENT_CPP_CACHE_PROXY_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "proto/rapt/v1/cache.grpc.pb.h"

namespace rapt::test {

// Listens on loopback. A derived class overrides the methods that it passes on by stub(); the
// others are UNIMPLEMENTED. The destructor of a class with members calls Stop().
class CacheProxy : public v1::CacheService::Service {
 public:
  // `address`: of the real server.
  explicit CacheProxy(const std::string& address)
      : stub_(v1::CacheService::NewStub(
            grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))) {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }

  const std::string& address() const { return address_; }

 protected:
  // Waits until no call runs.
  void Stop() {
    server_->Shutdown();
    server_->Wait();
  }

  v1::CacheService::Stub& stub() const { return *stub_; }

 private:
  const std::unique_ptr<v1::CacheService::Stub> stub_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

}  // namespace rapt::test

#endif  // RAPT_TESTS_CLIENT_CPP_CACHE_PROXY_H_
