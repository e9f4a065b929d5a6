"""Small things that many tests do."""

import csv
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest

from anomaly.config.load import parse_config
from anomaly.imaging.arrays import image
from anomaly.scoring.model import Model

rgb, bgr = (partial(image, channels=order) for order in ("rgb", "bgr"))


def table(folder: Path, name: str = "results.csv") -> list[dict[str, str]]:
    """The rows of a CSV file, each by its columns' names."""
    with (folder / name).open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def with_data(run: Path, folder: Path) -> None:
    """Make a run remember another folder of its data set."""
    (run / "train.json").write_text(json.dumps({"data_folder": str(folder)}))


def touch(root: Path, *names: str) -> None:
    """Make empty files, and the folders that they lie in."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def tiny(**settings: Any) -> dict[str, Any]:
    """Settings of a fit: the tests' own network, on few pixels unless `image` is given."""
    network = {"name": "tiny", "weights": "random"}
    return {"backbone": network, "image": {"area": 64}, "precision": "fp32", **settings}


def bare_model(settings: dict[str, Any], **known: Any) -> Model:
    """A model of these settings that has no stages but those given."""
    nothing = dict.fromkeys(("extractor", "normalise", "scorer", "thresholds", "device"))
    return Model(**nothing | {"config": parse_config(settings, "a test")} | known)


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files in a folder, by their paths in it."""
    files = (f for f in folder.rglob("*") if f.is_file())
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in files}


@contextmanager
def most_bytes(limit: float) -> Iterator[None]:
    """See that what is done inside never has more than `limit` bytes of memory at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def until(happened: Callable[[], object], seconds: float = 120) -> None:
    """Wait for something that another thread or process does."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def unprivileged(*commands: Sequence[object]) -> list[tuple[int, str]]:
    """Exit code and output of commands, run by somebody who may not read and write everywhere."""
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    if drop and not shutil.which("setpriv"):
        pytest.skip("root without setpriv may do everything")
    words = json.dumps([list(map(str, command)) for command in commands])
    process = [*drop, sys.executable, "-c", _RUN_EACH]
    done = subprocess.run(process, input=words, capture_output=True, text=True, check=True)
    return [(code, said) for code, said in map(json.loads, done.stdout.splitlines())]


_RUN_EACH = """
import contextlib, io, json, sys
from anomaly.cli import main
for words in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(words)
    print(json.dumps([code, said.getvalue()]))
"""


class DecodingThread:
    """A decoding process that is a thread of this one, asked through pipes like any; no limits."""

    stderr = None

    def __init__(self) -> None:
        (asked, to_ask), (answered, to_answer) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(to_ask, "wb"), os.fdopen(answered, "rb")
        ends = os.fdopen(asked, "rb"), os.fdopen(to_answer, "wb")
        self._thread = threading.Thread(target=_serve, args=ends, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """End it when it has done what it is at."""
        self.stdin.close()

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        self._thread.join(timeout)
        return 0


def _serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    from anomaly.imaging.pool import Worker, send

    worker = Worker()
    with suppress(OSError, EOFError), questions, answers:
        while True:
            _, *request = pickle.load(questions)
            send(answers, worker.answer(*request))
