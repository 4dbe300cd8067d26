"""Whole models of transformers with random weights, saved as transformers saves them: what each attention module of a model
computed in its forward pass, in float64, against the layer of the model's folder. Every model_type of docs/layers.md has to
pass, also where config.json leaves out what the class says. `./dev test torch` runs it."""

import json
import pathlib
import re

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
import tritonclient.grpc as triton
from attention_client import to_input
from rapt_server import RaptServer
from tritonclient.utils import InferenceServerException

LENGTH, LAYERS = 11, 2
# Of each naming the first tensor under a prefix, and what computes the layer's input and output there.
NAMINGS = {
    "llama": ("q_proj.weight", "", ""),
    "bert": ("self.query.weight", ".self", ".output.dense"),
    "gpt2": ("c_attn.weight", "", ""),
    "t5": ("q.weight", "", ""),
}
DOCUMENT = pathlib.Path(__file__).parents[2] / "docs/layers.md"
TYPES = {
    name: naming
    for naming in NAMINGS
    for name in re.search(rf"^\| `{naming}` \| ([^|`]+) \|$", DOCUMENT.read_text(), re.MULTILINE)[1].strip().split(", ")
}
# Two picture models read their text by a class of another name.
TEXT_OF = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "moe_k": 2,
    "num_experts_per_tok": 2,
    "embedding_size": 64,
    "input_embedding_size": 64,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_sparse_encoder_layers": 0,
    "num_sparse_decoder_layers": 0,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": LAYERS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OWN = {
    "granitemoehybrid": {"layer_types": ["full_attention"] * LAYERS, "position_embedding_type": "rope", "mamba_n_heads": 8},
    "qwen2_vl_text": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
    "qwen2_5_vl_text": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
    "qwen3_vl_text": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
    "granite": {"attention_multiplier": 0.3},
    "smollm3": {"no_rope_layers": [1] * LAYERS},
}
MIXED = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
QWEN = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
WINDOWS = {
    "dots1": MIXED,
    "gpt_oss": MIXED,
    "ministral": MIXED,
    "mistral": {"sliding_window": 3},
    "mixtral": {"sliding_window": 3},
    "qwen2": QWEN,
    "qwen2_5_vl_text": QWEN,
    "qwen2_vl_text": QWEN,
    "qwen3": QWEN,
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 3},
    "starcoder2": {"sliding_window": 3},
}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 16}
# The text and the pictures of models that have both.
TEXTS = {
    "llava": ("llama", VISION | {"model_type": "clip_vision_model"}),
    "mistral3": ("mistral", VISION | {"model_type": "pixtral", "head_dim": 16}),
    "qwen2_5_vl": ("qwen2_5_vl_text", {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}),
    "qwen2_vl": ("qwen2_vl_text", {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}),
    "qwen3_vl": ("qwen3_vl_text", {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}),
}
# These classes scale their angles, leave some layers without any, or had another rope_theta in version 4, where the file says nothing.
NEEDS = {
    "gpt_oss": "rope_parameters is missing",
    "apertus": "rope_parameters is missing",
    "smollm3": "no_rope_layers is absent",
    "cohere": "rope_theta is missing",
    "qwen3_vl_text": "rope_theta is missing",
}


def config_of(model_type, **more):
    model_type = TEXT_OF.get(model_type, model_type)
    known = transformers.AutoConfig.for_model(model_type)
    names = known.to_dict().keys() | set(known.attribute_map)
    renamed = set(known.attribute_map.values())
    small = {n: v for n, v in SMALL.items() if n in names and not (n in known.attribute_map and known.attribute_map[n] in renamed & names & SMALL.keys())}
    return transformers.AutoConfig.for_model(model_type, **small | OWN.get(model_type, {}) | more)


