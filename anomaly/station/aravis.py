"""GenICam cameras (GigE Vision, USB3 Vision) through the Aravis library.

The library is called as the system installs it (Debian: `libaravis-0.8-0`), without Python
bindings: the system's belong to its own Python, which is rarely that of an environment.
"""

from __future__ import annotations

import ctypes.util
import math
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from anomaly.station.pictures import PICTURE_SECONDS, Camera, CameraError, Picture, as_file

_BUFFERS = 4
_WHAT = ("id", "vendor", "model", "address")
_BAYER = (cv2.COLOR_BayerGRBG2BGR, cv2.COLOR_BayerRGGB2BGR, cv2.COLOR_BayerGBRG2BGR)
# How values become BGR, by the codes of pixel formats (GenICam's PFNC).
_COLOURS: dict[int, int | None] = {
    **dict.fromkeys((0x01080001, 0x01100003, 0x01100005, 0x01100007)),  # Mono8, 10, 12, 16
    **dict(zip(range(0x01080008, 0x0108000C), (*_BAYER, cv2.COLOR_BayerBGGR2BGR), strict=True)),
    0x02180014: cv2.COLOR_RGB2BGR,
}


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
