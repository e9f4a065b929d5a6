"""Cameras: list them, take single pictures, and reopen them after they were unplugged.

GenICam cameras (GigE Vision, USB3 Vision) are read through the Aravis library, which is called as
the system installs it (Debian: `libaravis-0.8-0`), without Python bindings: the system's belong to
its own Python, which is rarely that of an environment.
"""

from __future__ import annotations

import ctypes.util
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.errors import AnomalyError, DataError
from anomaly.files.writing import like
from anomaly.imaging.listing import list_images

log = logging.getLogger(__name__)

PICTURE_SECONDS = 2.0  # longest wait for a picture
_LIMITS = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, 5000, cv2.CAP_PROP_READ_TIMEOUT_MSEC, 5000]
_FIRST_SECONDS, _LONGEST_SECONDS = (
    0.5,
    10.0,
)  # between tries to open it; each pause is twice the last
_CHECK_SECONDS = 0.5  # between checks of an idle camera
_BUSY_SECONDS = 4.0  # that a camera may stay busy after its last user was killed
_KINDS = "give usb:0, genicam:ID, rtsp://HOST/PATH, a video file or a folder of images"
_BUFFERS = 4
_WHAT = ("id", "vendor", "model", "address")
_BAYER = (cv2.COLOR_BayerGRBG2BGR, cv2.COLOR_BayerRGGB2BGR, cv2.COLOR_BayerGBRG2BGR)
# How values become BGR, by the codes of pixel formats (GenICam's PFNC).
_COLOURS: dict[int, int | None] = {
    **dict.fromkeys((0x01080001, 0x01100003, 0x01100005, 0x01100007)),  # Mono8, 10, 12, 16
    **dict(zip(range(0x01080008, 0x0108000C), (*_BAYER, cv2.COLOR_BayerBGGR2BGR), strict=True)),
    0x02180014: cv2.COLOR_RGB2BGR,
}


class CameraError(AnomalyError):
    """A camera gives no picture."""


Picture = tuple[bytes, str]  # an image file, and its name, which is empty for a camera's
Then = Callable[[Picture | CameraError], object]


class Camera:
    """Takes pictures; used by one thread."""

    def grab(self) -> Picture:
        """Take a picture that begins after this call. Raises CameraError if none comes."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises CameraError if the camera is gone."""

    def close(self) -> None:
        """Close the camera for other programs."""


def as_file(pixels: NDArray[Any]) -> bytes:
    """Pixels (H, W) or (H, W, 3) BGR as an image file, uncompressed: that takes a millisecond."""
    plain = [] if pixels.dtype == np.uint8 else [cv2.IMWRITE_TIFF_COMPRESSION, 1]
    return cv2.imencode(".tiff" if plain else ".bmp", pixels, plain)[1].tobytes()


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


class _GError(ctypes.Structure):
    _fields_ = (("domain", ctypes.c_uint32), ("code", c_int), ("message", c_char_p))


@cache
def _library() -> Any:
    name = ctypes.util.find_library("aravis-0.8")
    return ctypes.CDLL(name) if name else None


