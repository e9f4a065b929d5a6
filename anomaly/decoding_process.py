"""What a decoding process does: the other end of `anomaly.decoding`. Imports no torch.

A process keeps the images that it has decoded, within `_KEPT_BYTES`, so that the anomaly map can
be laid over them later; those that didn't fit it reads again.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from anomaly.errors import ImageError, OutputError
from anomaly.geometry import View
from anomaly.images import Image
from anomaly.loading import Loaded, Loading, Refused, load, paint, refusal
from anomaly.marked import MarkedRegion
from anomaly.pictures import PLAIN, Pictures, Shown
from anomaly.source_map import SourceMap

_KEPT_BYTES = 256 * 1024**2


@dataclass(frozen=True)
class Task:
    """What the processes have to know once.

    Attributes:
        loading: how files become network inputs.
        pictures: what to write for each image.
    """

    loading: Loading
    pictures: Pictures


def send(stream: IO[bytes] | None, message: object) -> None:
    """Hand a message to the other end of a pipe."""
    assert stream is not None
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def receive(stream: IO[bytes] | None) -> Any:
    """Wait for the next message from the other end of a pipe; EOFError when it has gone."""
    assert stream is not None
    return pickle.load(stream)  # from our own child


def serve() -> None:
    """What a decoding process does until its standard input ends."""
    import cv2

    cv2.setNumThreads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it is over
    requests = sys.stdin.buffer
    # Whatever a library may print mustn't get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    server: _Server | None = None
    with suppress(EOFError, BrokenPipeError):
        while True:
            name, *arguments = receive(requests)
            try:
                if name == "begin":
                    server = _Server(*arguments)
                    send(answers, ("done", True))
                else:
                    send(answers, ("done", getattr(server, name)(*arguments)))
            except BrokenPipeError:
                raise
            except Exception as error:  # of no image alone: a full disk, a mistake of ours
                send(answers, ("error", error))


class _Server:
    """What a process does when it is asked."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._kept: OrderedDict[int, Image] = OrderedDict()

    def load(self, index: int, path: Path) -> Loaded | Refused:
        loaded = load(index, path, self._task.loading)
        if isinstance(loaded, Refused):
            return loaded
        self._keep(index, loaded.decoded)
        return replace(loaded, image=None, render=_elsewhere)

    def render(self, index: int, path: Path, view: View) -> NDArray[np.float32] | Refused:
        image = self._image(index, path)
        if isinstance(image, Refused):
            return image
        self._keep(index, image)
        try:
            return paint(path, image, view)
        except ImageError as error:
            return refusal(index, path, error)

    def finish(
        self, index: int, path: Path, found: SourceMap, name: str, shown: Shown = PLAIN
    ) -> tuple[MarkedRegion, ...] | Refused:
        image = self._image(index, path)
        if isinstance(image, Refused):
            return image
        try:
            return self._task.pictures.write(image, found, name, shown)
        except OutputError:  # of every image to come, too
            raise
        except Exception as error:
            return refusal(index, path, error)

    def _keep(self, index: int, image: Image) -> None:
        self._kept[index] = image
        held = sum(kept.pixels.nbytes for kept in self._kept.values())
        while held > _KEPT_BYTES and len(self._kept) > 1:
            held -= self._kept.popitem(last=False)[1].pixels.nbytes

    def _image(self, index: int, path: Path) -> Image | Refused:
        if index in self._kept:
            return self._kept.pop(index)
        loaded = load(index, path, self._task.loading)
        return loaded if isinstance(loaded, Refused) else loaded.decoded


def _elsewhere(view: View) -> NDArray[np.float32]:
    raise ValueError(f"{view} is to be rendered where the image is")
