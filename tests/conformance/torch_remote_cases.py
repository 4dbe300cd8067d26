"""Models of transformers with random weights whose attention, keys and values are at rapt-servers: tokens are those of eager
attention in process. `./dev test torch` runs it."""

import contextlib
import copy
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import rapt
import rapt.torch
import torch
import transformers
from rapt import errors
from rapt_server import RaptServer

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=6),
    "gemma2": transformers.Gemma2Config(**SIZES, sliding_window=6, query_pre_attn_scalar=16, attn_logit_softcapping=5.0),
    "gpt_oss": transformers.GptOssConfig(**SIZES, sliding_window=6, num_local_experts=4, num_experts_per_tok=2),
}
WAYS = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 4},
}
DOCUMENT = pathlib.Path(__file__).parents[2] / "docs/disaggregation.md"
MIB = 1 << 20
torch.set_num_threads(1)  # between calls they spin, while the server needs the processors
QUICK = rapt.Retry(attempts=1)


def model_of(name, dtype=torch.float32):
    rapt.torch.register_transformers()
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]), attn_implementation="eager").eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data = 0.2 * torch.randn_like(parameter)  # so that the next token depends on the attention
        elif "sinks" in parameter_name:
            parameter.data = torch.randn_like(parameter)
    return model.to(dtype)


@pytest.fixture(params=MODELS)
def model(request):
    return model_of(request.param)


@pytest.fixture
def llama():
    return model_of("llama")


@pytest.fixture
def gpt_oss():
    """Which has windows and sinks."""
    return model_of("gpt_oss")


@pytest.fixture(scope="module")
def server():
    with RaptServer(f"--kv_cache_bytes={256 * MIB}") as running:
        yield running


@pytest.fixture(params=("http", "grpc"))
def url_of(request):
    """Returns the address of a server, over a transport."""
    return lambda server: f"{request.param}://{getattr(server, request.param + '_address')}"


@pytest.fixture
def address(server, url_of):
    """Of a server that has no caches when the test has ended."""
    yield url_of(server)
    assert server.live_caches() == 0


PROMPT = torch.randint(3, 100, (3, 9), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones_like(PROMPT)
PADDED[1, :4] = 0
PADDED[2, :7] = 0
REPEATS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]])


def generate(model, cache=None, prompt=PROMPT, attention_mask=None, new_tokens=16, **options):
    """The tokens with a RemoteCache, or with eager attention in process."""
    model.set_attn_implementation("eager" if cache is None else "rapt-server")
    torch.manual_seed(1)
    options = {"do_sample": False} | options | ({} if cache is None else {"cache": cache})
    if attention_mask is None:
        attention_mask = torch.ones_like(prompt)
    limit = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    return model.generate(prompt, attention_mask=attention_mask, **limit, **options)


# --- The same tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_in_process(model, address, way):
    inputs = {"prompt": REPEATS} if way == "prompt lookup" else {"attention_mask": PADDED}
    want = generate(model, **inputs, **WAYS[way])
    with rapt.torch.RemoteCache(address, model.config) as cache:
        assert torch.equal(generate(model, cache, **inputs, **WAYS[way]), want)
        assert len(cache.caches) == cache.batch_size == len(want) * WAYS[way].get("num_beams", 1)


@pytest.mark.parametrize("way", ("greedy", "beams"))
def test_sequences_go_to_several_servers_in_turn(gpt_oss, address, url_of, way):
    want = generate(gpt_oss, attention_mask=PADDED, **WAYS[way])
    with RaptServer(f"--kv_cache_bytes={64 * MIB}") as other:
        servers = [address, url_of(other)]
        with rapt.torch.RemoteCache(servers, gpt_oss.config) as cache:
            assert torch.equal(generate(gpt_oss, cache, attention_mask=PADDED, **WAYS[way]), want)
            assert way == "beams" or other.live_caches() == 1  # forks stay where their parents are
        assert other.live_caches() == 0


