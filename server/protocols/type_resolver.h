// The types of this program's messages, for Protocol Buffers' conversion from and to JSON.
#ifndef RAPT_SERVER_PROTOCOLS_TYPE_RESOLVER_H_
#define RAPT_SERVER_PROTOCOLS_TYPE_RESOLVER_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/util/type_resolver.h>

#include <string>

namespace rapt {

// Thread-safe.
google::protobuf::util::TypeResolver& Resolver();

// Returns the name of a type in Resolver().
std::string UrlOf(const google::protobuf::Descriptor& type);

}  // namespace rapt

#endif  // RAPT_SERVER_PROTOCOLS_TYPE_RESOLVER_H_
