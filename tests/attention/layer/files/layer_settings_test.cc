#include "attention/layer/files/layer_settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "attention/layer/files/model_types.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

[[nodiscard]] std::string MessageFor(absl::string_view json) {
  const auto settings = ParseLayerSettings(json);
  EXPECT_EQ(settings.status().code(), absl::StatusCode::kInvalidArgument) << json;
  return std::string(settings.status().message());
}

TEST(LayerSettingsTest, ReadsTheNamesOfLlama) {
  const auto settings = ParseLayerSettings(R"({
    "model_type": "nemotron", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16, "rope_theta": 500000.0, "rope_scaling": null, "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5, "sliding_window": null, "pad_token_id": null,
    "rapt": {"prefix": "model.layers.0.self_attn.", "naming": "llama", "is_causal": true,
             "scale": 0.5, "pad_token_id": 3, "interleaved": true, "positional_base": 10000}})");
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->embed_size, 64);
  EXPECT_EQ(settings->query_heads, 8);
  EXPECT_EQ(settings->kv_heads, 2);
  EXPECT_EQ(settings->head_size, 16);
  EXPECT_EQ(settings->rope_theta, 500000);
  EXPECT_EQ(settings->rotary_factor, 0.5);
  EXPECT_EQ(settings->norm_epsilon, 1e-5);
  EXPECT_EQ(settings->choice.prefix, "model.layers.0.self_attn.");
  EXPECT_EQ(settings->choice.naming, "llama");
  EXPECT_EQ(settings->is_causal, true);
  EXPECT_EQ(settings->scale, 0.5);
  EXPECT_EQ(settings->pad_token_id, 3);
  EXPECT_EQ(settings->interleaved, true);
  EXPECT_EQ(settings->positional_base, 10000);
}

TEST(LayerSettingsTest, ReadsTheNamesOfOtherModels) {
  const auto gpt2 = ParseLayerSettings(R"({"n_embd": 768, "n_head": 12, "pad_token_id": 0})");
  ASSERT_TRUE(gpt2.ok()) << gpt2.status();
  EXPECT_EQ(gpt2->embed_size, 768);
  EXPECT_EQ(gpt2->query_heads, 12);
  EXPECT_EQ(gpt2->pad_token_id, 0);
  const auto t5 = ParseLayerSettings(
      R"({"d_model": 512, "num_heads": 8, "d_kv": 64, "relative_attention_max_distance": 100})");
  ASSERT_TRUE(t5.ok()) << t5.status();
  EXPECT_EQ(t5->embed_size, 512);
  EXPECT_EQ(t5->query_heads, 8);
  EXPECT_EQ(t5->head_size, 64);
  EXPECT_EQ(t5->max_distance, 100);
  const auto newer =
      ParseLayerSettings(R"({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}})");
  ASSERT_TRUE(newer.ok()) << newer.status();
  EXPECT_EQ(newer->rope_theta, 10000);
}

TEST(LayerSettingsTest, AcceptsLayersWithoutRotaryEmbeddingBesideThisOne) {
  const auto config = [](const char* list, const char* prefix) {
    return absl::StrCat(R"({"no_rope_layers": )", list, R"(, "rapt": {"prefix": ")", prefix,
                        R"("}})");
  };
  EXPECT_TRUE(ParseLayerSettings(config("[1, 1]", "")).ok());
  EXPECT_TRUE(ParseLayerSettings(config("[0, 1]", "model.layers.1.self_attn.")).ok());
  EXPECT_THAT(MessageFor(config("[0, 1]", "model.layers.0.self_attn.")),
              HasSubstr("no_rope_layers[0] is 0; it must be 1"));
  for (const char* prefix :
       {"", "model.layers.2.self_attn.", "layers.-1.", "a.18446744073709551616."}) {
    EXPECT_THAT(MessageFor(config("[0, 1]", prefix)),
                HasSubstr("no_rope_layers is an array; it must be an array with a 1"));
  }
  EXPECT_THAT(MessageFor(config("1", "model.layers.0.")),
              HasSubstr("no_rope_layers is 1; it must"));
  EXPECT_THAT(MessageFor(config(R"(["1"])", "model.layers.0.")),
              HasSubstr(R"(no_rope_layers[0] is "1"; it must be 1)"));
}

