#include "attention/layer/files/layer_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "attention/half.h"
#include "tests/support/saved_tensors.h"

namespace rapt::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

// A tensor whose values count from `first` on.
TensorToSave Counting(const std::string& name, const std::vector<int64_t>& shape, float first = 0) {
  TensorToSave tensor{name, shape, {}};
  int64_t count = 1;
  for (int64_t axis : shape) count *= axis;
  tensor.values.resize(count);
  std::iota(tensor.values.begin(), tensor.values.end(), first);
  return tensor;
}

// Files in memory, which a layer reads in place.
class LayerFilesTest : public ::testing::Test {
 protected:
  LayerFiles Read(const std::vector<TensorToSave>& tensors, const std::string& config) {
    auto layer = TryRead(tensors, config);
    EXPECT_TRUE(layer.ok()) << layer.status();
    return *std::move(layer);
  }

  [[nodiscard]] std::string MessageFor(const std::vector<TensorToSave>& tensors,
                                       const std::string& config) {
    const auto layer = TryRead(tensors, config);
    EXPECT_EQ(layer.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(layer.status().message());
  }

  absl::StatusOr<LayerFiles> TryRead(const std::vector<TensorToSave>& tensors,
                                     const std::string& config) {
    bytes_ = SaveTensors(tensors);
    auto file = Safetensors::Parse(bytes_);
    EXPECT_TRUE(file.ok()) << file.status();
    return ReadLayerFiles(config, *std::move(file));
  }

 private:
  std::string bytes_;
};

// The elements of a matrix or a vector, row by row.
std::vector<double> ValuesOf(const std::optional<WeightTensor>& tensor) {
  if (!tensor) return {};
  const int64_t rows = tensor->shape.size() == 2 ? tensor->shape[0] : 1;
  const int64_t columns = tensor->shape.back();
  const int64_t stride = tensor->row_stride == 0 ? columns : tensor->row_stride;
  std::vector<double> values;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      values.push_back(LoadElement(tensor->data, tensor->dtype, row * stride + column));
    }
  }
  return values;
}

std::vector<TensorToSave> Torch() {
  return {Counting("in_proj_weight", {6, 2}), Counting("in_proj_bias", {6}, 20),
          Counting("out_proj.weight", {2, 2}, 40), Counting("out_proj.bias", {2}, 50)};
}
constexpr char kTwoHeads[] = R"({"num_attention_heads": 2})";

