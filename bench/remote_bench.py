"""Times decoding steps of a small model of transformers with attention in process and at rapt-servers on this machine; run by
`./dev bench remote`.

The sides take turns, step by step, each with its own cache of the same prompt, and figures are medians. The model has the
attention of a 1B model in each layer, and little else, so that attention and its transfer dominate. Prints Markdown for
RESULTS.md.
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
from served import Server  # noqa: E402

LAYERS, HEADS, KV_HEADS, SIZE = 4, 32, 8, 64
PROGRAM = os.environ.get("RAPT_SERVER", pathlib.Path(__file__).resolve().parents[1] / "build/release/bin/rapt-server")


class CountingClient(rapt.Client):
    """Counts the bytes of calls and answers, without HTTP's headers."""

    def __init__(self, url):
        super().__init__(url)
        self.sent = self.received = self.calls = 0
        call = self._calls.call

        def counted(method, path, body=(), *arguments, **options):
            answer = call(method, path, body, *arguments, **options)
            self.calls += 1
            self.sent += sum(memoryview(buffer).nbytes for buffer in body)
            self.received += len(answer.body)
            return answer

        self._calls.call = counted


def start_server(stack):
    addresses = [f"--{name}_address=127.0.0.1:0" for name in ("grpc", "http", "metrics")]
    server = Server("rapt-server", [PROGRAM, *addresses, "--kv_cache_bytes=4G"], protocol="http")
    return f"http://{stack.enter_context(server).address}"


def make_model(dtype):
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
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


def steps_row(model, urls, batch, context, steps):
    """A row of times, and the bytes of a token and layer."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(CountingClient(url)) for url in urls]
        prompt = torch.randint(0, 1000, (batch, context))
        remote = [stack.enter_context(rapt.torch.RemoteCache(some, model.config)) for some in (clients[0], clients)]
        sides = [
            Side(model, "sdpa", transformers.DynamicCache(config=model.config), prompt),
            Side(model, "rapt", transformers.DynamicCache(config=model.config), prompt),
            Side(model, "rapt-server", remote[0], prompt),
            Side(model, "rapt-server", remote[1], prompt),
        ]
        total = 0
        for _ in range(steps):
            token = torch.randint(0, 1000, (batch, 1))
            want = sides[0].step(token)
            for side in sides[1:]:
                before = clients[0].sent + clients[0].received
                torch.testing.assert_close(side.step(token), want, rtol=5e-2, atol=5e-2)
                total += (clients[0].sent + clients[0].received - before) if side is sides[2] else 0
    each = total / steps / LAYERS / batch
    return f"| {batch} | {context} | {' | '.join(side.milliseconds() for side in sides)} | {each:.0f} |"


def beams_rows(model, url, beams, context, steps):
    """What forks add to a search, with forks one after the other and at the same time."""
    prompt = torch.randint(0, 1000, (1, context))
    for most_calls in (1, 16):
        with CountingClient(url) as client, rapt.torch.RemoteCache(client, model.config) as cache:
            model.set_attn_implementation("rapt-server")
            rapt.torch._remote._MOST_CALLS = most_calls
            select, seconds = cache.batch_select_indices, []

            def timed(indices):
                calls, start = client.calls, time.perf_counter()
                select(indices)
                seconds.append((time.perf_counter() - start, client.calls - calls))

            cache.batch_select_indices = timed
            start = time.perf_counter()
            options = {"do_sample": False, "num_beams": beams, "max_new_tokens": steps, "min_new_tokens": steps}
            model.generate(prompt, cache=cache, pad_token_id=0, **options)
            whole = time.perf_counter() - start
        calls = sum(n for _, n in seconds) / len(seconds)
        reorder = sum(s for s, _ in seconds)
        yield f"| {beams} | {most_calls} | {calls:.1f} | {1e3 * reorder / len(seconds):.2f} | {100 * reorder / whole:.0f} % |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps and shorter contexts")
    quick = parser.parse_args().quick
    rapt.torch.register_transformers()
    steps, contexts = (20, (512, 2048)) if quick else (60, (512, 4096))
    with contextlib.ExitStack() as stack, torch.no_grad():
        urls = [start_server(stack) for _ in range(2)]
        print(f"{LAYERS} layers of {HEADS} heads and {KV_HEADS} key heads of {SIZE}, {torch.get_num_threads()} threads a side.")
        for dtype in (torch.float32, torch.bfloat16):
            model = make_model(dtype)
            name = str(dtype).removeprefix("torch.")
            print(f"\nA step, ms, median and (least), {name}; bytes a token and layer, both ways:\n")
            print("| sequences | context | sdpa | rapt in process | a server | two servers | bytes |")
            print("| --- | --- | --- | --- | --- | --- | --- |")
            for context in contexts:
                for batch in (1, 4):
                    print(steps_row(model, urls, batch, context, steps), flush=True)
        print("\nForks and closes of a beam search, float32, context 512:\n")
        print("| beams | calls at once | calls a step | ms a step | of the search |")
        print("| --- | --- | --- | --- | --- |")
        model = make_model(torch.float32)
        for beams in (4,) if quick else (4, 16):
            for row in beams_rows(model, urls[0], beams, 512, steps):
                print(row, flush=True)


if __name__ == "__main__":
    main()
