"""Model folders with odd names: each is served and listed, and what is said of it is plain text."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from conftest import Command
from prometheus_client.parser import text_string_to_metric_families
from receivers import Receiver
from running import Served, start
from test_record import answer

from anomaly.errors import visible
from anomaly.line.record import Record
from anomaly.line.serve import named

ODD = {
    b"caf\xe9": "caf\\udce9",  # Latin-1
    b"caf\\udce9": "caf\\\\udce9",  # another one
    b"red\x1b[31m\x07": "red\\u001b[31m\\u0007",
    b"two\nlines\r": "two\\nlines\\r",
    "turned\u202egnp\x9b".encode(): "turned\\u202egnp\\u009b",
    b"--help": "--help",
    b'<img src=x onerror=x> "a", {b="c"} 100%41?#&amp;': (
        '<img src=x onerror=x> "a", {b="c"} 100%41?#&amp;'
    ),
    "良品 ä".encode(): "良品 ä",
    b"x" * 255: "x" * 255,
    b"\xff" * 255: "\\udcff" * 255,
    b"disc": "disc",
}
# Those that are served, as loading each takes seconds.
ALL = b'--caf\xe9\\ \x1b[31m\xc2\x9b\n\xe2\x80\xae<img src=x onerror=x> "a", {b="c"} 1%41?#'
SHOWN = '--caf\\udce9\\\\ \\u001b[31m\\u009b\\n\\u202e<img src=x onerror=x> "a", {b="c"} 1%41?#'
SERVED = {ALL: SHOWN, b"disc": "disc"}
DAMAGED = b"bad\xe9\x1b"
NAMES = {*SERVED.values(), "bad\\udce9\\u001b"}


def plain(value: Any) -> bool:
    """Whether no text in a JSON value, or in lines of text, holds what controls anything."""
    if isinstance(value, dict):
        return all(plain(one) for pair in value.items() for one in pair)
    if isinstance(value, list):
        return all(map(plain, value))
    return not isinstance(value, str) or all(visible(one) == one for one in value.split("\n"))


def settled(served: Served) -> bool:
    with suppress(ConnectionRefusedError):
        return "loading" not in served.ask("GET", "/v2/health/ready")[2].decode()
    return False


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def line(
    run_folder: Path, tmp_path_factory: pytest.TempPathFactory, receiver: Receiver
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("line") / os.fsdecode(b"runs\xff\x1b")
    for raw in (*SERVED, DAMAGED):
        shutil.copytree(run_folder / "model", folder / os.fsdecode(raw) / "model")
    (folder / os.fsdecode(DAMAGED) / "model" / "thresholds.json").write_text("{}")
    webhook = f"http://127.0.0.1:{receiver.port}/parts"
    served = start(folder, "--threads", "1", "--webhook", webhook)
    end = time.monotonic() + 120
    while not settled(served):
        assert time.monotonic() < end
        time.sleep(0.1)
    yield served
    assert served.end() == 0


def test_every_model_is_listed_and_scores(line: Served, product: Path, receiver: Receiver) -> None:
    data = (product / "test" / "spot" / "000.png").read_bytes()
    states = {one["name"]: one["state"] for one in line.get("/v1/models")["models"]}
    assert states.keys() == NAMES
    assert {name for name, state in states.items() if state != "ready"} == {"bad\\udce9\\u001b"}
    for name in SERVED.values():
        status, row = line.score(data, model=quote(name, safe=""))
        assert (status, row["verdict"]) == (200, "reject")
        assert line.get(f"/v1/models/{quote(name, safe='')}")["name"] == name
    assert {part["model"] for part in line.get("/v1/parts")["parts"]} == {*SERVED.values()}
    families = text_string_to_metric_families(line.ask("GET", "/metrics")[2].decode())
    counted = {
        one.labels["model"] for f in families if f.name == "anomaly_parts" for one in f.samples
    }
    assert counted == {*SERVED.values()}
    end = time.monotonic() + 30
    while len(receiver.rows) < len(SERVED):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert {row["model"] for row in receiver.rows} == {*SERVED.values()}


def test_every_route_answers_in_plain_text(line: Served) -> None:
    health = line.ask("GET", "/v2/health/ready")
    assert health[0] == 503
    told = json.loads(health[2])
    assert (told["models"].keys(), plain(told)) == (NAMES, True)
    assert told["reason"] == "bad\\udce9\\u001b has failed"
    for path in (
        "/v1/models",
        "/v1/drift",
        "/v1/parts",
        *(f"/v1/models/{quote(n)}" for n in NAMES),
    ):
        assert plain(line.get(path)), path
    (reason,) = [one["reason"] for one in line.get("/v1/models")["models"] if one["reason"]]
    assert "thresholds.json" in reason
    for path in ("/v1/models/caf%E9", "/v1/models/%1b%0a", "/metrics", "/", "/openapi.json"):
        status, _, body = line.ask("GET", path)
        assert (status < 500, plain(body.decode())) == (True, True), path
    for raw in (b"\xff", b"\x1b[2J", b"\xed\xa0\x80"):
        status, _, body = line.ask("POST", f"/v1/models/{quote(raw)}/score", b"x")
        assert (status, plain(json.loads(body))) == (404, True)


def test_what_is_printed_and_written_is_plain(
    line: Served, tmp_path: Path, command: Command
) -> None:
    assert line.process.stdout is not None
    assert plain((line.folder.parent / "serve.log").read_text("utf-8"))
    record = line.folder / "line.sqlite"
    with closing(sqlite3.connect(record)) as db:
        assert all(plain(name) for (name,) in db.execute("SELECT model FROM parts"))
    assert command("feedback", ["--record", record, "--verdict", "good", "--parts", 1, 2])[0] == 0
    code, out, err = command("feedback", ["--record", record, "--pictures", tmp_path / "judged"])
    assert (code, plain(out + err)) == (0, True)
    folders = [one.name for one in (tmp_path / "judged").iterdir()]
    assert all(len(os.fsencode(name)) < 255 and plain(name) for name in folders)


def test_names_that_are_one_once_escaped_stay_two() -> None:
    folders = {os.fsdecode(raw): Path(name) for raw, name in ODD.items()}
    assert named(folders) == {name: Path(name) for name in ODD.values()}
    assert all(map(plain, ODD.values()))


def test_a_model_name_in_a_record_leads_nowhere_else(
    tmp_path: Path, product: Path, command: Command
) -> None:
    picture = (product / "test" / "good" / "000.png").read_bytes()
    with closing(Record(tmp_path / "line.sqlite")) as record:
        for number, model in enumerate(("../../away", "..", "/tmp/x", ".hidden", "y" * 900)):
            one = answer("reject", number)
            record.add([replace(one, model=model, file=picture)])
            record.add_feedback("good", who="Ada", part=number + 1)
    inside = tmp_path / "a" / "b" / "judged"
    arguments = ["--record", tmp_path / "line.sqlite", "--pictures", inside]
    assert command("feedback", arguments)[0] == 0
    made = sorted(path.relative_to(tmp_path).parts[:3] for path in tmp_path.rglob("part-*"))
    assert {*made} == {("a", "b", "judged")}
