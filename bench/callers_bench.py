"""Measures what a caller's calls take while another address does its worst; run by `./dev bench callers`.

Each case has a server of its own on loopback, over HTTP. One address makes calls, one at a time, in turns alone and during
an attack from another address, several times. The figures are medians of the phases. So that the attacker takes no
processor from the server, as if it had a machine of its own, it is one process that runs only when a core is idle, sends
bytes that are ready, and wakes only for connections that ended; its processor time is printed beside the server's. What
the server says of each call tells a wait for memory from one for a processor. Needs Linux and Python's standard library.
Prints Markdown for RESULTS.md.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import mmap
import os
import pathlib
import re
import select
import signal
import socket
import statistics
import struct
import sys
import tempfile
import time
import urllib.error
import urllib.request

from served import Server

ROOT = pathlib.Path(__file__).resolve().parents[1]
OTHER, GREEDY = "127.0.0.2", "127.0.0.3"
MODEL = "greedy"
MODEL_SIZE = 2304  # of an embedding; the four FP32 matrices of a layer have 81 MiB
SETTLE_SECONDS = 0.5  # from the start of an attack to the first call
END_SECONDS = 30  # for what is left of an attack
KEPT = 3.0  # seconds for which a response stays unread; the server ends silent calls after 2 s if others need their memory


# --- Requests -------------------------------------------------------------------------------------


def post(path, headers, body=b""):
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def infer(shape, output, parameters):
    """A call with Q, K and V of this shape, all ones."""
    tensor = struct.pack("<f", 1) * (shape[0] * shape[1] * shape[2] * shape[3])
    inputs = [
        {"name": name, "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": len(tensor)}} for name in "QKV"
    ]
    outputs = [{"name": output, "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": inputs, "outputs": outputs, "parameters": parameters}).encode()
    sizes = [f"Inference-Header-Content-Length: {len(head)}", f"Content-Length: {len(head) + 3 * len(tensor)}"]
    return post("/v2/models/attention/infer", sizes, head + 3 * tensor)


def small():
    return infer((1, 1, 16, 64), "Y", {})


def weights(mib):
    """A call that asks for all weights: the request is small, the response has this size."""
    return infer((1, 1, int((mib * 2**18) ** 0.5), 1), "qk_matmul_output", {"qk_matmul_output_mode": 3})


def upload():
    return post("/v2/models/attention/infer", ["Transfer-Encoding: chunked"], b"1\r\n{\r\n")


def repository(action):
    return post(f"/v2/repository/models/{MODEL}/{action}", ["Content-Length: 2"], b"{}")


def write_model(folder):
    """Writes a layer of zeros, as a file with a hole."""
    sizes = {"in_proj_weight": (3 * MODEL_SIZE, MODEL_SIZE), "out_proj.weight": (MODEL_SIZE, MODEL_SIZE)}
    index, end = {}, 0
    for name, (rows, columns) in sizes.items():
        begin, end = end, end + 4 * rows * columns
        index[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [begin, end]}
    head = json.dumps(index).encode()
    head += b" " * (-len(head) % 8)
    path = pathlib.Path(folder, MODEL)
    path.mkdir()
    (path / "config.json").write_text('{"num_attention_heads": 8}')
    with open(path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + end)


# --- Cases ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Peers:
    """Connections of the attacker on which it does the same."""

    count: int
    messages: tuple  # sent in turns: the next one when the last one is answered
    keep: float = 0  # after this time without reading an answer, the connection is replaced; 0: see `reads`
    reads: bool = False  # answers, and goes on with the next message; False: an answer is the end of the connection


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    calls: str
    request: bytes
    peers: tuple
    budget: int = 256 << 20
    loads: bool = False


def all_cases():
    uploads = (Peers(300, (upload(),)),)
    unread = "103 MiB of a response unread, again and again"
    loads = (Peers(1, (weights(40),), keep=KEPT), Peers(1, (repository("load"), repository("unload")), reads=True))
    return [
        Case("300 chunked uploads of a byte, opened again when ended", "small", small(), uploads),
        Case("the same uploads with a budget of 4 GiB, which they do not fill", "small", small(), uploads, budget=4 << 30),
        Case(unread, "15 MiB", weights(15), (Peers(4, (weights(103),), keep=KEPT),)),
        Case("loads of 81 MiB while it holds 40 MiB unread", "8 MiB", weights(8), loads, loads=True),
    ]


# --- The attacker ---------------------------------------------------------------------------------


class Attacker:
    """Runs in a process of its own until it is killed."""

    def __init__(self, address, peers, sent):
        self._address, self._sent = address, sent
        self._epoll = select.epoll()
        self._sockets = {}  # descriptor -> [socket, peers, number of the next message, when to replace it]
        for kind in peers:
            for _ in range(kind.count):
                self._open(kind)

    def run(self):
        while True:
            for descriptor, events in self._epoll.poll(self._until_due(), 256):
                self._on_events(descriptor, events)
            now = time.monotonic()
            for descriptor in [d for d, peer in self._sockets.items() if peer[3] <= now]:
                self._replace(descriptor)

    def _until_due(self):
        due = min((peer[3] for peer in self._sockets.values() if peer[1].keep), default=float("inf"))
        return None if due == float("inf") else max(0.0, due - time.monotonic())

    def _open(self, kind):
        peer = socket.socket()
        if kind.keep:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.bind((GREEDY, 0))
        peer.connect(self._address)
        peer.sendall(kind.messages[0])
        self._sockets[peer.fileno()] = [peer, kind, 1, float("inf")]
        self._epoll.register(peer, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
        self._count()

    def _count(self):
        self._sent[:8] = struct.pack("<q", struct.unpack("<q", self._sent[:8])[0] + 1)

    def _replace(self, descriptor):
        peer, kind, _, _ = self._sockets.pop(descriptor)
        peer.close()
        self._open(kind)

    def _on_events(self, descriptor, events):
        peer = self._sockets[descriptor]
        kind = peer[1]
        has_ended = events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR)
        if kind.keep and not has_ended:
            peer[3] = min(peer[3], time.monotonic() + kind.keep)
        elif kind.reads and not has_ended:
            peer[0].recv(1 << 16)
            peer[0].sendall(kind.messages[peer[2] % len(kind.messages)])
            peer[2] += 1
            self._count()
        else:
            self._replace(descriptor)


class Attack:
    """The attacker's process; context manager."""

    def __init__(self, address, peers):
        self._address, self._peers = address, peers
        self._shared = mmap.mmap(-1, mmap.PAGESIZE)
        self.cpu_seconds = 0

    def __enter__(self):
        self._pid = os.fork()
        if self._pid == 0:
            self._attack()
        return self

    def __exit__(self, *_):
        os.kill(self._pid, signal.SIGKILL)
        usage = os.wait4(self._pid, 0)[2]
        self.cpu_seconds = usage.ru_utime + usage.ru_stime
        if self.sent() < sum(kind.count for kind in self._peers):
            raise RuntimeError("the attacker did not open its connections")

    def sent(self):
        """Returns the number of its requests."""
        return struct.unpack("<q", self._shared[:8])[0]

    def _attack(self):
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            gc.freeze()
            gc.disable()
            Attacker(self._address, self._peers, self._shared).run()
        except OSError as error:
            print(f"the attacker ended: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)


# --- The other caller -----------------------------------------------------------------------------


@dataclasses.dataclass
class Call:
    at: float  # seconds since the phase began
    ms: float
    status: int
    queue_ms: float = 0  # for memory
    server_ms: float = 0  # since the server has read the request's head


class Caller:
    """Makes a call after another on one connection."""

    def __init__(self, address, request):
        self._address, self._request = address, request
        self._buffer = memoryview(bytearray(1 << 20))
        self._connect()

    def _connect(self):
        self._socket = socket.create_connection(self._address, source_address=(OTHER, 0))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self):
        self._socket.close()

    def calls(self, seconds):
        calls, began = [], time.perf_counter()
        while (at := time.perf_counter() - began) < seconds:
            calls.append(self._call(at))
        return calls

    def _call(self, at):
        begin = time.perf_counter()
        self._socket.sendall(self._request)
        head, left = self._receive_head()
        while left > 0:
            left -= self._receive(self._buffer[:left])
        took = time.perf_counter() - begin
        times = {name: int(us) / 1e3 for name, us in re.findall(rb"\r\nrapt-(\w+)-us: (\d+)", head)}
        if b"\r\nConnection: close" in head:
            self.close()
            self._connect()
        return Call(at, took * 1e3, int(head[9:12]), times.get(b"queue", 0), times.get(b"total", 0))

    def _receive_head(self):
        got = 0
        while (end := bytes(self._buffer[:got]).find(b"\r\n\r\n")) < 0:
            got += self._receive(self._buffer[got : got + (1 << 14)])
        head = bytes(self._buffer[: end + 2])
        length = int(re.search(rb"\r\nContent-Length: (\d+)", head)[1])
        return head, length - (got - end - 4)

    def _receive(self, place):
        count = self._socket.recv_into(place)
        if count == 0:
            raise RuntimeError("the server has closed the other caller's connection")
        return count


