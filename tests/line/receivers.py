"""A webhook's receiver and an MQTT broker that can die and come back."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Rows:
    """What has arrived."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    @property
    def ids(self) -> list[int]:
        return [row["id"] for row in self.rows]


class Receiver(Rows):
    """Takes POST requests; `statuses` are answered first, then 200.

    Used in a `with` statement; `port` 0 takes any that is free.
    """

    def __init__(self, port: int = 0, statuses: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.statuses = list(statuses)
        self.headers: list[dict[str, str]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.headers.append({k.lower(): v for k, v in self.headers.items()})
                status = receiver.statuses.pop(0) if receiver.statuses else 200
                if status == 200:
                    receiver.rows.append({**json.loads(body), "target": self.path})
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", f"http://127.0.0.1:{receiver.port}/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> Receiver:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Broker(Rows):
    """The part of MQTT 3.1.1 that a publisher with QoS 1 needs; `silent` confirms nothing."""

    def __init__(self, port: int = 0, *, silent: bool = False) -> None:
        super().__init__()
        self._silent = silent
        self.topics: set[str] = set()
        self.users: list[bytes] = []
        self._connections: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", port))
        self.port: int = self._server.getsockname()[1]

    def __enter__(self) -> Broker:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._server, *self._connections):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self._connections.append(connection)
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection.makefile("rb") as stream:
            while first := stream.read(1):
                length, shift = 0, 0
                while (byte := stream.read(1)[0]) & 0x80:
                    length, shift = length | (byte & 0x7F) << shift, shift + 7
                body = stream.read(length | byte << shift)
                match first[0] >> 4:
                    case 1:  # CONNECT
                        self.users.append(body)
                        connection.sendall(b"\x20\x02\x00\x00")
                    case 3:  # PUBLISH
                        assert first[0] >> 1 & 3 == 1  # QoS 1
                        end = 2 + int.from_bytes(body[:2])
                        self.topics.add(body[2:end].decode())
                        if not self._silent:
                            self.rows.append(json.loads(body[end + 2 :]))
                            connection.sendall(b"\x40\x02" + body[end : end + 2])
                    case 12:  # PINGREQ
                        connection.sendall(b"\xd0\x00")
