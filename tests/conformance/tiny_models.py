"""Tiny models with random weights of every family in the installed transformers, and inputs for them."""

import importlib
import inspect
import pathlib
import re

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

LENGTH = 9
VOCABULARY = 96

# What a configuration needs that has no default, or that its small sizes break. Those of parts count in wholes.
CHANGES = {
    "autoformer": {"prediction_length": 4, "context_length": 9},
    "axk2": {"head_dim": 4},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": 96, "pad_token_id": 1, "mask_token_id": 4},
    "glm5_next_text": {"index_topk": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"], "window_size": 4},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_vl_text": {"head_dim": 16},
    "informer": {"prediction_length": 4, "context_length": 9},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 16, "shape_size": 16},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "index_block_size": 2,
        "index_topk_blocks": 1,
    },
    "ministral": {"head_dim": 16},
    "mistral_large4_text": {"kv_source_layers": None},
    "nemotron": {"num_key_value_heads": 8},
    "pegasus_x": {"block_size": 4, "num_global_tokens": 2},
    "glm4v_moe_text": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    },
    "bamba": {"mamba_d_head": 8, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_d_head": 8, "layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "cvt": {"depth": [1, 2, 3]},
    "step3p5": {"sliding_window": 4},
    "time_series_transformer": {"prediction_length": 4, "context_length": 9},
    "xmod": {"default_language": "en_XX"},
}
for _model_types, _section in {
    "glm4v_text glm_image_text qwen2_vl_text qwen2_5_vl_text": [2, 3, 3],
    "ernie4_5_vl_moe_text": [3, 3, 2],
    "qwen2_5_omni_text qwen2_5_omni_talker paddleocr_vl_text": [2, 3, 3],
    "glm_ocr_text": [2, 1, 1],
}.items():
    for _model_type in _model_types.split():
        _rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": _section}
        CHANGES[_model_type] = {"rope_scaling" if transformers.__version__.startswith("4.") else "rope_parameters": _rope}
_KEPT = ("num_feat_extract_layers", "depths")  # sizes that lists follow

# Widths are divided by one number, which keeps most of what models demand of them, such as that of heads. What it does not,
# a model's own number of channels or rotary sections, the next sizes may.
SIZES = ((8, 32), (2, 32), (8, 224), (1, 32))  # divisor, most of an image
MOST_PARAMETERS = 80_000_000
_WIDTH = re.compile(
    r"hidden|d_model|d_head|n_embd|embed|_dims?$|^dim|intermediate|ffn|inner|rank|d_ff|d_kv|width|channels|projector|projection|tdnn"
    r"|bottleneck|multi_scalar|query_pre_attn|output_size|adapter_input_size|fpn|decoder_input|classifier_proj_size|mamba_d_ssm"
)
_NO_WIDTH = re.compile(
    r"num_|_num|base_channels|layers|act|dropout|prob|image|patch|_ids?$|_index|position|token|audio_channels|in_channels|kernel"
    r"|stride|max_|min_|per_(?!layer)|rate|std|factor|scal(?!ar)|eps|vocab|codebook_size|groups|ratio|frequency|window|length|init|topk"
)
_MOST = {
    r"n_layers?|num_layers|layers|depth|num_hidden_groups|num_blocks|num_mem_blocks|\w*_layers(?!_)|\w*_num_hidden_layers": 2,
    r"num_local_experts|num_experts|n_routed_experts|moe_num_experts|num_routed_experts|n_experts": 4,
    r"num_experts_per_tok|moe_topk|moe_top_k|top_k_experts|num_experts_per_token|moe_k": 2,
    r"n_group|topk_group|num_expert_group|num_nextn_predict_layers|first_k_dense_replace|num_kv_shared_layers": 1,
    r"sliding_window|local_attention|attention_chunk_size|window_size_left|sliding_window_size|index_top_?k": 4,
    r"codebook_size|num_embeddings|upsample_groups": 64,
    r"(mamba_)?chunk_size": 16,
    r"num_queries": 4,
    r"max_position_embeddings|n_positions|max_source_positions|max_target_positions|max_seq_len|n_ctx": 256,
}
_MOST_LAYERS = 4