def test_beams_change_caches_by_one_call_a_step(llama, address):
    with rapt.Client(address) as client:
        update, changes = client.update_caches, []
        client.update_caches = lambda **more: (changes.append(more), update(**more))[1]
        with rapt.torch.RemoteCache(client, llama.config) as cache:
            generate(llama, cache, **WAYS["beams"], new_tokens=16)
        assert 0 < len(changes) <= 16 and any(change["forks"] and change["closes"] for change in changes)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float16, torch.bfloat16))
def test_types(address, dtype):
    model = model_of("llama", dtype)
    with torch.no_grad():
        want = model(PROMPT).logits
        model.set_attn_implementation("rapt-server")
        with rapt.torch.RemoteCache(address, model.config) as cache:
            got = model(PROMPT, cache=cache).logits
            assert {handle.dtype for handle in cache.caches} == {str(dtype).removeprefix("torch.")}
    tolerance = {torch.float64: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}[dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_a_prompt_beyond_one_message_takes_several(gpt_oss, url_of):
    prompt = torch.randint(3, 100, (3, 400), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(prompt)
    mask[1, :250] = 0
    want = generate(gpt_oss, prompt=prompt, attention_mask=mask, new_tokens=4)
    with RaptServer(f"--kv_cache_bytes={64 * MIB}", "--max_message_bytes=140000") as server:
        with rapt.torch.RemoteCache(url_of(server), gpt_oss.config) as cache:
            assert torch.equal(generate(gpt_oss, cache, prompt=prompt, attention_mask=mask, new_tokens=4), want)


def test_a_prompt_in_chunks(gpt_oss, address):
    want = generate(gpt_oss, attention_mask=PADDED)
    with rapt.torch.RemoteCache(address, gpt_oss.config) as cache:
        assert torch.equal(generate(gpt_oss, cache, attention_mask=PADDED, prefill_chunk_size=4), want)


def test_a_conversation_goes_on(gpt_oss, address):
    with rapt.torch.RemoteCache(address, gpt_oss.config) as cache:
        first = generate(gpt_oss, cache, attention_mask=PADDED)
        turn = torch.cat([first, PROMPT], dim=1)
        mask = torch.cat([PADDED, torch.ones(3, turn.shape[1] - PROMPT.shape[1], dtype=torch.int64)], dim=1)
        got = generate(gpt_oss, cache, prompt=turn, attention_mask=mask)
        assert torch.equal(got, generate(gpt_oss, prompt=turn, attention_mask=mask))


def test_reset_empties_a_cache(llama, address):
    with rapt.torch.RemoteCache(address, llama.config) as cache:
        generate(llama, cache)
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.caches == []
        assert torch.equal(generate(llama, cache, prompt=REPEATS), generate(llama, prompt=REPEATS))


def test_the_programs_of_the_document_run(address):
    programs = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names = {}
    for program in programs:
        exec(program.replace("http://127.0.0.1:8000", address), names)
        assert names["tokens"].shape == (2, 24)
    assert torch.equal(names["kept"].so_far, names["tokens"])


# --- Errors in a generation ------------------------------------------------------------------------


class Tokens(transformers.StoppingCriteria):
    """Keeps the tokens of a generation, of which an error would lose sight. Stops never."""

    def __init__(self, on_token=lambda length: None):
        self.on_token = on_token

    def __call__(self, input_ids, scores, **_):
        self.so_far = input_ids
        self.on_token(input_ids.shape[1])
        return torch.zeros(len(input_ids), dtype=torch.bool)


def go_on(model, cache, tokens, length):
    """Generates from the tokens so far up to `length`."""
    so_far = tokens.so_far
    mask = torch.cat([PADDED, torch.ones(3, so_far.shape[1] - PADDED.shape[1], dtype=torch.int64)], dim=1)
    return generate(model, cache, prompt=so_far, attention_mask=mask, new_tokens=length - so_far.shape[1])


def test_a_server_that_is_gone(gpt_oss, address, url_of):
    want = generate(gpt_oss, attention_mask=PADDED)
    with contextlib.ExitStack() as stack:
        doomed = RaptServer(f"--kv_cache_bytes={64 * MIB}").__enter__()
        client = stack.enter_context(rapt.Client(url_of(doomed), retries=QUICK))
        tokens = Tokens(lambda length: doomed.signal(signal.SIGKILL) if length == 15 else None)
        with rapt.torch.RemoteCache(client, gpt_oss.config) as cache:
            with pytest.raises(ConnectionError, match="attention of layer 0 of 3: .*recover.*else use a new RemoteCache"):
                generate(gpt_oss, cache, attention_mask=PADDED, stopping_criteria=[tokens])
            with pytest.raises(errors.Unavailable):
                cache.recover()
    assert tokens.so_far.shape[1] == 15
    with rapt.torch.RemoteCache(address, gpt_oss.config) as cache:
        assert torch.equal(go_on(gpt_oss, cache, tokens, want.shape[1]), want)


def test_keys_that_the_server_has_lost(gpt_oss, address):
    want = generate(gpt_oss, attention_mask=PADDED)
    with rapt.Client(address) as client:

        def lose(length):
            if length == 15:
                client.open_cache(client.list_caches()[1]).close()

        tokens = Tokens(lose)
        with rapt.torch.RemoteCache(address, gpt_oss.config) as cache:
            message = "layer 0 of 3: .*closed.*are lost; go on with a new RemoteCache"
            with pytest.raises(errors.NotFound, match=message) as caught:
                generate(gpt_oss, cache, attention_mask=PADDED, stopping_criteria=[tokens])
            assert caught.value.reason == "closed"
            with pytest.raises(errors.NotFound):
                cache.recover()
    with rapt.torch.RemoteCache(address, gpt_oss.config) as cache:
        assert torch.equal(go_on(gpt_oss, cache, tokens, want.shape[1]), want)


def test_a_server_without_room_goes_on_once_it_has_some(gpt_oss, url_of):
    want = generate(gpt_oss, attention_mask=PADDED, new_tokens=90)
    with RaptServer(f"--kv_cache_bytes={4 * MIB}") as server, rapt.Client(url_of(server)) as client:
        other = client.create_cache(rapt.LayerShape(kv_heads=2, head_size=16))
        page = torch.zeros(64, 2, 16)

        def fill():
            with contextlib.suppress(errors.ResourceExhausted):
                while True:
                    other.append(0, page, page)

        tokens = Tokens(lambda length: fill() if length == 20 else None)
        with rapt.torch.RemoteCache(client, gpt_oss.config) as cache:
            message = "layer . of 3: .*pages.*Once there is room, call recover"
            with pytest.raises(errors.ResourceExhausted, match=message) as caught:
                generate(gpt_oss, cache, attention_mask=PADDED, new_tokens=90, stopping_criteria=[tokens])
            assert caught.value.reason == "pages"
            other.close()
            assert cache.recover() == tokens.so_far.shape[1] - 1
            assert torch.equal(go_on(gpt_oss, cache, tokens, want.shape[1]), want)


def test_layers_that_differ_after_an_error_are_recovered(gpt_oss, address):
    """The answer of a step of one layer fails, so that the layers before it have a token more."""
    want = generate(gpt_oss, attention_mask=PADDED)
    with rapt.Client(address) as client:
        tokens, failures = Tokens(), []
        attend = client.attend_caches

        def attend_or_fail(layer, *arguments, **options):
            answer = attend(layer, *arguments, **options)
            if layer == 1 and tokens.so_far.shape[1] == 15 and not failures:
                failures.append(layer)
                raise errors.Unavailable("the answer is lost")
            return answer

        tokens.so_far = PROMPT
        client.attend_caches = attend_or_fail
        with rapt.torch.RemoteCache(client, gpt_oss.config) as cache:
            with pytest.raises(errors.Unavailable, match="layer 1 of 3: the answer is lost"):
                generate(gpt_oss, cache, attention_mask=PADDED, stopping_criteria=[tokens])
            with pytest.raises(ValueError, match="After an error, call recover"):
                go_on(gpt_oss, cache, tokens, want.shape[1])
            assert cache.recover() == 14
            assert torch.equal(go_on(gpt_oss, cache, tokens, want.shape[1]), want)


def test_beams_beyond_the_quota(llama, url_of):
    with RaptServer(f"--kv_cache_bytes={64 * MIB}", "--kv_max_caches_per_caller=3") as server:
        with rapt.torch.RemoteCache(url_of(server), llama.config) as cache:
            with pytest.raises(errors.ResourceExhausted) as caught:
                generate(llama, cache, prompt=REPEATS, num_beams=3)
            assert caught.value.reason == "quota" and server.live_caches() == 3
        assert server.live_caches() == 0


# --- Nothing is left -------------------------------------------------------------------------------


def test_a_cache_that_is_dropped_is_closed(llama, server, url_of):
    cache = rapt.torch.RemoteCache(url_of(server), llama.config)
    generate(llama, cache)
    assert server.live_caches() == 3
    del cache
    assert server.live_caches() == 0


def test_a_closed_cache_is_refused(llama, address):
    cache = rapt.torch.RemoteCache(address, llama.config)
    cache.close()
    cache.close()
    with pytest.raises(ValueError, match="the RemoteCache was closed"):
        generate(llama, cache)


PROGRAM = """
import os, signal, sys, torch, rapt.torch, torch_remote_cases
llama = torch_remote_cases.model_of("llama")
cache = rapt.torch.RemoteCache(sys.argv[1], llama.config, lease=float(sys.argv[2]))
torch_remote_cases.generate(llama, cache)
with rapt.Client(sys.argv[1]) as client:
    print(len(client.list_caches()), "caches", flush=True)
"""


def run_program(server, end, lease=600):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM + end, f"http://{server.http_address}", str(lease)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.stdout == "3 caches\n", ran.stderr


@pytest.mark.parametrize("end", ("", "raise KeyboardInterrupt"))
def test_nothing_is_left_when_python_ends(server, end):
    run_program(server, end)
    assert server.live_caches() == 0


def test_leases_end_with_a_process_that_is_killed(server):
    run_program(server, "os.kill(os.getpid(), signal.SIGKILL)", lease=1)
    server.await_no_caches()


# --- Refusals --------------------------------------------------------------------------------------


def refused(model, message, cache, error=NotImplementedError, ids=PROMPT, **options):
    model.set_attn_implementation("rapt-server")
    with pytest.raises(error, match=message):
        model(ids, cache=cache, **options)


def test_what_a_call_wants_and_the_server_has_not_is_refused(llama, address):
    with rapt.torch.RemoteCache(address, llama.config) as cache:
        refused(llama, r"gradients; use torch.no_grad\(\)", cache)
        with torch.no_grad():
            refused(llama, "output_attentions", cache, output_attentions=True)
            refused(llama, r"do not come from a RemoteCache", None)
            refused(llama, r"do not come from a RemoteCache", transformers.DynamicCache())
            refused(llama, "a mask of the caller's", cache, attention_mask=torch.zeros(3, 1, 9, 9))
            refused(llama, "padding after a token", cache, attention_mask=PADDED.flip(1))
            refused(llama, "position_bias, which this model passes", cache, position_bias=torch.zeros(1))
            refused(llama, "indices, which this model passes", cache, indices=torch.zeros(1))
            for layer in llama.model.layers:
                layer.self_attn.attention_dropout = 0.1
            refused(llama.train(), r"dropout; call model.eval\(\)", cache)


def test_custom_masks_are_refused(llama, address, monkeypatch):
    from transformers import masking_utils
    from transformers.models.llama import modeling_llama

    def first_four(batch, head, query, key):
        return key < 4

    def with_and(**options):
        return masking_utils.create_causal_mask(**options, and_mask_function=first_four)

    def chunked(**options):
        options["config"].attention_chunk_size = 4
        return masking_utils.create_chunked_causal_mask(**options)

    for make in (with_and, chunked):
        monkeypatch.setattr(modeling_llama, "create_causal_mask", make)
        with rapt.torch.RemoteCache(address, llama.config) as cache, torch.no_grad():
            refused(llama, "this mask: it must be causal, or causal with a sliding window", cache)


def test_a_window_that_the_config_does_not_have_is_refused(address):
    mistral = model_of("mistral")
    with rapt.torch.RemoteCache(address, model_of("llama").config) as cache, torch.no_grad():
        refused(mistral, "the window of layer 0 is 6, by the config 0", cache)


def test_keys_that_are_shared_or_changed_are_refused(llama, address, monkeypatch):
    from rapt.torch import _remote

    with rapt.torch.RemoteCache(address, llama.config) as cache, torch.no_grad():
        update = _remote.RemoteCache.update
        shared = {}

        def of_first(self, keys, values, index, **options):
            if not shared:
                shared["first"] = update(self, keys, values, 0, **options)
            return shared["first"]

        monkeypatch.setattr(_remote.RemoteCache, "update", of_first)
        refused(llama, "layers that share keys: layer 1 uses those of layer 0", cache)
        monkeypatch.setattr(_remote.RemoteCache, "update", lambda *a, **b: tuple(2 * x for x in update(*a, **b)))
        refused(llama, "Layers that change them after cache.update", cache)


@pytest.mark.parametrize(
    ("config", "message"),
    (
        (transformers.T5Config(), "encoder-decoder models, such as t5"),
        (transformers.WhisperConfig(), "encoder-decoder models, such as whisper"),
        (transformers.Gemma3nTextConfig(), "gemma3n_text, whose layer 20 has no keys of its own"),
        (transformers.Llama4TextConfig(), "llama4_text, whose layer 0 has attention of the type chunked_attention"),
        (transformers.MambaConfig(), "mamba, whose layer 0 has attention of the type linear_attention"),
    ),
    ids=lambda x: getattr(x, "model_type", None),
)
def test_models_without_causal_attention_of_every_layer_are_refused(config, message):
    with pytest.raises(NotImplementedError, match=message):
        rapt.torch.RemoteCache("http://127.0.0.1:1", config)


def test_wrong_arguments_are_named(llama, address):
    for servers in (3, [], [3]):
        with pytest.raises(TypeError, match=r"servers is .*; it must be an address or a rapt.Client"):
            rapt.torch.RemoteCache(servers, llama.config)
    with rapt.torch.RemoteCache(address, llama.config) as cache, torch.no_grad():
        llama.set_attn_implementation("rapt-server")
        llama(PROMPT, cache=cache)
        refused(llama, "the batch has 1 rows; this RemoteCache has 3", cache, ValueError, PROMPT[:1])
        mask = torch.ones(3, 10)
        mask[1, 0] = 0
        message = "row 1 has 8 tokens before this pass by its attention_mask, and 9"
        refused(llama, message, cache, ValueError, PROMPT[:, :1], attention_mask=mask)
        with pytest.raises(ValueError, match="tokens_to_remove is 2; it must be at most 0"):
            cache.crop(2)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "rapt"])
def test_a_model_with_another_attention_is_refused(llama, address, implementation):
    llama.set_attn_implementation(implementation)
    with rapt.torch.RemoteCache(address, llama.config) as cache, torch.no_grad():
        with pytest.raises(NotImplementedError, match="needs attn_implementation='rapt-server'"):
            llama(PROMPT, cache=cache)
        assert not cache.caches


def test_a_model_with_attention_of_its_own_is_refused(address):
    config = transformers.MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=100)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.set_attn_implementation("rapt-server")
    with rapt.torch.RemoteCache(address, config) as cache, torch.no_grad():
        with pytest.raises(NotImplementedError, match="rapt-server"):
            model(PROMPT, cache=cache)


def test_recovery_after_beams_begins_anew(llama, address):
    llama.set_attn_implementation("rapt-server")
    with rapt.torch.RemoteCache(address, llama.config) as cache:
        llama.generate(PROMPT, cache=cache, num_beams=2, max_new_tokens=4, do_sample=False)
        assert cache.recover() == 0
        assert not cache.caches
