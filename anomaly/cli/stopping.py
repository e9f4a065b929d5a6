"""Ctrl-C and SIGTERM end every command within seconds, politely where it can finish something."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, ClassVar

# What a command may take to finish what is in hand, or to give up.
PATIENCE_SECONDS = 8.0


class Interrupted(KeyboardInterrupt):
    """A signal ends the command here and now; the message says what to do then.

    Attributes:
        exit_code: what shells expect of a program that this signal has ended.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Stopping:
    """Stops a command at a signal. Used in a `with` statement.

    Whatever the command does then, its process ends `PATIENCE_SECONDS` later at the latest, unless
    it is at work or the outermost of these blocks is left: a thread sees to that, since a long call
    of a library keeps Python from handling signals.

    Args:
        politely: the first signal is only noted, for a command that finishes what is in hand and
            can be resumed, and the second one interrupts; otherwise the first one does.
        then: what to do after an interruption, for a command that stops politely.

    Attributes:
        signal: the signal that came first; None so far.
        at_work: whether the command finishes what it has accepted, until a second signal.
    """

    _open: ClassVar[list[Stopping]] = []  # outermost first

    def __init__(self, *, politely: bool = True, then: str = "continue with --resume") -> None:
        self.signal: int | None = None
        self.at_work = False
        self._politely = politely
        self._message = f"interrupted; {then}" if politely else "interrupted"
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():  # Python allows it only there
            self._open.append(self)
            if self._open[0] is self:
                self._ours, theirs = socket.socketpair()
                theirs.setblocking(False)
                self._wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
                threading.Thread(target=self._see_to_it, args=(theirs,), daemon=True).start()
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            self._open.remove(self)
            if not self._open:
                signal.set_wakeup_fd(self._wakeup)
                self._ours.shutdown(socket.SHUT_RDWR)

    @property
    def exit_code(self) -> int:
        """What shells expect of a program that a signal has ended."""
        return 128 + (self.signal or 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        interrupts = self.signal is not None or not self._politely
        if interrupts and _importing(frame):
            later = threading.Timer(0.05, signal.raise_signal, (number,))
            later.daemon = True
            later.start()
            return
        self.signal = self.signal or number
        if interrupts:
            raise Interrupted(self.signal, self._message)

    def _see_to_it(self, theirs: socket.socket) -> None:
        """End the process some time after a signal, unless the command has ended before."""
        with self._ours, theirs:
            first = self._ours.recv(1)
            if not first:
                return
            inner = self._open[-1] if self._open else self  # a command may end right now
            if inner._politely:
                _say("stopping: what is in hand is finished; a second signal ends it at once")
            end = time.monotonic() + PATIENCE_SECONDS
            while (left := end - time.monotonic()) > 0:
                self._ours.settimeout(min(left, 0.5))
                with suppress(TimeoutError):
                    if not self._ours.recv(1):
                        return
                    inner.at_work = False
                if inner.at_work:
                    end = time.monotonic() + PATIENCE_SECONDS
        _say(inner._message)
        os._exit(128 + first[0])


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: extension modules turn an interruption into errors."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _say(message: str) -> None:
    with suppress(OSError, ValueError):  # nobody listens any more
        print(message, file=sys.stderr, flush=True)