// Transformers then makes the list, in which by default each fourth layer has a 0.
TEST(LayerSettingsTest, RejectsListsOfRotaryEmbeddingThatAreNotWritten) {
  EXPECT_THAT(MessageFor(R"({"no_rope_layers": []})"), HasSubstr("no_rope_layers is empty; it"));
  EXPECT_THAT(MessageFor(R"({"no_rope_layers": null})"), HasSubstr("no_rope_layers is null; it"));
  EXPECT_THAT(MessageFor(R"({"no_rope_layer_interval": 4})"),
              HasSubstr("no_rope_layer_interval is 4 and no_rope_layers is absent; it must"));
  const auto written = ParseLayerSettings(
      R"({"no_rope_layers": [1, 0], "no_rope_layer_interval": 2, "rapt": {"prefix": "h.0."}})");
  EXPECT_TRUE(written.ok()) << written.status();
}

TEST(LayerSettingsTest, RejectsAttentionThatALayerDoesNotCompute) {
  EXPECT_THAT(MessageFor(R"({"position_embedding_type": "relative_key"})"),
              HasSubstr(R"(position_embedding_type is "relative_key"; it must be "absolute")"));
  for (const char* setting : {"attn_logit_softcapping is 50.0", "query_pre_attn_scalar is 256",
                              "scale_attn_weights is false", "key_multiplier is 0.5",
                              "scale_attn_by_inverse_layer_idx is true"}) {
    const std::vector<std::string> parts = absl::StrSplit(setting, " is ");
    EXPECT_THAT(MessageFor(absl::StrCat("{\"", parts[0], "\": ", parts[1], "}")),
                StartsWith(setting));
  }
  EXPECT_TRUE(ParseLayerSettings(R"({"key_multiplier": 1.0})").ok());
  EXPECT_THAT(MessageFor(R"({"clip_qkv": 8.0})"), HasSubstr("clip_qkv is 8.0; it must be null"));
  EXPECT_THAT(MessageFor(R"({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}})"),
              HasSubstr("rope_parameters.full_attention is an object; a layer has one rope_theta"));
}

TEST(LayerSettingsTest, ReadsTheScalingOfLlama31) {
  const auto settings = ParseLayerSettings(R"({
    "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"}})");
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->rope_theta, 500000);
  const RopeScaling scaling = settings->rope_scaling.value();
  EXPECT_EQ(scaling.type, RopeScaling::Type::kLlama3);
  EXPECT_EQ(scaling.factor, 8);
  EXPECT_EQ(scaling.original_length, 8192);
  EXPECT_EQ(scaling.slow, 1);
  EXPECT_EQ(scaling.fast, 4);
  EXPECT_EQ(scaling.attention_factor, 1);
}

TEST(LayerSettingsTest, ReadsTheScalingOfGptOss) {
  const auto settings = ParseLayerSettings(R"({
    "rope_parameters": {"rope_theta": 150000, "rope_type": "yarn", "factor": 32.0, "truncate": false,
                        "beta_fast": 30.0, "beta_slow": 2.0,
                        "original_max_position_embeddings": 4096}})");
  ASSERT_TRUE(settings.ok()) << settings.status();
  const RopeScaling scaling = settings->rope_scaling.value();
  EXPECT_EQ(scaling.type, RopeScaling::Type::kYarn);
  EXPECT_EQ(scaling.factor, 32);
  EXPECT_EQ(scaling.original_length, 4096);
  EXPECT_EQ(scaling.slow, 2);
  EXPECT_EQ(scaling.fast, 30);
  EXPECT_FALSE(scaling.truncate);
  EXPECT_DOUBLE_EQ(scaling.attention_factor, 0.1 * std::log(32.0) + 1);
}

