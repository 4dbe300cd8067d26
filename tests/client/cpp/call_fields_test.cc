// The client library's tables have every row of the attention library's, and `rapt attend` a flag
// for each. operator_calls_test has calls.
#include "client/cpp/call_fields.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "attention/attributes.h"
#include "attention/field_names.h"
#include "attention/roles.h"
#include "client/cli/call_flags.h"
#include "client/cli/tensor_file.h"
#include "client/cpp/codec.h"
#include "tests/support/table_values.h"

namespace rapt::client {
namespace {

using ::testing::ElementsAre;

std::string Encoded(const AttendCall& call) {
  const absl::StatusOr<RequestMessage> message = EncodeAttend(call, /*max_bytes=*/1 << 20);
  EXPECT_TRUE(message.ok()) << message.status();
  std::string bytes;
  if (!message.ok()) return bytes;
  for (const RequestMessage::Piece& piece : message->pieces()) {
    bytes += piece.bytes;
    bytes.append(reinterpret_cast<const char*>(piece.payload.data()), piece.payload.size());
  }
  return bytes;
}

// A call with every input of `problem`, each filled with a number of its own.
struct FullCall {
  InputMap<std::string> bytes;
  std::vector<int64_t> key_lengths = {2};
  AttendCall call;

  explicit FullCall(const Problem& problem = test::MostTensors()) {
    for (Role role : InputTensorsOf(problem)) {
      const RoleInfo& info = InfoOf(role);
      const DType dtype = info.dtype(problem);
      const auto dims = info.dims(problem);
      const Shape shape(dims.begin(), dims.begin() + info.rank);
      int64_t count = 1;
      for (int64_t size : shape) count *= size;
      const auto value = dtype == DType::kBool ? 1.0F : ValueOf(role);
      for (int64_t n = 0; n < count; ++n) {
        if (dtype == DType::kBool) {
          bytes[role].push_back(1);
        } else if (dtype == DType::kInt64) {
          const int64_t position = 1;
          bytes[role].append(reinterpret_cast<const char*>(&position), sizeof(position));
        } else if (dtype == DType::kInt32) {  // each number once
          const auto index = static_cast<int32_t>(n);
          bytes[role].append(reinterpret_cast<const char*>(&index), sizeof(index));
        } else {
          bytes[role].append(reinterpret_cast<const char*>(&value), sizeof(value));
        }
      }
      const CallTensor* tensor = FindCallTensor(info.native);
      if (tensor == nullptr) continue;  // the test of names fails
      const auto* data = reinterpret_cast<const std::byte*>(bytes[role].data());
      tensor->Set(call, {dtype, shape, absl::MakeConstSpan(data, bytes[role].size())});
    }
    call.key_lengths = key_lengths;
    call.block_q = problem.block_q;
    call.block_k = problem.block_k;
    call.score_function = static_cast<ScoreFunction>(problem.score_function);
    call.normalizer = static_cast<Normalizer>(problem.normalizer);
  }
  FullCall(const FullCall&) = delete;
  FullCall& operator=(const FullCall&) = delete;

  static float ValueOf(Role role) {
    return role == Role::kHeadAlpha ? 1.375F : 0.25F * (static_cast<float>(role) + 1);
  }
};

TEST(CallFieldsTest, HaveEveryRowOfTheLibrarysTables) {
  ASSERT_EQ(CallTensors().size(), kInputTensors.size());
  for (size_t n = 0; n < kInputTensors.size(); ++n) {
    EXPECT_EQ(CallTensors()[n].name, InfoOf(kInputTensors[n]).native);
  }
  ASSERT_EQ(CallOutputs().size(), kOutputs.size());
  for (size_t n = 0; n < kOutputs.size(); ++n) {
    EXPECT_EQ(CallOutputs()[n].name, InfoOf(kOutputs[n]).native);
  }
  ASSERT_EQ(BackwardTensors().size(), kBackwardInputs.size());
  for (size_t n = 0; n < kBackwardInputs.size(); ++n) {
    EXPECT_EQ(BackwardTensors()[n].name, InfoOf(kBackwardInputs[n]).native);
  }
  ASSERT_EQ(Gradients().size(), ::rapt::kGradients.size());
  for (size_t n = 0; n < Gradients().size(); ++n) {
    EXPECT_EQ(Gradients()[n].name, InfoOf(::rapt::kGradients[n]).native);
  }
  std::vector<std::string> without;
  for (const AttributeInfo& info : Attributes()) {
    if (FindCallAttribute(info.native) == nullptr) without.emplace_back(info.c);
  }
  EXPECT_THAT(without, ElementsAre("dropout_probability"));
}

// The gradients of every input of `problem` that has one, in a call of floats.
struct FullBackward {
  explicit FullBackward(const Problem& problem) : full(WithFloatMask(problem)) {
    call.call = full.call;
    call.dy = View<float>({1, 2, 2, 4}, y);
    if (full.call.normalizer == Normalizer::kSoftmax) {
      call.y = View<float>({1, 2, 2, 4}, y);
      call.lse = call.dlse = View<float>({1, 2, 2}, absl::MakeConstSpan(y).first(4));
    }
    for (const GradientField& gradient : Gradients()) {
      const CallTensor* input = FindCallTensor(InputOf(gradient));
      if (input->In(call.call) != nullptr) call.gradients.emplace_back(gradient.name);
    }
  }

