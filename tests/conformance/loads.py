"""Callers that repeat one call, each on a channel of its own, until they are stopped; failures are counted by cause.

GrpcioLoad's callers are threads of this process; GoLoad's and JavaLoad's are a program's, tests/conformance/clients.
"""

import base64
import collections
import json
import os
import subprocess
import threading
import time

import grpc
from rapt_server import GIVE_UP_SECONDS
from tritonclient.grpc import service_pb2

CALLERS = 4
METHOD = "/inference.GRPCInferenceService/ModelInfer"
TOOLS = os.environ["RAPT_TOOLS"]

# `slowest` is in seconds, of the calls since the last report.
Report = collections.namedtuple("Report", "ok lost slowest")


def self_attention():
    request = service_pb2.ModelInferRequest(model_name="attention")
    for name in "QKV":
        request.inputs.add(name=name, datatype="FP32", shape=[1, 4, 64, 32])
        request.raw_input_contents.append(bytes(4 * 64 * 32 * 4))
    return request.SerializeToString()


class Load:
    """Context manager."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def wait_for_more(self, calls):
        """Waits for this number of calls, or for a lost one; returns the report."""
        report = self.report()
        enough, slowest, deadline = report.ok + calls, report.slowest, 0
        while report.ok < enough and not report.lost:
            ok = report.ok
            time.sleep(0.05)
            report = self.report()
            slowest = max(slowest, report.slowest)
            if report.ok > ok or not deadline:
                deadline = time.monotonic() + GIVE_UP_SECONDS
            assert time.monotonic() < deadline, f"no call has ended for {GIVE_UP_SECONDS} s; {report}"
        return report._replace(slowest=slowest)


class GrpcioLoad(Load):
    def __init__(self, target, options, wait_for_ready=False):
        self._target, self._options, self._waits = target, options, wait_for_ready
        self._lock = threading.Lock()
        self._is_stopping = False
        self._ok, self._lost, self._slowest = 0, collections.Counter(), 0
        self._threads = [threading.Thread(target=self._repeat) for _ in range(CALLERS)]
        for thread in self._threads:
            thread.start()

    def _repeat(self):
        options = [("grpc.use_local_subchannel_pool", 1), *self._options]
        request = self_attention()
        with grpc.insecure_channel(self._target, options) as channel:
            call = channel.unary_unary(METHOD)
            while not self._is_stopping:
                begin = time.monotonic()
                try:
                    call(request, timeout=GIVE_UP_SECONDS, wait_for_ready=self._waits)
                    error = None
                except grpc.RpcError as failure:
                    error = f"{failure.code().name}: {failure.details()}"
                self._count(error, time.monotonic() - begin)

    def _count(self, error, seconds):
        with self._lock:
            if error:
                self._lost[error] += 1
            else:
                self._ok += 1
            self._slowest = max(self._slowest, seconds)

    def report(self):
        with self._lock:
            report = Report(self._ok, dict(self._lost), self._slowest)
            self._slowest = 0
        return report

    def stop(self):
        self._is_stopping = True
        for thread in self._threads:
            thread.join()


class ProgramLoad(Load):
    """A program that prints a report for each line of its standard input, and stops with that input.

    Its arguments are the target, the service config, the method, the number of callers and their timeout in seconds.
    The first line is the request in base64.
    """

    def __init__(self, command, target, config):
        arguments = [target, json.dumps(config), METHOD, str(CALLERS), str(GIVE_UP_SECONDS)]
        self._process = subprocess.Popen(
            [*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ask(base64.b64encode(self_attention()).decode())

    def _ask(self, line):
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def report(self):
        self._ask("")
        line = self._process.stdout.readline()
        assert line, f"the program exited with {self._process.wait()}"
        return Report(**json.loads(line))

    def stop(self):
        if not self._process.stdin.closed:
            self._process.stdin.close()
        assert self._process.wait(GIVE_UP_SECONDS) == 0
        self._process.stdout.close()