// What YaRN's settings are without those that may be absent.
TEST(LayerSettingsTest, DerivesWhatRopeScalingDoesNotSay) {
  const auto scaling = [](const char* more) {
    const auto settings =
        ParseLayerSettings(absl::StrCat(R"({"max_position_embeddings": 512, "rope_theta": 10000,
                         "rope_scaling": {"type": "yarn", "factor": 4)",
                                        more, "}}"));
    EXPECT_TRUE(settings.ok()) << settings.status();
    return settings->rope_scaling.value();
  };
  const double by_factor = 0.1 * std::log(4.0) + 1;
  EXPECT_EQ(scaling("").original_length, 512);
  EXPECT_EQ(scaling("").slow, 1);
  EXPECT_EQ(scaling("").fast, 32);
  EXPECT_TRUE(scaling("").truncate);
  EXPECT_DOUBLE_EQ(scaling("").attention_factor, by_factor);
  EXPECT_DOUBLE_EQ(scaling(R"(, "mscale": 2)").attention_factor, by_factor);
  EXPECT_DOUBLE_EQ(scaling(R"(, "mscale": 2, "mscale_all_dim": 0)").attention_factor, by_factor);
  EXPECT_DOUBLE_EQ(scaling(R"(, "mscale": 2, "mscale_all_dim": 1)").attention_factor,
                   (0.2 * std::log(4.0) + 1) / by_factor);
  EXPECT_EQ(
      scaling(R"(, "mscale": 2, "mscale_all_dim": 1, "attention_factor": 3)").attention_factor, 3);
  const auto linear = ParseLayerSettings(
      R"({"rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 2.5}})");
  EXPECT_EQ(linear->rope_scaling->type, RopeScaling::Type::kLinear);
  EXPECT_EQ(linear->rope_scaling->factor, 2.5);
  EXPECT_FALSE(ParseLayerSettings(R"({"rope_scaling": {"rope_type": "default"}})")
                   ->rope_scaling.has_value());
}

TEST(LayerSettingsTest, RejectsOtherScalings) {
  const auto message = [](const char* scaling) {
    return MessageFor(absl::StrCat(R"({"rope_theta": 100, "rope_scaling": )", scaling, "}"));
  };
  for (const char* type : {"dynamic", "longrope", "su", "mrope", ""}) {
    EXPECT_EQ(message(absl::StrCat(R"({"factor": 2, "rope_type": ")", type, R"("})").c_str()),
              absl::StrCat(R"(rope_scaling.rope_type is ")", type,
                           R"("; it must be default, linear, llama3 or yarn)"));
  }
  EXPECT_THAT(message(R"({"type": 3})"), HasSubstr("rope_scaling.type is 3; it must be default"));
  EXPECT_EQ(message(R"({"type": "linear", "rope_type": "yarn"})"),
            R"(rope_scaling.rope_type is "yarn" and rope_scaling.type is "linear"; )"
            "they must be equal");
  EXPECT_EQ(message(R"({"type": "linear"})"), "rope_scaling.factor is missing");
  EXPECT_EQ(message(R"({"type": "linear", "factor": null})"), "rope_scaling.factor is missing");
  EXPECT_EQ(message(R"({"type": "linear", "factor": "2"})"),
            R"(rope_scaling.factor is "2"; it must be a number)");
  EXPECT_THAT(message(R"({"type": "yarn", "factor": 2})"),
              HasSubstr("original_max_position_embeddings is missing; rope_type yarn needs it"));
  const char* const llama = R"({"type": "llama3", "factor": 2, "low_freq_factor": 1,
                                "original_max_position_embeddings": 64})";
  EXPECT_EQ(message(llama), "rope_scaling.high_freq_factor is missing");
  EXPECT_EQ(message(R"({"type": "yarn", "factor": 2, "truncate": 1,
                        "original_max_position_embeddings": 64})"),
            "rope_scaling.truncate is 1; it must be true or false");
  EXPECT_EQ(message(R"({"type": "default", "llama_4_scaling_beta": 0.1})"),
            "rope_scaling.llama_4_scaling_beta is 0.1; it must be null: a layer does not compute "
            "this");
  EXPECT_THAT(message("[]"), HasSubstr("rope_scaling is an array; it must be an object"));
  EXPECT_THAT(MessageFor(R"({"original_max_position_embeddings": 64, "rope_scaling":
                             {"original_max_position_embeddings": 32, "type": "yarn"}})"),
              HasSubstr("original_max_position_embeddings is 64 and rope_scaling.original_max_"
                        "position_embeddings is 32; they must be equal"));
  EXPECT_THAT(MessageFor(R"({"rope_scaling": {"factor": 2}, "rope_parameters": {"factor": 3}})"),
              HasSubstr("they must be equal"));
}

std::optional<int64_t> WindowOf(const std::string& json) {
  const auto settings = ParseLayerSettings(json);
  EXPECT_TRUE(settings.ok()) << json << settings.status();
  return settings->sliding_window;
}