# --- Measuring ------------------------------------------------------------------------------------


def percentile(values, part):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


@dataclasses.dataclass
class Phase:
    seconds: float
    server_cores: float
    calls: list
    attacker_cores: float = 0
    requests: float = 0  # of the attacker, a second

    def us_of_server(self):
        return self.server_cores * self.seconds * 1e6 / len(self.calls)

    def failed(self):
        return sum(call.status != 200 for call in self.calls)

    def percentile(self, field, part):
        return percentile([getattr(call, field) for call in self.calls], part)


def run_phase(server, caller, seconds):
    cpu, began = server.cpu_seconds(), time.perf_counter()
    calls = caller.calls(seconds)
    took = time.perf_counter() - began
    return Phase(took, (server.cpu_seconds() - cpu) / took, calls)


def run_attack(server, caller, case, address, seconds):
    with Attack(address, case.peers) as attack:
        began = time.perf_counter()
        time.sleep(SETTLE_SECONDS)
        sent = attack.sent()
        phase = run_phase(server, caller, seconds)
        phase.requests = (attack.sent() - sent) / phase.seconds
        lasted = time.perf_counter() - began
    phase.attacker_cores = attack.cpu_seconds / lasted
    return phase


def wait_until_nothing_is_left(server, case):
    if case.loads:
        request = urllib.request.Request(f"http://{server.http_address}/v2/repository/models/{MODEL}/unload", b"{}")
        with contextlib.suppress(urllib.error.HTTPError):  # not loaded
            urllib.request.urlopen(request).close()
    end = time.monotonic() + END_SECONDS
    while server.read_metric("rapt_open_calls") > 0:
        if time.monotonic() > end:
            raise RuntimeError("calls of an attack do not end")
        time.sleep(0.05)


