"""Ctrl-C and SIGTERM end a long run politely: what is in hand is finished and kept."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Stopping:
    """Notes the first signal to stop; the second one interrupts at once.

    Attributes:
        signal: the signal that came; None so far.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():  # Python allows it only there
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """What shells expect of a program that a signal has ended."""
        return 128 + (self.signal or 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