TEST(LayerSettingsTest, ReadsTheWindowOfTheLayerThatThePrefixNames) {
  const auto config = [](const char* settings, const char* prefix = "model.layers.1.self_attn.") {
    return absl::StrCat(R"({"sliding_window": 8, )", settings, R"("rapt": {"prefix": ")", prefix,
                        R"("}})");
  };
  constexpr const char* kTypes = R"("layer_types": ["full_attention", "sliding_attention"], )";
  EXPECT_EQ(WindowOf(config("", "")), 8);
  EXPECT_EQ(WindowOf(config(R"("model_type": "mistral", )", "")), 8);
  EXPECT_EQ(WindowOf(config(R"("use_sliding_window": false, )")), std::nullopt);
  EXPECT_EQ(WindowOf(config(kTypes)), 8);
  EXPECT_EQ(WindowOf(config(kTypes, "model.layers.0.self_attn.")), std::nullopt);
  EXPECT_EQ(WindowOf(config(R"("layer_types": ["sliding_attention"], )", "")), 8);
  EXPECT_EQ(WindowOf(config(R"("layer_types": ["full_attention"], )", "")), std::nullopt);
  EXPECT_EQ(WindowOf(config(R"("max_window_layers": 1, )")), 8);
  constexpr const char* kQwen = R"("max_window_layers": 1, "model_type": "qwen2", )";
  EXPECT_EQ(WindowOf(config(absl::StrCat(R"("use_sliding_window": true, )", kQwen).c_str())), 8);
  EXPECT_EQ(WindowOf(config(kQwen)), std::nullopt);  // off unless it is turned on
  EXPECT_EQ(WindowOf(R"({"sliding_window": null, "layer_types": ["full_attention"]})"),
            std::nullopt);
}

TEST(LayerSettingsTest, RejectsWindowsThatAreNotThoseOfALayer) {
  const auto message = [](const char* settings) {
    return MessageFor(
        absl::StrCat("{", settings, R"(, "rapt": {"prefix": "model.layers.2.self_attn."}})"));
  };
  EXPECT_EQ(message(R"("sliding_window": 0)"),
            "sliding_window is 0; it must be null or at least 1");
  EXPECT_EQ(message(R"("sliding_window": -4)"),
            "sliding_window is -4; it must be null or at least 1");
  EXPECT_EQ(message(R"("sliding_window": 1.5)"), "sliding_window is 1.5; it must be an integer");
  EXPECT_EQ(message(R"("use_sliding_window": 1)"),
            "use_sliding_window is 1; it must be true or false");
  EXPECT_EQ(message(R"("layer_types": ["full_attention", "sliding_attention"])"),
            "layer_types has 2 types that differ, and rapt.prefix is 'model.layers.2.self_attn.'; "
            "it must have the number of a layer below that: model.layers.3.self_attn.");
  EXPECT_EQ(message(R"("layer_types": ["full_attention"], "num_hidden_layers": 3)"),
            "layer_types has 1 types and num_hidden_layers is 3; they must be equal");
  EXPECT_EQ(message(R"("layer_types": [])"),
            "layer_types is empty; it must be an array with the type of every layer");
  EXPECT_THAT(message(R"("layer_types": 3)"), HasSubstr("layer_types is 3; it must be an array"));
  EXPECT_EQ(message(R"("layer_types": ["chunked_attention"])"),
            R"(layer_types[0] is "chunked_attention"; it must be "full_attention" or )"
            R"("sliding_attention")");
  EXPECT_EQ(message(R"("layer_types": [1, 2, 3])"),
            R"(layer_types[2] is 3; it must be "full_attention" or "sliding_attention")");
  EXPECT_EQ(message(R"("layer_types": ["sliding_attention"])"),
            "sliding_window is missing; a layer of type sliding_attention needs it");
  EXPECT_EQ(message(R"("layer_types": ["sliding_attention"], "use_sliding_window": true)"),
            "sliding_window is missing; a layer of type sliding_attention needs it");
  EXPECT_EQ(message(R"("layer_types": ["sliding_attention"], "use_sliding_window": false)"),
            "use_sliding_window is false; it must be true, because the layer's type is "
            "sliding_attention");
  EXPECT_EQ(message(R"("sliding_window": 8, "model_type": "llama")"),
            "sliding_window is 8; model_type llama has no window");
  EXPECT_THAT(message(R"("sliding_window": 8, "model_type": "dots1")"),
              HasSubstr("layer_types is missing; sliding_window of this model_type needs it"));
  EXPECT_EQ(message(R"("sliding_window": 8, "max_window_layers": -1)"),
            "max_window_layers is -1; it must be at least 0");
  EXPECT_EQ(message(R"("sliding_window": 8, "model_type": "qwen2", "use_sliding_window": true)"),
            "max_window_layers is missing; it must be at least 0");
  EXPECT_EQ(message(R"("sliding_window": 8, "model_type": "qwen3", "layer_types":
                       ["sliding_attention"])"),
            "use_sliding_window is missing; it must be true, because the layer's type is "
            "sliding_attention");
  EXPECT_THAT(MessageFor(R"({"sliding_window": 8, "max_window_layers": 28})"),
              HasSubstr("max_window_layers is 28 and rapt.prefix is ''; it must have the number"));
}

