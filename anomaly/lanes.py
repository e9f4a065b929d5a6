"""Network passes side by side, on threads that each compute alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import TypeVar

import torch

from anomaly.loading import ahead

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(
    task: Callable[[Item], Result], items: Iterable[Item], device: torch.device
) -> Iterator[Result]:
    """`map(task, items)`, several at once on a CPU, in order.

    Torch's own threads share each operation and wait for one another at its end. Here each of as
    many lanes as torch has threads carries a batch through alone: as fast on a quiet machine, and
    up to 1.6 times as fast where decoding or another program uses the same cores. Results don't
    depend on the number of threads.

    While there are items left, the caller's thread computes alone, too. A GPU takes one item after
    another, and so does a CPU when there is only one.

    Args:
        task: may not depend on the order of calls.
        items: read in the caller's thread, no further ahead than there are lanes.
        device: where the task computes.
    """
    source = iter(items)
    first = list(islice(source, 2))
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or len(first) < 2:
        yield from map(task, first)
        yield from map(task, source)
        return
    torch.set_num_threads(1)  # holds for this thread, and for threads that don't exist yet
    try:
        with ThreadPoolExecutor(threads, "lane", torch.set_num_threads, (1,)) as pool:
            yield from ahead(lambda item: pool.submit(task, item), chain(first, source), threads)
    finally:
        torch.set_num_threads(threads)