def _call(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(_library(), name)
    function.restype = result
    return function(*arguments)


def genicam_cameras() -> dict[str, str]:
    """Descriptions of answering cameras, by source; empty without the library."""
    if _library() is None:
        return {}
    _call("arv_update_device_list", None)  # takes a second
    devices = map(c_uint, range(_call("arv_get_n_devices", c_uint)))
    words = [[_about(device, what) for what in _WHAT] for device in devices]
    return {f"genicam:{name}": " ".join(about) for name, *about in words}


def _about(device: c_uint, what: str) -> str:
    return (_call(f"arv_get_device_{what}", c_char_p, device) or b"").decode()


class Genicam(Camera):
    """A camera that is triggered by software for each picture.

    Args:
        name: the camera's id or address.
        features: values to set first.
    """

    def __init__(self, name: str, features: Mapping[str, Any]) -> None:
        self._name, self._stream = f"genicam:{name}", c_void_p()
        if _library() is None:
            raise CameraError(f"{self._name} needs Aravis: apt-get install libaravis-0.8-0")
        there = genicam_cameras()  # the library opens only cameras that it has listed
        if self._name not in there and not name.replace(".", "").isdecimal():
            raise CameraError(
                f"{self._name} doesn't answer; cameras that answer: {', '.join(there) or 'none'}"
            )
        self._camera = c_void_p(self._try("arv_camera_new", c_void_p, name.encode()))
        self._device = c_void_p(_call("arv_camera_get_device", c_void_p, self._camera))
        try:
            self._start(features)
        except BaseException:
            self.close()
            raise

    def _start(self, features: Mapping[str, Any]) -> None:
        for key, value in features.items():
            text = f"{key}={value}".encode()
            self._try("arv_device_set_features_from_string", c_int, self._device, text)
        self._try("arv_camera_set_trigger", None, self._camera, b"Software")
        self._try("arv_camera_set_acquisition_mode", None, self._camera, c_int(0))  # continuous
        size = c_size_t(self._try("arv_camera_get_payload", c_uint, self._camera))
        stream = self._try("arv_camera_create_stream", c_void_p, self._camera, None, None)
        self._stream = c_void_p(stream)
        for _ in range(_BUFFERS):
            self._give_back(_call("arv_buffer_new_allocate", c_void_p, size))
        self._try("arv_camera_start_acquisition", None, self._camera)

    def grab(self) -> Picture:
        """Take a picture now."""
        while late := _call("arv_stream_try_pop_buffer", c_void_p, self._stream):
            self._give_back(late)
        self._try("arv_camera_software_trigger", None, self._camera)
        wait = c_uint64(round(PICTURE_SECONDS * 1e6))
        buffer = _call("arv_stream_timeout_pop_buffer", c_void_p, self._stream, wait)
        if not buffer:
            raise CameraError(f"{self._name} has sent no picture within {PICTURE_SECONDS:g} s")
        try:
            return as_file(self._pixels(c_void_p(buffer))), ""
        finally:
            self._give_back(buffer)

    def check(self) -> None:
        """Raises CameraError if the camera doesn't answer; reads its first register."""
        value = byref(c_uint())
        self._try("arv_device_read_register", c_int, self._device, c_uint64(0), value)

    def close(self) -> None:
        """Close the camera for other programs."""
        for thing in filter(None, (self._stream, self._camera)):
            _call("g_object_unref", None, thing)

    def _give_back(self, buffer: int) -> None:
        _call("arv_stream_push_buffer", None, self._stream, c_void_p(buffer))

    def _try(self, name: str, result: Any, *arguments: Any) -> Any:
        """Call a function whose last argument receives an error."""
        error = ctypes.POINTER(_GError)()
        value = _call(name, result, *arguments, byref(error))
        if error:
            message = (error.contents.message or b"").decode(errors="replace")
            raise CameraError(f"{self._name}: {message}")
        return value

    def _pixels(self, buffer: c_void_p) -> NDArray[Any]:
        """(H, W) or (H, W, 3) BGR, a copy."""
        if status := _call("arv_buffer_get_status", c_int, buffer):
            raise CameraError(f"{self._name}: lost packets (status {status}); check its network")
        code, width, height = (
            _call(f"arv_buffer_get_image_{what}", c_int, buffer)
            for what in ("pixel_format", "width", "height")
        )
        if code not in _COLOURS:
            raise CameraError(
                f"{self._name}: pixel format {code:#x}; set features.PixelFormat: Mono8"
            )
        there, colour = c_size_t(), _COLOURS[code]
        place = _call("arv_buffer_get_data", c_void_p, buffer, byref(there))
        data = ctypes.string_at(place, there.value)
        kind = np.uint16 if code >> 16 == 0x0110 else np.uint8
        shape = (height, width, 3) if colour == cv2.COLOR_RGB2BGR else (height, width)
        values = np.frombuffer(data, kind, math.prod(shape)).reshape(shape)
        return values if colour is None else cv2.cvtColor(values, colour)


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