TEST(LayerSettingsTest, RotatesNeighboursAsTheModelDoes) {
  const auto interleaved = [](const std::string& json) {
    return ParseLayerSettings(json).value().interleaved.value_or(false);
  };
  for (const char* model : {"cohere", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium"}) {
    const std::string json =
        absl::StrCat(R"({"rope_theta": 10000, "model_type": ")", model, R"("})");
    EXPECT_TRUE(interleaved(json)) << model;
  }
  EXPECT_FALSE(interleaved(R"({"model_type": "llama"})"));
  EXPECT_FALSE(interleaved(R"({"model_type": "glm", "rapt": {"interleaved": false}})"));
}

TEST(LayerSettingsTest, ReadsTheScaleOfGranite) {
  const auto settings = ParseLayerSettings(R"({"attention_multiplier": 0.25})");
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->scale, 0.25);
  EXPECT_EQ(ParseLayerSettings(R"({"attention_multiplier": 0.25, "rapt": {"scale": 2}})")->scale,
            2);
}

TEST(LayerSettingsTest, RejectsContradictions) {
  EXPECT_THAT(MessageFor(R"({"hidden_size": 64, "n_embd": 32})"),
              HasSubstr("hidden_size is 64 and n_embd is 32; they must be equal"));
  EXPECT_TRUE(ParseLayerSettings(R"({"hidden_size": 64, "n_embd": 64, "d_model": null})").ok());
  EXPECT_THAT(
      MessageFor(R"({"rope_theta": 100, "rope_parameters": {"rope_theta": 200}})"),
      HasSubstr("rope_theta is 100 and rope_parameters.rope_theta is 200; they must be equal"));
  EXPECT_THAT(MessageFor(R"({"rope_theta": 100, "rope_theta": 200})"),
              HasSubstr("rope_theta is given twice"));
  EXPECT_THAT(MessageFor(R"({"rapt": {"scale": 1, "scale": 2}})"),
              HasSubstr("scale is given twice"));
  EXPECT_TRUE(ParseLayerSettings(R"({"model_type": "llama", "a": [{"n": 1}, {"n": 2}]})").ok());
}

TEST(LayerSettingsTest, ErrorsTellTheirPlace) {
  EXPECT_THAT(MessageFor("{\n  \"n_embd\": 64,\n}"), HasSubstr("line 3, column 1 (byte 19): "));
  EXPECT_THAT(MessageFor(std::string("{}\0", 3)),
              HasSubstr("line 1, column 3 (byte 3): a NUL byte"));
  EXPECT_THAT(MessageFor("{\"n_embd\": 64} x"), HasSubstr("line 1, column 16 (byte 16): "));
  EXPECT_THAT(MessageFor("[]"), HasSubstr("the file is not a JSON object"));
}

// transformers writes time_step_limit of Mamba and others as Python does.
TEST(LayerSettingsTest, ReadsInfinityWhereItDoesNotMatter) {
  const auto settings = ParseLayerSettings(
      R"({"model_type": "llama", "time_step_limit": [0.0, Infinity], "x": -Infinity, "y": NaN,
          "hidden_size": 64})");
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->embed_size, 64);
  EXPECT_THAT(settings->unread, ::testing::ElementsAre("time_step_limit", "x", "y"));
  EXPECT_THAT(MessageFor(R"({"rope_theta": Infinity})"),
              HasSubstr("rope_theta is inf; it must be finite"));
  EXPECT_THAT(MessageFor(R"({"rope_theta": NaN})"), HasSubstr("rope_theta is nan"));
}

