"""Many clients, kills and signals: one right answer each, and none that isn't written down."""

from __future__ import annotations

import itertools
import random
import resource
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import pytest
from attacks import ATTACKS, Client, health, press, routes_of
from conftest import Command
from running import Served, serving, start, until_ready

from anomaly.line.app import make_app
from anomaly.line.record import Record
from benchmarks.service import ask

TOKEN = "0123456789abcdef"


@pytest.fixture
def models(run_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(run_folder, tmp_path / "line" / "models" / "disc")
    return tmp_path / "line" / "models"


@pytest.fixture
def bodies(product: Path) -> dict[str, bytes]:
    """Sound files of two shapes, and a tenth that are damaged or huge."""
    files = sorted((product / "test").rglob("*.png"))
    found = {file.relative_to(product).as_posix(): file.read_bytes() for file in files}
    for name in list(found)[:3]:
        picture = cv2.imdecode(np.frombuffer(found[name], np.uint8), cv2.IMREAD_COLOR)
        wide = cv2.resize(picture, (200, 96))
        found[f"wide {name}"] = cv2.imencode(".png", wide)[1].tobytes()
    sound = list(found.items())
    found = {f"{turn} {name}": data for turn in range(2) for name, data in sound}
    whole = sound[0][1]
    return found | {"cut": whole[:-30], "huge": whole + bytes(3_000_000)}


def resident(process: int) -> int:
    """Bytes of memory that a process holds."""
    fields = Path(f"/proc/{process}/statm").read_text().split()
    return int(fields[1]) * 4096


@pytest.mark.clock
def test_sixteen_clients_get_one_right_answer_each(
    models: Path, bodies: dict[str, bytes], tmp_path: Path, command: Command
) -> None:
    expected = rows_of_infer(models, bodies, tmp_path, command)
    with serving(models, "--max-body", "1") as served:
        ask(served.port, "disc", bodies, 400, 16)
        before = resident(served.process.pid)
        answers = ask(served.port, "disc", bodies, 2000, 16)
        grown = resident(served.process.pid) - before
    assert len(answers) == 2000
    for one in answers:
        if one.name == "huge":
            assert one.status == 413
            continue
        status, verdict, score = expected[one.name]
        assert one.status == (200 if status == "ok" else 422)
        assert (one.row["status"], one.row["verdict"]) == (status, verdict)
        assert one.row["image_score"] == (score and pytest.approx(score, rel=1e-3))
    numbers = [one.row["id"] for one in answers if one.status != 413]
    assert len(set(numbers)) == len(numbers)
    assert grown < 50_000_000
    with closing(Record(models / "line.sqlite")) as record:
        assert sum(record.counts("2000").values()) >= len(numbers)


def rows_of_infer(
    models: Path, bodies: dict[str, bytes], folder: Path, command: Command
) -> dict[str, tuple[str, str, float | None]]:
    """What `infer` says of the same bytes, by name."""
    import json

    names = {}
    for index, (name, data) in enumerate(bodies.items()):
        file = folder / "images" / f"{index}.png"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(data)
        names[str(file)] = name
    arguments = ["--model", models / "disc", "--input", folder / "images", "--device", "cpu"]
    assert command("infer", [*arguments, "--output", folder / "out"])[0] == 3
    rows = map(json.loads, (folder / "out" / "results.jsonl").read_text().splitlines())
    return {names[row["path"]]: (row["status"], row["verdict"], row["image_score"]) for row in rows}


@pytest.mark.clock
def test_every_answer_survives_a_kill(
    bank_export: Path, tmp_path: Path, bodies: dict[str, bytes]
) -> None:
    models = tmp_path / "line" / "models"
    shutil.copytree(bank_export, models / "disc")  # starts fast
    rng = random.Random(0)
    answered: dict[str, int] = {}
    for turn in range(20):
        served = start(models)
        try:
            until_ready(served)
            senders = [
                threading.Thread(target=send, args=(served, bodies, f"{turn}-{i}", answered))
                for i in range(4)
            ]
            for sender in senders:
                sender.start()
            enough = len(answered) + rng.randint(1, 12)
            while len(answered) < enough:
                time.sleep(0.001)
            time.sleep(rng.uniform(0.0, 0.05))
        finally:
            served.process.kill()
            served.process.wait()
        for sender in senders:
            sender.join()
    assert len(answered) >= 20
    with closing(Record(models / "line.sqlite")) as record:
        for name, number in answered.items():
            part = record.part(number)
            assert part is not None
            assert part["path"] == name


def send(served: Served, bodies: dict[str, bytes], name: str, answered: dict[str, int]) -> None:
    """Send parts until the service is gone; notes those that were answered."""
    data = next(iter(bodies.values()))
    for i in range(10_000):
        try:
            status, row = served.score(data, f"?name={name}-{i}")
        except (OSError, ValueError, HTTPException):
            return
        if status == 200:
            answered[f"{name}-{i}"] = row["id"]


@pytest.mark.clock
def test_what_was_taken_is_answered_before_it_ends(models: Path, bodies: dict[str, bytes]) -> None:
    data = next(iter(bodies.values()))
    served = start(models)
    found: list[object] = []

    def part(index: int) -> None:
        try:
            found.append(served.score(data, f"?name={index}")[0])
        except (OSError, ValueError, HTTPException) as error:
            found.append(error)

    try:
        until_ready(served)
        senders = [threading.Thread(target=part, args=(index,)) for index in range(32)]
        for sender in senders:
            sender.start()
        end = time.monotonic() + 20
        while waiting(served) < 8 and time.monotonic() < end:
            time.sleep(0.002)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0
    finally:
        served.process.kill()
    for sender in senders:
        sender.join()
    assert found.count(200) >= 8
    with closing(Record(models / "line.sqlite")) as record:
        assert record.counts("2000")["good"] == found.count(200)


def waiting(served: Served) -> float:
    text = served.ask("GET", "/metrics")[2].decode()
    return float(text.split('anomaly_waiting_parts{model="disc"} ')[1].split("\n")[0])


@pytest.fixture
def limited(models: Path) -> Iterator[Served]:
    with serving(models, "--max-body", "1", token=TOKEN) as served:
        yield served


@pytest.mark.clock
def test_ten_thousand_connections_and_slow_clients_leave_nothing(
    limited: Served, bodies: dict[str, bytes]
) -> None:
    data = next(iter(bodies.values()))
    slow = [socket.create_connection(("127.0.0.1", limited.port)) for _ in range(50)]
    for line in slow:
        line.sendall(b"POST /v1/models/disc/score HTTP/1.1\r\nHost: localhost\r\n"
                     b"Authorization: Bearer " + TOKEN.encode() + b"\r\n"
                     b"Content-Length: 1000\r\n\r\nabc")  # fmt: skip
    limited.score(data)
    before = resident(limited.process.pid)
    counted: Counter[int] = Counter()
    for index in range(10_000):
        with socket.create_connection(("127.0.0.1", limited.port), timeout=20) as line:
            if index % 10 == 0:
                line.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                counted[int(line.recv(200).split()[1])] += 1
    assert counted == {200: 1000}
    assert resident(limited.process.pid) - before < 30_000_000
    assert limited.score(data)[0] == 200
    end = time.monotonic() + 40
    for line in slow:
        line.settimeout(max(0.1, end - time.monotonic()))
        assert line.recv(200).startswith(b"HTTP/1.1 408 ")
        line.close()


@pytest.mark.clock
@pytest.mark.parametrize("shown", ["", TOKEN], ids=["stranger", "with the token"])
@pytest.mark.parametrize("name", ATTACKS)
def test_health_takes_a_second_at_most_under_every_attack(
    attacked: Served, name: str, shown: str
) -> None:
    address = ("127.0.0.1", attacked.port)
    routes = itertools.cycle(routes_of(make_app(cast(Any, None))))

    def another() -> Client:
        return Client.of(ATTACKS[name], next(routes), address, shown)

    with health(address, TOKEN) as seconds:
        clients = press([another() for _ in range(600)], time.monotonic() + 5, another)
    for client in clients:
        client.line.close()
    slow = float(np.quantile(seconds, 0.99))
    print(f"{name}: {len(clients)} connections, health {len(seconds)} times, 99 % in {slow:.3f} s")
    assert len(seconds) > 5
    assert slow <= 1


@pytest.fixture(scope="module")
def attacked(bank_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    models = tmp_path_factory.mktemp("line") / "models"
    shutil.copytree(bank_export, models / "disc")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most[1]), most[1]))
    with serving(models, token=TOKEN) as served:
        yield served
    resource.setrlimit(resource.RLIMIT_NOFILE, most)
