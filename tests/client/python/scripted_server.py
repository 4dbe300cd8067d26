"""A server that answers as a test says, on a free loopback port; and what stands between a client and a server."""

import json
import socket
import threading
from concurrent import futures

import grpc


def answer(status=200, body=b"{}", **headers):
    """The bytes of an answer."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Content-Length": len(body)} | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} Reason\r\n{lines}\r\n".encode() + body


def read_message(connection):
    """The head and the body of a message; nothing at the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return data, b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    while len(body) < int(fields.get(b"content-length", 0)):
        more = connection.recv(1 << 20)
        if not more:
            break
        body += more
    return head, body


class Listener:
    """Serves each connection in a thread; context manager."""

    def __enter__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self._socket.getsockname()[1]
        self.url = f"http://{self.address}"
        self._lock = threading.Lock()
        self._connections = []
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            for connection in self._connections:
                connection.close()

    def _accept(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with self._lock:
                self._connections.append(connection)
                self.accepted += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        try:
            self.serve(connection)
        except OSError:
            pass  # the client has left
        finally:
            connection.close()


class ScriptedServer(Listener):
    """Answers requests with the steps of the script, in turn; the last one repeats. A step is the bytes of an answer,
    CLOSE, or a function of the connection; after a function, and after bytes in a list, the connection is closed."""

    CLOSE = [b""]

    def __init__(self, *script):
        self._script = list(script)
        self.requests = []  # heads

    def serve(self, connection):
        while True:
            head, _ = read_message(connection)
            if not head:
                return
            with self._lock:
                self.requests.append(head.decode("latin-1"))
                step = self._script.pop(0) if len(self._script) > 1 else self._script[0]
            if callable(step):
                step(connection)
                return
            connection.sendall(step[0] if isinstance(step, list) else step)
            if isinstance(step, list):
                return


class LossyProxy(Listener):
    """Passes requests to a server, and answers to the client, but loses the answers of these numbers, from 0."""

    def __init__(self, server, lost):
        self._server, self._lost = server.http_address, set(lost)
        self.answers = 0

    def serve(self, connection):
        host, port = self._server.split(":")
        with socket.create_connection((host, int(port))) as server:
            while True:
                head, body = read_message(connection)
                if not head:
                    return
                head = head.replace(self.address.encode(), self._server.encode())
                server.sendall(head + b"\r\n\r\n" + body)
                head, body = read_message(server)
                with self._lock:
                    number, self.answers = self.answers, self.answers + 1
                if number in self._lost:
                    return
                connection.sendall(head + b"\r\n\r\n" + body)


class LossyGrpcProxy(grpc.GenericRpcHandler):
    """The same for unary calls of gRPC."""

    def __init__(self, server, lost):
        self._server, self._lost = server.grpc_address, set(lost)
        self.answers = 0

    def __enter__(self):
        self._channel = grpc.insecure_channel(self._server)
        self._proxy = grpc.server(futures.ThreadPoolExecutor(1), handlers=[self])
        self.url = f"grpc://127.0.0.1:{self._proxy.add_insecure_port('127.0.0.1:0')}"
        self._proxy.start()
        return self

    def __exit__(self, *_):
        self._proxy.stop(None)
        self._channel.close()

    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self._pass(details.method, request, context))

    def _pass(self, method, request, context):
        call = self._channel.unary_unary(method)
        try:
            answer = call(request, timeout=context.time_remaining())
        except grpc.RpcError as error:
            context.set_trailing_metadata(error.trailing_metadata())
            context.abort(error.code(), error.details())
        number, self.answers = self.answers, self.answers + 1
        if number in self._lost:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return answer