// Balanced brackets, which the parser accepts; recursion over them would overflow the stack.
TEST(LayerSettingsTest, RejectsDeepNesting) {
  constexpr size_t kDepth = kMaxConfigBytes / 2 - 100;
  const std::string deep = std::string(kDepth, '[') + std::string(kDepth, ']');
  for (const char* name :
       {"hidden_size", "use_sliding_window", "sliding_window", "rapt", "other"}) {
    EXPECT_THAT(MessageFor(absl::StrCat("{\"", name, "\":", deep, "}")),
                HasSubstr("nested more than"));
  }
}

TEST(LayerSettingsTest, RejectsUnknownNamesAndWrongValues) {
  EXPECT_THAT(MessageFor(R"({"rapt": {"prefx": ""}})"),
              HasSubstr("rapt.prefx is unknown; rapt may have prefix, naming"));
  EXPECT_THAT(MessageFor(R"({"num_attention_heads": "8"})"),
              HasSubstr(R"(num_attention_heads is "8"; it must be an integer)"));
  EXPECT_THAT(MessageFor(R"({"num_attention_heads": 18446744073709551615})"),
              HasSubstr("num_attention_heads is 18446744073709551615; it must be in [1, 2^40]"));
  EXPECT_THAT(
      MessageFor(
          R"({"model_type": "llava", "text_config": {"model_type": "llama", "head_dim": 0},"rapt": {"prefix": "model.layers.1."}})"),
      HasSubstr("text_config.head_dim is 0; it must be in [1, 2^40]"));
  EXPECT_THAT(MessageFor(R"({"rapt": {"is_causal": 1}})"),
              HasSubstr("rapt.is_causal is 1; it must be true or false"));
  EXPECT_THAT(MessageFor(R"({"rope_theta": [1]})"), HasSubstr("it must be a number"));
  EXPECT_THAT(MessageFor(R"({"rapt": {"prefix": 1}})"), HasSubstr("it must be a string"));
  EXPECT_THAT(MessageFor(R"({"partial_rotary_factor": 1e300})"), HasSubstr("in (0, 1]"));
  for (const auto& [json, message] : std::map<std::string, std::string>{
           {"", "the JSON is invalid: "},
           {"[]", "the file is not a JSON object"},
           {"{", "the JSON is invalid: line 1, column 2"},
           {"3", "the file is not a JSON object"},
           {R"({"rapt": 3})", "rapt is 3; it must be an object"},
           {R"({"rope_parameters": 3})", "rope_parameters is 3; it must be an object"},
           {std::string(kMaxConfigBytes / 2, '['), "more than 64 deep"},
           {absl::StrCat("{}", std::string(kMaxConfigBytes, ' ')),
            absl::StrCat("at most ", kMaxConfigBytes)}}) {
    EXPECT_THAT(MessageFor(json), HasSubstr(message));
  }
  EXPECT_THAT(MessageFor(R"({"hidden_size": {"a": 1}})"), HasSubstr("hidden_size is an object;"));
  EXPECT_THAT(MessageFor(R"({"hidden_size": [1]})"), HasSubstr("hidden_size is an array;"));
}

// The settings that a model leaves to its class, with the names that every file has.
LayerSettings SettingsOf(absl::string_view model_type, absl::string_view more = "",
                         absl::string_view prefix = "model.layers.1.self_attn.") {
  const auto settings = ParseLayerSettings(
      absl::StrCat(R"({"architectures": ["X"], "vocab_size": 9, "model_type": ")", model_type, "\"",
                   more, R"(, "rapt": {"prefix": ")", prefix, R"("}})"));
  EXPECT_TRUE(settings.ok()) << model_type << settings.status();
  return settings.value_or(LayerSettings());
}

