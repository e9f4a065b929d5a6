"""Processes that decode images and write their pictures, beside the one with the network.

Every image goes through here, whatever the command. A damaged file can take a decoder down, and
with it its process: then the file is tried once more in a new one, and after that it is `failed`.
So it is, at once, when it takes too long (`process_limits`); the run goes on. The processes import
no torch (45 MB each, not 700), and are asked in pickled messages through their standard input.

A run has `Decoders` of its own, which end with it. Calls of `predict` share processes, which live
until the program's end.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from anomaly.errors import ImageError
from anomaly.imaging import process_limits, read
from anomaly.imaging.decoder_process import DecoderProcess, EndedError
from anomaly.imaging.decoder_worker import Task, load_alone, name_of
from anomaly.imaging.geometry import View
from anomaly.imaging.loading import NetworkInput, Preprocessing, UnusableImage, load, paint
from anomaly.imaging.read import Image
from anomaly.runtime.parallel import StoppedError, prefetch

AHEAD = 4  # images that each process may be ahead of the network
_MOST_SHARED = 4  # processes that wait for whatever a Python program asks for next

Item = TypeVar("Item")


class Decoders:
    """Decoding processes. Used in a `with` statement, which ends them, whatever they are at.

    Args:
        count: how many; they start at once, so that they are there when they are needed.
        task: what to say to them before anything else; see `begin`.
    """

    def __init__(self, count: int, task: Task | None = None) -> None:
        process_limits.memory_limit()  # a setting that is wrong is said here
        self._processes = [DecoderProcess() for _ in range(max(1, count))]
        self._of: dict[int, DecoderProcess] = {}
        self._ahead = AHEAD * len(self._processes)
        self._task = task
        if task is not None:
            self.begin(task)

    def __enter__(self) -> Decoders:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.close()

    @property
    def resident(self) -> int:
        """Bytes that the processes hold; 0 where the system doesn't say."""
        return sum(process.resident for process in self._processes)

    def begin(self, task: Task) -> None:
        """Say what the task is, before images are loaded."""
        self._task = task
        for process in self._processes:
            process.task = task
        # An image that is worth tiling is too large to have many of it waiting.
        self._ahead = 0 if task.loading.sizing.tile else AHEAD * len(self._processes)

    def rest(self) -> None:
        """Give the processes' memory back when they are done; what asks them more waits a while."""
        for process in self._processes:
            process.rest()

    def load_all(
        self,
        items: Iterable[tuple[int, Path | Image]],
        stopped: Callable[[], bool] | None = None,
    ) -> Iterator[NetworkInput | UnusableImage]:
        """Load images in order, a bounded number ahead of the one asked for.

        Args:
            items: index of each image, and its file, or its pixels, which no process need decode.
            stopped: asked now and then whether they are still wanted.

        Raises:
            StoppedError: they aren't; a process that is at one of them is ended.
        """
        try:
            yield from prefetch(lambda item: self.submit(*item), items, self._ahead, stopped)
        except StoppedError:
            for process in self._processes:
                process.drop()
            raise

    def load(self, source: Path | Image) -> NetworkInput | UnusableImage:
        """Load one image."""
        return self.submit(0, source).result()

    def submit(
        self, index: int, source: Path | bytes | Image
    ) -> Future[NetworkInput | UnusableImage]:
        """Load one image among many, as `load_all` does; nobody bounds how many wait.

        Args:
            index: no other image that is being loaded or waits for its pictures has it.
            source: its file, the file's bytes, or pixels.
        """
        if isinstance(source, Image):
            assert self._task is not None
            return _finished(load(index, source, self._task.loading))
        process = self._of[index] = self._idlest()
        return process.submit(_load, process, index, source)

    def submit_alone(
        self, index: int, path: Path, loading: Preprocessing, keep_image: bool
    ) -> Future[NetworkInput | UnusableImage]:
        """Load a file that has nothing to do with the task; see `load_shared`."""
        process = self._idlest()
        return process.submit(_load_alone, process, index, path, loading, keep_image)

    def map(self, function: Callable[[Item], Any], items: Iterable[Item]) -> Iterator[Any]:
        """What a function that reads files makes of each item, in order, as with `load_all`.

        Args:
            function: of a module, and its items, what it makes and what it raises can be pickled.
            items: what it is called with.

        Yields:
            Its results; an ImageError (`failed`) where an item took too long, or took its process
            down.

        Raises:
            Exception: what the function raises.
        """
        return prefetch(lambda item: self._call(function, item), items, self._ahead)

    def call(self, function: Callable[..., Any], *arguments: Any, about: Path) -> Any:
        """What a function that reads files returns; see `map`.

        Args:
            function: what to do.
            arguments: with what.
            about: the file, for messages.

        Raises:
            ImageError: `failed`: it took too long, or took its process down.
        """
        result = self._call(function, *arguments).result()
        if isinstance(result, ImageError):
            raise ImageError(f"{about}: {result}", result.status)
        return result

    def finish(self, index: int, path: Path | bytes, *what: Any) -> Future[Any]:
        """Write the pictures of an image that `load_all` has given and that is now scored.

        Args:
            index: of the image.
            path: of the image; its file's bytes where it was loaded from them.
            what: for `Task.pictures.write`, behind the image.

        Returns:
            What that returns, once the pictures are on disk; `UnusableImage` when the file can't be
            read any more, can't be drawn, or takes its process down. The future raises OutputError
            when they can't be written.
        """
        process = self._of.pop(index)
        return process.submit(_finish, process, index, path, *what)

    def forget(self, index: int) -> None:
        """An image that `load_all` has given needs no pictures."""
        self._of.pop(index, None)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        process = self._idlest()
        return process.submit(_call, process, function, arguments)

    def _idlest(self) -> DecoderProcess:
        return min(self._processes, key=lambda p: p.waiting)


