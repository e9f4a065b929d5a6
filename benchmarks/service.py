"""How fast `serve` answers, beside a loop of `infer` on the same images.

    python -m benchmarks.service --model RUN --images FOLDER

Both score every image and draw a heatmap of it; the service answers over HTTP and writes each row
to its record.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.process import machine


@dataclass(frozen=True)
class Answered:
    """What became of one request."""

    name: str
    status: int
    row: dict[str, Any]
    seconds: float


def ask(
    port: int, model: str, bodies: dict[str, bytes], requests: int, clients: int
) -> list[Answered]:
    """Score images over HTTP, each client one after the other on a connection of its own.

    A client that is told to come back later does so.
    """
    turn, lock = itertools.count(), threading.Lock()
    names = list(bodies)
    found: list[Answered] = []

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while True:
            with lock:
                number = next(turn)
            if number >= requests:
                connection.close()
                return
            name = names[number % len(names)]
            begun = time.perf_counter()
            while True:
                path = f"/v1/models/{model}/score?name={number}"
                try:
                    connection.request("POST", path, bodies[name])
                    answer = connection.getresponse()
                    body = answer.read()
                except (BrokenPipeError, ConnectionResetError):  # it had said that it closes
                    connection.close()
                    continue
                if answer.status != 503:
                    break
                time.sleep(0.01)
            row = json.loads(body)
            with lock:
                found.append(Answered(name, answer.status, row, time.perf_counter() - begun))

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def served_seconds(
    run: Path, files: Sequence[Path], requests: int, clients: int
) -> tuple[float, list[float]]:
    """Seconds that a service takes for so many requests, and each one's."""
    bodies = {str(file): file.read_bytes() for file in files}
    with tempfile.TemporaryDirectory() as folder:
        command = ["serve", "--models", str(run), "--port", "0"]
        process = subprocess.Popen(
            [sys.executable, "-m", "anomaly", *command, "--record", f"{folder}/line.sqlite"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline().split(";")[0].rpartition(":")[2])
            _until_ready(port)
            ask(port, run.name, bodies, 4 * clients, clients)
            begun = time.perf_counter()
            answers = ask(port, run.name, bodies, requests, clients)
            seconds = time.perf_counter() - begun
        finally:
            process.terminate()
            process.wait(30)
    assert all(one.status == 200 for one in answers)
    return seconds, [one.seconds for one in answers]


def _until_ready(port: int) -> None:
    while True:
        with suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)


def inferred_seconds(run: Path, files: Sequence[Path], images: int) -> float:
    """Seconds that a loop of `infer` takes for so many images, once it is warm."""
    from anomaly.imaging.pool import Decoders
    from anomaly.inference.pipeline import Inputs, Run, RunJournal
    from anomaly.inference.results import Outputs
    from anomaly.storage.models import load_model

    model = load_model(run)
    with tempfile.TemporaryDirectory() as folder:
        for count in (32, images):
            paths = list(itertools.islice(itertools.cycle(files), count))
            inputs = Inputs(paths, [f"{i}.png" for i in range(count)])
            outputs = Outputs(Path(folder) / str(count))
            outputs.folder.mkdir()
            decoders = Decoders(model.loading, outputs.picture_writer(model))
            with RunJournal(outputs, {}) as journal:
                begun = time.perf_counter()
                Run(model, outputs, journal, decoders).score(inputs)
                seconds = time.perf_counter() - begun
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    files = sorted(options.images.rglob("*.png"))
    print(machine() + "\n")
    print("| | images a second | p50 | p99 |\n|---|---|---|---|")
    seconds, each = served_seconds(options.model, files, options.requests, options.clients)
    p50, p99 = np.quantile(each, (0.5, 0.99))
    name = f"serve, {options.clients} clients"
    print(f"| {name} | {options.requests / seconds:.1f} | {p50:.3f} s | {p99:.3f} s |")
    seconds = inferred_seconds(options.model, files, options.requests)
    print(f"| infer | {options.requests / seconds:.1f} | – | – |", flush=True)
    seconds, each = served_seconds(options.model, files, 40, 1)
    p50, p99 = np.quantile(each, (0.5, 0.99))
    print(f"| serve, 1 client | {40 / seconds:.1f} | {p50:.3f} s | {p99:.3f} s |")


if __name__ == "__main__":
    main()