TEST(LayerSettingsTest, AModelSaysWhatItsFileLeavesOut) {
  EXPECT_EQ(SettingsOf("llama").rope_theta, 10'000);
  EXPECT_EQ(SettingsOf("llama").is_causal, true);
  EXPECT_EQ(SettingsOf("llama", R"(, "is_causal": false)").is_causal, false);
  EXPECT_EQ(SettingsOf("llama", R"(, "rope_theta": 500000.0)").rope_theta, 500'000);
  EXPECT_EQ(SettingsOf("eurobert").is_causal, false);
  EXPECT_EQ(SettingsOf("glm").rotary_factor, 0.5);
  EXPECT_EQ(SettingsOf("mistral").sliding_window, 4096);
  EXPECT_EQ(SettingsOf("mistral", R"(, "sliding_window": null)").sliding_window, std::nullopt);
  EXPECT_EQ(SettingsOf("granite").scale, 1);
  EXPECT_EQ(SettingsOf("bert").is_causal, false);
  EXPECT_EQ(SettingsOf("bert").rope_theta, std::nullopt);
  EXPECT_EQ(SettingsOf("bert", R"(, "is_decoder": true)").is_causal, true);
  EXPECT_EQ(
      SettingsOf("bert", R"(, "is_decoder": true)", "encoder.layer.0.crossattention.").is_causal,
      false);
  EXPECT_EQ(SettingsOf("t5", "", "decoder.block.1.layer.0.SelfAttention.").is_causal, true);
  EXPECT_EQ(SettingsOf("t5", "", "decoder.block.1.layer.1.EncDecAttention.").is_causal, false);
  EXPECT_EQ(SettingsOf("t5", "", "encoder.block.1.layer.0.SelfAttention.").is_causal, false);
  EXPECT_THAT(MessageFor(R"({"model_type": "t5"})"),
              HasSubstr("rapt.prefix is ''; of model_type t5 it must have encoder or decoder"));
}

// Version 4 of Transformers has another default than version 5, and files of both leave it out.
TEST(LayerSettingsTest, RejectsADefaultThatDependsOnTheVersionOfTransformers) {
  for (const char* model : {"cohere", "qwen3_vl_text"}) {
    EXPECT_EQ(MessageFor(absl::StrCat(R"({"model_type": ")", model, R"("})")),
              absl::StrCat("rope_theta is missing; model_type ", model,
                           " needs it, because its default depends on the version of Transformers"))
        << model;
    EXPECT_EQ(SettingsOf(model, R"(, "rope_theta": 10000.0)").rope_theta, 10'000) << model;
    EXPECT_EQ(SettingsOf(model, R"(, "rope_parameters": {"rope_theta": 500000.0})").rope_theta,
              500'000)
        << model;
  }
}

TEST(LayerSettingsTest, EveryModelOfTheTableIsRead) {
  for (const ModelType& model : ModelTypes()) {
    const char* const theta = model.needs_rope_theta ? R"(, "rope_theta": 10000)" : "";
    const LayerSettings settings = SettingsOf(
        model.name,
        absl::StrCat(
            theta,
            R"(, "rope_parameters": null, "rope_scaling": {"rope_type": "default"}, "no_rope_layers": [1], "sliding_window": null)"),
        "encoder.block.1.");
    EXPECT_EQ(settings.choice.model, &model) << model.name;
    EXPECT_EQ(settings.rope_theta.has_value(), model.rope_theta && !model.rope_by_type)
        << model.name;
    EXPECT_THAT(settings.unread, ::testing::ElementsAre("vocab_size")) << model.name;
  }
}

TEST(LayerSettingsTest, RejectsModelsThatItDoesNotKnow) {
  EXPECT_EQ(
      MessageFor(R"({"model_type": "llama4_text"})"),
      "model_type is llama4_text, whose attention a layer is not known to compute; rapt layer "
      "--help lists the models that are, and rapt.naming takes the file as a naming");
  EXPECT_EQ(MessageFor(R"({"architectures": ["LlamaForCausalLM"]})"),
            "model_type is missing; it must say what architectures computes");
  EXPECT_THAT(MessageFor(R"({"model_type": "llama", "auto_map": {"AutoModel": "a.B"}})"),
              HasSubstr("auto_map says that the model has code of its own"));
  EXPECT_EQ(MessageFor(R"({"model_type": "bert", "rope_theta": 10000})"),
            "rope_theta is 10000; model_type bert has no rotary embedding");
  EXPECT_EQ(MessageFor(R"({"model_type": "llama", "partial_rotary_factor": 0.5})"),
            "partial_rotary_factor is 0.5; model_type llama rotates whole heads");
  EXPECT_EQ(MessageFor(R"({"model_type": "gpt_oss", "rope_theta": 150000})"),
            "rope_parameters is missing; model_type gpt_oss needs it");
  EXPECT_THAT(MessageFor(R"({"model_type": "smollm3"})"),
              HasSubstr("no_rope_layers is absent; it"));
}

// The user's word decides how an unknown model is computed; what may change that is an error still.
TEST(LayerSettingsTest, ANamingTakesAnUnknownModel) {
  const auto parse = [](absl::string_view more) {
    return ParseLayerSettings(absl::StrCat(R"({"model_type": "new", "vocab_size": 9, )", more,
                                           R"("rapt": {"naming": "llama"}})"));
  };
  EXPECT_EQ(parse("")->choice.model, nullptr);
  EXPECT_EQ(parse("")->is_causal, std::nullopt);
  EXPECT_EQ(parse(R"("architectures": ["NewForCausalLM"], )")->is_causal, true);
  EXPECT_EQ(parse(R"("is_decoder": true, )")->is_causal, true);
  EXPECT_THAT(std::string(parse(R"("new_gate": true, )").status().message()),
              HasSubstr("new_gate is unknown and may change attention"));
}

TEST(LayerSettingsTest, WithoutAModelEverySettingIsKnown) {
  for (const auto& [name, value] : std::map<std::string, std::string>{
           {"rotary_dim", "16"},
           {"rope_pct", "0.25"},
           {"rotary_pct", "0.25"},
           {"attention_window", "[512]"},
           {"attention_window_size", "2048"},
           {"use_qk_norm", "true"},
           {"window_of_mine", "3"},
           {"rope_scaling", R"({"rope_type": "default", "mine": 3})"},
           {"position_embedding_type", "\"rope\""}}) {
    EXPECT_THAT(
        MessageFor(absl::StrCat(R"({"num_attention_heads": 2, ")", name, "\": ", value, "}")),
        StartsWith(name));
  }
  const auto settings = ParseLayerSettings(
      R"({"num_attention_heads": 2, "hidden_act": "gelu", "vocab_size": 9, "torch_dtype": "x"})");
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_THAT(settings->unread, ::testing::ElementsAre("hidden_act", "torch_dtype", "vocab_size"));
}

TEST(LayerSettingsTest, ReadsGranite4AndTheTextOfQwen2Vl) {
  const char* const types = R"(, "layer_types": ["mamba", "attention"])";
  const auto granite = [&](absl::string_view more) {
    return SettingsOf("granitemoehybrid", absl::StrCat(types, R"(, "rope_theta": 10000)", more));
  };
  EXPECT_EQ(granite(R"(, "position_embedding_type": "rope")").rope_theta, 10'000);
  EXPECT_EQ(granite(R"(, "position_embedding_type": "nope")").rope_theta, std::nullopt);
  EXPECT_EQ(granite("").rope_theta, std::nullopt);
  const char* const mrope =
      R"(, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_config": {})";
  EXPECT_EQ(SettingsOf("qwen2_vl", mrope).rope_theta, 1'000'000);
  EXPECT_EQ(SettingsOf("qwen2_vl", mrope).rope_scaling.has_value(), false);
}

TEST(LayerSettingsTest, ReadsTheTextModelOfAPictureModel) {
  const auto config = [](const char* model_type, const char* prefix) {
    return absl::StrCat(R"({"model_type": ")", model_type, R"(", "image_token_index": 3,
        "text_config": {"model_type": "mistral", "sliding_window": 7, "num_attention_heads": 8,
        "vocab_size": 3}, "vision_config": {"num_attention_heads": 3}, "rapt": {"prefix": ")",
                        prefix, R"("}})");
  };
  const auto settings =
      ParseLayerSettings(config("llava", "language_model.model.layers.1.self_attn."));
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->query_heads, 8);
  EXPECT_EQ(settings->sliding_window, 7);
  EXPECT_THAT(settings->unread, ::testing::ElementsAre("text_config.vocab_size",
                                                       "image_token_index", "vision_config"));
  EXPECT_THAT(
      MessageFor(config("llava", "vision_tower.transformer.layers.1.attention.")),
      HasSubstr("with text_config it must have language_model, or begin with model.layers."));
  // PaliGemma's text sees its pictures in both directions.
  EXPECT_THAT(MessageFor(config("paligemma", "language_model.model.layers.1.self_attn.")),
              HasSubstr("model_type is paligemma, whose attention"));
}

}  // namespace
}  // namespace rapt::test
