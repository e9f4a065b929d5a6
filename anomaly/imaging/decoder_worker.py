"""What a decoding process does: the other end of `anomaly.imaging.decoder_pool`. Imports no torch.

A process keeps the images that it has decoded, within `_KEPT_BYTES`, where they are to be drawn or
are worth tiling; those that didn't fit it reads again. It ends with the one that has started it,
whatever it is at.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from anomaly.errors import ImageError, OutputError
from anomaly.imaging.geometry import Tiling, View
from anomaly.imaging.image import Image, described
from anomaly.imaging.preprocessing import (
    MODEST_PIXELS,
    Loaded,
    Loading,
    UnusableImage,
    load,
    nothing_said,
    paint,
    refusal,
)

_KEPT_BYTES = 256 * 1024**2
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Drawing(Protocol):
    """What is drawn of each image; it travels to the processes, pickled."""

    def write(self, image: Image, /, *what: Any) -> Any:
        """Draw an image that was decoded, and write that."""


@dataclass(frozen=True)
class Task:
    """What the processes have to know once.

    Attributes:
        loading: how files become network inputs.
        pictures: what to write for each image; None for nothing.
        keep_image: whether the decoded image is handed over with the network's input.
    """

    loading: Loading
    pictures: Drawing | None = None
    keep_image: bool = False


def send(stream: IO[bytes] | None, message: object) -> None:
    """Hand a message to the other end of a pipe."""
    assert stream is not None
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def receive(stream: IO[bytes] | None) -> Any:
    """Wait for the next message from the other end of a pipe; EOFError when it has gone."""
    assert stream is not None
    return pickle.load(stream)  # from our own child


def serve(parent: int) -> None:
    """What a decoding process does until its standard input ends.

    Args:
        parent: id of the process that has started it.
    """
    import cv2

    _end_with(parent)
    cv2.setNumThreads(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when it is over
    # Whatever a library may print mustn't get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    server: _Server | None = None

    def say_pixels(pixels: int) -> None:
        send(answers, ("pixels", pixels))

    with suppress(BrokenPipeError):
        while True:
            name, *arguments = requests.get()
            try:
                if name == "begin":
                    server = _Server(arguments[0], say_pixels)
                    send(answers, ("done", True))
                elif name in ("call", "tell"):
                    function, *arguments = arguments
                    told = {"say_pixels": say_pixels} if name == "tell" else {}
                    send(answers, ("done", function(*arguments, **told)))
                else:
                    send(answers, ("done", getattr(server, name)(*arguments)))
            except BrokenPipeError:
                raise
            except Exception as error:  # of no image alone: a full disk, a mistake of ours
                send(answers, ("error", error))


def _end_with(parent: int) -> None:
    """Have the system end this process with the thread that has started it, where it can."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.name == "posix" and os.getppid() != parent:
        os._exit(1)


def _listen(requests: queue.SimpleQueue[Any]) -> None:
    """Take requests while others are worked on, so that the parent's end is noticed meanwhile."""
    with suppress(EOFError, OSError, pickle.UnpicklingError):
        while True:
            requests.put(receive(sys.stdin.buffer))
    os._exit(0)


class _Server:
    """What a process does when it is asked.

    Args:
        task: what it has to know.
        say_pixels: told of images that have more than `MODEST_PIXELS`, before they are worked on.
    """

    def __init__(self, task: Task, say_pixels: Callable[[int], None] = nothing_said) -> None:
        self._task = task
        self._say_pixels = say_pixels
        self._kept: OrderedDict[int, Image] = OrderedDict()

    def load(self, index: int, source: Path | bytes) -> Loaded | UnusableImage:
        loaded = load(index, source, self._task.loading, self._say_pixels)
        if isinstance(loaded, UnusableImage):
            return loaded
        if self._task.keep_image:
            return replace(loaded, render=_elsewhere)
        if self._task.pictures is not None or isinstance(loaded.view, Tiling):
            self._keep(index, loaded.decoded)
        return replace(loaded, image=None, render=_elsewhere)

    def render(
        self, index: int, source: Path | bytes, view: View
    ) -> NDArray[np.float32] | UnusableImage:
        image = self._image(index, source)
        if isinstance(image, UnusableImage):
            return image
        self._keep(index, image)
        name = name_of(index, source)
        try:
            return paint(name, image, view)
        except ImageError as error:
            return refusal(index, name, error)

    def finish(self, index: int, source: Path | bytes, *what: Any) -> Any:
        assert self._task.pictures is not None
        image = self._image(index, source)
        if isinstance(image, UnusableImage):
            return image
        try:
            return self._task.pictures.write(image, *what)
        except OutputError:  # of every image to come, too
            raise
        except Exception as error:
            return refusal(index, name_of(index, source), error)

    def _keep(self, index: int, image: Image) -> None:
        self._kept[index] = image
        held = sum(kept.pixels.nbytes for kept in self._kept.values())
        while held > _KEPT_BYTES and len(self._kept) > 1:
            held -= self._kept.popitem(last=False)[1].pixels.nbytes

    def _image(self, index: int, source: Path | bytes) -> Image | UnusableImage:
        image = self._kept.pop(index, None)
        if image is None:
            loaded = load(index, source, self._task.loading, self._say_pixels)
            return loaded if isinstance(loaded, UnusableImage) else loaded.decoded
        height, width = image.size
        if height * width > MODEST_PIXELS:
            self._say_pixels(height * width)
        return image


def name_of(index: int, source: Path | bytes) -> str:
    """What messages call an image: its path, or its place where its bytes came from memory."""
    return described(index, source if isinstance(source, Path) else None)


def load_alone(
    index: int, path: Path, loading: Loading, keep_image: bool, say_pixels: Callable[[int], None]
) -> Loaded | UnusableImage:
    """Load a file for a caller that won't come back to it: nothing of it is kept here.

    Args:
        index: its place in the list of images.
        path: the file.
        loading: how.
        keep_image: whether the decoded image is handed over; one to be cut into tiles always is.
        say_pixels: as for `preprocessing.read`.
    """
    loaded = load(index, path, loading, say_pixels)
    if isinstance(loaded, UnusableImage):
        return loaded
    handed = loaded.image if keep_image or isinstance(loaded.view, Tiling) else None
    return replace(loaded, image=handed, render=_elsewhere)


def _elsewhere(view: View) -> NDArray[np.float32]:
    raise ValueError(f"{view} is to be rendered where the image is")
