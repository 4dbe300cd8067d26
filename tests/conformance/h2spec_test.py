"""h2spec, whole, against the server's HTTP/2 transport without TLS.

h2spec asks with GET, which the server refuses as soon as the request's headers are complete, without a body.
"""

import os
import socket
import subprocess
import threading
import xml.etree.ElementTree

import pytest
from rapt_server import RaptServer

H2SPEC = os.environ["RAPT_TOOLS"] + "/h2spec"
CASES_OF_H2SPEC_2_6 = 146
TRIES = 3
PAUSE_SECONDS = 0.02

NO_BODY = "the answer has no DATA"
CLOSED = "RFC 9113, 5.1: a frame on a closed stream may be an error; here it is ignored"
NOT_OPENED = "gRPC's clients reset streams that they have not opened; see AResetOfAStreamThatWasNotOpenedIsIgnored"
DEVIATIONS = {
    "generic/2/2": NO_BODY,
    "generic/2/3": NO_BODY,
    "http2/4.2/1": "SETTINGS_MAX_FRAME_SIZE is 1 MiB here, which exceeds the window",
    "http2/4.2/3": "20 kB do not exceed SETTINGS_MAX_FRAME_SIZE; see test_a_header_block_beyond_the_frame_size",
    "http2/5.1/2": NOT_OPENED,
    "http2/5.1/8": CLOSED,
    "http2/5.1/9": CLOSED,
    "http2/5.1/11": CLOSED,
    "http2/5.1/12": CLOSED,
    "http2/5.1.1/2": "nghttp2 keeps no list of closed streams, and takes a lower identifier for one of them",
    "http2/5.3.1/2": "RFC 9113, 5.3.2: priorities are obsolete; the server announces SETTINGS_NO_RFC7540_PRIORITIES",
    "http2/6.4/2": NOT_OPENED,
    "http2/6.5.3/1": NO_BODY,
    "http2/6.9.1/1": NO_BODY,
    "http2/6.9.2/1": NO_BODY,
    "http2/6.9.2/2": NO_BODY,
}


class Relay:
    """A TCP proxy that forwards what the client sent once the client pauses.

    The server then reads a request together with the frames that break its rules. Otherwise it often has answered the
    request, and closed the stream, before these frames arrive.
    """

    def __init__(self, address):
        self._target = address.rsplit(":", 1)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            client.settimeout(PAUSE_SECONDS)
            threading.Thread(target=self._forward_requests, args=(client, server), daemon=True).start()
            threading.Thread(target=self._forward_answers, args=(server, client), daemon=True).start()

    @staticmethod
    def _forward_requests(client, server):
        sent = b""
        while True:
            try:
                part = client.recv(1 << 20)
                sent += part
                if part:
                    continue
            except TimeoutError:
                part = b"pause"
            except OSError:
                part = b""
            try:
                server.sendall(sent)
                sent = b""
                if not part:
                    server.shutdown(socket.SHUT_WR)
                    return
            except OSError:
                return

    @staticmethod
    def _forward_answers(server, client):
        try:
            while part := server.recv(1 << 20):
                client.sendall(part)
        except OSError:
            pass
        for side in (server, client):
            side.close()


@pytest.fixture(scope="module")
def h2spec(tmp_path_factory):
    report = tmp_path_factory.mktemp("h2spec") / "report.xml"

    def run(*arguments):
        """Returns whether each case passed, by its number. A case that is run alone has the number 1."""
        command = [H2SPEC, "--port", str(relay.port), "--timeout=1", "--junit-report", str(report), *arguments]
        subprocess.run(command, capture_output=True, timeout=240)
        return {
            f"{group.get('package')}/{number}": len(case) == 0
            for group in xml.etree.ElementTree.parse(report).getroot()
            for number, case in enumerate(group, 1)
        }

    with RaptServer() as server, Relay(server.grpc_address) as relay:
        yield run


def test_all_cases_but_the_deviations_pass(h2spec):
    passed = h2spec()
    assert len(passed) == CASES_OF_H2SPEC_2_6
    failed = {case for case, has_passed in passed.items() if not has_passed}
    for _ in range(TRIES - 1):  # the server may still have answered first, or the machine be slow
        for case in sorted(failed - DEVIATIONS.keys()):
            if all(h2spec(case).values()):
                failed.remove(case)
    print(f"h2spec: {len(passed) - len(failed)} of {len(passed)} cases pass")
    assert not failed - DEVIATIONS.keys()


def test_a_header_block_beyond_the_frame_size(h2spec):
    assert list(h2spec("http2/4.2/3", "--max-header-length=250000").values()) == [True]
