"""A grpcio echo server, the baseline cost of a Python service: receives bytes, returns a few bytes.

Prints its port, then serves until it is killed.
"""

import sys
from concurrent import futures

import grpc


class Echo(grpc.GenericRpcHandler):
    def service(self, _details):
        answer = bytes(int(sys.argv[1]))
        return grpc.unary_unary_rpc_method_handler(lambda _request, _context: answer)


server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
server.add_generic_rpc_handlers((Echo(),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(port, flush=True)
server.wait_for_termination()