def measure(case, options, rounds, seconds):
    """Returns the phases alone and those during the attack."""
    with tempfile.TemporaryDirectory() as folder:
        command = [options.server, f"--memory_budget_bytes={case.budget}", f"--threads={options.threads}"]
        command += [f"--{name}_address=127.0.0.1:0" for name in ("grpc", "http", "metrics")]
        if case.loads:
            command.append(f"--model_repository={folder}")
        with Server("rapt", command, protocol="http") as server:
            if case.loads:
                write_model(folder)
            host, _, port = server.http_address.rpartition(":")
            address = (host, int(port))
            alone, during = [], []
            with contextlib.closing(Caller(address, case.request)) as caller:
                caller.calls(SETTLE_SECONDS)
                for _ in range(rounds):
                    alone.append(run_phase(server, caller, seconds))
                    during.append(run_attack(server, caller, case, address, seconds))
                    wait_until_nothing_is_left(server, case)
            return alone, during


# --- Reporting ------------------------------------------------------------------------------------

LATENCY = ("one address", "calls of the other", "p50 ms alone", "during", "p99 ms alone", "during")
LATENCY += ("longest ms alone", "during", "failed", "p99 ms of waiting for memory, during")
PROCESSOR = ("one address", "server's cores alone", "during", "server's CPU, us a call of the other, alone", "during")
PROCESSOR += ("attacker's cores", "attacker's requests/s")


def number(value):
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def median(phases, value):
    return number(statistics.median(value(phase) for phase in phases))


def latency_row(case, alone, during):
    cells = [case.name, case.calls]
    for part in (0.5, 0.99):
        cells += [median(phases, lambda phase, part=part: phase.percentile("ms", part)) for phases in (alone, during)]
    cells += [number(max(phase.percentile("ms", 1) for phase in phases)) for phases in (alone, during)]
    return [
        *cells,
        str(sum(phase.failed() for phase in (*alone, *during))),
        median(during, lambda phase: phase.percentile("queue_ms", 0.99)),
    ]


def processor_row(case, alone, during):
    return [
        case.name,
        *(median(phases, lambda phase: phase.server_cores) for phases in (alone, during)),
        *(median(phases, Phase.us_of_server) for phases in (alone, during)),
        median(during, lambda phase: phase.attacker_cores),
        median(during, lambda phase: phase.requests),
    ]


def print_row(cells):
    print("| " + " | ".join(cells) + " |", flush=True)


def print_head(columns):
    print_row(columns)
    print("| --- " * len(columns) + "|")


def parse_arguments():
    parser = argparse.ArgumentParser(prog="dev bench callers", description=__doc__.split("\n")[0])
    parser.add_argument("--filter", default="", help="regular expression: run only cases whose name matches")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="compute threads of the server")
    parser.add_argument("--server", default=ROOT / "build/release/bin/rapt-server", help="the program")
    parser.add_argument("--json", metavar="FILE", help="also write every call to FILE")
    return parser.parse_args()


def main():
    options = parse_arguments()
    rounds, seconds = (1, 4) if options.quick else (5, 6)
    cases = [case for case in all_cases() if re.search(options.filter, case.name)]
    if not cases:
        sys.exit(f"no case matches {options.filter!r}")
    gc.disable()
    print(f"{rounds} phases of {seconds} s alone and as many during the attack, in turns. `longest` is of all of them, other")
    print("figures are medians of the phases. Budget 256 MiB unless stated. Server and clients share the cores; the attacker")
    print(f"runs with SCHED_IDLE. Load of the machine before the run: {os.getloadavg()[0]:.2f}.\n")
    print_head(LATENCY)
    results = []
    for case in cases:
        alone, during = measure(case, options, rounds, seconds)
        print_row(latency_row(case, alone, during))
        results.append((case, alone, during))
        gc.collect()
    print()
    print_head(PROCESSOR)
    for result in results:
        print_row(processor_row(*result))
    if options.json:
        report = [{"case": case.name, "alone": alone, "during": during} for case, alone, during in results]
        pathlib.Path(options.json).write_text(json.dumps(report, default=dataclasses.asdict, indent=1) + "\n")


if __name__ == "__main__":
    main()
