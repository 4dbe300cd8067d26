#include "server/wire/http2/response_queue.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/descriptor.h"
#include "server/wire/socket.h"

namespace rapt {
namespace {

class ResponseQueueTest : public ::testing::Test {
 protected:
  ResponseQueueTest() {
    std::array<int, 2> ends;
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
    socket_ = std::make_unique<PlainSocket>(Descriptor(ends[0]));
    peer_ = Descriptor(ends[1]);
  }

  // Returns the bytes, which have been written.
  std::string Move(int64_t size) {
    response_.MoveTo(out_, size);
    int64_t left = size;
    EXPECT_EQ(out_.Write(*socket_, left), OutputQueue::Written::kAll);
    std::string bytes(static_cast<size_t>(size), '\0');
    EXPECT_EQ(recv(peer_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT), size);
    return bytes;
  }

  std::unique_ptr<PlainSocket> socket_;
  Descriptor peer_;
  SteadyClock clock_;
  OutputQueue out_{clock_};
  ResponseQueue response_;
};

TEST_F(ResponseQueueTest, PrefixesMessagesAndMovesThemInParts) {
  ResponseMessage message;
  message.Append("abc");
  response_.Append(std::move(message));
  response_.Append({});  // an empty message
  EXPECT_EQ(response_.bytes(), 13);
  std::string moved;
  for (const int64_t size : {2, 5, 6}) moved += Move(size);
  EXPECT_EQ(moved, std::string("\0\0\0\0\3abc\0\0\0\0\0", 13));
  EXPECT_EQ(response_.bytes(), 0);
}

TEST_F(ResponseQueueTest, KeepsAnOutputUntilItsLastByteIsWritten) {
  auto tensor = std::make_shared<std::string>(10'000, 't');
  const std::weak_ptr<std::string> output = tensor;
  ResponseMessage message;
  message.Append({{reinterpret_cast<const std::byte*>(tensor->data()), tensor->size()}, tensor});
  response_.Append(std::move(message));
  tensor.reset();
  Move(response_.bytes() - 1);
  EXPECT_FALSE(output.expired());
  EXPECT_EQ(Move(1), "t");
  EXPECT_TRUE(output.expired());
}

}  // namespace
}  // namespace rapt