def model_types():
    """Those with attention."""
    root = pathlib.Path(transformers.__file__).parent / "models"
    has_attention = {}
    for model_type in CONFIG_MAPPING_NAMES:
        folder = transformers.models.auto.configuration_auto.model_type_to_module_name(model_type)
        if folder not in has_attention:
            sources = (path.read_text() for path in (root / folder).glob("modeling_*.py"))
            has_attention[folder] = any(re.search(r"class \w*Attention\w*\(", source) for source in sources)
        if has_attention[folder]:
            yield model_type


def _shrink(name, value, sizes):
    divisor, image = sizes
    if isinstance(value, bool) or name in _KEPT:
        return value
    if name == "mrope_section":
        third = sum(value) // divisor // 3
        return [sum(value) // divisor - 2 * third, third, third]
    if isinstance(value, int):
        if re.fullmatch(r"image_size|input_image_size|pretrain_image_size", name):
            return min(value, image)
        if name == "image_embedding_size":
            return image // 16
        for names, most in _MOST.items():
            if re.fullmatch(names, name):
                return min(value, most)
        if re.search(r"(^|_)vocab(_size|$)", name):
            return min(value, VOCABULARY)
        if re.search(r"_token_(id|index)$", name) and value >= VOCABULARY:
            return VOCABULARY - 1 - sum(map(ord, name)) % 10
        divides = value % divisor == 0 and value >= 2 * divisor
        if divides and _WIDTH.search(name) and not _NO_WIDTH.search(name):
            return value // divisor
    if isinstance(value, (list, tuple)):
        return type(value)(_shrink(name, x, sizes) for x in value)
    if isinstance(value, dict) and name not in ("id2label", "label2id"):
        return {key: _shrink(str(key), x, sizes) for key, x in value.items()}
    return value


def _picked_layers(values):
    """The first layer of each kind, and what of the configuration has an entry a layer."""
    layers = values.get("num_hidden_layers")
    layers = layers if isinstance(layers, int) else 0
    lists = {name: x for name, x in values.items() if isinstance(x, (list, tuple)) and len(x) == layers and layers > 2}
    kinds = {}
    for n in range(layers):
        kinds.setdefault(str([x[n] for x in lists.values()]), n)
    picked = list(kinds.values())[:_MOST_LAYERS]
    return (picked * 2)[: max(2, len(picked))], lists


def _tiny(config, sizes):
    """The arguments of a small one."""
    values = config.to_dict()
    left_out = {"model_type", "transformers_version", "stage_names", "_name_or_path"}
    if "depths" not in values:
        left_out |= {"out_features", "out_indices"}  # of layers that go
    values = {name: value for name, value in values.items() if name not in left_out}
    picked, lists = _picked_layers(values)
    of_layers = values.get("per_layer_config") or {}
    small = {}
    for name, value in values.items():
        part = config.__dict__.get(name)
        if isinstance(part, transformers.PretrainedConfig):
            small[name] = {"model_type": part.model_type, **_tiny(part, sizes)}
        elif name == "num_hidden_layers" and isinstance(value, int):
            small[name] = min(value, len(picked))
        elif name == "per_layer_config":
            small[name] = {
                f"{n:02}": _shrink(name, of_layers[f"{old:02}"], sizes) for n, old in enumerate(picked) if f"{old:02}" in of_layers
            }
        elif name in lists:
            small[name] = [_shrink(name, value[n], sizes) for n in picked]
        else:
            small[name] = _shrink(name, value, sizes)
    return small | CHANGES.get(config.model_type, {})


def config_class_of(model_type):
    module = importlib.import_module(
        f"transformers.models.{transformers.models.auto.configuration_auto.model_type_to_module_name(model_type)}"
    )
    return getattr(module, CONFIG_MAPPING_NAMES[model_type])


def tiny_config(model_type, sizes=SIZES[0]):
    kind = config_class_of(model_type)
    config = kind(**_tiny(kind(), sizes))
    config._experts_implementation = "eager"
    return config


_GENERATIVE = (
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL_FOR_MULTIMODAL_LM",
    "MODEL_FOR_VISION_2_SEQ",
)


def model_classes(model_type):
    """Of this configuration; first those that generate."""
    module = importlib.import_module(config_class_of(model_type).__module__.replace(".configuration_", ".modeling_"))
    names = []
    for mapping in (*_GENERATIVE, "MODEL"):
        found = getattr(modeling_auto, mapping + "_MAPPING_NAMES", {}).get(model_type)
        names += [found] if isinstance(found, str) else found or []
    own = [
        name
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) and kind.__module__ == module.__name__
        if kind.config_class is config_class_of(model_type) and not name.lower().endswith("pretrainedmodel")
    ]
    names += [name for name in own if name.endswith(("Model", "Encoder", "Transformer"))] or own
    return [getattr(module, name) for name in dict.fromkeys(names) if hasattr(module, name)]


