"""Bounded look-ahead: work on some items begins while others are still waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

_ASKED_SECONDS = 0.2

Item = TypeVar("Item")
Result = TypeVar("Result")


class StoppedError(Exception):
    """What is waited for isn't wanted any more: a signal has come."""


def ahead(
    submit: Callable[[Item], Future[Result]],
    items: Iterable[Item],
    count: int,
    stopped: Callable[[], bool] | None = None,
) -> Iterator[Result]:
    """What is made of each item, in order, begun up to `count` items ahead.

    Args:
        submit: begins to work on an item.
        items: read no further ahead than that.
        count: how many results may be on their way besides the one that is waited for.
        stopped: asked now and then while a result is waited for.

    Raises:
        StoppedError: `stopped` has said so.
    """
    waiting: deque[Future[Result]] = deque()

    def first() -> Result:
        while stopped is not None and not wait([waiting[0]], _ASKED_SECONDS).done:
            if stopped():
                raise StoppedError
        return waiting.popleft().result()

    try:
        for item in items:
            waiting.append(submit(item))
            if len(waiting) > count:
                yield first()
        while waiting:
            yield first()
    finally:
        for future in waiting:
            future.cancel()