TEST_F(LayerFilesTest, DividesTheMatrixOfTorch) {
  const LayerFiles layer = Read(Torch(), kTwoHeads);
  EXPECT_EQ(layer.naming, "torch");
  EXPECT_EQ(layer.config.embed_size, 2);
  EXPECT_EQ(layer.config.query_heads, 2);
  EXPECT_FALSE(layer.config.is_causal);
  EXPECT_EQ(layer.config.scale, std::nullopt);
  EXPECT_THAT(ValuesOf(layer.weights.q.matrix), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(ValuesOf(layer.weights.k.matrix), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(ValuesOf(layer.weights.v.matrix), ElementsAre(8, 9, 10, 11));
  EXPECT_THAT(ValuesOf(layer.weights.q.bias), ElementsAre(20, 21));
  EXPECT_THAT(ValuesOf(layer.weights.v.bias), ElementsAre(24, 25));
  EXPECT_THAT(ValuesOf(layer.weights.o.matrix), ElementsAre(40, 41, 42, 43));
  EXPECT_FALSE(layer.weights.v.transposed);
  EXPECT_THAT(layer.tensors, UnorderedElementsAre("in_proj_weight", "in_proj_bias",
                                                  "out_proj.weight", "out_proj.bias"));
}

TEST_F(LayerFilesTest, ReadsMatricesOfTorchForKeysOfOtherSizes) {
  const LayerFiles layer =
      Read({Counting("q_proj_weight", {2, 2}), Counting("k_proj_weight", {2, 3}),
            Counting("v_proj_weight", {2, 4}), Counting("bias_k", {1, 1, 2}),
            Counting("bias_v", {1, 1, 2}), Counting("out_proj.weight", {2, 2})},
           kTwoHeads);
  EXPECT_EQ(layer.config.key_embed_size, 3);
  EXPECT_EQ(layer.config.value_embed_size, 4);
  EXPECT_TRUE(layer.weights.bias_k && layer.weights.bias_v);
}

TEST_F(LayerFilesTest, DividesTheColumnsOfGpt2) {
  const LayerFiles layer =
      Read({Counting("h.0.attn.c_attn.weight", {2, 6}), Counting("h.0.attn.c_attn.bias", {6}),
            Counting("h.0.attn.c_proj.weight", {2, 2})},
           R"({"n_head": 1, "rapt": {"prefix": "h.0.attn."}})");
  EXPECT_EQ(layer.naming, "gpt2");
  EXPECT_TRUE(layer.config.is_causal);
  EXPECT_EQ(layer.config.embed_size, 2);
  EXPECT_TRUE(layer.weights.k.transposed && layer.weights.o.transposed);
  EXPECT_THAT(ValuesOf(layer.weights.k.matrix), ElementsAre(2, 3, 8, 9));
  EXPECT_THAT(ValuesOf(layer.weights.v.matrix), ElementsAre(4, 5, 10, 11));
  EXPECT_THAT(ValuesOf(layer.weights.k.bias), ElementsAre(2, 3));
}

std::vector<TensorToSave> Llama(const std::string& prefix) {
  std::vector<TensorToSave> tensors;
  for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
    tensors.push_back(Counting(absl::StrCat(prefix, name, ".weight"), {8, 8}));
  }
  return tensors;
}

// Norms after the rotary embedding, those of the attended values, gates: models that have them
// name their projections as llama does.
TEST_F(LayerFilesTest, RejectsTensorsThatChangeTheAttentionOfLlama) {
  const std::string config =
      R"({"num_attention_heads": 2, "rapt": {"prefix": "layers.1.self_attn."}})";
  for (const char* name : {"query_layernorm.weight", "attn_sub_norm.weight", "lambda_q1", "A"}) {
    std::vector<TensorToSave> tensors = Llama("layers.1.self_attn.");
    tensors.push_back(Counting(absl::StrCat("layers.1.self_attn.", name), {4}));
    EXPECT_EQ(
        MessageFor(tensors, config),
        absl::StrCat("model.safetensors: tensor layers.1.self_attn.", name,
                     " is none of the naming llama; a layer does not compute what it is for"));
  }
  std::vector<TensorToSave> harmless = Llama("layers.1.self_attn.");
  for (const char* name : {"layers.1.self_attn.rotary_emb.inv_freq", "layers.1.mlp.gate.weight",
                           "layers.10.self_attn.query_layernorm.weight", "A"}) {
    harmless.push_back(Counting(name, {4}));
  }
  EXPECT_EQ(Read(harmless, config).tensors.size(), 4);
}

TEST_F(LayerFilesTest, ReadsLlamaWithNormsAndSinks) {
  std::vector<TensorToSave> tensors = Llama("");
  for (const char* name : {"q_norm.weight", "k_norm.weight", "sinks"}) {
    tensors.push_back(Counting(name, {4}));
  }
  const LayerFiles layer = Read(tensors, R"({"num_attention_heads": 2, "num_key_value_heads": 2,
      "head_dim": 4, "rope_theta": 100, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-4})");
  EXPECT_EQ(layer.naming, "llama");
  EXPECT_EQ(layer.config.kv_heads, 2);
  EXPECT_EQ(layer.config.head_size, 4);
  EXPECT_EQ(layer.config.rope_theta, 100);
  EXPECT_EQ(layer.config.rotary_embedding_dim, 2);
  EXPECT_EQ(layer.config.norm_epsilon, 1e-4);
  EXPECT_TRUE(layer.weights.q_norm && layer.weights.k_norm && layer.weights.sinks);
}

