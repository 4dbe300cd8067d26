#include "server/wire/grpc/status.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/utf8.h"

namespace rapt {
namespace {

// Clients accept 8 KiB of headers by default, and a byte may be encoded as three.
constexpr size_t kMaxMessageBytes = 2048;

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  absl::string_view message = status.message();
  const auto code = static_cast<grpc::StatusCode>(status.code());
  if (message.size() <= kMaxMessageBytes) return {code, std::string(message)};
  return {code, absl::StrCat(Utf8Prefix(message, kMaxMessageBytes), "...")};
}

}  // namespace rapt
