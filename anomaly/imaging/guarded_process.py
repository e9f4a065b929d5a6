"""A process that does what untrusted files make it do, within limits of time and memory.

What a parser does with a damaged file nobody knows. It does it in a process of its own, which is
ended when it takes too long or too much, and replaced. Imports no torch.

Time is what the process computes, so that neither a slow network folder nor a busy machine ends
it; for files that never come there is a longer limit on the clock. Where the system doesn't say
what a process uses (other systems than Linux), the limit on the clock is the only one.
"""

from __future__ import annotations

import pickle
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from anomaly.errors import AnomalyError, why
from anomaly.imaging.child_process import check_start, start, usage
from anomaly.imaging.decoder_worker import receive, send
from anomaly.imaging.preprocessing import MODEST_PIXELS

# For an image of up to `MODEST_PIXELS`; a larger one gets more in proportion. Decoding that many
# takes 4 s and 0.7 GB at most, all that can be drawn of them 8 s and 1.2 GB.
COMPUTING_SECONDS = 9.0
CLOCK_SECONDS = 60.0
MEMORY_BYTES = 1_500_000_000
# Drawing follows no file's orders.
DRAWING = 3

_ATTEMPTS = 2


class EndedError(Exception):
    """The process was ended, or has ended, while it was at something; the message says why."""


@dataclass
class _Request:
    """What a process is at.

    Attributes:
        share: of the limits, what it may take.
        begun: on the clock, at the first attempt.
        spent: seconds computed for it, in earlier attempts, too, when it was last looked at.
        seconds: that the process had computed before, less what earlier attempts have spent.
        resident: bytes that it held before.
        droppable: nothing is lost when it isn't finished.
        over: why it was ended.
    """

    share: float
    begun: float
    spent: float
    seconds: float
    resident: int
    droppable: bool
    over: str = ""


class GuardedProcess:
    """One process, asked one thing at a time by a thread of its own.

    Attributes:
        task: what it is told before anything else, as often as it starts.
    """

    def __init__(self) -> None:
        self.task: object = None
        self._told: object = None
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
        return (usage(child.pid) or (0.0, 0))[1] if child else 0

    def submit(self, job: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Do something in the process's thread once everything before it is done."""
        self._asked += 1
        future = self._thread.submit(job, *arguments)
        future.add_done_callback(lambda _: self._done())
        return future

    def _done(self) -> None:
        self._answered += 1

    def ask(self, *asked: Any, pixels: int = 0, patience: int = 1, droppable: bool = False) -> Any:
        """Its answer; called in its thread.

        Args:
            asked: what to do, and with what.
            pixels: of the image that this is about, where they are known.
            patience: how many times the usual limits.
            droppable: nothing is lost when it isn't finished.

        Raises:
            EndedError: it took too long or too much, or the process has died of it, twice.
            AnomalyError: no such process can be started on this machine.
            Exception: what went wrong there, if that is nothing of the image's own.
        """
        if self._child is None:
            self._start()
        begun, spent = time.monotonic(), 0.0
        for _ in range(_ATTEMPTS):
            try:
                self._begin(pixels, patience, droppable, begun, spent)
                kind, answer = self._exchange(asked, patience)
            except (OSError, EOFError, pickle.UnpicklingError):
                request = self._end()
                self._start()
                if request.over:
                    raise EndedError(request.over) from None
                spent = request.spent
                continue
            self._end()
            self._has_answered = True
            if kind == "error":
                raise answer
            return answer
        if not self._has_answered:
            check_start()
        raise EndedError(f"has ended {_ATTEMPTS} processes, one after the other")

    def watch(self) -> None:
        """End it if what it is at takes too long or too much."""
        with self._lock:
            if self._request is not None and self._child is not None:
                over = _over(self._request, self._child.pid)
                if over:
                    self._request.over = over
                    self._child.kill()

    def drop(self) -> None:
        """End it if what it is at may remain unfinished."""
        with self._lock:
            if self._request is not None and self._request.droppable and self._child is not None:
                self._request.over = "wasn't waited for"
                self._child.kill()

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
        if self._child is not None:
            _let_go(self._child)

    def _begin(
        self, pixels: int, patience: int, droppable: bool, begun: float, spent: float
    ) -> None:
        with self._lock:
            assert self._child is not None
            seconds, resident = usage(self._child.pid) or (0.0, 0)
            share = patience * _share(pixels)
            self._request = _Request(share, begun, spent, seconds - spent, resident, droppable)

    def _exchange(self, request: tuple[Any, ...], patience: int) -> tuple[str, Any]:
        assert self._child is not None
        assert self._request is not None
        if self._told is not self.task:
            send(self._child.stdin, ("begin", self.task))
            receive(self._child.stdout)
            self._told = self.task
        send(self._child.stdin, request)
        while True:
            kind, answer = receive(self._child.stdout)
            if kind != "pixels":
                return kind, answer
            self._request.share = patience * _share(answer)

    def _end(self) -> _Request:
        with self._lock:
            request, self._request = self._request, None
        assert request is not None
        return request

    def _start(self) -> None:
        with self._lock:
            if self._closed:
                raise EndedError("wasn't waited for")
            if self._child is not None:
                self._child.kill()
                _let_go(self._child)
            try:
                self._child, self._told = start(), None
            except OSError as error:
                self._child = None
                raise AnomalyError(
                    f"no process can be started that decodes images: {why(error)}; end other "
                    "programs, or give the machine more memory"
                ) from None

    def _stop(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.kill()
            _let_go(child)


def _let_go(child: subprocess.Popen[bytes]) -> None:
    """Forget a process that was killed."""
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with suppress(OSError):  # what it wasn't told any more
                stream.close()


def _share(pixels: int) -> float:
    return max(1.0, pixels / MODEST_PIXELS)


def _over(request: _Request, pid: int) -> str:
    """What a request has too much of; empty while it is within the limits."""
    share = request.share
    if time.monotonic() - request.begun > CLOCK_SECONDS * share:
        return f"took more than {CLOCK_SECONDS * share:.0f} s, the limit for an image of its size"
    used = usage(pid)
    if used is None:
        return ""
    seconds, resident = used
    request.spent = seconds - request.seconds
    if request.spent > COMPUTING_SECONDS * share:
        return (
            f"took more than {COMPUTING_SECONDS * share:.0f} s of computing, the limit for an "
            "image of its size"
        )
    if resident - request.resident > MEMORY_BYTES * share:
        return (
            f"took more than {MEMORY_BYTES * share / 1e9:.1f} GB of memory, the limit for an "
            "image of its size"
        )
    return ""
