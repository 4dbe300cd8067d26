"""The model attention_session through Triton's own client: sequences whose keys and values stay with the server."""

import itertools
import queue
import random
import threading
import time

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from attention_client import DATATYPES, assert_close, to_input
from rapt_server import RaptServer
from tritonclient.utils import InferenceServerException

MODEL = "attention_session"
TYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)
WIDTHS = {"Hq": 4, "Hkv": 2, "D": 16, "Dv": 24}
NEEDS_START = (
    "inference request for sequence {} to model 'attention_session' must specify the START flag on the first "
    "request of the sequence"
)
NEEDS_ID = "inference request to model 'attention_session' must specify a non-zero or non-empty correlation ID"
IDS = itertools.count(1)


@pytest.fixture(scope="module")
def server():
    with RaptServer("--kv_cache_bytes=67108864", "--kv_default_lease=90s", "--allow_shared_memory") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with triton.InferenceServerClient(server.grpc_address) as connected:
        yield connected


def define(q, k, v, *, scale=None, softcap=0.0):
    """Causal attention, bottom-right, in float64: q [R, Hq, D], k and v [T, Hkv, D]; y [R, Hq, Dv], lse [R, Hq]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    rows, tokens, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = np.einsum("rhd,thd->rht", q, k) * (scale if scale is not None else 1 / np.sqrt(q.shape[2]))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    hidden = np.arange(tokens) > np.arange(rows)[:, None] + tokens - rows
    scores = np.where(hidden[:, None, :], -np.inf, scores)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("rht,thd->rhd", weights / total, v), (top + np.log(total))[..., 0]


def in_8_bits(x):
    """The numbers as storage int8 keeps them: blocks of 32 with the least FP16 scale that cuts none."""
    stored = np.zeros(x.shape)
    for begin in range(0, x.shape[-1], 32):
        block = x[..., begin : begin + 32].astype("f8")
        largest = np.abs(block).max(-1, keepdims=True, initial=0)
        scale = (largest / 127).astype("f2")
        scale = np.where(scale.astype("f8") * 127 < largest, np.nextafter(scale, np.float16(np.inf)), scale).astype("f8")
        stored[..., begin : begin + 32] = np.rint(block / np.where(scale == 0, 1, scale)) * scale
    return stored


class Sequence:
    """A sequence and what its server should know: the tokens of each layer."""

    def __init__(self, send, *, id=None, dtype=np.float32, rank=4, layers=1, seed=0, widths=None, storage=None, **parameters):
        self.send, self.storage = send, storage
        self.id = next(IDS) if id is None else id
        self.dtype, self.rank, self.layers, self.parameters = dtype, rank, layers, parameters
        self.widths = widths or WIDTHS
        self.random = np.random.default_rng(seed)
        self.tokens = [[np.zeros((0, self.widths["Hkv"], self.widths[d]), dtype) for d in ("D", "Dv")] for _ in range(layers)]
        self.is_new = True

    def new(self, rows, heads, size):
        return self.random.uniform(-2, 2, (rows, self.widths[heads], self.widths[size])).astype(self.dtype)

    def shaped(self, x):
        """[S, H, D] as the model has it."""
        return x[None].reshape(1, len(x), -1) if self.rank == 3 else np.ascontiguousarray(x.swapaxes(0, 1)[None])

    def flat(self, x):
        if self.rank == 4:
            return x[0].swapaxes(0, 1)
        return x[0].reshape(x.shape[1], self.widths["Hq"], -1)

    def step(self, new, rows=None, *, layer=0, end=False, lse=True, **parameters):
        """Appends `new` tokens, and compares the answer to `rows` queries, by default as many."""
        rows = new if rows is None else rows
        arrays = {}
        if rows:
            q = self.new(rows, "Hq", "D")
            arrays["Q"] = self.shaped(q)
        if new:
            k, v = self.new(new, "Hkv", "D"), self.new(new, "Hkv", "Dv")
            stored = (in_8_bits(k), in_8_bits(v)) if self.storage == "int8" else (k, v)
            self.tokens[layer] = [np.concatenate(pair) for pair in zip(self.tokens[layer], stored)]
            arrays.update(K=self.shaped(k), V=self.shaped(v))
        parameters = {**self.parameters, **parameters}
        if self.rank == 3:
            parameters.update(q_num_heads=self.widths["Hq"], kv_num_heads=self.widths["Hkv"])
        if layer:
            parameters["layer"] = layer
        if self.is_new and self.layers > 1:
            parameters["layers"] = self.layers
        if self.is_new and self.storage:
            parameters["storage"] = self.storage
        outputs = (["Y", "lse"] if lse else []) if rows else []
        answer = self.send(
            [to_input(name, array) for name, array in arrays.items()],
            outputs=[triton.InferRequestedOutput(name) for name in outputs],
            parameters=parameters,
            sequence_id=self.id,
            sequence_start=self.is_new,
            sequence_end=end,
        )
        self.is_new = False
        self.check(answer, q if rows else None, layer, lse)

    def check(self, answer, q, layer, lse):
        names = [output.name for output in answer.get_response().outputs]
        if q is None:
            assert names == []
            return
        assert names == ["Y", "lse"][: 2 if lse else 1]
        settings = {n: float(x) for n, x in self.parameters.items() if n in ("scale", "softcap")}
        want_y, want_lse = define(q, *self.tokens[layer], **settings)
        y = answer.as_numpy("Y")
        assert y.dtype == self.dtype
        assert_close("Y", self.flat(y), want_y)
        if lse:
            got = answer.as_numpy("lse")
            assert got.dtype == (np.float64 if self.dtype == np.float64 else np.float32)
            assert got.shape == (1, *want_lse.T.shape)
            assert_close("lse", got[0].T, want_lse)


@pytest.fixture
def send(client):
    return lambda inputs, **options: client.infer(MODEL, inputs, **options)


def refuse(send, code, inputs=None, **options):
    """Returns the message of a call that must fail with `code`."""
    if inputs is None:
        x = np.ones((1, 2, 1, 8), np.float32)
        inputs = {"Q": x, "K": x, "V": x}
    with pytest.raises(InferenceServerException) as caught:
        send([to_input(name, array) for name, array in inputs.items()], **options)
    assert caught.value.status() == f"StatusCode.{code}", caught.value
    return caught.value.message()


# --- Description ----------------------------------------------------------------------------------


def test_the_model_is_described(client):
    assert client.is_model_ready(MODEL)
    assert "sequence" in client.get_server_metadata().extensions
    metadata = client.get_model_metadata(MODEL)
    assert [tensor.name for tensor in metadata.inputs] == ["Q", "K", "V"]
    assert [tensor.name for tensor in metadata.outputs] == ["Y", "lse"]
    config = client.get_model_config(MODEL).config
    assert config.HasField("sequence_batching")
    assert config.sequence_batching.max_sequence_idle_microseconds == 90_000_000
    assert MODEL in [model.name for model in client.get_model_repository_index().models]
    assert not client.get_model_config("attention").config.HasField("sequence_batching")


def test_a_server_without_caches_has_no_such_model():
    with RaptServer() as server, triton.InferenceServerClient(server.grpc_address) as client:
        assert not client.is_model_ready(MODEL)
        assert "sequence" not in client.get_server_metadata().extensions
        assert MODEL not in [model.name for model in client.get_model_repository_index().models]
        send = lambda inputs, **options: client.infer(MODEL, inputs, **options)  # noqa: E731
        assert f"unknown model '{MODEL}'" in refuse(send, "NOT_FOUND", sequence_id=1, sequence_start=True)
        assert "unknown model" in str(pytest.raises(InferenceServerException, client.get_model_config, MODEL).value)


# --- Steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", (3, 4))
@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: DATATYPES[np.dtype(t)])
def test_every_step_matches_the_definition(server, send, dtype, rank):
    before = server.live_caches()
    sequence = Sequence(send, dtype=dtype, rank=rank)
    sequence.step(70)  # more than a page
    for _ in range(3):
        sequence.step(1)
    sequence.step(5)
    sequence.step(5, 2)  # the last two rows
    sequence.step(3, 0)  # no queries, no outputs
    sequence.step(0, 4)  # nothing new
    assert server.live_caches() == before + 1
    sequence.step(1, end=True)
    assert server.live_caches() == before
    text = refuse(send, "INVALID_ARGUMENT", sequence_id=sequence.id)
    assert text == NEEDS_START.format(sequence.id)


@pytest.mark.parametrize("widths", ({"Hq": 1, "Hkv": 1, "D": 8, "Dv": 8}, {"Hq": 6, "Hkv": 6, "D": 4, "Dv": 12}), ids=str)
@pytest.mark.parametrize("rank", (3, 4))
def test_shapes(send, rank, widths):
    sequence = Sequence(send, rank=rank, widths=widths)
    for new in (3, 1, 2):
        sequence.step(new)
    sequence.step(1, end=True)


def test_y_alone_by_default(send):
    sequence = Sequence(send)
    sequence.step(2, lse=False)
    sequence.step(1, lse=False, end=True)


@pytest.mark.parametrize("parameters", ({"scale": 0.5}, {"softcap": "1.5"}, {"scale": 2.0, "softcap": 3.0}), ids=str)
def test_scale_and_softcap(send, parameters):
    sequence = Sequence(send, **parameters)
    sequence.step(9)
    sequence.step(1, end=True)


@pytest.mark.parametrize("rank", [3, 4])
def test_stores_8_bits(send, rank):
    sequence = Sequence(send, rank=rank, storage="int8", widths={**WIDTHS, "D": 40})
    for new, rows in ((70, 2), (1, 1), (1, 1), (3, 3)):
        sequence.step(new, rows)
    plain = Sequence(send, storage="plain")
    plain.step(3)
    text = refuse(send, "INVALID_ARGUMENT", sequence_id=plain.id, parameters={"storage": "int8"})
    assert "parameter storage is int8; it is allowed with sequence_start only" in text


def test_layers_are_apart(send):
    sequence = Sequence(send, layers=3)
    sequence.step(4)
    sequence.step(2, layer=2)
    sequence.step(1)
    sequence.step(5, layer=1)
    sequence.step(1, layer=2)
    text = refuse(send, "INVALID_ARGUMENT", sequence_id=sequence.id, parameters={"layer": 3})
    assert text == "layer is 3; the cache has 3 layers"
    sequence.step(1, layer=1, end=True)


def test_position_makes_a_call_repeatable(send):
    sequence = Sequence(send)
    sequence.step(3)
    state = sequence.random.bit_generator.state
    sequence.step(2, position=3)
    held = sequence.tokens[0]
    sequence.random.bit_generator.state = state
    sequence.tokens[0] = [x[:3] for x in held]
    sequence.step(2, position=3)  # again: the same answer
    sequence.step(1)
    x = {"K": np.ones((1, 2, 1, 16), np.float32), "V": np.ones((1, 2, 1, 24), np.float32)}
    text = refuse(send, "OUT_OF_RANGE", x, sequence_id=sequence.id, parameters={"position": 7})
    assert text == "parameter position is 7; the layer has 6 tokens"
    text = refuse(send, "ABORTED", x, sequence_id=sequence.id, parameters={"position": 4})
    assert "other tokens" in text
    sequence.step(1, end=True)


# --- Ids ------------------------------------------------------------------------------------------


def test_ids_name_sequences(server, send):
    before = server.live_caches()
    number = next(IDS)
    sequences = [Sequence(send, id=id, seed=n) for n, id in enumerate((number, str(number), f"of {number}", "å" * 64))]
    for new in (3, 1, 2, 1):
        for sequence in sequences:
            sequence.step(new)
    assert server.live_caches() == before + 4
    for sequence in sequences:
        sequence.step(1, end=True)
    assert server.live_caches() == before


def test_a_start_replaces_the_sequence(server, send):
    before = server.live_caches()
    first = Sequence(send)
    first.step(7)
    second = Sequence(send, id=first.id, dtype=np.float64, seed=1)
    second.step(2)
    second.step(1)
    assert server.live_caches() == before + 1
    second.step(1, end=True)


def test_start_and_end_in_one_call(server, send):
    before = server.live_caches()
    Sequence(send).step(5, end=True)
    assert server.live_caches() == before


def test_an_end_may_come_alone(server, client, send):
    before = server.live_caches()
    sequence = Sequence(send)
    sequence.step(2)
    answer = client.infer(MODEL, [], sequence_id=sequence.id, sequence_end=True)
    assert list(answer.get_response().outputs) == []
    assert server.live_caches() == before
    text = refuse(send, "INVALID_ARGUMENT", {}, sequence_id=sequence.id, sequence_end=True)
    assert text == NEEDS_START.format(sequence.id)


def test_sequences_end_with_their_lease():
    flags = ("--kv_cache_bytes=67108864", "--kv_default_lease=1s")
    with RaptServer(*flags) as server, triton.InferenceServerClient(server.grpc_address) as client:
        send = lambda inputs, **options: client.infer(MODEL, inputs, **options)  # noqa: E731
        sequence = Sequence(send)
        sequence.step(2)
        server.await_no_caches()
        assert refuse(send, "INVALID_ARGUMENT", sequence_id=sequence.id) == NEEDS_START.format(sequence.id)


# --- Errors ---------------------------------------------------------------------------------------


def test_ids_are_needed(send):
    assert refuse(send, "INVALID_ARGUMENT") == NEEDS_ID
    assert refuse(send, "INVALID_ARGUMENT", sequence_id=0, sequence_start=True) == NEEDS_ID
    assert refuse(send, "INVALID_ARGUMENT", sequence_id="", sequence_start=True) == NEEDS_ID
    text = refuse(send, "INVALID_ARGUMENT", sequence_id="x" * 129, sequence_start=True)
    assert "sequence_id" in text and "at most 128 bytes" in text


def test_a_start_is_needed(send):
    for id in (next(IDS), f"number {next(IDS)}"):
        assert refuse(send, "INVALID_ARGUMENT", sequence_id=id) == NEEDS_START.format(id)
        assert refuse(send, "INVALID_ARGUMENT", sequence_id=id, sequence_end=True) == NEEDS_START.format(id)


ONES = np.ones((1, 2, 3, 8), np.float32)
WRONG_STARTS = {
    "batch": ({"K": np.ones((2, 2, 3, 8), np.float32), "V": ONES}, {}, "input K has shape [2, 2, 3, 8]"),
    "rank": ({"K": ONES[0, 0], "V": ONES}, {}, "input K has shape [3, 8]"),
    "heads": ({"K": ONES[:, 0], "V": ONES[:, 0]}, {"kv_num_heads": 3}, "kv_num_heads, which is 3"),
    "other heads": ({"K": ONES, "V": ONES}, {"kv_num_heads": 4}, "kv_num_heads is 4"),
    "length": ({"K": ONES, "V": ONES[:, :, :2]}, {}, "type, heads and length must be equal"),
    "type": ({"K": ONES, "V": ONES.astype(np.float16)}, {}, "input V is FP16"),
    "integers": ({"K": ONES.astype(np.int64), "V": ONES}, {}, "input K is INT64"),
    "no keys": ({"Q": ONES}, {}, "inputs K and V are absent"),
    "no values": ({"K": ONES}, {}, "input K is set but V is not"),
    "no tokens": ({"K": ONES[:, :, :0], "V": ONES[:, :, :0]}, {}, "no tokens"),
    "q heads": ({"Q": np.ones((1, 3, 1, 8), np.float32), "K": ONES, "V": ONES}, {}, "multiple"),
    "q size": ({"Q": np.ones((1, 2, 1, 6), np.float32), "K": ONES, "V": ONES}, {}, "input Q has shape"),
    "q type": ({"Q": np.ones((1, 2, 1, 8)), "K": ONES, "V": ONES}, {}, "input Q is FP64"),
    "layers": ({"K": ONES, "V": ONES}, {"layers": 0}, "parameter layers is 0"),
    "many layers": ({"K": ONES, "V": ONES}, {"layers": 1025}, "from 1 to 1024"),
    "layer": ({"K": ONES, "V": ONES}, {"layer": 1}, "layer is 1; the cache has 1 layers"),
    "negative layer": ({"K": ONES, "V": ONES}, {"layer": -1}, "layer is -1"),
    "position": ({"K": ONES, "V": ONES}, {"position": -1}, "position is -1"),
    "softcap": ({"Q": ONES, "K": ONES, "V": ONES}, {"softcap": -1.0}, "softcap is -1"),
    "storage": ({"K": ONES, "V": ONES}, {"storage": "int4"}, "storage"),
    "storage of FP64": ({"K": ONES.astype("f8"), "V": ONES.astype("f8")}, {"storage": "int8"}, "INT8 stores FP32, FP16 or BF16"),
    "unknown": ({"K": ONES, "V": ONES}, {"is_casual": 1}, "unknown request parameter is_casual; the parameters are is_causal, "),
    "not causal": ({"K": ONES, "V": ONES}, {"is_causal": 0}, "parameter is_causal is 0; it must be true"),
    "input": ({"K": ONES, "V": ONES, "attn_mask": ONES}, {}, "unknown input attn_mask"),
}


@pytest.mark.parametrize("case", WRONG_STARTS.values(), ids=WRONG_STARTS.keys())
def test_a_wrong_start_makes_no_sequence(server, send, case):
    inputs, parameters, text = case
    before, id = server.live_caches(), next(IDS)
    code = "OUT_OF_RANGE" if "position" in parameters else "INVALID_ARGUMENT"
    assert text in refuse(send, code, inputs, sequence_id=id, sequence_start=True, parameters=parameters)
    assert server.live_caches() == before
    assert refuse(send, "INVALID_ARGUMENT", sequence_id=id) == NEEDS_START.format(id)


def test_a_wrong_step_leaves_the_sequence(send):
    sequence = Sequence(send)
    sequence.step(3)
    wide = np.ones((1, 2, 1, 32), np.float32)
    assert "input K has shape [1, 2, 32]" in refuse(send, "INVALID_ARGUMENT", {"K": wide, "V": wide}, sequence_id=sequence.id)
    assert "layers" in refuse(send, "INVALID_ARGUMENT", sequence_id=sequence.id, parameters={"layers": 2})
    output = [triton.InferRequestedOutput("Y")]
    right = {"K": np.ones((1, 2, 1, 16), np.float32), "V": np.ones((1, 2, 1, 24), np.float32)}
    nowhere = triton.InferRequestedOutput("Y")
    nowhere.set_shared_memory("nowhere", 4096)
    query = {"Q": np.ones((1, 4, 1, 16), np.float32)}
    assert "nowhere" in refuse(send, "NOT_FOUND", query, sequence_id=sequence.id, outputs=[nowhere])
    assert "needs input Q" in refuse(send, "INVALID_ARGUMENT", right, sequence_id=sequence.id, outputs=output)
    sequence.step(1)
    sequence.step(1, end=True)


def test_pages_run_out(server, send):
    before = server.live_caches()
    large = np.zeros((1, 1, 20_000, 1024), np.float32)
    sequence = Sequence(send)
    sequence.step(3)
    text = refuse(send, "RESOURCE_EXHAUSTED", {"K": large, "V": large[..., :1]}, sequence_id=next(IDS), sequence_start=True)
    assert "bytes" in text
    assert server.live_caches() == before + 1
    sequence.step(1, end=True)


# --- Transport ------------------------------------------------------------------------------------


@pytest.fixture
def stream(server):
    """Sends a call on a stream and waits for its answer."""
    answers = queue.Queue()
    with triton.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))

        def send(*calls):
            for inputs, options in calls:
                client.async_stream_infer(MODEL, inputs, **options)
            return [answers.get(timeout=60) for _ in calls]

        yield send
        client.stop_stream()


def test_streams(server, stream, send):
    def one(inputs, **options):
        ((result, error),) = stream((inputs, options))
        assert error is None, error
        return result

    before = server.live_caches()
    streamed, unary = Sequence(one), Sequence(send, seed=1)
    for new in (65, 1, 1, 4):
        streamed.step(new)
        unary.step(new)
    streamed.send, unary.send = unary.send, streamed.send  # a sequence is not a connection's
    streamed.step(1, end=True)
    unary.step(1, end=True)
    assert server.live_caches() == before


def test_a_stream_keeps_the_order_of_calls_sent_at_once(stream):
    id = next(IDS)
    value = lambda n: np.full((1, 1, 1, 1), n, np.float32)  # noqa: E731
    calls = [
        ([to_input(name, value(n if name == "V" else 0)) for name in "QKV"], {"sequence_id": id, "sequence_start": n == 0, "sequence_end": n == 49})
        for n in range(50)
    ]
    wrong = ([], {"sequence_id": id})
    answers = stream(*calls[:20], wrong, *calls[20:], calls[1])
    for n, (result, error) in enumerate(answers[:20] + answers[21:-1]):
        assert error is None, error
        assert_close("Y", result.as_numpy("Y"), value(n / 2))  # the mean of 0 to n
    assert "INVALID_ARGUMENT: inputs Q, K and V have no tokens" in answers[20][1].message()
    assert answers[-1][1].message() == f"INVALID_ARGUMENT: {NEEDS_START.format(id)}"


@pytest.mark.parametrize("rank", (3, 4))
def test_shared_memory(client, rank):
    sequence = Sequence(None, rank=rank)
    source = shm.create_shared_memory_region("session in", f"/rapt.session_in.{rank}", 1 << 20)
    sink = shm.create_shared_memory_region("session out", f"/rapt.session_out.{rank}", 1 << 20)

    class Answer:
        def __init__(self, response):
            self.get_response = response.get_response

        def as_numpy(self, name):
            tensor = next(output for output in self.get_response().outputs if output.name == name)
            dtype = {"FP32": np.float32}[tensor.datatype]
            return shm.get_contents_as_numpy(sink, dtype, list(tensor.shape), 0 if name == "Y" else 1 << 19)

    def send(inputs, outputs, **options):
        offset = 0
        for tensor in inputs:
            data = np.frombuffer(tensor._get_content(), np.uint8)
            shm.set_shared_memory_region(source, [data], offset)
            tensor.set_shared_memory("in", len(data), offset)
            offset += len(data)
        for output in outputs:
            output.set_shared_memory("out", 1 << 19, 0 if output.name() == "Y" else 1 << 19)
        return Answer(client.infer(MODEL, inputs, outputs=outputs, **options))

    try:
        client.register_system_shared_memory("in", f"/rapt.session_in.{rank}", 1 << 20)
        client.register_system_shared_memory("out", f"/rapt.session_out.{rank}", 1 << 20)
        sequence.send = send
        for new in (67, 1, 3):
            sequence.step(new)
        sequence.step(1, end=True)
    finally:
        client.unregister_system_shared_memory()
        shm.destroy_shared_memory_region(source)
        shm.destroy_shared_memory_region(sink)


# --- Concurrency ----------------------------------------------------------------------------------


def test_threads_append_to_one_sequence(server, client):
    """Each call sees its own token and all that were appended before, none of them in part."""
    threads, calls, id = 4, 40, next(IDS)
    zero = np.zeros((1, 1, 1, 1), np.float32)
    client.infer(MODEL, [to_input("K", zero), to_input("V", zero)], sequence_id=id, sequence_start=True)
    lse, failures = [], []

    def run():
        try:
            with triton.InferenceServerClient(server.grpc_address) as mine:
                for _ in range(calls):
                    inputs = [to_input(name, zero) for name in "QKV"]
                    output = [triton.InferRequestedOutput("lse")]
                    answer = mine.infer(MODEL, inputs, outputs=output, sequence_id=id)
                    lse.append(float(answer.as_numpy("lse").item()))
        except Exception as failure:
            failures.append(failure)

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert failures == []
    client.infer(MODEL, [], sequence_id=id, sequence_end=True)
    # lse is the logarithm of the number of tokens: each count once.
    np.testing.assert_allclose(np.exp(sorted(lse)), np.arange(2, threads * calls + 2), rtol=1e-5)


def test_threads_start_step_end_and_cancel_one_id(server, client):
    before, id, stop = server.live_caches(), next(IDS), time.monotonic() + 5
    zero = np.zeros((1, 2, 64, 32), np.float32)
    unexpected, done = [], [0] * 4

    def run(n):
        choices = random.Random(n)
        with triton.InferenceServerClient(server.grpc_address) as mine:
            while time.monotonic() < stop:
                answered = threading.Event()
                errors = []

                def answer(result, error, errors=errors, answered=answered):
                    if error is not None:
                        errors.append(error)
                    answered.set()

                call = mine.async_infer(
                    MODEL,
                    [to_input(name, zero) for name in "QKV"],
                    answer,
                    sequence_id=id,
                    sequence_start=choices.random() < 0.2,
                    sequence_end=choices.random() < 0.2,
                    client_timeout=choices.choice([None, 0.001, 30]),
                )
                if choices.random() < 0.3:
                    call.cancel()
                if not answered.wait(60):
                    unexpected.append("no answer")
                done[n] += 1
                for error in errors:
                    is_known = error.status() in ("StatusCode.CANCELLED", "StatusCode.DEADLINE_EXCEEDED")
                    if not is_known and error.message() != NEEDS_START.format(id):
                        unexpected.append(error)

    workers = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert not worker.is_alive()
    assert unexpected == []
    assert min(done) > 10
    sequence = Sequence(lambda inputs, **options: client.infer(MODEL, inputs, **options), id=id)
    sequence.step(2)
    sequence.step(1, end=True)
    assert server.live_caches() == before


# --- Shutdown -------------------------------------------------------------------------------------


def test_sequences_go_on_while_the_server_drains():
    flags = ("--kv_cache_bytes=67108864", "--grace_period=60s")
    with RaptServer(*flags) as server, triton.InferenceServerClient(server.grpc_address) as client:
        send = lambda inputs, **options: client.infer(MODEL, inputs, **options)  # noqa: E731
        sequence = Sequence(send)
        sequence.step(3)
        server.stop()
        while client.is_server_ready():
            time.sleep(0.02)
        time.sleep(0.2)
        sequence.step(1)
        refuse(send, "UNAVAILABLE", sequence_id=next(IDS), sequence_start=True)
        x = [to_input(name, ONES) for name in "QKV"]
        with pytest.raises(InferenceServerException) as caught:
            client.infer("attention", x)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        sequence.step(1, end=True)  # the last one: the server stops
