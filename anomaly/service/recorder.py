"""The thread that writes answers into the record."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anomaly.errors import OutputError
from anomaly.service.record import Answer, Record

log = logging.getLogger(__name__)

_MOST_AT_ONCE = 64  # answers in one transaction


class Recorder:
    """Writes answers down in a thread of its own, all that wait in one transaction.

    Used in a `with` statement, which writes what is left.

    Args:
        record: where to.
        told: called with each part that was written, in order; an exception that it raises is
            logged.
    """

    def __init__(self, record: Record, told: Callable[[int, Answer], object]) -> None:
        self._record = record
        self._told = told
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="record", daemon=True)

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.put(None)
        self._thread.join()

    def put(self, answer: Answer, then: Callable[[int | OutputError], object]) -> None:
        """Have an answer written down.

        Args:
            answer: what was said.
            then: called with the part's number, or with what was in the way; an exception that it
                raises is logged.
        """
        self._waiting.put(_Waiting(answer, then))

    def _work(self) -> None:
        going = True
        while going:
            items = [self._waiting.get()]
            while items[-1] is not None and len(items) < _MOST_AT_ONCE:
                try:
                    items.append(self._waiting.get_nowait())
                except queue.Empty:
                    break
            going = items[-1] is not None
            self._write([item for item in items if item is not None])

    def _write(self, items: Sequence[_Waiting]) -> None:
        if not items:
            return
        numbers: Sequence[int | OutputError]
        try:
            numbers = self._record.add([item.answer for item in items])
        except OutputError as error:
            numbers = [error] * len(items)
        for item, number in zip(items, numbers, strict=True):
            if isinstance(number, int):
                _call(self._told, number, item.answer)
            _call(item.then, number)


def _call(callback: Callable[..., object], *arguments: object) -> None:
    """Call back; a mistake there mustn't keep the next parts from being written down."""
    try:
        callback(*arguments)
    except Exception:
        log.exception("handing an answer on failed")


@dataclass(frozen=True)
class _Waiting:
    """An answer that is to be written down."""

    answer: Answer
    then: Callable[[int | OutputError], object]
