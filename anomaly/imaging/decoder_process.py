"""A decoding process as the one that has started it sees it. Imports no torch."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anomaly.errors import AnomalyError, why
from anomaly.imaging import process_limits
from anomaly.imaging.decoder_worker import Task, receive, send, serve

if sys.platform == "linux":
    import fcntl

_ATTEMPTS = 2
_HOME = str(Path(__file__).resolve().parents[2])  # the folder that holds the package
_PIPE_BYTES = 1 << 20  # an image of the network's size in one go; 64 kB take 3 ms more for each


class EndedError(Exception):
    """The process was ended, or has ended, while it was at something; the message says why."""


@dataclass
class _Request:
    """What a process is at.

    Attributes:
        share: how many times the usual limits it may take.
        droppable: nothing is lost when it isn't finished.
        over: why it was ended.
    """

    share: float
    droppable: bool
    over: str = ""


class DecoderProcess:
    """One process, asked one thing at a time by a thread of its own.

    Attributes:
        task: what it is told before anything else, as often as it starts.
    """

    def __init__(self) -> None:
        self.task: Task | None = None
        self._sent: Task | None = None
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

    @property
    def resident(self) -> int:
        """Bytes that it holds; 0 where the system doesn't say."""
        child = self._child
        return process_limits.resident_bytes(child.pid) if child else 0

    def submit(self, job: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Do something in the process's thread once everything before it is done."""
        self._asked += 1
        future = self._thread.submit(job, *arguments)
        future.add_done_callback(lambda _: self._done())
        return future

    def _done(self) -> None:
        self._answered += 1

    def ask(self, name: str, *arguments: Any, patience: float = 1, droppable: bool = False) -> Any:
        """Its answer; called in its thread.

        Args:
            name: a method of `decoder_worker.Worker`.
            arguments: for it.
            patience: how many times the usual limits of time it may take.
            droppable: nothing is lost when it isn't finished.

        Raises:
            EndedError: it took too long, or the process has died of it, twice.
            AnomalyError: no such process can be started on this machine.
            Exception: what went wrong there, if that is nothing of the image's own.
        """
        for _ in range(_ATTEMPTS):
            self._start()
            request = _Request(patience, droppable)
            try:
                kind, answer = self._exchange(request, name, arguments)
            except (OSError, EOFError, pickle.UnpicklingError):
                code = self._stop(patience=1)
                if sys.platform != "win32" and code == -signal.SIGPROF:
                    request.over = _too_long(process_limits.COMPUTING_SECONDS, request, "computing")
                if request.over:
                    raise EndedError(request.over) from None
                continue
            self._has_answered = True
            if kind == "error":
                raise answer
            return answer
        if not self._has_answered:
            _check_start()
        raise EndedError(f"has ended {_ATTEMPTS} processes, one after the other")

    def drop(self) -> None:
        """End it if what it is at may remain unfinished."""
        request = self._request
        if request is not None and request.droppable:
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
        self, request: _Request, name: str, arguments: tuple[Any, ...]
    ) -> tuple[str, Any]:
        assert self._child is not None
        news = None if self._sent is self.task else self.task
        self._request, watchdog = request, self._watch(request)
        try:
            send(self._child.stdin, (news, name, arguments, request.share))
            self._sent = self.task
            while True:
                kind, answer = receive(self._child.stdout)
                if kind != "large":
                    return kind, answer
                request.share = answer
                watchdog.cancel()
                watchdog = self._watch(request)
        finally:
            watchdog.cancel()
            with self._lock:
                self._request = None

    def _watch(self, request: _Request) -> threading.Timer:
        """End the request when it takes too long on the clock."""
        seconds = process_limits.CLOCK_SECONDS
        said = _too_long(seconds, request)
        watchdog = threading.Timer(seconds * request.share, self._end, (request, said))
        watchdog.daemon = True
        watchdog.start()
        return watchdog

    def _end(self, request: _Request, over: str) -> None:
        with self._lock:
            if self._request is request and self._child is not None:
                request.over = over
                self._child.kill()

    def _start(self) -> None:
        """Start it, unless it is there."""
        with self._lock:
            if self._closed:
                raise EndedError("wasn't waited for")
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
                with suppress(OSError):  # what it wasn't told any more
                    stream.close()
        return code


def _too_long(seconds: float, request: _Request, what: str = "") -> str:
    of = f" of {what}" if what else ""
    return f"took more than {seconds * request.share:.0f} s{of}, the limit for an image of its size"


def start() -> subprocess.Popen[bytes]:
    """A fresh interpreter that serves: works alike on every system, whatever threads there are.

    Raises:
        AnomalyError: none can be started.
    """
    code = f"{_imports()}; serve({os.getpid()}, {process_limits.memory_limit()})"
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
