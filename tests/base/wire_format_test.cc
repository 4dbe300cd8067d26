// Compares wire_format with generated code: both accept the same messages and read the same
// content.
#include "base/wire_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "proto/inference/grpc_service.pb.h"
#include "proto/rapt/v1/attention.pb.h"

namespace rapt::wire {
namespace {

using ::inference::ModelInferRequest;
using ::rapt::v1::AttendRequest;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr PayloadField kInferFields[] = {{7, nullptr}};
constexpr MessageSchema kInferSchema = {kInferFields};
constexpr PayloadField kTensorFields[] = {{3, nullptr}};
constexpr MessageSchema kTensorSchema = {kTensorFields};
constexpr PayloadField kAttendFields[] = {{1, &kTensorSchema}, {2, &kTensorSchema},
                                          {3, &kTensorSchema}, {4, &kTensorSchema},
                                          {5, &kTensorSchema}, {6, &kTensorSchema}};
constexpr MessageSchema kAttendSchema = {kAttendFields};

// A message in slices of random sizes.
class Sliced {
 public:
  Sliced(const std::string& bytes, std::mt19937& rng, int largest) : bytes_(bytes) {
    int64_t position = 0;
    while (position < static_cast<int64_t>(bytes_.size())) {
      const int64_t size = std::min<int64_t>(1 + rng() % largest, bytes_.size() - position);
      const auto* data = reinterpret_cast<const std::byte*>(bytes_.data() + position);
      slices_.push_back({data, position, position + size});
      position += size;
    }
    sliced_.slices = slices_;
  }

  absl::StatusOr<SplitMessage> SplitBy(const MessageSchema& schema) const {
    return Split(sliced_, static_cast<int64_t>(bytes_.size()), schema);
  }

  std::string Payload(const wire::Payload& payload) const {
    return bytes_.substr(payload.begin, payload.size);
  }

