"""Cameras: what is there, one picture at a time, and again after they were unplugged."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.errors import AnomalyError, DataError, why
from anomaly.files.writing import like
from anomaly.imaging.listing import list_images

log = logging.getLogger(__name__)

PICTURE_SECONDS = 2.0  # that a picture may take
_OPEN_MILLISECONDS = 5000
_FIRST_SECONDS, _LONGEST_SECONDS = 0.5, 10.0  # between tries to open it; each twice the last one
_CHECK_SECONDS = 0.5  # between two looks at a camera that nobody wants a picture of
_KINDS = "give usb:0, genicam:ID, rtsp://HOST/PATH, a video file or a folder of images"


class CameraError(AnomalyError):
    """A camera gives no picture."""


@dataclass(frozen=True)
class Frame:
    """A picture.

    Attributes:
        data: an image file's bytes; a camera's pixels as they are, without loss.
        file: the file's name; empty for a camera's.
    """

    data: bytes
    file: str = ""


class Camera:
    """Takes pictures; used by one thread."""

    def grab(self) -> Frame:
        """The next picture, begun after this was called; a CameraError where none comes."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise a CameraError where it is gone."""

    def close(self) -> None:
        """Let others use it."""


def open_camera(source: str, features: Mapping[str, Any] | None = None) -> Camera:
    """The camera that is meant by `usb:0`, `genicam:ID`, `rtsp://…`, a video file or a folder.

    Raises:
        CameraError: it isn't there; says what is.
    """
    kind, _, name = source.partition(":")
    if kind == "genicam":
        from anomaly.station.aravis import Genicam  # which builds on this module

        return Genicam(name, features or {})
    if features:
        raise CameraError(f"{shown(source)} has no features; only genicam:ID has")
    if kind == "usb" and name.isdecimal():
        return Stream(cv2.VideoCapture(int(name)), source)
    if kind in ("rtsp", "rtsps", "http", "https"):
        limits = (cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, cv2.CAP_PROP_READ_TIMEOUT_MSEC)
        waits = [value for limit in limits for value in (limit, _OPEN_MILLISECONDS)]
        return Stream(cv2.VideoCapture(source, cv2.CAP_FFMPEG, waits), shown(source))
    if Path(source).is_dir():
        return Folder(Path(source))
    if Path(source).is_file():
        return Video(Path(source))
    raise CameraError(f"there is no camera, folder or file {source}{like(Path(source))}; {_KINDS}")


def shown(source: str) -> str:
    """What messages call a camera: without the user and the password of an address."""
    parts = urlsplit(source)
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return address if "://" in source else source


def present() -> dict[str, str]:
    """What each camera is that this machine has or sees on its network, by its source."""
    from anomaly.station import aravis  # which builds on this module

    names = sorted(Path("/sys/class/video4linux").glob("video*/name"))
    usb = {f"usb:{file.parent.name[5:]}": file.read_text("utf-8").strip() for file in names}
    return usb | aravis.present()


def as_file(pixels: NDArray[Any]) -> bytes:
    """Pixels (H, W) or (H, W, 3) BGR as an image file, uncompressed: that takes a millisecond."""
    kind, how = (".bmp", []) if pixels.dtype == np.uint8 else (".tiff", [_PLAIN_TIFF, 1])
    return cv2.imencode(kind, np.ascontiguousarray(pixels), how)[1].tobytes()


_PLAIN_TIFF = cv2.IMWRITE_TIFF_COMPRESSION


class Stream(Camera):
    """A USB or network camera, which sends pictures all the time, wanted or not."""

    def __init__(self, capture: cv2.VideoCapture, name: str) -> None:
        if not capture.isOpened():
            there = ", ".join(f"{source} ({text})" for source, text in present().items())
            raise CameraError(f"{name} can't be opened; connected are: {there or 'no cameras'}")
        self._name, self._capture = name, capture
        self._frames, self._ended = 0, False
        self._pixels: Any = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name=f"read {name}", daemon=True)
        self._thread.start()

    def grab(self) -> Frame:
        """The second picture to come: the first one may have been begun too early."""
        with self._changed:
            wanted = self._frames + 2
            self._changed.wait_for(lambda: self._ended or self._frames >= wanted, PICTURE_SECONDS)
            if self._ended or self._frames < wanted:
                raise CameraError(f"{self._name} has sent no picture within {PICTURE_SECONDS:g} s")
            return Frame(as_file(self._pixels))

    def check(self) -> None:
        """Raise a CameraError where it sends none any more."""
        if self._ended:
            raise CameraError(f"{self._name} sends no pictures any more")

    def close(self) -> None:
        """Let others use it."""
        self._ended = True
        self._thread.join(PICTURE_SECONDS)

    def _read(self) -> None:
        while not self._ended:
            good, pixels = self._capture.read()
            with self._changed:
                self._frames, self._pixels = self._frames + 1, pixels
                self._ended |= not good
                self._changed.notify_all()
        self._capture.release()