class Recorded:
    """The inputs and the output of each attention module of a model in one forward pass. prefix -> (tensors, Y)."""

    def __init__(self, config, naming):
        torch.manual_seed(7)
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.model = transformers.AutoModel.from_config(config, **eager).double().eval()
        for parameter in self.model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)  # norms, biases and sinks
        self.inputs, self.outputs = {}, {}
        first, inside, outside = NAMINGS[naming]
        for name in self.model.state_dict():
            if not name.endswith("." + first):
                continue
            prefix = name.removesuffix(first)
            modules = dict(self.model.named_modules())
            modules[prefix[:-1] + inside].register_forward_pre_hook(self.keep_input(prefix), with_kwargs=True)
            modules[prefix[:-1] + outside].register_forward_hook(self.keep_output(prefix))
        ids = torch.randint(3, 128, (2, LENGTH), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            self.model(input_ids=ids, **({"decoder_input_ids": ids[:, :7]} if config.is_encoder_decoder else {}))

    def keep_input(self, prefix):
        def keep(module, args, kwargs):
            key = kwargs.get("key_value_states", kwargs.get("encoder_hidden_states"))
            query = args[0] if args else kwargs["hidden_states"]
            self.inputs[prefix] = {"query": query} | ({} if key is None else {"key": key})

        return keep

    def keep_output(self, prefix):
        def keep(module, args, output):
            self.outputs[prefix] = output[0] if isinstance(output, (tuple, list)) else output

        return keep

    def tensors(self):
        return {name: tensor.clone().contiguous() for name, tensor in self.model.state_dict().items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def client(folder):
    with RaptServer(f"--model_repository={folder}") as server:
        with triton.InferenceServerClient(server.grpc_address) as connected:
            yield connected


def check_layers(client, folder, name, recorded, settings):
    """Compares every recorded layer of a model whose config.json has these settings."""
    assert recorded.outputs
    model = folder / name
    model.mkdir(exist_ok=True)
    safetensors.torch.save_file(recorded.tensors(), model / "model.safetensors", {"format": "pt"})
    for prefix, want in recorded.outputs.items():
        (model / "config.json").write_text(json.dumps(settings | {"rapt": {"prefix": prefix}}))
        client.load_model(name)
        inputs = [to_input(tensor, x.numpy()) for tensor, x in recorded.inputs[prefix].items()]
        got = client.infer(name, inputs, outputs=[triton.InferRequestedOutput("Y")]).as_numpy("Y")
        error = np.abs(got - want.numpy()).max() / np.abs(want.numpy()).max()
        assert error <= 1e-6, f"{prefix} is off by {error} of the largest number"  # transformers' angles are float32
    client.unload_model(name)


def saved(config, folder):
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_is_its_layers(client, folder, tmp_path, model_type):
    config = config_of(model_type)
    recorded = Recorded(config, TYPES[model_type])
    settings = saved(config, tmp_path) | {"model_type": model_type}
    check_layers(client, folder, model_type, recorded, settings)


@pytest.mark.parametrize("model_type", TYPES)
def test_the_class_says_what_the_file_leaves_out(client, folder, tmp_path, model_type):
    """Also of rotary embedding, which transformers always writes."""
    config = config_of(model_type, **{"rope_parameters": None} if model_type in OWN else {})
    recorded = Recorded(config_of(model_type), TYPES[model_type])
    default = transformers.AutoConfig.for_model(TEXT_OF.get(model_type, model_type)).to_dict()
    settings = {n: v for n, v in saved(config, tmp_path).items() if v != default.get(n) or n == "model_type"}
    settings |= {"model_type": model_type}
    heads = {"num_attention_heads", "n_head", "num_heads"} & (settings.keys() | default.keys())
    settings |= {name: 4 for name in heads}
    for name in ("rope_parameters", "no_rope_layers"):
        settings.pop(name, None)
    if message := NEEDS.get(model_type):
        with pytest.raises(InferenceServerException, match=message):
            check_layers(client, folder, f"{model_type}_short", recorded, settings)
    else:
        check_layers(client, folder, f"{model_type}_short", recorded, settings)


@pytest.mark.parametrize("model_type", WINDOWS)
def test_a_model_has_its_window(client, folder, tmp_path, model_type):
    config = config_of(model_type, **WINDOWS[model_type])
    check_layers(client, folder, f"{model_type}_window", Recorded(config, "llama"), saved(config, tmp_path))


@pytest.mark.parametrize("model_type", TEXTS)
def test_the_text_of_a_picture_model_is_its_layers(client, folder, tmp_path, model_type):
    text, vision = TEXTS[model_type]
    config = transformers.AutoConfig.for_model(model_type, text_config=config_of(text).to_dict(), vision_config=vision)
    recorded = Recorded(config, "llama")
    assert len(recorded.outputs) == LAYERS  # not those of pictures
    check_layers(client, folder, f"{model_type}_text", recorded, saved(config, tmp_path))


@pytest.mark.parametrize("model_type", [name for name, naming in TYPES.items() if naming == "bert"])
def test_a_decoder_of_berts_family_is_causal(client, folder, tmp_path, model_type):
    config = config_of(model_type, is_decoder=True)
    check_layers(client, folder, f"{model_type}_decoder", Recorded(config, "bert"), saved(config, tmp_path))
