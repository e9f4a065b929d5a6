"""What a decoding process does: the other end of `anomaly.imaging.decoder_pool`. Imports no torch.

Nobody knows what a parser does with a damaged file. So a process limits itself: the kernel refuses
it memory beyond the limit, and ends it when a request's computing time is over. Only computing
counts, so that neither a slow network folder nor a busy machine ends it.

A process keeps the images that it has decoded, within `_KEPT_BYTES`, where they are to be drawn;
those that didn't fit it reads again. It ends with the one that has started it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.errors import OutputError
from anomaly.imaging import read
from anomaly.imaging.geometry import Tiling, View
from anomaly.imaging.loading import (
    NetworkInput,
    Preprocessing,
    UnusableImage,
    load,
    to_unusable,
)
from anomaly.imaging.read import Image, described

if sys.platform != "win32":
    import resource

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
        looks: whether what each image looks like is told.
    """

    loading: Preprocessing
    pictures: Drawing | None = None
    keep_image: bool = False
    looks: bool = False


def send(stream: IO[bytes] | None, message: object) -> None:
    """Hand a message to the other end of a pipe."""
    assert stream is not None
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def receive(stream: IO[bytes] | None) -> Any:
    """Wait for the next message from the other end of a pipe; EOFError when it has gone."""
    assert stream is not None
    return pickle.load(stream)  # from our own child


def serve(parent: int, memory: int) -> None:
    """What a decoding process does until its standard input ends.

    Args:
        parent: id of the process that has started it.
        memory: bytes that it may take.
    """
    _end_with(parent)
    cv2.setNumThreads(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when it is over
    if sys.platform != "win32":
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
    # Whatever a library may print mustn't get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    worker = Worker(None)
    _limit_memory(memory)
    with suppress(BrokenPipeError, EOFError):
        while True:
            task, name, arguments = receive(sys.stdin.buffer)
            if task is not None:
                worker = Worker(task)
            _limit_time(read.COMPUTING_SECONDS)
            # Nothing here holds the answer, or an error and all that its frames hold, any longer.
            send(answers, _answer(worker, name, arguments))
            del task, arguments


def _answer(worker: Worker, name: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    """Whether a request was done, and what it returns or the error that it raises."""
    try:
        return True, getattr(worker, name)(*arguments)
    except BrokenPipeError:
        raise
    except Exception as error:  # of no image alone: a full disk, a mistake of ours
        return False, error


def _end_with(parent: int) -> None:
    """Have the system end this process with the thread that has started it, where it can."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.name == "posix" and os.getppid() != parent:
        os._exit(1)


def _limit_memory(memory: int) -> None:
    """Let this process take so many bytes."""
    if sys.platform != "win32":
        # Not RLIMIT_AS, which counts the libraries' files, too, and room that is only reserved.
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or memory < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))


def _limit_time(seconds: float) -> None:
    """Let this process compute for so many seconds from now on; 0 for any.

    A large image gets more, see `read.read_image`.
    """
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


class Worker:
    """What a process does when it is asked; each public method is a request.

    Args:
        task: what it has to know; None where it only calls functions.
    """

    def __init__(self, task: Task | None) -> None:
        self._task = task
        self._kept: OrderedDict[int, Image] = OrderedDict()

    @property
    def task(self) -> Task:
        """What it has to know."""
        assert self._task is not None
        return self._task

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """What a function returns that needs none of the images that are kept."""
        return function(*arguments)

    def load(self, index: int, source: Path | bytes) -> NetworkInput | UnusableImage:
        """Load an image; it is kept to be drawn, and handed over to be cut into tiles."""
        loaded = self._load(index, source)
        if isinstance(loaded, UnusableImage):
            return loaded
        if self.task.pictures is not None:
            self._keep(index, loaded.decoded)
        handed = self.task.keep_image or isinstance(loaded.view, Tiling)
        return replace(loaded, image=loaded.image if handed else None, render=_elsewhere)

    def finish(self, index: int, source: Path | bytes, *what: Any) -> Any:
        """Draw an image, which is forgotten then."""
        assert self.task.pictures is not None
        image = self._kept.pop(index, None)
        if image is None:
            loaded = self._load(index, source)
            if isinstance(loaded, UnusableImage):
                return loaded
            image = loaded.decoded
        _limit_time(0)  # drawing follows no file's orders
        try:
            try:
                return self.task.pictures.write(image, *what)
            except (MemoryError, cv2.error):
                if not self._kept:
                    raise
                self._kept.clear()  # they may take the memory that this one needs
                return self.task.pictures.write(image, *what)
        except OutputError:  # of every image to come, too
            raise
        except Exception as error:
            return to_unusable(index, name_of(index, source), error)

    def _load(self, index: int, source: Path | bytes) -> NetworkInput | UnusableImage:
        loaded = load(index, source, self.task.loading, looks=self.task.looks)
        if isinstance(loaded, UnusableImage) and loaded.status == "unsupported" and self._kept:
            self._kept.clear()  # they may take the memory that this one needs
            loaded = load(index, source, self.task.loading, looks=self.task.looks)
        return loaded

    def _keep(self, index: int, image: Image) -> None:
        self._kept[index] = image
        held = sum(kept.pixels.nbytes for kept in self._kept.values())
        while held > _KEPT_BYTES and len(self._kept) > 1:
            held -= self._kept.popitem(last=False)[1].pixels.nbytes


def name_of(index: int, source: Path | bytes) -> str:
    """What messages call an image: its path, or its place where its bytes came from memory."""
    return described(index, source if isinstance(source, Path) else None)


def _elsewhere(view: View) -> NDArray[np.float32]:
    raise ValueError(f"{view} can't be rendered: the image was decoded in another process")
