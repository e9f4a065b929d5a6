"""Processes that decode images and write their pictures, beside the one with the network.

Every image file goes through here, whatever the command. A damaged file can take a decoder down,
and with it its process: then the file is tried once more in a new one, and after that it is
`failed`. So it is, at once, when it takes too long; the run goes on. The processes import no torch
(45 MB each, not 700), and are asked in pickled messages through their standard input.

A run has `Decoders` of its own, which end with it. Calls of `predict` share processes, which live
until the program's end.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from anomaly.errors import AnomalyError, ImageError, why
from anomaly.imaging import read
from anomaly.imaging.decoder_worker import Task, name_of, receive, send, serve
from anomaly.imaging.loading import NetworkInput, Preprocessing, UnusableImage, load, paint
from anomaly.imaging.read import Image
from anomaly.runtime.parallel import StoppedError, cores, prefetch

if sys.platform == "linux":
    import fcntl

AHEAD = 4  # images that each process may be ahead of the network
# On the clock, for a file that doesn't come, and on Windows, where computing time isn't limited:
# the largest image that is usually accepted takes 40 s of a quiet machine.
CLOCK_SECONDS = 300.0
_MOST_SHARED = 4  # processes that wait for whatever a Python program asks for next
_ATTEMPTS = 2
_MEGABYTES = 1000
_LEAST_MEGABYTES = 200  # an interpreter with its libraries takes 70
_HOME = str(Path(__file__).resolve().parents[2])  # the folder that holds the package
_PIPE_BYTES = 1 << 20  # an image of the network's size in one go; 64 kB take 3 ms more for each

Item = TypeVar("Item")


class Decoders:
    """Decoding processes. Used in a `with` statement, which ends them, whatever they are at.

    Args:
        count: how many; they start at once, so that they are there when they are needed.
        task: what to say to them before anything else; see `begin`.
    """

    def __init__(self, count: int, task: Task | None = None) -> None:
        _memory_limit()  # a wrong setting is reported here, not by each process
        self._processes = [_DecoderProcess() for _ in range(max(1, count))]
        self._of: dict[int, _DecoderProcess] = {}
        self._task = task

    def __enter__(self) -> Decoders:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.close()

    def begin(self, task: Task) -> None:
        """Say what the task is, before images are loaded."""
        self._task = task

    def rest(self) -> None:
        """Give the processes' memory back when they are done; what asks them more waits a while."""
        for process in self._processes:
            process.rest()

    def load_all(
        self,
        items: Iterable[tuple[int, Path | Image]],
        stopped: Callable[[], bool] | None = None,
    ) -> Iterator[NetworkInput | UnusableImage]:
        """Load images in order, a bounded number ahead of the one asked for.

        Args:
            items: index of each image, and its file, or its pixels, which no process need decode.
            stopped: asked now and then whether they are still wanted.

        Raises:
            StoppedError: they aren't; a process that is at one of them is ended.
        """
        try:
            count = _ahead(self._task, len(self._processes))
            yield from prefetch(lambda item: self.submit(*item), items, count, stopped)
        except StoppedError:
            for process in self._processes:
                process.drop()
            raise

    def load(self, source: Path | Image) -> NetworkInput | UnusableImage:
        """Load one image."""
        return self.submit(0, source).result()

    def submit(
        self, index: int, source: Path | bytes | Image, task: Task | None = None
    ) -> Future[NetworkInput | UnusableImage]:
        """Load one image among many, as `load_all` does; nobody bounds how many wait.

        Args:
            index: no other image that is being loaded or waits for its pictures has it.
            source: its file, the file's bytes, or pixels.
            task: another one than the processes' own, for an image that will have no pictures.
        """
        process = self._idlest()
        if task is None:
            task, self._of[index] = self._task, process
        assert task is not None
        if isinstance(source, Image):
            return _finished(load(index, source, task.loading, looks=task.looks))
        return process.submit(_load, process, task, index, source)

    def map(self, function: Callable[[Item], Any], items: Iterable[Item]) -> Iterator[Any]:
        """What a function that reads files makes of each item, in order, as with `load_all`.

        Args:
            function: of a module, and its items, what it makes and what it raises can be pickled.
            items: what it is called with.

        Yields:
            Its results; an ImageError (`failed`) where an item took too long, or took its process
            down.

        Raises:
            Exception: what the function raises.
        """
        count = _ahead(self._task, len(self._processes))
        return prefetch(lambda item: self._call(function, item), items, count)

    def call(self, function: Callable[..., Any], *arguments: Any, about: Path) -> Any:
        """What a function that reads files returns; see `map`.

        Args:
            function: what to do.
            arguments: with what.
            about: the file, for messages.

        Raises:
            ImageError: `failed`: it took too long, or took its process down.
        """
        result = self._call(function, *arguments).result()
        if isinstance(result, ImageError):
            raise ImageError(f"{about}: {result}", result.status)
        return result

    def finish(self, index: int, path: Path | bytes, *what: Any) -> Future[Any]:
        """Write the pictures of an image that `load_all` has given and that is now scored.

        Args:
            index: of the image.
            path: of the image; its file's bytes where it was loaded from them.
            what: for `Task.pictures.write`, behind the image.

        Returns:
            What that returns, once the pictures are on disk; `UnusableImage` when the file can't be
            read any more, can't be drawn, or takes its process down. The future raises OutputError
            when they can't be written.
        """
        process = self._of.pop(index)
        return process.submit(_finish, process, self._task, index, path, *what)

    def forget(self, index: int) -> None:
        """An image that `load_all` has given needs no pictures."""
        self._of.pop(index, None)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        process = self._idlest()
        return process.submit(_call, process, function, arguments)

    def _idlest(self) -> _DecoderProcess:
        return min(self._processes, key=lambda p: p.waiting)


