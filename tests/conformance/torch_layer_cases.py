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
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.cohere.modeling_cohere import CohereAttention, CohereRotaryEmbedding
from transformers.models.glm.modeling_glm import GlmAttention, GlmRotaryEmbedding
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.t5.modeling_t5 import T5Attention

BATCH, EMBED, HEADS, LENGTH, MEMORY = 2, 64, 4, 11, 13
# max|got - want| <= t * max|want|
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=lambda dtype: str(dtype).removeprefix("torch."))
EAGER = {"attn_implementation": "eager"}  # returns the weights


class Case(NamedTuple):
    """A module and how it is called: with query, key, value and a mask to add, [B, H, Sq, Sk], of which a causal module
    gets the later keys hidden, and with a window those before it. Returns Y and the weights of each head. `memory`: the
    sizes of keys and values, if they may differ from the queries."""

    module: torch.nn.Module
    config: dict[str, Any]
    prefix: str
    call: Callable
    memory: tuple[int, int] | None = None
    is_causal: bool = False
    has_rotary: bool = False
    window: int | None = None

    def run(self, query, key=None, value=None, mask=0.0):
        """In float64."""
        query = query.double()
        key = query if key is None else key.double()
        full = torch.zeros(len(query), HEADS, query.shape[1], key.shape[1], dtype=torch.float64) + mask
        if self.is_causal:
            sees = sliding_window_causal_mask_function(self.window) if self.window else causal_mask_function
            i, j = torch.arange(query.shape[1])[:, None], torch.arange(key.shape[1])[None]
            full = full.masked_fill(~(sees(0, 0, i, j) & (j <= i)), -torch.inf)
        with torch.no_grad():
            y, weights = self.call(self.module, query, key, key if value is None else value.double(), full)
        return y.numpy(), weights.numpy()


def multihead_of(module, memory):
    torch.nn.init.normal_(module.out_proj.bias)

    def call(m, query, key, value, mask):
        return m(query, key, value, attn_mask=mask.flatten(0, 1), average_attn_weights=False)

    return Case(module, {"num_attention_heads": HEADS}, "attn.", call, memory)


def multihead():
    module = torch.nn.MultiheadAttention(EMBED, HEADS, batch_first=True)
    torch.nn.init.normal_(module.in_proj_bias)
    return multihead_of(module, (EMBED, EMBED))


def multihead_with_bias_kv():
    return multihead_of(torch.nn.MultiheadAttention(EMBED, HEADS, batch_first=True, add_bias_kv=True), (EMBED, EMBED))


def multihead_of_other_sizes():
    return multihead_of(torch.nn.MultiheadAttention(EMBED, HEADS, batch_first=True, kdim=48, vdim=40), (48, 40))


def bert_config(is_decoder):
    return transformers.BertConfig(hidden_size=EMBED, num_attention_heads=HEADS, is_decoder=is_decoder, **EAGER)


def bert_of(config):
    def call(m, query, key, value, mask):
        y, weights = m.self(query, mask)
        return m.output.dense(y), weights

    module = BertAttention(config)
    return Case(module, config.to_dict(), "encoder.layer.0.attention.", call, is_causal=config.is_decoder)


def bert():
    return bert_of(bert_config(is_decoder=False))


def bert_decoder():
    return bert_of(bert_config(is_decoder=True))


def bert_cross():
    def call(m, query, key, value, mask):
        y, weights = m.self(query, key, mask)
        return m.output.dense(y), weights

    config = bert_config(is_decoder=True)
    module = BertAttention(config, is_cross_attention=True)
    return Case(module, config.to_dict(), "encoder.layer.0.crossattention.", call, (EMBED, EMBED))


def gpt2():
    config = transformers.GPT2Config(n_embd=EMBED, n_head=HEADS, **EAGER)
    module = GPT2Attention(config, layer_idx=0)
    torch.nn.init.normal_(module.c_attn.bias)
    call = lambda m, query, key, value, mask: m(query, attention_mask=mask)  # noqa: E731
    return Case(module, config.to_dict(), "h.0.attn.", call, is_causal=True)


def with_rotary(module, config, rotary, layer=3, window=None, **settings):
    def call(m, query, key, value, mask):
        return m(query, rotary(query, torch.arange(query.shape[1])[None]), mask)

    settings = config.to_dict() | settings
    prefix = f"model.layers.{layer}.self_attn."
    return Case(module, settings, prefix, call, is_causal=True, has_rotary=True, window=window)


GROUPED = EAGER | {
    "hidden_size": EMBED,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
}
# So short that in LENGTH tokens all pairs turn: some are kept, some are divided, some are in between.
TRAINED = {"factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = TRAINED | {"rope_type": "llama3", "rope_theta": 10000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = TRAINED | {"rope_type": "yarn", "rope_theta": 10000.0, "beta_fast": 8.0, "beta_slow": 0.5}


def llama_of(rope, **settings):
    config = transformers.LlamaConfig(**GROUPED, rope_parameters=dict(rope))
    return with_rotary(LlamaAttention(config, layer_idx=3), config, LlamaRotaryEmbedding(config), **settings)


def llama():
    return llama_of({"rope_type": "default", "rope_theta": 10000.0})


def llama3():
    return llama_of(LLAMA3)


def before_version_5(rope):
    """The settings as older versions of transformers save them."""
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "rope_type")}
    scaling |= {"type": rope["rope_type"]}
    return {"rope_parameters": None, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def llama_linear():
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
    return llama_of(rope, **before_version_5(rope))


def llama_yarn():
    return llama_of(YARN)


def llama_yarn_mscale():
    rope = YARN | {"mscale": 1.5, "mscale_all_dim": 0.5}
    return llama_of(rope, **before_version_5(rope))


def qwen3():
    config = transformers.Qwen3Config(**GROUPED)
    module = Qwen3Attention(config, layer_idx=0)
    torch.nn.init.uniform_(module.q_norm.weight, 0.5, 1.5)
    torch.nn.init.uniform_(module.k_norm.weight, 0.5, 1.5)
    return with_rotary(module, config, LlamaRotaryEmbedding(config))


def cohere():
    config = transformers.CohereConfig(**GROUPED)
    return with_rotary(CohereAttention(config, layer_idx=3), config, CohereRotaryEmbedding(config))


def glm():
    config = transformers.GlmConfig(**GROUPED)
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
    return with_rotary(GlmAttention(config, layer_idx=3), config, GlmRotaryEmbedding(config))


def qwen2_window():
    config = transformers.Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=5, max_window_layers=3)
    module = Qwen2Attention(config, layer_idx=3)
    assert module.sliding_window == 5
    return with_rotary(module, config, LlamaRotaryEmbedding(config), window=5, layer_types=None)