// One setting at a time has values that may be outside of what it can be.
TEST_F(LayerFilesTest, IntegersOutOfRangeAreNamed) {
  const std::vector<std::string> values = {
      "0",     "-1",       "2147483648", "4611686018427387904", "9223372036854775808",
      "1e300", "\"text\"", "null"};
  const std::map<std::string, std::string> llama = {
      {"hidden_size", "8"},
      {"num_attention_heads", "2"},
      {"num_key_value_heads", "2"},
      {"head_dim", "4"},
      {"sliding_window", "3"},
      {"max_window_layers", "0"},
      {"pad_token_id", "1"},
      {"max_position_embeddings", "64"},
      {"original_max_position_embeddings", "32"},
      {"rope_theta", "100"},
      {"rope_scaling", R"({"type": "yarn", "factor": 2})"},
      {"rapt", R"({"prefix": "h.0.", "is_causal": true})"}};
  const std::map<std::string, std::string> t5 = {{"d_model", "8"},
                                                 {"num_heads", "2"},
                                                 {"d_kv", "4"},
                                                 {"relative_attention_max_distance", "100"}};
  const std::map<std::string, std::string> gpt2 = {{"n_embd", "8"}, {"n_head", "2"}};
  const std::vector<TensorToSave> t5_tensors = {
      Counting("q.weight", {8, 8}), Counting("k.weight", {8, 8}), Counting("v.weight", {8, 8}),
      Counting("o.weight", {8, 8}), Counting("relative_attention_bias.weight", {32, 2})};
  const std::vector<TensorToSave> gpt2_tensors = {Counting("c_attn.weight", {8, 24}),
                                                  Counting("c_proj.weight", {8, 8})};
  const struct {
    const char* name;
    const std::map<std::string, std::string>& settings;
    std::vector<TensorToSave> tensors;
    std::vector<size_t> fitting;  // values
  } fields[] = {
      {"hidden_size", llama, Llama("h.0."), {7}},
      {"num_attention_heads", llama, Llama("h.0."), {}},
      {"num_key_value_heads", llama, Llama("h.0."), {7}},
      {"head_dim", llama, Llama("h.0."), {7}},
      {"sliding_window", llama, Llama("h.0."), {2, 7}},
      {"max_window_layers", llama, Llama("h.0."), {0, 2, 3, 7}},
      {"pad_token_id", llama, Llama("h.0."), {0, 1, 2, 3, 7}},
      {"max_position_embeddings", llama, Llama("h.0."), {0, 1, 2, 3, 4, 5, 7}},  // not needed
      {"original_max_position_embeddings", llama, Llama("h.0."), {2, 3, 4, 5, 7}},
      {"d_model", t5, t5_tensors, {7}},
      {"num_heads", t5, t5_tensors, {}},
      {"d_kv", t5, t5_tensors, {7}},
      {"relative_attention_max_distance", t5, t5_tensors, {2, 7}},
      {"n_embd", gpt2, gpt2_tensors, {7}},
      {"n_head", gpt2, gpt2_tensors, {}},
  };
  for (const auto& [name, settings, tensors, fitting] : fields) {
    for (size_t n = 0; n < values.size(); ++n) {
      std::string config;
      for (const auto& [other, value] : settings) {
        absl::StrAppend(&config, config.empty() ? "{" : ", ", "\"", other,
                        "\": ", other == name ? values[n] : value);
      }
      const auto layer = TryRead(tensors, config + "}");
      const auto bytes = layer.ok() ? LayerBytes(layer->config, layer->weights) : layer.status();
      SCOPED_TRACE(absl::StrCat(name, " is ", values[n], ": ", bytes.status().ToString()));
      const bool fits = std::find(fitting.begin(), fitting.end(), n) != fitting.end();
      EXPECT_EQ(bytes.ok(), fits);
      if (fits) continue;
      EXPECT_TRUE(absl::IsInvalidArgument(bytes.status()));
      const std::string message(bytes.status().message());
      if (values[n] == "2147483648") continue;  // the error is that the tensors differ
      if (values[n] == "null") {
        EXPECT_THAT(message, HasSubstr("num_attention_heads is missing"));
      } else {
        EXPECT_THAT(message,
                    AllOf(HasSubstr(absl::StrCat(name, " is ")), HasSubstr("; it must be ")));
      }
    }
  }
}

TEST_F(LayerFilesTest, ReadsBertAndLeavesItsLayerNorm) {
  std::vector<TensorToSave> tensors = {Counting("output.LayerNorm.weight", {2})};
  for (const char* name : {"self.query", "self.key", "self.value", "output.dense"}) {
    tensors.push_back(Counting(absl::StrCat(name, ".weight"), {2, 2}));
    tensors.push_back(Counting(absl::StrCat(name, ".bias"), {2}));
  }
  const LayerFiles layer = Read(tensors, R"({"num_attention_heads": 1, "pad_token_id": 0})");
  EXPECT_EQ(layer.naming, "bert");
  EXPECT_EQ(layer.config.pad_token_id, 0);
  EXPECT_TRUE(layer.weights.o.bias.has_value());
  EXPECT_FALSE(layer.tensors.contains("output.LayerNorm.weight"));
}

TEST_F(LayerFilesTest, ReadsT5WithItsScale) {
  std::vector<TensorToSave> tensors = {Counting("relative_attention_bias.weight", {8, 2})};
  for (const char* name : {"q", "k", "v", "o"}) {
    tensors.push_back(Counting(absl::StrCat(name, ".weight"), {2, 2}));
  }
  const LayerFiles layer =
      Read(tensors, R"({"num_heads": 2, "relative_attention_max_distance": 20})");
  EXPECT_EQ(layer.naming, "t5");
  EXPECT_EQ(layer.config.scale, 1);
  EXPECT_EQ(layer.config.max_distance, 20);
  EXPECT_TRUE(layer.weights.relative_attention_bias.has_value());
}

// Without d_kv, as of models whose heads have together another size than the tokens.
TEST_F(LayerFilesTest, TheRowsTellTheHeadsOfT5) {
  const LayerFiles layer = Read(
      {Counting("q.weight", {12, 8}), Counting("k.weight", {12, 8}), Counting("v.weight", {12, 8}),
       Counting("o.weight", {8, 12}), Counting("relative_attention_bias.weight", {32, 4})},
      R"({"model_type": "t5", "d_model": 8, "num_heads": 4, "rapt": {"is_causal": false}})");
  EXPECT_EQ(layer.config.head_size, 3);
  EXPECT_EQ(layer.config.kv_heads, 4);
  EXPECT_TRUE(LayerBytes(layer.config, layer.weights).ok());
}

