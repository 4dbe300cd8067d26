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
    "bamba": {"mamba_d_head": 8},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": 96, "pad_token_id": 1, "mask_token_id": 4},
    "glm5_next_text": {"index_topk": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"], "window_size": 4},
    "granitemoehybrid": {"mamba_d_head": 8},
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
    "glm4v_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}},
    "glm_ocr_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}},
    "glm_image_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}},
    "qwen2_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}},
    "qwen2_5_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}},
    "glm4v_moe_text": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    },
}
_KEPT = ("num_feat_extract_layers", "depths")  # sizes that lists follow

# Widths are divided by one number, which keeps what models demand of them, such as that of heads.
_DIVISOR = 8
_WIDTH = re.compile(
    r"hidden|d_model|n_embd|embed|_dims?$|^dim|intermediate|ffn|inner|rank|d_ff|d_kv|width|channels|projector|projection|tdnn"
    r"|bottleneck|multi_scalar|query_pre_attn|output_size|fpn|decoder_input|classifier_proj_size|mamba_d_ssm"
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
    r"image_size|input_image_size|pretrain_image_size": 32,
    r"max_position_embeddings|n_positions|max_source_positions|max_target_positions|max_seq_len|n_ctx": 256,
}
_MOST_LAYERS = 4


def families():
    """Folder -> model types that it has."""
    found = {}
    for model_type in CONFIG_MAPPING_NAMES:
        folder = transformers.models.auto.configuration_auto.model_type_to_module_name(model_type)
        found.setdefault(folder, []).append(model_type)
    root = pathlib.Path(transformers.__file__).parent / "models"
    has = {}
    for folder, types in found.items():
        sources = [path.read_text() for path in sorted((root / folder).glob("modeling_*.py"))]
        if any(re.search(r"class \w*Attention\w*\(", source) for source in sources):
            has[folder] = types
    return has


def _shrink(name, value):
    if isinstance(value, bool) or name in _KEPT:
        return value
    if name == "mrope_section":
        third = sum(value) // _DIVISOR // 3
        return [sum(value) // _DIVISOR - 2 * third, third, third]
    if isinstance(value, int):
        for names, most in _MOST.items():
            if re.fullmatch(names, name):
                return min(value, most)
        if re.search(r"(^|_)vocab_size", name):
            return min(value, VOCABULARY)
        if re.search(r"_token_(id|index)$", name) and value >= VOCABULARY:
            return VOCABULARY - 1 - sum(map(ord, name)) % 10
        divides = value % _DIVISOR == 0 and value >= 2 * _DIVISOR
        if divides and _WIDTH.search(name) and not _NO_WIDTH.search(name):
            return value // _DIVISOR
    if isinstance(value, (list, tuple)):
        return type(value)(_shrink(name, x) for x in value)
    if isinstance(value, dict) and name not in ("id2label", "label2id"):
        return {key: _shrink(str(key), x) for key, x in value.items()}
    return value


def _picked_layers(values):
    """The first layer of each kind, and what of the configuration has an entry a layer."""
    layers = values.get("num_hidden_layers") or 0
    lists = {name: x for name, x in values.items() if isinstance(x, (list, tuple)) and len(x) == layers and layers > 2}
    kinds = {}
    for n in range(layers):
        kinds.setdefault(str([x[n] for x in lists.values()]), n)
    picked = list(kinds.values())[:_MOST_LAYERS]
    return (picked * 2)[: max(2, len(picked))], lists


def _tiny(config):
    """The arguments of a small one."""
    left_out = ("model_type", "transformers_version", "out_features", "out_indices", "stage_names", "_name_or_path")
    values = {name: value for name, value in config.to_dict().items() if name not in left_out}
    picked, lists = _picked_layers(values)
    of_layers = values.get("per_layer_config") or {}
    small = {}
    for name, value in values.items():
        part = config.__dict__.get(name)
        if isinstance(part, transformers.PretrainedConfig):
            small[name] = {"model_type": part.model_type, **_tiny(part)}
        elif name == "num_hidden_layers":
            small[name] = min(value, len(picked))
        elif name == "per_layer_config":
            small[name] = {
                f"{n:02}": _shrink(name, of_layers[f"{old:02}"]) for n, old in enumerate(picked) if f"{old:02}" in of_layers
            }
        elif name in lists:
            small[name] = [_shrink(name, value[n]) for n in picked]
        else:
            small[name] = _shrink(name, value)
    return small | CHANGES.get(config.model_type, {})


def config_class_of(model_type):
    module = importlib.import_module(
        f"transformers.models.{transformers.models.auto.configuration_auto.model_type_to_module_name(model_type)}"
    )
    return getattr(module, CONFIG_MAPPING_NAMES[model_type])


def tiny_config(model_type):
    kind = config_class_of(model_type)
    config = kind(**_tiny(kind()))
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
    for name, kind in vars(module).items():
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)) or kind.__module__ != module.__name__:
            continue
        if kind.config_class is config_class_of(model_type) and name.endswith(("Model", "Encoder", "Transformer")):
            names.append(name)
    return [getattr(module, name) for name in dict.fromkeys(names) if hasattr(module, name)]


