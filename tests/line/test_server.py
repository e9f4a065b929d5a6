"""The server's own limits, with no model behind it."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import numpy as np
import pytest
import torch
from attacks import ATTACKS, Client, health, press, routes_of

from anomaly.line import server, service
from anomaly.line.app import InTurn, make_app
from anomaly.line.engine import BusyError
from anomaly.line.guard import Limits
from anomaly.line.record import Record
from anomaly.line.service import InspectionService
from anomaly.line.slot import ModelSlot, Version

TOKEN = "0123456789abcdef"
ASKED = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def line(tmp_path: Path) -> Iterator[InspectionService]:
    limits = Limits(1_000_000, receive_seconds=3, begin_seconds=0.5, bytes_a_second=1000)
    with InspectionService(
        {}, Record(tmp_path / "l.sqlite"), device=torch.device("cpu"), limits=limits
    ) as service:
        engine = cast(Any, SimpleNamespace(__exit__=lambda: None, waiting=0, submit=busy))
        service.registry.models["disc"] = ModelSlot("disc", tmp_path, engine=engine)
        yield service


def busy(*_: object) -> Any:
    raise BusyError("it takes nothing")


class WatchedPlaces(server.Places):
    """Places that say which connections are open, by the client's port."""

    def __init__(self) -> None:
        super().__init__()
        self.ports: set[int] = set()

    def come(self, connection: Any) -> None:
        self.ports.add(connection.client[1])
        super().come(connection)

    def leave(self, connection: Any) -> None:
        self.ports.discard(connection.client[1])
        super().leave(connection)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> WatchedPlaces:
    watched = WatchedPlaces()
    monkeypatch.setattr(server, "Places", lambda: watched)
    return watched