TEST_F(LayerFilesTest, ReadsTheFormsOfTutorials) {
  const LayerFiles products = Read(
      {Counting("W_q", {3, 5}), Counting("W_k", {3, 5}), Counting("W_v.weight", {4, 5})}, "{}");
  EXPECT_EQ(products.naming, "plain");
  EXPECT_EQ(products.config.head_size, 3);
  EXPECT_EQ(products.config.value_head_size, 4);
  EXPECT_FALSE(products.weights.o.matrix);

  const LayerFiles bahdanau =
      Read({Counting("W1", {3, 5}), Counting("W2", {3, 2}), Counting("v", {1, 3})}, "{}");
  EXPECT_EQ(bahdanau.config.score_function, ScoreFunction::kAdditive);
  EXPECT_EQ(bahdanau.config.embed_size, 2);      // of the decoder's state
  EXPECT_EQ(bahdanau.config.key_embed_size, 5);  // of the encoder's
  EXPECT_EQ(bahdanau.config.value_head_size, 5);
  EXPECT_EQ(bahdanau.config.scale, std::nullopt);

  const LayerFiles general = Read({Counting("W", {2, 3})}, "{}");
  EXPECT_EQ(general.config.scale, 1);
  EXPECT_TRUE(general.weights.q.transposed);
  EXPECT_EQ(general.config.embed_size, 2);
  EXPECT_EQ(general.config.key_embed_size, 3);
  EXPECT_EQ(general.config.head_size, 3);

  const LayerFiles concat =
      Read({Counting("W", {2, 5}), Counting("v", {2})}, R"({"hidden_size": 2})");
  EXPECT_EQ(concat.config.score_function, ScoreFunction::kAdditive);
  EXPECT_THAT(ValuesOf(concat.weights.q.matrix), ElementsAre(0, 1, 5, 6));
  EXPECT_THAT(ValuesOf(concat.weights.k.matrix), ElementsAre(2, 3, 4, 7, 8, 9));

  const LayerFiles dot = Read({}, R"({"hidden_size": 4, "rapt": {"naming": "plain"}})");
  EXPECT_EQ(dot.config.scale, 1);
  EXPECT_EQ(dot.config.head_size, 4);
}

TEST_F(LayerFilesTest, AMissingTensorIsNamed) {
  std::vector<TensorToSave> tensors = Torch();
  tensors.erase(tensors.begin() + 2);
  EXPECT_EQ(MessageFor(tensors, kTwoHeads), "model.safetensors: tensor out_proj.weight is missing");
  EXPECT_EQ(MessageFor({Counting("x.q_proj.weight", {2, 2})},
                       R"({"num_attention_heads": 1, "rapt": {"prefix": "x."}})"),
            "model.safetensors: tensor x.k_proj.weight is missing");
  EXPECT_THAT(MessageFor(Torch(), R"({"rapt": {"naming": "llama"}})"),
              HasSubstr("tensor q_proj.weight is missing"));
}

TEST_F(LayerFilesTest, AFusedTensorOfAnotherShapeIsNamed) {
  EXPECT_THAT(MessageFor({Counting("in_proj_weight", {4, 2}), Counting("out_proj.weight", {2, 2})},
                         kTwoHeads),
              HasSubstr("tensor in_proj_weight has shape [4, 2]; it must be [3 E, E]"));
  EXPECT_THAT(
      MessageFor({Counting("c_attn.weight", {6, 2}), Counting("c_proj.weight", {2, 2})}, kTwoHeads),
      HasSubstr("tensor c_attn.weight has shape [6, 2]; it must be [E, 3 E]"));
  EXPECT_THAT(MessageFor({Counting("in_proj_weight", {6, 2}), Counting("in_proj_bias", {5}),
                          Counting("out_proj.weight", {2, 2})},
                         kTwoHeads),
              HasSubstr("tensor in_proj_bias has shape [5]; it must be [3 E]"));
  EXPECT_THAT(MessageFor({Counting("W", {2, 5}), Counting("v", {2})}, "{}"),
              HasSubstr("tensor W has shape [2, 5]"));
}

TEST_F(LayerFilesTest, AmbiguousTensorsAreNamed) {
  std::vector<TensorToSave> tensors = Torch();
  tensors.push_back(Counting("k_proj_weight", {2, 2}));
  EXPECT_THAT(MessageFor(tensors, kTwoHeads),
              HasSubstr("tensors in_proj_weight and k_proj_weight both exist"));
  EXPECT_THAT(MessageFor({Counting("W1", {2, 2}), Counting("W", {2, 2})}, "{}"),
              HasSubstr("tensors W1 and W"));
  EXPECT_THAT(MessageFor({Counting("W1", {2, 2}), Counting("W1.weight", {2, 2})}, "{}"),
              HasSubstr("tensors W1 and W1.weight both exist"));
  tensors = Torch();
  tensors.push_back(Counting("q.weight", {2, 2}));
  EXPECT_THAT(MessageFor(tensors, kTwoHeads), HasSubstr("fit torch and t5; rapt.naming"));
  EXPECT_EQ(Read(Torch(), R"({"num_attention_heads": 2, "rapt": {"naming": "torch"}})").naming,
            "torch");
}

