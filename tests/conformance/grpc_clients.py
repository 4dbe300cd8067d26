"""gRPC's client libraries, each behind one function: call(). Messages are bytes.

`trailers` is the trailing metadata of the last call that succeeded. Names of metadata that end in -bin have bytes as values.
"""

import asyncio
import base64
import collections
import os
import subprocess
import time

import grpc

Outcome = collections.namedtuple("Outcome", "code message responses")

# Without proxies and the limit of 4 MiB. Python pings every second, also without data.
OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
CANCELLED = Outcome(grpc.StatusCode.CANCELLED, "", [])


def failure(error, responses):
    return Outcome(error.code(), error.details(), responses)


def options_of(timeout, wait_for_ready, metadata):
    return {"timeout": timeout, "wait_for_ready": wait_for_ready, "metadata": tuple((metadata or {}).items())}


class Grpcio:
    """grpcio, synchronous."""

    keepalive_seconds = 1

    def __init__(self, address):
        self._channel = grpc.insecure_channel(address, OPTIONS)

    def close(self):
        self._channel.close()

    def call(self, kind, method, *requests, timeout=60, cancel_after=0, wait_for_ready=False, metadata=None):
        """Makes a unary call or one with streams in both directions, whose requests are sent at once."""
        options = options_of(timeout, wait_for_ready, metadata)
        responses = []
        try:
            if kind == "unary":
                call = self._channel.unary_unary(method).future(requests[0], **options)
                self._cancel(call, cancel_after)
                responses.append(call.result())
            else:
                call = self._channel.stream_stream(method)(iter(requests), **options)
                self._cancel(call, cancel_after)
                responses.extend(call)
            self.trailers = dict(call.trailing_metadata())
        except grpc.FutureCancelledError:
            return CANCELLED
        except grpc.RpcError as error:
            return failure(error, responses)
        return Outcome(grpc.StatusCode.OK, "", responses)

    @staticmethod
    def _cancel(call, after):
        if after:
            time.sleep(after)
            call.cancel()


class GrpcioAio:
    """grpc.aio."""

    keepalive_seconds = 1

    def __init__(self, address):
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._channel = grpc.aio.insecure_channel(address, OPTIONS)

    def close(self):
        self._loop.run_until_complete(self._channel.close())
        self._loop.close()

    def call(self, *args, **kwargs):
        return self._loop.run_until_complete(self._call(*args, **kwargs))

    async def _call(self, kind, method, *requests, timeout=60, cancel_after=0, wait_for_ready=False, metadata=None):
        options = options_of(timeout, wait_for_ready, metadata)
        responses = []
        if kind == "unary":
            call = self._channel.unary_unary(method)(requests[0], **options)
        else:
            call = self._channel.stream_stream(method)(iter(requests), **options)
        if cancel_after:
            self._loop.call_later(cancel_after, call.cancel)
        try:
            if kind == "unary":
                responses.append(await call)
            else:
                async for response in call:
                    responses.append(response)
            self.trailers = dict(await call.trailing_metadata())
        except asyncio.CancelledError:
            return CANCELLED
        except grpc.RpcError as error:
            return failure(error, responses)
        return Outcome(grpc.StatusCode.OK, "", responses)


class Program:
    """A program that makes the calls given on its standard input, one a line, and prints their outcomes.

    A call is "unary|stream METHOD TIMEOUT_MS CANCEL_MS wait|now METADATA REQUEST...", an outcome
    "CODE MESSAGE TRAILERS RESPONSE...". CANCEL_MS is 0 if the call is not cancelled. Messages and metadata are in
    base64; metadata is a line "NAME VALUE" for each name.
    """

    command = ()
    environment = {}

    def __init__(self, address):
        self._process = subprocess.Popen(
            [*self.command, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment},
        )

    def close(self):
        self._process.stdin.close()
        assert self._process.wait(60) == 0

    def call(self, kind, method, *requests, timeout=60, cancel_after=0, wait_for_ready=False, metadata=None):
        words = [kind, method, str(round(timeout * 1000)), str(round(cancel_after * 1000))]
        words.append("wait" if wait_for_ready else "now")
        values = {n: v if isinstance(v, str) else v.decode() for n, v in (metadata or {}).items()}
        lines = "\n".join(f"{name} {value}" for name, value in values.items())
        words.extend(base64.b64encode(text).decode() for text in (lines.encode(), *requests))
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        code, message, trailers, *responses = self._process.stdout.readline().removesuffix("\n").split(" ")
        lines = base64.b64decode(trailers).decode().splitlines()
        self.trailers = dict(line.split(" ", 1) for line in lines)
        (status,) = (status for status in grpc.StatusCode if status.value[0] == int(code))
        return Outcome(status, base64.b64decode(message).decode(), [base64.b64decode(r) for r in responses])


HERE = os.path.dirname(os.path.abspath(__file__))
TOOLS = os.environ["RAPT_TOOLS"]


class Go(Program):
    """grpc-go."""

    keepalive_seconds = 10  # the shortest that it accepts
    command = (TOOLS + "/go-client",)


class Node(Program):
    """@grpc/grpc-js. After a GOAWAY, its next ping ends the calls that are still open."""

    keepalive_seconds = 10
    command = ("node", HERE + "/clients/node/client.js")
    environment = {"NODE_PATH": TOOLS + "/node-client/node_modules"}


class Java(Program):
    """grpc-java with Netty."""

    keepalive_seconds = 10  # the shortest that it accepts
    command = ("java", "-cp", f"{TOOLS}/java-client:{TOOLS}/java-client/*", "Client")


CLIENTS = {"grpcio": Grpcio, "aio": GrpcioAio, "go": Go, "node": Node, "java": Java}