def randomise(model):
    """Weights with which attention has a say: the initial ones make all scores nearly 0."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator).to(p.dtype)
            if p.dim() < 2:
                p.add_(noise * (0.5 if "sink" in name else 0.05))
            elif "bbox" in name:
                p.copy_(noise * 0.02)  # exp() of boxes
            elif "embed" in name or "bias" in name:
                p.copy_(noise)
            else:
                p.copy_(noise * (p[0].numel() ** -0.5))
    return model


def _of_config(config, *names):
    """The first of these that the configuration or a part of it has."""
    for name in names:
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    parts = (x for x in vars(config).values() if isinstance(x, transformers.PretrainedConfig))
    return next((found for part in parts if (found := _of_config(part, *names)) is not None), None)


def _pixels(config, batch, generator):
    """A picture of each sequence, or a video."""
    size = _of_config(config, "image_size") or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = _of_config(config, "num_channels", "in_channels", "in_chans") or 3
    frames = _of_config(config, "num_frames", "frames_per_clip") or 4
    yield torch.randn(batch, channels, height, width, generator=generator)
    yield torch.randn(batch, frames, channels, height, width, generator=generator)


def _patches(config, wanted, generator):
    """Of a picture of 4 x 4 patches, for models that take rows of patches and their grid."""
    patch, frames = _of_config(config, "patch_size") or 14, _of_config(config, "temporal_patch_size") or 1
    width = (_of_config(config, "num_channels", "in_channels", "in_chans") or 3) * frames * patch * patch
    rows = torch.randn(32, width, generator=generator)
    grid = "grid_thw" if "grid_thw" in wanted else "image_grid_thw"
    return {"hidden_states" if "hidden_states" in wanted else "pixel_values": rows, grid: torch.tensor([[1, 4, 4], [1, 4, 4]])}


def _sounds(config, batch, generator):
    names = ("feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim")
    mels = _of_config(config, *names) or 80
    positions = _of_config(config, "max_source_positions")  # max_length of transformers 4 is often of generate()
    length = 2 * positions if positions else _of_config(config, "max_length") or 64
    yield torch.randn(batch, mels, length, generator=generator)
    yield torch.randn(batch, length, mels, generator=generator)
    yield torch.randn(batch, 64, mels, generator=generator)
    yield torch.randn(batch, 4000, generator=generator)
    yield torch.randn(batch, 1, 4000, generator=generator)
    yield torch.randn(batch, 1, 256, mels, generator=generator)


def _series(config, batch, generator):
    """Of time series."""
    length = (_of_config(config, "context_length") or 32) + max(_of_config(config, "lags_sequence") or [0])
    channels = _of_config(config, "num_input_channels", "input_size") or 1
    values = torch.randn(batch, length, *[channels] * (channels > 1), generator=generator)
    ahead = _of_config(config, "prediction_length") or 4
    features = _of_config(config, "num_time_features") or 0
    return {
        "past_values": values,
        "past_observed_mask": torch.ones_like(values),
        "past_time_features": torch.randn(batch, length, features, generator=generator),
        "past_values_padding": torch.zeros_like(values, dtype=torch.long),
        "freq": torch.zeros(batch, 1, dtype=torch.long),
        "future_values": torch.randn(batch, ahead, *values.shape[2:], generator=generator),
        "future_time_features": torch.randn(batch, ahead, features, generator=generator),
    }


_WORDS = ("qformer_input_ids", "task_inputs")
_PICTURES = ("pixel_values", "pixel_values_videos", "image", "prompt_pixel_values", "prompt_masks")
_SOUNDS = ("input_features", "input_values", "audio_values", "audio_mel", "mel_spectrogram")
_ROWS = ("hidden_states", "query_embeds", "inputs", "latents", "patch_embeds", "flattened_patches")
_WIDTHS = ("hidden_size", "d_model", "input_dim", "d_latents", "embed_dim", "patch_embed_hidden_size")


def _masks(wanted, given):
    """Of all that is given, all true, for models that demand them."""
    for name in ("input_features_mask", "feature_attention_mask", "audio_mel_mask", "mask", "padding_mask"):
        if name in wanted:
            sound = next((x for n, x in given.items() if n in _SOUNDS + _ROWS), None)
            for axis in (2, 1):
                if sound is not None and sound.dim() > axis:
                    yield {name: torch.ones(sound.shape[0], sound.shape[axis], dtype=torch.bool)}
    if "pixel_mask" in wanted and "pixel_values" in given:
        pixels = given["pixel_values"]
        yield {"pixel_mask": torch.ones(pixels.shape[0], *pixels.shape[-2:], dtype=torch.long)}


def _given(config, wanted, batch, generator):
    """Sets of arguments, of one kind of input each and with words."""
    words = torch.randint(10, 60, (batch, LENGTH), generator=generator)
    text = {name: words for name in ("input_ids", *_WORDS) if name in wanted}
    if "decoder_input_ids" in wanted:
        text["decoder_input_ids"] = torch.randint(10, 60, (batch, 5), generator=generator)
    if "bbox" in wanted:
        text["bbox"] = torch.zeros(batch, LENGTH, 4, dtype=torch.long)
    if "input_ids" in text:
        yield text
        yield {name: x for name, x in text.items() if name != "decoder_input_ids"}
    pictures = [name for name in _PICTURES if name in wanted]
    for pixels in _pixels(config, batch, generator) if pictures else ():
        seen = {name: pixels for name in pictures if name != "pixel_values_videos" or len(pictures) == 1}
        yield seen
        yield text | seen
    if "spatial_shapes" in wanted:
        patch = _of_config(config, "patch_size") or 16
        shapes = {"pixel_attention_mask": torch.ones(batch, 16), "spatial_shapes": torch.full((batch, 2), 4)}
        yield text | shapes | {"pixel_values": torch.randn(batch, 16, 3 * patch * patch, generator=generator)}
    if "feature_lens" in wanted:
        sound = torch.randn(_of_config(config, "num_mel_bins") or 80, batch * 64, generator=generator)
        yield {"input_features": sound, "feature_lens": torch.full((batch,), 64), "aftercnn_lens": torch.full((batch,), 32)}
    sounds = [name for name in _SOUNDS if name in wanted]
    for sound in _sounds(config, batch, generator) if sounds else ():
        heard = {name: sound for name in sounds}
        yield heard | {n: x for n, x in text.items() if n != "input_ids"}
        yield heard | text
    if "past_values" in wanted:
        yield {name: x for name, x in _series(config, batch, generator).items() if name in wanted}
    for name in ("inputs_embeds", *_ROWS):
        for width in dict.fromkeys(_of_config(config, width) for width in _WIDTHS) if name in wanted else ():
            rows = torch.randn(batch, LENGTH, width or 64, generator=generator)
            yield {name: rows}
            yield {name: rows} | {n: x for n, x in text.items() if n != "input_ids"}
            if "encoder_hidden_states" in wanted:
                yield {name: rows, "encoder_hidden_states": rows}


def needed(model):
    """Names of the arguments without a default."""
    wanted = inspect.signature(model.forward).parameters
    return [name for name, x in wanted.items() if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]


def candidates(model, batch=2):
    """Sets of arguments of forward(), without a mask; the first one that the model takes is the right one."""
    config, generator = model.config, torch.Generator().manual_seed(3)
    wanted = inspect.signature(model.forward).parameters
    if "grid_thw" in wanted or (model.main_input_name != "input_ids" and "image_grid_thw" in wanted):
        patches = _patches(config, wanted, generator)
        yield patches
        if "merge_sizes" in wanted:
            yield patches | {"merge_sizes": torch.ones(2, dtype=torch.long)}
    all_needed = set(needed(model))
    for given in _given(config, wanted, batch, generator):
        if all_needed <= given.keys():
            yield given
        for mask in _masks(wanted, given):
            if all_needed <= given.keys() | mask.keys():
                yield given | mask