TEST_F(LayerFilesTest, SettingsThatAreNeededAreNamed) {
  EXPECT_THAT(MessageFor(Torch(), "{}"), HasSubstr("config.json: num_attention_heads is missing"));
  EXPECT_THAT(MessageFor({}, R"({"rapt": {"naming": "plain"}})"),
              HasSubstr("config.json: hidden_size is missing"));
  EXPECT_THAT(MessageFor({}, R"({"rapt": {"prefix": "no."}})"),
              HasSubstr("no naming fits the tensors under the prefix 'no.'"));
  EXPECT_THAT(MessageFor(Torch(), R"({"rapt": {"naming": "keras"}})"),
              HasSubstr("rapt.naming is 'keras'; it must be one of torch, llama"));
}

TEST_F(LayerFilesTest, APartOfAHeadThatCanNotBeRotatedIsNamed) {
  std::vector<TensorToSave> tensors;
  for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
    tensors.push_back(Counting(absl::StrCat(name, ".weight"), {8, 8}));
  }
  const auto config = [](const char* factor, const char* head_size) {
    return absl::StrCat(
        R"({"num_attention_heads": 1, "rope_theta": 100, "partial_rotary_factor": )", factor,
        R"(, "head_dim": )", head_size, "}");
  };
  EXPECT_EQ(Read(tensors, config("0.5", "8")).config.rotary_embedding_dim, 4);
  EXPECT_EQ(
      MessageFor(tensors, config("0.1", "8")),
      "config.json: partial_rotary_factor is 0.1, which rotates 0 of the 8 numbers of a head; "
      "it must rotate 2 or another even number");
  EXPECT_THAT(MessageFor(tensors, config("0.4", "8")), HasSubstr("rotates 3 of the 8 numbers"));
  const LayerFiles layer = Read(tensors, config("1", "1099511627776"));
  EXPECT_THAT(std::string(LayerBytes(layer.config, layer.weights).status().message()),
              HasSubstr("has shape [8, 8]; it must be [1099511627776, 8]"));
}

// --- Models -------------------------------------------------------------------------------------

std::vector<TensorToSave> Named(const std::string& prefix, std::vector<const char*> names) {
  std::vector<TensorToSave> tensors;
  for (const char* name : names) tensors.push_back(Counting(absl::StrCat(prefix, name), {8, 8}));
  return tensors;
}
std::vector<TensorToSave> T5(const std::string& prefix) {
  return Named(prefix, {"q.weight", "k.weight", "v.weight", "o.weight"});
}
std::vector<TensorToSave> Bert(const std::string& prefix) {
  return Named(
      prefix, {"self.query.weight", "self.key.weight", "self.value.weight", "output.dense.weight"});
}
std::vector<TensorToSave> operator+(std::vector<TensorToSave> a,
                                    const std::vector<TensorToSave>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::string ConfigOf(const std::string& settings, const std::string& prefix) {
  return absl::StrCat(R"({"num_attention_heads": 2, )", settings, R"(, "rapt": {"prefix": ")",
                      prefix, R"("}})");
}

// These have the tensors of a naming and compute something else.
TEST_F(LayerFilesTest, RejectsModelsThatOnlyLookLikeANaming) {
  const std::string block = "model.layers.1.self_attn.", encoder = "encoder.layer.1.attention.";
  for (const char* model : {"llama4_text", "glm4v_text", "nemotron_h", "bamba", "recurrent_gemma",
                            "grok-1", "dia", "blt", "cohere2", "gemma3_text", "nanochat"}) {
    EXPECT_THAT(
        MessageFor(
            Llama(block),
            ConfigOf(absl::StrCat(R"("rope_theta": 10000, "model_type": ")", model, "\""), block)),
        HasSubstr(absl::StrCat("config.json: model_type is ", model, ", whose attention")));
  }
  for (const char* model : {"roformer", "longformer", "nezha", "layoutlmv3", "big_bird", "swin"}) {
    EXPECT_THAT(MessageFor(Bert(encoder),
                           ConfigOf(absl::StrCat(R"("model_type": ")", model, "\""), encoder)),
                HasSubstr(absl::StrCat("config.json: model_type is ", model, ", whose attention")));
  }
}

// Where a configuration without a model_type shows it.
TEST_F(LayerFilesTest, RejectsSettingsThatOtherModelsHave) {
  for (const auto& [name, value] :
       std::map<std::string, std::string>{{"rotary_dim", "4"},
                                          {"rope_pct", "0.5"},
                                          {"rotary_pct", "0.5"},
                                          {"attention_window_size", "2048"},
                                          {"attention_window", "[512]"},
                                          {"attention_chunk_size", "8192"},
                                          {"rope_scaling", R"({"partial_rotary_factors": 1})"}}) {
    const std::string settings = absl::StrCat(R"("rope_theta": 10000, ")", name, "\": ", value);
    EXPECT_THAT(MessageFor(Llama(""), ConfigOf(settings, "")),
                StartsWith(absl::StrCat("config.json: ", name)));
  }
}

