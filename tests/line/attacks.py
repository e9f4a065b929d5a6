"""Clients that mean harm, on every route, and how long health takes meanwhile."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection

from fastapi import FastAPI

Route = tuple[str, str]  # method and path
Address = tuple[str, int]


def routes_of(app: FastAPI) -> list[Route]:
    """All routes that there are, and two that there aren't."""
    found = [("GET", "/nowhere"), ("DELETE", "/v1/parts")]
    for route in app.routes:
        path = getattr(route, "path").replace("{name}", "disc").replace("{number}", "1")  # noqa: B009
        path = path.replace("{kept}", "missed")
        assert "{" not in path
        found += [(method, path) for method in sorted(getattr(route, "methods"))]  # noqa: B009
    return found


@dataclass(frozen=True)
class Attack:
    """What a client sends at once, and again and again; and what it is told.

    Attributes:
        head: follows the request line and `Host`.
        body: follows the head.
        drip: is sent again and again.
        status: that is answered before the connection is closed; 0 for none.
        slow_status: answered instead where client or server is slow, as on a busy machine.
        reads: whether the client reads what is answered.
        times: as often is the request sent.
    """

    head: bytes
    body: bytes = b""
    drip: bytes = b""
    status: int = 0
    slow_status: int = 0
    reads: bool = True
    times: int = 1

    def sent(self, route: Route, token: str) -> bytes:
        """All that is sent at once."""
        method, path = route
        shown = f"Authorization: Bearer {token}\r\n" if token else ""
        start = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{shown}".encode()
        return (start + self.head + self.body) * self.times


_JSON = b"Content-Type: application/json\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_TINY = b"1\r\nx\r\n"
_CHUNK = b"8000\r\n" + bytes(0x8000) + b"\r\n"
ATTACKS = {
    "long body": Attack(b"Content-Length: 5000000000\r\n\r\n", drip=bytes(1000), status=413),
    "long chunked body": Attack(
        _CHUNKED + b"\r\n", body=_CHUNK * 40, drip=_CHUNK, status=413, slow_status=408
    ),
    "tiny chunks": Attack(_CHUNKED + b"\r\n", body=_TINY * 1000, status=400, slow_status=408),
    "long trailers": Attack(
        _CHUNKED + b"\r\n", body=b"0\r\n" + b"X:y\r\n" * 1000 + b"\r\n", status=400
    ),
    "contradicting framing": Attack(
        _JSON + b"Content-Length: 18\r\n" + _CHUNKED + b"\r\n", body=_CHUNK, status=400
    ),
    "two lengths": Attack(b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", body=b"{", status=400),
    "body that never ends": Attack(_JSON + b"Content-Length: 18\r\n\r\n", body=b"{", status=408),
    "dripping body": Attack(b"Content-Length: 60000\r\n\r\n", body=b"{", drip=b" ", status=408),
    "head that never ends": Attack(b"X:"),
    "dripping head": Attack(b"X: ", drip=b"x"),
    "large heads": Attack(b"a:b\r\n" * 1500 + b"\r\n", status=400),
    "long head": Attack(b"X: " + b"x" * 9000 + b"\r\n\r\n", status=400),
    "unknown charset": Attack(
        b"Content-Type: text/plain; charset=none-such\r\nContent-Length: 1\r\n\r\n",
        body=b"x",
        status=400,
    ),
    "slow reader": Attack(b"\r\n", reads=False, times=60),
    "silence": Attack(b""),
}


@dataclass(eq=False)
class Client:
    """One connection of an attack.

    Attributes:
        answer: the beginning of what it was told.
        seconds: after which the connection was closed; None where it wasn't.
    """

    attack: Attack
    route: Route
    line: socket.socket
    left: bytes
    begun: float = field(default_factory=time.monotonic)
    answer: bytes = b""
    seconds: float | None = None

    @classmethod
    def of(cls, attack: Attack, route: Route, address: Address, token: str) -> Client:
        """A client that has connected."""
        line = socket.socket()
        if not attack.reads:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.settimeout(5)
        line.connect(address)
        line.setblocking(False)
        return cls(attack, route, line, attack.sent(route, token) if attack.head else b"")

    @property
    def status(self) -> int:
        """What it was told; 0 for nothing."""
        return int(self.answer.split()[1]) if self.answer else 0

    @property
    def follows(self) -> bool:
        """Whether it reads the event stream, which doesn't end."""
        return self.route[1] == "/v1/events" and self.status == 200

    def go_on(self, *, drips: bool) -> None:
        """Send and read what can be."""
        try:
            if drips and not self.left:
                self.left = self.attack.drip
            if self.left:
                with suppress(BlockingIOError):
                    self.left = self.left[self.line.send(self.left) :]
            while self.attack.reads:
                piece = self.line.recv(65536)
                if not piece:
                    raise ConnectionResetError
                self.answer = self.answer or piece
        except BlockingIOError:
            pass
        except OSError:
            with suppress(OSError):
                while piece := self.line.recv(65536):
                    self.answer = self.answer or piece
            self.seconds = time.monotonic() - self.begun
            self.line.close()


def press(
    clients: list[Client],
    until: float,
    again: Callable[[], Client] | None = None,
) -> list[Client]:
    """Let clients go on until a time, or until all that read are closed; some seconds for others.

    Args:
        clients: with open connections.
        until: by `time.monotonic`.
        again: gives another in the place of one that was closed; then they go on until then.

    Returns:
        All that there have been.
    """
    every = list(clients)
    soon = time.monotonic() + 4  # by when a server notices that nobody reads its answers
    for turn in itertools.count():
        for client in list(clients):
            client.go_on(drips=turn % 2 == 0)
            if client.seconds is not None:
                clients.remove(client)
                if again is not None:
                    clients.append(again())
                    every.append(clients[-1])
        lasting = any(
            not one.follows if one.attack.reads else time.monotonic() < soon for one in clients
        )
        if time.monotonic() > until or not (lasting or again):
            return every
        time.sleep(0.05)
    raise AssertionError


@contextmanager
def health(address: Address, token: str) -> Iterator[list[float]]:
    """Seconds that health takes with the token, asked on a new connection each time."""
    seconds: list[float] = []
    stop = threading.Event()
    shown = {"Authorization": f"Bearer {token}"} if token else {}

    def ask() -> None:
        for path in itertools.cycle(("/v2/health/live", "/v2/health/ready")):
            if stop.wait(0.03):
                return
            begun = time.monotonic()
            connection = HTTPConnection(*address, timeout=20)
            try:
                connection.request("GET", path, headers=shown)
                told = connection.getresponse().status == 200
            except OSError:
                told = False
            connection.close()
            seconds.append(time.monotonic() - begun if told else float("inf"))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield seconds
    finally:
        stop.set()
        thread.join()
