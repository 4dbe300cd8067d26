"""Layers with the random weights of PyTorch's and transformers' attention modules, saved by the package safetensors,
against these modules. `./dev test torch` runs it."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
import tritonclient.grpc as triton
from attention_client import to_input
from rapt_server import RaptServer
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.t5.modeling_t5 import T5Attention

EMBED, HEADS, LENGTH = 64, 4, 11
TYPES = {torch.float32: ("FP32", 1e-5), torch.float16: ("FP16", 4e-3), torch.bfloat16: ("BF16", 3e-2)}


def causal_mask(x):
    return torch.full((LENGTH, LENGTH), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]


def multihead():
    module = torch.nn.MultiheadAttention(EMBED, HEADS, batch_first=True, add_bias_kv=True)
    torch.nn.init.normal_(module.in_proj_bias)
    torch.nn.init.normal_(module.out_proj.bias)
    return module, {"num_attention_heads": HEADS}, "", lambda m, x: m(x, x, x)[0]


def bert():
    config = transformers.BertConfig(hidden_size=EMBED, num_attention_heads=HEADS, attn_implementation="eager")
    forward = lambda m, x: m.output.dense(m.self(x)[0])  # noqa: E731
    return BertAttention(config), config.to_dict(), "encoder.layer.0.attention.", forward


def gpt2():
    config = transformers.GPT2Config(n_embd=EMBED, n_head=HEADS, attn_implementation="eager")
    return GPT2Attention(config, layer_idx=0), config.to_dict(), "h.0.attn.", lambda m, x: m(x, attention_mask=causal_mask(x))[0]


def with_rotary(module, config):
    rotary = LlamaRotaryEmbedding(config)
    forward = lambda m, x: m(x, rotary(x, torch.arange(LENGTH)[None]), causal_mask(x))[0]  # noqa: E731
    settings = config.to_dict() | {"rapt": {"is_causal": True}}
    return module, settings, "model.layers.3.self_attn.", forward


def llama():
    config = transformers.LlamaConfig(
        hidden_size=EMBED, num_attention_heads=HEADS, num_key_value_heads=2, head_dim=32, attn_implementation="eager"
    )
    return with_rotary(LlamaAttention(config, layer_idx=0), config)


def qwen3():
    config = transformers.Qwen3Config(
        hidden_size=EMBED, num_attention_heads=HEADS, num_key_value_heads=2, head_dim=32, attn_implementation="eager"
    )
    module = Qwen3Attention(config, layer_idx=0)
    torch.nn.init.uniform_(module.q_norm.weight, 0.5, 1.5)
    torch.nn.init.uniform_(module.k_norm.weight, 0.5, 1.5)
    return with_rotary(module, config)


def t5():
    config = transformers.T5Config(d_model=EMBED, num_heads=HEADS, d_kv=24, relative_attention_max_distance=20)
    module = T5Attention(config, has_relative_attention_bias=True)
    return module, config.to_dict(), "encoder.block.0.layer.0.SelfAttention.", lambda m, x: m(x)[0]


MODULES = [multihead, bert, gpt2, llama, qwen3, t5]


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """Modules by name, with their forward pass, and a server with their weights."""
    folder, made = tmp_path_factory.mktemp("models"), {}
    torch.manual_seed(26)
    for make in MODULES:
        module, config, prefix, forward = make()
        model = folder / make.__name__
        model.mkdir()
        tensors = {prefix + name: tensor.contiguous() for name, tensor in module.state_dict().items()}
        tensors["another.layer.weight"] = torch.zeros(3, dtype=torch.int64)
        safetensors.torch.save_file(tensors, model / "model.safetensors", {"format": "pt"})
        config["rapt"] = config.get("rapt", {}) | {"prefix": prefix}
        (model / "config.json").write_text(json.dumps(config, default=str))
        made[make.__name__] = (module.eval(), forward)
    with RaptServer(f"--model_repository={folder}") as server:
        with triton.InferenceServerClient(server.grpc_address) as client:
            yield client, made


@pytest.mark.parametrize("dtype", list(TYPES), ids=[name for name, _ in TYPES.values()])
@pytest.mark.parametrize("name", [make.__name__ for make in MODULES])
def test_a_layer_is_its_module(modules, name, dtype):
    client, made = modules
    module, forward = made[name]
    x = torch.randn(2, LENGTH, EMBED, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        want = forward(module.double(), x.double()).numpy()
    datatype, tolerance = TYPES[dtype]
    query = x.float().numpy().astype(ml_dtypes.bfloat16) if dtype == torch.bfloat16 else x.numpy()
    got = client.infer(name, [to_input("query", query)]).as_numpy("Y").astype(np.float64)
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error <= tolerance, f"{name} in {datatype} is off by {error} of the largest number"
