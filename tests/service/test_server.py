"""The server's own limits, with no model behind it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch

from anomaly.service import server
from anomaly.service.line import Line

ASKED = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(server, "_IDLE_SECONDS", 2)
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 10)
    stop = threading.Event()
    listener = server.listening("127.0.0.1", 0)
    with Line({}, tmp_path / "line.sqlite", device=torch.device("cpu")) as line:
        running = threading.Thread(target=server.serve, args=(line, listener, "", stop.is_set))
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
