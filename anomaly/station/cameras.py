"""Cameras: list them, take single pictures, and reopen them after they were unplugged."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cv2

from anomaly.errors import DataError
from anomaly.files.writing import like
from anomaly.imaging.listing import list_images
from anomaly.station.aravis import Genicam, genicam_cameras
from anomaly.station.pictures import PICTURE_SECONDS, Camera, CameraError, Picture, as_file

log = logging.getLogger(__name__)

_LIMITS = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, 5000, cv2.CAP_PROP_READ_TIMEOUT_MSEC, 5000]
_FIRST_SECONDS, _LONGEST_SECONDS = (
    0.5,
    10.0,
)  # between tries to open it; each pause is twice the last
_CHECK_SECONDS = 0.5  # between checks of an idle camera
_BUSY_SECONDS = 4.0  # that a camera may stay busy after its last user was killed
_KINDS = "give usb:0, genicam:ID, rtsp://HOST/PATH, a video file or a folder of images"


Then = Callable[[Picture | CameraError], object]


def open_camera(source: str, features: Mapping[str, Any] | None = None) -> Camera:
    """Open the camera `usb:0`, `genicam:ID` or `rtsp://…`, a video file or a folder.

    Raises:
        CameraError: there is no such camera; names those that there are.
    """
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # errors are reported here
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    kind, _, name = source.partition(":")
    if kind == "genicam":
        return Genicam(name, features or {})
    if features:
        raise CameraError("only a camera genicam:ID takes features")
    if kind == "usb" and name.isdecimal():
        return Stream(cv2.VideoCapture(int(name)), source)
    if kind in ("rtsp", "rtsps", "http", "https"):
        # Messages mustn't hold the user and password of an address.
        shown = f"{kind}://{urlsplit(source).netloc.rpartition('@')[2]}"
        return Stream(cv2.VideoCapture(source, cv2.CAP_FFMPEG, _LIMITS), shown)
    if Path(source).exists():
        return Recorded(Path(source))
    raise CameraError(f"there is no camera, folder or file {source}{like(Path(source))}; {_KINDS}")


def present() -> dict[str, str]:
    """Descriptions of cameras of this machine and its network, by source."""
    names = sorted(Path("/sys/class/video4linux").glob("video*/name"))
    usb = {f"usb:{file.parent.name[5:]}": file.read_text("utf-8").strip() for file in names}
    return usb | genicam_cameras()


class Stream(Camera):
    """A USB or network camera, which sends pictures all the time."""

    def __init__(self, capture: cv2.VideoCapture, name: str) -> None:
        if not capture.isOpened():
            there = ", ".join(f"{source} ({text})" for source, text in present().items())
            raise CameraError(f"{name} can't be opened; other cameras: {there or 'none'}")
        self._name, self._capture = name, capture
        self._frames, self._ended = 0, False
        self._pixels: Any = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name=f"read {name}", daemon=True)
        self._thread.start()

    def grab(self) -> Picture:
        """The second next picture, since the next may have begun too early."""
        with self._changed:
            wanted = self._frames + 2
            self._changed.wait_for(lambda: self._ended or self._frames >= wanted, PICTURE_SECONDS)
            if self._ended or self._frames < wanted:
                raise CameraError(f"{self._name} has sent no picture within {PICTURE_SECONDS:g} s")
            return as_file(self._pixels), ""

    def check(self) -> None:
        """Raises CameraError if the camera has stopped sending pictures."""
        if self._ended:
            raise CameraError(f"{self._name} has stopped sending pictures")

    def close(self) -> None:
        """Close the camera for other programs."""
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


class Recorded(Camera):
    """A folder's images or a video's frames in order, repeated from the first."""

    def __init__(self, path: Path) -> None:
        self._path, self._pictures = path, self._read()

    def grab(self) -> Picture:
        """The next file or frame."""
        try:
            for _ in range(2):
                for picture in self._pictures:
                    return picture
                self._pictures = self._read()
        except (OSError, DataError) as error:
            raise CameraError(f"{self._path} can't be read: {error}") from None
        raise CameraError(f"{self._path} has no pictures that can be read; {_KINDS}")

    def check(self) -> None:
        """Raises CameraError if the file or folder is gone."""
        if not self._path.exists():
            raise CameraError(f"{self._path} is gone")

    def _read(self) -> Iterator[Picture]:
        if self._path.is_dir():
            yield from ((file.read_bytes(), file.name) for file in list_images(self._path))
        else:
            capture = cv2.VideoCapture(str(self._path))
            while (read := capture.read())[0]:
                yield as_file(read[1]), ""


class CameraThread:
    """A camera in a thread, which opens it again after it was gone.

    Args:
        name: of the camera in the station.
        reopen: opens it.

    Attributes:
        wanted: the pictures to take: the deadline by `time.perf_counter`, after which a picture
            would show the next part, and the function to call with the picture or the error. None
            ends the thread.
        trouble: why the camera takes no pictures; empty if it does.
    """

    def __init__(self, name: str, reopen: Callable[[], Camera]) -> None:
        self.name, self.trouble, self._reopen = name, "", reopen
        self.wanted: queue.SimpleQueue[tuple[float | None, Then] | None] = queue.SimpleQueue()
        self._camera: Camera | None = None
        self._pause, self._next_try = _FIRST_SECONDS, 0.0

    def first(self) -> Picture:
        """Take a picture at the start. Raises CameraError if none comes."""
        end = time.perf_counter() + _BUSY_SECONDS
        while True:
            camera = self._open()
            try:
                return camera.grab()
            except CameraError as error:
                self._fail(error)
                if time.perf_counter() > end:
                    raise
                time.sleep(_BUSY_SECONDS / 2)

    def work(self) -> None:
        """Take the wanted pictures, and check the camera between them."""
        while True:
            try:
                wanted = self.wanted.get(timeout=_CHECK_SECONDS)
            except queue.Empty:
                wanted = None, lambda _: None
            if wanted is None:
                break
            deadline, then = wanted
            try:
                then(self._take(deadline))
            except CameraError as error:
                self._fail(error)
                then(error)
        if self._camera is not None:
            self._camera.close()

    def _take(self, deadline: float | None) -> Picture | CameraError:
        camera = self._open()
        if deadline is None:
            camera.check()
        elif time.perf_counter() < deadline:
            return camera.grab()
        return CameraError("the camera was busy until the deadline")

    def _open(self) -> Camera:
        if self._camera is None:
            if time.perf_counter() < self._next_try:
                raise CameraError(self.trouble)
            self._camera = self._reopen()
            if self.trouble:
                log.warning("camera %s is connected again", self.name)
            self.trouble, self._pause = "", _FIRST_SECONDS
        return self._camera

    def _fail(self, error: CameraError) -> None:
        if not self.trouble:
            log.error("camera %s: %s; trying to open it again", self.name, error)
        self.trouble = str(error)
        if self._camera is not None:
            self._camera.close()
            self._camera = None
        if time.perf_counter() >= self._next_try:
            self._next_try = time.perf_counter() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_SECONDS)
