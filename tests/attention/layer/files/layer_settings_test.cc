#include "attention/layer/files/layer_settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;

std::string MessageFor(absl::string_view json) {
  const auto settings = ParseLayerSettings(json);
  EXPECT_EQ(settings.status().code(), absl::StatusCode::kInvalidArgument) << json;
  return std::string(settings.status().message());
}

TEST(LayerSettingsTest, ReadsTheNamesOfLlama) {
  const auto settings = ParseLayerSettings(R"({
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
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
  EXPECT_EQ(settings->prefix, "model.layers.0.self_attn.");
  EXPECT_EQ(settings->naming, "llama");
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
  EXPECT_THAT(MessageFor(R"({"rope_scaling": {"type": "linear"}})"),
              HasSubstr("rope_scaling is an object; it must be null"));
  EXPECT_THAT(MessageFor(R"({"position_embedding_type": "relative_key"})"),
              HasSubstr(R"(position_embedding_type is "relative_key"; it must be "absolute")"));
  EXPECT_THAT(MessageFor(R"({"sliding_window": 4096})"), HasSubstr("sliding_window is 4096"));
  MessageFor(R"({"attn_logit_softcapping": 50.0})");
  MessageFor(R"({"query_pre_attn_scalar": 256})");
  MessageFor(R"({"scale_attn_weights": false})");
  MessageFor(R"({"scale_attn_by_inverse_layer_idx": true})");
  MessageFor(R"({"rope_parameters": {"rope_type": "yarn"}})");
  EXPECT_THAT(MessageFor(R"({"clip_qkv": 8.0})"), HasSubstr("clip_qkv is 8.0; it must be null"));
  EXPECT_THAT(MessageFor(R"({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}})"),
              HasSubstr("rope_parameters.full_attention is an object; a layer has one rope_theta"));
  EXPECT_TRUE(ParseLayerSettings(R"({"sliding_window": 4096, "use_sliding_window": false})").ok());
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
  EXPECT_TRUE(ParseLayerSettings(R"({"a": [{"n": 1}, {"n": 2}], "b": {"n": 3}})").ok());
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
              HasSubstr("it must be an integer"));
  EXPECT_THAT(MessageFor(R"({"rapt": {"is_causal": 1}})"),
              HasSubstr("rapt.is_causal is 1; it must be true or false"));
  EXPECT_THAT(MessageFor(R"({"rope_theta": [1]})"), HasSubstr("it must be a number"));
  EXPECT_THAT(MessageFor(R"({"rapt": {"prefix": 1}})"), HasSubstr("it must be a string"));
  EXPECT_THAT(MessageFor(R"({"partial_rotary_factor": 1e300})"), HasSubstr("in (0, 1]"));
  for (const char* json : {"", "[]", "{", "3", R"({"rapt": 3})", R"({"rope_parameters": 3})"}) {
    MessageFor(json);
  }
  MessageFor(std::string(kMaxConfigBytes / 2, '['));
  EXPECT_THAT(MessageFor(R"({"hidden_size": {"a": 1}})"), HasSubstr("hidden_size is an object;"));
  EXPECT_THAT(MessageFor(R"({"hidden_size": [1]})"), HasSubstr("hidden_size is an array;"));
  MessageFor(absl::StrCat("{}", std::string(kMaxConfigBytes, ' ')));
}

}  // namespace
}  // namespace rapt::test
