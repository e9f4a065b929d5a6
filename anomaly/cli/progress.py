"""A line that says how far a long stage is."""

from __future__ import annotations

import logging
import sys
import threading
import time

from anomaly.cli.speech import PROGRESS, is_quiet

log = logging.getLogger(__name__)

_PLAIN_SECONDS = 30.0


class ProgressLine:
    """Shows done, total, rate and the time left on stderr.

    On a terminal one line changes as the work goes on; elsewhere, as in a log, a plain line is
    added every half minute, whether anything has moved or not. Where only results and errors are
    wanted there is neither.

    Used in a `with` statement; call it with (stage, done, total).
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty() and not is_quiet()
        self._stage = ""
        self._done = self._total = 0
        self._started = self._shown = 0.0
        self._ended = threading.Event()
        self._speaker = threading.Thread(target=self._speak, daemon=True)

    def __enter__(self) -> ProgressLine:
        if not self._terminal:
            self._speaker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_stage()
        self._ended.set()
        if not self._terminal:
            self._speaker.join()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report that `done` of `total` are through in a stage."""
        now = time.monotonic()
        if stage != self._stage:
            self._end_stage()
            self._started, self._shown = now, 0.0
        self._stage, self._done, self._total = stage, done, total
        if self._terminal and (now - self._shown >= 0.1 or done >= total):
            self._shown = now
            print(f"\r  {self._text()}\x1b[K", end="", file=sys.stderr, flush=True)

    def _speak(self) -> None:
        while not self._ended.wait(_PLAIN_SECONDS):
            if self._stage:
                log.log(PROGRESS, self._text())

    def _text(self) -> str:
        seconds = time.monotonic() - self._started
        text = f"{self._stage}: {self._done} of {self._total}"
        if self._done >= self._total:
            return f"{text}, finishing"
        rate = self._done / seconds if seconds > 0.2 else 0.0
        left = f", {rate:.1f} a second, {_said((self._total - self._done) / rate)}" if rate else ""
        return text + left

    def _end_stage(self) -> None:
        if self._stage:
            if self._terminal:
                print(file=sys.stderr)
            seconds = time.monotonic() - self._started
            log.debug("%s: %d of %d in %.1f s", self._stage, self._done, self._total, seconds)


def _said(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"about {seconds / length:.2g} {unit} left"
    return f"about {seconds:.0f} s left"