TEST_F(LayerFilesTest, LlamaIsCausalAndRotated) {
  const LayerFiles layer =
      Read(Llama("model.layers.1.self_attn."),
           ConfigOf(R"("model_type": "llama", "vocab_size": 3)", "model.layers.1.self_attn."));
  EXPECT_TRUE(layer.config.is_causal);
  EXPECT_EQ(layer.config.rope_theta, 10'000);
  EXPECT_THAT(layer.unread, ElementsAre("vocab_size"));
}

TEST_F(LayerFilesTest, BertAsADecoderIsCausal) {
  const std::string self = "encoder.layer.1.attention.", cross = "encoder.layer.1.crossattention.";
  constexpr char kDecoder[] = R"("model_type": "bert", "is_decoder": true)";
  EXPECT_TRUE(Read(Bert(self), ConfigOf(kDecoder, self)).config.is_causal);
  EXPECT_FALSE(Read(Bert(cross), ConfigOf(kDecoder, cross)).config.is_causal);
  EXPECT_TRUE(Read(Bert(self), ConfigOf(R"("is_decoder": true)", self)).config.is_causal);
}

// Every block uses the table of the first one of its stack.
TEST_F(LayerFilesTest, BlocksOfT5ShareTheTableOfTheFirst) {
  const std::string self = ".layer.0.SelfAttention.", cross = ".layer.1.EncDecAttention.";
  const std::string table = "relative_attention_bias.weight";
  std::vector<TensorToSave> file = {
      Counting("encoder.block.0" + self + table, {4, 2}, 100),
      Counting("decoder.block.0" + self + table, {4, 2}, 200),
      Counting("decoder.block.0" + cross + table, {4, 2}, 300),  // old files have it
  };
  std::vector<std::string> prefixes;
  for (const char* block : {"0", "1"}) {
    for (const char* stack : {"encoder.block.", "decoder.block."}) {
      prefixes.push_back(absl::StrCat(stack, block, self));
      file = file + T5(prefixes.back());
    }
    prefixes.push_back(absl::StrCat("decoder.block.", block, cross));
    file = file + T5(prefixes.back());
  }
  for (const char* model : {R"("model_type": "t5")", R"("d_model": 8)"}) {
    for (const std::string& prefix : prefixes) {
      const LayerFiles layer = Read(file, ConfigOf(model, prefix));
      EXPECT_EQ(layer.config.scale, 1);
      const std::vector<double> values = ValuesOf(layer.weights.relative_attention_bias);
      if (absl::StrContains(prefix, "EncDec")) {
        EXPECT_TRUE(values.empty()) << prefix;
      } else {
        ASSERT_FALSE(values.empty()) << prefix;
        EXPECT_EQ(values[0], absl::StartsWith(prefix, "encoder") ? 100 : 200) << prefix;
      }
    }
  }
  EXPECT_EQ(MessageFor(T5(prefixes[0]), ConfigOf(R"("model_type": "t5")", prefixes[0])),
            "model.safetensors: tensor encoder.block.0.layer.0.SelfAttention." + table +
                " is missing; model_type t5 needs it");
  // UMT5's blocks have tables of their own.
  EXPECT_EQ(MessageFor(file, ConfigOf(R"("model_type": "umt5")", "encoder.block.1" + self)),
            "model.safetensors: tensor encoder.block.1.layer.0.SelfAttention." + table +
                " is missing; model_type umt5 needs it");
}

TEST_F(LayerFilesTest, MpnetScalesAndUsesTheTableOfItsEncoder) {
  const std::string prefix = "encoder.layer.1.attention.attn.";
  std::vector<TensorToSave> file =
      T5(prefix) +
      std::vector<TensorToSave>{Counting(prefix + "q.bias", {8}),
                                Counting("encoder.relative_attention_bias.weight", {32, 2}, 100)};
  const LayerFiles layer = Read(
      file, ConfigOf(R"("model_type": "mpnet", "relative_attention_max_distance": 20)", prefix));
  EXPECT_EQ(layer.config.scale, std::nullopt);
  EXPECT_EQ(layer.config.max_distance, 128);
  EXPECT_FALSE(layer.config.is_causal);
  EXPECT_EQ(ValuesOf(layer.weights.relative_attention_bias)[0], 100);
  // T5's scale is another.
  EXPECT_EQ(
      MessageFor(file, ConfigOf(R"("d_model": 8)", prefix)),
      "model.safetensors: tensor encoder.layer.1.attention.attn.q.bias is none of the naming t5 "
      "without a model_type that has it");
  file.back() = Counting("encoder.relative_attention_bias.weight", {4, 2});
  EXPECT_THAT(
      MessageFor(file, ConfigOf(R"("model_type": "mpnet")", prefix)),
      HasSubstr("tensor encoder.relative_attention_bias.weight has shape [4, 2]; it must be "
                "[32, H]"));
}

// Swin has a table under the prefix, Longformer a second query, RoFormer and Nezha positions.
TEST_F(LayerFilesTest, RejectsTensorsThatANamingDoesNotKnow) {
  const auto with = [](std::vector<TensorToSave> tensors, const char* name) {
    return std::move(tensors) + std::vector<TensorToSave>{Counting(name, {8})};
  };
  const struct {
    const char* naming;
    std::vector<TensorToSave> tensors;
  } kCases[] = {
      {"torch", with(Torch(), "gate")},
      {"bert", with(Bert(""), "self.query_global.weight")},
      {"bert", with(Bert(""), "self.relative_position_bias_table")},
      {"bert", with(Bert(""), "self.distance_embedding.weight")},
      {"gpt2",
       {Counting("c_attn.weight", {8, 24}), Counting("c_proj.weight", {8, 8}),
        Counting("q_attn.weight", {8, 8})}},
      {"t5", with(T5(""), "global_relative_attention_bias.weight")},
      {"plain", with(Named("", {"W_q", "W_k", "W_v"}), "gate")},
      {"llama", with(Llama(""), "gate_proj.weight")},
  };
  for (const auto& [naming, tensors] : kCases) {
    EXPECT_EQ(
        MessageFor(tensors, R"({"num_attention_heads": 2})"),
        absl::StrCat("model.safetensors: tensor ", tensors.back().name, " is none of the naming ",
                     naming, "; a layer does not compute what it is for"));
  }
  // GPT-2's old files have its mask, BERT's a norm that follows.
  Read({Counting("c_attn.weight", {8, 24}), Counting("c_proj.weight", {8, 8}),
        Counting("bias", {1, 1, 4, 4}), Counting("masked_bias", {})},
       R"({"num_attention_heads": 2})");
}

TEST_F(LayerFilesTest, TheRowsTellTheHeads) {
  std::vector<TensorToSave> tensors = {
      Counting("q_proj.weight", {12, 8}), Counting("k_proj.weight", {6, 8}),
      Counting("v_proj.weight", {6, 8}), Counting("o_proj.weight", {8, 12})};
  const LayerFiles layer = Read(tensors, R"({"num_attention_heads": 4})");
  EXPECT_EQ(layer.config.head_size, 3);
  EXPECT_EQ(layer.config.kv_heads, 2);
  EXPECT_TRUE(LayerBytes(layer.config, layer.weights).ok());
}

TEST_F(LayerFilesTest, AWholeModelNamesItsLayers) {
  std::vector<TensorToSave> file = {Counting("model.embed_tokens.weight", {3, 8})};
  for (int n = 0; n < 6; ++n) file = file + Llama(absl::StrCat("model.layers.", n, ".self_attn."));
  constexpr char kConfig[] = R"({"model_type": "qwen2", "num_attention_heads": 2,
                                 "max_window_layers": 3, "use_sliding_window": true,
                                 "sliding_window": 4})";
  EXPECT_EQ(MessageFor(file, kConfig),
            "model.safetensors: no naming fits the tensors under the prefix ''; rapt.prefix in "
            "config.json must precede those of llama; these fit: 'model.layers.0.self_attn.' "
            "(llama), 'model.layers.1.self_attn.' (llama), 'model.layers.2.self_attn.' (llama), "
            "'model.layers.3.self_attn.' (llama) and 2 more");
  const std::string bytes = SaveTensors(file);
  const Safetensors tensors = Safetensors::Parse(bytes).value();
  const std::vector<FoundLayer> layers = FindLayers(kConfig, tensors);
  ASSERT_EQ(layers.size(), 6);
  for (int n = 0; n < 6; ++n) {
    const auto layer = ReadLayerFiles(kConfig, tensors, layers[n].prefix);
    ASSERT_TRUE(layer.ok()) << layer.status();
    EXPECT_EQ(layer->prefix, absl::StrCat("model.layers.", n, ".self_attn."));
    EXPECT_EQ(layer->config.sliding_window.has_value(), n >= 3);
  }
  EXPECT_THAT(MessageFor({Counting("a", {1})}, "{}"), HasSubstr("; no tensors of the file do"));
}