def randomise(model):
    """Weights with which attention has a say: the initial ones make all scores nearly 0."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator).to(p.dtype)
            if p.dim() < 2:
                p.add_(noise * (0.5 if "sink" in name else 0.05))
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
    size = _of_config(config, "image_size") or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(batch, _of_config(config, "num_channels", "in_channels") or 3, height, width, generator=generator)


def _patches(config, wanted, generator):
    """Of a picture of 4 x 4 patches, for models that take rows of patches and their grid."""
    patch, frames = _of_config(config, "patch_size") or 14, _of_config(config, "temporal_patch_size") or 1
    width = (_of_config(config, "num_channels", "in_channels", "in_chans") or 3) * frames * patch * patch
    rows = torch.randn(32, width, generator=generator)
    grid = "grid_thw" if "grid_thw" in wanted else "image_grid_thw"
    return {"hidden_states" if "hidden_states" in wanted else "pixel_values": rows, grid: torch.tensor([[1, 4, 4], [1, 4, 4]])}


def _sounds(config, batch, generator):
    mels = _of_config(config, "num_mel_bins", "input_feat_per_channel", "feature_size") or 80
    length = 2 * (_of_config(config, "max_source_positions") or 32)
    yield torch.randn(batch, mels, length, generator=generator)
    yield torch.randn(batch, 64, mels, generator=generator)
    yield torch.randn(batch, 4000, generator=generator)
    yield torch.randn(batch, 1, 4000, generator=generator)


def candidates(model, batch=2):
    """Sets of arguments of forward(), without a mask; the first one that the model takes is the right one."""
    config, generator = model.config, torch.Generator().manual_seed(3)
    wanted = inspect.signature(model.forward).parameters
    text = {}
    if "input_ids" in wanted:
        text["input_ids"] = torch.randint(10, 60, (batch, LENGTH), generator=generator)
    if "decoder_input_ids" in wanted:
        text["decoder_input_ids"] = torch.randint(10, 60, (batch, 5), generator=generator)
    if "bbox" in wanted:
        text["bbox"] = torch.zeros(batch, LENGTH, 4, dtype=torch.long)
    main = model.main_input_name
    if "grid_thw" in wanted or (main != "input_ids" and "image_grid_thw" in wanted):
        yield _patches(config, wanted, generator)
    if text and (main in text or "input_ids" in wanted):
        yield text
    pixels = {}
    if "pixel_values" in wanted:
        pixels["pixel_values"] = _pixels(config, batch, generator)
        yield pixels
        yield text | pixels
    for name in ("input_features", "input_values", "audio_values"):
        if name in wanted:
            for sound in _sounds(config, batch, generator):
                yield {name: sound} | {n: x for n, x in text.items() if n != "input_ids"}
                yield {name: sound} | text
    if "inputs_embeds" in wanted:
        width = _of_config(config, "hidden_size", "d_model") or 64
        yield {"inputs_embeds": torch.randn(batch, LENGTH, width, generator=generator)}