@pytest.fixture
def address(
    line: InspectionService, places: WatchedPlaces, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(server, "_IDLE_SECONDS", 2)
    monkeypatch.setattr(server, "_TAKE_SECONDS", 1)
    stop = threading.Event()
    listener = server.listening("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # slow readers are seen soon
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


def test_it_ends_when_all_parts_are_answered(
    line: InspectionService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_LAST_SECONDS", 1)
    engine, stop = cast(Any, line.registry.models["disc"].engine), threading.Event()
    refused: list[str] = []
    engine.waiting, engine.refuse_waiting = 1, lambda reason: refused.append(reason) or 1
    listener = server.listening("127.0.0.1", 0)
    running = threading.Thread(target=server.serve, args=(line, listener, TOKEN, stop.is_set))
    running.start()
    end = time.monotonic() + 20
    while not refused:
        assert time.monotonic() < end
        time.sleep(0.1)
        with suppress(ConnectionRefusedError):  # it isn't listening yet
            connection = HTTPConnection(*listener.getsockname(), timeout=60)
            shown = {"Authorization": f"Bearer {TOKEN}"}
            connection.request("POST", "/v1/models/disc/score", b"image", shown)
            answer = connection.getresponse()
            assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
            connection.close()
            stop.set()
    assert running.is_alive()
    engine.waiting = 0
    running.join(20)
    assert not running.is_alive()


def test_those_that_read_leave_time_between() -> None:
    times: list[tuple[float, float]] = []

    def read() -> None:
        begun = time.monotonic()
        time.sleep(0.05)
        times.append((begun, time.monotonic()))

    async def several() -> None:
        in_turn = InTurn()
        await asyncio.gather(*(in_turn(read) for _ in range(4)))

    asyncio.run(several())
    assert all(later[0] - earlier[1] > 0.03 for earlier, later in pairwise(times))


def test_a_version_is_no_longer_refused_once_the_next_is_in_use(tmp_path: Path) -> None:
    """Even while the one before still answers what it took."""
    said: list[dict[str, Any]] = []
    leaving = cast(Any, SimpleNamespace(__exit__=lambda: said.append(served.short())))
    served = ModelSlot("disc", tmp_path, engine=leaving, trouble="it was bad")
    assert served.short()["refused"]
    facts = {"model_id": "2", "method": "PaDiM", "unit": "", "config": SimpleNamespace(name="disc")}
    version = Version(cast(Any, SimpleNamespace(**facts)), "", None, "")
    served.use(version, cast(Any, SimpleNamespace()))
    assert [(one["refused"], one["reason"]) for one in said] == [(False, "")]


def test_health_and_figures_say_what_became_of_the_record(line: InspectionService) -> None:
    def figures() -> dict[str, float]:
        lines = [one.split() for one in line.metrics.text().decode().splitlines()]
        return {name[15:]: float(v) for name, v, *_ in lines if name.startswith("anomaly_record_")}

    file = line.record.file
    fine = {"ready": True, "reason": "", "models": {"disc": "ready"}, "record": ""}
    assert line.health() == fine
    file.unlink()
    told = line.health()
    assert told.pop("record").startswith(
        "l.sqlite was removed; a new record was created"
    )  # no folder
    assert told | {"record": ""} == fine
    assert figures() == {"trouble": 0, "changes": 1}
    file.write_bytes(b"words, and enough of them to be more than nothing")
    told = line.health()
    assert (told["ready"], str(file.parent) in told["reason"]) == (False, False)
    assert told["reason"].startswith("parts can't be recorded: l.sqlite was overwritten")
    assert figures() == {"trouble": 1, "changes": 1}
    file.unlink()
    assert line.health()["ready"]
    line.registry.models["disc"] = ModelSlot("disc", file, trouble=f"{file} is damaged")
    told = line.health()
    assert (told["ready"], told["reason"]) == (False, "disc has failed")


def status(address: tuple[str, int]) -> int:
    with socket.create_connection(address, timeout=20) as line:
        line.sendall(ASKED)
        return int(line.recv(2000).split()[1])


def test_no_attack_on_any_route_lasts_or_delays_health(
    line: InspectionService, address: tuple[str, int], places: WatchedPlaces
) -> None:
    routes = routes_of(make_app(line))
    attacks = list(ATTACKS.values())
    at_once = server.MOST_OF_ADDRESS // (len(routes) + 10)
    with health(address, TOKEN) as seconds:
        for start in range(0, len(attacks), at_once):
            clients = [
                Client.of(attack, route, address, TOKEN)
                for attack in attacks[start : start + at_once]
                for route in routes
            ]
            until = time.monotonic() + 60  # seconds, on a machine that does much else
            for client in press(clients, until):
                case = (client.attack, client.route, client.answer[:200])
                if client.attack.status:
                    allowed = (client.attack.status, client.attack.slow_status or None)
                    assert client.status in allowed, case
                if client.attack.reads:
                    assert client.follows or client.seconds is not None, case
                while not client.attack.reads and client.line.getsockname()[1] in places.ports:
                    assert time.monotonic() < until, case
                    line._send_event({"kind": "part", "part": "x" * 100_000})  # to followers
                    time.sleep(0.1)
    assert len(seconds) > 20
    assert np.quantile(seconds, 0.99) <= 1


def test_who_only_connects_keeps_nobody_out(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_OF_ADDRESS", 20)
    kept = HTTPConnection(*address, timeout=20)
    kept.request("GET", "/v1/models", headers={"Authorization": f"Bearer {TOKEN}"})
    assert kept.getresponse().read()
    own = kept.sock.getsockname()
    silent = [socket.create_connection(address, timeout=20) for _ in range(200)]
    for client in silent[100:]:
        with suppress(ConnectionError):
            client.sendall(ASKED[:-10])
    assert status(address) == 200
    kept.request("GET", "/v1/models", headers={"Authorization": f"Bearer {TOKEN}"})
    assert kept.getresponse().read()
    assert kept.sock.getsockname() == own
    open_ones = 0
    for client in silent:
        client.settimeout(0.01)
        try:
            open_ones += bool(client.recv(10))
        except TimeoutError:
            open_ones += 1
        except ConnectionError:
            pass
        client.close()
    assert open_ones <= 20
    kept.close()


class Fake:
    """A connection that notes when it is ended."""

    def __init__(self, ended: list[Fake], address: str = "10.0.0.1", *, idle: bool = True) -> None:
        self.address, self.idle = address, idle
        self.transport: Any = SimpleNamespace(abort=lambda: ended.append(self))


def test_strangers_of_one_address_leave_those_of_others() -> None:
    ended: list[Fake] = []
    kept, few = server.Places(), Fake(ended)
    kept.come(few)
    crowd = [Fake(ended, "10.0.0.2") for _ in range(1000)]
    for one in crowd:
        kept.come(one)
    assert ended == crowd[: -server.MOST_OF_ADDRESS]
    assert kept.let_in(few)
    ended.clear()
    for i in range(1000):
        kept.come(Fake(ended, f"10.0.1.{i}"))
    assert few not in ended
    assert len(ended) == 1000 + server.MOST_OF_ADDRESS - server.MOST_STRANGERS


def test_requests_have_places_that_idle_connections_leave() -> None:
    ended: list[Fake] = []
    kept = server.Places()
    some = [Fake(ended, idle=i < 2) for i in range(server.MOST_KNOWN + 2)]
    for one in some:
        kept.come(one)
        assert kept.let_in(one)
    assert kept.let_in(Fake(ended)) is False
    assert ended == some[:2]
    kept.leave(some[5])
    assert kept.let_in(Fake(ended))


def test_four_go_on_in_each_iteration_of_the_loop() -> None:
    async def iterations() -> list[int]:
        turns, went_on = server.Turns(), list[int]()
        for _ in range(10):
            turns.ask(lambda: went_on.append(1))
        counts = []
        while len(went_on) < 10:
            await asyncio.sleep(0)
            counts.append(len(went_on))
        return counts

    counts = asyncio.run(iterations())
    assert max(b - a for a, b in pairwise([0, *counts])) == 4


def test_few_may_follow_at_a_time(
    line: InspectionService, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_FOLLOWERS", 5)
    head = f"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    readers = [socket.create_connection(address, timeout=20) for _ in range(12)]
    for reader in readers:
        reader.sendall(head.encode())
    told = Counter(reader.recv(12)[9:] for reader in readers)
    assert told == {b"200": 5, b"503": 7}
    for reader in readers:
        reader.close()
    end = time.monotonic() + 10
    while line._followers and time.monotonic() < end:
        time.sleep(0.02)
    assert not line._followers


def test_a_client_that_asks_now_and_then_stays_connected(address: tuple[str, int]) -> None:
    connection = HTTPConnection(*address, timeout=20)
    own = set()
    asked = time.monotonic()
    for _ in range(8):
        try:
            connection.request(
                "GET", "/v2/health/live", headers={"Authorization": f"Bearer {TOKEN}"}
            )
            connection.getresponse().read()
        except ConnectionError:
            assert time.monotonic() - asked > 1.5  # a busy machine has let the client wait
            return
        asked = time.monotonic()
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


@pytest.mark.parametrize("head", [b"a:b\r\n" * 101, b"X: " + b"x" * 9000 + b"\r\n"])
@pytest.mark.parametrize("at_once", [True, False])
def test_each_head_of_a_connection_has_a_limit(
    address: tuple[str, int], head: bytes, at_once: bool
) -> None:
    """The second is no longer than the first, whether it comes behind it or after its answer."""
    first = ASKED[:-2] + f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
    second = first[:-2] + head + b"\r\n"
    with socket.create_connection(address, timeout=20) as line:
        line.sendall(first + second if at_once else first)
        told = b""
        while b"true}" not in told:
            told += line.recv(2000)
        if not at_once:
            line.sendall(second)
        with suppress(ConnectionResetError):
            while piece := line.recv(2000):
                told += piece
    assert told.count(b"HTTP/1.1 200") == 1
    assert b"HTTP/1.1 400" in told
    assert b"8192 bytes and 100 lines at most" in told


def test_bodies_behind_each_other_are_all_read(address: tuple[str, int]) -> None:
    """However they are framed: each by its head, and none by what has come with it."""
    shown = f" HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    head = f"POST /v1/models/disc/score{shown}".encode()
    body = b"x" * 60_000
    sized = head + b"Content-Length: 60000\r\n\r\n" + body
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    for size in (256, 1000, 30_000):
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        sent = sized + chunked + chunks + b"0\r\nA: b\r\n\r\n" + sized + ASKED
        with socket.create_connection(address, timeout=20) as line:
            line.sendall(sent)
            told = b""
            while piece := line.recv(65536):  # health without the token ends it
                told += piece
        assert told.count(b"HTTP/1.1 503") == 3  # the model is busy
        assert told.count(b"HTTP/1.1 200") == 1


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