def _load(
    process: _DecoderProcess, task: Task, index: int, source: Path | bytes
) -> NetworkInput | UnusableImage:
    try:
        answer = process.ask(task, "load", index, source)
    except _EndedError as ended:
        return _failed(index, source, "decoding", ended)
    if isinstance(answer, NetworkInput) and answer.image is not None:
        # Of an image that isn't to be kept, the tiles are all that the pixels are needed for.
        render = partial(paint, answer.name, answer.image)
        return replace(answer, render=render, image=answer.image if task.keep_image else None)
    assert isinstance(answer, NetworkInput | UnusableImage)
    return answer


def _finish(
    process: _DecoderProcess, task: Task, index: int, source: Path | bytes, *what: Any
) -> Any:
    try:
        return process.ask(task, "finish", index, source, *what)
    except _EndedError as ended:
        return _failed(index, source, "drawing", ended)


def _failed(index: int, source: Path | bytes, doing: str, ended: Exception) -> UnusableImage:
    return UnusableImage(index, "failed", f"{name_of(index, source)}: {doing} it {ended}")


def _call(
    process: _DecoderProcess, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    try:
        return process.ask(None, "call", function, arguments)
    except _EndedError as ended:
        return ImageError(f"reading it {ended}", "failed")


def _ahead(task: Task | None, processes: int) -> int:
    """How many images are loaded ahead of the one asked for."""
    # An image that is worth tiling is too large to have many of it waiting.
    return 0 if task is not None and task.loading.sizing.tile else AHEAD * processes


def _finished(result: NetworkInput | UnusableImage) -> Future[NetworkInput | UnusableImage]:
    """A result that needs no process, where one from a process is expected."""
    future: Future[NetworkInput | UnusableImage] = Future()
    future.set_result(result)
    return future


class _EndedError(Exception):
    """The process was ended, or has ended, while it was at something; the message says why."""


@dataclass
class _Request:
    """What a process is at.

    Attributes:
        reads: it reads a file: it may only take so long, and nothing is lost when it is ended.
        over: why it was ended.
    """

    reads: bool
    over: str = ""


class _DecoderProcess:
    """One process as the one that has started it sees it, asked one thing at a time by a thread."""

    def __init__(self) -> None:
        self._sent: Task | None = None  # what it was set to last
        self._asked = self._answered = 0
        self._lock = threading.Lock()
        self._request: _Request | None = None
        self._has_answered = False
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False
        # On Linux a child goes when the thread that has started it does: not the caller's.
        self._thread = ThreadPoolExecutor(1, "decoder")
        self._thread.submit(self._start)

    @property
    def waiting(self) -> int:
        """How much it has still to do."""
        return self._asked - self._answered

    def submit(self, job: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Do something in the process's thread once everything before it is done."""
        self._asked += 1
        future = self._thread.submit(job, *arguments)
        future.add_done_callback(self._done)
        return future

    def _done(self, _: object) -> None:
        self._answered += 1

    def ask(self, task: Task | None, name: str, *arguments: Any) -> Any:
        """Its answer; called in its thread.

        Args:
            task: what it has to know; None where that doesn't matter.
            name: a method of `decoder_worker.Worker`.
            arguments: for it.

        Raises:
            _EndedError: it took too long, or the process has died of it, twice.
            AnomalyError: no such process can be started on this machine.
            Exception: what went wrong there, if that is nothing of the image's own.
        """
        for _ in range(_ATTEMPTS):
            self._start()
            request = _Request(reads=name != "finish")
            try:
                done, answer = self._exchange(request, task, name, arguments)
            except (OSError, EOFError, pickle.UnpicklingError):
                code = self._stop(patience=1)
                if sys.platform != "win32" and code == -signal.SIGPROF:
                    request.over = (
                        f"took more than {read.COMPUTING_SECONDS:.0f} s of computing, the limit "
                        f"for {read.MODEST_PIXELS / 1e6:.0f} million pixels"
                    )
                if request.over:
                    raise _EndedError(request.over) from None
                continue
            self._has_answered = True
            if not done:
                raise answer
            return answer
        if not self._has_answered:
            _check_start()
        raise _EndedError(f"has crashed {_ATTEMPTS} decoding processes, one after the other")

    def drop(self) -> None:
        """End it if what it is at may remain unfinished."""
        request = self._request
        if request is not None and request.reads:
            self._end(request, "wasn't waited for")

    def rest(self) -> None:
        """End it when it has done what it was asked; whoever asks more starts it again."""
        self._thread.submit(self._stop)

    def close(self) -> None:
        """End it, whatever it is at."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.kill()
        self._thread.shutdown(cancel_futures=True)
        self._stop()

    def _exchange(
        self, request: _Request, task: Task | None, name: str, arguments: tuple[Any, ...]
    ) -> tuple[bool, Any]:
        assert self._child is not None
        over = f"took more than {CLOCK_SECONDS:.0f} s, the limit for a file"
        watchdog = threading.Timer(CLOCK_SECONDS, self._end, (request, over))
        watchdog.daemon = True
        self._request = request
        if request.reads:
            watchdog.start()
        try:
            send(self._child.stdin, (None if task is self._sent else task, name, arguments))
            self._sent = task or self._sent
            done, answer = receive(self._child.stdout)
            return done, answer
        finally:
            watchdog.cancel()
            with self._lock:
                self._request = None

    def _end(self, request: _Request, over: str) -> None:
        with self._lock:
            if self._request is request and self._child is not None:
                request.over = over
                self._child.kill()

    def _start(self) -> None:
        """Start it, unless it is there."""
        with self._lock:
            if self._closed:
                raise _EndedError("wasn't waited for")
            if self._child is None:
                self._child, self._sent = start(), None

    def _stop(self, patience: float = 0) -> int:
        """End it, if it is there, and give its exit code.

        Args:
            patience: seconds in which it may end by itself, and so say why.
        """
        with self._lock:
            child, self._child = self._child, None
        if child is None:
            return 0
        if patience:
            with suppress(subprocess.TimeoutExpired):
                child.wait(patience)
        child.kill()
        code = child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with suppress(OSError):  # what it couldn't be sent any more
                    stream.close()
        return code


def start() -> subprocess.Popen[bytes]:
    """A fresh interpreter that serves: works alike on every system, whatever threads there are.

    Raises:
        AnomalyError: none can be started.
    """
    code = f"{_imports()}; serve({os.getpid()}, {_memory_limit()})"
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | threads,
        )
    except OSError as error:
        raise AnomalyError(
            f"no process can be started that decodes images: {why(error)}; end other programs, or "
            "give the machine more memory"
        ) from None
    if sys.platform == "linux" and child.stdout is not None:
        with suppress(OSError):  # the user's pipes hold as much as they may
            fcntl.fcntl(child.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return child


def _imports() -> str:
    """A program that finds the modules where this one does, its working folder changed or not."""
    places = [*sys.path, _HOME]
    return f"import sys; sys.path[:] = {places!r}; from {serve.__module__} import serve"


def _check_start() -> None:
    """See that an interpreter gets as far as serving, where none has answered yet."""
    tried = subprocess.run(
        [sys.executable, "-c", _imports()], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        reason = (tried.stderr.strip() or "it says nothing").splitlines()[-1]
        raise AnomalyError(
            f"the processes that decode images end as soon as they are started: {reason}"
        )


def _memory_limit() -> int:
    """Bytes that a decoding process may take: 1 GB, or as many megabytes as the environment says.

    Raises:
        AnomalyError: `ANOMALY_DECODER_MEMORY` isn't a number of megabytes.
    """
    text = os.environ.get(read.MEMORY_SETTING, str(_MEGABYTES))
    if not text.isdecimal() or int(text) < _LEAST_MEGABYTES:
        raise AnomalyError(
            f"{read.MEMORY_SETTING} is {text!r}; it must be a whole number of megabytes, "
            f"{_LEAST_MEGABYTES} or more"
        )
    return int(text) * 1_000_000


_shared: list[Decoders] = []
_shared_lock = threading.Lock()
_parents: list[Decoders] = []  # of a forked process: neither to be asked nor to be ended


def _after_fork() -> None:
    """Forget the processes: a fork has none of its parent's threads that ask them."""
    global _shared_lock
    _shared_lock = threading.Lock()
    _parents.extend(_shared)
    _shared.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _close_shared() -> None:
    for decoders in _shared:
        decoders.__exit__()


def _shared_decoders() -> Decoders:
    """Processes that live from their first use to the program's end, for callers in any thread.

    Starting a process takes longer than most images.
    """
    with _shared_lock:
        if not _shared:
            _shared.append(Decoders(min(_MOST_SHARED, cores())))
        return _shared[0]


def load_shared(
    items: Iterable[tuple[int, Path | Image | UnusableImage]],
    loading: Preprocessing,
    *,
    keep_image: bool = False,
) -> Iterator[NetworkInput | UnusableImage]:
    """Load images in order, a bounded number ahead of the one asked for, by the shared processes.

    Args:
        items: index of each image, and its file, or its pixels, or why it can't be used.
        loading: how.
        keep_image: whether decoded files are handed over, too; pixels always are.
    """
    task = Task(loading, keep_image=keep_image)
    sources: deque[Path | Image | UnusableImage] = deque()

    def submit(
        item: tuple[int, Path | Image | UnusableImage],
    ) -> Future[NetworkInput | UnusableImage]:
        index, source = item
        sources.append(source)
        if isinstance(source, UnusableImage):
            return _finished(source)
        if isinstance(source, Image):
            return _finished(load(index, source, loading))
        # The program may have gone to another folder since the processes were started.
        return _shared_decoders().submit(index, source.absolute(), task)

    for loaded in prefetch(submit, items, _ahead(task, 1)):
        source = sources.popleft()
        if isinstance(loaded, NetworkInput) and isinstance(source, Path):
            loaded = replace(loaded, path=source)
        yield loaded


def read_mask(path: Path) -> NDArray[np.bool_]:
    """Read a mask (H, W) in a process of its own: True where any channel is above 0.

    Raises:
        ImageError: it is damaged or of a kind that isn't accepted, or took too long or too much.
    """
    with Decoders(1) as decoders:
        return np.asarray(decoders.call(read.read_mask, path, about=path), bool)
