// Every operator through the C++ client and the command line, by the table of cases.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "attention/attributes.h"
#include "client/cli/attention_caller.h"
#include "client/cli/tensor_file.h"
#include "client/cpp/call_fields.h"
#include "rapt/client.h"
#include "tests/support/operator_cases.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

absl::Span<const std::byte> BytesOf(const std::string& bytes) {
  return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
}

std::string TextOf(absl::Span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Calls of models by their names.
class Infer final : public CaseInterface {
 public:
  explicit Infer(const ServerProcess& server)
      : client_(client::Client::Connect(server.grpc_address()).value()) {}

  absl::StatusOr<CaseTensors> Call(const OperatorCase& c, const CaseTensors& inputs) override {
    client::ModelCall call{.model = c.op, .outputs = c.outputs()};
    for (const auto& [name, tensor] : inputs) {
      call.inputs.emplace_back(
          name,
          client::TensorView{tensor.dtype, client::Shape(tensor.shape.begin(), tensor.shape.end()),
                             BytesOf(tensor.bytes)});
    }
    for (const auto& [name, text] : c.attributes) {
      call.parameters[name] = ValueOf(*FindRow(c.schema().attributes, name), text);
    }
    const absl::StatusOr<client::ModelResult> result = client_->Infer(call);
    if (!result.ok()) return result.status();
    CaseTensors outputs;
    for (const auto& [name, tensor] : result->outputs) {
      outputs[name] = {tensor.dtype(), Shape(tensor.shape().begin(), tensor.shape().end()),
                       TextOf(tensor.bytes())};
    }
    return outputs;
  }

 private:
  static client::ModelCall::Value ValueOf(const AttributeSchema& attribute,
                                          const std::string& text) {
    const absl::StatusOr<AttributeValue> value = ReadValue(attribute, GivenValue(text));
    if (!value.ok()) return text;
    if (std::holds_alternative<DType>(*value)) {
      return int64_t{InfoOf(std::get<DType>(*value)).onnx};
    }
    if (std::holds_alternative<uint8_t>(*value)) return text;
    if (std::holds_alternative<bool>(*value)) return std::get<bool>(*value);
    if (std::holds_alternative<int64_t>(*value)) return std::get<int64_t>(*value);
    if (std::holds_alternative<uint64_t>(*value)) return std::get<uint64_t>(*value);
    return std::get<double>(*value);
  }

  const std::unique_ptr<client::Client> client_;
};

// Attention as a struct, by a server or in this process.
class Typed final : public CaseInterface {
 public:
  explicit Typed(std::unique_ptr<AttentionCaller> caller) : caller_(std::move(caller)) {}

  bool Carries(const OperatorCase& c) override { return c.schema().method.empty(); }

  absl::StatusOr<CaseTensors> Call(const OperatorCase& c, const CaseTensors& inputs) override {
    client::BackwardCall backward;
    client::AttendCall& call = backward.call;
    call.alignment = Alignment::kOnnx;  // the table's default
    for (const auto& [name, tensor] : inputs) SetTensor(c, name, tensor, backward);
    for (const auto& [name, text] : c.attributes) SetAttribute(c, name, text, call);
    if (c.op == "attention_backward") {
      for (const std::string& name : c.wants) backward.gradients.push_back(OutputOf(c, name));
      const absl::StatusOr<client::BackwardResult> result = caller_->AttendBackward(backward);
      if (!result.ok()) return result.status();
      return TensorsOf(c, [&](const std::string& name) {
        const std::optional<client::Tensor>& tensor = (*result).*client::FindGradient(name)->member;
        return tensor ? &*tensor : nullptr;
      });
    }
    for (const std::string& name : c.wants) {
      if (name == "lse") call.wants_lse = true;
      if (absl::StartsWith(name, "present_")) call.wants_present = true;
    }
    const absl::StatusOr<client::AttendResult> result = caller_->Attend(call);
    if (!result.ok()) return result.status();
    return TensorsOf(
        c, [&](const std::string& name) { return client::FindCallOutput(name)->In(*result); });
  }

  std::string NameOf(const OperatorCase& c, const std::string& name) override {
    if (const TensorSchema* input = FindRow(c.schema().inputs, name)) return NativeOf(*input);
    for (const AttributeInfo& info : Attributes()) {
      if (info.onnx == name) return std::string(info.native);
    }
    return name;
  }
  bool CanExpress(const OperatorCase&, const AttributeSchema& attribute) override {
    return std::holds_alternative<int64_t>(attribute.kind)
               ? attribute.name != "qk_matmul_output_mode"
               : std::holds_alternative<double>(attribute.kind);
  }

 private:
  static std::string NativeOf(const TensorSchema& tensor) {
    return std::string(rapt::InfoOf(tensor.slot.role()).native);
  }
  static std::string OutputOf(const OperatorCase& c, const std::string& name) {
    return NativeOf(*FindRow(c.schema().outputs, name));
  }

  static void SetTensor(const OperatorCase& c, const std::string& name, const CaseTensor& tensor,
                        client::BackwardCall& call) {
    const std::string native = NativeOf(*FindRow(c.schema().inputs, name));
    const client::TensorView view = {tensor.dtype,
                                     client::Shape(tensor.shape.begin(), tensor.shape.end()),
                                     BytesOf(tensor.bytes)};
    if (native == "key_lengths") {
      const auto* lengths = reinterpret_cast<const int64_t*>(tensor.bytes.data());
      call.call.key_lengths = {lengths, tensor.bytes.size() / sizeof(int64_t)};
    } else if (const client::CallTensor* field = client::FindCallTensor(native)) {
      field->Set(call.call, view);
    } else {
      client::FindBackwardTensor(native)->Set(call, view);
    }
  }

  void SetAttribute(const OperatorCase& c, const std::string& name, const std::string& text,
                    client::AttendCall& call) {
    const AttributeValue value =
        ReadValue(*FindRow(c.schema().attributes, name), GivenValue(text)).value();
    if (name == "dropout_probability") {
      call.dropout =
          client::Dropout{std::get<double>(value), call.dropout ? call.dropout->seed : 0};
    } else if (name == "dropout_seed") {
      call.dropout->seed = std::get<uint64_t>(value);
    } else if (name == "softmax_precision") {
      call.softmax_in_fp64 = std::get<DType>(value) == DType::kFloat64;
    } else if (name == "qk_matmul_output_mode") {
      call.score_output = static_cast<ScoreOutput>(std::get<int64_t>(value));
    } else if (name == "layout") {
      call.layout = static_cast<Layout>(std::get<uint8_t>(value));
    } else if (name == "alignment") {
      call.alignment = static_cast<Alignment>(std::get<uint8_t>(value));
    } else {
      const auto set = [&](auto& member) {
        std::visit(
            [&](auto given) {
              if constexpr (requires { member = static_cast<ValueOf<decltype(member)>>(given); }) {
                member = static_cast<ValueOf<decltype(member)>>(given);
              }
            },
            value);
      };
      client::FindCallAttribute(NameOf(c, name))->Visit(call, set);
    }
  }

  // The type of a member that may be optional.
  template <typename T>
  static T WithoutOptional(const std::optional<T>&);
  template <typename T>
  static T WithoutOptional(const T&);
  template <typename Member>
  using ValueOf = decltype(WithoutOptional(std::declval<Member>()));

  template <typename Find>
  static CaseTensors TensorsOf(const OperatorCase& c, Find find) {
    CaseTensors outputs;
    for (const TensorSchema& output : c.schema().outputs) {
      const client::Tensor* const tensor = find(NativeOf(output));
      if (tensor == nullptr) continue;
      outputs[std::string(output.name)] = {tensor->dtype(),
                                           Shape(tensor->shape().begin(), tensor->shape().end()),
                                           TextOf(tensor->bytes())};
    }
    return outputs;
  }

  const std::unique_ptr<AttentionCaller> caller_;
};

// `rapt run` with arrays in files.
class RaptRun final : public CaseInterface {
 public:
  explicit RaptRun(std::string where) : where_(std::move(where)) {}

  absl::StatusOr<CaseTensors> Call(const OperatorCase& c, const CaseTensors& inputs) override {
    std::vector<std::string> command = {RAPT_BINARY, "run", c.op, "--json", "--dtype=bf16", where_};
    for (const auto& [name, tensor] : inputs) {
      const std::string file = FileOf("in", name);
      EXPECT_TRUE(
          WriteFile(file, FormatNpy(NpyTypeOf(tensor.dtype), tensor.shape, BytesOf(tensor.bytes)))
              .ok());
      command.push_back(absl::StrCat(FlagOf(name), "=", file));
    }
    for (const auto& [name, text] : c.attributes) {
      const AttributeSchema& attribute = *FindRow(c.schema().attributes, name);
      const bool is_switch = attribute.kind == AttributeValue(false) && !attribute.takes_value;
      command.push_back(is_switch ? FlagOf(name) : absl::StrCat(FlagOf(name), "=", text));
    }
    std::vector<std::string> names;
    const absl::StatusOr<BoundCall> bound = Bind(c);
    for (const TensorSchema& output : c.schema().outputs) {
      if (bound.ok() ? bound->outputs()[output.slot].has_value() : names.empty()) {
        names.emplace_back(output.name);
      }
    }
    for (const std::string& name : names) {
      if (name == "relative_error") continue;  // in the report
      const bool is_first = name == c.schema().outputs[0].name;
      command.push_back(
          absl::StrCat(is_first ? "--output" : FlagOf(name), "=", FileOf("out", name)));
    }
    ChildProcess rapt(command);
    std::string report;
    for (std::string line = rapt.ReadLine(); !line.empty(); line = rapt.ReadLine()) report += line;
    if (rapt.Wait() != 0) return absl::InvalidArgumentError(rapt.Errors());
    CaseTensors outputs;
    for (const std::string& name : names) {
      if (name == "relative_error") {
        const std::pair<std::string, std::string> parts =
            absl::StrSplit(report, "\"relative_error\":");
        const float error = std::stof(parts.second);
        outputs[name] = {DType::kFloat32, {1}, std::string(4, '\0')};
        std::memcpy(outputs[name].bytes.data(), &error, sizeof(error));
      } else {
        outputs[name] = Read(FileOf("out", name));
      }
    }
    return outputs;
  }

  // Of what is no value at all, the flag is named.
  std::string NameOf(const OperatorCase&, const std::string& name) override {
    return absl::StrCat("(", name, "|", FlagOf(name), ")");
  }
  // A flag alone is true.
  bool CanExpress(const OperatorCase&, const AttributeSchema& attribute) override {
    return attribute.kind != AttributeValue(false) || attribute.takes_value;
  }

 private:
  static std::string FlagOf(absl::string_view name) {
    return "--" + absl::StrReplaceAll(absl::AsciiStrToLower(name), {{"_", "-"}});
  }
  static std::string FileOf(absl::string_view folder, absl::string_view name) {
    return absl::StrCat(::testing::TempDir(), "operator_calls_", folder, "_", name, ".npy");
  }
  static CaseTensor Read(const std::string& file) {
    const NpyArray array = LoadArray(file, "").value();
    const bool is_float = array.type.kind == 'f' || array.type.kind == 'V';
    const DType dtype = is_float ? FloatTypeOf(array, file, "bf16").value() : DType::kInt32;
    return {dtype, array.shape, TextOf(array.bytes())};
  }

  const std::string where_;
};

class OperatorCallsTest : public ::testing::Test {
 protected:
  const ServerProcess server_{{"--threads=2"}};
};

TEST_F(OperatorCallsTest, TheClientReturnsTheBitsOfTheOperator) {
  Infer infer(server_);
  ExpectReturnsTheBitsOfTheOperator(infer);
}

TEST_F(OperatorCallsTest, TheClientNamesWhatIsRefused) {
  Infer infer(server_);
  ExpectNamesWhatIsRefused(infer);
}

TEST_F(OperatorCallsTest, AStructOfAttentionReturnsTheBitsOfTheOperator) {
  Typed remote(NewRemoteCaller(client::Client::Connect(server_.grpc_address()).value()));
  ExpectReturnsTheBitsOfTheOperator(remote);
  ExpectNamesWhatIsRefused(remote);
}

TEST(LocalOperatorCallsTest, AStructOfAttentionReturnsTheBitsOfTheOperator) {
  Typed local(NewLocalCaller());
  ExpectReturnsTheBitsOfTheOperator(local);
  ExpectNamesWhatIsRefused(local);
}

TEST_F(OperatorCallsTest, TheCommandLineReturnsTheBitsOfTheServer) {
  RaptRun run("--address=" + server_.grpc_address());
  ExpectReturnsTheBitsOfTheOperator(run);
}

TEST(LocalOperatorCallsTest, TheCommandLineReturnsTheBitsOfTheOperator) {
  RaptRun run("--local");
  ExpectReturnsTheBitsOfTheOperator(run);
}

// As with a server: the command line checks the call before.
TEST(LocalOperatorCallsTest, TheCommandLineNamesWhatIsRefused) {
  RaptRun run("--local");
  ExpectNamesWhatIsRefused(run);
}

}  // namespace
}  // namespace rapt::test
