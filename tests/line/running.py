"""`anomaly serve` as a process of its own, and a client for it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import PYTHONPATH


@dataclass
class Served:
    """A service that runs."""

    process: subprocess.Popen[str]
    port: int
    folder: Path
    token: str = ""

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own: status, headers, body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = dict(headers or {})
        if self.token:
            sent.setdefault("Authorization", f"Bearer {self.token}")
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, told, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        status, _, body = self.ask("GET", path)
        assert status == 200, (status, body)
        return json.loads(body)

    def score(self, data: bytes, query: str = "", model: str = "disc") -> tuple[int, Any]:
        """What is answered to an image file's bytes."""
        path = f"/v1/models/{model}/score{query}"
        status, _, body = self.ask("POST", path, data)
        return status, json.loads(body)

    def end(self) -> int:
        """Ask it to stop; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


def start(folder: Path, *options: str, token: str = "", path: str = PYTHONPATH) -> Served:
    """Start a service for a folder of models, with a PYTHONPATH; it may not be ready yet."""
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "2"}
    environment.pop("ANOMALY_TOKEN", None)
    if token:
        environment["ANOMALY_TOKEN"] = token
    command = ["serve", "--models", str(folder), "--port", "0", "--device", "cpu", *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "anomaly", *command],
        stdout=subprocess.PIPE,
        stderr=(folder.parent / "serve.log").open("w"),
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    assert " at http://" in first, (first, (folder.parent / "serve.log").read_text())
    return Served(process, int(first.rpartition(";")[0].rpartition(":")[2]), folder, token)


def until_ready(served: Served, seconds: float = 300.0) -> None:
    """Wait until all models can be used."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError):
            if served.ask("GET", "/v2/health/ready")[0] == 200:
                return
        time.sleep(0.05)
    raise AssertionError(served.ask("GET", "/v1/models")[2])


@contextmanager
def serving(
    folder: Path, *options: str, token: str = "", path: str = PYTHONPATH
) -> Iterator[Served]:
    """A service that is ready; it has to end by itself when it is asked to."""
    served = start(folder, *options, token=token, path=path)
    try:
        until_ready(served)
        yield served
        if served.process.poll() is None:
            assert served.end() == 0
    finally:
        served.process.kill()
        served.process.wait()
        assert served.process.stdout is not None
        served.process.stdout.close()
