"""A DNS server on loopback, for names whose addresses change. Needs no privileges."""

import socket
import struct
import threading

A, IN = 1, 1


class DnsServer:
    """Every name has the IPv4 addresses of the list `addresses`, which may be replaced at any time."""

    def __init__(self, addresses):
        self.addresses = addresses
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            query, peer = self._socket.recvfrom(512)
            self._socket.sendto(self._respond(query), peer)

    def _respond(self, query):
        end = query.index(0, 12) + 5  # of the question: name, type, class
        (kind,) = struct.unpack(">H", query[end - 4 : end - 2])
        addresses = list(self.addresses) if kind == A else []
        response = query[:2] + struct.pack(">HHHHH", 0x8580, 1, len(addresses), 0, 0) + query[12:end]
        for address in addresses:
            response += struct.pack(">HHHIH", 0xC00C, A, IN, 0, 4) + socket.inet_aton(address)
        return response