def qwen2():
    config = transformers.Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=5, max_window_layers=3)
    module = Qwen2Attention(config, layer_idx=2)
    assert module.sliding_window is None
    return with_rotary(module, config, LlamaRotaryEmbedding(config), layer=2)


def mistral():
    config = transformers.MistralConfig(**GROUPED, sliding_window=3)
    return with_rotary(MistralAttention(config, layer_idx=3), config, LlamaRotaryEmbedding(config), window=3)


def gpt_oss_of(layer, window):
    """Its layers have a window by turns."""
    rope = YARN | {"truncate": False}
    config = transformers.GptOssConfig(**GROUPED, rope_parameters=rope, sliding_window=4)
    module = GptOssAttention(config, layer_idx=layer)
    assert module.sliding_window == window
    torch.nn.init.normal_(module.sinks)
    return with_rotary(module, config, GptOssRotaryEmbedding(config), layer, window)


def gpt_oss():
    return gpt_oss_of(3, None)


def gpt_oss_window():
    return gpt_oss_of(2, 4)


def t5_of(prefix, is_decoder, memory=None):
    config = transformers.T5Config(
        d_model=EMBED, num_heads=HEADS, d_kv=24, relative_attention_max_distance=20, is_decoder=is_decoder, **EAGER
    )
    module = T5Attention(config, has_relative_attention_bias=memory is None, layer_idx=0)

    def call(m, query, key, value, mask):
        y, _, weights = m(query, mask, key_value_states=None if memory is None else key)
        return y, weights

    return Case(module, config.to_dict(), prefix, call, memory, is_causal=is_decoder and memory is None)


def t5():
    return t5_of("encoder.block.0.layer.0.SelfAttention.", is_decoder=False)


def t5_decoder():
    return t5_of("decoder.block.0.layer.0.SelfAttention.", is_decoder=True)


def t5_cross():
    return t5_of("decoder.block.0.layer.1.EncDecAttention.", is_decoder=True, memory=(EMBED, EMBED))


TORCH = [multihead, multihead_with_bias_kv, multihead_of_other_sizes]
ROPE = [llama, llama3, llama_linear, llama_yarn, llama_yarn_mscale, cohere, glm, qwen3, gpt_oss]
WINDOW = [mistral, qwen2, qwen2_window, gpt_oss_window]
CAUSAL = [bert_decoder, gpt2, t5_decoder, *ROPE, *WINDOW]
SELF = [bert, t5, *CAUSAL]
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
    with RaptServer(f"--model_repository={folder}", "--kv_cache_bytes=67108864") as server:
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
    if not isinstance(case.module, torch.nn.MultiheadAttention):
        return inputs
    return inputs | {"value": draw(MEMORY, value)}


def to_numpy(x):
    return x.float().numpy().astype(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def outputs_of(cases, name, stored, inputs, mask=None, extra={}, parameters=None):
    """Returns Y and the weights of the layer, then of its module with a mask to add."""
    client, made = cases
    case = made[name, stored]
    want = case.run(**inputs, mask=0.0 if mask is None else mask.double())
    result = client.infer(
        f"{name}_{STORED[stored]}",
        [to_input(tensor, to_numpy(x)) for tensor, x in (inputs | extra).items()],
        outputs=[triton.InferRequestedOutput(output) for output in ("Y", "weights")],
        parameters=parameters,
    )
    return [result.as_numpy(output).astype(np.float64) for output in ("Y", "weights")], want


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
    visible[..., 0] = True  # a row that sees nothing is NaN in transformers
    visible.diagonal(dim1=-2, dim2=-1)[:] = True  # and with a window
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
    lengths = torch.tensor([LENGTH - 2, LENGTH])  # a window shows the last query some keys
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


@DTYPES
@every(CAUSAL)
def test_a_sequence_is_its_module(cases, name, dtype):
    """The prompt in one call, then token by token."""
    client, case = cases[0], cases[1][name, torch.float32]
    query = random_inputs(case, dtype)["query"][:1]
    want, _ = case.run(query)
    prompt, got = LENGTH - 5, []
    for begin, end in [(0, prompt)] + [(n, n + 1) for n in range(prompt, LENGTH)]:
        flags = {"sequence_id": 1, "sequence_start": begin == 0, "sequence_end": end == LENGTH}
        step = client.infer(f"{name}_F32", [to_input("query", to_numpy(query[:, begin:end]))], **flags)
        got.append(step.as_numpy("Y").astype(np.float64))
    check(case, dtype, ([np.concatenate(got, 1)], [want]))
