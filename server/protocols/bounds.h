// The table of the integers that a request may have, and their bounds.
#ifndef RAPT_SERVER_PROTOCOLS_BOUNDS_H_
#define RAPT_SERVER_PROTOCOLS_BOUNDS_H_

#include <google/protobuf/message.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/range.h"

namespace rapt {

enum class BoundCheck : uint8_t {
  kByTable,    // ParseRequest() refuses other values
  kByDecoder,  // what reads the field does, because the message depends on more than the number
};

struct FieldBounds {
  absl::string_view field;  // the full name
  IntegerRange range;       // IntegerRange(): all values of the field's type
  BoundCheck check = BoundCheck::kByTable;
};

// A row for each integer field of the requests of all services.
absl::Span<const FieldBounds> IntegerBounds();

// Checks the fields that the table's rows name. InvalidArgument names the field, the value and the
// range.
absl::Status CheckIntegers(absl::Span<const FieldBounds> table,
                           const google::protobuf::Message& message);

// Parses a request, perhaps without its payloads, and checks it by IntegerBounds().
absl::Status ParseRequest(const std::string& bytes, google::protobuf::Message& request);

}  // namespace rapt

#endif  // RAPT_SERVER_PROTOCOLS_BOUNDS_H_
