"""Layers with the random weights of PyTorch's and transformers' attention modules, saved by the package safetensors,
against these modules in float64. `./dev test torch` runs it."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

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
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.t5.modeling_t5 import T5Attention

BATCH, EMBED, HEADS, LENGTH, MEMORY = 2, 64, 4, 11, 13
# max|got - want| <= t * max|want|
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=lambda dtype: str(dtype).removeprefix("torch."))
EAGER = {"attn_implementation": "eager"}  # returns the weights


class Case(NamedTuple):
    """A module and how it is called: with query, key, value and a mask to add, [B, H, Sq, Sk], of which a causal module
    gets the later keys hidden. Returns Y and the weights of each head. `memory`: the sizes of keys and values, if they
    may differ from the queries."""

    module: torch.nn.Module
    config: dict[str, Any]
    prefix: str
    call: Callable
    memory: tuple[int, int] | None = None
    is_causal: bool = False
    has_rotary: bool = False


def multihead_of(module, memory):
    torch.nn.init.normal_(module.out_proj.bias)

    def call(m, query, key, value, mask):
        return m(query, key, value, attn_mask=mask.flatten(0, 1), average_attn_weights=False)

    return Case(module, {"num_attention_heads": HEADS}, "", call, memory)


def multihead():
    module = torch.nn.MultiheadAttention(EMBED, HEADS, batch_first=True)
    torch.nn.init.normal_(module.in_proj_bias)
    return multihead_of(module, (EMBED, EMBED))


def multihead_with_bias_kv():
    return multihead_of(torch.nn.MultiheadAttention(EMBED, HEADS, batch_first=True, add_bias_kv=True), (EMBED, EMBED))


def multihead_of_other_sizes():
    return multihead_of(torch.nn.MultiheadAttention(EMBED, HEADS, batch_first=True, kdim=48, vdim=40), (48, 40))


def bert_config():
    return transformers.BertConfig(hidden_size=EMBED, num_attention_heads=HEADS, is_decoder=True, **EAGER)


def bert():
    def call(m, query, key, value, mask):
        y, weights = m.self(query, mask)
        return m.output.dense(y), weights

    return Case(BertAttention(bert_config()), bert_config().to_dict(), "encoder.layer.0.attention.", call)


def bert_cross():
    def call(m, query, key, value, mask):
        y, weights = m.self(query, key, mask)
        return m.output.dense(y), weights

    module = BertAttention(bert_config(), is_cross_attention=True)
    return Case(module, bert_config().to_dict(), "encoder.layer.0.crossattention.", call, (EMBED, EMBED))


def gpt2():
    config = transformers.GPT2Config(n_embd=EMBED, n_head=HEADS, **EAGER)
    module = GPT2Attention(config, layer_idx=0)
    torch.nn.init.normal_(module.c_attn.bias)
    call = lambda m, query, key, value, mask: m(query, attention_mask=mask)  # noqa: E731
    return Case(module, config.to_dict(), "h.0.attn.", call, is_causal=True)


def with_rotary(module, config, rotary, **settings):
    def call(m, query, key, value, mask):
        return m(query, rotary(query, torch.arange(query.shape[1])[None]), mask)

    settings = config.to_dict() | settings | {"rapt": {"is_causal": True}}
    return Case(module, settings, "model.layers.3.self_attn.", call, is_causal=True, has_rotary=True)


GROUPED = EAGER | {"hidden_size": EMBED, "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 32}


def llama():
    config = transformers.LlamaConfig(**GROUPED)
    return with_rotary(LlamaAttention(config, layer_idx=0), config, LlamaRotaryEmbedding(config))


def qwen3():
    config = transformers.Qwen3Config(**GROUPED)
    module = Qwen3Attention(config, layer_idx=0)
    torch.nn.init.uniform_(module.q_norm.weight, 0.5, 1.5)
    torch.nn.init.uniform_(module.k_norm.weight, 0.5, 1.5)
    return with_rotary(module, config, LlamaRotaryEmbedding(config))


def gpt_oss():
    rope = {"rope_type": "default", "rope_theta": 150000.0}
    config = transformers.GptOssConfig(**GROUPED, rope_parameters=rope, layer_types=["full_attention"], num_hidden_layers=1)
    module = GptOssAttention(config, layer_idx=0)
    torch.nn.init.normal_(module.sinks)
    # Only its other layers have a window.
    return with_rotary(module, config, GptOssRotaryEmbedding(config), sliding_window=None)


def t5_of(prefix, is_decoder, memory=None):
    config = transformers.T5Config(
        d_model=EMBED, num_heads=HEADS, d_kv=24, relative_attention_max_distance=20, is_decoder=is_decoder, **EAGER
    )
    module = T5Attention(config, has_relative_attention_bias=memory is None, layer_idx=0)

    def call(m, query, key, value, mask):
        y, _, weights = m(query, mask, key_value_states=None if memory is None else key)
        return y, weights

    is_causal = is_decoder and memory is None
    settings = config.to_dict() | {"rapt": {"is_causal": is_causal}}
    return Case(module, settings, prefix, call, memory, is_causal)


def t5():
    return t5_of("encoder.block.0.layer.0.SelfAttention.", is_decoder=False)


def t5_decoder():
    return t5_of("decoder.block.0.layer.0.SelfAttention.", is_decoder=True)


def t5_cross():
    return t5_of("decoder.block.0.layer.1.EncDecAttention.", is_decoder=True, memory=(EMBED, EMBED))


TORCH = [multihead, multihead_with_bias_kv, multihead_of_other_sizes]
SELF = [bert, gpt2, llama, qwen3, gpt_oss, t5, t5_decoder]
CROSS = [bert_cross, t5_cross]
STORED = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def every(makers):
    return pytest.mark.parametrize("name", [make.__name__ for make in makers])


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Cases by name and the type of their weights, and a client of a server with the layers "name_type"."""
    folder, made = tmp_path_factory.mktemp("models"), {}
    for make in TORCH + SELF + CROSS:
        for stored, suffix in STORED.items():
            torch.manual_seed(26)
            case = make()
            case.module.to(stored)
            model = folder / f"{make.__name__}_{suffix}"
            model.mkdir()
            tensors = {case.prefix + name: tensor.contiguous() for name, tensor in case.module.state_dict().items()}
            tensors["another.layer.weight"] = torch.zeros(3, dtype=torch.int64)
            safetensors.torch.save_file(tensors, model / "model.safetensors", {"format": "pt"})
            settings = case.config | {"rapt": case.config.get("rapt", {}) | {"prefix": case.prefix}}
            (model / "config.json").write_text(json.dumps(settings, default=str))
            case.module.double().eval()
            made[make.__name__, stored] = case
    with RaptServer(f"--model_repository={folder}") as server:
        with triton.InferenceServerClient(server.grpc_address) as client:
            yield client, made


