"""`anomaly serve` as a process: no answer is lost, whatever ends it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPException
from pathlib import Path
from urllib.parse import quote

from conftest import Command
from kit import until
from receivers import Broker, Receiver
from running import Served
from test_server import plain

from anomaly.line.record import Record

RAW, NAME = b"bad\xe9\x1b\n", "bad\\udce9\\u001b\\n"
CLIENTS = 4


def start(models: Path, options: list[str], path: str) -> tuple[Served, subprocess.Popen[str]]:
    """Start the service, with a PYTHONPATH; what it logs is in `serve.log` beside the models."""
    command = ["serve", "--models", str(models), "--port", "0", "--device", "cpu", *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "anomaly", *command],
        stdout=subprocess.PIPE,
        stderr=(models.parent / "serve.log").open("a"),
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith(f"serving {NAME} at http://127.0.0.1:"), first
    return Served(int(first.rpartition(";")[0].rpartition(":")[2]), models), process


def send(served: Served, data: bytes, answered: dict[str, int]) -> None:
    """Send parts until the service is gone; notes the names and numbers of those answered."""
    for _ in range(10_000):
        name = f"{len(answered)}-{os.urandom(4).hex()}"
        try:
            status, row = served.score(data, f"?name={name}", model=quote(NAME, safe=""))
        except (OSError, ValueError, HTTPException):
            return
        if status == 200:
            assert (row["verdict"], row["engine"]) == ("reject", "onnx")
            answered[name] = row["id"]


def test_every_answer_is_recorded_and_sent_on_though_it_is_killed(
    bank_export: Path, product: Path, tmp_path: Path, without_torch: str, command: Command
) -> None:
    """An exported model, without torch; its folder's name, printed and logged, is plain text."""
    models = tmp_path / "line" / "models"
    shutil.copytree(bank_export, models / os.fsdecode(RAW))
    data = (product / "test" / "spot" / "000.png").read_bytes()
    answered: dict[str, int] = {}
    with (
        Receiver() as receiver,
        Broker() as broker,
        ThreadPoolExecutor(CLIENTS) as pool,
        ExitStack() as ends,
    ):
        options = ["--webhook", f"http://ada:secret-word@127.0.0.1:{receiver.port}/secret-path",
                   "--mqtt", f"mqtt://127.0.0.1:{broker.port}/line"]  # fmt: skip
        for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
            before = {*answered.values()}
            served, process = start(models, options, without_torch)
            ends.callback(process.kill)
            until(served.settled)
            until(lambda: before <= {*receiver.ids} & {*broker.ids})  # noqa: B023
            clients = [pool.submit(send, served, data, answered) for _ in range(CLIENTS)]
            until(lambda: len(answered) > len(before) + 12)  # noqa: B023
            said = command("serve", ["--models", models, "--port", 0])
            assert (said[0], "line.sqlite" in said[2]) == (2, True)  # another one writes to it
            process.send_signal(number)
            with process:
                assert process.wait(30) == code
            for client in clients:
                client.result()
    for ids in (receiver.ids, broker.ids):
        assert [*dict.fromkeys(ids)] == [*range(1, max(ids) + 1)]
    with closing(Record(models / "line.sqlite")) as record:
        parts = {name: record.parts(number=number)[0] for name, number in answered.items()}
        assert [part["path"] for part in parts.values()] == [*parts]
        # Without an answer are at most those that were at work when it was killed.
        assert 0 <= record.counts("2000")["reject"] - len(answered) <= CLIENTS
    log = (tmp_path / "line" / "serve.log").read_text("utf-8")
    assert (plain(log), "secret" in log) == (True, False)
