// Every operator through the C++ client and the command line, by the table of cases.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/cli/tensor_file.h"
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
        const auto error = nlohmann::json::parse(report).at(name).get<float>();
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
