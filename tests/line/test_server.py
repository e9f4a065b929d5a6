"""The server's own limits, with no model behind it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import pytest
import torch

from anomaly.line import server
from anomaly.line.record import Record
from anomaly.line.service import InspectionService
from anomaly.line.slot import Limits, ModelSlot, Version

TOKEN = "0123456789abcdef"
ASKED = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(server, "_IDLE_SECONDS", 2)
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 10)
    stop = threading.Event()
    listener = server.listening("127.0.0.1", 0)
    limits = Limits(body_bytes=1_000_000)
    with InspectionService(
        {}, Record(tmp_path / "l.sqlite"), device=torch.device("cpu"), limits=limits
    ) as line:
        # A model that is never asked: what is sent to it is refused before.
        engine = cast(Any, SimpleNamespace(resident=0, __exit__=lambda: None))
        line.registry.models["disc"] = ModelSlot("disc", tmp_path, engine=engine)
        running = threading.Thread(target=server.serve, args=(line, listener, TOKEN, stop.is_set))
        running.start()
        end = time.monotonic() + 60
        while True:
            with suppress(ConnectionError):
                if status(listener.getsockname()) == 200:
                    break
            assert time.monotonic() < end
            time.sleep(0.02)
        yield listener.getsockname()
        stop.set()
        running.join()


def test_a_version_is_no_longer_refused_once_the_next_is_in_use(tmp_path: Path) -> None:
    """Even while the one before still answers what it took."""
    said: list[dict[str, Any]] = []
    leaving = cast(Any, SimpleNamespace(__exit__=lambda: said.append(served.short())))
    served = ModelSlot("disc", tmp_path, engine=leaving, trouble="it was bad")
    assert served.short()["refused"]
    served.use(Version("2", "", True, {}, {}, None), cast(Any, SimpleNamespace()))
    assert [(one["refused"], one["reason"]) for one in said] == [(False, "")]


def status(address: tuple[str, int]) -> int:
    with socket.create_connection(address, timeout=20) as line:
        line.sendall(ASKED)
        return int(line.recv(2000).split()[1])


def test_silent_clients_keep_nobody_out(address: tuple[str, int]) -> None:
    silent = [socket.create_connection(address, timeout=60) for _ in range(12)]
    for line in silent[:4]:
        line.sendall(ASKED[:-10])
    for line in silent[4:8]:  # one whole request, and the beginning of the next
        line.sendall(ASKED)
        line.recv(2000)
        with suppress(ConnectionError):
            line.sendall(ASKED[:-10])
    assert status(address) == 503
    for line in silent:
        with suppress(ConnectionError):
            while line.recv(2000):
                pass
        line.close()
    assert status(address) == 200


def test_a_client_that_asks_now_and_then_stays_connected(address: tuple[str, int]) -> None:
    connection = HTTPConnection(*address, timeout=20)
    own = set()
    for _ in range(8):
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()
        own.add(connection.sock.getsockname())
        time.sleep(0.5)
    assert len(own) == 1
    connection.close()


def ask(
    address: tuple[str, int], method: str, path: str, body: bytes | None, token: str
) -> tuple[int, str]:
    connection = HTTPConnection(*address, timeout=60)
    connection.request(method, path, body, {"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    said = answer.read().decode()
    connection.close()
    return answer.status, said


def test_wrong_tokens_and_names_that_mean_harm(address: tuple[str, int], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    for token in ("", "0" * 16, TOKEN[:-1], TOKEN + "x", "x" * 5000):
        for path, body in (("/v1/models/disc/score", b"image"), ("/v1/parts", None), ("/", None)):
            assert ask(address, "POST" if body else "GET", path, body, token)[0] == 401
    for name in ("../../etc/passwd", "disc\0", "disc\n\x1b[2J", "<b>disc</b>", ".."):
        model = f"/v1/models/{quote(name, safe='')}"
        for path, body in ((model, None), (f"{model}/score", b"image")):
            status, said = ask(address, "POST" if body else "GET", path, body, TOKEN)
            assert status in (404, 405)
            assert said.isprintable()
            assert said.startswith('{"detail":')
    assert sorted(tmp_path.rglob("*")) == before


def test_five_gigabytes_are_refused_and_leave_nothing(
    address: tuple[str, int], tmp_path: Path
) -> None:
    def resident() -> int:
        return int(Path(f"/proc/{os.getpid()}/statm").read_text().split()[1]) * 4096

    assert ask(address, "POST", "/v1/models/disc/score", bytes(1_000_001), TOKEN)[0] == 413
    before, files, sent = resident(), sorted(tmp_path.rglob("*")), 0
    with suppress(OSError), socket.create_connection(address, timeout=60) as line:
        line.sendall(b"POST /v1/models/disc/score HTTP/1.1\r\nHost: localhost\r\n"
                     b"Authorization: Bearer " + TOKEN.encode() + b"\r\n"
                     b"Transfer-Encoding: chunked\r\n\r\n")  # fmt: skip
        piece = b"f4240\r\n" + bytes(1_000_000) + b"\r\n"
        while sent < 5_000_000_000:
            line.sendall(piece)
            sent += 1_000_000
    assert 1_000_000 < sent < 5_000_000_000
    assert resident() - before < 50_000_000
    assert sorted(tmp_path.rglob("*")) == files
