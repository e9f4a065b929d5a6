"""The service in a thread, and a client for it."""

from __future__ import annotations

import getpass
import http.client
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import until

from anomaly.inference.results import Row
from anomaly.line.commands import served_names
from anomaly.line.record import Answer, Record
from anomaly.line.server import listening, serve
from anomaly.line.service import InspectionService, make_app
from anomaly.line.sinks import Sink
from anomaly.storage.folder import find_models


def answer(
    verdict: str, number: int = 0, status: str = "ok", size: int = 1000, **values: Any
) -> Answer:
    """The answer to a part, with a file of so many bytes; more values of its row."""
    score = 1.0 if status == "ok" else None
    row = Row(
        *(f"{number}.png", f"{number:064x}", status, score, None, 1.0, 2.0, verdict, "", "0" * 16),
        *("0", "calibrated", ""),
        time=f"2026-01-01T00:00:{number % 60:02}.000+00:00",
    )
    return Answer("disc", replace(row, **values), bytes(size), b"small")


@dataclass
class Served:
    """A service that runs."""

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
        sent = dict(headers or {})
        if self.token:
            sent.setdefault("Authorization", f"Bearer {self.token}")
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, told, answer.read()

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        status, _, body = self.ask("GET", path)
        assert status == 200, (status, body)
        return json.loads(body)

    def post(self, path: str, **body: str) -> tuple[int, Any]:
        """Send a JSON object; status and JSON of the answer."""
        kind = {"Content-Type": "application/json"}
        status, _, said = self.ask("POST", path, json.dumps(body).encode(), kind)
        return status, json.loads(said)

    def score(self, data: bytes, query: str = "", model: str = "disc") -> tuple[int, Any]:
        """The answer to an image file's bytes."""
        path = f"/v1/models/{model}/score{query}"
        status, _, body = self.ask("POST", path, data)
        return status, json.loads(body)

    def figures(self) -> dict[str, float]:
        """What Prometheus is told, by name and labels."""
        lines = self.ask("GET", "/metrics")[2].decode().splitlines()
        said = (line.rpartition(" ") for line in lines if line[0] != "#")
        return {name: float(value) for name, _, value in said}

    def settled(self) -> bool:
        """Whether each model is ready or has failed."""
        with suppress(OSError):  # it doesn't listen yet
            return b"loading" not in self.ask("GET", "/v2/health/ready")[2]
        return False


@contextmanager
def serving(
    folder: Path,
    *,
    token: str = "",
    record: Path | None = None,
    goods: float = 0.02,
    sinks: Sequence[Sink] = (),
) -> Iterator[Served]:
    """A service in a thread, once each of its models is ready or has failed."""
    service = InspectionService(
        served_names(find_models(folder)),
        Record(record or folder / "line.sqlite", goods),
        device=torch.device("cpu"),
        sinks=sinks,
    )
    stop, listener = threading.Event(), listening("127.0.0.1", 0)
    with service:
        app = make_app(service)
        arguments = app, service, listener, token, stop.is_set
        thread = threading.Thread(target=serve, args=arguments)
        thread.start()
        try:
            served = Served(listener.getsockname()[1], folder, token)
            until(served.settled)
            yield served
        finally:
            stop.set()
            thread.join()


NGINX = """
daemon off; user {user}; pid {folder}/pid; error_log {folder}/error.log;
{text}
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
}
"""


@contextmanager
def behind_nginx(config: str, folder: Path) -> Iterator[int]:
    """Nginx with a configuration, in which {port} is filled in; its port."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        pytest.skip("nginx isn't installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = folder / "nginx.conf"
    inside = config.rstrip().removesuffix("}")  # of http
    text = NGINX.replace("{folder}", str(folder)).replace("{text}", inside)
    file.write_text(text.replace("{user}", getpass.getuser()).replace("{port}", str(port)))
    process = subprocess.Popen([program, "-e", folder / "error.log", "-c", file])

    def listens() -> bool:
        with socket.socket() as line:
            return line.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(listens)
        yield port
    finally:
        process.terminate()
        process.wait(10)
