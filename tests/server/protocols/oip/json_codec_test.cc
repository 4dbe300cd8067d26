#include "server/protocols/oip/json_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/buffer_pool.h"
#include "base/byte_slice.h"
#include "tests/support/fake_clock.h"

namespace rapt::oip {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kJsonBytes = 1 << 20;

class JsonCodecTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::shared_ptr<JsonInfer>> Read(const std::string& json) {
    const auto size = static_cast<int64_t>(json.size());
    slice_ = {reinterpret_cast<const std::byte*>(json.data()), 0, size};
    return ReadJsonInfer({{{&slice_, 1}, 0}, size}, size, pool_);
  }

  test::FakeClock clock_;
  BufferPool pool_{int64_t{1} << 40, clock_};
  ByteSlice slice_ = {};
};

// Released buffers stay in the pool, which tells how many bytes were taken.
TEST_F(JsonCodecTest, ShapesWithoutNumbersTakeNoMoreMemoryThanTheJsonAllows) {
  for (const bool is_shape_first : {true, false}) {
    const std::string shape =
        absl::StrCat(R"("shape":[)", kJsonBytes / 2, R"(],"datatype":"FP64")");
    std::string json = R"({"inputs":[)";
    for (int n = 0; n < 64; ++n) {
      absl::StrAppend(&json, n > 0 ? "," : "", "{\"name\":\"", n, "\",",
                      is_shape_first ? shape + R"(,"data":[])" : R"("data":[],)" + shape, "}");
    }
    json += "]}";
    json.append(static_cast<size_t>(kJsonBytes) - json.size(), ' ');
    EXPECT_THAT(Read(json).status().message(), HasSubstr("has 0 values in data; its shape"));
    EXPECT_GE(pool_.idle_bytes(), kJsonBytes * kTypedBytesPerJsonByte);
    EXPECT_LE(pool_.idle_bytes(), 2 * kJsonBytes * kTypedBytesPerJsonByte);
  }
}

TEST_F(JsonCodecTest, NumbersOfTwoBytesHaveTheirPlaces) {
  std::string numbers = "1";
  for (int n = 1; n < 1000; ++n) numbers += ",1";
  const std::string input =
      absl::StrCat(R"({"datatype":"FP64","shape":[1000],"data":[)", numbers, "]}");
  const auto fields = Read(absl::StrCat(R"({"inputs":[)", input, ",", input, "]}"));
  ASSERT_TRUE(fields.ok()) << fields.status();
  for (const PooledBuffer& tensor : (*fields)->numbers) EXPECT_EQ(tensor.size(), 8000);
}

TEST_F(JsonCodecTest, AFieldOfAnInputComesOnce) {
  for (const char* field : {R"("shape":[1])", R"("datatype":"FP32")", R"("data":[1])"}) {
    const std::string json = absl::StrCat(
        R"({"inputs":[{"name":"Q","shape":[1],"datatype":"FP32","data":[1],)", field, "}]}");
    EXPECT_THAT(Read(json).status().message(), HasSubstr("twice")) << json;
  }
}

}  // namespace
}  // namespace rapt::oip
