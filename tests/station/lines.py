"""A station and its PLC as processes, and what both have counted."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import yaml
from conftest import PYTHONPATH

CODES = {"good": 1, "review": 2, "reject": 3}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Line:
    """A line below a folder: config, record, the PLC's log; processes to start and kill."""

    def __init__(self, folder: Path, source: str, **settings: Any) -> None:
        self.folder, self.port = folder, free_port()
        self.record, self.log = folder / "line.sqlite", folder / "plc.log"
        values = {
            "cameras": {"top": {"source": source}},
            "trigger": {"counter": 10},
            "plc": {"address": f"127.0.0.1:{self.port}"},
            "part_seconds": 2.0,
        }
        self.config = folder / "line.yaml"
        self.config.write_text(yaml.safe_dump(values | settings))
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start_plc(self, period: float) -> None:
        program = Path(__file__).with_name("plc_program.py")
        arguments, before = [str(self.port), str(self.log), str(period)], self.said().count("up")
        self.processes["plc"] = subprocess.Popen(
            [sys.executable, str(program), *arguments], text=True
        )
        self.until(lambda: self.said().count("up") > before)

    def start_station(self, **how: Any) -> subprocess.Popen[str]:
        """It is ready when this returns."""
        command = [sys.executable, "-m", "anomaly", "station", "--device", "cpu"]
        station = self.processes["station"] = subprocess.Popen(
            [*command, "--config", str(self.config)],
            stdout=subprocess.PIPE,
            stderr=(self.folder / "station.log").open("a"),
            text=True,
            env=os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
            **how,
        )
        assert station.stdout is not None
        first = station.stdout.readline()
        assert first.startswith("ready"), (first, (self.folder / "station.log").read_text())
        return station

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes.pop(name).wait()

    def end_station(self) -> str:
        """Ask it to stop; what it has printed."""
        station = self.processes.pop("station")
        station.send_signal(signal.SIGTERM)
        printed = station.communicate(timeout=60)[0]
        assert station.returncode == 0, (self.folder / "station.log").read_text()
        return printed

    def end_parts(self) -> None:
        """Have no more parts come, and wait until the last one is done."""
        (self.folder / "end").touch()
        self.until(lambda: self.parts() == len(self.rows()) and self.rows()[-1]["line"])

    def said(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def parts(self) -> int:
        return sum(line.startswith("part") for line in self.said())

    def has(self, parts: int) -> bool:
        return self.parts() >= parts

    def until(self, is_so: Any, seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end, (
                self.said()[-3:],
                (self.folder / "station.log").read_text(),
            )
            time.sleep(0.02)

    def rows(self) -> list[dict[str, Any]]:
        """The record's parts, in order; what isn't finished has no line."""
        query = "SELECT id, counter, state, verdict, sent, line FROM triggers ORDER BY id"
        with closing(sqlite3.connect(self.record)) as db:
            rows = [
                dict(zip(("id", "counter", "state", "verdict", "sent", "line"), row, strict=True))
                for row in db.execute(query)
            ]
        return [row | {"line": json.loads(row["line"] or "{}")} for row in rows]

    def agree(self) -> list[dict[str, Any]]:
        """See that the record has all parts and verdicts that the PLC has counted; the rows."""
        rows, verdicts = self.rows(), defaultdict(set)
        for line in self.said():
            if line.startswith("verdict"):
                _, number, code = line.split()
                verdicts[int(number)].add(int(code))
        assert [row["counter"] or row["id"] for row in rows] == [*range(1, self.parts() + 1)]
        assert {row["state"] for row in rows} <= {"sent", "late", "lost"}
        for row in rows:
            reason = row["line"]["reason"]
            if row["state"] == "sent":
                assert row["sent"] == CODES[row["verdict"]]
            else:
                assert reason or row["sent"], row
            if "may have" not in reason:  # the PLC went away before it could confirm
                assert verdicts.get(row["id"], set()) == ({row["sent"]} - {None}), row
        assert verdicts.keys() <= {row["id"] for row in rows}
        return rows


@contextmanager
def line(folder: Path, source: str, **settings: Any) -> Iterator[Line]:
    """A line whose processes end with the block."""
    made = Line(folder, source, **settings)
    try:
        yield made
    finally:
        for name in list(made.processes):
            made.kill(name)
