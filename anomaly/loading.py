"""Image files -> batches of network inputs, decoded ahead of the network. Imports no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from anomaly.errors import ImageError
from anomaly.geometry import Sizing, View, render
from anomaly.images import Image, read_image

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Loading:
    """How files become network inputs; travels with the model.

    Attributes:
        sizing: gives each image its view.
        bit_depth: declared depth of 16-bit files; None for the full range of their type.
        max_pixels: larger images are refused before they are decoded.
    """

    sizing: Sizing
    bit_depth: int | None
    max_pixels: int


@dataclass(frozen=True)
class Loaded:
    """One image, ready for the network.

    Attributes:
        index: its place in the list of files.
        image: the decoded file.
        view: how `pixels` was made from it.
        pixels: (H, W, 3) float32 RGB in [0, 1].
    """

    index: int
    image: Image
    view: View
    pixels: NDArray[np.float32]


@dataclass(frozen=True)
class Refused:
    """One file that couldn't be used.

    Attributes:
        index: its place in the list of files.
        status: `unreadable` or `unsupported`.
        reason: what is wrong, for a person.
    """

    index: int
    status: str
    reason: str


def load(index: int, path: Path, loading: Loading) -> Loaded | Refused:
    """Decode and render one file."""
    try:
        image = read_image(path, max_pixels=loading.max_pixels, bit_depth=loading.bit_depth)
    except ImageError as error:
        return Refused(index, error.status, str(error))
    view = loading.sizing.view(image.size)
    return Loaded(index, image, view, render(image.pixels, image.full_scale, view))


def load_all(paths: Sequence[Path], loading: Loading, workers: int) -> Iterator[Loaded | Refused]:
    """Load files in order, a bounded number ahead of the one asked for.

    Decoders and OpenCV release the interpreter lock, so threads decode in parallel.

    Args:
        paths: the files.
        loading: how.
        workers: threads; 0 loads in the caller's.
    """
    if workers == 0:
        yield from (load(i, p, loading) for i, p in enumerate(paths))
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        numbered = enumerate(paths)
        yield from ahead(lambda item: load(*item, loading), numbered, pool, 2 * workers + 2)


def ahead(
    task: Callable[[Item], Result], items: Iterable[Item], pool: Executor, count: int
) -> Iterator[Result]:
    """`map(task, items)` in order, worked out in a pool up to `count` items ahead."""
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(task, item))
            if len(waiting) > count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def by_shape(
    items: Iterable[Loaded | Refused], batch_size: int
) -> Iterator[list[Loaded] | Refused]:
    """Gather images of equal network size into batches; refusals pass through.

    The split depends on the list of files alone. At most four batches' worth of images wait; then
    the largest group goes, full or not.
    """
    waiting: dict[tuple[int, int], list[Loaded]] = {}
    for item in items:
        if isinstance(item, Refused):
            yield item
            continue
        group = waiting.setdefault(item.view.size, [])
        group.append(item)
        held = sum(map(len, waiting.values()))
        if len(group) == batch_size or held >= 4 * batch_size:
            yield waiting.pop(max(waiting, key=lambda size: len(waiting[size])))
    yield from waiting.values()