class Video(Camera):
    """A video file: its frames in turn, and again from the first one."""

    def __init__(self, file: Path) -> None:
        self._file, self._place = file, 0
        self._capture = cv2.VideoCapture(str(file))
        if not self._capture.isOpened():
            raise CameraError(f"{file} can't be read as a video; {_KINDS}")

    def grab(self) -> Frame:
        """The next frame."""
        good, pixels = self._capture.read()
        if not good:
            self._place = 0
            self._capture.set(cv2.CAP_PROP_POS_FRAMES, 0)
            good, pixels = self._capture.read()
        if not good:
            raise CameraError(f"{self._file} has no frames that can be read")
        self._place += 1
        return Frame(as_file(pixels), f"{self._file.name}:{self._place}")

    def close(self) -> None:
        """Close the file."""
        self._capture.release()


class Folder(Camera):
    """A folder of images: its files in turn, and again from the first one."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._place = folder, 0
        try:
            self._files = list_images(folder)
        except DataError as error:
            raise CameraError(str(error)) from None
        if not self._files:
            raise CameraError(f"there are no images in {folder}")

    def grab(self) -> Frame:
        """The next file."""
        file = self._files[self._place % len(self._files)]
        self._place += 1
        try:
            return Frame(file.read_bytes(), file.name)
        except OSError as error:
            raise CameraError(f"{file} can't be read: {why(error)}") from None

    def check(self) -> None:
        """Raise a CameraError where the folder is gone."""
        if not self._folder.is_dir():
            raise CameraError(f"there is no folder {self._folder} any more")


class CameraThread:
    """A camera in a thread of its own, which opens it again when it was gone.

    Args:
        name: of the camera in the station.
        open_it: opens it.

    Attributes:
        trouble: why it takes no pictures; empty while it does.
    """

    def __init__(self, name: str, open_it: Callable[[], Camera]) -> None:
        self.name, self.trouble = name, ""
        self._open_it = open_it
        self._wanted: queue.SimpleQueue[_Wanted | None] = queue.SimpleQueue()
        self._camera: Camera | None = None
        self._pause, self._next_try = _FIRST_SECONDS, 0.0

    def take(self, deadline: float, then: Callable[[Frame | CameraError], object]) -> None:
        """Have a picture taken.

        Args:
            deadline: by `time.perf_counter`; a later picture would show the next part.
            then: called with the picture, or with why there is none.
        """
        self._wanted.put((deadline, then))

    def end(self) -> None:
        """Take no more pictures."""
        self._wanted.put(None)

    def open(self) -> Camera:
        """The camera, opened if need be.

        Raises:
            CameraError: it isn't there, or it isn't time to try again.
        """
        if self._camera is None:
            if time.perf_counter() < self._next_try:
                raise CameraError(self.trouble)
            self._camera = self._open_it()
            if self.trouble:
                log.warning("camera %s is there again", self.name)
            self.trouble, self._pause = "", _FIRST_SECONDS
        return self._camera

    def work(self) -> None:
        """Take pictures until `end` is called."""
        while True:
            wanted: _Wanted | None = (float("inf"), lambda picture: None)
            idle = True
            with suppress(queue.Empty):
                wanted, idle = self._wanted.get(timeout=_CHECK_SECONDS), False
            if wanted is None:
                break
            self._answer(*wanted, idle=idle)
        if self._camera is not None:
            self._camera.close()

    def _answer(
        self, deadline: float, then: Callable[[Frame | CameraError], object], *, idle: bool
    ) -> None:
        try:
            camera = self.open()
            if idle:
                camera.check()
            elif time.perf_counter() > deadline:
                then(CameraError("the camera was busy until the deadline"))
            else:
                then(camera.grab())
        except CameraError as error:
            self._fail(error)
            then(error)

    def _fail(self, error: CameraError) -> None:
        if not self.trouble:
            log.error("camera %s: %s; it is opened again as soon as it is there", self.name, error)
        self.trouble = str(error)
        if self._camera is not None:
            self._camera.close()
            self._camera = None
        if time.perf_counter() >= self._next_try:
            self._next_try = time.perf_counter() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_SECONDS)


_Wanted = tuple[float, Callable[[Frame | CameraError], object]]
