"""Processes that decode images and write their pictures, beside the one with the network.

A damaged file can take a decoder down, and with it its process: then the file is tried once more
in a new one, and after that it is `failed`; the run goes on. The processes import no torch (45 MB
each, not 700), and are told what to do in pickled messages through their standard input. They
start as a fresh interpreter, which works alike on every system, whatever threads the parent has.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from anomaly.decoding_process import Task, receive, send
from anomaly.errors import ImageError
from anomaly.geometry import View
from anomaly.loading import Loaded, Refused
from anomaly.marked import MarkedRegion
from anomaly.pictures import PLAIN, Shown
from anomaly.source_map import SourceMap

_ATTEMPTS = 2
_AHEAD = 4  # images that each process may be ahead of the network

Answer = TypeVar("Answer")


class Decoders:
    """Decoding processes. Used in a `with` statement, which ends them.

    Args:
        count: how many; they start at once, so that they are there when they are needed.
    """

    def __init__(self, count: int) -> None:
        self._processes = [_Process() for _ in range(count)]
        self._of: dict[int, _Process] = {}
        self._ahead = 0

    def __enter__(self) -> Decoders:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.close()

    def begin(self, task: Task) -> None:
        """Say what the task is, before anything else."""
        for process in self._processes:
            process.task = task
        # An image that is worth tiling is too large to have many of it waiting.
        self._ahead = 0 if task.loading.sizing.tile else _AHEAD * len(self._processes)

    def load_all(self, items: Iterable[tuple[int, Path]]) -> Iterator[Loaded | Refused]:
        """Load files in order, a bounded number ahead of the one asked for.

        Args:
            items: index and path of each file.
        """
        waiting: deque[Future[Loaded | Refused]] = deque()
        try:
            for index, path in items:
                waiting.append(self._load(index, path))
                if len(waiting) > self._ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def _load(self, index: int, path: Path) -> Future[Loaded | Refused]:
        process = min(self._processes, key=lambda p: p.waiting)
        self._of[index] = process
        return process.submit(process.load, index, path)

    def finish(
        self, index: int, path: Path, found: SourceMap, name: str, shown: Shown = PLAIN
    ) -> Future[tuple[MarkedRegion, ...] | Refused]:
        """Write the pictures of an image that `load_all` has given and that is now scored.

        Args:
            index: of the image.
            path: of the image.
            found: its anomaly map.
            name: of its pictures.
            shown: what its heatmap says of it.

        Returns:
            What is marked, once they are on disk; `Refused` when the file can't be read any more,
            can't be drawn, or takes its process down. The future raises OutputError when they can't
            be written.
        """
        process = self._of.pop(index)
        return process.submit(process.finish, index, path, found, name, shown)

    def forget(self, index: int) -> None:
        """An image that `load_all` has given needs no pictures."""
        self._of.pop(index, None)


class _Process:
    """One process, asked one thing at a time by a thread of its own."""

    def __init__(self) -> None:
        self.task: Task | None = None
        self._asked = self._answered = 0
        self._told: Task | None = None
        self._thread = ThreadPoolExecutor(1, "decoder")
        self._child = _start()

    @property
    def waiting(self) -> int:
        """How much it has still to do."""
        return self._asked - self._answered

    def submit(self, job: Any, *arguments: object) -> Future[Any]:
        """Do something once everything before it is done."""
        self._asked += 1
        future = self._thread.submit(job, *arguments)
        future.add_done_callback(lambda _: self._done())
        return future

    def _done(self) -> None:
        self._answered += 1

    def load(self, index: int, path: Path) -> Loaded | Refused:
        answer = self._ask(("load", index, path))
        if answer is None:
            return _failed(index, path, "decoding")
        if isinstance(answer, Loaded):
            return replace(answer, render=partial(self._render, index, path))
        assert isinstance(answer, Refused)
        return answer

    def finish(
        self, index: int, path: Path, found: SourceMap, name: str, shown: Shown
    ) -> tuple[MarkedRegion, ...] | Refused:
        answer = self._ask(("finish", index, path, found, name, shown))
        if answer is None:
            return _failed(index, path, "drawing")
        assert isinstance(answer, tuple | Refused)
        return answer

    def _render(self, index: int, path: Path, view: View) -> NDArray[np.float32]:
        """Of a large image: asked for by the network's thread while loads may be waiting."""
        answer = self.submit(self._ask, ("render", index, path, view)).result()
        if answer is None:
            answer = _failed(index, path, "rendering")
        if isinstance(answer, Refused):
            raise ImageError(answer.reason, answer.status)
        assert isinstance(answer, np.ndarray)
        return answer

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        with suppress(OSError):
            self._child.stdin.close()  # type: ignore[union-attr]
        self._child.wait()

    def _ask(self, request: tuple[Any, ...]) -> Any:
        """The process's answer; None when it has died of this twice."""
        for _ in range(_ATTEMPTS):
            try:
                if self._told is not self.task:
                    send(self._child.stdin, ("begin", self.task))
                    receive(self._child.stdout)
                    self._told = self.task
                send(self._child.stdin, request)
                kind, answer = receive(self._child.stdout)
            except (OSError, EOFError, pickle.UnpicklingError):
                self._child.kill()
                self._child.wait()
                self._child, self._told = _start(), None
                continue
            if kind == "error":
                raise answer
            return answer
        return None


def _failed(index: int, path: Path, doing: str) -> Refused:
    return Refused(
        index, "failed", f"{path}: {doing} it has ended {_ATTEMPTS} processes, one after the other"
    )


def _start() -> subprocess.Popen[bytes]:
    # The same modules as here, wherever they were found.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from anomaly.decoding_process import serve; serve()"
    )  # fmt: skip
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | threads,
    )
