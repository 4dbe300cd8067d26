#include "server/wire/http2/frame_reader.h"

#include <gtest/gtest.h>
#include <nghttp2/nghttp2.h>

#include <string>
#include <vector>

#include "tests/support/raw_http2.h"

namespace rapt {
namespace {

using test::Frame;

// Feeds the bytes in pieces of this size to a reader that drops resets.
struct Reading {
  Reading(const std::string& bytes, size_t piece) {
    FrameReader reader;
    for (size_t at = 0; at < bytes.size(); at += piece) {
      const std::string part = bytes.substr(at, piece);
      const auto* const begin = reinterpret_cast<const uint8_t*>(part.data());
      for (const auto kept : reader.Read({begin, part.size()}, [this](const FrameHead& head) {
             heads.push_back(head);
             return head.type != NGHTTP2_RST_STREAM;
           })) {
        passed.append(kept.begin(), kept.end());
      }
    }
    payload_left = reader.payload_left();
  }

  std::vector<FrameHead> heads;
  std::string passed;
  int64_t payload_left = 0;
};

TEST(FrameReaderTest, DropsFramesAndPassesOnTheOthersInPiecesOfAnySize) {
  const std::string preface = NGHTTP2_CLIENT_MAGIC;
  const std::string data = Frame(NGHTTP2_DATA, NGHTTP2_FLAG_END_STREAM, 5, std::string(300, 'x'));
  const std::string ping = Frame(NGHTTP2_PING, 0, 0, "12345678");
  const std::string settings = Frame(NGHTTP2_SETTINGS, 0, 0, "");
  const std::string reset = Frame(NGHTTP2_RST_STREAM, 0, 0x7FFFFFFF, test::BigEndian(8));
  const std::string bytes =
      preface + settings + reset + reset + data + reset + ping + data + settings + reset;
  for (size_t piece = 1; piece <= bytes.size(); ++piece) {
    const Reading reading(bytes, piece);
    EXPECT_EQ(reading.passed, preface + settings + data + ping + data + settings) << piece;
    ASSERT_EQ(reading.heads.size(), 9u) << piece;
    EXPECT_EQ(reading.heads[1].stream, 0x7FFFFFFFu);
    EXPECT_EQ(reading.heads[3].type, NGHTTP2_DATA);
    EXPECT_EQ(reading.heads[3].flags, NGHTTP2_FLAG_END_STREAM);
    EXPECT_EQ(reading.heads[3].stream, 5u);
    EXPECT_EQ(reading.heads[3].length, 300);
  }
}

TEST(FrameReaderTest, CountsThePayloadThatIsStillToCome) {
  const std::string bytes = NGHTTP2_CLIENT_MAGIC + Frame(NGHTTP2_DATA, 0, 1, std::string(9, 'x'));
  EXPECT_EQ(Reading(bytes.substr(0, 20), 20).payload_left, 4);
  EXPECT_EQ(Reading(bytes.substr(0, 30), 7).payload_left, 0);
  EXPECT_EQ(Reading(bytes.substr(0, 35), 35).payload_left, 7);
  EXPECT_EQ(Reading(bytes, 11).payload_left, 0);
}

// Reads without a dropped frame or a divided head need no second piece.
TEST(FrameReaderTest, WholeFramesAreOnePiece) {
  const std::string ping = Frame(NGHTTP2_PING, 0, 0, "12345678");
  const std::string bytes = NGHTTP2_CLIENT_MAGIC + ping + ping + ping;
  FrameReader reader;
  const auto pieces = reader.Read({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()},
                                  [](const FrameHead&) { return true; });
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(static_cast<const void*>(pieces[0].data()), bytes.data());
  EXPECT_EQ(pieces[0].size(), bytes.size());
}

}  // namespace
}  // namespace rapt
