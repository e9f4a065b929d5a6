"""Many small pieces of tensor work on several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

# Called as spread(task, items): [task(item) for item in items]. No task may depend on another.
Spread = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


@contextmanager
def spreading(device: torch.device) -> Iterator[Spread]:
    """Hand out pieces of work to as many threads as torch has, each of which computes alone.

    Torch's own way splits every single operation and has all threads meet at its end. For
    operations of some microseconds the meeting costs more than the work, and where another
    program uses a core, ten times more. Here nobody waits before the last piece, and results
    don't depend on the number of threads.

    Args:
        device: where the work is done. A GPU takes one piece after another.

    Yields:
        The function that hands out. Inside the context this thread, too, computes alone.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield _in_turn
        return
    # A setting holds for the thread that makes it, and for threads that don't exist yet.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads - 1, initializer=torch.set_num_threads, initargs=(1,)) as p:
            yield lambda task, items: _spread(p, threads, task, items)
    finally:
        torch.set_num_threads(threads)


def spread(task: Callable[[Any], Any], items: Sequence[Any], device: torch.device) -> list[Any]:
    """`[task(item) for item in items]` in a `spreading` of its own."""
    with spreading(device) as hand_out:
        return hand_out(task, items)


def _in_turn(task: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [task(item) for item in items]


def _spread(
    pool: ThreadPoolExecutor, threads: int, task: Callable[[Any], Any], items: Sequence[Any]
) -> list[Any]:
    if len(items) < 2:
        return _in_turn(task, items)
    inference = torch.is_inference_mode_enabled()
    results: list[Any] = [None] * len(items)
    # One iterator for all: whoever is done takes the next piece.
    remaining = iter(range(len(items)))

    def work() -> None:
        with torch.inference_mode(inference):
            for i in remaining:
                results[i] = task(items[i])

    helpers = [pool.submit(work) for _ in range(threads - 1)]
    work()
    for helper in helpers:
        helper.result()
    return results