TEST_F(LayerFilesTest, OnlyLayersOfTheNamingThatIsGivenAreFound) {
  const std::string bytes = SaveTensors(Llama("a.") + Llama("b.") + Bert("c."));
  const Safetensors tensors = Safetensors::Parse(bytes).value();
  const auto found = [&](const char* config) {
    std::vector<std::string> prefixes;
    for (const FoundLayer& layer : FindLayers(config, tensors)) prefixes.push_back(layer.prefix);
    return prefixes;
  };
  EXPECT_THAT(found("{}"), ElementsAre("a.", "b.", "c."));
  EXPECT_THAT(found(R"({"rapt": {"naming": "bert"}})"), ElementsAre("c."));
  EXPECT_THAT(found(R"({"model_type": "unknown", "rapt": {"naming": "llama"}})"),
              ElementsAre("a.", "b."));
  EXPECT_THAT(found(R"({"model_type": "llama", "rapt": {"naming": "bert"}})"), ElementsAre("c."));
}

TEST_F(LayerFilesTest, ATensorOfAnotherTypeMayNotBeUsed) {
  const std::string file = SafetensorsFile(
      R"({"q_proj.weight":{"dtype":"F8_E4M3","shape":[1,1],"data_offsets":[0,1]}})", "x");
  const auto layer = ReadLayerFiles(R"({"num_attention_heads": 1})", *Safetensors::Parse(file));
  EXPECT_THAT(std::string(layer.status().message()),
              HasSubstr("tensor q_proj.weight has type F8_E4M3; it must be F32, F16, BF16 or F64"));
}

