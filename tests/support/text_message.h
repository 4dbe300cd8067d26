// Protocol messages and tensors written as text.
#ifndef RAPT_TESTS_SUPPORT_TEXT_MESSAGE_H_
#define RAPT_TESTS_SUPPORT_TEXT_MESSAGE_H_

#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace rapt::test {

template <typename Message>
Message Parse(const std::string& text) {
  Message message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message)) << text;
  return message;
}

// The data of a tensor, which a message in text shows as it is.
inline absl::Span<const std::byte> Bytes(absl::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_TEXT_MESSAGE_H_
