#include "server/wire/http/body_framing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>

namespace rapt::http {
namespace {

// Returns the data of a body that arrives in parts of `step` bytes; nullopt if it is malformed or
// incomplete. `rest` gets what follows it.
std::optional<std::string> DataOf(BodyFraming framing, absl::string_view bytes, size_t step,
                                  std::string* rest = nullptr) {
  std::string data;
  while (true) {
    absl::string_view part = bytes.substr(0, step);
    const size_t offered = part.size();
    const BodyFraming::Next next = framing.Advance(part);
    bytes.remove_prefix(offered - part.size());
    if (next == BodyFraming::Next::kMalformed) return std::nullopt;
    if (next == BodyFraming::Next::kEnd) break;
    if (next == BodyFraming::Next::kData) {
      const size_t count = std::min<uint64_t>(std::min(step, bytes.size()), framing.data_left());
      data.append(bytes.data(), count);
      bytes.remove_prefix(count);
      framing.TakeData(count);
    }
    if (bytes.empty() && !framing.is_complete()) return std::nullopt;
  }
  EXPECT_TRUE(framing.is_complete());
  if (rest != nullptr) *rest = std::string(bytes);
  return data;
}

TEST(BodyFramingTest, ALengthSaysWhereTheBodyEnds) {
  for (const size_t step : {1, 3, 100}) {
    std::string rest;
    EXPECT_EQ(DataOf(BodyFraming::OfLength(5), "12345GET", step, &rest), "12345");
    EXPECT_EQ(rest, "GET");
  }
  EXPECT_EQ(DataOf(BodyFraming::OfLength(0), "GET", 3), "");
}

TEST(BodyFramingTest, ChunksMayBeOfAnySizeAndHaveExtensionsAndTrailers) {
  const std::string bytes =
      "3\r\nabc\r\n1;name=\"value\"\r\nd\r\n00A \r\n0123456789\r\n0\r\nx: y\r\nz: \r\n\r\nGET";
  for (const size_t step : {1, 2, 7, 1000}) {
    std::string rest;
    EXPECT_EQ(DataOf(BodyFraming::Chunked(), bytes, step, &rest), "abcd0123456789") << step;
    EXPECT_EQ(rest, "GET");
  }
  EXPECT_EQ(DataOf(BodyFraming::Chunked(), "0\r\n\r\n", 1), "");
}

TEST(BodyFramingTest, MalformedChunksAreNoBody) {
  const std::string long_line(BodyFraming::kMaxChunkLine, '0');
  for (const std::string& bytes :
       {std::string("1\r\na\r\n0\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        std::string("0\r\nx\r\n\r\n"),
        std::string("0\r\n: x\r\n\r\n"),
        std::string("0\r\n x: y\r\n\r\n"),
        std::string("0\r\nx : y\r\n\r\n"),
        std::string("3\nabc\r\n0\r\n\r\n"),
        std::string("3\r\nabcd\r\n0\r\n\r\n"),
        std::string("3\r\nabc\n0\r\n\r\n"),
        std::string("\r\n"),
        std::string("-1\r\n"),
        std::string("0x3\r\nabc\r\n0\r\n\r\n"),
        std::string("3 3\r\nabc\r\n0\r\n\r\n"),
        std::string("g\r\n"),
        std::string("ffffffffffffffff\r\n"),
        std::string("3\r\nabc\r\n0\r\n\n"),
        std::string("3;\rx\r\nabc\r\n0\r\n\r\n"),
        std::string("3\r\r\nabc\r\n0\r\n\r\n"),
        std::string("0\r\nx\ry: z\r\n\r\n"),
        long_line + "1\r\nx\r\n0\r\n\r\n",
        "0\r\n" + std::string(BodyFraming::kMaxTrailers, 'x') + "\r\n\r\n"}) {
    for (const size_t step : {1, 5, 20000}) {
      EXPECT_EQ(DataOf(BodyFraming::Chunked(), bytes, step), std::nullopt) << bytes;
    }
  }
}

TEST(BodyFramingTest, TrailersAreLimitedTogether) {
  std::string trailers;
  while (trailers.size() <= BodyFraming::kMaxTrailers) trailers += "name: value\r\n";
  EXPECT_EQ(DataOf(BodyFraming::Chunked(), "0\r\n" + trailers + "\r\n", 100), std::nullopt);
}

}  // namespace
}  // namespace rapt::http
