"""Images for callers that come with one, or a few, at a time.

A run has `Decoders` of its own, which end with it. Calls of `predict` share processes, which live
until the program's end.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anomaly.imaging import image as images
from anomaly.imaging import preprocessing
from anomaly.imaging.decoder_pool import AHEAD, Decoders, finished
from anomaly.imaging.image import Image
from anomaly.imaging.preprocessing import Loaded, Loading, UnusableImage
from anomaly.prefetch import ahead

_MOST = 4  # processes that wait for whatever a Python program asks for next

_shared: list[Decoders] = []
_shared_lock = threading.Lock()
if hasattr(os, "register_at_fork"):  # a fork has none of its parent's threads
    os.register_at_fork(after_in_child=_shared.clear)


def _decoders() -> Decoders:
    """Processes that live from their first use to the program's end, for callers in any thread.

    Starting a process takes longer than most images.
    """
    with _shared_lock:
        if not _shared:
            _shared.append(Decoders(min(_MOST, os.cpu_count() or 1)))
            atexit.register(_shared[0].__exit__)
        return _shared[0]


def load_shared(
    items: Iterable[tuple[int, Path | Image | UnusableImage]],
    loading: Loading,
    *,
    keep_image: bool = False,
) -> Iterator[Loaded | UnusableImage]:
    """Load images in order, a bounded number ahead of the one asked for, by the shared processes.

    Args:
        items: index of each image, and its file, or its pixels, or why it can't be used.
        loading: how.
        keep_image: whether decoded files are handed over, too; pixels always are.
    """

    def submit(item: tuple[int, Path | Image | UnusableImage]) -> Future[Loaded | UnusableImage]:
        index, source = item
        if isinstance(source, UnusableImage):
            return finished(source)
        if isinstance(source, Image):
            return finished(preprocessing.load(index, source, loading))
        return _decoders().alone(index, source, loading, keep_image)

    # An image that is worth tiling is too large to have many of it waiting.
    return ahead(submit, items, 0 if loading.sizing.tile else AHEAD)


def read_mask(path: Path) -> NDArray[np.bool_]:
    """Read a mask (H, W) in a process of its own: True where any channel is above 0.

    Raises:
        ImageError: it is damaged or of a kind that isn't accepted, or took too long or too much.
    """
    with Decoders(1) as decoders:
        return np.asarray(decoders.call(images.read_mask, path, about=path), bool)
