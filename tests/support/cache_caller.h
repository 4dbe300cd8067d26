// Calls of CacheService to a real server.
#ifndef RAPT_TESTS_SUPPORT_CACHE_CALLER_H_
#define RAPT_TESTS_SUPPORT_CACHE_CALLER_H_

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "proto/rapt/v1/cache.grpc.pb.h"
#include "tests/support/cache_model.h"
#include "tests/support/rapt_reason.h"
#include "tests/support/server_process.h"
#include "tests/support/tensor.h"

namespace rapt::test {

// A base of fixtures. Its caches have `layers` layers of the shape in cache_model.h.
class CacheCaller {
 protected:
  static std::unique_ptr<v1::CacheService::Stub> StubOf(const ServerProcess& server) {
    return v1::CacheService::NewStub(
        grpc::CreateChannel(server.grpc_address(), grpc::InsecureChannelCredentials()));
  }

  // Calls a method; the trailer rapt-reason is in reason_.
  template <typename Method, typename Request, typename Response>
  grpc::Status Call(Method method, const Request& request, Response& response) {
    grpc::ClientContext context;
    response.Clear();
    const grpc::Status status = ((*stub_).*method)(&context, request, &response);
    reason_ = ReasonOf(context);
    return status;
  }

  grpc::Status Create(const v1::CreateRequest& request, v1::Cache& cache) {
    return Call(&v1::CacheService::Stub::Create, request, cache);
  }
  grpc::Status Append(const v1::AppendRequest& request, v1::AppendResponse& response) {
    return Call(&v1::CacheService::Stub::Append, request, response);
  }
  grpc::Status Attend(const v1::AttendCachedRequest& request, v1::AttendCachedResponse& response) {
    return Call(&v1::CacheService::Stub::Attend, request, response);
  }

  static v1::CreateRequest CreateOf(int layers = 2) {
    v1::CreateRequest request;
    request.set_dtype(v1::FP32);
    v1::LayerShape& shape = *request.add_shapes();
    shape.set_layers(layers);
    shape.set_kv_heads(kKvHeads);
    shape.set_head_size(kHeadSize);
    shape.set_value_head_size(kValueSize);
    return request;
  }

  v1::Cache CreateCache(const v1::CreateRequest& request = CreateOf()) {
    v1::Cache cache;
    const grpc::Status status = Create(request, cache);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return cache;
  }

  static v1::AppendRequest AppendOf(const v1::Cache& cache, int layer, int64_t at,
                                    const Tokens& tokens) {
    v1::AppendRequest request;
    v1::AppendPart& part = *request.add_parts();
    part.set_cache(cache.id());
    part.set_generation(cache.generation());
    part.set_layer(layer);
    part.set_at(at);
    *part.mutable_k() = tokens.k();
    *part.mutable_v() = tokens.v();
    return request;
  }

  // One item, with new tokens and rows.
  static v1::AttendCachedRequest AttendOf(const v1::Cache& cache, int layer, int64_t at,
                                          const Tokens& tokens, int rows, Rng& rng) {
    v1::AttendCachedRequest request;
    request.set_layer(layer);
    v1::Item& item = *request.add_items();
    item.set_cache(cache.id());
    item.set_generation(cache.generation());
    item.set_rows(rows);
    item.set_new_tokens(static_cast<int>(tokens.count()));
    item.set_at(at);
    *request.mutable_q() =
        ToMessage(Random(rows * kQueryHeads * kHeadSize, rng), {rows, kQueryHeads, kHeadSize});
    if (tokens.count() == 0) return request;
    *request.mutable_k() = tokens.k();
    *request.mutable_v() = tokens.v();
    return request;
  }

  void ExpectFails(const grpc::Status& status, grpc::StatusCode code, const std::string& reason) {
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_EQ(reason_, reason) << status.error_message();
  }

  std::unique_ptr<v1::CacheService::Stub> stub_;
  std::string reason_;
};

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_CACHE_CALLER_H_