// --- Folders ------------------------------------------------------------------------------------

class LayerFolderTest : public ::testing::Test {
 protected:
  ~LayerFolderTest() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& content) {
    std::ofstream(folder_ / name) << content;
  }
  absl::StatusOr<LayerFiles> Read() { return ReadLayerFiles(folder_.string()); }

 private:
  const std::filesystem::path folder_ = [] {
    std::filesystem::path folder =
        testing::TempDir() + "layer_folder_test." + std::to_string(getpid());
    std::filesystem::create_directories(folder);
    return folder;
  }();
};

TEST_F(LayerFolderTest, ReadsShards) {
  std::vector<TensorToSave> tensors = Torch();
  Write("1.safetensors", SaveTensors({tensors[0], tensors[1]}));
  Write("2.safetensors", SaveTensors({tensors[2], tensors[3]}));
  Write(kConfigFile, kTwoHeads);
  Write(kWeightsIndexFile, R"({"weight_map": {"in_proj_weight": "1.safetensors",
      "in_proj_bias": "1.safetensors", "out_proj.weight": "2.safetensors",
      "out_proj.bias": "2.safetensors"}})");
  const auto layer = Read();
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_THAT(ValuesOf(layer->weights.o.matrix), ElementsAre(40, 41, 42, 43));
  ThreadPool pool(1);
  EXPECT_TRUE(MakeLayer(*layer, pool).ok());
}

TEST_F(LayerFolderTest, WhatIsMissingIsNamed) {
  const auto message = [&] { return std::string(Read().status().message()); };
  EXPECT_EQ(message(), "config.json: the file does not exist");
  Write(kConfigFile, kTwoHeads);
  EXPECT_EQ(message(), "model.safetensors: the file does not exist");
  Write(kWeightsIndexFile, R"({"weight_map": {"a": "model-00001-of-00002.safetensors"}})");
  EXPECT_EQ(message(),
            "model.safetensors.index.json: model-00001-of-00002.safetensors: the file does not "
            "exist");
  EXPECT_EQ(Read().status().code(), absl::StatusCode::kNotFound);
  Write(kWeightsFile, "");
  EXPECT_EQ(message(),
            "model.safetensors: the file can't be opened, is empty or is not a regular file");
}

TEST_F(LayerFilesTest, WeightsThatAreCutOffMeanwhileAreAnError) {
  const std::filesystem::path folder =
      testing::TempDir() + "layer_files_test." + std::to_string(getpid());
  std::filesystem::create_directories(folder);
  constexpr int64_t kSize = 512;  // many pages
  std::ofstream(folder / kWeightsFile)
      << SaveTensors({Counting("W_q", {kSize, kSize}), Counting("W_k", {kSize, kSize}),
                      Counting("W_v", {kSize, kSize})});
  std::ofstream(folder / kConfigFile) << "{}";
  ThreadPool pool(2);
  const auto layer = ReadLayerFiles(folder.string());
  ASSERT_TRUE(layer.ok()) << layer.status();
  EXPECT_TRUE(MakeLayer(*layer, pool).ok());
  std::filesystem::resize_file(folder / kWeightsFile, 4096);
  const absl::Status cut = MakeLayer(*layer, pool).status();
  EXPECT_EQ(cut.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(cut.message()), HasSubstr("model.safetensors: the file was changed"));
  std::filesystem::remove_all(folder);
}

TEST_F(LayerFilesTest, AFolderWithoutFilesIsNotFound) {
  const auto layer = ReadLayerFiles("/nonexistent");
  EXPECT_EQ(layer.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(layer.status().message(), "the folder 'nonexistent' does not exist");
}

}  // namespace
}  // namespace rapt::test
