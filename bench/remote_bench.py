"""Times decoding steps of a small model of transformers with attention in process and at rapt-servers on this machine; run by
`./dev bench remote`.

The sides take turns, step by step, each with its own cache of the same prompt, and figures are medians. The model has the
attention of a 1B model in each layer, and little else, so that attention and its transfer dominate. Then it times one layer of a
step alone, and steps with keys at the server against keys on the wire. Prints Markdown for RESULTS.md.
"""

import argparse
import contextlib
import os
import pathlib
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # PyTorch's threads would spin while a server of this machine computes

import rapt  # noqa: E402
import rapt.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from rapt import _messages  # noqa: E402
from rapt._messages import INT  # noqa: E402
from rapt.torch import _remote  # noqa: E402
from served import Server  # noqa: E402

LAYERS, HEADS, KV_HEADS, SIZE = 4, 32, 8, 64
PROGRAM = os.environ.get("RAPT_SERVER", pathlib.Path(__file__).resolve().parents[1] / "build/release/bin/rapt-server")


class CountingClient(rapt.Client):
    """Counts the bytes of messages with tensors, without those of HTTP and gRPC, and keeps the last answer."""

    def __init__(self, url):
        super().__init__(url)
        self.bytes = 0
        send = self._server.send

        def counted(method, body, timeout):
            self.answer = send(method, body, timeout)
            self.bytes += sum(map(len, body)) + len(self.answer)
            return self.answer

        self._server.send = counted


def start_server(stack):
    addresses = [f"--{name}_address=127.0.0.1:0" for name in ("grpc", "http", "metrics")]
    return stack.enter_context(Server("rapt-server", [PROGRAM, *addresses, "--kv_cache_bytes=4G"]))


def urls_of(server):
    return [f"http://{server.http_address}", f"grpc://{server.address}"]


def make_model(dtype, layers=LAYERS):
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=SIZE,
        max_position_embeddings=65536,
    )
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


class Side:
    def __init__(self, model, implementation, cache, prompt):
        self.model, self.implementation, self.cache = model, implementation, cache
        self.seconds = []
        self.step(prompt)
        self.seconds.clear()

    def step(self, tokens):
        self.model.set_attn_implementation(self.implementation)
        start = time.perf_counter()
        logits = self.model(tokens, cache=self.cache, logits_to_keep=1).logits
        self.seconds.append(time.perf_counter() - start)
        return logits

    def milliseconds(self):
        return f"{1e3 * statistics.median(self.seconds):.1f} ({1e3 * min(self.seconds):.1f})"


def steps_row(model, servers, batch, context, steps):
    """A row of times, and the bytes of a token and layer."""
    with contextlib.ExitStack() as stack:
        one, of_grpc, other = [
            stack.enter_context(CountingClient(url)) for url in (*urls_of(servers[0]), urls_of(servers[1])[0])
        ]
        prompt = torch.randint(0, 1000, (batch, context))
        remote = [stack.enter_context(rapt.torch.RemoteCache(some, model.config)) for some in (one, of_grpc, [one, other])]
        sides = [
            Side(model, "sdpa", transformers.DynamicCache(config=model.config), prompt),
            Side(model, "rapt", transformers.DynamicCache(config=model.config), prompt),
            *(Side(model, "rapt-server", cache, prompt) for cache in remote),
        ]
        total = 0
        for _ in range(steps):
            token = torch.randint(0, 1000, (batch, 1))
            want = sides[0].step(token)
            for side in sides[1:]:
                before = one.bytes
                torch.testing.assert_close(side.step(token), want, rtol=5e-2, atol=5e-2)
                total += one.bytes - before if side is sides[2] else 0
    each = total / steps / LAYERS / batch
    return f"| {batch} | {context} | {' | '.join(side.milliseconds() for side in sides)} | {each:.0f} |"


def beams_row(model, url, beams, context, steps):
    """What forks and closes add to a search."""
    prompt = torch.randint(0, 1000, (1, context))
    with rapt.Client(url) as client, rapt.torch.RemoteCache(client, model.config) as cache:
        model.set_attn_implementation("rapt-server")
        update, seconds = client.update_caches, []

        def timed(**changes):
            start = time.perf_counter()
            forks = update(**changes)
            seconds.append(time.perf_counter() - start)
            return forks

        client.update_caches = timed
        start = time.perf_counter()
        options = {"do_sample": False, "num_beams": beams, "max_new_tokens": steps, "min_new_tokens": steps}
        model.generate(prompt, attention_mask=torch.ones_like(prompt), cache=cache, pad_token_id=0, **options)
        whole = time.perf_counter() - start
    calls, mean = len(seconds) / steps, 1e3 * sum(seconds) / len(seconds)
    return f"| {url[:4]} | {beams} | {calls:.1f} | {mean:.2f} | {100 * sum(seconds) / whole:.0f} % |"