  static Problem WithFloatMask(Problem problem) {
    problem.mask->dtype = ::rapt::DType::kFloat32;
    problem.wants_lse = problem.wants_present = false;
    problem.score_output.reset();
    return problem;
  }

  // "dq" is of "q", "d_mask" of "mask".
  static absl::string_view InputOf(const GradientField& gradient) {
    const absl::string_view name = gradient.name;
    return name.substr(name[1] == '_' ? 2 : 1);
  }

  const std::vector<float> y = std::vector<float>(16, 0.5F);
  FullCall full;
  BackwardCall call;
};

TEST(CallFieldsTest, EveryInputOfTheBackwardPassHasAFlagThatSetsIt) {
  const FullBackward full(test::MostTensors());
  CallFlags flags;
  CommandLine line{.usage = "test", .flags = flags.InputTable()};
  for (const std::vector<Flag>& table : {flags.GradientTable(), flags.ForwardTable()}) {
    line.flags.insert(line.flags.end(), table.begin(), table.end());
  }
  const std::string q = ::testing::TempDir() + "backward_q.npy";
  std::vector<std::string> arguments = {"--q", q, "--gradients", "dq,d_mask"};
  ArrayWriter files;
  files.Add(q, "q", {'f', 4}, full.call.call.q.shape, full.call.call.q.data);
  for (Role role : kBackwardInputs) {
    const std::string path = ::testing::TempDir() + "backward_" + InfoOf(role).flag + ".npy";
    const TensorView view = *FindBackwardTensor(kNativeNames[role])->In(full.call);
    files.Add(path, "", {'f', 4}, view.shape, view.data);
    arguments.insert(arguments.end(), {std::string("--") + InfoOf(role).flag, path});
  }
  ASSERT_TRUE(files.Write().ok());
  const absl::StatusOr<ParsedArguments> parsed = line.Parse(arguments);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const absl::StatusOr<LoadedCall> loaded = LoadCall(flags);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const BackwardCall call = loaded->backward();
  EXPECT_THAT(call.gradients, ElementsAre("dq", "d_mask"));
  for (const BackwardTensor& tensor : BackwardTensors()) {
    SCOPED_TRACE(tensor.name);
    ASSERT_NE(tensor.In(call), nullptr);
    EXPECT_EQ(tensor.In(call)->shape, tensor.In(full.call)->shape);
    EXPECT_EQ(tensor.In(call)->data, tensor.In(full.call)->data);
  }
}

TEST(CallFieldsTest, OnlyFlagsWithoutAValueHaveNoPlaceholder) {
  CallFlags flags;
  for (const Flag& flag : flags.AttributeTable()) {
    EXPECT_EQ(flag.placeholder.empty(), std::holds_alternative<bool*>(flag.target)) << flag.name;
  }
}

TEST(CallFieldsTest, EveryInputAndAttributeHasAFlagThatSetsIt) {
  Problem problem =
      test::EveryTensorWith(Role::kAlibiSlopes);  // with all tables; it is not computed
  problem.bias_table = BiasTable{};
  problem.relative_bias = RelativeBias{};
  problem.rotary_cache = RotaryCache{.rows = 9, .pairs = 2};
  problem.has_position_ids = problem.has_key_position_ids = true;
  problem.additive_weight = AdditiveWeight{};
  problem.head_alpha = ::rapt::DType::kFloat32;
  FullCall full(problem);
  CallFlags flags;
  CommandLine line{.usage = "test", .flags = flags.InputTable()};
  for (const Flag& flag : flags.AttributeTable()) line.flags.push_back(flag);
  std::vector<std::string> arguments;
  ArrayWriter files;
  for (Role role : kInputs) {
    const std::string name(kNativeNames[role]);
    const std::string path = ::testing::TempDir() + "call_fields_" + name + ".npy";
    if (role == Role::kKeyLengths) {
      files.Add(path, name, {'i', 8}, {1},
                absl::MakeConstSpan(reinterpret_cast<const std::byte*>(full.key_lengths.data()),
                                    sizeof(int64_t)));
    } else {
      const TensorView view = *FindCallTensor(name)->In(full.call);
      files.Add(path, name, NpyTypeOf(view.dtype), view.shape, view.data);
    }
    std::string flag = "--" + (InfoOf(role).flag == nullptr ? name : InfoOf(role).flag);
    for (char& c : flag) c = c == '_' ? '-' : c;
    arguments.insert(arguments.end(), {flag, path});
  }
  ASSERT_TRUE(files.Write().ok());
  std::vector<std::string> without;
  for (const AttributeInfo& info : Attributes()) {
    if (info.flag == nullptr) {
      without.emplace_back(info.c);
      continue;
    }
    const std::string value = test::UnusualText(info);
    arguments.push_back(std::string("--") + info.flag + (value.empty() ? "" : "=" + value));
    FindCallAttribute(info.native)->Visit(full.call, [&](auto& v) { test::SetUnusual(info, v); });
  }
  // These have flags of another form.
  EXPECT_THAT(without, ElementsAre("query_heads", "kv_heads", "left_window", "right_window",
                                   "dropout_probability", "rotary_keys"));
  const absl::StatusOr<ParsedArguments> parsed = line.Parse(arguments);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const absl::StatusOr<LoadedCall> loaded = LoadCall(flags);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(Encoded(loaded->call()), Encoded(full.call));
}

}  // namespace
}  // namespace rapt::client