 private:
  const std::string bytes_;
  std::vector<ByteSlice> slices_;
  SlicedBytes sliced_;
};

// Puts a payload back into its field.
void Restore(const wire::Payload& payload, const std::string& bytes, ModelInferRequest& message) {
  EXPECT_THAT(payload.path, ElementsAre(7));
  message.add_raw_input_contents(bytes);
}

void Restore(const wire::Payload& payload, const std::string& bytes, AttendRequest& message) {
  ASSERT_EQ(payload.path.size(), 2u);
  EXPECT_EQ(payload.path[1], 3);
  rapt::v1::Tensor* (AttendRequest::*const tensors[])() = {
      &AttendRequest::mutable_q,        &AttendRequest::mutable_k,
      &AttendRequest::mutable_v,        &AttendRequest::mutable_mask,
      &AttendRequest::mutable_past_key, &AttendRequest::mutable_past_value};
  (message.*tensors[payload.path[0] - 1])()->set_data(bytes);
}

// Returns whether generated code accepts the bytes; if so, both must give the same message.
template <typename Message>
bool ExpectAgreement(const std::string& bytes, const MessageSchema& schema, std::mt19937& rng) {
  const Sliced sliced(bytes, rng, 1 + rng() % 40);
  const absl::StatusOr<SplitMessage> split = sliced.SplitBy(schema);
  Message generated;
  const bool accepted = generated.ParseFromString(bytes);
  Message ours;
  const bool ours_accepted = split.ok() && ours.ParseFromString(split->rest);
  EXPECT_EQ(ours_accepted, accepted) << split.status();
  if (!accepted || !ours_accepted) return accepted;
  for (const wire::Payload& payload : split->payloads) {
    Restore(payload, sliced.Payload(payload), ours);
  }
  EXPECT_EQ(ours.SerializeAsString(), generated.SerializeAsString());
  return true;
}

std::string RandomBytes(std::mt19937& rng, int most) {
  std::string bytes(rng() % (most + 1), '\0');
  for (char& byte : bytes) byte = static_cast<char>(rng());
  return bytes;
}

ModelInferRequest RandomInfer(std::mt19937& rng) {
  ModelInferRequest message;
  message.set_model_name("attention");
  message.set_id(std::to_string(rng() % 1000));
  for (int n = rng() % 4; n > 0; --n) {
    auto* input = message.add_inputs();
    input->set_name(std::string(1, "QKV"[n % 3]));
    for (int axis = 0; axis < 4; ++axis) input->add_shape(rng() % 300);
    if (rng() % 2) input->mutable_contents()->add_fp32_contents(1.5f);
    message.add_raw_input_contents(RandomBytes(rng, 60));
  }
  (*message.mutable_parameters())["scale"].set_double_param(0.5);
  return message;
}

AttendRequest RandomAttend(std::mt19937& rng) {
  AttendRequest message;
  for (auto* tensor : {message.mutable_q(), message.mutable_k(), message.mutable_v()}) {
    tensor->set_dtype(rapt::v1::FP32);
    for (int axis = 0; axis < 4; ++axis) tensor->add_shape(rng() % 300);
    tensor->set_data(RandomBytes(rng, 60));
  }
  message.add_key_lengths(rng());
  message.mutable_attention()->set_scale(0.25);
  return message;
}

// Unknown fields: one of each wire type, and nested groups.
std::string UnknownFields() {
  const std::string group = std::string("\xA3\x06", 2) + "\x0B\x10\x07\x0C" + "\xA4\x06";
  return std::string("\x98\x06\x96\x01", 4) + "\xA1\x06" + "12345678" + "\xAA\x06\x03" + "abc" +
         group + "\xB5\x06" + "1234";
}

TEST(WireFormatTest, LocatesPayloadsWithoutCopyingThem) {
  AttendRequest message;
  message.mutable_k()->set_data(std::string(500, 'k'));
  message.mutable_k()->set_dtype(rapt::v1::BF16);
  std::mt19937 rng(1);
  const Sliced sliced(message.SerializeAsString(), rng, 64);
  const absl::StatusOr<SplitMessage> split = sliced.SplitBy(kAttendSchema);
  ASSERT_TRUE(split.ok()) << split.status();
  ASSERT_EQ(split->payloads.size(), 1u);
  EXPECT_THAT(split->payloads[0].path, ElementsAre(2, 3));
  EXPECT_EQ(sliced.Payload(split->payloads[0]), std::string(500, 'k'));
  EXPECT_LT(split->rest.size(), 10u);
}

TEST(WireFormatTest, AgreesWithGeneratedCodeOnWholeMessages) {
  std::mt19937 rng(2);
  for (int n = 0; n < 300; ++n) {
    SCOPED_TRACE(n);
    const std::string infer = RandomInfer(rng).SerializeAsString();
    const std::string attend = RandomAttend(rng).SerializeAsString();
    EXPECT_TRUE(ExpectAgreement<ModelInferRequest>(infer, kInferSchema, rng));
    EXPECT_TRUE(ExpectAgreement<AttendRequest>(attend, kAttendSchema, rng));
    // Unknown fields before and after, fields twice and in another order.
    const std::string unknown = UnknownFields();
    EXPECT_TRUE(ExpectAgreement<ModelInferRequest>(unknown + infer + infer, kInferSchema, rng));
    EXPECT_TRUE(ExpectAgreement<AttendRequest>(
        attend + unknown + RandomAttend(rng).SerializeAsString(), kAttendSchema, rng));
  }
}

TEST(WireFormatTest, AgreesWithGeneratedCodeOnBrokenMessages) {
  int rejected = 0;
  for (uint32_t seed = 0; seed < 20000; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 rng(seed);
    std::string bytes =
        seed % 2 ? RandomInfer(rng).SerializeAsString() : RandomAttend(rng).SerializeAsString();
    if (rng() % 4 == 0) bytes += UnknownFields();
    for (int n = 1 + rng() % 3; n > 0 && !bytes.empty(); --n) {
      switch (rng() % 3) {
        case 0:
          bytes[rng() % bytes.size()] = static_cast<char>(rng());
          break;
        case 1:
          bytes.resize(rng() % bytes.size());
          break;
        default:
          bytes.insert(rng() % bytes.size(), 1, static_cast<char>(rng()));
      }
    }
    const bool accepted = seed % 2 ? ExpectAgreement<ModelInferRequest>(bytes, kInferSchema, rng)
                                   : ExpectAgreement<AttendRequest>(bytes, kAttendSchema, rng);
    rejected += !accepted;
    if (HasFailure()) break;
  }
  EXPECT_GT(rejected, 1000);  // Otherwise the test is vacuous.
}

TEST(WireFormatTest, RejectsGroupsWithoutEnd) {
  std::mt19937 rng(3);
  EXPECT_FALSE(ExpectAgreement<ModelInferRequest>(std::string(500, '\x0B'), kInferSchema, rng));
}

// Bytes beyond the limit are not parsed; otherwise a message of groups would take seconds.
TEST(WireFormatTest, StopsWalkingGroupsAtTheLimit) {
  std::mt19937 rng(4);
  const std::string start = "\x7B", end = "\x7C";  // of the unknown field 15
  std::string fields;
  while (fields.size() < 60'000) fields += std::string("\x08\x00", 2);
  const auto error = [&rng](const std::string& bytes) {
    const auto status = Sliced(bytes, rng, 1000).SplitBy(kAttendSchema).status();
    return std::string(status.message());
  };
  EXPECT_EQ(error(start + fields + end), "");
  EXPECT_EQ(error(start + start + fields + end + end), "");
  const std::string broken = "\x0F";
  EXPECT_THAT(error(start + fields + broken), HasSubstr("near byte 60002"));
  EXPECT_THAT(error(start + fields + fields + broken), HasSubstr("the allowed 65536 bytes"));
  EXPECT_THAT(error(start + start + fields + fields + broken), HasSubstr("65536 bytes"));
}

TEST(WireFormatTest, WritesHeadersAsGeneratedCodeDoes) {
  for (int64_t size : {0, 1, 127, 128, 16383, 16384, 100000}) {
    rapt::v1::Tensor message;
    message.set_data(std::string(size, 'x'));
    std::string header;
    AppendFieldHeader(3, size, header);
    EXPECT_EQ(FieldHeaderSize(3, size), static_cast<int64_t>(header.size()));
    if (size > 0) {
      EXPECT_EQ(message.SerializeAsString(), header + message.data());
    }
  }
}

}  // namespace
}  // namespace rapt::wire
