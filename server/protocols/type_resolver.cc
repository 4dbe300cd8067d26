#include "server/protocols/type_resolver.h"

#include <google/protobuf/util/type_resolver_util.h>

#include "absl/strings/str_cat.h"

namespace rapt {
namespace {

constexpr char kTypePrefix[] = "type.googleapis.com";

}  // namespace

google::protobuf::util::TypeResolver& Resolver() {
  static auto* const resolver = google::protobuf::util::NewTypeResolverForDescriptorPool(
      kTypePrefix, google::protobuf::DescriptorPool::generated_pool());
  return *resolver;
}

std::string UrlOf(const google::protobuf::Descriptor& type) {
  return absl::StrCat(kTypePrefix, "/", type.full_name());
}

}  // namespace rapt
