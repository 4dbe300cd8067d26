#include "attention/layer/files/model_types.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace rapt {
namespace {

// Rows that name only what differs from a causal model without a window. The numbers are those of
// Transformers' configuration classes, in versions 4 and 5 unless the row says otherwise.
constexpr ModelType kModels[] = {
    {.name = "bert", .naming = "bert", .direction = Direction::kIfDecoder},
    {.name = "bert-generation", .naming = "bert", .direction = Direction::kIfDecoder},
    {.name = "camembert", .naming = "bert", .direction = Direction::kIfDecoder},
    {.name = "data2vec-text", .naming = "bert", .direction = Direction::kIfDecoder},
    {.name = "electra", .naming = "bert", .direction = Direction::kIfDecoder},
    {.name = "ernie", .naming = "bert", .direction = Direction::kIfDecoder},
    {.name = "layoutlm", .naming = "bert", .direction = Direction::kBidirectional},
    {.name = "megatron-bert", .naming = "bert", .direction = Direction::kIfDecoder},
    {.name = "rembert", .naming = "bert", .direction = Direction::kIfDecoder},
    {.name = "roberta", .naming = "bert", .direction = Direction::kIfDecoder},
    {.name = "roberta-prelayernorm", .naming = "bert", .direction = Direction::kIfDecoder},
    {.name = "splinter", .naming = "bert", .direction = Direction::kBidirectional},
    {.name = "xlm-roberta", .naming = "bert", .direction = Direction::kIfDecoder},

    {.name = "gpt2", .naming = "gpt2"},
    {.name = "openai-gpt", .naming = "gpt2"},

    {.name = "apertus",
     .naming = "llama",
     .rope_theta = 12'000'000,
     .scales_rope = true,
     .norm_epsilon = 1e-5},
    {.name = "arcee", .naming = "llama", .rope_theta = 10'000},
    {.name = "cohere",
     .naming = "llama",
     .rope_theta = 500'000,
     .needs_rope_theta = true,
     .interleaved = true},
    {.name = "dots1",
     .naming = "llama",
     .rope_theta = 10'000,
     .windows = Windows::kListed,
     .sliding_window = 4096},
    {.name = "ernie4_5", .naming = "llama", .rope_theta = 500'000, .interleaved = true},
    {.name = "ernie4_5_moe", .naming = "llama", .rope_theta = 500'000, .interleaved = true},
    {.name = "eurobert",
     .naming = "llama",
     .direction = Direction::kBidirectional,
     .rope_theta = 10'000},
    {.name = "gemma", .naming = "llama", .rope_theta = 10'000},
    {.name = "glm",
     .naming = "llama",
     .rope_theta = 10'000,
     .interleaved = true,
     .rotary_factor = 0.5},
    {.name = "glm4",
     .naming = "llama",
     .rope_theta = 10'000,
     .interleaved = true,
     .rotary_factor = 0.5},
    {.name = "gpt_oss",
     .naming = "llama",
     .rope_theta = 150'000,
     .scales_rope = true,
     .windows = Windows::kListed,
     .sliding_window = 128},
    {.name = "granite", .naming = "llama", .rope_theta = 10'000, .attention_multiplier = 1},
    {.name = "granitemoe", .naming = "llama", .rope_theta = 10'000, .attention_multiplier = 1},
    {.name = "granitemoehybrid",
     .naming = "llama",
     .rope_theta = 10'000,
     .rope_by_type = true,
     .attention_multiplier = 1},
    {.name = "granitemoeshared",
     .naming = "llama",
     .rope_theta = 10'000,
     .attention_multiplier = 1},
    {.name = "helium", .naming = "llama", .rope_theta = 100'000, .interleaved = true},
    {.name = "llama", .naming = "llama", .rope_theta = 10'000},
    {.name = "ministral",
     .naming = "llama",
     .rope_theta = 10'000,
     .windows = Windows::kListed,
     .sliding_window = 4096},
    {.name = "mistral",
     .naming = "llama",
     .rope_theta = 10'000,
     .windows = Windows::kOfEveryLayer,
     .sliding_window = 4096},
    {.name = "mixtral",
     .naming = "llama",
     .rope_theta = 1'000'000,
     .windows = Windows::kOfEveryLayer},
    {.name = "nemotron", .naming = "llama", .rope_theta = 10'000, .rotary_factor = 0.5},
    {.name = "olmo", .naming = "llama", .rope_theta = 10'000},
    {.name = "qwen2",
     .naming = "llama",
     .rope_theta = 10'000,
     .windows = Windows::kFromMaxWindowLayers},
    {.name = "qwen2_5_vl",
     .naming = "llama",
     .rope_theta = 1'000'000,
     .has_text_positions = true,
     .windows = Windows::kFromMaxWindowLayers},
    {.name = "qwen2_5_vl_text",
     .naming = "llama",
     .rope_theta = 1'000'000,
     .has_text_positions = true,
     .windows = Windows::kFromMaxWindowLayers},
    {.name = "qwen2_moe", .naming = "llama", .rope_theta = 10'000},
    {.name = "qwen2_vl",
     .naming = "llama",
     .rope_theta = 1'000'000,
     .has_text_positions = true,
     .windows = Windows::kFromMaxWindowLayers},
    {.name = "qwen2_vl_text",
     .naming = "llama",
     .rope_theta = 1'000'000,
     .has_text_positions = true,
     .windows = Windows::kFromMaxWindowLayers},
    {.name = "qwen3",
     .naming = "llama",
     .rope_theta = 10'000,
     .windows = Windows::kFromMaxWindowLayers},
    {.name = "qwen3_moe",
     .naming = "llama",
     .rope_theta = 10'000,
     .windows = Windows::kOfEveryLayerIfUsed},
    {.name = "qwen3_vl_text",
     .naming = "llama",
     .rope_theta = 500'000,
     .needs_rope_theta = true,
     .has_text_positions = true},
    {.name = "seed_oss", .naming = "llama", .rope_theta = 10'000},
    {.name = "smollm3", .naming = "llama", .rope_theta = 2'000'000, .lists_rope_layers = true},
    {.name = "stablelm", .naming = "llama", .rope_theta = 10'000, .rotary_factor = 0.25},
    {.name = "starcoder2",
     .naming = "llama",
     .rope_theta = 10'000,
     .windows = Windows::kOfEveryLayer},

    {.name = "mpnet",
     .naming = "t5",
     .direction = Direction::kBidirectional,
     .bias_table = TablePlace::kEncoder},
    {.name = "mt5",
     .naming = "t5",
     .direction = Direction::kByStack,
     .scale = 1,
     .bias_table = TablePlace::kFirstBlock},
    {.name = "switch_transformers",
     .naming = "t5",
     .direction = Direction::kByStack,
     .scale = 1,
     .bias_table = TablePlace::kFirstBlock},
    {.name = "t5",
     .naming = "t5",
     .direction = Direction::kByStack,
     .scale = 1,
     .bias_table = TablePlace::kFirstBlock},
    {.name = "umt5",
     .naming = "t5",
     .direction = Direction::kByStack,
     .scale = 1,
     .bias_table = TablePlace::kOwn},
};

constexpr absl::string_view kModelsWithText[] = {"llava", "mistral3", "qwen2_5_vl", "qwen2_vl",
                                                 "qwen3_vl"};

}  // namespace

absl::Span<const ModelType> ModelTypes() { return kModels; }

const ModelType* FindModelType(absl::string_view name) {
  const auto* const model =
      std::find_if(std::begin(kModels), std::end(kModels),
                   [&](const ModelType& known) { return known.name == name; });
  return model == std::end(kModels) ? nullptr : model;
}

bool HasTextModel(absl::string_view model_type) {
  return std::find(std::begin(kModelsWithText), std::end(kModelsWithText), model_type) !=
         std::end(kModelsWithText);
}

std::string ModelTypesText() {
  std::string text;
  absl::string_view naming;
  for (const ModelType& model : kModels) {
    if (model.naming == naming) {
      absl::StrAppend(&text, ", ", model.name);
    } else {
      absl::StrAppend(&text, text.empty() ? "" : "; ", model.naming, ": ", model.name);
    }
    naming = model.naming;
  }
  return absl::StrCat(text, "; in text_config of: ", absl::StrJoin(kModelsWithText, ", "));
}

}  // namespace rapt
