"""A line that says how far a long stage is; nothing at all where nobody watches."""

from __future__ import annotations

import sys
import time


class ProgressLine:
    """Shows done, total, rate and the time left on stderr, when that is a terminal.

    Used in a `with` statement; call it with (stage, done, total).
    """

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._stage = ""
        self._started = 0.0
        self._last = 0.0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_line()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report that `done` of `total` are through in a stage."""
        if not self._shown:
            return
        now = time.monotonic()
        if stage != self._stage:
            self._end_line()
            self._stage, self._started, self._last = stage, now, 0.0
        if now - self._last < 0.1 and done < total:
            return
        self._last = now
        seconds = now - self._started
        rate = done / seconds if seconds > 0.2 else 0.0
        left = f"{rate:8.1f}/s  {(total - done) / rate:6.0f} s left" if rate else ""
        print(f"\r  {stage:<12}{done:>7}/{total}{left}\x1b[K", end="", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Show how things stand where there is no end in sight."""
        if self._shown:
            self._stage = text
            print(f"\r  {text}\x1b[K", end="", file=sys.stderr, flush=True)

    def _end_line(self) -> None:
        if self._shown and self._stage:
            print(file=sys.stderr)