def random_inputs(case, dtype):
    """query, and of cross-attention key and value."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda length, size: torch.randn(BATCH, length, size, generator=generator).to(dtype)  # noqa: E731
    inputs = {"query": draw(LENGTH, EMBED)}
    if case.memory is None:
        return inputs
    key, value = case.memory
    inputs["key"] = draw(MEMORY, key)
    return inputs if case.prefix else inputs | {"value": draw(MEMORY, value)}  # only PyTorch's layer has one


def to_numpy(x):
    return x.float().numpy().astype(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def outputs_of(cases, name, stored, inputs, mask=None, extra={}, parameters=None):
    """Returns Y and the weights of the layer, then of its module with a mask to add."""
    client, made = cases
    case = made[name, stored]
    wide = {tensor: x.double() for tensor, x in inputs.items()}
    key = wide.get("key", wide["query"])
    lengths = wide["query"].shape[1], key.shape[1]
    full = torch.zeros(BATCH, HEADS, *lengths, dtype=torch.float64)
    if mask is not None:
        full = full + mask.double()
    if case.is_causal:
        full = full.masked_fill(torch.ones(lengths, dtype=torch.bool).triu(1), -torch.inf)
    with torch.no_grad():
        want = case.call(case.module, wide["query"], key, wide.get("value", key), full)
    result = client.infer(
        f"{name}_{STORED[stored]}",
        [to_input(tensor, to_numpy(x)) for tensor, x in (inputs | extra).items()],
        outputs=[triton.InferRequestedOutput(output) for output in ("Y", "weights")],
        parameters=parameters,
    )
    return [result.as_numpy(output).astype(np.float64) for output in ("Y", "weights")], [x.numpy() for x in want]


def check(case, dtype, outputs):
    # Transformers computes angles in float32, also for float64.
    tolerance = max(TOLERANCES[dtype], 1e-6) if case.has_rotary else TOLERANCES[dtype]
    for output, got, want in zip(("Y", "weights"), *outputs):
        assert got.shape == want.shape, output
        error = np.abs(got - want).max() / np.abs(want).max()
        assert error <= tolerance, f"{output} is off by {error} of the largest number"


@DTYPES
@every(TORCH + SELF + CROSS)
def test_a_layer_is_its_module(cases, name, dtype):
    case = cases[1][name, torch.float32]
    check(case, dtype, outputs_of(cases, name, torch.float32, random_inputs(case, dtype)))


@pytest.mark.parametrize("stored", list(STORED), ids=STORED.values())
@every(TORCH + SELF + CROSS)
def test_weights_of_any_type(cases, name, stored):
    case = cases[1][name, stored]
    dtype = torch.float64 if stored == torch.float64 else torch.float32  # weights of F64 take no other inputs
    check(case, dtype, outputs_of(cases, name, stored, random_inputs(case, dtype)))


@every([multihead, multihead_with_bias_kv])
def test_self_attention_of_a_layer_that_may_cross(cases, name):
    case = cases[1][name, torch.float32]
    query = {"query": random_inputs(case, torch.float32)["query"]}
    check(case, torch.float32, outputs_of(cases, name, torch.float32, query))


def visible_keys(inputs, shape):
    keys = inputs.get("key", inputs["query"]).shape[1]
    visible = torch.rand(*shape, LENGTH, keys, generator=torch.Generator().manual_seed(2)) < 0.7
    visible[..., 0] = True
    return visible


def hide(visible):
    return torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)


@pytest.mark.parametrize("shape", [(), (HEADS,), (BATCH, 1), (BATCH, HEADS)], ids=str)
@every(TORCH + SELF + CROSS)
def test_a_mask_of_true_and_false(cases, name, shape):
    case = cases[1][name, torch.float32]
    inputs = random_inputs(case, torch.float32)
    visible = visible_keys(inputs, shape)
    check(case, torch.float32, outputs_of(cases, name, torch.float32, inputs, hide(visible), {"attn_mask": visible}))


@DTYPES
@every(TORCH + SELF + CROSS)
def test_a_mask_to_add(cases, name, dtype):
    case = cases[1][name, torch.float32]
    inputs = random_inputs(case, dtype)
    visible = visible_keys(inputs, (1, HEADS))
    mask = torch.randn(visible.shape, generator=torch.Generator().manual_seed(3)).to(dtype) + hide(visible).to(dtype)
    check(case, dtype, outputs_of(cases, name, torch.float32, inputs, mask, {"attn_mask": mask}))


@every(TORCH + SELF + CROSS)
def test_lengths_hide_the_padding(cases, name):
    case = cases[1][name, torch.float32]
    inputs = random_inputs(case, torch.float32)
    lengths = torch.tensor([5, LENGTH])
    keys = inputs.get("key", inputs["query"]).shape[1]
    mask = hide(torch.arange(keys) < lengths[:, None, None, None])
    check(case, torch.float32, outputs_of(cases, name, torch.float32, inputs, mask, {"nonpad_kv_seqlen": lengths}))


@every([bert, bert_cross])
def test_tokens_hide_the_padding(cases, name):
    case = cases[1][name, torch.float32]
    inputs = random_inputs(case, torch.float32)
    keys = inputs.get("key", inputs["query"]).shape[1]
    ids = torch.randint(1, 30000, (BATCH, keys), generator=torch.Generator().manual_seed(4))
    ids[0, 6:] = 0  # BertConfig's pad_token_id
    mask = hide(ids != 0)[:, None, None]
    check(case, torch.float32, outputs_of(cases, name, torch.float32, inputs, mask, {"input_ids": ids}))


@every(TORCH)
def test_averaged_weights(cases, name):
    case = cases[1][name, torch.float32]
    inputs = random_inputs(case, torch.float32)
    got, (y, _) = outputs_of(cases, name, torch.float32, inputs, parameters={"average_attn_weights": True})
    with torch.no_grad():
        averages = case.module(*(x.double() for x in inputs.values()), average_attn_weights=True)[1].numpy()
    check(case, torch.float32, (got, (y, averages)))


@every([multihead, bert])
def test_a_call_that_is_causal(cases, name):
    case = cases[1][name, torch.float32]
    query = {"query": random_inputs(case, torch.float32)["query"]}
    mask = hide(torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    check(case, torch.float32, outputs_of(cases, name, torch.float32, query, mask, parameters={"is_causal": True}))