def _load(process: DecoderProcess, index: int, path: Path | bytes) -> NetworkInput | UnusableImage:
    try:
        answer = process.ask("load", index, path, droppable=True)
    except EndedError as ended:
        return _failed(index, path, "decoding", ended)
    if isinstance(answer, NetworkInput):
        if answer.image is not None:
            return replace(answer, render=partial(paint, answer.name, answer.image))
        return replace(answer, render=partial(_render, process, index, path))
    assert isinstance(answer, UnusableImage)
    return answer


def _load_alone(
    process: DecoderProcess, index: int, path: Path, loading: Preprocessing, keep_image: bool
) -> NetworkInput | UnusableImage:
    arguments = (index, path.absolute(), loading, keep_image)  # it may be in another folder by now
    try:
        answer = process.ask("call", load_alone, arguments, droppable=True)
    except EndedError as ended:
        return _failed(index, path, "decoding", ended)
    if isinstance(answer, NetworkInput):
        image = answer.image
        render = answer.render if image is None else partial(paint, path, image)
        # Of one that isn't to be kept, the tiles are all that the pixels are needed for.
        return replace(answer, path=path, image=image if keep_image else None, render=render)
    assert isinstance(answer, UnusableImage)
    return answer


def _finish(process: DecoderProcess, index: int, path: Path | bytes, *what: Any) -> Any:
    try:
        return process.ask("finish", index, path, *what, patience=process_limits.DRAWING)
    except EndedError as ended:
        return _failed(index, path, "drawing", ended)


def _render(
    process: DecoderProcess, index: int, path: Path | bytes, view: View
) -> NDArray[np.float32]:
    """Of a large image: asked for by the network's thread while loads may be waiting."""
    try:
        answer = process.submit(process.ask, "render", index, path, view).result()
    except EndedError as ended:
        answer = _failed(index, path, "rendering", ended)
    if isinstance(answer, UnusableImage):
        raise ImageError(answer.reason, answer.status)
    assert isinstance(answer, np.ndarray)
    return answer


def _call(process: DecoderProcess, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return process.ask("call", function, arguments, droppable=True)
    except EndedError as ended:
        return ImageError(f"reading it {ended}", "failed")


def _failed(index: int, source: Path | bytes, doing: str, ended: EndedError) -> UnusableImage:
    return UnusableImage(index, "failed", f"{name_of(index, source)}: {doing} it {ended}")


def _finished(result: NetworkInput | UnusableImage) -> Future[NetworkInput | UnusableImage]:
    """A result that needs no process, where one from a process is expected."""
    future: Future[NetworkInput | UnusableImage] = Future()
    future.set_result(result)
    return future


_shared: list[Decoders] = []
_shared_lock = threading.Lock()
if hasattr(os, "register_at_fork"):  # a fork has none of its parent's threads
    os.register_at_fork(after_in_child=_shared.clear)


def _shared_decoders() -> Decoders:
    """Processes that live from their first use to the program's end, for callers in any thread.

    Starting a process takes longer than most images.
    """
    with _shared_lock:
        if not _shared:
            _shared.append(Decoders(min(_MOST_SHARED, os.cpu_count() or 1)))
            atexit.register(_shared[0].__exit__)
        return _shared[0]


def load_shared(
    items: Iterable[tuple[int, Path | Image | UnusableImage]],
    loading: Preprocessing,
    *,
    keep_image: bool = False,
) -> Iterator[NetworkInput | UnusableImage]:
    """Load images in order, a bounded number ahead of the one asked for, by the shared processes.

    Args:
        items: index of each image, and its file, or its pixels, or why it can't be used.
        loading: how.
        keep_image: whether decoded files are handed over, too; pixels always are.
    """

    def submit(
        item: tuple[int, Path | Image | UnusableImage],
    ) -> Future[NetworkInput | UnusableImage]:
        index, source = item
        if isinstance(source, UnusableImage):
            return _finished(source)
        if isinstance(source, Image):
            return _finished(load(index, source, loading))
        return _shared_decoders().submit_alone(index, source, loading, keep_image)

    # An image that is worth tiling is too large to have many of it waiting.
    return prefetch(submit, items, 0 if loading.sizing.tile else AHEAD)


def read_mask(path: Path) -> NDArray[np.bool_]:
    """Read a mask (H, W) in a process of its own: True where any channel is above 0.

    Raises:
        ImageError: it is damaged or of a kind that isn't accepted, or took too long or too much.
    """
    with Decoders(1) as decoders:
        return np.asarray(decoders.call(read.read_mask, path, about=path), bool)