def layer_row(config, url, steps, batch=8):
    """One layer of a step of short sequences, so that the attention itself takes little: the time in this process and on the
    way is what the server's own times leave."""
    times = _messages.ATTEND_CACHED_RESPONSE | {"timing": (6, {"queue_us": (1, INT), "compute_us": (2, INT)})}
    q, k = torch.randn(batch, HEADS, 1, SIZE), torch.randn(batch, KV_HEADS, 1, SIZE)
    with CountingClient(url) as client, rapt.torch.RemoteCache(client, config) as cache:
        whole, beyond = [], []
        for step in range(steps):
            rows = _remote._Rows(0, [step] * batch, [1] * batch)
            start = time.perf_counter()
            cache.attend(cache._layers[0], rows, q, k, k, {})
            whole.append(1e6 * (time.perf_counter() - start))
            beyond.append(whole[-1] - sum(_messages.decode(times, client.answer)["timing"].values()))
    return f"| {url[:4]} | {' | '.join(f'{statistics.median(x):.0f} ({min(x):.0f})' for x in (whole, beyond))} |"


def wire_row(server, url, context, steps):
    """Steps of one layer with keys and values at the server, and with all of them on the wire."""
    q, k, v = (torch.randn(1, heads, context, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    with rapt.Client(url) as client, client.create_cache(rapt.LayerShape(KV_HEADS, SIZE)) as cache:
        cache.append(0, *(x[0].transpose(0, 1) for x in (k, v)))
        tokens = [x[0, :, -1:].transpose(0, 1).contiguous() for x in (q, k, v)]
        sides = {
            lambda: client.attend(q[:, :, -1:], k, v): [],
            lambda: cache.attend(0, *tokens): [],
        }
        cpu = []
        for step, seconds in sides.items():
            before = server.cpu_seconds()
            for _ in range(steps):
                start = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - start)
            cpu.append(1e3 * (server.cpu_seconds() - before) / steps)
    wire, resident = (1e3 * statistics.median(seconds) for seconds in sides.values())
    times = f"{wire:.2f} | {resident:.2f} | {wire / resident:.1f}"
    return f"| {url[:4]} | {times} | {cpu[0]:.2f} | {cpu[1]:.2f} | {cpu[0] / max(cpu[1], 0.01):.1f} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps and shorter contexts")
    quick = parser.parse_args().quick
    rapt.torch.register_transformers()
    steps, contexts = (20, (512, 2048)) if quick else (60, (512, 4096))
    with contextlib.ExitStack() as stack, torch.no_grad():
        servers = [start_server(stack) for _ in range(2)]
        print(f"{LAYERS} layers of {HEADS} heads and {KV_HEADS} key heads of {SIZE}, {torch.get_num_threads()} threads a side.")
        for dtype in (torch.float32, torch.bfloat16):
            model = make_model(dtype)
            name = str(dtype).removeprefix("torch.")
            print(f"\nA step, ms, median and (least), {name}; bytes a token and layer, both ways:\n")
            print("| sequences | context | sdpa | rapt in process | HTTP | gRPC | two servers, HTTP | bytes |")
            print("| --- | --- | --- | --- | --- | --- | --- | --- |")
            for context in contexts:
                for batch in (1, 4):
                    print(steps_row(model, servers, batch, context, steps), flush=True)
        urls = urls_of(servers[0])
        print("\nForks and closes of a beam search, float32, context 512:\n")
        print("| transport | beams | calls a step | ms a call | of the search |")
        print("| --- | --- | --- | --- | --- |")
        model = make_model(torch.float32)
        for beams in (4,) if quick else (4, 16):
            for url in urls:
                print(beams_row(model, url, beams, 512, steps), flush=True)
        print("\nOne layer of a step of 8 short sequences, us, median and (least):\n")
        print("| transport | a call | without queue and compute of the server |")
        print("| --- | --- | --- |")
        for url in urls:
            print(layer_row(make_model(torch.float32, layers=1).config, url, 20 * steps), flush=True)
        print("\nA step of one layer and sequence, context 4096, float32, keys on the wire or at the server, ms:\n")
        print("| transport | wire | at the server | times | server CPU, wire | at the server | times |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for url in urls:
            print(wire_row(servers[0], url, 4096, 5 * steps), flush=True)


if __name__ == "__main__":
    main()
